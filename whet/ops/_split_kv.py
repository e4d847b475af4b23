"""The kernels of cached_attention: split-KV attention, and the log-sum-exp combine of the splits.

A split is a run of spans of SPAN keys, one after another. How a sequence is cut depends on how many keys a token sees alone.
A token's own key comes first, then those before it as they lie in the cache, new or old: one token or eight, the same sums.
"""

import triton
import triton.language as tl

from whet.ops._pdl import launch_dependents, wait
from whet.ops.attention.common import dot, dot_add


@triton.jit
def halves(x_ptr, live, D: tl.constexpr, HALF: tl.constexpr):
    """The two halves of a row each, (rows, HALF) in fp32: read as they lie, nothing is gathered."""
    d = tl.arange(0, HALF)[None, :]
    there = live[:, None] & (d < D // 2)
    x = tl.load(x_ptr[:, None] + d, mask=there, other=0.0).to(tl.float32)
    return x, tl.load(x_ptr[:, None] + D // 2 + d, mask=there, other=0.0).to(tl.float32)


@triton.jit
def diagonal(x):
    r = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(r[:, None] == r[None, :], x, 0.0), axis=1)


@triton.jit
def rotated(x, y, c, s, wx, wy, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Halves of heads, normed by weights wx, wy and rotated."""
    if HAS_NORM:
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x + y * y, axis=1, keep_dims=True) / D + eps)
        x *= rstd * wx
        y *= rstd * wy
    return x * c - y * s, y * c + x * s


@triton.jit
def spans_per_split(keys, SPAN: tl.constexpr, WHOLE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Spans in each split for a token that sees so many keys: by that alone, so that its bits depend on nothing else."""
    spans = tl.cdiv(keys, SPAN).to(tl.int32)
    return tl.where(spans <= WHOLE, WHOLE, tl.cdiv(spans, MAX_SPLITS)) if MAX_SPLITS > 1 else spans


@triton.jit
def whole(x, y):
    """Halves side by side, (rows, 2 HALF)."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def columns(D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where a key's columns lie, and which of them there are: each half fills half of a tile."""
    d, H2 = tl.arange(0, BLOCK_D)[None, :], BLOCK_D // 2
    return (d, d < BLOCK_D) if D == BLOCK_D else (tl.where(d < H2, d, d - H2 + D // 2), d % H2 < D // 2)


@triton.jit
def keys_of(
    k_ptr, v_ptr, first, stride_ks, stride_vs, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):
    """TILE keys from the first on and their values; with MASKED nothing where a key is not from low up to high."""
    i, d = tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at, there = columns(D, BLOCK_D)
    far = tl.full((), 0, tl.int64) + first
    k_at, v_at = k_ptr + far * stride_ks + (i * stride_ks + at), v_ptr + far * stride_vs + (i * stride_vs + d)
    if MASKED or D != BLOCK_D:
        old = (first + i >= low) & (first + i < high)
        return tl.load(k_at, mask=old & there, other=0.0), tl.load(v_at, mask=old & (d < D), other=0.0)
    else:
        return tl.load(k_at), tl.load(v_at)


@triton.jit
def with_new(k, v, first, new_k, new_v, position, T: tl.constexpr, G: tl.constexpr):
    """Keys from the first on and their values, with those of the T new ones that belong there; they stand in every G-th row."""
    r, i = tl.arange(0, new_k.shape[0])[:, None], tl.arange(0, k.shape[0])
    if first + k.shape[0] > position:
        for t in range(T):
            its = (first + i == position + t)[:, None]
            k_t = tl.sum(tl.where(r == t * G, new_k.to(tl.float32), 0.0), axis=0)[None, :]
            v_t = tl.sum(tl.where(r == t * G, new_v.to(tl.float32), 0.0), axis=0)[None, :]
            k, v = tl.where(its, k_t.to(k.dtype), k), tl.where(its, v_t.to(v.dtype), v)
    return k, v


@triton.jit
def product(q, k):
    """q @ k.T, in fp32 half by half: longer sums show the bits that three TF32 products miss."""
    if q.dtype == tl.float32:
        H2: tl.constexpr = q.shape[1] // 2
        qx, qy = tl.split(tl.permute(tl.reshape(q, (q.shape[0], 2, H2)), (0, 2, 1)))
        kx, ky = tl.split(tl.permute(tl.reshape(k, (k.shape[0], 2, H2)), (0, 2, 1)))
        return dot_add(dot(qx, tl.trans(kx)), qy, tl.trans(ky))
    else:
        return dot(q, tl.trans(k))


@triton.jit
def scores(q, k, first, at, window, scale):
    """Of the keys before each row's own. What is seen is asked in any case: else the product with scale is fused elsewhere."""
    j = (first + tl.arange(0, k.shape[0]))[None, :]
    seen = j < at[:, None]
    if window is not None:
        seen = seen & (j + window > at[:, None])
    return tl.where(seen, product(q, k) * scale, float("-inf"))


@triton.jit
def weighed(score, v, row_max, row_sum, acc):
    """row_sum and acc with keys of these scores, none above row_max. row_sum is a product too: one order in any layout."""
    p = tl.exp2(score - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None]).to(v.dtype)
    if v.dtype == tl.float32:
        return row_sum + tl.sum(p, axis=1)[:, None], dot_add(acc, p, v)
    else:
        ones = tl.full((v.shape[0], row_sum.shape[1]), 1.0, tl.float32).to(v.dtype)
        return dot_add(row_sum, p, ones), dot_add(acc, p, v)


@triton.jit
def mean(acc, row_sum, out_ptr):
    """acc / row_sum, correctly rounded where the result is float32: `/` may be two steps off, which a float32 result shows."""
    if out_ptr.dtype.element_ty == tl.float32:
        return tl.div_rn(acc, row_sum + tl.zeros_like(acc))
    else:
        return acc / row_sum


@triton.jit
def attended(q, k, v, first, at, row_max, row_sum, acc, window, scale):
    """row_max, row_sum and acc after more keys."""
    score = scores(q, k, first, at, window, scale)
    higher = tl.maximum(row_max, tl.max(score, axis=1))
    shrink = tl.exp2(row_max - tl.where(higher == float("-inf"), 0.0, higher))[:, None]
    row_sum, acc = weighed(score, v, higher, row_sum * shrink, acc * shrink)
    return higher, row_sum, acc


@triton.jit
def over_split(
    q, held, new, cut, keys, caches, rows, outs, window, scale,
    T: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr,
):
    """The rows of queries over the split, stored: their own keys, spans one after the other, and the k and v that are held.

    cut     the split, its spans, all spans
    keys    from low up to high are old; at is each row's own, position that of the first row
    rows    which of them are stored, and where
    """
    k, v = held
    new_k, new_v, self = new
    split, each, spans = cut
    low, high, at, position = keys
    k_ptr, v_ptr, stride_ks, stride_vs = caches
    live, place = rows
    out_ptr, row_max_ptr, row_sum_ptr = outs
    lo, hi = split * each, tl.minimum((split + 1) * each, spans)
    own = at // SPAN // each == split
    MASKED: tl.constexpr = T > 1 or window is not None
    row_max, ours = tl.where(own, self, float("-inf")), tl.where(own, 1.0, 0.0)[:, None]
    row_sum, acc = ours + tl.zeros((q.shape[0], 16), tl.float32), new_v.to(tl.float32) * ours
    if not ALONE:
        for span in tl.range(lo, hi - 1, num_stages=STAGES):
            a, b = keys_of(k_ptr, v_ptr, span * SPAN, stride_ks, stride_vs, low, high, D, BLOCK_D, SPAN, MASKED)
            if T > 1:
                a, b = with_new(a, b, span * SPAN, new_k, new_v, position, T, G)
            row_max, row_sum, acc = attended(q, a, b, span * SPAN, at, row_max, row_sum, acc, window, scale)
    first = 0 if ALONE else (hi - 1) * SPAN
    if T > 1:
        k, v = with_new(k, v, first, new_k, new_v, position, T, G)
    row_max, row_sum, acc = attended(q, k, v, first, at, row_max, row_sum, acc, window, scale)
    d, row_sum, stored = tl.arange(0, BLOCK_D)[None, :], tl.max(row_sum, axis=1), live & (hi > lo)
    if SPLITS == 1:
        tl.store(out_ptr + place[:, None] * D + d, mean(acc, row_sum[:, None], out_ptr), mask=stored[:, None] & (d < D))
    else:
        tl.store(out_ptr + (place * SPLITS + split)[:, None] * D + d, acc, mask=stored[:, None] & (d < D))
        tl.store(row_max_ptr + place * SPLITS + split, row_max, mask=stored)
        tl.store(row_sum_ptr + place * SPLITS + split, row_sum, mask=stored)


@triton.jit
def _split_kv_kernel(
    qkv_ptr, k_ptr, v_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,  # inputs; the caches are written too
    out_ptr, row_max_ptr, row_sum_ptr,  # outputs: the rows, or with SPLITS > 1 each split's acc, max, sum
    stride_qb, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    S, context, window, scale, eps,
    T: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr, ALONE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of T new tokens of one sequence, all query heads of one key head, over one split of spans.  One program.

    Fuses   QK norm, RoPE and the write of the new keys and values. With PDL the old ones of the last span, or with ALONE
            of all, are on their way before qkv is there. Row r of the tile is token r // G of head r % G.
    Moves   the split's keys and values in, qkv in; T keys and values out, and a row a head, or with SPLITS > 1 fp32 sums.
    Rounds  q and the new keys to the storage dtype once, after norm and rotation; scores and sums in fp32, the weights
            to the storage dtype as operand of the second product and of their row_sum; the row once.
    """
    launch_dependents(PDL)
    split, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    position = tl.load(positions_ptr + b).to(tl.int32)
    spans = tl.cdiv(tl.minimum(position + T, context), SPAN)
    few = spans_per_split(tl.minimum(position + 1, context), SPAN, WHOLE, MAX_SPLITS)
    more = spans_per_split(tl.minimum(position + T, context), SPAN, WHOLE, MAX_SPLITS) if T > 1 else few
    if split * tl.minimum(few, more) >= spans:
        return
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    qkv_ptr += b * stride_qb
    low, high = 0, tl.minimum(position, S)
    if window is not None:
        low = tl.maximum(position - window + 1, 0)
    TILE: tl.constexpr = WHOLE * SPAN if ALONE else SPAN
    first = split * 0 if ALONE else (tl.minimum((split + 1) * few, spans) - 1) * SPAN
    k, v = keys_of(k_ptr, v_ptr, first, stride_ks, stride_vs, low, high, D, BLOCK_D, TILE, True)
    G: tl.constexpr = H // KV
    H2: tl.constexpr = BLOCK_D // 2
    r, one = tl.arange(0, BLOCK_R), tl.arange(0, 1)
    live, at = r // G < T, position + r // G
    half, d = tl.arange(0, H2)[None, :], tl.arange(0, BLOCK_D)[None, :]
    known = (live & (at < S))[:, None] & (half < D // 2)
    HAS_NORM: tl.constexpr = q_norm_ptr is not None
    c = tl.load(cos_ptr + at[:, None].to(tl.int64) * (D // 2) + half, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + at[:, None].to(tl.int64) * (D // 2) + half, mask=known, other=0.0).to(tl.float32)
    qwx, qwy, kwx, kwy = c, c, c, c
    if q_norm_ptr is not None:
        qwx, qwy = halves(q_norm_ptr + one, one == 0, D, H2)
        kwx, kwy = halves(k_norm_ptr + one, one == 0, D, H2)
    wait(PDL)

    qkv_ptr += (r // G) * stride_qt
    x, y = halves(qkv_ptr + (h * G + r % G) * D, live, D, H2)
    new_x, new_y = halves(qkv_ptr + (H + h) * D, live, D, H2)
    new_v = tl.load((qkv_ptr + (H + KV + h) * D)[:, None] + d, mask=live[:, None] & (d < D), other=0.0).to(dtype)
    x, y = rotated(x, y, c, s, qwx, qwy, eps, D, HAS_NORM)
    new_x, new_y = rotated(new_x, new_y, c, s, kwx, kwy, eps, D, HAS_NORM)
    q, new_k = whole(x.to(dtype), y.to(dtype)), whole(new_x.to(dtype), new_y.to(dtype))
    self = diagonal(product(q, new_k) * scale)
    put = (live & (r % G == 0) & (at < S) & (split == 0))[:, None]
    column, there = columns(D, BLOCK_D)
    tl.store(k_ptr + at[:, None].to(tl.int64) * stride_ks + column, new_k, mask=put & there)
    tl.store(v_ptr + at[:, None].to(tl.int64) * stride_vs + d, new_v, mask=put & (d < D))
    place = (b * T + r // G) * H + h * G + r % G
    level = spans_per_split(tl.minimum(at + 1, context), SPAN, WHOLE, MAX_SPLITS)
    new, keys, caches = (new_k, new_v, self), (low, high, at, position), (k_ptr, v_ptr, stride_ks, stride_vs)
    outs = (out_ptr, row_max_ptr, row_sum_ptr)
    over_split(
        q, (k, v), new, (split, few, spans), keys, caches, (live & (level == few), place), outs, window, scale,
        T, G, D, BLOCK_D, SPLITS, SPAN, ALONE, STAGES,
    )
    if T > 1 and more != few:
        first = tl.maximum(tl.minimum((split + 1) * more, spans) - 1, 0) * SPAN
        k, v = keys_of(k_ptr, v_ptr, first, stride_ks, stride_vs, low, high, D, BLOCK_D, SPAN, True)
        over_split(
            q, (k, v), new, (split, more, spans), keys, caches, (live & (level == more), place), outs, window, scale,
            T, G, D, BLOCK_D, SPLITS, SPAN, ALONE, STAGES,
        )


@triton.jit
def _combine_kernel(
    acc_ptr, row_max_ptr, row_sum_ptr, positions_ptr,  # inputs
    out_ptr,  # output
    context,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr,
):
    """Log-sum-exp combine: out = sum_i 2^(m_i - m) acc_i / sum_i 2^(m_i - m) n_i.  One program, one head of one token.

    Moves   D sums and two weights for each split that has keys in; one row out.
    Rounds  once, at the store; splits are combined in order, GATHER at a time.
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    keys = tl.minimum(tl.load(positions_ptr + row // H // T).to(tl.int32) + (row // H % T).to(tl.int32) + 1, context)
    splits = tl.cdiv(tl.cdiv(keys, SPAN), spans_per_split(keys, SPAN, WHOLE, MAX_SPLITS))
    d = tl.arange(0, BLOCK_D)
    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    wait(PDL)
    for first in range(0, splits, GATHER):
        i = first + tl.arange(0, GATHER)
        at = row * SPLITS + i
        m = tl.load(row_max_ptr + at, mask=i < splits, other=float("-inf"))
        n = tl.load(row_sum_ptr + at, mask=i < splits, other=0.0)
        a = tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
        higher = tl.maximum(row_max, tl.max(m, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp2(m - safe), tl.exp2(row_max - safe)
        row_sum = row_sum * shrink + tl.sum(n * weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(a * weight[:, None], axis=0)[None, :]
        row_max = higher
    tl.store(out_ptr + row * D + d[None, :], mean(acc, row_sum[:, None], out_ptr), mask=(d < D)[None, :])
