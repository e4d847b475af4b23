// The choice of a token, and the order of all stages.

struct Block : Attention {
    using Attention::Attention;

    struct Best {
        float logit;
        int token;
        // The larger, the first of equals; NaN beats all, so that it is seen.
        DEVICE void with(float x, int t) {
            bool nan = logit != logit, other = x != x;
            if ((!nan && (other || x > logit)) || (t < token && (x == logit || (nan && other)))) logit = x, token = t;
        }
        DEVICE void across() {
#pragma unroll
            for (int m = 16; m; m >>= 1) {
                float x = swap(logit, m);
                int t = swap(token, m);
                with(x, t);
            }
        }
    };

    DEVICE void choose(Early<In>& early, int begin, int n, float square, u32 epoch, float* logits) {
        if (!AHEAD) {
            square = total(square);
            if (lane == 0) squares()[warp] = square;
        }
        Best best = {LOWEST, 0x7fffffff};
        for (int r = 0; r < n; r += SUMS) {
            int m = n - r < SUMS ? n - r : SUMS;
            float scale = scale_of(a.head, begin + r + tid, tid < m);
            if (AHEAD && r == 0)
                finish<In, Head>(early, Head::halves(m), square);
            else
                rows<Head>(Head::halves(m), 0);
            if (tid < m) {
                float logit = summed(tid) * scale_of_norm() * scale;
                best.with(logit, begin + r + tid);
                if (logits) logits[begin + r + tid] = logit;
            }
            again(r + SUMS < n);
        }
        if (warp < 2) {
            best.across();
            if (lane == 0) {
                fence();  // with this word a block says that its keys and values are written
                int at = AT_BEST + (BLOCK_ID * 2 + warp) * 2;
                publish(at, bits(best.logit), epoch);
                publish(at + 1, (u32)best.token, epoch);
            }
        }
    }

    DEVICE Best chosen(u32 epoch) {
        Best best = {LOWEST, 0x7fffffff};
        constexpr int N = (2 * P + 31) / 32;
        u64 v[N][2];
        const u64* from[N];
#pragma unroll
        for (int i = 0; i < N; i++) from[i] = mailbox(AT_BEST + (i * 32 + lane < 2 * P ? i * 32 + lane : lane) * 2);
        poll(v, from, epoch, N, a, lost);
#pragma unroll
        for (int i = 0; i < N; i++) best.with(value(v[i][0]), (int)(u32)v[i][1]);
        best.across();
        return best;
    }

    DEVICE void weights_of_norm(Two (&w)[NK], const bf16* norm) {
#pragma unroll
        for (int c = 0; c < NK; c++) w[c] = *(const Two*)(norm + place(c, K));
    }

    DEVICE void run(const Layer* layers, u64* turn_done) {
        int b = BLOCK_ID;
        int q0 = begins(b, NQ, 1), nq = begins(b + 1, NQ, 1) - q0, k0 = begins(b, K, 1), nk = begins(b + 1, K, 1) - k0;
        int f0 = begins(b, F, 2), nf = begins(b + 1, F, 2) - f0, v0 = begins(b, V, 1), nv = begins(b + 1, V, 1) - v0;
        int start = (int)*a.position, combined = P - 1 - b;  // combined: the head whose splits this block combines, if there is one
        u32 epoch = *a.epoch;
        long long token = *a.token;
        Two w[NK];
        weights_of_norm(w, layers[0].norm1);
        float scale_in = scale_of(layers[0].qkv, q0 + tid, tid < nq);
        Early<In> in;
        take_early(in, In::halves(nq));
        for (int step = 0; step < a.steps; step++) {
            int position = start + step;
            Span s(position, a.least);
            const bf16* row = a.embed + token * K;
            float mine = tid < nk ? wide(row[k0 + tid]) : 0;
            for (int l = 0; l < L; l++) {
                const Layer& layer = layers[l];
                epoch++;
                inbox = anew((u64*)inbox);
                Held keys = {};
                Two norm = norm_of_head(layer);
                if (In::WHOLE && s.n) take_keys(keys[0]);
                qkv(in, norm_in(AT_H, epoch - 1, l == 0 ? row : nullptr, w), layer, scale_in, q0, nq, epoch);
                if (!In::WHOLE && s.n) take_keys(keys[0]);
                if (s.takes_part) attend(keys, norm, l, s, position, epoch);
                weights_of_norm(w, layer.norm2);
                float scale_out = scale_of(layer.o, k0 + tid, tid < nk), scale_down = scale_of(layer.down, k0 + tid, tid < nk);
                Pair scale_up = scales_of_pair(layer.gate_up, f0 + tid, tid < nf);
                scale_in = scale_of(layers[l + 1 < L ? l + 1 : 0].qkv, q0 + tid, tid < nq);
                Early<Out> out;
                Early<Up> up;
                Early<Down> down;
                take_early(out, Out::halves(nk));
                if (Out::WHOLE) take_early(up, Up::halves(nf));
                if (s.splits > 1 && combined < H) combine(combined, s.splits, epoch);
                pairs_in<NHD>(s.splits > 1 ? AT_Y : AT_PART, epoch);
                add(out, scale_out, AT_MID, k0, nk, mine, epoch);
                if (!Out::WHOLE) take_early(up, Up::halves(nf));
                if (Up::WHOLE) take_early(down, Down::halves(nk));
                inbox = anew((u64*)inbox);
                gate_up(up, norm_in(AT_MID, epoch, nullptr, w), layer.gate_up, scale_up, f0, nf, epoch);
                weights_of_norm(w, l + 1 < L ? layers[l + 1].norm1 : a.norm);
                if (!Up::WHOLE) take_early(down, Down::halves(nk));
                if (Down::WHOLE && (AHEAD || l + 1 < L)) take_early(in, In::halves(nq));
                pairs_in<NF>(AT_ACT, epoch);
                add(down, scale_down, AT_H, k0, nk, mine, epoch);
                if (!Down::WHOLE && l + 1 < L) take_early(in, In::halves(nq));
            }
            float square = norm_in(AT_H, epoch, nullptr, w);
            epoch++;
            choose(in, v0, nv, square, epoch, a.logits ? a.logits + (long long)step * V : nullptr);
            weights_of_norm(w, layers[0].norm1);
            if (AHEAD || step + 1 < a.steps) take_early(in, In::halves(nq));
            Best best = chosen(epoch);
            token = best.token < V ? best.token : 0;
            fence();
            meet_warp();
            if (lane == 0) arrive(turn_done);
            if (b == 0 && tid == 0) a.out_tokens[step] = token, a.logit[step] = best.logit;
        }
        if (b == 0 && tid == 0) *a.token = token, *a.position = start + a.steps, *a.epoch = epoch;
    }
};

