// Attention of one token: queries, the cache, and the combining of what several blocks have seen.

struct Attention : Products {
    using Products::Products;

    // A head of 128 in the mailbox: this lane's dimensions 2 * lane, + 1, and those 64 further; normed and rotated.
    DEVICE void head_in(float (&x)[4], int at, u32 epoch, Two w, int position, bool rotate) {
        long long row = (long long)position * (D / 2) + 2 * lane;
        float c0 = a.cosine[row], c1 = a.cosine[row + 1], s0 = a.sine[row], s1 = a.sine[row + 1];
        u64 v[2][2];
        const u64* const from[2] = {mailbox(at + 2 * lane), mailbox(at + 64 + 2 * lane)};
        poll(v, from, epoch, 2, a, lost);
        x[0] = value(v[0][0]), x[1] = value(v[0][1]), x[2] = value(v[1][0]), x[3] = value(v[1][1]);
        if (!rotate) return;
        if (QK_NORM) {
            float r = root(total(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) / D + a.eps);
            x[0] *= r * low(w.x), x[1] *= r * high(w.x), x[2] *= r * low(w.y), x[3] *= r * high(w.y);
        }
        float y0 = x[0] * c0 - x[2] * s0, y1 = x[1] * c1 - x[3] * s1;
        x[2] = x[2] * c0 + x[0] * s0, x[3] = x[3] * c1 + x[1] * s1, x[0] = y0, x[1] = y1;
    }

    // Of the norm of the head that this warp will have: from memory, which takes as long as a poll.
    DEVICE Two norm_of_head(const Layer& layer) {
        if (!QK_NORM || warp > G) return {0, 0};
        const bf16* norm = (warp < G ? layer.q_norm : layer.k_norm) + 2 * lane;
        return {*(const u32*)norm, *(const u32*)(norm + 64)};
    }

    // A warp's eight keys of a unit. A lane holds a quarter of key lane / 4, and of the values of keys 2 * (lane % 4) and the
    // next 16 dimensions from 16 * (lane / 4) on.
    struct Keys { Four k[4], v[2][2]; };
    static constexpr int HELD = 2;  // units in registers before the queries are there
    using Held = Keys[HELD];

    DEVICE void exchange(Four& a, Four& b, bool really) {
        Four c = a;
        a = really ? b : a, b = really ? c : b;
    }

