// Products of the warps that compute: weights from the ring, x from the mailbox, sums through shared memory.

struct Products {
    const Args& a;
    unsigned char* base;
    Ring ring;
    int warp, lane, tid, turn;  // turn: which of two buffers of sums is written
    bool lost;
    float digit;       // what the last digit of x counts; 1 where x has none
    const u64* inbox;  // the copy of the mailbox that this block polls

    DEVICE Products(const Args& a_, unsigned char* base_, Ring r)
        : a(a_), base(base_), ring(r), warp(WARP_ID), lane(LANE), tid(warp * 32 + lane), turn(0), lost(false), digit(1),
          inbox(a_.mailbox + BLOCK_ID % COPIES * A_COPY) {}

    DEVICE u32* x_of(int chunk) { return (u32*)(base + S_X + warp * X_BYTES + chunk * X_PART); }
    DEVICE float* sums(int row) { return (float*)(base + S_PART) + (turn * SUMS + row) * WARPS; }
    DEVICE float* squares() { return (float*)(base + S_SQUARE) + turn * WARPS; }
    // Of the lane's four columns. int4: a byte holds two that are half of all columns apart; 32 of the one, 32 of the other.
    DEVICE int place(int chunk, int columns) {
        if (BITS != 4) return chunk * CH + warp * SLICE + lane * 4;
        return chunk * ROW + warp * WARP_ROW + lane / 16 * 32 + lane % 8 * 4 + lane / 8 % 2 * (columns / 2);
    }
    DEVICE const u64* mailbox(int at) { return inbox + at; }
    DEVICE void publish(int at, u32 value, u32 epoch) {
        u64* to = anew(a.mailbox);
#pragma unroll
        for (int i = 0; i < COPIES; i++) post(to + at + i * A_COPY, word(value, epoch));
    }

    DEVICE float total(float x) {
#pragma unroll
        for (int m = 16; m; m >>= 1) x += swap(x, m);
        return x;
    }

    // In the order in which column() reads: for each lane of a quad the pairs of two steps of 16 columns.
    DEVICE void keep(int chunk, u32 one, u32 two) {
        u32* to = x_of(chunk) + lane / 8 * 16 + lane % 2 * 8 + lane % 8 / 4 * 2 + lane % 4 / 2;
        to[0] = one, to[4] = two;
    }

