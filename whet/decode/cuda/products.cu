// Products of the warps that compute: weights from the ring, x from the words, sums through shared memory.

struct Products {
    const Args& a;
    unsigned char* base;
    Ring ring;
    int warp, lane, tid, turn;  // turn: which of two buffers of sums is written
    bool lost;
    const u64* heard;  // the copy of the words that this block reads

    DEVICE Products(const Args& a_, unsigned char* base_, Ring r)
        : a(a_), base(base_), ring(r), warp(WARP_ID), lane(LANE), tid(warp * 32 + lane), turn(0), lost(false),
          heard(a_.words + BLOCK_ID % COPIES * A_COPY) {}

    DEVICE bf16* x_of(int chunk) { return (bf16*)(base + S_X + warp * X_BYTES) + chunk * SLICE; }
    DEVICE float* sums(int row) { return (float*)(base + S_PART) + (turn * SUMS + row) * WARPS; }
    DEVICE float* squares() { return (float*)(base + S_SQUARE) + turn * WARPS; }
    DEVICE int place(int chunk) { return chunk * CH + warp * SLICE + lane * 4; }  // of the lane's four columns
    DEVICE int pair(int chunk) { return chunk * (CH / 2) + warp * (SLICE / 2) + lane * 2; }  // of the two words that hold them
    DEVICE const u64* words(int at) { return heard + at; }
    DEVICE void tell(int at, u32 value, u32 generation) {
        u64* to = anew(a.words);
#pragma unroll
        for (int i = 0; i < COPIES; i++) post(to + at + i * A_COPY, word(value, generation));
    }

    DEVICE float total(float x) {
#pragma unroll
        for (int m = 16; m; m >>= 1) x += swap(x, m);
        return x;
    }

    // In the order in which column() reads: for each lane of a quad the pairs of two steps of 16 columns.
    DEVICE void keep(int chunk, u32 one, u32 two) {
        u32* to = (u32*)x_of(chunk) + lane / 8 * 16 + lane % 2 * 8 + lane % 8 / 4 * 2 + lane % 4 / 2;
        to[0] = one, to[4] = two;
    }

    // x times the norm's weight, in two parts. Returns its squares' sum in this lane. x is heard, or comes from the embedding.
    DEVICE float norm_in(int at, u32 generation, const bf16* row, const Two (&w)[NK]) {
        float x[NK][4], square = 0;
        if (row) {
#pragma unroll
            for (int c = 0; c < NK; c++) {
                Two e = *(const Two*)(row + place(c));
                x[c][0] = low(e.x), x[c][1] = high(e.x), x[c][2] = low(e.y), x[c][3] = high(e.y);
            }
        } else {
            u64 v[2 * NK][2];
            const u64* from[2 * NK];
#pragma unroll
            for (int c = 0; c < NK; c++) from[2 * c] = words(at + place(c)), from[2 * c + 1] = from[2 * c] + 2;
            hear(v, from, generation, 2 * NK, a, lost);
#pragma unroll
            for (int i = 0; i < 4 * NK; i++) x[i / 4][i % 4] = value(v[i / 2][i % 2]);
        }
#pragma unroll
        for (int c = 0; c < NK; c++) {
            float y[4] = {x[c][0] * low(w[c].x), x[c][1] * high(w[c].x), x[c][2] * low(w[c].y), x[c][3] * high(w[c].y)};
            u32 one = rounded(y[0], y[1]), two = rounded(y[2], y[3]);
            keep(c, one, two);
            keep(NX + c, rounded(y[0] - low(one), y[1] - high(one)), rounded(y[2] - low(two), y[3] - high(two)));
#pragma unroll
            for (int i = 0; i < 4; i++) square += x[c][i] * x[c][i];
        }
        meet_warp();
        return square;
    }

    DEVICE const unsigned char* unit() {
        await(&ring.full[ring.slot], ring.phase);
        return ring.units + ring.slot * UNIT;
    }
    DEVICE void release(int units) {
        done_reading();
        meet_warp();
        for (int i = 0; i < units; i++) {
            if (lane == 0) arrive(&ring.empty[ring.slot]);
            ring.step();
        }
    }

