"""The backward kernels of attention for Hopper, in Gluon: products run asynchronously beside the softmax that they wait for.

Plain Triton waits for a product where it is issued; here each wait names how many may still be running.
"""

import functools

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from whet.launch import launcher
from whet.ops.attention.common import LOG2E, NOWHERE, Tile, blocks_of, limits


@gluon.jit
def _seen(i, j, Lk, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """As common's."""
    see = (j < Lk) & (i == i)
    if HAS_LEFT:
        see = see & (j >= i - left)
    if HAS_RIGHT:
        see = see & (j <= i + right)
    return see


@gluon.jit
def _lone(i, first_lone, last_lone):
    """As common's."""
    return (i == first_lone) | (i == last_lone)


@gluon.jit
def _dq_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,  # inputs
    dq_desc,  # output
    H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, num_warps: gl.constexpr,
):
    """dq = scale * ds k;  ds = p * (do v^T - delta);  p = exp(scores - lse).  One program, BLOCK_M queries.

    Fuses   three products. The next tile's two score products, and this tile's dq, run while p and ds are computed.
    Moves   q, do, k, v, two fp32 per row in; dq out. Three tiles of k and two of v are in flight.
    Rounds  ds to the storage dtype before the product, dq at the store; sums in fp32.
    """
    dtype: gl.constexpr = q_desc.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    nm = (Lq + BLOCK_M - 1) // BLOCK_M
    pid = gl.program_id(0)
    bh = pid // nm
    mb = pid % nm
    if HAS_RIGHT:
        mb = nm - 1 - mb
    m0 = mb * BLOCK_M
    b = bh // H
    h = bh % H
    hk = h // GROUP
    lo = 0
    hi = Lk
    lo_full = 0
    hi_full = Lk
    if HAS_RIGHT:
        hi = gl.minimum(Lk, m0 + BLOCK_M + offset + right)
        hi_full = gl.minimum(Lk, m0 + offset + right + 1)
    if HAS_LEFT:
        lo = gl.maximum(0, m0 + offset - left) // BLOCK_N * BLOCK_N
        lo_full = m0 + BLOCK_M - 1 + offset - left
    tiles = gl.maximum(0, (hi - lo + BLOCK_N - 1) // BLOCK_N)

    q_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [3, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())  # k 0-2, v 3-4, q and do 5
    for i in gl.static_range(6):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(bars.index(5), 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [b, h, m0, 0], bars.index(5), q_smem)
    tma.async_copy_global_to_shared(do_desc, [b, h, m0, 0], bars.index(5), do_smem)
    for i in gl.static_range(2):
        mbarrier.expect(bars.index(i), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, hk, lo + i * BLOCK_N, 0], bars.index(i), k_smem.index(i))
        mbarrier.expect(bars.index(3 + i), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [b, hk, lo + i * BLOCK_N, 0], bars.index(3 + i), v_smem.index(i))

    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SL))
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SL))
    at = rows + offset
    at = gl.where(_lone(at, first_lone, last_lone), NOWHERE, at)
    at_row = bh.to(gl.int64) * Lq + rows
    lse = gl.load(lse_ptr + at_row, mask=rows < Lq, other=0.0)
    delta = gl.load(delta_ptr + at_row, mask=rows < Lq, other=0.0)
    acc = gl.full([BLOCK_M, BLOCK_D], 0.0, gl.float32, OL)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SL)

    q2 = q_smem.reshape([BLOCK_M, BLOCK_D])
    do2 = do_smem.reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(bars.index(5), 0)
    mbarrier.wait(bars.index(0), 0)
    s = warpgroup_mma(q2, k_smem.index(0).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(3), 0)
    dp = warpgroup_mma(do2, v_smem.index(0).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=[s, dp])
    mbarrier.expect(bars.index(3), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [b, hk, lo + 2 * BLOCK_N, 0], bars.index(3), v_smem.index(0))
    acc = warpgroup_mma_init(acc)
    k0 = 0  # slot of tile j in the ring of three, and how often the ring was filled
    turn = 0
    for j in range(tiles):
        n = lo + j * BLOCK_N
        k1 = k0 + 1
        turn1 = turn
        if k1 == 3:
            k1 = 0
            turn1 = turn + 1
        v1 = 1 - (j & 1)
        mbarrier.wait(bars.index(k1), turn1 & 1)
        k_next = k_smem.index(k1).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        s_next = warpgroup_mma(q2, k_next, zero, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(3 + v1), ((j + 1) >> 1) & 1)
        v_next = v_smem.index(v1).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        dp_next = warpgroup_mma(do2, v_next, zero, use_acc=False, is_async=True)
        p = gl.exp2(s * rate - lse[:, None])
        ds = p * (dp - delta[:, None])
        masked = n + BLOCK_N > hi_full
        if HAS_LEFT:
            masked = masked | (n < lo_full)
        if masked:  # of ds: 0 * NaN would take a query's NaN to keys that it does not see
            ds = gl.where(_seen(at[:, None], (n + cols)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT), ds, 0.0)
        dsa = gl.convert_layout(ds.to(dtype), PL)
        acc_done = warpgroup_mma_wait(2, deps=[acc])
        k2 = k1 + 1
        if k2 == 3:
            k2 = 0
        mbarrier.expect(bars.index(k2), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, hk, n + 2 * BLOCK_N, 0], bars.index(k2), k_smem.index(k2))
        acc = warpgroup_mma(dsa, k_smem.index(k0).reshape([BLOCK_N, BLOCK_D]), acc_done, is_async=True)
        s, dp = warpgroup_mma_wait(1, deps=[s_next, dp_next])
        mbarrier.expect(bars.index(3 + v1), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [b, hk, n + 3 * BLOCK_N, 0], bars.index(3 + v1), v_smem.index(v1))
        k0 = k1
        turn = turn1
    out = warpgroup_mma_wait(0, deps=[acc])
    # k tiles 0..tiles+1 were asked for, 0..tiles waited for; v tiles 0..tiles+2
    if k0 == 2:
        mbarrier.wait(bars.index(0), (turn + 1) & 1)
    else:
        mbarrier.wait(bars.index(k0 + 1), turn & 1)
    mbarrier.wait(bars.index(3 + (tiles & 1)), ((tiles >> 1) + 1) & 1)
    mbarrier.wait(bars.index(4 - (tiles & 1)), ((tiles + 1) >> 1) & 1)
    q2.store((out * scale).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [b, h, m0, 0], q_smem)
    tma.store_wait(0)
    for i in gl.static_range(6):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def _dkdv_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,  # inputs
    dk_desc, dv_desc,  # outputs
    H, GROUP, Lq, Lk, scale, rate, offset, first_lone, last_lone, left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, num_warps: gl.constexpr,
):
    """dv = p^T do;  dk = scale * ds^T q;  p and ds as in dq.  One program, BLOCK_N keys and all queries that see them.

    Fuses   four products, transposed: p^T and ds^T stay in registers as left operands. p is computed while do v^T runs, ds
            while dv does, and dk runs into the next tile. The query heads that share these keys follow one another.
    Moves   k, v, q, do, two fp32 per query in; dk, dv out. Two tiles of q and of do are in flight.
    Rounds  p and ds to the storage dtype before their products, dk and dv at the store; sums in fp32.
    """
    dtype: gl.constexpr = q_desc.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])  # scores transposed: keys x queries
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    nn = (Lk + BLOCK_N - 1) // BLOCK_N
    pid = gl.program_id(0)
    bh = pid // nn
    n0 = (pid % nn) * BLOCK_N
    HK = H // GROUP
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
    bars = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())  # q 0-1, do 2-3, k and v 4
    for i in gl.static_range(5):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(bars.index(4), 2 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [b, hk, n0, 0], bars.index(4), k_smem)
    tma.async_copy_global_to_shared(v_desc, [b, hk, n0, 0], bars.index(4), v_smem)
    total = tiles * GROUP
    h0 = hk * GROUP
    # tile t is queries lo + (t % tiles) * BLOCK_M of head h0 + t // tiles; (g1, i1) is the tile after it, (g2, i2) the next
    mbarrier.expect(bars.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [b, h0, lo, 0], bars.index(0), q_smem.index(0))
    mbarrier.expect(bars.index(2), do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [b, h0, lo, 0], bars.index(2), do_smem.index(0))
    g1 = 0
    i1 = 1
    if i1 >= tiles:
        g1 = 1
        i1 = 0
    mbarrier.expect(bars.index(3), do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [b, h0 + g1, lo + i1 * BLOCK_M, 0], bars.index(3), do_smem.index(1))

    rows = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SL))  # keys
    cols = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SL))  # queries
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, SL)
    dk = warpgroup_mma_init(gl.full([BLOCK_N, BLOCK_D], 0.0, gl.float32, OL))
    dv = warpgroup_mma_init(gl.full([BLOCK_N, BLOCK_D], 0.0, gl.float32, OL))
    k2 = k_smem.reshape([BLOCK_N, BLOCK_D])
    v2 = v_smem.reshape([BLOCK_N, BLOCK_D])
    mbarrier.wait(bars.index(4), 0)
    g = 0
    i = 0
    for t in range(total):
        slot = t & 1
        phase = (t >> 1) & 1
        m0 = lo + i * BLOCK_M
        g1 = g
        i1 = i + 1
        if i1 >= tiles:
            g1 = g + 1
            i1 = 0
        g2 = g1
        i2 = i1 + 1
        if i2 >= tiles:
            g2 = g1 + 1
            i2 = 0
        q2 = q_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        do2 = do_smem.index(slot).reshape([BLOCK_M, BLOCK_D])
        mbarrier.wait(bars.index(slot), phase)
        s = warpgroup_mma(k2, q2.permute([1, 0]), zero, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(2 + slot), phase)
        dp = warpgroup_mma(v2, do2.permute([1, 0]), zero, use_acc=False, is_async=True)
        at = m0 + cols
        stat = ((b * H + h0 + g).to(gl.int64)) * Lq + at
        lse = gl.load(lse_ptr + stat, mask=at < Lq, other=0.0)
        delta = gl.load(delta_ptr + stat, mask=at < Lq, other=0.0)
        s, dk_done = warpgroup_mma_wait(1, deps=[s, dk])
        ahead = 1 - slot
        mbarrier.expect(bars.index(ahead), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h0 + g1, lo + i1 * BLOCK_M, 0], bars.index(ahead), q_smem.index(ahead))
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
        dk = warpgroup_mma(gl.convert_layout(ds.to(dtype), PL), q2, dk_done, is_async=True)
        dv = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[dv]))
        mbarrier.expect(bars.index(2 + slot), do_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [b, h0 + g2, lo + i2 * BLOCK_M, 0], bars.index(2 + slot), do_smem.index(slot))
        g = g1
        i = i1
    dk_out, dv_out = warpgroup_mma_wait(0, deps=[dk, dv])
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


