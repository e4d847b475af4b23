"""The kernels of attention over spans: each tile of queries, or of keys, visits only what its spans reach. No atomics."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._rows import cdiv
from whet.ops.attention.backward import row_delta
from whet.ops.attention.common import LOG2E, Tile, block_d, cut, dot, dot_add, like, put_rows, ready, rows_of, view

SCAN = 1024  # queries that _reach_kernel looks at together
FAR = tl.constexpr(2**30)


@triton.jit
def _ends(first_ptr, last_ptr, b, row, Lq, Lk):
    """first and last of some queries, within the keys that there are; last = first where none is seen, and past Lq."""
    at, inside = tl.cast(b, tl.int64) * Lq + row, row < Lq
    first = tl.load(first_ptr + at, mask=inside, other=0)
    last = tl.load(last_ptr + at, mask=inside, other=0)
    first = tl.minimum(tl.maximum(first, 0), Lk).to(tl.int32)
    last = tl.minimum(tl.maximum(last, 0), Lk).to(tl.int32)
    return first, tl.maximum(first, last)


@triton.jit
def _keys_of(first, last, row, Lq, Lk, BLOCK_N: tl.constexpr):
    """(lo, full_lo, full_hi, hi): some query of a tile sees of the keys [lo, hi), every one of it all of [full_lo, full_hi).

    All but hi are multiples of BLOCK_N. The tiles of keys before full_lo and from full_hi on need a mask, those between none.
    """
    some, inside = last > first, row < Lq
    lo = tl.min(tl.where(some, first, FAR), 0) // BLOCK_N * BLOCK_N
    hi = tl.max(tl.where(some, last, 0), 0)
    full_lo = tl.cdiv(tl.max(tl.where(inside, first, 0), 0), BLOCK_N) * BLOCK_N
    full_hi = tl.min(tl.where(inside, last, Lk), 0) // BLOCK_N * BLOCK_N
    full_lo = tl.maximum(tl.minimum(full_lo, tl.cdiv(hi, BLOCK_N) * BLOCK_N), lo)
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_view, v_view, b, h, first, last, lo, hi, rate,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):
    """acc, row_max, row_sum after the keys [lo, hi): weighted values, highest score so far (in base 2), sum of weights."""
    for n in tl.range(lo, hi, BLOCK_N):
        k = rows_of(k_view, b, h, n, BLOCK_N, BLOCK_D)
        s = dot(q, k.T)
        if MASKED:
            j = n + tl.arange(0, BLOCK_N)[None, :]
            s = tl.where((j >= first[:, None]) & (j < last[:, None]), s, float("-inf"))
        new = tl.maximum(row_max, tl.max(s, 1) * rate)
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)  # a row that has met no key yet
        p = tl.exp2(s * rate - base[:, None])
        alpha = tl.exp2(row_max - base)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = rows_of(v_view, b, h, n, BLOCK_N, BLOCK_D)
        acc = dot_add(acc, p.to(v.dtype), v)
        row_max = new
    return acc, row_max, row_sum


@triton.jit
def _spans_forward_kernel(
    q_view, k_view, v_view, first_ptr, last_ptr,  # inputs
    o_view, lse_ptr,  # outputs
    H, GROUP, Lq, Lk, rate,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """o = softmax(scale * q k^T) v over the keys first <= j < last of each query.  One program, BLOCK_M queries.

    Fuses   both products, the mask and the softmax: scores stay in registers. Later queries, which mostly see more keys,
            come first.
    Moves   q, two integers a query, the keys and values from the tile's first to its last in; o and one fp32 per row out.
    Rounds  weights to the storage dtype before the second product, o at the store; sums in fp32.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = blocks - 1 - pid % blocks, pid // blocks
    b, h = bh // H, bh % H
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = _ends(first_ptr, last_ptr, b, row, Lq, Lk)
    lo, full_lo, full_hi, hi = _keys_of(first, last, row, Lq, Lk, BLOCK_N)
    q = rows_of(q_view, b, h, block * BLOCK_M, BLOCK_M, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    kv = h // GROUP
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_view, v_view, b, kv, first, last, lo, full_lo, rate, BLOCK_N, BLOCK_D, True
    )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_view, v_view, b, kv, first, last, full_lo, full_hi, rate, BLOCK_N, BLOCK_D, False
    )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_view, v_view, b, kv, first, last, full_hi, hi, rate, BLOCK_N, BLOCK_D, True
    )
    some = row_sum != 0.0
    o = acc * tl.where(some, 1.0 / row_sum, 0.0)[:, None]
    put_rows(o_view, b, h, block * BLOCK_M, o, BLOCK_M, BLOCK_D)
    lse = tl.where(some, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + bh.to(tl.int64) * Lq + row, lse, mask=row < Lq)


