"""A loss over chunks of rows: how many rows have their logits in memory, what gradients are summed in, and the last factor."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher

CHUNK_BYTES = 224 << 20  # 2048 bf16 rows at vocabulary 50304, four chunks of 8192: products stay large
MANY_BYTES = 448 << 20  # 4096 such rows, eight chunks of 32768
ACCUMULATOR_BYTES = 256 << 20  # an fp32 dw above this would cost more than the logits chunk


@triton.jit
def _scaled_kernel(
    grad_ptr, dloss_ptr, scale_ptr,  # inputs
    out_ptr,
    numel,
    BLOCK: tl.constexpr,
):
    """out = grad * (dloss * scale), in out's dtype.  One program, BLOCK elements.

    Fuses   the upstream gradient, the mean's division and the cast of an fp32 sum.
    Moves   grad in, out out.
    Rounds  once, at the store.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss_ptr) * tl.load(scale_ptr)
    grad = tl.load(grad_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, grad * factor, mask=i < numel)


def scaled(grad, dloss, scale, dtype):
    """A fresh tensor: the saved gradient stays as it was, for a second backward through the same graph."""
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if out.numel():
        programs = triton.cdiv(out.numel(), 4096)
        launcher(_scaled_kernel)[(programs,)](grad, dloss, scale, out, out.numel(), BLOCK=4096, num_warps=8)
    return out


def chunks(M: int, row_bytes: int, w_bytes: int) -> list[slice]:
    """Rows cut evenly into as few chunks as memory allows, each a multiple of 128 rows where it can be.

    A chunk may be as large as w for free: the backward holds dw twice, as summed and as returned. A padded w comes on top.
    Each chunk reads and writes the sum of dw, 190 rows' worth of time: of many rows a chunk is an eighth, up to MANY_BYTES.
    """
    most = max(1, max(CHUNK_BYTES, w_bytes, min(M * row_bytes // 8, MANY_BYTES)) // row_bytes)
    unit = 128 if most >= 128 else 1
    step = M if most >= M else triton.cdiv(triton.cdiv(M, triton.cdiv(M, most // unit * unit)), unit) * unit
    return [slice(start, min(start + step, M)) for start in range(0, M, max(1, step))]


def sum_dtype(w: torch.Tensor) -> torch.dtype:
    """The dtype dw is summed in. fp16 always takes fp32: a frequent token's unscaled sum can pass 65504."""
    return torch.float32 if w.dtype == torch.float16 or 4 * w.numel() <= ACCUMULATOR_BYTES else w.dtype