    // Rows begin in the same bank: every other lane reads its pieces in another order, and exchanges them afterwards.
    DEVICE void look(Keys& keys) {
        int odd = lane / 4 % 2;
        const unsigned char* from = unit() + (warp * 8 + lane / 4) * KEY + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) keys.k[i] = *(const Four*)(from + (i ^ odd) * 64);
        exchange(keys.k[0], keys.k[1], odd), exchange(keys.k[2], keys.k[3], odd);
        odd = lane % 2;
        from = unit_after() + (warp * 8 + lane % 4 * 2) * KEY + lane / 4 * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) keys.v[i / 2][i % 2] = *(const Four*)(from + i / 2 * KEY + (i % 2 ^ odd) * 16);
        exchange(keys.v[0][0], keys.v[0][1], odd), exchange(keys.v[1][0], keys.v[1][1], odd);
    }
    DEVICE void take_keys(Keys& keys) {
        look(keys);
        release(2);
    }

    // In a unit of keys from `begin` on the new one in its place behind the old ones, and nothing behind it.
    DEVICE void place_new(Keys& keys, const Span& s, int begin) {
        int at = s.newest ? s.n - begin : -1, count = s.n + s.newest - begin;
        if (count >= KEYS && !s.newest) return;
        const bf16* fresh = (const bf16*)(base + S_NEW);
        if (at == warp * 8 + lane / 4) {
#pragma unroll
            for (int i = 0; i < 4; i++) keys.k[i] = *(const Four*)(fresh + lane % 4 * 8 + i * 32);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = warp * 8 + lane % 4 * 2 + i / 2;
            if (key == at) keys.v[i / 2][i % 2] = *(const Four*)(fresh + D + lane / 4 * 16 + i % 2 * 8);
            if (key >= count) keys.v[i / 2][i % 2] = {0, 0, 0, 0};
        }
    }

    // What a warp has seen: of head lane / 4 the largest score and its share of the sum; of heads 2 * (lane % 4) and the next
    // the dimensions from 16 * (lane / 4) on, two in a row. Heads from G on mean nothing.
    struct Seen { float row_max, sum, y[8][4]; };

    DEVICE u32 evens(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
    DEVICE u32 odds(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
    DEVICE u32 part(const Four& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

    // The first N units of those held, `count` keys in all; more: it is not the first time.
    template <int N>
    DEVICE void see(Seen& seen, const Held& keys, const Four (&q)[4], int count, bool more) {
        float p[N][2], row_max = seen.row_max;
#pragma unroll
        for (int u = 0; u < N; u++) {
            float s[2][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Four &x = q[i], &k = keys[u].k[i];
                mma(s[0], x.x, 0, x.y, 0, k.x, k.y);
                mma(s[1], x.z, 0, x.w, 0, k.z, k.w);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                p[u][i] = s[0][i] + s[1][i];
                p[u][i] += swap(p[u][i], 4 * G);  // the query's second part has rows of its own
                p[u][i] = u * KEYS + warp * 8 + lane % 4 * 2 + i < count ? p[u][i] : LOWEST;
                row_max = p[u][i] > row_max ? p[u][i] : row_max;
            }
        }
        float other = swap(row_max, 1);
        row_max = other > row_max ? other : row_max, other = swap(row_max, 2);
        row_max = other > row_max ? other : row_max;
        float safe = row_max == LOWEST ? 0 : row_max;
        if (more) {
            float shrink = power(seen.row_max - safe);
            float first = of_lane(shrink, lane % 4 * 8), second = of_lane(shrink, lane % 4 * 8 + 4);
            seen.sum *= shrink;
#pragma unroll
            for (int i = 0; i < 4 * 8; i++) seen.y[i / 4][i % 4] *= i % 2 ? second : first;
        }
        seen.row_max = row_max;
#pragma unroll
        for (int u = 0; u < N; u++) {
            p[u][0] = power(p[u][0] - safe), p[u][1] = power(p[u][1] - safe);
            seen.sum += p[u][0] + p[u][1];
            u32 weights = lane / 4 < G ? rounded(p[u][0], p[u][1]) : 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32 one = part(keys[u].v[0][i / 4], i % 4), two = part(keys[u].v[1][i / 4], i % 4);
                mma8(seen.y[i], evens(one, two), odds(one, two), weights);
            }
        }
    }

    // A warp's part of its heads; then all warps' are there.
    DEVICE void keep_seen(Seen& seen) {
        float sum = seen.sum;
        sum += swap(sum, 1), sum += swap(sum, 2);
        if (lane / 4 < G && lane % 4 == 0) *(Two*)(base + S_MAX + (warp * G + lane / 4) * 8) = {bits(seen.row_max), bits(sum)};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int head = lane % 4 * 2 + h;
            float* to = (float*)(base + S_HEADS) + (warp * G + head) * SEEN + lane / 4 * 16 + lane / 8 * 4;
            if (head < G) {
#pragma unroll
                for (int i = 0; i < 8; i += 2)
                    *(Floats*)(to + 2 * i) = {seen.y[i][h], seen.y[i][2 + h], seen.y[i + 1][h], seen.y[i + 1][2 + h]};
            }
        }
        meet();
    }

    // The queries, each in two parts, and where they are new the key and the value, which the cache gets too.
    DEVICE void heads_of(Two norm, int layer, const Span& s, int position, u32 epoch) {
        if (warp >= G + (s.newest ? 2 : 0)) return;
        int head = warp < G ? s.head * G + warp : warp == G ? H + s.head : H + KV + s.head;
        float x[4];
        head_in(x, AT_QKV + head * D, epoch, norm, position, warp <= G);
        if (warp < G) {
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] *= a.scale;
        }
        u32 one = rounded(x[0], x[1]), two = rounded(x[2], x[3]);
        bf16* to = (bf16*)(base + S_NEW) + (warp - G) * D;
        if (warp < G) {
            to = (bf16*)(base + S_Q) + warp * D;
            *(u32*)(to + G * D + 2 * lane) = rounded(x[0] - low(one), x[1] - high(one));
            *(u32*)(to + G * D + 64 + 2 * lane) = rounded(x[2] - low(two), x[3] - high(two));
        } else {
            bf16* cache = (warp == G ? a.cache_k : a.cache_v) + layer * a.stride_l + s.head * a.stride_h;
            cache += (long long)position * D;
            *(u32*)(cache + 2 * lane) = one, *(u32*)(cache + 64 + 2 * lane) = two;
        }
        *(u32*)(to + 2 * lane) = one, *(u32*)(to + 64 + 2 * lane) = two;
    }

    // keys: the first unit is there.
    DEVICE void attend(Held& keys, Two norm, int layer, const Span& s, int position, u32 epoch) {
#pragma unroll
        for (int u = 1; u < HELD; u++)
            if (s.n > u * KEYS) take_keys(keys[u]);
        heads_of(norm, layer, s, position, epoch);
        meet();
        Four q[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[i] = {0, 0, 0, 0};
            if (lane / 4 < 2 * G) q[i] = *(const Four*)((bf16*)(base + S_Q) + lane / 4 * D + i * 32 + lane % 4 * 8);
        }
        Seen seen = {LOWEST, 0, {}};
        int all = s.n + s.newest;
#pragma unroll
        for (int u = 0; u < HELD; u++) place_new(keys[u], s, u * KEYS);
        if (all <= KEYS)
            see<1>(seen, keys, q, all, false);
        else
            see<HELD>(seen, keys, q, all, false);
#pragma unroll 1
        for (int j = HELD * KEYS; j < all; j += KEYS) {
            if (j < s.n) {
                if (j == HELD * KEYS)
                    look(keys[0]);
                else
                    keys[0] = keys[1];
                release(2);
                if (j + KEYS < s.n) look(keys[1]);  // while the others are seen
            }
            place_new(keys[0], s, j);
            see<1>(seen, keys, q, all - j, true);
        }
        keep_seen(seen);
        if (tid < G * D / 2) {
            int h = tid / (D / 2), at = tid % (D / 2), head = s.head * G + h;
            float y[2], row_max, sum;
            const float* from = (float*)(base + S_HEADS) + h * SEEN + at * 2 + at / 16 * 4;
            combine_warps(y, row_max, sum, from, G * SEEN, (float*)(base + S_MAX) + h * 2, G * 2);
            publish(AT_PART + s.split * (HD / 2) + head * (D / 2) + at, rounded(y[0], y[1]), epoch);
            if (at == 0) publish(AT_MAX + (s.split * H + head) * 2, bits(row_max), epoch);
            if (at == 1) publish(AT_MAX + (s.split * H + head) * 2 + 1, bits(sum), epoch);
        }
        if (s.newest && (warp == G || warp == G + 1)) between_proxies();  // these wrote a key and a value
    }

    // Two dimensions of a head from what all warps found: the weighted mean, the largest score and the sum of the weights.
    DEVICE void combine_warps(float (&y)[2], float& row_max, float& sum, const float* values, int apart, const float* ends, int by) {
        Pair m[WARPS], v[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            m[i] = *(const Pair*)(ends + i * by), v[i] = *(const Pair*)(values + i * apart);
        row_max = LOWEST, sum = 0, y[0] = y[1] = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) row_max = m[i].x > row_max ? m[i].x : row_max;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            float weight = m[i].x == LOWEST ? 0 : power(m[i].x - row_max);
            sum += m[i].y * weight, y[0] += v[i].x * weight, y[1] += v[i].y * weight;
        }
        float each = inverse(sum);
        y[0] *= each, y[1] *= each;
    }

    // Four dimensions of a head from the splits that were polled: v[2 * i] their ends, v[2 * i + 1] their values.
    template <int N>
    DEVICE void combine_splits(float (&y)[4], float& row_max, float& sum, const u64 (&v)[2 * N][2], int n) {
        row_max = LOWEST, sum = 0, y[0] = y[1] = y[2] = y[3] = 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) row_max = value(v[2 * i][0]) > row_max ? value(v[2 * i][0]) : row_max;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) {
                float weight = value(v[2 * i][1]) * power(value(v[2 * i][0]) - row_max);
                u32 one = (u32)v[2 * i + 1][0], two = (u32)v[2 * i + 1][1];
                sum += weight;
                y[0] += low(one) * weight, y[1] += high(one) * weight, y[2] += low(two) * weight, y[3] += high(two) * weight;
            }
    }

    // Many splits: one block for each head combines them for all.
    DEVICE void combine(int head, int splits, u32 epoch) {
        u64 v[4][2] = {};
        const u64* from[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int split = warp + i * WARPS;
            from[2 * i] = mailbox(AT_MAX + (split * H + head) * 2);
            from[2 * i + 1] = mailbox(AT_PART + split * (HD / 2) + head * (D / 2) + lane * 2);
        }
        int n = warp >= splits ? 0 : warp + WARPS >= splits ? 1 : 2;
        poll(v, from, epoch, 2 * n, a, lost);
        float y[4], row_max, sum;
        combine_splits<2>(y, row_max, sum, v, n);
        float* ends = (float*)(base + S_COMBINE_MAX) + warp * 2;
        *(Floats*)((float*)(base + S_COMBINE) + warp * D + lane * 4) = {y[0], y[1], y[2], y[3]};
        if (lane == 0) ends[0] = row_max, ends[1] = sum;
        meet();
        if (tid < D / 2) {
            float out[2];
            combine_warps(out, row_max, sum, (float*)(base + S_COMBINE) + tid * 2, D, (float*)(base + S_COMBINE_MAX), 2);
            publish(AT_Y + head * (D / 2) + tid, rounded(out[0], out[1]), epoch);
        }
    }
};