@triton.jit
def _spans_dq_tiles(
    dq, q, do, lse, delta, k_view, v_view, b, h, first, last, lo, hi, rate,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):
    """dq after the keys [lo, hi). The mask is that of ds: 0 * NaN would take a query's NaN to keys that it does not see."""
    for n in tl.range(lo, hi, BLOCK_N):
        k = rows_of(k_view, b, h, n, BLOCK_N, BLOCK_D)
        v = rows_of(v_view, b, h, n, BLOCK_N, BLOCK_D)
        p = tl.exp2(dot(q, k.T) * rate - lse[:, None])
        ds = p * (dot(do, v.T) - delta[:, None])
        if MASKED:
            j = n + tl.arange(0, BLOCK_N)[None, :]
            ds = tl.where((j >= first[:, None]) & (j < last[:, None]), ds, 0.0)
        dq = dot_add(dq, ds.to(k.dtype), k)
    return dq


@triton.jit
def _spans_dq_kernel(
    q_view, k_view, v_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr,  # inputs
    dq_view,  # output
    H, GROUP, Lq, Lk, scale, rate,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """dq = scale * ds k;  ds = p * (do v^T - delta);  p = exp(scores - lse).  One program, BLOCK_M queries.

    Over one key the weight is 1 whatever its score, whose gradient is 0, to which do v^T - delta only comes near: such a
    query is taken to see none.

    Fuses   three products and the mask; p and ds stay in registers.
    Moves   q, do, k, v, two integers and two fp32 per row in; dq out.
    Rounds  ds to the storage dtype before the product, dq at the store; sums in fp32.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = blocks - 1 - pid % blocks, pid // blocks
    b, h = bh // H, bh % H
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = _ends(first_ptr, last_ptr, b, row, Lq, Lk)
    last = tl.where(last - first == 1, first, last)
    lo, full_lo, full_hi, hi = _keys_of(first, last, row, Lq, Lk, BLOCK_N)
    q = rows_of(q_view, b, h, block * BLOCK_M, BLOCK_M, BLOCK_D)
    do = rows_of(do_view, b, h, block * BLOCK_M, BLOCK_M, BLOCK_D)
    at = bh.to(tl.int64) * Lq + row
    lse = tl.load(lse_ptr + at, mask=row < Lq, other=0.0)
    delta = tl.load(delta_ptr + at, mask=row < Lq, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    kv = h // GROUP
    dq = _spans_dq_tiles(
        dq, q, do, lse, delta, k_view, v_view, b, kv, first, last, lo, full_lo, rate, BLOCK_N, BLOCK_D, True
    )
    dq = _spans_dq_tiles(
        dq, q, do, lse, delta, k_view, v_view, b, kv, first, last, full_lo, full_hi, rate, BLOCK_N, BLOCK_D, False
    )
    dq = _spans_dq_tiles(
        dq, q, do, lse, delta, k_view, v_view, b, kv, first, last, full_hi, hi, rate, BLOCK_N, BLOCK_D, True
    )
    put_rows(dq_view, b, h, block * BLOCK_M, dq * scale, BLOCK_M, BLOCK_D)


@triton.jit
def _reach_kernel(
    first_ptr, last_ptr,  # inputs
    reach_ptr,  # output (B, blocks of keys, 4)
    Lq, Lk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr,
):
    """The queries [lo, hi) that may see of a block of keys, and those [full_lo, full_hi) that see all of it.  One program, one
    block of keys.

    Spans may come in any order: queries that see the whole block count only where they follow one another without a gap.

    Fuses   the counts over all queries of one row of the batch.
    Moves   two integers a query in; four a block of keys out.
    Rounds  nothing: integers.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(Lk, BLOCK_N)
    b, key = pid // blocks, pid % blocks * BLOCK_N
    lowest, full_lowest = tl.full((SCAN,), FAR, tl.int32), tl.full((SCAN,), FAR, tl.int32)
    highest, full_highest = tl.zeros((SCAN,), tl.int32), tl.zeros((SCAN,), tl.int32)
    count = tl.zeros((SCAN,), tl.int32)
    for m in tl.range(0, Lq, SCAN):
        row = m + tl.arange(0, SCAN)
        first, last = _ends(first_ptr, last_ptr, b, row, Lq, Lk)
        some = (last > first) & (last > key) & (first < key + BLOCK_N)
        full = (last >= key + BLOCK_N) & (first <= key)
        lowest, highest = tl.minimum(lowest, tl.where(some, row, FAR)), tl.maximum(highest, tl.where(some, row + 1, 0))
        full_lowest = tl.minimum(full_lowest, tl.where(full, row, FAR))
        full_highest = tl.maximum(full_highest, tl.where(full, row + 1, 0))
        count += full.to(tl.int32)
    lo, hi = tl.min(lowest, 0) // BLOCK_M * BLOCK_M, tl.max(highest, 0)
    full_lo, full_hi = tl.min(full_lowest, 0), tl.max(full_highest, 0)
    unbroken = tl.sum(count, 0) == full_hi - full_lo
    full_lo = tl.where(unbroken, tl.cdiv(full_lo, BLOCK_M) * BLOCK_M, lo)
    full_hi = tl.where(unbroken, full_hi // BLOCK_M * BLOCK_M, lo)
    full_lo = tl.maximum(tl.minimum(full_lo, tl.cdiv(hi, BLOCK_M) * BLOCK_M), lo)
    at = reach_ptr + pid.to(tl.int64) * 4
    tl.store(at, lo)
    tl.store(at + 1, full_lo)
    tl.store(at + 2, tl.maximum(full_hi, full_lo))
    tl.store(at + 3, hi)


@triton.jit
def _spans_dkdv_tiles(
    dk, dv, k, v, q_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr, b, h, j, lo, hi, head, Lq, Lk, rate,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):
    """dk and dv after the queries [lo, hi). ds is masked where p is, by p's zeros; a query of one key adds nothing to it."""
    for m in tl.range(lo, hi, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        q = rows_of(q_view, b, h, m, BLOCK_M, BLOCK_D)
        do = rows_of(do_view, b, h, m, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + head + row, mask=row < Lq, other=0.0)
        p = tl.exp2(dot(k, q.T) * rate - lse[None, :])
        if MASKED:
            first, last = _ends(first_ptr, last_ptr, b, row, Lq, Lk)
            p = tl.where((j[:, None] >= first[None, :]) & (j[:, None] < last[None, :]), p, 0.0)
        dv = dot_add(dv, p.to(do.dtype), do)
        delta = tl.load(delta_ptr + head + row, mask=row < Lq, other=0.0)
        ds = p * (dot(v, do.T) - delta[None, :])
        if MASKED:
            ds = tl.where((p == 0.0) | (last - first == 1)[None, :], 0.0, ds)
        dk = dot_add(dk, ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _spans_dkdv_kernel(
    q_view, k_view, v_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr, reach_ptr,  # inputs
    dk_view, dv_view,  # outputs
    Hkv, Lq, Lk, scale, rate,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """dv = p^T do;  dk = scale * ds^T q;  p and ds as in dq.  One program, BLOCK_N keys.

    Fuses   four products and the mask, transposed: keys are the rows, so that p^T and ds^T stay in registers as left
            operands. The query heads that share these keys follow one another.
    Moves   k, v, of the queries that may see them q, do, two integers and two fp32 in; dk, dv out.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32.
    """
    blocks = tl.cdiv(Lk, BLOCK_N)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    b, kv = bh // Hkv, bh % Hkv
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = reach_ptr + (b * blocks + block).to(tl.int64) * 4
    lo, full_lo, full_hi, hi = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    k = rows_of(k_view, b, kv, block * BLOCK_N, BLOCK_N, BLOCK_D)
    v = rows_of(v_view, b, kv, block * BLOCK_N, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for g in range(GROUP):
        h = kv * GROUP + g
        head = (b * Hkv * GROUP + h).to(tl.int64) * Lq
        dk, dv = _spans_dkdv_tiles(
            dk, dv, k, v, q_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr, b, h, j, lo, full_lo, head, Lq, Lk, rate,
            BLOCK_M, BLOCK_D, True,
        )
        dk, dv = _spans_dkdv_tiles(
            dk, dv, k, v, q_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr, b, h, j, full_lo, full_hi, head, Lq, Lk,
            rate, BLOCK_M, BLOCK_D, False,
        )
        dk, dv = _spans_dkdv_tiles(
            dk, dv, k, v, q_view, do_view, first_ptr, last_ptr, lse_ptr, delta_ptr, b, h, j, full_hi, hi, head, Lq, Lk, rate,
            BLOCK_M, BLOCK_D, True,
        )
    put_rows(dk_view, b, kv, block * BLOCK_N, dk * scale, BLOCK_N, BLOCK_D)
    put_rows(dv_view, b, kv, block * BLOCK_N, dv, BLOCK_N, BLOCK_D)


def forward(q, k, v, first, last, scale, tile: Tile):
    (B, H, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    q, k, v = ready(q), ready(k), ready(v)
    o, lse = like(q, D), torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    if not (o.numel() and Lk):
        return cut(o.zero_(), D), lse.fill_(float("-inf"))
    rate = max(scale * LOG2E, 2.0**-126)  # 0 * -inf would be NaN
    launcher(_spans_forward_kernel)[(B * H * cdiv(Lq, tile.M),)](
        view(q, tile.M), view(k, tile.N), view(v, tile.N), first.contiguous(), last.contiguous(), view(o, tile.M), lse,
        H, H // Hkv, Lq, Lk, rate, BLOCK_D=block_d(q.shape[3]), **tile.options,
    )
    return cut(o, D), lse


def backward(do, q, k, v, first, last, o, lse, scale, dq_tile: Tile, dkdv_tile: Tile):
    (B, H, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    do = do.masked_fill((lse == float("-inf"))[..., None], 0.0)  # in the dkdv kernel that spills 220 bytes a thread on sm_90
    q, k, v, do = ready(q), ready(k), ready(v), ready(do)
    dq, dk, dv = like(q, D), like(k, D), like(v, D)
    if not (dq.numel() and dk.numel()):
        return tuple(cut(t.zero_(), D) for t in (dq, dk, dv))
    first, last, delta, rate = first.contiguous(), last.contiguous(), row_delta(o, do, None), scale * LOG2E
    t, BLOCK_D = dq_tile, block_d(q.shape[3])
    launcher(_spans_dq_kernel)[(B * H * cdiv(Lq, t.M),)](
        view(q, t.M), view(k, t.N), view(v, t.N), view(do, t.M), first, last, lse, delta, view(dq, t.M),
        H, H // Hkv, Lq, Lk, scale, rate, BLOCK_D=BLOCK_D, **t.options,
    )
    t = dkdv_tile
    blocks = cdiv(Lk, t.N)
    reach = torch.empty(B, blocks, 4, dtype=torch.int32, device=q.device)
    launcher(_reach_kernel)[(B * blocks,)](first, last, reach, Lq, Lk, BLOCK_M=t.M, BLOCK_N=t.N, SCAN=SCAN)
    launcher(_spans_dkdv_kernel)[(B * Hkv * blocks,)](
        view(q, t.M), view(k, t.N), view(v, t.N), view(do, t.M), first, last, lse, delta, reach, view(dk, t.N), view(dv, t.N),
        Hkv, Lq, Lk, scale, rate, GROUP=H // Hkv, BLOCK_D=BLOCK_D, **t.options,
    )
    return cut(dq, D), cut(dk, D), cut(dv, D)
