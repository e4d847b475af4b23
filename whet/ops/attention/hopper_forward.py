"""The forward kernel of attention for Hopper at head sizes of 65 to 128, in Gluon: warps that copy beside warps that compute.

One warp copies tiles to shared memory; two warpgroups of 64 queries each take turns at the tensor cores, so that one's
softmax is hidden behind the other's products. A ring of tiles has two barriers to a slot: full, which the copy completes,
and empty, at which both warpgroups arrive.
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

from whet import machine
from whet.launch import launcher
from whet.ops._rows import cdiv
from whet.ops.attention.common import Tile, limits
from whet.ops.attention.hopper import shared

ROWS = 64  # queries of one warpgroup
REGISTERS = 240  # a thread's in a warpgroup that computes; the warp that copies keeps 24
L2_SHARE = 2**24  # bytes of keys and values that the programs running at one time read


@gluon.jit
def _item(turn, nm, BH, SECTION, HAS_RIGHT: gl.constexpr):
    """What this program does at its turn: the number of the item, its batch and head, its block of queries.

    Odd turns run backwards through the programs, so that one with a long item has a short one next.
    """
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    item = turn * programs + pid
    if (turn & 1) == 1:
        item = turn * programs + programs - 1 - pid
    bh = item // nm
    mb = item % nm
    if HAS_RIGHT:  # of SECTION heads, the blocks that see most keys first
        section = item // (SECTION * nm)
        within = item % (SECTION * nm)
        heads = gl.maximum(gl.minimum(SECTION, BH - section * SECTION), 1)
        mb = nm - 1 - within // heads
        bh = section * SECTION + within % heads
    return item, bh, mb


@gluon.jit
def _keys(
    m0, Lk, offset, left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    """The first key, a multiple of BLOCK_N, that some of BLOCK_M queries see, and how many tiles they see from there on."""
    lo = 0
    hi = Lk
    if HAS_RIGHT:
        hi = gl.minimum(Lk, m0 + BLOCK_M + offset + right)
    if HAS_LEFT:
        lo = gl.maximum(0, m0 + offset - left) // BLOCK_N * BLOCK_N
    return lo, gl.maximum(1, (hi - lo + BLOCK_N - 1) // BLOCK_N)  # one at least: where none is seen, all of it is masked


@gluon.jit
def _weights(
    s, row_max, row_sum, n, rows, lo_full, hi_full, Lk, rate, offset, left, right,
    BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SL: gl.constexpr,
):
    """p, alpha, row_max, row_sum: the weights of the scores s at the keys from n on, what to scale the sums before them by."""
    masked = n + BLOCK_N > hi_full
    if HAS_LEFT:
        masked = masked | (n < lo_full)
    if masked:
        at = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SL))
        seen = (at < Lk)[None, :] & (rows > -1)[:, None]
        if HAS_RIGHT:
            seen = seen & (at[None, :] <= rows[:, None] + (offset + right))
        if HAS_LEFT:
            seen = seen & (at[None, :] >= rows[:, None] + (offset - left))
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(row_max, gl.max(s, 1) * rate)
    base = new
    if HAS_LEFT or HAS_RIGHT:
        base = gl.where(new == float("-inf"), 0.0, new)  # a row that has met no key yet
    p = gl.exp2(s * rate - base[:, None])
    alpha = gl.exp2(row_max - base)
    return p, alpha, new, row_sum * alpha + gl.sum(p, 1)


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty,
    B, H, GROUP, SECTION, Lq, Lk, offset, left, right,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    """Bring every item's queries, and its keys and values tile by tile, as soon as there is room."""
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    nm = (Lq + 2 * ROWS - 1) // (2 * ROWS)
    items = B * H * nm
    slot = 0
    phase = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item, bh, mb = _item(turn, nm, B * H, SECTION, HAS_RIGHT)
        if item < items:
            m0 = mb * 2 * ROWS
            b = bh // H
            h = bh % H
            hk = h // GROUP
            lo, tiles = _keys(m0, Lk, offset, left, right, 2 * ROWS, BLOCK_N, HAS_LEFT, HAS_RIGHT)
            mbarrier.wait(q_empty.index(0), (turn + 1) & 1)
            mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, h, m0, 0], q_full.index(0), q_smem.index(0))
            tma.async_copy_global_to_shared(q_desc, [b, h, m0 + ROWS, 0], q_full.index(0), q_smem.index(1))
            for j in range(tiles):
                n = lo + j * BLOCK_N
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [b, hk, n, 0], k_full.index(slot), k_smem.index(slot))
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [b, hk, n, 0], v_full.index(slot), v_smem.index(slot))
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase = phase ^ 1


