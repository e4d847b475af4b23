// The warp that streams: what it fetches, and in which order.

struct Stream {
    Ring ring;
    bool first;

    DEVICE Stream(Ring r) : ring(r), first(true) {}

    // More units on their way would not come faster, and what the blocks tell each other would wait behind them.
    DEVICE void unit(const bf16* from, int rows, long long stride, int bytes, int last, int pitch) {
        if (!first) await(&ring.empty[ring.slot], ring.phase ^ 1);
        if (!first || ring.slot >= FLYING) {
            int before = ring.slot - FLYING;
            await(&ring.full[before < 0 ? before + STAGES : before], before < 0 ? ring.phase ^ 1 : ring.phase);
        }
        if (LANE == 0) expect(&ring.full[ring.slot], (rows - 1) * bytes + last);
        meet_warp();
        if (LANE < rows)
            fetch(ring.units + ring.slot * UNIT + LANE * pitch, from + LANE * stride, LANE + 1 < rows ? bytes : last,
                  &ring.full[ring.slot]);
        ring.step();
        if (ring.slot == 0) first = false;
    }

    // Rows [begin, begin + n) of w (.., columns): tiles of two units, chunk by chunk. apart: a tile is eight rows of the gate
    // and the same of the up projection, so many rows further; else 16 rows.
    DEVICE void rows(const bf16* w, long long columns, int begin, int n, int apart) {
        for (int r = 0; r < n; r += apart ? 8 : 16)
            for (int c = 0; c < columns; c += CH)
                for (int u = 0; u < 2; u++) {
                    int at = apart ? r : r + 8 * u, left = n - at;
                    const bf16* from = w + (begin + at + u * (long long)apart) * columns + c;
                    if (left > 0) unit(from, left < 8 ? left : 8, columns, CH * 2, CH * 2, PITCH);
                }
    }

    // A unit of keys, then one of their values.
    DEVICE void keys(const bf16* k, const bf16* v, int n) {
        for (int at = 0; at < n; at += KEYS) {
            int here = n - at < KEYS ? n - at : KEYS, last = (here % 2 ? 1 : 2) * D * 2;
            unit(k + (long long)at * D, (here + 1) / 2, 2 * D, 2 * D * 2, last, PAIR);
            unit(v + (long long)at * D, (here + 1) / 2, 2 * D, 2 * D * 2, last, PAIR);
        }
    }
};

// What one block reads of the old keys.
struct Span {
    int splits, split, head, first, n;
    bool takes_part, newest;
    DEVICE Span(int old, int least) {
        splits = old <= least ? 1 : (old + KEYS - 1) / KEYS;
        splits = splits > SPLITS ? SPLITS : splits;
        int each = (old + splits - 1) / splits;
        each = each < 8 ? 8 : (each + 7) / 8 * 8;
        splits = old <= each ? 1 : (old + each - 1) / each;
        split = (int)BLOCK_ID / KV, head = (int)BLOCK_ID % KV;
        takes_part = split < splits, newest = split == splits - 1;
        first = split * each;
        n = !takes_part ? 0 : old - first < each ? old - first : each;
    }
};