    // A stage's product: tiles of 16 rows, each as two units, where a block has more than 8 rows or PAIRS of them; else one
    // tile of 8 rows, whose upper half is the second half of the warp's slice. ROWS: of all blocks, in steps of BY.
    template <int CHUNKS_, int ROWS, int BY, bool PAIRS, bool REST_>
    struct Stage {
        static constexpr int CHUNKS = CHUNKS_, LEAST = ROWS / BY / P * BY, MOST = (ROWS / BY + P - 1) / P * BY;
        static constexpr bool REST = REST_, TWO = PAIRS || REST_ || MOST > 8;  // REST: x has a second part
        static constexpr int STEPS = TWO ? 8 : 4, TOGETHER = PAIRS ? SUMS / 2 : SUMS;
        static constexpr int ALL = PAIRS ? (MOST + 7) / 8 : (MOST + 15) / 16, FIT = 4 / CHUNKS;
        static constexpr int N = !TWO ? (CHUNKS <= 6) : ALL < FIT ? ALL : FIT;  // tiles held in registers
        static constexpr bool WHOLE = ALL <= N && MOST <= TOGETHER;             // and that is all there is
        static constexpr bool SAME = WHOLE && (LEAST + 7) / 8 == (MOST + 7) / 8;  // and no block has fewer
        static constexpr int SUMMED = CHUNKS > 1 ? CHUNKS : 2;                  // sums that do not wait for each other
        static DEVICE int units(int n) { return ((n < TOGETHER ? n : TOGETHER) + 7) / 8 * (PAIRS ? 2 : 1); }
    };
    template <class S>
    struct Early { u32 w[S::N ? S::N * S::CHUNKS : 1][S::STEPS][4]; };
    template <class S>
    struct Sum { float c[S::SUMMED][4]; };

    // A tile's weights of one chunk as the tensor cores take them; two: there is a second unit.
    template <class S>
    DEVICE void take(u32 (&w)[S::STEPS][4], bool two) {
        const unsigned char *from = unit(), *lower = from;
        int matrix = lane / 8, at = lane % 8 * PITCH + (warp * SLICE + matrix / 2 * 8) * 2;
        Ring next = ring;
        if (S::TWO && two) {
            next.step();
            await(&next.full[next.slot], next.phase);
            lower = next.units + next.slot * UNIT;
        }
        from = (matrix % 2 ? lower : from) + at + (S::TWO ? 0 : matrix % 2 * SLICE);
#pragma unroll
        for (int i = 0; i < S::STEPS; i++) load(w[i], from + i * 32);
        release(S::TWO && two ? 2 : 1);
    }

    // x of a chunk: column 0 the rounded part, column 1 the rest; for a tile of 8 rows column 2 the second half of the slice.
    template <class S>
    DEVICE void column(u32 (&b)[S::STEPS][2], int chunk) {
        int g = lane / 4;
        bool used = g == 0 || g == (S::TWO ? 1 : 2);
        const u32* from = (const u32*)(S::TWO && g ? x_of(NX + chunk) : x_of(chunk)) + lane % 4 * 4 + (S::TWO || !g ? 0 : 32);
#pragma unroll
        for (int i = 0; i < S::STEPS; i += 2) {
            Four v = {0, 0, 0, 0};
            if (used && (!S::TWO || S::REST || !g)) v = *(const Four*)(from + i * 8);
            b[i][0] = v.x, b[i][1] = v.y, b[i + 1][0] = v.z, b[i + 1][1] = v.w;
        }
    }

    template <class S>
    DEVICE void multiply(Sum<S>& s, const u32 (&w)[S::STEPS][4], const u32 (&b)[S::STEPS][2], int chunk) {
#pragma unroll
        for (int i = 0; i < S::STEPS; i++)
            mma(s.c[S::CHUNKS > 1 ? chunk : i % 2], w[i][0], w[i][1], w[i][2], w[i][3], b[i][0], b[i][1]);
    }

    template <class S>
    DEVICE void keep_sum(int tile, const Sum<S>& s) {
        float c[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            c[i] = 0;
#pragma unroll
            for (int j = 0; j < S::SUMMED; j++) c[i] += s.c[j][i];
        }
        float* to = sums(tile * 16 + lane / 4) + warp;
        if (lane % 4 == 0) to[0] = c[0] + c[1];
        if (lane % 4 == (S::TWO ? 0 : 1)) to[8 * WARPS] = c[2] + c[3];
    }

    // Into registers while x is still on its way. Nothing for no units.
    template <class S>
    DEVICE void take_early(Early<S>& e, int units) {
#pragma unroll
        for (int i = 0; i < S::N * S::CHUNKS; i++) {
            if (!S::SAME) {
#pragma unroll
                for (int j = 0; j < S::STEPS * 4; j++) e.w[i][j / 4][j % 4] = 0;
            }
            int unit = i / S::CHUNKS * 2;
            int there = S::SAME ? S::units(S::MOST) : units;
            if (S::SAME || unit < there) take<S>(e.w[i], unit + 1 < there);
        }
    }

    // All tiles of up to TOGETHER rows; then all warps' sums, and those of the squares, are there.
    template <class S, class REST_OF>
    DEVICE void finish(Early<S>& e, int units, float square) {
        Sum<S> sum[S::N ? S::N : 1] = {};
#pragma unroll
        for (int chunk = 0; chunk < S::CHUNKS; chunk++) {
            u32 b[S::STEPS][2];
            column<S>(b, chunk);
#pragma unroll
            for (int n = 0; n < S::N; n++) multiply<S>(sum[n], e.w[n * S::CHUNKS + chunk], b, chunk);
        }
        if (S::REST) {
            square = total(square);
            if (lane == 0) squares()[warp] = square;
        }
#pragma unroll
        for (int n = 0; n < S::N; n++) keep_sum<S>(n, sum[n]);
        if (REST_OF::WHOLE)
            meet();
        else
            rows<REST_OF>(units, S::N);
    }

