"""The product of `_halves` for Hopper, in Gluon: one warp copies, two warpgroups of 64 rows each compute.

Plain Triton waits for each of a tile's three products before it issues the next. Here they are issued together, and while one
warpgroup adds what they gave, the other's are running. Programs stay and take tiles in turn, so that the next tile's operands
come while this one is stored.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from whet import machine
from whet.launch import launcher
from whet.ops._pairs import BY_TOPS
from whet.ops._rows import cdiv
from whet.ops.attention.hopper import shared_layout

ROWS = 64  # of one warpgroup
REGISTERS = 240  # a thread's in a warpgroup that computes; the warp that copies keeps 24


@gluon.jit
def _place(item, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """The first row and column of a tile: GROUP rows of tiles are walked together."""
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    first = item // (GROUP * tiles_n) * GROUP
    group_rows = gl.minimum(tiles_m - first, GROUP)
    within = item % (GROUP * tiles_n)
    return (first + within % group_rows) * BLOCK_M, within // group_rows * BLOCK_N


@gluon.jit
def _copy(
    a_hi, a_lo, b_hi, b_lo, a_smem, b_smem, full, empty, M, N, K, items,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):
    """Bring the operands of every tile, BLOCK_K deep at a time, as soon as there is room."""
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m0, n0 = _place(item, M, N, 2 * ROWS, BLOCK_N, GROUP)
        for k in range(0, K, BLOCK_K):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, 4 * a_hi.block_type.nbytes + 2 * b_hi.block_type.nbytes)
            for half in gl.static_range(2):
                if A_TRANSPOSED:
                    tma.async_copy_global_to_shared(a_hi, [k, m0 + half * ROWS], bar, a_smem.index(4 * slot + 2 * half))
                    tma.async_copy_global_to_shared(a_lo, [k, m0 + half * ROWS], bar, a_smem.index(4 * slot + 2 * half + 1))
                else:
                    tma.async_copy_global_to_shared(a_hi, [m0 + half * ROWS, k], bar, a_smem.index(4 * slot + 2 * half))
                    tma.async_copy_global_to_shared(a_lo, [m0 + half * ROWS, k], bar, a_smem.index(4 * slot + 2 * half + 1))
            if B_TRANSPOSED:
                tma.async_copy_global_to_shared(b_hi, [k, n0], bar, b_smem.index(2 * slot))
                tma.async_copy_global_to_shared(b_lo, [k, n0], bar, b_smem.index(2 * slot + 1))
            else:
                tma.async_copy_global_to_shared(b_hi, [n0, k], bar, b_smem.index(2 * slot))
                tma.async_copy_global_to_shared(b_lo, [n0, k], bar, b_smem.index(2 * slot + 1))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1


@gluon.jit
def _multiply(
    row_ptr, column_ptr, out_ptr, stride_om, a_smem, b_smem, full, empty, M, N, K, items,
    HALF: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):
    """One warpgroup's half of every tile: the first ROWS rows, or the second."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, L)
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m0, n0 = _place(item, M, N, 2 * ROWS, BLOCK_N, GROUP)
        acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, L)
        for _ in range(0, K, BLOCK_K):
            a_hi = a_smem.index(4 * slot + 2 * HALF)
            a_lo = a_smem.index(4 * slot + 2 * HALF + 1)
            b_hi = b_smem.index(2 * slot)
            b_lo = b_smem.index(2 * slot + 1)
            if A_TRANSPOSED:
                a_hi = a_hi.permute([1, 0])
                a_lo = a_lo.permute([1, 0])
            if not B_TRANSPOSED:
                b_hi = b_hi.permute([1, 0])
                b_lo = b_lo.permute([1, 0])
            mbarrier.wait(full.index(slot), phase)
            part = warpgroup_mma(a_lo, b_hi, zero, use_acc=False, is_async=True)
            part = warpgroup_mma(a_hi, b_lo, part, is_async=True)
            part = warpgroup_mma(a_hi, b_hi, part, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(slot))
            acc += part
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
        m = m0 + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, L))
        by_row = gl.load(row_ptr + m, mask=m < M, other=0.0)[:, None]
        acc = acc * BY_TOPS
        if column_ptr is None:
            acc = acc * by_row
        else:  # the smaller first, as `_halves._product_kernel`
            by_column = gl.load(column_ptr + n, mask=n < N, other=0.0)[None, :]
            acc = acc * gl.minimum(by_row, by_column) * gl.maximum(by_row, by_column)
        at = m[:, None].to(gl.int64) * stride_om + n[None, :]
        gl.store(out_ptr + at, acc, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit(do_not_specialize=["items"])
def _product_hopper_kernel(
    a_hi, a_lo, b_hi, b_lo,  # descriptors: a (M, K), or (K, M) where A_TRANSPOSED; b (N, K), or (K, N) where B_TRANSPOSED
    row_ptr, column_ptr,  # inputs: scales (M,) and (N,), or None
    out_ptr,  # (M, N)
    stride_om,
    M, N, K, items,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):
    """out = row * column * 2^-28 * (a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi).  A tile is 2 * ROWS x BLOCK_N of the result.

    Fuses   three products, which share what is copied, and the scales.
    Moves   a and b in, 4 bytes an element, as float32 would; out.
    Rounds  BLOCK_K products at a time by the tensor cores, the smallest first; their sums in fp32; once at the store.
    """
    a_smem = gl.allocate_shared_memory(gl.float16, [STAGES * 4, a_hi.block_shape[0], a_hi.block_shape[1]], a_hi.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [STAGES * 2, b_hi.block_shape[0], b_hi.block_shape[1]], b_hi.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (
            row_ptr, column_ptr, out_ptr, stride_om, a_smem, b_smem, full, empty, M, N, K, items,
            0, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP, A_TRANSPOSED, B_TRANSPOSED,
        )),
        (_multiply, (
            row_ptr, column_ptr, out_ptr, stride_om, a_smem, b_smem, full, empty, M, N, K, items,
            1, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP, A_TRANSPOSED, B_TRANSPOSED,
        )),
        (_copy, (
            a_hi, a_lo, b_hi, b_lo, a_smem, b_smem, full, empty, M, N, K, items,
            ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP, A_TRANSPOSED, B_TRANSPOSED,
        )),
    ], [4, 1], [REGISTERS, 24])


def shared(x, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), shared_layout(block, x.dtype))


def product(out, halves, row, column, K: int, tile, depth: int, group: int, a_transposed: bool, b_transposed: bool) -> None:
    """As `_halves.product`, into out; halves are a's hi and lo, then b's."""
    M, N = out.shape
    a_block = (depth, ROWS) if a_transposed else (ROWS, depth)
    b_block = (depth, tile.N) if b_transposed else (tile.N, depth)
    items = cdiv(M, 2 * ROWS) * cdiv(N, tile.N)
    launcher(_product_hopper_kernel)[(min(items, machine.sm_count()),)](
        *(shared(half, block) for half, block in zip(halves, (a_block, a_block, b_block, b_block))),
        row, column, out, out.stride(0), M, N, K, items,
        ROWS=ROWS, BLOCK_N=tile.N, BLOCK_K=depth, STAGES=tile.stages, GROUP=group,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, REGISTERS=REGISTERS, num_warps=4,
    )
