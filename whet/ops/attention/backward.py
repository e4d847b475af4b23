"""The backward of attention: scores are computed again from q, k and the log-sum-exp. No atomics: the same bits each run."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.ops.attention.common import (
    LOG2E,
    NOWHERE,
    ONE_BY_LN2,
    Tile,
    block_d,
    cut,
    dot,
    dot_add,
    edges,
    like,
    limits,
    lone,
    lone_places,
    put_rows,
    ready,
    rows_of,
    seen,
    view,
)
from whet.ops.attention.hopper import dkdv_hopper, dq_hopper
from whet.ops.attention.meaning import few

SPLIT_TILE = Tile(32, 64, 4, 2)  # where the queries are cut into parts, which the Gluon kernel does not do


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, dlse_ptr,  # inputs; dlse_ptr may be None
    delta_ptr,  # output
    stride_ob, stride_oh, stride_ol, stride_dob, stride_doh, stride_dol,
    H, Lq, D, rows,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """delta = sum(o * do) - dlse / ln 2, dlse being the gradient of the log-sum-exp in base 2.  One program, BLOCK_M rows.

    Fuses   the product, its sum, and the gradient of the log-sum-exp.
    Moves   o, do in; one fp32 per row out.
    Rounds  never: fp32 throughout.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    b, h, i = row // Lq // H, row // Lq % H, row % Lq
    inside = (row < rows)[:, None] & (d < D)[None, :]
    at = b * stride_ob + h * stride_oh + i * stride_ol
    to = b * stride_dob + h * stride_doh + i * stride_dol
    o = tl.load(o_ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + to[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row, mask=row < rows, other=0.0) * ONE_BY_LN2
    tl.store(delta_ptr + row, delta, mask=row < rows)


@triton.jit
def _dq_tiles(
    dq, q, do, lse, delta, k_view, v_view, b, h, i, lo, hi, Lk, rate, left, right,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """dq after the keys [lo, hi). The mask is that of ds: 0 * NaN would take a query's NaN to keys that it does not see."""
    for n in tl.range(lo, hi, BLOCK_N):
        k = rows_of(k_view, b, h, n, BLOCK_N, BLOCK_D)
        v = rows_of(v_view, b, h, n, BLOCK_N, BLOCK_D)
        p = tl.exp2(dot(q, k.T) * rate - lse[:, None])
        ds = p * (dot(do, v.T) - delta[:, None])
        if MASKED:
            see = seen(i[:, None], n + tl.arange(0, BLOCK_N)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT)
            ds = tl.where(see, ds, 0.0)
        dq = dot_add(dq, ds.to(k.dtype), k)
    return dq


@triton.jit
def _dq_kernel(
    q_view, k_view, v_view, do_view, lse_ptr, delta_ptr,  # inputs
    dq_view,  # output
    H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """dq = scale * ds k;  ds = p * (do v^T - delta);  p = exp(scores - lse).  One program, BLOCK_M queries.

    Fuses   three products; p and ds stay in registers.
    Moves   q, do, k, v, two fp32 per row in; dq out.
    Rounds  ds to the storage dtype before the product, dq at the store; sums in fp32.
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
    i = tl.where(lone(i, first_lone, last_lone), NOWHERE, i)
    lo, full_lo, full_hi, hi = edges(
        first + offset, tl.minimum(first + BLOCK_M, Lq) - 1 + offset, Lk, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    q = rows_of(q_view, b, h, first, BLOCK_M, BLOCK_D)
    do = rows_of(do_view, b, h, first, BLOCK_M, BLOCK_D)
    at = bh.to(tl.int64) * Lq + row
    lse = tl.load(lse_ptr + at, mask=row < Lq, other=0.0)
    delta = tl.load(delta_ptr + at, mask=row < Lq, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    kv = h // GROUP
    if HAS_LEFT:
        dq = _dq_tiles(
            dq, q, do, lse, delta, k_view, v_view, b, kv, i, lo, full_lo, Lk, rate, left, right,
            BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )
    dq = _dq_tiles(
        dq, q, do, lse, delta, k_view, v_view, b, kv, i, full_lo, full_hi, Lk, rate, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
    )
    dq = _dq_tiles(
        dq, q, do, lse, delta, k_view, v_view, b, kv, i, full_hi, hi, Lk, rate, left, right,
        BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
    )
    put_rows(dq_view, b, h, first, dq * scale, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, q_view, do_view, lse_ptr, delta_ptr, b, h, j, lo, hi, head, Lq, Lk,
    rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """dk and dv after the queries [lo, hi). ds is masked where p is, by p's zeros, which are at hand."""
    for m in tl.range(lo, hi, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        q = rows_of(q_view, b, h, m, BLOCK_M, BLOCK_D)
        do = rows_of(do_view, b, h, m, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + head + row, mask=row < Lq, other=0.0)
        p = tl.exp2(dot(k, q.T) * rate - lse[None, :])
        if MASKED:
            p = tl.where(seen((row + offset)[None, :], j[:, None], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        dv = dot_add(dv, p.to(do.dtype), do)
        delta = tl.load(delta_ptr + head + row, mask=row < Lq, other=0.0)
        ds = p * (dot(v, do.T) - delta[None, :])
        if MASKED:
            ds = tl.where((p == 0.0) | lone(row + offset, first_lone, last_lone)[None, :], 0.0, ds)
        dk = dot_add(dk, ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _dkdv_kernel(
    q_view, k_view, v_view, do_view, lse_ptr, delta_ptr,  # inputs
    dk_view, dv_view,  # outputs, or their partial sums (SPLIT * B, Hkv, Lk, D)
    B, Hkv, Lq, Lk, SPLIT, scale, rate, offset, first_lone, last_lone, left, right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """dv = p^T do;  dk = scale * ds^T q;  p and ds as in dq.  One program, BLOCK_N keys, every SPLIT-th part of the queries.

    Fuses   four products, transposed: keys are the rows, so that p^T and ds^T stay in registers as left operands. The query
            heads that share these keys follow one another.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32.
    """
    blocks = tl.cdiv(Lk, BLOCK_N)
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    part, bh = rest % SPLIT, rest // SPLIT
    b, kv = bh // Hkv, bh % Hkv
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    # Seen from a key, left and right change places: query i sees key j where -right <= (i + offset) - j <= left.
    lo, full_lo, full_hi, hi = edges(
        first - offset, tl.minimum(first + BLOCK_N, Lk) - 1 - offset, Lq, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT
    )
    if not HAS_LEFT:
        full_hi = hi  # past the last query q and do are zero, and so is what they add: a ragged tile needs no mask
    if SPLIT > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M), SPLIT) * BLOCK_M
        lo = lo + part * share
        hi = tl.minimum(lo + share, hi)
        full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.maximum(hi, lo))
        full_hi = tl.maximum(tl.minimum(full_hi, tl.maximum(hi, lo)), full_lo)

    k = rows_of(k_view, b, kv, first, BLOCK_N, BLOCK_D)
    v = rows_of(v_view, b, kv, first, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for g in range(GROUP):
        h = kv * GROUP + g
        head = (b * Hkv * GROUP + h).to(tl.int64) * Lq
        if HAS_RIGHT:
            dk, dv = _dkdv_tiles(
                dk, dv, k, v, q_view, do_view, lse_ptr, delta_ptr, b, h, j, lo, full_lo, head, Lq, Lk,
                rate, offset, first_lone, last_lone, left, right, BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
            )
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, q_view, do_view, lse_ptr, delta_ptr, b, h, j, full_lo, full_hi, head, Lq, Lk,
            rate, offset, first_lone, last_lone, left, right, BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
        )
        if HAS_LEFT:
            dk, dv = _dkdv_tiles(
                dk, dv, k, v, q_view, do_view, lse_ptr, delta_ptr, b, h, j, full_hi, hi, head, Lq, Lk,
                rate, offset, first_lone, last_lone, left, right, BLOCK_M, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
            )
    at = part * B + b
    put_rows(dk_view, at, kv, first, dk * scale, BLOCK_N, BLOCK_D)
    put_rows(dv_view, at, kv, first, dv, BLOCK_N, BLOCK_D)


def row_delta(o, do, dlse):
    """(B, H, Lq): what _delta_kernel makes."""
    B, H, Lq, D = o.shape
    o, rows = o if o.stride(-1) == 1 else o.contiguous(), B * H * Lq
    delta = torch.empty(B, H, Lq, dtype=torch.float32, device=o.device)
    BLOCK_D = block_d(D)
    BLOCK_M = max(1, 8192 // BLOCK_D)
    launcher(_delta_kernel)[(triton.cdiv(rows, BLOCK_M),)](
        o, do, None if dlse is None else dlse.contiguous(), delta, *o.stride()[:3], *do.stride()[:3], H, Lq, D, rows,
        BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=8,
    )
    return delta


def splits(programs: int, tiles: int) -> int:
    """How many parts the queries are cut into, so that every SM has two programs; each part has four tiles at least."""
    return max(1, min(2 * machine.sm_count() // programs, tiles // 4, 16)) if few(programs) else 1


def partials(parts: int, *results: torch.Tensor) -> list[torch.Tensor]:
    """What a kernel writes to: the results themselves, or fp32 partial sums of them, one per part, stacked on the batch."""
    shapes = [(parts * r.shape[0], *r.shape[1:]) for r in results]
    return [r.new_empty(s, dtype=torch.float32) for r, s in zip(results, shapes)] if parts > 1 else list(results)


def summed(parts: int, sums: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """The sum over parts, in a fixed order, rounded once."""
    for s, r in zip(sums, results):
        if parts > 1:
            r.copy_(s.view(parts, *r.shape).sum(0))


def launch_dq(dq, q, k, v, do, lse, delta, scale, offset, places, left, right, t: Tile):
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    launcher(_dq_kernel)[(B * H * triton.cdiv(Lq, t.M),)](
        view(q, t.M), view(k, t.N), view(v, t.N), view(do, t.M), lse, delta, view(dq, t.M),
        H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        BLOCK_D=block_d(q.shape[3]), **t.options,
    )


def key_programs(q, k, t: Tile) -> tuple[int, int]:
    """One program for each block of keys, and the parts that each of them is split into."""
    programs = q.shape[0] * k.shape[1] * triton.cdiv(k.shape[2], t.N)
    return programs, splits(programs, triton.cdiv(q.shape[2], t.M))


def launch_dkdv(dk, dv, q, k, v, do, lse, delta, scale, offset, places, left, right, t: Tile) -> None:
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    programs, parts = key_programs(q, k, t)
    if t.gluon and parts == 1:
        return dkdv_hopper(dk, dv, q, k, v, do, lse, delta, scale, offset, places, left, right, t)
    if t.gluon:
        t = SPLIT_TILE
        programs, parts = key_programs(q, k, t)
    if Hkv != H:
        t = t._replace(registers=0)  # the loop over a group's heads takes more, and would spill inside
    sums = partials(parts, dk, dv)
    launcher(_dkdv_kernel)[(programs * parts,)](
        view(q, t.M), view(k, t.N), view(v, t.N), view(do, t.M), lse, delta,
        *(view(s, t.N) for s in sums),
        B, Hkv, Lq, Lk, parts, scale, scale * LOG2E, offset, *places, **limits(left, right),
        GROUP=H // Hkv, BLOCK_D=block_d(q.shape[3]), **t.options,
    )
    summed(parts, sums, (dk, dv))


def backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, dq_tile: Tile, dkdv_tile: Tile):
    D = q.shape[3]
    q, k, v, do = ready(q), ready(k), ready(v), ready(do)
    dq, dk, dv = like(q, D), like(k, D), like(v, D)
    if not (dq.numel() and dk.numel()):
        return tuple(cut(t.zero_(), D) for t in (dq, dk, dv))
    delta = row_delta(o, do, dlse)
    given = (q, k, v, do, lse, delta, scale, offset, lone_places(left, right, k.shape[2], dlse), left, right)
    (dq_hopper if dq_tile.gluon else launch_dq)(dq, *given, dq_tile)
    launch_dkdv(dk, dv, *given, dkdv_tile)
    return cut(dq, D), cut(dk, D), cut(dv, D)
