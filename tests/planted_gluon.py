"""A Gluon kernel that is right, and copies of it each with one fault of synchronisation, for the interpreter to find.

out = (x @ y) @ z: one warp copies tiles through a ring of two slots, a warpgroup multiplies, rounds what it has, lays it into
shared memory and multiplies again.
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

from whet.ops.attention.hopper import shared_layout

FAULTS = (
    "the copy does not wait until its slot is empty", "the product does not wait until its slot is full",
    "the slot is given back before the product is made", "the sum is read while the last product may be on its way",
    "no fence between a store and the product that reads it", "the result's memory is left before it is copied",
    "a phase is waited for that never comes", "fewer bytes are expected than come", "one arrival too many",
    "a copy is still on its way at the end", "a block lies past the end of shared memory",
)


@gluon.jit
def _bring(x_desc, y_desc, x_smem, y_smem, full, empty, K, FAULT: gl.constexpr):
    for i in range((K + 63) // 64):
        slot = i & 1
        if FAULT != 0:
            mbarrier.wait(empty.index(slot), ((i >> 1) & 1) ^ 1)
        size: gl.constexpr = x_desc.block_type.nbytes + y_desc.block_type.nbytes
        mbarrier.expect(full.index(slot), size - 64 if FAULT == 7 else size)
        tma.async_copy_global_to_shared(x_desc, [0, i * 64], full.index(slot), x_smem.index(slot))
        tma.async_copy_global_to_shared(y_desc, [i * 64, 0], full.index(slot), y_smem.index(slot + (2 if FAULT == 10 else 0)))
    if FAULT == 9:
        mbarrier.wait(empty.index(0), 0)
        mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [0, 0], full.index(0), x_smem.index(0))


@gluon.jit
def _compute(z_desc, out_desc, x_smem, y_smem, z_smem, h_smem, full, empty, K, FAULT: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.full([64, 64], 0.0, gl.float32, L)
    mbarrier.expect(full.index(2), z_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(z_desc, [0, 0], full.index(2), z_smem)
    for i in range((K + 63) // 64):
        slot = i & 1
        if FAULT != 1:
            mbarrier.wait(full.index(slot), (i >> 1) & 1)
        run = warpgroup_mma(x_smem.index(slot), y_smem.index(slot), acc, is_async=True)
        if FAULT == 2:
            mbarrier.arrive(empty.index(slot))
        acc = warpgroup_mma_wait(1 if FAULT == 3 else 0, deps=[run])
        if FAULT != 2:
            mbarrier.arrive(empty.index(slot))
        if FAULT == 8:
            mbarrier.arrive(empty.index(slot))
    h_smem.store(acc.to(gl.bfloat16))
    if FAULT != 4:
        fence_async_shared()
    mbarrier.wait(full.index(2), 1 if FAULT == 6 else 0)
    if FAULT == 6:
        mbarrier.wait(full.index(2), 1)
        mbarrier.wait(full.index(2), 0)
        mbarrier.wait(full.index(2), 1)
    acc = warpgroup_mma(h_smem, z_smem, acc, use_acc=False)
    h_smem.store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [0, 0], h_smem)
    if FAULT != 5:
        tma.store_wait(0)


@gluon.jit
def _planted_kernel(x_desc, y_desc, z_desc, out_desc, K, FAULT: gl.constexpr, num_warps: gl.constexpr):
    """out = (x @ y) @ z of (64, K), (K, 64) and (64, 64).

    Moves   x, y, z in; out.
    Rounds  x @ y and out to bfloat16.
    """
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], x_desc.layout)
    y_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], y_desc.layout)
    z_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], z_desc.layout)
    h_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_compute, (z_desc, out_desc, x_smem, y_smem, z_smem, h_smem, full, empty, K, FAULT)),
        (_bring, (x_desc, y_desc, x_smem, y_smem, full, empty, K, FAULT)),
    ], [1], [24])


def planted(x, y, z, out, fault: int = -1) -> tuple:
    """The arguments of a launch; fault: which of FAULTS, -1 for none."""
    given, layout = (x, y, z, out), shared_layout((64, 64), x.dtype)
    return (*(TensorDescriptor(t, list(t.shape), list(t.stride()), [64, 64], layout) for t in given), x.shape[1], fault, 4)