    // As two digits of a byte: the first of all chunks, then the second. The largest is not 32767: it is rounded up at times,
    // and the first digit too. What is not a number makes the digit's value such.
    template <int N>
    DEVICE void keep_digits(const float (&x)[N][4]) {
        constexpr float LARGEST = 32512;
        u32 most = bits(1e-30f);
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            u32 size = bits(x[i / 4][i % 4]) & 0x7fffffffu;
            most = size > most ? size : most;
        }
        float largest = bits(most_of_warp(most)), steps = LARGEST * inverse(largest);
        digit = largest * (1.0f / LARGEST / (BITS == 4 ? 16 : 1));
#pragma unroll
        for (int c = 0; c < N; c++) {
            u32 v[4], w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = bits(x[c][i] * steps + 12582912.0f), w[i] = v[i] + 128;  // 1.5 * 2^23
            u32* to = x_of(c) + lane / 16 * 16 + lane % 4 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
            to[0] = pick(pick(w[0], w[1], 0x0051), pick(w[2], w[3], 0x0051), 0x5410);
            to[NX * X_PART / 4] = pick(pick(v[0], v[1], 0x0040), pick(v[2], v[3], 0x0040), 0x5410);
        }
    }

    // x that is bf16, in pairs, of the heads or the activation: the words of the lane's columns in each of N chunks.
    template <int N>
    DEVICE void pairs_in(int at, u32 epoch) {
        u64 v[N][2];
        const u64* from[N];
#pragma unroll
        for (int c = 0; c < N; c++) from[c] = mailbox(at + place(c, N * CH) / 2);
        poll(v, from, epoch, N, a, lost);
        if (BITS == 16) {
#pragma unroll
            for (int c = 0; c < N; c++) keep(c, (u32)v[c][0], (u32)v[c][1]);
        } else {
            float x[N][4];
#pragma unroll
            for (int i = 0; i < 4 * N; i++) {
                u32 both = (u32)v[i / 4][i % 4 / 2];
                x[i / 4][i % 4] = i % 2 ? high(both) : low(both);
            }
            keep_digits(x);
        }
        meet_warp();
    }

    // x times the norm's weight, in two parts. Returns its squares' sum in this lane. x is polled, or comes from the embedding.
    DEVICE float norm_in(int at, u32 epoch, const bf16* row, const Two (&w)[NK]) {
        float x[NK][4], square = 0;
        if (row) {
#pragma unroll
            for (int c = 0; c < NK; c++) {
                Two e = *(const Two*)(row + place(c, K));
                x[c][0] = low(e.x), x[c][1] = high(e.x), x[c][2] = low(e.y), x[c][3] = high(e.y);
            }
        } else {
            u64 v[2 * NK][2];
            const u64* from[2 * NK];
#pragma unroll
            for (int c = 0; c < NK; c++) from[2 * c] = mailbox(at + place(c, K)), from[2 * c + 1] = from[2 * c] + 2;
            poll(v, from, epoch, 2 * NK, a, lost);
#pragma unroll
            for (int i = 0; i < 4 * NK; i++) x[i / 4][i % 4] = value(v[i / 2][i % 2]);
        }
#pragma unroll
        for (int c = 0; c < NK; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) square += x[c][i] * x[c][i];
            float y[4] = {x[c][0] * low(w[c].x), x[c][1] * high(w[c].x), x[c][2] * low(w[c].y), x[c][3] * high(w[c].y)};
            if (BITS == 16) {
                u32 one = rounded(y[0], y[1]), two = rounded(y[2], y[3]);
                keep(c, one, two);
                keep(NX + c, rounded(y[0] - low(one), y[1] - high(one)), rounded(y[2] - low(two), y[3] - high(two)));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) x[c][i] = y[i];
        }
        if (BITS < 16) keep_digits(x);
        meet_warp();
        return square;
    }

    DEVICE const unsigned char* unit() {
        await(&ring.full[ring.slot], ring.phase);
        return ring.units + ring.slot * UNIT;
    }
    DEVICE const unsigned char* unit_after() {
        Ring next = ring;
        next.step();
        await(&next.full[next.slot], next.phase);
        return next.units + next.slot * UNIT;
    }
    DEVICE void release(int units) {
        done_reading();
        meet_warp();
        for (int i = 0; i < units; i++) {
            if (lane == 0) arrive(&ring.empty[ring.slot]);
            ring.step();
        }
    }

    // A stage's product: tiles of 16 rows, two halves of 8, where a block has more than 8 rows or PAIRS of them; else one tile
    // of 8 rows, whose upper half is the second half of the warp's slice. ROWS: of all blocks, in steps of BY.
    template <int CHUNKS_, int ROWS, int BY, bool PAIRS, bool REST_>
    struct Stage {
        static constexpr int CHUNKS = CHUNKS_, LEAST = ROWS / BY / P * BY, MOST = (ROWS / BY + P - 1) / P * BY;
        static constexpr bool REST = REST_, TWO = PAIRS || REST_ || MOST > 8;  // REST: x has a second part
        static constexpr int LOADS = WARP_ROW / (TWO ? 32 : 64), STEPS = BITS == 4 ? 2 * LOADS : LOADS;  // of 32 bytes; of x
        static constexpr int TOGETHER = PAIRS ? SUMS / 2 : SUMS;
        static constexpr int ALL = PAIRS ? (MOST + 7) / 8 : (MOST + 15) / 16, FIT = 4 / CHUNKS;
        static constexpr int N = !TWO ? (CHUNKS <= 6) : ALL < FIT ? ALL : FIT;  // tiles held in registers
        static constexpr bool WHOLE = ALL <= N && MOST <= TOGETHER;             // and that is all there is
        static constexpr bool SAME = WHOLE && (LEAST + 7) / 8 == (MOST + 7) / 8;  // and no block has fewer
        static constexpr int SUMMED = BITS == 4 ? 1 : CHUNKS > 1 ? CHUNKS : 2;  // sums that do not wait for each other
        static DEVICE int halves(int n) { return ((n < TOGETHER ? n : TOGETHER) + 7) / 8 * (PAIRS ? 2 : 1); }
    };
    template <class S>
    struct Weights { u32 w[S::STEPS][4], scale[2]; };  // scale: int4, a half's low and high nibbles'
    template <class S>
    struct Early { Weights<S> w[S::N ? S::N * S::CHUNKS : 1]; };
    template <class S>
    struct Sum { Number c[S::SUMMED][4]; };

    // Of nibbles in v the low ones into v and the high ones into w: 16 times nibble - 8, as bytes.
    DEVICE void unpack(u32 (&v)[4], u32 (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (v[i] & 0xf0f0f0f0u) ^ 0x80808080u, v[i] = ((v[i] << 4) & 0xf0f0f0f0u) ^ 0x80808080u;
            here_and_now(v[i], w[i]);
        }
    }

    // A tile's weights of one chunk as the tensor cores take them; two: there is a second half.
    template <class S>
    DEVICE void take(Weights<S>& w, int chunk, bool two) {
        const byte *from = unit(), *lower = from + (S::TWO && HIGH == 16 ? 8 * PITCH : 0);
        int matrix = lane / 8, at = lane % 8 * PITCH + warp * WARP_ROW + matrix / 2 * 16;
        if (S::TWO && HIGH == 8 && two) lower = unit_after();
        const byte* lane_from = (matrix % 2 ? lower : from) + at + (S::TWO ? 0 : matrix % 2 * (WARP_ROW / 2));
        constexpr int EACH = S::STEPS / S::LOADS;
#pragma unroll
        for (int i = 0; i < S::LOADS; i++) {
            load(w.w[EACH * i], lane_from + i * 32);
            if constexpr (BITS == 4) unpack(w.w[EACH * i], w.w[EACH * i + 1]);
        }
        if (BITS == 4) {
            constexpr int GROUPS = S::CHUNKS * CH / GROUP;
            const bf16* scale = (const bf16*)(from + GROUPS_AT) + lane / 4 * GROUPS + chunk * (ROW / GROUP) + warp / 2;
#pragma unroll
            for (int i = 0; i < (S::TWO ? 2 : 1); i++)
                w.scale[i] = scale[i * 8 * GROUPS] | (u32)scale[i * 8 * GROUPS + GROUPS / 2] << 16;
        }
        release(S::TWO && HIGH == 8 && two ? 2 : 1);
    }

    // x of a chunk: column 0 the rounded part or the first digit, column 1 the rest. For a tile of 8 rows columns 2 and 3 are
    // those of the second half of the slice.
    template <class S>
    DEVICE void column(u32 (&b)[S::STEPS][2], int chunk) {
        constexpr int PARTS = BITS < 16 || S::REST ? 2 : 1;
        int g = lane / 4, part = g % 2, half = S::TWO ? 0 : g / 2;
        bool used = g < (S::TWO ? 2 : 4) && part < PARTS;
        const u32* from = x_of(part && used ? NX + chunk : chunk) + lane % 4 * 4 + half * (S::STEPS * 8);
#pragma unroll
        for (int i = 0; i < S::STEPS; i += 2) {
            Four v = {0, 0, 0, 0};
            if (used) v = *(const Four*)(from + i * 8);
            b[i][0] = v.x, b[i][1] = v.y, b[i + 1][0] = v.z, b[i + 1][1] = v.w;
        }
    }

    template <class S>
    DEVICE void multiply(Sum<S>& s, const Weights<S>& w, const u32 (&b)[S::STEPS][2], int chunk) {
        if constexpr (BITS > 4) {
#pragma unroll
            for (int i = 0; i < S::LOADS; i++)
                mma(s.c[S::CHUNKS > 1 ? chunk : i % 2], w.w[i][0], w.w[i][1], w.w[i][2], w.w[i][3], b[i][0], b[i][1]);
        } else {
            int c[2][4] = {};
#pragma unroll
            for (int i = 0; i < S::STEPS; i++) mma(c[i % 2], w.w[i][0], w.w[i][1], w.w[i][2], w.w[i][3], b[i][0], b[i][1]);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {  // both digits: at most 2^28
                u32 scale = w.scale[S::TWO ? i / 2 : 0];
                s.c[0][i] += (float)(c[0][i] * 256 + c[0][i + 1]) * low(scale);
                s.c[0][i] += (float)(c[1][i] * 256 + c[1][i + 1]) * high(scale);
            }
        }
    }

    template <class S>
    DEVICE void keep_sum(int tile, const Sum<S>& s) {
        float c[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Number sum = 0;
#pragma unroll
            for (int j = 0; j < S::SUMMED; j++) sum += s.c[j][i];
            c[i] = (float)sum;
        }
        float first = BITS == 16 ? 1 : BITS == 8 ? 256 * digit : digit, second = BITS == 16 ? 1 : BITS == 8 ? digit : 0;
        float* to = sums(tile * 16 + lane / 4) + warp;
        if (lane % 4 == 0) to[0] = c[0] * first + c[1] * second;
        if (lane % 4 == (S::TWO ? 0 : 1)) to[8 * WARPS] = c[2] * first + c[3] * second;
    }

    // Into registers while x is still on its way. Nothing for no rows.
    template <class S>
    DEVICE void take_early(Early<S>& e, int halves) {
#pragma unroll
        for (int i = 0; i < S::N * S::CHUNKS; i++) {
            if (!S::SAME) e.w[i] = {};
            int half = i / S::CHUNKS * 2;
            int there = S::SAME ? S::halves(S::MOST) : halves;
            if (S::SAME || half < there) take<S>(e.w[i], i % S::CHUNKS, half + 1 < there);
        }
    }

    // All tiles of up to TOGETHER rows; then all warps' sums, and those of the squares, are there.
    template <class S, class REST_OF>
    DEVICE void finish(Early<S>& e, int halves, float square) {
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
            rows<REST_OF>(halves, S::N);
    }

    template <class S>
    DEVICE void rows(int halves, int tile) {
        u32 b[S::STEPS][2];
        if (S::CHUNKS == 1) column<S>(b, 0);
        for (; 2 * tile < halves; tile++) {
            Sum<S> sum = {};
#pragma unroll 1
            for (int chunk = 0; chunk < S::CHUNKS; chunk++) {
                if (S::CHUNKS > 1) column<S>(b, chunk);
                Weights<S> w;
                take<S>(w, chunk, 2 * tile + 1 < halves);
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

    // A row's scale where weights are bytes: loaded early, used late.
    DEVICE float scale_of(const Matrix& w, int row, bool there) {
        return BITS == 8 && there ? ((const float*)w.scale)[row] : 1.0f;
    }

    DEVICE void qkv(Early<In>& early, float square, const Layer& w, float scale, int begin, int n, u32 epoch) {
        for (int r = 0;;) {
            if (r == 0)
                finish<In, In>(early, In::halves(n), square);
            else
                rows<In>(In::halves(n - r), 0);
            if (tid < n - r && tid < SUMS) {
                int row = begin + r + tid;
                float y = summed(tid) * scale_of_norm() * (r == 0 ? scale : scale_of(w.qkv, row, true));
                if (QKV_BIAS) y += wide(w.qkv_bias[row]);
                publish(AT_QKV + row, bits(y), epoch);
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
    DEVICE void add(Early<S>& early, float scale, int at, int begin, int n, float& mine, u32 epoch) {
        finish<S, S>(early, S::halves(n), 0);
        if (tid < n) {
            mine += (summed(tid) + (S::TWO ? 0 : summed(8 + tid))) * scale;
            publish(at + begin + tid, bits(mine), epoch);
        }
        turn ^= 1;
    }

    // scale: of the gate and of up, for a lane's row.
    DEVICE void gate_up(Early<Up>& early, float square, const Matrix& w, Pair scale, int begin, int n, u32 epoch) {
        for (int r = 0;;) {
            if (r == 0)
                finish<Up, Up>(early, Up::halves(n), square);
            else
                rows<Up>(Up::halves(n - r), 0);
            if (warp == 0) {
                int at = lane / 8 * 16 + lane % 8;
                if (r) scale = scales_of_pair(w, begin + r + lane, lane < n - r);
                float s = scale_of_norm(), g = summed(at) * s * scale.x, u = summed(at + 8) * s * scale.y;
                float y = g * u * inverse(1.0f + power(-1.4426950408889634f * g)), next = swap(y, 1);
                if (lane < n - r && lane % 2 == 0) publish(AT_ACT + (begin + r + lane) / 2, rounded(y, next), epoch);
            }
            r += SUMS / 2;
            again(more<Up>(r, n));
            if (!more<Up>(r, n)) return;
        }
    }

    DEVICE Pair scales_of_pair(const Matrix& w, int row, bool there) {
        return {scale_of(w, row, there), scale_of(w, row + F, there)};
    }
};
