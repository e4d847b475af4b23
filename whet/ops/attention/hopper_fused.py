"""The backward of five products for Hopper, in Gluon: warps that multiply, a warp that copies, warps that add to dq in turns.

Two warpgroups have 64 keys each and depend on each other in nothing but the tiles of queries that they share, so one's softmax
is hidden behind the other's products. What they add to dq lies in shared memory until a warp of its own has its turn: nobody
who multiplies ever waits for another program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from whet.launch import launcher
from whet.ops._rows import cdiv
from whet.ops._turns import add_in_turn, pass_turn, ticket, wait_for_turn, waits_by
from whet.ops.attention.common import LOG2E, Tile, limits
from whet.ops.attention.hopper import _lone, _seen, shared, shared_layout

ROWS = 64  # keys of one warpgroup
REGISTERS, OTHERS = 232, 40  # a thread's in a warpgroup that multiplies, in a warp that copies or adds
WIDE_REGISTERS, WIDE_OTHERS = 240, 32  # at head sizes over 64
ADDERS = 2  # warps that add: the tiles of one are on their way while the other's are passed on


@gluon.jit
def _tile(t, lo, tiles, GROUP, BLOCK_M: gl.constexpr):
    """Head of the group and first query of tile t: the last queries first, the group's heads one after another."""
    return t % GROUP, lo + (tiles - 1 - t // GROUP) * BLOCK_M


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, bars, b, hk, n0, lo, tiles, GROUP,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):
    """Bring the program's keys and values, and its queries and their gradients tile by tile, as soon as there is room.

    Up to a head size of 64 one tile of queries more than there are: its scores are asked for while the last tile is
    multiplied, and not looked at. Over 64 nobody would wait for it, and a program must not end before its copies.
    """
    AHEAD: gl.constexpr = 1 if BLOCK_D <= 64 else 0
    kv_full, q_full, do_full, empty = bars
    mbarrier.expect(kv_full.index(0), 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [b, hk, n0 + half * ROWS, 0], kv_full.index(0), k_smem.index(half))
        tma.async_copy_global_to_shared(v_desc, [b, hk, n0 + half * ROWS, 0], kv_full.index(0), v_smem.index(half))
    slot = 0
    phase = 0
    total = tiles * GROUP
    for t in range(total + AHEAD):
        g, m0 = _tile(t, lo, tiles, GROUP, BLOCK_M)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, hk * GROUP + g, m0, 0], q_full.index(slot), q_smem.index(slot))
        if t < total:
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [b, hk * GROUP + g, m0, 0], do_full.index(slot), do_smem.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1


