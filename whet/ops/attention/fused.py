"""Backward kernels that compute each tile of scores once: all keys in one tile, or any number that add to dq in turns."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._turns import pass_turn, ticket, wait_for_turn, waits_by
from whet.ops.attention.backward import partials, row_delta, splits, summed
from whet.ops.attention.common import (
    LOG2E,
    ONE_BY_LN2,
    Tile,
    add_rows,
    block_d,
    cut,
    described,
    dot,
    dot_add,
    edges,
    like,
    limits,
    lone,
    lone_places,
    pointed,
    put_rows,
    ready,
    rows_of,
    seen,
    view,
)
from whet.ops.attention.hopper_fused import fused_hopper


@triton.jit
def _one_tile_kernel(
    q_view, k_view, v_view, o_view, do_view, lse_ptr, dlse_ptr,  # inputs; dlse_ptr may be None
    dq_view, dk_view, dv_view,  # outputs; dk and dv may be partial sums (SPLIT * B, Hkv, Lk, D)
    B, Hkv, GROUP, Lq, Lk, SPLIT, scale, rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """dq, dk and dv where BLOCK_N holds every key.  One program, all keys of a head, every SPLIT-th part of its queries.

    Fuses   the whole backward, sum(o * do) too: each tile of scores is computed once, and dq is whole at once.
    Moves   q, k, v, o, do, one fp32 per row in; dq, dk, dv out.
    Rounds  p and ds to the storage dtype before their products, results at the store; sums in fp32.
    """
    pid = tl.program_id(0)
    part, bh = pid % SPLIT, pid // SPLIT
    b, kv = bh // Hkv, bh % Hkv
    j = tl.arange(0, BLOCK_N)
    k = rows_of(k_view, b, kv, 0, BLOCK_N, BLOCK_D)
    v = rows_of(v_view, b, kv, 0, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    tiles = tl.cdiv(Lq, BLOCK_M)
    for t in tl.range(part, GROUP * tiles, SPLIT):
        h, m = kv * GROUP + t // tiles, t % tiles * BLOCK_M
        row = m + tl.arange(0, BLOCK_M)
        at = (b * Hkv * GROUP + h).to(tl.int64) * Lq + row
        q = rows_of(q_view, b, h, m, BLOCK_M, BLOCK_D)
        do = rows_of(do_view, b, h, m, BLOCK_M, BLOCK_D)
        o = rows_of(o_view, b, h, m, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + at, mask=row < Lq, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + at, mask=row < Lq, other=0.0) * ONE_BY_LN2
        p = tl.exp2(dot(q, k.T) * rate - lse[:, None])
        p = tl.where(seen((row + offset)[:, None], j[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        dv = dot_add(dv, tl.trans(p.to(do.dtype)), do)
        ds = p * (dot(do, v.T) - delta[:, None])
        if HAS_LEFT or HAS_RIGHT:  # else a NaN in ds is that of its own query
            ds = tl.where((p == 0.0) | lone(row + offset, first_lone, last_lone)[:, None], 0.0, ds)
        ds = ds.to(q.dtype)
        dk = dot_add(dk, tl.trans(ds), q)
        dq = dot(ds, k) * scale
        put_rows(dq_view, b, h, m, dq, BLOCK_M, BLOCK_D)
    at = part * B + b
    put_rows(dk_view, at, kv, 0, dk * scale, BLOCK_N, BLOCK_D)
    put_rows(dv_view, at, kv, 0, dv, BLOCK_N, BLOCK_D)


@triton.jit
def _fused_tiles(
    dk, dv, passed_ptr, passed, k, v, q_view, do_view, lse_ptr, delta_ptr, dq_view, turn_ptr, b, kv, j, block, lo, hi,
    heads, tiles, Lq, Lk, rate, offset, first_lone, last_lone, left, right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, BY: tl.constexpr,
):
    """dk and dv after the queries [lo, hi) of a group's heads, the last ones first; their share of dq is added in its turn.

    A turn is passed on a tile later, when what it waits for has long been added. ds is masked as in `_dkdv_tiles`.
    """
    count = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M)
    for t in tl.range(count * GROUP):
        m = lo + (count - 1 - t // GROUP) * BLOCK_M
        h = kv * GROUP + t % GROUP
        head = (b * heads + h).to(tl.int64)
        row = m + tl.arange(0, BLOCK_M)
        q = rows_of(q_view, b, h, m, BLOCK_M, BLOCK_D)
        do = rows_of(do_view, b, h, m, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + head * Lq + row, mask=row < Lq, other=0.0)
        p = tl.exp2(dot(k, q.T) * rate - lse[None, :])
        if MASKED:
            p = tl.where(seen((row + offset)[None, :], j[:, None], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        pass_turn(passed_ptr, passed, BY)
        dv = dot_add(dv, p.to(do.dtype), do)
        delta = tl.load(delta_ptr + head * Lq + row, mask=row < Lq, other=0.0)
        ds = p * (dot(v, do.T) - delta[None, :])
        if MASKED and (HAS_LEFT or HAS_RIGHT):
            ds = tl.where((p == 0.0) | lone(row + offset, first_lone, last_lone)[None, :], 0.0, ds)
        ds = ds.to(q.dtype)
        dk = dot_add(dk, ds, q)
        dq = dot(tl.trans(ds), k)
        turn = block
        if HAS_LEFT:
            turn = block - tl.maximum(m + offset - left, 0) // BLOCK_N  # blocks of keys before that no query here sees
        passed_ptr = turn_ptr + head * tiles + m // BLOCK_M
        passed = turn + 1
        wait_for_turn(passed_ptr, turn, BY)
        add_rows(dq_view, b, h, m, dq, BLOCK_M, BLOCK_D)
    return dk, dv, passed_ptr, passed


@triton.jit
def _fused_kernel(
    q_view, k_view, v_view, do_view, lse_ptr, delta_ptr,  # inputs
    dq_view, dk_view, dv_view,  # outputs; dq in fp32, unscaled, and zero at first
    turn_ptr,  # zeros: a turn for every tile of dq, then the programs' ticket, then one that nobody waits for
    B, Hkv, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BY: tl.constexpr,
):
    """dq, dk and dv in one launch.  One program, BLOCK_N keys of a head and all queries that see them, the last ones first.

    Fuses   five products: each tile of scores is computed once, where dq and dk, dv apart compute it twice.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out; and for every BLOCK_N keys an fp32 dq to L2, added there.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32, in the order of the keys.
    """
    tiles = tl.cdiv(Lq, BLOCK_M)
    spare_ptr = turn_ptr + tl.cast(B * Hkv * GROUP, tl.int64) * tiles
    item = ticket(spare_ptr)
    # A block of keys adds after the one before it: that one has an earlier ticket, and the heads between keep them apart.
    block, bh = item // (B * Hkv), item % (B * Hkv)
    b, kv = bh // Hkv, bh % Hkv
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    lo, full_lo, full_hi, hi = edges(
        first - offset, tl.minimum(first + BLOCK_N, Lk) - 1 - offset, Lq, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT
    )
    if not HAS_LEFT:
        full_hi = tl.cdiv(tl.maximum(hi, 0), BLOCK_M) * BLOCK_M  # past the last query q and do are zero: no mask is needed
    if first + BLOCK_N > Lk:  # past the last key p is not zero of itself, and dq would take it in: mask every tile
        full_lo = tl.cdiv(tl.maximum(hi, 0), BLOCK_M) * BLOCK_M
        full_hi = full_lo
    k = rows_of(k_view, b, kv, first, BLOCK_N, BLOCK_D)
    v = rows_of(v_view, b, kv, first, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    passed_ptr, passed = spare_ptr + 1, 0
    if HAS_LEFT:
        dk, dv, passed_ptr, passed = _fused_tiles(
            dk, dv, passed_ptr, passed, k, v, q_view, do_view, lse_ptr, delta_ptr, dq_view, turn_ptr, b, kv, j, block,
            full_hi, hi, Hkv * GROUP, tiles, Lq, Lk, rate, offset, first_lone, last_lone, left, right,
            GROUP, BLOCK_M, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True, BY,
        )
    dk, dv, passed_ptr, passed = _fused_tiles(
        dk, dv, passed_ptr, passed, k, v, q_view, do_view, lse_ptr, delta_ptr, dq_view, turn_ptr, b, kv, j, block,
        full_lo, full_hi, Hkv * GROUP, tiles, Lq, Lk, rate, offset, first_lone, last_lone, left, right,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, False, BY,
    )
    dk, dv, passed_ptr, passed = _fused_tiles(
        dk, dv, passed_ptr, passed, k, v, q_view, do_view, lse_ptr, delta_ptr, dq_view, turn_ptr, b, kv, j, block,
        lo, full_lo, Hkv * GROUP, tiles, Lq, Lk, rate, offset, first_lone, last_lone, left, right,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_D, HAS_LEFT, HAS_RIGHT, True, BY,
    )
    pass_turn(passed_ptr, passed, BY)
    put_rows(dk_view, b, kv, first, dk * scale, BLOCK_N, BLOCK_D)
    put_rows(dv_view, b, kv, first, dv, BLOCK_N, BLOCK_D)


def one_tile(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile: Tile):
    """The backward where tile.N holds every key."""
    B, H, Lq, D = q.shape
    Hkv, Lk = k.shape[1:3]
    q, k, v, o, do = ready(q), ready(k), ready(v), ready(o), ready(do)
    dq, dk, dv = like(q, D), like(k, D), like(v, D)
    parts = splits(B * Hkv, H // Hkv * triton.cdiv(Lq, tile.M))
    sums = partials(parts, dk, dv)
    launcher(_one_tile_kernel)[(B * Hkv * parts,)](
        view(q, tile.M), view(k, tile.N), view(v, tile.N), view(o, tile.M), view(do, tile.M), lse,
        None if dlse is None else dlse.contiguous(), view(dq, tile.M), *(view(s, tile.N) for s in sums),
        B, Hkv, H // Hkv, Lq, Lk, parts, scale, scale * LOG2E, offset, *lone_places(left, right, Lk, dlse),
        **limits(left, right), BLOCK_D=block_d(q.shape[3]), **tile.options,
    )
    summed(parts, sums, (dk, dv))
    return cut(dq, D), cut(dk, D), cut(dv, D)


def fused(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile: Tile):
    B, H, Lq, D = q.shape
    q, k, v, do = ready(q), ready(k), ready(v), ready(do)
    dq, dk, dv = like(q, D), like(k, D), like(v, D)
    delta = row_delta(o, do, dlse)
    tiles, BLOCK_D = triton.cdiv(Lq, tile.M), block_d(q.shape[3])
    sums = q.new_zeros((B, H, tiles * tile.M, BLOCK_D), dtype=torch.float32)
    turns = q.new_zeros(B * H * tiles * max(1, BLOCK_D // 64) + 2, dtype=torch.int32)
    places = lone_places(left, right, k.shape[2], dlse)
    launch = fused_hopper if tile.gluon else launch_fused
    launch(sums, dk, dv, turns, q, k, v, do, lse, delta, scale, offset, places, left, right, tile)
    torch.mul(sums[:, :, :Lq, : dq.shape[3]], scale, out=dq)
    return cut(dq, D), cut(dk, D), cut(dv, D)


def launch_fused(sums, dk, dv, turns, q, k, v, do, lse, delta, scale, offset, places, left, right, tile: Tile) -> None:
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    by = waits_by()
    launcher(_fused_kernel)[(B * Hkv * triton.cdiv(Lk, tile.N),)](
        view(q, tile.M), view(k, tile.N), view(v, tile.N), view(do, tile.M), lse, delta,
        described(sums, tile.M) if by == "bulk" else pointed(sums), view(dk, tile.N), view(dv, tile.N), turns,
        B, Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        GROUP=H // Hkv, BLOCK_D=sums.shape[3], BY=by, **tile.options,
    )
