// What a GPU does that C++ has no word for, and the ring through which a block gets its weights.

#ifndef ON_CPU
#define DEVICE __device__ __forceinline__
#define WARP_ID (threadIdx.x / 32)
#define LANE (threadIdx.x % 32)
#define BLOCK_ID (blockIdx.x)

extern __shared__ __align__(128) unsigned char shared[];
extern "C" __constant__ const int SHARED_BYTES = S_RING + STAGES * UNIT;
extern "C" __constant__ const int MAILBOX_WORDS = N_MAILBOX;
extern "C" __constant__ const int BLOCK_THREADS = THREADS;

DEVICE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void peek(u64 (&v)[2], const u64* p, bool wanted) {  // without a branch
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n}"
                 : "+l"(v[0]), "+l"(v[1]) : "l"(p), "r"((u32)wanted) : "memory");
}
DEVICE void post(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

DEVICE void set_up(u64* bar, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(bar)), "r"(count)); }
DEVICE void settle() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64* bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(bar)) : "memory"); }
DEVICE void expect(u64* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(bar)), "r"(bytes) : "memory");
}
DEVICE void await(u64* bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
        ::"r"(address(bar)), "r"(parity) : "memory");
}
DEVICE void fetch(void* to, const void* from, int bytes, u64* bar) {  // the first to leave the L2 cache: it is read once
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(bar)), "l"(policy) : "memory");
}
// Bulk copies are another proxy: a fence stands between plain accesses and theirs, for keys and values on either side, for
// the ring where its readers are done. Without the latter a load may still be on its way when the slot is filled anew.
DEVICE void between_proxies() { asm volatile("fence.proxy.async.global;\nfence.proxy.async;" ::: "memory"); }
DEVICE void done_reading() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma8(float (&c)[4], u32 a0, u32 a1, u32 b) {  // the first 8 of 16 columns
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // 32 columns of bytes
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void load(u32 (&a)[4], const void* row) {  // four matrices of 8 rows of 16 bytes, a row from each lane
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address(row)) : "memory");
}
DEVICE u32 rounded(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float swap(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float of_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE int swap(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 most_of_warp(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
DEVICE u32 pick(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
DEVICE void meet_warp() { __syncwarp(); }
DEVICE void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEVICE void meet_all() { __syncthreads(); }
DEVICE void fence() { __threadfence(); }
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }  // from the four warps of the stream
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
DEVICE u64* anew(u64* p) {  // addresses made of it are made here, not once for all: they would fill the registers
    asm volatile("" : "+l"(p));
    return p;
}
DEVICE void here_and_now(u32& a, u32& b) { asm volatile("" : "+r"(a), "+r"(b)); }  // not where they are used, later on
DEVICE float bits(u32 x) { return __uint_as_float(x); }
DEVICE u32 bits(float x) { return __float_as_uint(x); }
DEVICE float root(float x) { return rsqrtf(x); }
DEVICE float inverse(float x) { return __fdividef(1.0f, x); }
#endif

#define LOWEST bits(0xff800000u)  // minus infinity

struct alignas(16) Four { u32 x, y, z, w; };
struct alignas(16) Floats { float x, y, z, w; };
struct alignas(8) Two { u32 x, y; };
struct alignas(8) Pair { float x, y; };

DEVICE float low(u32 both) { return bits(both << 16); }
DEVICE float high(u32 both) { return bits(both & 0xffff0000u); }
DEVICE float wide(bf16 x) { return bits((u32)x << 16); }
DEVICE u64 word(u32 value, u32 epoch) { return (u64)epoch << 32 | value; }
DEVICE float value(u64 w) { return bits((u32)w); }
DEVICE int begins(int block, int n, int step) { return (int)((long long)block * (n / step) / P) * step; }

// A consumer's or the producer's place in the ring.
struct Ring {
    unsigned char* units;
    u64 *full, *empty;
    int slot;
    u32 phase;
    DEVICE void step() { slot = slot + 1 == STAGES ? (phase ^= 1, 0) : slot + 1; }
};

DEVICE bool is_of(u32 epoch, const u64 (&v)[2]) {
    return (u32)(v[0] >> 32) == epoch && (u32)(v[1] >> 32) == epoch;
}

// Reads n of N pairs of words until all have the epoch; those that have it once are not read again.
template <int N>
DEVICE void poll(u64 (&v)[N][2], const u64* const (&at)[N], u32 epoch, int n, const Args& a, bool& lost) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i][0] = v[i][1] = word(0, ~epoch);
    for (int polls = 0;; polls++) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) peek(v[i], at[i], !is_of(epoch, v[i]));
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) all &= is_of(epoch, v[i]);
        if (all || lost) break;
        if (polls > a.patience) {
            lost = true;
            *a.failed = 1;
        }
    }
    meet_warp();
}