@gluon.jit
def _attend(
    o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, full, empty, order,
    B, H, SECTION, Lq, Lk, rate, offset, left, right,
    HALF: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    """One warpgroup's half of every item: the first ROWS queries, or the second. `order` is whose products are next.

    The scores of tile j and the product of tile j - 1 with its values run together; the softmax of tile j beside the latter.
    """
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    dtype: gl.constexpr = o_desc.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    nm = (Lq + 2 * ROWS - 1) // (2 * ROWS)
    items = B * H * nm
    q2 = q_smem.index(HALF).reshape([ROWS, BLOCK_D])
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SL)
    slot = 0
    phase = 0
    beat = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item, bh, mb = _item(turn, nm, B * H, SECTION, HAS_RIGHT)
        if item < items:
            lo, tiles = _keys(mb * 2 * ROWS, Lk, offset, left, right, 2 * ROWS, BLOCK_N, HAS_LEFT, HAS_RIGHT)
            m0 = mb * 2 * ROWS + ROWS * HALF
            # keys that all queries of this half see: [lo_full, hi_full)
            lo_full = 0
            hi_full = Lk
            if HAS_RIGHT:
                hi_full = gl.minimum(Lk, m0 + offset + right + 1)
            if HAS_LEFT:
                lo_full = m0 + ROWS - 1 + offset - left
            rows = m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SL))
            row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SL))
            acc = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, OL)
            mbarrier.wait(q_full.index(0), turn & 1)
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.wait(order.index(HALF), (beat + 1 - HALF) & 1)
            k0 = k_smem.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
            s = warpgroup_mma(q2, k0, zero, use_acc=False, is_async=True)
            mbarrier.arrive(order.index(1 - HALF))
            beat += 1
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot))
            p, alpha, row_max, row_sum = _weights(
                s, row_max, row_sum, lo, rows, lo_full, hi_full, Lk, rate, offset, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT, SL
            )
            pa = gl.convert_layout(p.to(dtype), PL)
            for j in range(1, tiles):
                slot1 = slot + 1
                phase1 = phase
                if slot1 == STAGES:
                    slot1 = 0
                    phase1 = phase ^ 1
                n = lo + j * BLOCK_N
                mbarrier.wait(k_full.index(slot1), phase1)
                mbarrier.wait(order.index(HALF), (beat + 1 - HALF) & 1)
                k1 = k_smem.index(slot1).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
                s = warpgroup_mma(q2, k1, zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), phase)
                acc_run = warpgroup_mma(pa, v_smem.index(slot).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
                mbarrier.arrive(order.index(1 - HALF))
                beat += 1
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(slot1))
                p, alpha, row_max, row_sum = _weights(
                    s, row_max, row_sum, n, rows, lo_full, hi_full, Lk, rate, offset, left, right,
                    BLOCK_N, HAS_LEFT, HAS_RIGHT, SL,
                )
                # This barrier is complete already. ptxas moves the wait for acc up above the exponentials, which then
                # hide nothing; it moves it past no branch, and a wait at a barrier is one.
                mbarrier.wait(v_full.index(slot), phase)
                acc = warpgroup_mma_wait(0, deps=[acc_run])
                mbarrier.arrive(v_empty.index(slot))
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                pa = gl.convert_layout(p.to(dtype), PL)
                slot = slot1
                phase = phase1
            mbarrier.arrive(q_empty.index(0))
            mbarrier.wait(v_full.index(slot), phase)
            acc_run = warpgroup_mma(pa, v_smem.index(slot).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
            inv = gl.where(row_sum != 0.0, 1.0 / row_sum, 0.0)
            lse = gl.where(row_sum != 0.0, row_max + gl.log2(row_sum), float("-inf"))
            gl.store(lse_ptr + bh.to(gl.int64) * Lq + rows, lse, mask=rows < Lq)
            acc = warpgroup_mma_wait(0, deps=[acc_run])
            mbarrier.arrive(v_empty.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
            out = acc * gl.convert_layout(inv, gl.SliceLayout(1, OL))[:, None]
            tma.store_wait(0)  # the item before has left o_smem
            o_smem.index(HALF).reshape([ROWS, BLOCK_D]).store(out.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [bh // H, bh % H, m0, 0], o_smem.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "GROUP", "SECTION", "Lq", "Lk", "offset", "left", "right"])
def _forward_hopper_kernel(
    q_desc, k_desc, v_desc,  # inputs
    o_desc, lse_ptr,  # outputs
    B, H, GROUP, SECTION, Lq, Lk, rate, offset, left, right,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, num_warps: gl.constexpr,
):
    """o = softmax(scale * q k^T) v over the keys j with -left <= j - (i + offset) <= right.  An item is 2 * ROWS queries.

    Fuses   both products and the softmax: scores stay in registers. Programs stay, and take items in turn.
    Moves   q, k, v in; o and one fp32 per row out. k and v come from L2 once per 2 * ROWS queries.
    Rounds  weights to the storage dtype before the second product, o at the store; sums in fp32.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, BLOCK_D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    full = (q_full, k_full, v_full)
    empty = (q_empty, k_empty, v_empty)
    gl.warp_specialize([
        (_attend, (
            o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, full, empty, order,
            B, H, SECTION, Lq, Lk, rate, offset, left, right, 0, ROWS, BLOCK_N, BLOCK_D, STAGES, HAS_LEFT, HAS_RIGHT,
        )),
        (_attend, (
            o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, full, empty, order,
            B, H, SECTION, Lq, Lk, rate, offset, left, right, 1, ROWS, BLOCK_N, BLOCK_D, STAGES, HAS_LEFT, HAS_RIGHT,
        )),
        (_copy, (
            q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty,
            B, H, GROUP, SECTION, Lq, Lk, offset, left, right, ROWS, BLOCK_N, STAGES, HAS_LEFT, HAS_RIGHT,
        )),
    ], [4, 1], [REGISTERS, 24])


def forward_hopper(o, lse, q, k, v, rate, offset, left, right, tile: Tile):
    (B, H, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    if (tile.M, tile.warps) != (2 * ROWS, 8):
        raise ValueError(f"attention[triton]: a forward tile in Gluon must be of 128 queries and 8 warps, got {tile}")
    d = [shared(x, rows) for x, rows in ((q, ROWS), (k, tile.N), (v, tile.N), (o, ROWS))]
    items = B * H * cdiv(Lq, tile.M)
    section = min(B * H, H // Hkv * max(1, L2_SHARE // (2 * Lk * D * k.element_size())))
    launcher(_forward_hopper_kernel)[(min(items, machine.sm_count()),)](
        *d, lse, B, H, H // Hkv, section, Lq, Lk, rate, offset, **limits(left, right),
        ROWS=ROWS, BLOCK_N=tile.N, BLOCK_D=d[0].block_shape[3], STAGES=tile.stages, REGISTERS=REGISTERS,
        num_warps=tile.warps // 2,
    )