DEVICE void stream(Ring ring, const Args& a, const Layer* layers, u64* turn) {
    Stream to(ring);
    int b = BLOCK_ID;
    int q0 = begins(b, NQ, 1), q1 = begins(b + 1, NQ, 1), k0 = begins(b, K, 1), k1 = begins(b + 1, K, 1);
    int f0 = begins(b, F, 2), f1 = begins(b + 1, F, 2), v0 = begins(b, V, 1), v1 = begins(b + 1, V, 1);
    int start = (int)*a.position;
    for (int step = 0; step <= a.steps; step++) {
        Span s(start + step, a.least);
        if (step == a.steps && !Block::AHEAD) break;
        for (int l = 0; l <= (step < a.steps ? L : 0); l++) {
            const Layer& w = layers[l < L ? l : 0];
            for (int stage = 0; stage < (l < L && step < a.steps ? 4 : 1); stage++) {
                if (l == L && step > 0) await(turn, (step - 1) & 1);  // so that no block falls two steps behind or ahead
                to.flying = l == L ? MANY : FEW;
                if (l == L)
                    to.rows(a.head, K, v0, v1 - v0, 0);
                else
                    to.rows(stage == 0 ? w.qkv : stage == 1 ? w.o : stage == 2 ? w.gate_up : w.down,
                            stage == 1 ? HD : stage == 3 ? F : K, stage == 0 ? q0 : stage == 2 ? f0 : k0,
                            stage == 0 ? q1 - q0 : stage == 2 ? f1 - f0 : k1 - k0, stage == 2 ? F : 0);
                if (stage || l == L || !s.takes_part || step == a.steps) continue;
                if (l == 0 && step > 0 && s.newest) {  // the last of these keys were written in the step before
                    await(turn, (step - 1) & 1);
                    between_proxies();
                }
                long long at = l * a.stride_l + s.head * a.stride_h + (long long)s.first * D;
                to.flying = MANY;
                to.keys(a.cache_k + at, a.cache_v + at, s.n);
            }
        }
    }
}

#ifndef ON_CPU
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Args a) {
#else
void decode(const Args& a, unsigned char* shared) {
#endif
    u64* bars = (u64*)(shared + S_BARS);
    Layer* layers = (Layer*)(shared + S_LAYERS);
    Ring ring = {shared + S_RING, bars, bars + STAGES, 0, 0};
    u64* turn = bars + 2 * STAGES;
    int tid = WARP_ID * 32 + LANE;
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) set_up(&ring.full[i], 1), set_up(&ring.empty[i], WARPS);
        set_up(turn, WARPS);
        settle();
    }
    for (int i = tid; i < L * (int)(sizeof(Layer) / 8); i += THREADS) ((u64*)layers)[i] = ((const u64*)a.layers)[i];
    meet_all();
    if (WARP_ID >= WARPS) {
        give_registers();
        if (WARP_ID == WARPS) stream(ring, a, layers, turn);
    } else {
        take_registers();
        Block(a, shared, ring).run(layers, turn);
    }
}