    template <class S>
    DEVICE void rows(int units, int tile) {
        u32 b[S::STEPS][2];
        if (S::CHUNKS == 1) column<S>(b, 0);
        for (; 2 * tile < units; tile++) {
            Sum<S> sum = {};
#pragma unroll 1
            for (int chunk = 0; chunk < S::CHUNKS; chunk++) {
                if (S::CHUNKS > 1) column<S>(b, chunk);
                u32 w[S::STEPS][4];
                take<S>(w, 2 * tile + 1 < units);
                multiply<S>(sum, w, b, 0);
            }
            keep_sum<S>(tile, sum);
        }
        meet();
    }

    DEVICE float eight(const float* p) {
        Floats x = *(const Floats*)p, y = *(const Floats*)(p + 4);
        return ((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w));
    }
    DEVICE float summed(int row) { return eight(sums(row)); }
    DEVICE float scale_of_norm() { return root(eight(squares()) * (1.0f / K) + a.eps); }

    using In = Stage<NK, NQ, 1, false, true>;
    using Out = Stage<NHD, K, 1, false, false>;
    using Up = Stage<NK, F, 2, true, true>;
    using Down = Stage<NF, K, 1, false, false>;
    using Head = Stage<NK, V, 1, false, true>;
    // Of the head's rows the first are taken as the next layer's would be; and those of a token after the last, so that all
    // steps are alike.
    static constexpr bool FULL = (In::MOST + 7) / 8 == 2 * In::N;  // whole tiles
    static constexpr bool AHEAD = In::SAME && FULL && Down::WHOLE && !Head::WHOLE && V / P >= 16 * In::N;

    // Whether there are rows behind the first `r`; a stage that is whole needs no loop.
    template <class S>
    DEVICE bool more(int r, int n) { return !S::WHOLE && r < n; }

    DEVICE void qkv(Early<In>& early, float square, const Layer& w, int begin, int n, u32 generation) {
        for (int r = 0;;) {
            if (r == 0)
                finish<In, In>(early, In::units(n), square);
            else
                rows<In>(In::units(n - r), 0);
            if (tid < n - r && tid < SUMS) {
                float y = summed(tid) * scale_of_norm();
                int row = begin + r + tid;
                if (QKV_BIAS) y += wide(w.qkv_bias[row]);
                tell(AT_QKV + row, bits(y), generation);
            }
            r += SUMS;
            again(more<In>(r, n));
            if (!more<In>(r, n)) return;
        }
    }

    // The other buffer; the squares stay the same within a stage.
    DEVICE void again(bool same) {
        float kept = same ? squares()[warp] : 0;
        turn ^= 1;
        if (same && lane == 0) squares()[warp] = kept;
    }

    // Adds to the residual: `mine` is the row of this thread, in float32 for good.
    template <class S>
    DEVICE void add(Early<S>& early, int at, int begin, int n, float& mine, u32 generation) {
        finish<S, S>(early, S::units(n), 0);
        if (tid < n) {
            mine += summed(tid) + (S::TWO ? 0 : summed(8 + tid));
            tell(at + begin + tid, bits(mine), generation);
        }
        turn ^= 1;
    }

    DEVICE void gate_up(Early<Up>& early, float square, int begin, int n, u32 generation) {
        for (int r = 0;;) {
            if (r == 0)
                finish<Up, Up>(early, Up::units(n), square);
            else
                rows<Up>(Up::units(n - r), 0);
            if (warp == 0) {
                int at = lane / 8 * 16 + lane % 8;
                float s = scale_of_norm(), g = summed(at) * s, u = summed(at + 8) * s;
                float y = g * u * inverse(1.0f + power(-1.4426950408889634f * g)), next = swap(y, 1);
                if (lane < n - r && lane % 2 == 0) tell(AT_ACT + (begin + r + lane) / 2, rounded(y, next), generation);
            }
            r += SUMS / 2;
            again(more<Up>(r, n));
            if (!more<Up>(r, n)) return;
        }
    }

    DEVICE void act_in(u32 generation) {
        u64 v[NF][2];
        const u64* from[NF];
#pragma unroll
        for (int c = 0; c < NF; c++) from[c] = words(AT_ACT + pair(c));
        hear(v, from, generation, NF, a, lost);
#pragma unroll
        for (int c = 0; c < NF; c++) keep(c, (u32)v[c][0], (u32)v[c][1]);
        meet_warp();
    }
};
