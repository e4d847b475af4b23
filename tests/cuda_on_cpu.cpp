// Runs whet/decode/cuda on a CPU: every thread of every block is a fiber, copies arrive late and in any order.
// What it shows: indices, epochs, barriers, the ring, sums. What it cannot: the memory order and the speed of a GPU.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

#define ON_CPU
#define DEVICE inline

struct Fiber {
    int block, warp, lane, parity = 0;
    jmp_buf at;
    ucontext_t begin;
    std::unique_ptr<char[]> stack;
    bool started = false;
};

static Fiber* now;
static jmp_buf back;
static std::deque<Fiber*> ready;
static std::mt19937 dice(0);

__attribute__((noinline)) static void park() { if (!_setjmp(now->at)) _longjmp(back, 1); }
__attribute__((noinline)) static void go_on() { _longjmp(now->at, 1); }
__attribute__((noinline)) static void leave() { _longjmp(back, 1); }
static void yield() { ready.push_back(now); park(); }

struct Meeting {
    int size, here = 0;
    std::vector<Fiber*> waiting;
    void wait() {
        if (++here == size) {
            here = 0;
            for (Fiber* f : waiting) ready.push_back(f);
            waiting.clear();
        } else {
            waiting.push_back(now);
            park();
        }
    }
};

struct Slots {
    uint32_t of[32][6];
    const uint32_t* rows[32];
};
struct Warp {
    Meeting meeting{32};
    Slots slots[2];
};
struct Group {
    Meeting consumers{256}, all{384};
    Warp warps[12];
    std::vector<Fiber*> awaiting;  // the end of a phase of some barrier
};
static std::vector<Group> groups;
static Group& my_group() { return groups[now->block]; }
static Warp& my_warp() { return my_group().warps[now->warp]; }
// For one exchange, and those of the last one are free: whoever writes into them has met all lanes since they were read.
static Slots& next_slots() { return my_warp().slots[now->parity ^= 1]; }

#define WARP_ID (now->warp)
#define LANE (now->lane)
#define BLOCK_ID (now->block)

using std::sqrt;
static float bits(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
static uint32_t bits(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }

static void peek(unsigned long long (&v)[2], const unsigned long long* p, bool wanted) {
    if (wanted) v[0] = p[0], v[1] = p[1];
    yield();
}
static void post(unsigned long long* p, unsigned long long v) { *p = v; }

struct Bar { uint16_t count, pending; int32_t bytes : 31; uint32_t phase : 1; };
static_assert(sizeof(Bar) == 8);
static Bar& bar_of(unsigned long long* b) { return *(Bar*)b; }
static void settle(Bar& b, Group& g) {
    if (b.pending || b.bytes) return;
    b.pending = b.count, b.phase ^= 1;
    for (Fiber* f : g.awaiting) ready.push_back(f);
    g.awaiting.clear();
}
static void settle() {}
static void set_up(unsigned long long* b, int count) { bar_of(b) = {(uint16_t)count, (uint16_t)count, 0, 0}; }
static void arrive(unsigned long long* b) { bar_of(b).pending--; settle(bar_of(b), my_group()); }
static void expect(unsigned long long* b, int bytes) { bar_of(b).bytes += bytes; arrive(b); }
static void await(unsigned long long* b, uint32_t parity) {
    while (bar_of(b).phase == parity) my_group().awaiting.push_back(now), park();
}

struct Copy { void* to; const void* from; int bytes, block; unsigned long long* bar; };
static std::vector<Copy> copies;
static void land() {
    size_t i = dice() % copies.size();
    Copy c = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    memcpy(c.to, c.from, c.bytes);
    bar_of(c.bar).bytes -= c.bytes;
    settle(bar_of(c.bar), groups[c.block]);
}
static void fetch(void* to, const void* from, int bytes, unsigned long long* bar) {
    if ((uintptr_t)from % 16 || (uintptr_t)to % 16 || bytes % 16) abort();
    memset(to, 0xff, bytes);  // whoever still reads there reads NaN
    copies.push_back({to, from, bytes, now->block, bar});
}
static void between_proxies() {}
static void done_reading() {}
static unsigned long long* anew(unsigned long long* p) { return p; }
static void here_and_now(uint32_t&, uint32_t&) {}
static void take_registers() {}
static void give_registers() {}
static void fence() {}
static void meet_warp() { my_warp().meeting.wait(); }
static void meet() { my_group().consumers.wait(); }
static void meet_all() { my_group().all.wait(); }

static float of_lane(float x, int lane) {
    Slots& slots = next_slots();
    slots.of[LANE][0] = bits(x);
    meet_warp();
    return bits(slots.of[lane][0]);
}
static float swap(float x, int mask) { return of_lane(x, LANE ^ mask); }
static int swap(int x, int mask) { return (int)bits(swap(bits((uint32_t)x), mask)); }

static uint32_t most_of_warp(uint32_t x) {
    Slots& slots = next_slots();
    slots.of[LANE][0] = x;
    meet_warp();
    uint32_t most = 0;
    for (int i = 0; i < 32; i++) most = std::max(most, slots.of[i][0]);
    return most;
}
static uint32_t pick(uint32_t a, uint32_t b, uint32_t which) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t y = 0;
    for (int i = 0; i < 4; i++) y |= (uint32_t)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return y;
}

