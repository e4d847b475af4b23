// The warp that streams: what it fetches, and in which order.

struct Stream {
    Ring ring;
    bool first;
    int flying;  // units on their way at most: what the blocks publish arrives later while memory is busy

    DEVICE Stream(Ring r) : ring(r), first(true), flying(MANY) {}

    // Each lane copies `bytes` or none; `all`: what the warp copies.
    DEVICE void unit(const void* from, int to, int bytes, int all) {
        if (!first) await(&ring.empty[ring.slot], ring.phase ^ 1);
        if (!first || ring.slot >= flying) {
            int before = ring.slot - flying;
            await(&ring.full[before < 0 ? before + STAGES : before], before < 0 ? ring.phase ^ 1 : ring.phase);
        }
        if (LANE == 0) expect(&ring.full[ring.slot], all);
        meet_warp();
        if (bytes) fetch(ring.units + ring.slot * UNIT + to, from, bytes, &ring.full[ring.slot]);
        ring.step();
        if (ring.slot == 0) first = false;
    }

    // Rows [begin, begin + n) of w (.., columns): tiles chunk by chunk, each of one unit or two. apart: a tile is eight rows of
    // the gate and the same of the up projection, so many rows further; else 16 rows. With int4 lanes 16 and 17 copy the
    // scales of eight rows each, of all chunks: a copy is of 16 bytes at least, and takes its time however short it is.
    DEVICE void rows(const Matrix& w, int columns, int begin, int n, int apart) {
        long long stride = (long long)columns * BITS / 8;
        int scales = columns / GROUP * 2;
        bool scale = BITS == 4 && LANE >= 16;
        int first = scale ? (LANE - 16) * 8 : LANE, to = scale ? GROUPS_AT + first * scales : LANE * PITCH;  // of this lane
        for (int r = 0; r < n; r += apart ? 8 : 16)
            for (int c = 0; c < stride; c += ROW)
                for (int u = 0; u < 16 / HIGH; u++) {
                    int row = first + u * HIGH, left = n - r - (apart ? row % 8 : row);
                    int all = apart ? (n - r < 8 ? n - r : 8) * (HIGH / 8) : n - r - u * HIGH;
                    long long at = begin + r + (apart ? row / 8 * (long long)apart + row % 8 : row);
                    const byte* from = scale ? (const byte*)w.scale + at * scales : w.w + at * stride + c;
                    int bytes = first >= HIGH || left <= 0 ? 0 : scale ? (left < 8 ? left : 8) * scales : ROW;
                    if (all > 0) unit(from, to, bytes, (all < HIGH ? all : HIGH) * (BITS == 4 ? ROW + scales : ROW));
                }
    }

    // A unit of keys, then one of their values.
    DEVICE void keys(const bf16* k, const bf16* v, int n) {
        for (int at = 0; at < n; at += KEYS) {
            int all = (n - at < KEYS ? n - at : KEYS) * KEY, bytes = LANE == 0 ? all : 0;
            unit(k + at * (long long)D, 0, bytes, all);
            unit(v + at * (long long)D, 0, bytes, all);
        }
    }
};

// What one block reads of the old keys.
struct Span {
    int splits, split, head, first, n;
    bool takes_part, newest;
    DEVICE Span(int old, int least) {
        splits = old <= least ? 1 : (old + KEYS - 1) / KEYS;
        int most = (splits + SPLITS - 1) / SPLITS < (splits + FREE - 1) / FREE ? SPLITS : FREE;  // more only if they read less
        splits = splits > most ? most : splits;
        int each = (old + splits - 1) / splits;
        each = each < 8 ? 8 : (each + 7) / 8 * 8;
        splits = old <= each ? 1 : (old + each - 1) / each;
        split = (int)BLOCK_ID / KV, head = (int)BLOCK_ID % KV;
        takes_part = split < splits, newest = split == splits - 1;
        first = split * each;
        n = !takes_part ? 0 : old - first < each ? old - first : each;
    }
};
