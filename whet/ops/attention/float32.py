"""attention in float32 by products of pairs of halves: as `_halves` has them, one scale for all of a head.

q, k and v are split once, and kept so for the backward: as many bytes as they are. Weights and their gradients are split as
they come, in registers. Sums are those of a tile in the tensor cores, and of tiles in float32.
"""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._pairs import TOP, in_halves, magnitude, padded, power_below
from whet.ops._rows import cdiv
from whet.ops.attention.backward import row_delta
from whet.ops.attention.common import (
    LOG2E,
    NOWHERE,
    Tile,
    block_d,
    edges,
    limits,
    lone,
    lone_places,
    put_rows,
    rows_of,
    seen,
    view,
)
from whet.ops.attention.halves import split

TOGETHER = 64  # BLOCK_D up to which dk and dv are made at once: at 128 their sums leave a tile's products no registers
MAX_D = 128  # at 256 four tiles of halves leave no room for a second stage
TILES = {  # forward, dq, dkdv, by BLOCK_D
    16: ("64x64w4s2", "64x64w4s2", "64x64w4s2"), 32: ("64x64w4s2", "64x64w4s2", "64x64w4s2"),
    64: ("64x64w4s2", "64x64w4s2", "32x64w4s2"), 128: ("64x64w4s2", "64x32w4s2", "32x64w4s2"),
}


@triton.jit
def _scale_of(peak_ptr, head):
    """Of a head, less what its halves are scaled up by."""
    return power_below(tl.load(peak_ptr + head).to(tl.float32, bitcast=True)) * (1.0 / TOP)


