"""The backward of five products for Hopper, in Gluon: dq is added to in turns, as in `fused`, while dk is multiplied."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from whet.launch import launcher
from whet.ops._turns import add_in_turn, pass_turn, ticket, wait_for_turn
from whet.ops.attention.common import LOG2E, Tile, limits
from whet.ops.attention.hopper import _lone, _seen, _sizes, shared, shared_layout


@gluon.jit
def _fused_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,  # inputs
    dq_ptr, dk_desc, dv_desc,  # outputs; dq in fp32, whole tiles of BLOCK_M rows, unscaled, and zero at first
    turn_ptr,  # zeros: a turn for every tile of dq, then the programs' ticket, then one that nobody waits for
    B, H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right, ds_layout: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, num_warps: gl.constexpr,
):
    """dq, dk and dv in one launch.  One program, BLOCK_N keys of a head and all queries that see them, the last ones first.

    Fuses   five products. p is computed while do v^T runs, ds while dv does; ds lies in shared memory for dq, whose sum is
            added while dk runs into the next tile. The query heads that share these keys follow one another within a tile.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out; and for every BLOCK_N keys an fp32 dq to L2, added there.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32, in the order of the keys.
    """
    dtype: gl.constexpr = q_desc.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])  # scores transposed: keys x queries
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    ACROSS: gl.constexpr = num_warps * 16 // BLOCK_M if num_warps * 16 > BLOCK_M else 1  # warpgroups beside each other in dq
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps // ACROSS, ACROSS], [16, BLOCK_D // ACROSS, 16])
    HK = H // GROUP
    nm = (Lq + BLOCK_M - 1) // BLOCK_M
    item = ticket(turn_ptr + B * H * nm)
    block = item // (B * HK)
    bh = item % (B * HK)
    n0 = block * BLOCK_N
    b = bh // HK
    hk = bh % HK
    # queries that see some of these keys: [lo, hi); that see all of them: [lo_full, hi_full)
    lo = 0
    hi = Lq
    lo_full = 0
    hi_full = Lq
    if HAS_RIGHT:
        lo = gl.maximum(0, n0 - offset - right) // BLOCK_M * BLOCK_M
        lo_full = n0 + BLOCK_N - 1 - offset - right
    if HAS_LEFT:
        hi = gl.minimum(Lq, n0 + BLOCK_N - offset + left)
        hi_full = n0 - offset + left + 1
    tiles = gl.maximum(0, (hi - lo + BLOCK_M - 1) // BLOCK_M)
    ragged = n0 + BLOCK_N > Lk

    k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], ds_layout)
    bars = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())  # q 0-1, do 2-3, k and v 4
    for i in gl.static_range(5):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(bars.index(4), 2 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [b, hk, n0, 0], bars.index(4), k_smem)
    tma.async_copy_global_to_shared(v_desc, [b, hk, n0, 0], bars.index(4), v_smem)
    total = tiles * GROUP
    h0 = hk * GROUP
    # tile t is queries lo + i * BLOCK_M of head h0 + g, t = (tiles - 1 - i) * GROUP + g; (g1, i1) is the tile after it
    g = 0
    i = tiles - 1
    mbarrier.expect(bars.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [b, h0, lo + i * BLOCK_M, 0], bars.index(0), q_smem.index(0))
    mbarrier.expect(bars.index(2), do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [b, h0, lo + i * BLOCK_M, 0], bars.index(2), do_smem.index(0))
    g1 = 1
    i1 = i
    if g1 >= GROUP:
        g1 = 0
        i1 = i - 1
    mbarrier.expect(bars.index(3), do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [b, h0 + g1, lo + i1 * BLOCK_M, 0], bars.index(3), do_smem.index(1))

    rows = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SL))  # keys
    cols = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SL))  # queries
    i_q = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QL)).to(gl.int64)
    d_q = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, QL)).to(gl.int64)
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, SL)
    no_dq = gl.full([BLOCK_M, BLOCK_D], 0.0, gl.float32, QL)
    dk = warpgroup_mma_init(gl.full([BLOCK_N, BLOCK_D], 0.0, gl.float32, OL))
    dv = warpgroup_mma_init(gl.full([BLOCK_N, BLOCK_D], 0.0, gl.float32, OL))
    k2 = k_smem.reshape([BLOCK_N, BLOCK_D])
    v2 = v_smem.reshape([BLOCK_N, BLOCK_D])
    mbarrier.wait(bars.index(4), 0)
    tile = B * H * nm + 1
    passed = block * 0
    for t in range(total):
        slot = t & 1
        phase = (t >> 1) & 1
        m0 = lo + i * BLOCK_M
        g1 = g + 1
        i1 = i
        if g1 >= GROUP:
            g1 = 0
            i1 = i - 1
        g2 = g1 + 1
        i2 = i1
        if g2 >= GROUP:
            g2 = 0
            i2 = i1 - 1
        q2 = q_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        do2 = do_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        mbarrier.wait(bars.index(slot), phase)
        s = warpgroup_mma(k2, q2.permute([1, 0]), zero, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(2 + slot), phase)
        dp = warpgroup_mma(v2, do2.permute([1, 0]), zero, use_acc=False, is_async=True)
        at = m0 + cols
        head = (b * H + h0 + g).to(gl.int64)
        lse = gl.load(lse_ptr + head * Lq + at, mask=at < Lq, other=0.0)
        delta = gl.load(delta_ptr + head * Lq + at, mask=at < Lq, other=0.0)
        s = warpgroup_mma_wait(1, deps=[s])
        ahead = 1 - slot
        mbarrier.expect(bars.index(ahead), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h0 + g1, lo + i1 * BLOCK_M, 0], bars.index(ahead), q_smem.index(ahead))
        pass_turn(turn_ptr + tile, passed, "ptx")
        p = gl.exp2(s * rate - lse[None, :])
        masked = (m0 < lo_full) | ragged
        if HAS_LEFT:
            masked = masked | (m0 + BLOCK_M > hi_full)
        if masked:
            p = gl.where(_seen((at + offset)[None, :], rows[:, None], Lk, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), PL), do2, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta[None, :])
        if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102  (a constant)
            if masked:  # by p's zeros, which are at hand
                ds = gl.where((p == 0.0) | _lone(at + offset, first_lone, last_lone)[None, :], 0.0, ds)
        ds = ds.to(dtype)
        ds_smem.store(ds)
        fence_async_shared()
        dk = warpgroup_mma(ds_smem, q2, dk, is_async=True)
        dv = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[dv]))
        dq = warpgroup_mma(ds_smem.permute([1, 0]), k2, no_dq, use_acc=False, is_async=True)
        mbarrier.expect(bars.index(2 + slot), do_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [b, h0 + g2, lo + i2 * BLOCK_M, 0], bars.index(2 + slot), do_smem.index(slot))
        turn = block
        if HAS_LEFT:
            turn = block - gl.maximum(m0 + offset - left, 0) // BLOCK_N  # blocks of keys before that no query here sees
        tile = (b * H + h0 + g) * nm + m0 // BLOCK_M
        passed = turn + 1
        wait_for_turn(turn_ptr + tile, turn, "ptx")
        dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
        dk = warpgroup_mma_init(dk)
        dq_at = dq_ptr + tile.to(gl.int64) * (BLOCK_M * BLOCK_D)
        add_in_turn(dq_at + i_q[:, None] * BLOCK_D + d_q[None, :], dq)
        g = g1
        i = i1
    dk_out, dv_out = warpgroup_mma_wait(0, deps=[dk, dv])
    pass_turn(turn_ptr + tile, passed, "ptx")
    # q tile `total` and do tiles `total` and `total + 1` are still on their way
    mbarrier.wait(bars.index(total & 1), (total >> 1) & 1)
    mbarrier.wait(bars.index(2 + (total & 1)), (total >> 1) & 1)
    mbarrier.wait(bars.index(3 - (total & 1)), ((total + 1) >> 1) & 1)
    k2.store((dk_out * scale).to(dtype))
    v2.store(dv_out.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, hk, n0, 0], k_smem)
    tma.async_copy_shared_to_global(dv_desc, [b, hk, n0, 0], v_smem)
    tma.store_wait(0)
    for i in gl.static_range(5):
        mbarrier.invalidate(bars.index(i))


def fused_hopper(sums, dk, dv, turns, q, k, v, do, lse, delta, scale, offset, places, left, right, tile: Tile) -> None:
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    M, N = tile.M, tile.N
    d = [shared(x, rows) for x, rows in ((q, M), (k, N), (v, N), (do, M), (dk, N), (dv, N))]
    launcher(_fused_hopper_kernel)[(B * Hkv * triton.cdiv(Lk, N),)](
        *d[:4], lse, delta, sums, *d[4:], turns,
        B, H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        ds_layout=shared_layout((N, M), q.dtype), **_sizes(tile, d[0].block_shape[3]),
    )