@gluon.jit
def _multiply(
    dk_desc, dv_desc, lse_ptr, delta_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, bars, dq_full, dq_empty,
    b, hk, n0, lo, tiles, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    HALF: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    ADDERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    """One warpgroup's half of the keys: dk and dv, and what they add to dq, tile by tile.

    The next tile's scores are multiplied while this one's share of dq is stored, dp beside the exponentials. Up to a head size
    of 64 k and v stay in registers as left operands: a seventh less for shared memory, which is what bounds this.
    """
    kv_full, q_full, do_full, empty = bars
    dtype: gl.constexpr = dk_desc.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # scores transposed: keys x queries
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    WIDTH: gl.constexpr = BLOCK_D if BLOCK_D < 64 else 64
    SLICES: gl.constexpr = BLOCK_D // WIDTH
    PERIOD: gl.constexpr = ADDERS // SLICES
    AHEAD: gl.constexpr = SLICES == 1
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    first = n0 + HALF * ROWS
    # queries that see all of these keys: [lo_full, hi_full)
    lo_full = 0
    hi_full = Lq
    if HAS_RIGHT:
        lo_full = first + ROWS - 1 - offset - right
    if HAS_LEFT:
        hi_full = first - offset + left + 1
    ragged = first + ROWS > Lk
    keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SL))
    cols = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SL))  # queries
    zero = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, SL)
    no_dq = gl.full([BLOCK_M, WIDTH], 0.0, gl.float32, QL)
    dk = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, OL)
    dv = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, OL)
    k2 = k_smem.index(HALF).reshape([ROWS, BLOCK_D])
    v2 = v_smem.index(HALF).reshape([ROWS, BLOCK_D])
    ds2 = ds_smem.index(HALF)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero
    if AHEAD:
        k_left = k2.load(gl.DotOperandLayout(0, SL, 2))
        v_left = v2.load(gl.DotOperandLayout(0, SL, 2))
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(k_left, q_smem.index(0).reshape([BLOCK_M, BLOCK_D]).permute([1, 0]), zero, use_acc=False)
    slot = 0
    phase = 0
    g = 0  # as `_tile`, without a division
    m0 = lo + (tiles - 1) * BLOCK_M
    for t in range(tiles * GROUP):
        q2 = q_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        do2 = do_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        if not AHEAD:
            mbarrier.wait(q_full.index(slot), phase)
            s_run = warpgroup_mma(k2, q2.permute([1, 0]), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        if AHEAD:
            dp_run = warpgroup_mma(v_left, do2.permute([1, 0]), zero, use_acc=False, is_async=True)
        if not AHEAD:
            dp_run = warpgroup_mma(v2, do2.permute([1, 0]), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_run])
        stat = (b * H + hk * GROUP + g).to(gl.int64) * Lq + m0
        lse = gl.load(lse_ptr + stat + cols, mask=cols < Lq - m0, other=0.0)
        p = gl.exp2(s * rate - lse[None, :])
        masked = (m0 < lo_full) | ragged
        if HAS_LEFT:
            masked = masked | (m0 + BLOCK_M > hi_full)
        if masked:
            p = gl.where(_seen((m0 + offset + cols)[None, :], keys[:, None], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        pb = p.to(dtype)
        dv_run = warpgroup_mma(gl.convert_layout(pb, PL), do2, dv, is_async=True)
        if not AHEAD:  # of dk and dv registers are full: p is kept as it was rounded
            p = pb.to(gl.float32)
        dp = warpgroup_mma_wait(1, deps=[dp_run])
        delta = gl.load(delta_ptr + stat + cols, mask=cols < Lq - m0, other=0.0)
        ds = p * (dp - delta[None, :])
        if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102  (a constant)
            if masked:  # by p's zeros, which are at hand
                ds = gl.where((p == 0.0) | _lone(m0 + offset + cols, first_lone, last_lone)[None, :], 0.0, ds)
        dsb = ds.to(dtype)
        ds2.store(dsb)
        fence_async_shared()
        dk_run = warpgroup_mma(gl.convert_layout(dsb, PL), q2, dk, is_async=True)
        dq_run = warpgroup_mma(ds2.permute([1, 0]), k2.slice(0, WIDTH, dim=1), no_dq, use_acc=False, is_async=True)
        slot1 = slot + 1
        phase1 = phase
        if slot1 == STAGES:
            slot1 = 0
            phase1 = phase ^ 1
        if AHEAD:
            mbarrier.wait(q_full.index(slot1), phase1)
            q_next = q_smem.index(slot1).reshape([BLOCK_M, BLOCK_D]).permute([1, 0])
            s_run = warpgroup_mma(k_left, q_next, zero, use_acc=False, is_async=True)
        dv, dk, dq = warpgroup_mma_wait(1 if AHEAD else 0, deps=[dv_run, dk_run, dq_run])
        mbarrier.arrive(empty.index(slot))
        adder = t % PERIOD * SLICES
        turned = (t // PERIOD) & 1
        for i in gl.static_range(SLICES):
            if i > 0:
                dq = warpgroup_mma(ds2.permute([1, 0]), k2.slice(i * WIDTH, WIDTH, dim=1), no_dq, use_acc=False)
            mbarrier.wait(dq_empty.index(adder + i), turned ^ 1)
            dq_smem.index(2 * (adder + i) + HALF).store(dq)
            mbarrier.arrive(dq_full.index(adder + i))
        if AHEAD:
            s = warpgroup_mma_wait(0, deps=[s_run])
        slot = slot1
        phase = phase1
        g += 1
        if g == GROUP:
            g = 0
            m0 -= BLOCK_M
    k2.store((dk * scale).to(dtype))
    v2.store(dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, hk, first, 0], k_smem.index(HALF))
    tma.async_copy_shared_to_global(dv_desc, [b, hk, first, 0], v_smem.index(HALF))
    tma.store_wait(0)


@gluon.jit
def _add(
    dq_ptr, turn_ptr, dq_smem, dq_full, dq_empty, b, hk, block, lo, tiles, H, GROUP, nm, offset, left,
    ADDER: gl.constexpr, ADDERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    HAS_LEFT: gl.constexpr, BY: gl.constexpr,
):
    """One of the warps that add: every PERIOD-th tile's share of dq, of both warpgroups, when it is this block's turn there.

    At a head size over 64 each has every tile and a slice of its columns, with turns of its own.
    """
    WIDTH: gl.constexpr = BLOCK_D if BLOCK_D < 64 else 64
    SLICES: gl.constexpr = BLOCK_D // WIDTH
    PERIOD: gl.constexpr = ADDERS // SLICES
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [1, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    for t in range(ADDER // SLICES, tiles * GROUP, PERIOD):
        g, m0 = _tile(t, lo, tiles, GROUP, BLOCK_M)
        turn = block
        if HAS_LEFT:
            turn = block - gl.maximum(m0 + offset - left, 0) // BLOCK_N  # blocks of keys before that no query here sees
        tile = ((b * H + hk * GROUP + g).to(gl.int64)) * nm + m0 // BLOCK_M
        turn_at = turn_ptr + 1 + tile * SLICES + ADDER % SLICES
        dq_at = dq_ptr + tile * (BLOCK_M * BLOCK_D) + ADDER % SLICES * WIDTH
        mbarrier.wait(dq_full.index(ADDER), (t // PERIOD) & 1)
        wait_for_turn(turn_at, turn, BY)
        for r in gl.static_range(BLOCK_M // 8):
            upper = dq_smem.index(2 * ADDER).slice(r * 8, 8).load(L)
            lower = dq_smem.index(2 * ADDER + 1).slice(r * 8, 8).load(L)
            add_in_turn(dq_at + ((r * 8 + row)[:, None] * BLOCK_D + d[None, :]), upper + lower)
        mbarrier.arrive(dq_empty.index(ADDER))
        pass_turn(turn_at, turn + 1, BY)


@gluon.jit
def _fused_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,  # inputs
    dq_ptr, dk_desc, dv_desc,  # outputs; dq in fp32, whole tiles of BLOCK_M rows, unscaled, and zero at first
    turn_ptr,  # zeros: the programs' ticket, then turns for every tile of dq, one for each slice of 64 columns
    B, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right, ds_layout: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, ADDERS: gl.constexpr,
    REGISTERS: gl.constexpr, OTHERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dq, dk and dv in one launch.  One program, 2 * ROWS keys of a head and all queries that see them, the last ones first.

    Fuses   five products: each tile of scores is computed once, where dq and dk, dv apart compute it twice.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out; and for every 2 * ROWS keys an fp32 dq to L2, added there.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32, in the order of the keys.
    """
    dtype: gl.constexpr = q_desc.dtype
    WIDTH: gl.constexpr = BLOCK_D if BLOCK_D < 64 else 64
    DL: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8 if WIDTH >= 32 else 4, [1, 0])
    HK = H // GROUP
    nm = (Lq + BLOCK_M - 1) // BLOCK_M
    item = ticket(turn_ptr)
    # A block of keys adds after the one before it: that one has an earlier ticket, and the heads between keep them apart.
    block = item // (B * HK)
    b = item % (B * HK) // HK
    hk = item % HK
    n0 = block * (2 * ROWS)
    lo = 0
    hi = Lq
    if HAS_RIGHT:
        lo = gl.maximum(0, n0 - offset - right) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        hi = gl.minimum(Lq, gl.minimum(n0 + 2 * ROWS, Lk) - offset + left)
    tiles = gl.maximum(0, (hi - lo + BLOCK_M - 1) // BLOCK_M)

    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2 * ADDERS, BLOCK_M, WIDTH], DL)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(ADDERS):
        mbarrier.init(dq_full.index(i), count=2)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    bars = (kv_full, q_full, do_full, empty)
    gl.warp_specialize([
        (_multiply, (
            dk_desc, dv_desc, lse_ptr, delta_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, bars, dq_full, dq_empty,
            b, hk, n0, lo, tiles, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
            0, ROWS, BLOCK_M, BLOCK_D, STAGES, ADDERS, HAS_LEFT, HAS_RIGHT,
        )),
        (_multiply, (
            dk_desc, dv_desc, lse_ptr, delta_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, bars, dq_full, dq_empty,
            b, hk, n0, lo, tiles, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
            1, ROWS, BLOCK_M, BLOCK_D, STAGES, ADDERS, HAS_LEFT, HAS_RIGHT,
        )),
        (_copy, (
            q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, bars, b, hk, n0, lo, tiles, GROUP,
            ROWS, BLOCK_M, BLOCK_D, STAGES,
        )),
        (_add, (
            dq_ptr, turn_ptr, dq_smem, dq_full, dq_empty, b, hk, block, lo, tiles, H, GROUP, nm, offset, left,
            0, ADDERS, BLOCK_M, 2 * ROWS, BLOCK_D, HAS_LEFT, BY,
        )),
        (_add, (
            dq_ptr, turn_ptr, dq_smem, dq_full, dq_empty, b, hk, block, lo, tiles, H, GROUP, nm, offset, left,
            1, ADDERS, BLOCK_M, 2 * ROWS, BLOCK_D, HAS_LEFT, BY,
        )),
    ], [4, 1, 1, 1], [REGISTERS, OTHERS, OTHERS, OTHERS])


def fused_hopper(sums, dk, dv, turns, q, k, v, do, lse, delta, scale, offset, places, left, right, tile: Tile) -> None:
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    if (tile.M, tile.N, tile.warps) != (ROWS, 2 * ROWS, 8):
        raise ValueError(f"attention[triton_fused_bwd]: a tile in Gluon must be {ROWS}x{2 * ROWS}w8, got {tile}")
    registers, others = (REGISTERS, OTHERS) if sums.shape[3] <= 64 else (WIDE_REGISTERS, WIDE_OTHERS)
    d = [shared(x, ROWS) for x in (q, k, v, do, dk, dv)]
    launcher(_fused_hopper_kernel)[(B * Hkv * cdiv(Lk, tile.N),)](
        *d[:4], lse, delta, sums, *d[4:], turns,
        B, H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        ds_layout=shared_layout((ROWS, ROWS), q.dtype), ROWS=ROWS, BLOCK_M=tile.M, BLOCK_D=sums.shape[3], STAGES=tile.stages,
        ADDERS=ADDERS, REGISTERS=registers, OTHERS=others, BY="atomics" if waits_by() == "atomics" else "warp",
        num_warps=tile.warps // 2,
    )