def shared(x, rows: int) -> TensorDescriptor:
    """As `described`, with the layout that the tile takes in shared memory."""
    shape, strides, block = blocks_of(x, rows)
    return TensorDescriptor(x, shape, strides, block, shared_layout(tuple(block), x.dtype))


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _sizes(tile: Tile, BLOCK_D: int) -> dict:
    return dict(BLOCK_M=tile.M, BLOCK_N=tile.N, BLOCK_D=BLOCK_D, num_warps=tile.warps)


def dq_hopper(dq, q, k, v, do, lse, delta, scale, offset, places, left, right, tile: Tile):
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    M, N = tile.M, tile.N
    d = [shared(x, rows) for x, rows in ((q, M), (k, N), (v, N), (do, M), (dq, M))]
    launcher(_dq_hopper_kernel)[(B * H * triton.cdiv(Lq, M),)](
        *d[:4], lse, delta, d[4], H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        **_sizes(tile, d[0].block_shape[3]),
    )


def dkdv_hopper(dk, dv, q, k, v, do, lse, delta, scale, offset, places, left, right, tile: Tile):
    (B, H, Lq, _), (Hkv, Lk) = q.shape, k.shape[1:3]
    M, N = tile.M, tile.N
    d = [shared(x, rows) for x, rows in ((q, M), (k, N), (v, N), (do, M), (dk, N), (dv, N))]
    launcher(_dkdv_hopper_kernel)[(B * Hkv * triton.cdiv(Lk, N),)](
        *d[:4], lse, delta, *d[4:], H, H // Hkv, Lq, Lk, scale, scale * LOG2E, offset, *places, **limits(left, right),
        **_sizes(tile, d[0].block_shape[3]),
    )
