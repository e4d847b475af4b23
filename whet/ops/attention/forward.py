"""The forward kernel of attention: online softmax in base 2, one pass over the keys; the log-sum-exp stays in base 2."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._rows import cdiv
from whet.ops.attention.common import (
    LOG2E,
    Tile,
    block_d,
    cut,
    dot,
    dot_add,
    edges,
    like,
    limits,
    put_rows,
    ready,
    rows_of,
    seen,
    view,
)
from whet.ops.attention.hopper_forward import forward_hopper


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_view, v_view, b, h, i, lo, hi, Lk, rate, left, right,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """acc, row_max, row_sum after the keys [lo, hi): weighted values, highest score so far (in base 2), sum of weights."""
    for n in tl.range(lo, hi, BLOCK_N):
        k = rows_of(k_view, b, h, n, BLOCK_N, BLOCK_D)
        s = dot(q, k.T)
        if MASKED:
            see = seen(i[:, None], n + tl.arange(0, BLOCK_N)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(see, s, float("-inf"))
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
def _forward_kernel(
    q_view, k_view, v_view,  # inputs
    o_view, lse_ptr,  # outputs
    H, GROUP, Lq, Lk, rate, offset, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """o = softmax(scale * q k^T) v over the keys j with -left <= j - (i + offset) <= right.  One program, BLOCK_M queries.

    Fuses   both products and the softmax: scores stay in registers. Programs of one head are neighbours, so that its keys
            and values stay in L2; those that see most keys come first.
    Moves   q, k, v in; o and one fp32 per row out. k and v come from L2 once per BLOCK_M queries.
    Rounds  weights to the storage dtype before the second product, o at the store; sums in fp32.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    if HAS_RIGHT:
        block = blocks - 1 - block
    b, h = bh // H, bh % H
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    i = row + offset
    lo, full_lo, full_hi, hi = edges(
        first + offset, tl.minimum(first + BLOCK_M, Lq) - 1 + offset, Lk, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    q = rows_of(q_view, b, h, first, BLOCK_M, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    kv = h // GROUP
    if HAS_LEFT:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_view, v_view, b, kv, i, lo, full_lo, Lk, rate, left, right,
            BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_view, v_view, b, kv, i, full_lo, full_hi, Lk, rate, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
    )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_view, v_view, b, kv, i, full_hi, hi, Lk, rate, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
    )
    some = row_sum != 0.0
    o = acc * tl.where(some, 1.0 / row_sum, 0.0)[:, None]
    put_rows(o_view, b, h, first, o, BLOCK_M, BLOCK_D)
    lse = tl.where(some, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + bh.to(tl.int64) * Lq + row, lse, mask=row < Lq)


def forward(q, k, v, scale, offset, left, right, tile: Tile):
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    q, k, v = ready(q), ready(k), ready(v)
    o = like(q, D)
    lse = torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    if not (o.numel() and Lk):
        return cut(o.zero_(), D), lse.fill_(float("-inf"))
    rate = max(scale * LOG2E, 2.0**-126)  # 0 * -inf would be NaN
    if tile.gluon:
        forward_hopper(o, lse, q, k, v, rate, offset, left, right, tile)
        return cut(o, D), lse
    launcher(_forward_kernel)[(B * H * cdiv(Lq, tile.M),)](
        view(q, tile.M), view(k, tile.N), view(v, tile.N), view(o, tile.M), lse,
        H, H // k.shape[1], Lq, Lk, rate, offset, **limits(left, right), BLOCK_D=block_d(q.shape[3]), **tile.options,
    )
    return cut(o, D), lse