static float bf(uint32_t both, int i) { return bits(i ? both & 0xffff0000u : both << 16); }
// Rows of a times columns of b, EACH numbers in a register.
template <int EACH, class T, class Part>
static void product(T (&c)[4], const uint32_t (&mine)[6], Part part) {
    Slots& slots = next_slots();
    memcpy(slots.of[LANE], mine, sizeof mine);
    meet_warp();
    int g = LANE / 4, t = LANE % 4;
    for (int i = 0; i < 4; i++) {
        int upper = i / 2, n = 2 * t + i % 2;
        for (int k = 0; k < 8 * EACH; k++) {
            int lane = k % (4 * EACH) / EACH, later = k / (4 * EACH);
            c[i] += part(slots.of[g * 4 + lane][upper + 2 * later], k % EACH) * part(slots.of[n * 4 + lane][4 + later], k % EACH);
        }
    }
}
static void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    product<2>(c, {a0, a1, a2, a3, b0, b1}, bf);
}
static void mma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    product<4>(c, {a0, a1, a2, a3, b0, b1}, [](uint32_t four, int i) { return (int)(int8_t)(four >> 8 * i); });
}
static void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) { mma(c, a0, a1, 0, 0, b, 0); }
static void load(uint32_t (&a)[4], const void* row) {
    Slots& slots = next_slots();
    slots.rows[LANE] = (const uint32_t*)row;
    meet_warp();
    for (int i = 0; i < 4; i++) a[i] = slots.rows[i * 8 + LANE / 4][LANE % 4];
}
static uint32_t half(float x) {
    uint32_t b = bits(x);
    return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static uint32_t rounded(float low, float high) { return half(low) | half(high) << 16; }
static float power(float x) { return std::exp2(x); }
static float inverse(float x) { return 1.0f / x; }
static float root(float x) { return 1.0f / std::sqrt(x); }

#include SOURCE

static_assert(WARPS * 32 == 256 && THREADS == 384, "Group and launch have these numbers");

extern "C" const int SHARED_BYTES = S_RING + STAGES * UNIT;
extern "C" const int MAILBOX_WORDS = N_MAILBOX;
extern "C" const int QKV_AT = AT_QKV, PART_AT = AT_PART, Y_AT = AT_Y, IS_AHEAD = Block::AHEAD;

static const Args* given;
static std::vector<std::unique_ptr<unsigned char[]>> memory;

static void body() {
    unsigned char* shared = memory[now->block].get();
    decode(*given, shared + (128 - (uintptr_t)shared % 128) % 128);
    now = nullptr;
    leave();
}

// One launch, of which one block may never begin. Returns 0, or 1 where no thread could go on.
extern "C" int launch(const Args* args, int seed, int silent) {
    given = args;
    dice.seed(seed);
    ready.clear();
    copies.clear();
    memory.clear();
    groups = std::vector<Group>(P);
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int b = 0; b < P; b++) {
        if (b == silent) {
            memory.emplace_back();
            continue;
        }
        memory.emplace_back(new unsigned char[SHARED_BYTES + 128]);
        memset(memory.back().get(), 0xff, SHARED_BYTES + 128);
        for (int i = 0; i < 384; i++) {
            fibers.emplace_back(new Fiber);
            Fiber* f = fibers.back().get();
            f->block = b, f->warp = i / 32, f->lane = i % 32;
            f->stack.reset(new char[32768]);
            ready.push_back(f);
        }
    }
    size_t left = fibers.size(), turn = 0;
    static ucontext_t dummy;
    while (left) {
        while (!copies.empty() && (ready.empty() || dice() % 64 == 0)) land();
        if (ready.empty()) return 1;
        size_t i = seed ? dice() % std::min<size_t>(ready.size(), 1 + dice() % 4096) : 0;  // any order will do
        std::swap(ready[i], ready.front());
        now = ready.front();
        ready.pop_front();
        if (seed && (now->block * 12 + now->warp + turn / 50000) % 7 == 0 && dice() % 64) {  // some warps fall behind for a while
            ready.push_back(now);
            turn++;
            continue;
        }
        turn++;
        if (!_setjmp(back)) {
            if (now->started) go_on();
            now->started = true;
            getcontext(&now->begin);
            now->begin.uc_stack.ss_sp = now->stack.get();
            now->begin.uc_stack.ss_size = 32768;
            now->begin.uc_link = nullptr;
            makecontext(&now->begin, body, 0);
            swapcontext(&dummy, &now->begin);
        }
        if (!now) left--;
    }
    return 0;
}