@triton.jit
def _halves_of(x, B, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return rows_of(x, b, h, first, ROWS, BLOCK_D), rows_of(x, B + b, h, first, ROWS, BLOCK_D)


@triton.jit
def _product(a, a_rest, b, b_rest):
    part = tl.dot(a_rest, b)
    part = tl.dot(a, b_rest, part)
    return tl.dot(a, b, part)


@triton.jit
def _weighted(w, b, b_rest):
    """w @ b of w from 0 to 1, times 2^14."""
    hi, lo = in_halves(w * TOP)
    return _product(hi, lo, b, b_rest)


@triton.jit
def _scaled_product(w, b, b_rest):
    """w @ b, each row of w scaled by a power of two and back."""
    scale = power_below(tl.max(magnitude(w), 1))
    into = TOP / scale
    hi, lo = in_halves(w * into[:, None])
    back = scale * (1.0 / TOP)
    return _product(hi, lo, b, b_rest) * back[:, None]


@triton.jit
def _attend(
    acc, row_max, row_sum, q, q_rest, k_view, v_view, B, b, h, i, lo, hi, Lk, rate, left, right,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """acc, row_max, row_sum after the keys [lo, hi): weighted values, highest score so far (in base 2), sum of weights."""
    for n in tl.range(lo, hi, BLOCK_N):
        k, k_rest = _halves_of(k_view, B, b, h, n, BLOCK_N, BLOCK_D)
        s = _product(q, q_rest, k.T, k_rest.T) * rate
        if MASKED:
            see = seen(i[:, None], n + tl.arange(0, BLOCK_N)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(see, s, float("-inf"))
        new = tl.maximum(row_max, tl.max(s, 1))
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)  # a row that has met no key yet
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(row_max - base)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v, v_rest = _halves_of(v_view, B, b, h, n, BLOCK_N, BLOCK_D)
        acc = acc * alpha[:, None] + _weighted(p, v, v_rest)
        row_max = new
    return acc, row_max, row_sum


@triton.jit
def _forward_float32_kernel(
    q_view, k_view, v_view, q_peak_ptr, k_peak_ptr, v_peak_ptr,  # inputs: halves, and the peaks of heads
    o_view, lse_ptr,  # outputs
    B, H, GROUP, Lq, Lk, rate, offset, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """o = softmax(scale * q k^T) v over the keys j with -left <= j - (i + offset) <= right.  One program, BLOCK_M queries.

    Fuses   both products, each three of halves, and the softmax: scores stay in registers.
    Moves   q, k, v in; o and one fp32 per row out. k and v come from L2 once per BLOCK_M queries.
    Rounds  a tile's products in the tensor cores, the smallest first; their sums in fp32; o at the store.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    if HAS_RIGHT:
        block = blocks - 1 - block
    b, h = bh // H, bh % H
    first, kv = block * BLOCK_M, h // GROUP
    row = first + tl.arange(0, BLOCK_M)
    i = row + offset
    lo, full_lo, full_hi, hi = edges(
        first + offset, tl.minimum(first + BLOCK_M, Lq) - 1 + offset, Lk, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    head = b * (H // GROUP) + kv
    by = rate * _scale_of(q_peak_ptr, bh) * _scale_of(k_peak_ptr, head)
    q, q_rest = _halves_of(q_view, B, b, h, first, BLOCK_M, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if HAS_LEFT:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_rest, k_view, v_view, B, b, kv, i, lo, full_lo, Lk, by, left, right,
            BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, q_rest, k_view, v_view, B, b, kv, i, full_lo, full_hi, Lk, by, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
    )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, q_rest, k_view, v_view, B, b, kv, i, full_hi, hi, Lk, by, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
    )
    some = row_sum != 0.0
    o = acc * (_scale_of(v_peak_ptr, head) * (1.0 / TOP)) * tl.where(some, 1.0 / row_sum, 0.0)[:, None]
    put_rows(o_view, b, h, first, o, BLOCK_M, BLOCK_D)
    lse = tl.where(some, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + bh.to(tl.int64) * Lq + row, lse, mask=row < Lq)


@triton.jit
def _dq_tiles(
    dq, q, q_rest, do, do_rest, lse, delta, k_view, v_view, B, b, h, i, lo, hi, Lk, by_score, by_value, left, right,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """dq after the keys [lo, hi). The mask is that of ds: 0 * NaN would take a query's NaN to keys that it does not see."""
    for n in tl.range(lo, hi, BLOCK_N):
        k, k_rest = _halves_of(k_view, B, b, h, n, BLOCK_N, BLOCK_D)
        v, v_rest = _halves_of(v_view, B, b, h, n, BLOCK_N, BLOCK_D)
        p = tl.exp2(_product(q, q_rest, k.T, k_rest.T) * by_score - lse[:, None])
        ds = p * (_product(do, do_rest, v.T, v_rest.T) * by_value - delta[:, None])
        if MASKED:
            see = seen(i[:, None], n + tl.arange(0, BLOCK_N)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT)
            ds = tl.where(see, ds, 0.0)
        dq += _scaled_product(ds, k, k_rest)
    return dq


@triton.jit
def _dq_float32_kernel(
    q_view, k_view, v_view, do_view, q_peak_ptr, k_peak_ptr, v_peak_ptr, do_peak_ptr, lse_ptr, delta_ptr,  # inputs
    dq_view,  # output
    B, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """dq = scale * ds k;  ds = p * (do v^T - delta);  p = exp(scores - lse).  One program, BLOCK_M queries.

    Fuses   three products, each three of halves; p and ds stay in registers.
    Moves   q, do, k, v, two fp32 per row in; dq out.
    Rounds  a tile's products in the tensor cores, the smallest first; their sums in fp32; dq at the store.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    if HAS_RIGHT:
        block = blocks - 1 - block
    b, h = bh // H, bh % H
    first, kv = block * BLOCK_M, h // GROUP
    row = first + tl.arange(0, BLOCK_M)
    i = row + offset
    i = tl.where(lone(i, first_lone, last_lone), NOWHERE, i)
    lo, full_lo, full_hi, hi = edges(
        first + offset, tl.minimum(first + BLOCK_M, Lq) - 1 + offset, Lk, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    head = b * (H // GROUP) + kv
    of_k = _scale_of(k_peak_ptr, head)
    by_score = rate * _scale_of(q_peak_ptr, bh) * of_k
    by_value = _scale_of(do_peak_ptr, bh) * _scale_of(v_peak_ptr, head)
    q, q_rest = _halves_of(q_view, B, b, h, first, BLOCK_M, BLOCK_D)
    do, do_rest = _halves_of(do_view, B, b, h, first, BLOCK_M, BLOCK_D)
    at = bh.to(tl.int64) * Lq + row
    lse = tl.load(lse_ptr + at, mask=row < Lq, other=0.0)
    delta = tl.load(delta_ptr + at, mask=row < Lq, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    if HAS_LEFT:
        dq = _dq_tiles(
            dq, q, q_rest, do, do_rest, lse, delta, k_view, v_view, B, b, kv, i, lo, full_lo, Lk, by_score, by_value,
            left, right, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )
    dq = _dq_tiles(
        dq, q, q_rest, do, do_rest, lse, delta, k_view, v_view, B, b, kv, i, full_lo, full_hi, Lk, by_score, by_value,
        left, right, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
    )
    dq = _dq_tiles(
        dq, q, q_rest, do, do_rest, lse, delta, k_view, v_view, B, b, kv, i, full_hi, hi, Lk, by_score, by_value,
        left, right, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
    )
    put_rows(dq_view, b, h, first, dq * (scale * of_k), BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, k_rest, v, v_rest, q_view, do_view, lse_ptr, delta_ptr, B, b, h, j, lo, hi, head, Lq, Lk,
    by_score, by_value, of_q, of_do, offset, first_lone, last_lone, left, right,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
    WANTED: tl.constexpr,
):
    """dk and dv, or the WANTED of them, after the queries [lo, hi). ds is masked where p is, by p's zeros."""
    for m in tl.range(lo, hi, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        q, q_rest = _halves_of(q_view, B, b, h, m, BLOCK_M, BLOCK_D)
        do, do_rest = _halves_of(do_view, B, b, h, m, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + head + row, mask=row < Lq, other=float("inf"))  # p = 0: a row's scale is of its own weights
        p = tl.exp2(_product(k, k_rest, q.T, q_rest.T) * by_score - lse[None, :])
        if MASKED:
            p = tl.where(seen((row + offset)[None, :], j[:, None], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        if WANTED != "dk":
            dv += _scaled_product(p, do, do_rest) * of_do
        if WANTED != "dv":
            delta = tl.load(delta_ptr + head + row, mask=row < Lq, other=0.0)
            ds = p * (_product(v, v_rest, do.T, do_rest.T) * by_value - delta[None, :])
            if MASKED:
                ds = tl.where((p == 0.0) | lone(row + offset, first_lone, last_lone)[None, :], 0.0, ds)
            dk += _scaled_product(ds, q, q_rest) * of_q
    return dk, dv


@triton.jit
def _dkdv_float32_kernel(
    q_view, k_view, v_view, do_view, q_peak_ptr, k_peak_ptr, v_peak_ptr, do_peak_ptr, lse_ptr, delta_ptr,  # inputs
    dk_view, dv_view,  # outputs
    B, Hkv, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, WANTED: tl.constexpr,
):
    """dv = p^T do;  dk = scale * ds^T q;  p and ds as in dq; or the WANTED of the two.  One program, BLOCK_N keys.

    Fuses   four products, each three of halves, transposed: keys are the rows. The query heads that share these keys follow
            one another, each with its own scale.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out.
    Rounds  a tile's products in the tensor cores, the smallest first; their sums in fp32; dk and dv at the store.
    """
    blocks = tl.cdiv(Lk, BLOCK_N)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    b, kv = bh // Hkv, bh % Hkv
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    # Seen from a key, left and right change places: query i sees key j where -right <= (i + offset) - j <= left.
    lo, full_lo, full_hi, hi = edges(
        first - offset, tl.minimum(first + BLOCK_N, Lk) - 1 - offset, Lq, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT
    )
    if not HAS_LEFT:
        full_hi = hi  # past the last query q and do are zero, and so is what they add: a ragged tile needs no mask
    k, k_rest = _halves_of(k_view, B, b, kv, first, BLOCK_N, BLOCK_D)
    v, v_rest = _halves_of(v_view, B, b, kv, first, BLOCK_N, BLOCK_D)
    of_k, of_v = _scale_of(k_peak_ptr, bh), _scale_of(v_peak_ptr, bh)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for g in range(GROUP):
        h = kv * GROUP + g
        query_head = b * Hkv * GROUP + h
        head = query_head.to(tl.int64) * Lq
        of_q, of_do = _scale_of(q_peak_ptr, query_head), _scale_of(do_peak_ptr, query_head)
        by_score, by_value = rate * of_q * of_k, of_do * of_v
        if HAS_RIGHT:
            dk, dv = _dkdv_tiles(
                dk, dv, k, k_rest, v, v_rest, q_view, do_view, lse_ptr, delta_ptr, B, b, h, j, lo, full_lo, head, Lq, Lk,
                by_score, by_value, of_q, of_do, offset, first_lone, last_lone, left, right,
                BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, True, WANTED,
            )
        dk, dv = _dkdv_tiles(
            dk, dv, k, k_rest, v, v_rest, q_view, do_view, lse_ptr, delta_ptr, B, b, h, j, full_lo, full_hi, head, Lq, Lk,
            by_score, by_value, of_q, of_do, offset, first_lone, last_lone, left, right,
            BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, False, WANTED,
        )
        if HAS_LEFT:
            dk, dv = _dkdv_tiles(
                dk, dv, k, k_rest, v, v_rest, q_view, do_view, lse_ptr, delta_ptr, B, b, h, j, full_hi, hi, head, Lq, Lk,
                by_score, by_value, of_q, of_do, offset, first_lone, last_lone, left, right,
                BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, True, WANTED,
            )
    if WANTED != "dv":
        put_rows(dk_view, b, kv, first, dk * scale, BLOCK_N, BLOCK_D)
    if WANTED != "dk":
        put_rows(dv_view, b, kv, first, dv, BLOCK_N, BLOCK_D)


def heads(B: int, H: int, Hkv: int) -> list[int]:
    """How many peaks q, k and v have."""
    return [B * H, B * Hkv, B * Hkv]


def unpadded(o: torch.Tensor, D: int) -> torch.Tensor:
    """Without the padding, rows of all heads beside each other."""
    return o if o.shape[3] == D else o.transpose(1, 2)[..., :D].contiguous().transpose(1, 2)


def forward(q, k, v, scale, offset, left, right):
    """o, the log-sum-exp in base 2, the halves of q, k and v, and the peaks of their heads, one after the other."""
    (B, H, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    o, lse = q.new_empty(B, Lq, H, padded(D)).transpose(1, 2), q.new_empty(B, H, Lq)  # as a projection takes it
    peaks = torch.zeros(sum(heads(B, H, Hkv)), dtype=torch.int32, device=q.device)
    of = peaks.split(heads(B, H, Hkv))
    halves = [split(t, peak) for t, peak in zip((q, k, v), of)]
    if not (o.numel() and Lk):
        return unpadded(o.zero_(), D), lse.fill_(float("-inf")), *halves, peaks
    t = Tile.read(TILES[block_d(D)][0])
    launcher(_forward_float32_kernel)[(B * H * cdiv(Lq, t.M),)](
        view(halves[0], t.M), view(halves[1], t.N), view(halves[2], t.N), *of, view(o, t.M), lse,
        B, H, H // Hkv, Lq, Lk, max(scale * LOG2E, 2.0**-126), offset, **limits(left, right), BLOCK_D=block_d(D), **t.options,
    )
    return unpadded(o, D), lse, *halves, peaks


def backward(do, dlse, q, k, v, peaks, o, lse, scale, offset, left, right):
    """dq, dk and dv; q, k and v as halves."""
    (B, H, Lq, D), (Hkv, Lk), P = o.shape, k.shape[1:3], q.shape[3]
    dq, dk, dv = (o.new_empty(B, *t.shape[1:]) for t in (q, k, v))
    if not (dq.numel() and dk.numel()):
        return tuple(t.zero_()[..., :D].contiguous() for t in (dq, dk, dv))
    of = [*peaks.split(heads(B, H, Hkv)), torch.zeros(B * H, dtype=torch.int32, device=o.device)]
    delta, do = row_delta(o, do if do.stride(-1) == 1 else do.contiguous(), dlse), split(do, of[3])
    places = lone_places(left, right, Lk, dlse)
    by_query, by_key = (Tile.read(text) for text in TILES[block_d(D)][1:])
    rest = dict(BLOCK_D=block_d(D)) | limits(left, right)
    launcher(_dq_float32_kernel)[(B * H * cdiv(Lq, by_query.M),)](
        *(view(t, rows) for t, rows in zip((q, k, v, do), (by_query.M, by_query.N, by_query.N, by_query.M))), *of, lse, delta,
        view(dq, by_query.M), B, H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **rest, **by_query.options,
    )
    for wanted in ("both",) if block_d(D) <= TOGETHER else ("dk", "dv"):
        launcher(_dkdv_float32_kernel)[(B * Hkv * cdiv(Lk, by_key.N),)](
            *(view(t, rows) for t, rows in zip((q, k, v, do), (by_key.M, by_key.N, by_key.N, by_key.M))), *of, lse, delta,
            view(dk, by_key.N), view(dv, by_key.N), B, Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places,
            GROUP=H // Hkv, WANTED=wanted, **rest, **by_key.options,
        )
    return tuple(t if D == P else t[..., :D].contiguous() for t in (dq, dk, dv))
