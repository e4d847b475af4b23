// Greedy tokens of one sequence in one kernel: a block on each multiprocessor, resident from the first token to the last.
//
// Weights   Every block owns the same rows of every matrix for good. One warp streams them (and the cache's old keys and
//           values) through a ring in shared memory, in the order they are used, and never waits for a result: while the
//           others wait for x, the weights of the next stages arrive.
// Products  Eight warps share a block's rows, each a slice of every row, on tensor cores. bf16: x as two columns (what bf16
//           keeps of it, and what that leaves), sums in float32. int8 and int4: x as two columns of bytes, the digits of a
//           16-bit number that counts in steps of the warp's largest x; sums are whole numbers, and no weight is widened.
// Results   There is no grid barrier. A number is published with its epoch in one 8-byte word of the mailbox: whoever needs
//           it polls the word until the epoch is right. A word is published again only after all blocks have published since.
// Never     A wait that lasts longer than `patience` polls gives up, and all waits after it: the kernel ends, `failed` says so.
//
// Sizes come as macros: P blocks; L layers, K hidden, H and KV heads of 128, F, V; QK_NORM, QKV_BIAS; BITS of a weight, 16, 8
// or 4 (whet/ops/_weights.py); LIMIT bytes of shared memory. K, H * 128 and F are multiples of 1024.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short bf16;
typedef unsigned char byte;
#if BITS == 8
typedef int Number;  // a sum of products
#else
typedef float Number;
#endif

constexpr int D = 128, G = H / KV, NQ = (H + 2 * KV) * D, HD = H * D;
constexpr int WARPS = 8, THREADS = (WARPS + 4) * 32;              // that compute; of a block: four more warps, one streams
constexpr int CH = 1024, SLICE = CH / WARPS;                      // columns of a chunk; a warp's share of them
constexpr int NK = K / CH, NHD = HD / CH, NF = F / CH;            // chunks of a row
constexpr int NX = NK > NHD ? (NK > NF ? NK : NF) : (NHD > NF ? NHD : NF);
constexpr int KEYS = 64, KEY = D * 2;                             // keys, or values, of a unit; bytes of one
constexpr int ROW = CH * BITS / 8, PITCH = ROW + 16;              // a row of a chunk, in other banks than the next
constexpr int WARP_ROW = SLICE * BITS / 8;                        // a warp's share of it
constexpr int HIGH = BITS == 16 ? 8 : 16;                         // rows of a unit: as many bytes where a weight is one
constexpr int GROUP = 128, GROUPS_AT = HIGH * PITCH;              // int4: columns that share a scale; where a unit has them
constexpr int WEIGHTS = GROUPS_AT + (BITS == 4 ? HIGH * NX * (CH / GROUP) * 2 : 0);
constexpr int UNIT = WEIGHTS > KEYS * KEY ? WEIGHTS : KEYS * KEY;
constexpr int SPLITS = P / KV < 2 * WARPS ? P / KV : 2 * WARPS;   // of a sequence at most
constexpr int FREE = (P - H) / KV < 1 ? 1 : (P - H) / KV < SPLITS ? (P - H) / KV : SPLITS;  // of blocks that combine nothing
constexpr int COPIES = 4;                                         // of a word: fewer blocks read the same one
constexpr int MANY = 4, FEW = BITS == 16 ? 2 : MANY;              // units on their way at most; of a layer's weights
constexpr int TILES = 4, SUMS = 16 * TILES;                       // tiles of 16 rows whose sums are exchanged at once

struct Matrix { const byte* w; const void* scale; };  // scale: int8 a float for each row, int4 a bf16 for each group
struct Layer { const bf16 *norm1, *qkv_bias, *q_norm, *k_norm, *norm2; Matrix qkv, o, gate_up, down; };

struct Args {
    const Layer* layers;
    const bf16 *embed, *norm;
    Matrix head;
    const float *cosine, *sine;                // (positions, D / 2)
    bf16 *cache_k, *cache_v;                   // one sequence: (L, KV, S, D)
    u64* mailbox;                              // N_MAILBOX words, zeros at first
    long long *token, *position, *out_tokens;  // read, then moved on by `steps`
    float *logit, *logits;                     // of the tokens chosen; of all tokens (steps, V), or null
    u32 *epoch, *failed;
    long long stride_l, stride_h;              // of the cache, in elements
    int steps, least, patience;                // least: old keys that are not worth a split
    float scale, eps;                          // scale: D^-0.5 * log2(e)
};

// The mailbox: where each kind of result lies, in words.
constexpr int AT_H = 0, AT_MID = AT_H + K, AT_QKV = AT_MID + K, AT_PART = AT_QKV + NQ, AT_MAX = AT_PART + SPLITS * HD / 2;
constexpr int AT_Y = AT_MAX + SPLITS * H * 2, AT_ACT = AT_Y + HD / 2, AT_BEST = AT_ACT + F / 2;
constexpr int A_COPY = (AT_BEST + P * 4 + 15) / 16 * 16, N_MAILBOX = COPIES * A_COPY;

// Shared memory. SEEN: of a head as a warp has seen it, 32 dimensions in other banks than the next.
constexpr int SEEN = D + 16;
constexpr int X_PART = SLICE * (BITS == 16 ? 2 : 1), X_BYTES = (NX + (BITS == 16 ? NK : NX)) * X_PART;
constexpr int S_X = 0, S_PART = S_X + WARPS * X_BYTES;
constexpr int S_SQUARE = S_PART + 2 * WARPS * SUMS * 4, S_HEADS = S_SQUARE + 2 * WARPS * 4;
constexpr int S_MAX = S_HEADS + WARPS * G * SEEN * 4, S_COMBINE = S_MAX + WARPS * G * 8;
constexpr int S_COMBINE_MAX = S_COMBINE + WARPS * D * 4, S_Q = S_COMBINE_MAX + WARPS * 8;
constexpr int S_NEW = S_Q + 2 * G * D * 2, S_LAYERS = S_NEW + 2 * D * 2, S_BARS = S_LAYERS + L * (int)sizeof(Layer);
constexpr int MOST_STAGES = 32, S_RING = (S_BARS + (2 * MOST_STAGES + 1) * 8 + 127) / 128 * 128;
constexpr int ROOM = (LIMIT - S_RING) / UNIT, STAGES = ROOM < MOST_STAGES ? ROOM : MOST_STAGES;

static_assert(K % CH == 0 && HD % CH == 0 && F % CH == 0, "sizes must be multiples of 1024");
static_assert((G == 1 || G == 2 || G == 4) && G * KV == H && P >= H && SPLITS >= 1, "1, 2 or 4 query heads a key head");
static_assert(BITS == 16 || BITS == 8 || BITS == 4, "weights of 16, 8 or 4 bits");
static_assert(SLICE == D && SLICE == GROUP, "a warp's slice must be a head, and a group");
static_assert((K + P - 1) / P <= SUMS && STAGES > MANY, "more multiprocessors or shared memory are needed");
static_assert(NQ >= P && K >= P && F >= 2 * P && V >= P, "every block must have a row of every matrix: so it publishes in every epoch");
