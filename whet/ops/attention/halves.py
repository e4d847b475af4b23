"""Heads of float32 as pairs of float16, one scale for each head: what attention's float32 kernels take."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._pairs import TOP, in_halves, magnitude, padded, power_below
from whet.ops._rows import cdiv
from whet.ops.attention.common import block_d

ROWS, PARTS = 32, 64  # of a head that a program holds at a time; programs at most that look for a head's peak


@triton.jit
def _head_peaks_kernel(
    x_ptr,  # (B, H, L, D)
    peak_ptr,  # (B * H,) as int32, zeros before
    stride_xb, stride_xh, stride_xl,
    H, L, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """peak = the largest |x| of a head.  One program, a part of the rows of one head.

    Moves   x in; an atomic maximum for each program: positive floats are in order as integers.
    Rounds  nothing.
    """
    head, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    start = x_ptr + (head // H).to(tl.int64) * stride_xb + (head % H).to(tl.int64) * stride_xh
    peak = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for i in range(tl.program_id(1) * BLOCK_M, L, tl.num_programs(1) * BLOCK_M):
        row = i + tl.arange(0, BLOCK_M)
        inside = (row < L)[:, None] & (d < D)[None, :]
        x = tl.load(start + row[:, None].to(tl.int64) * stride_xl + d[None, :], mask=inside, other=0.0)
        peak = tl.maximum(peak, magnitude(x))
    tl.atomic_max(peak_ptr + head, tl.max(tl.max(peak, 1), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _split_head_kernel(
    x_ptr, peak_ptr,  # inputs: (B, H, L, D); (B * H,)
    half_ptr,  # (2 * B, H, L, P): hi, then lo
    stride_xb, stride_xh, stride_xl,
    B, H, L, D, P,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """scale * 2^-14 * (hi + lo) = x, scale being the power of two at a head's peak.  One program, BLOCK_M rows of one head.

    Moves   x in; hi, lo out.
    Rounds  hi to float16, lo, the rest, to float16.
    """
    blocks = tl.cdiv(L, BLOCK_M)
    head, d = tl.program_id(0) // blocks, tl.arange(0, BLOCK_D)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    start = x_ptr + (head // H).to(tl.int64) * stride_xb + (head % H).to(tl.int64) * stride_xh
    inside = (row < L)[:, None] & (d < D)[None, :]
    x = tl.load(start + row[:, None].to(tl.int64) * stride_xl + d[None, :], mask=inside, other=0.0)
    hi, lo = in_halves(x * (TOP / power_below(tl.load(peak_ptr + head).to(tl.float32, bitcast=True))))
    at = (head.to(tl.int64) * L + row)[:, None] * P + d[None, :]
    stored = (row < L)[:, None] & (d < P)[None, :]
    tl.store(half_ptr + at, hi, mask=stored)
    tl.store(half_ptr + tl.cast(B, tl.int64) * H * L * P + at, lo, mask=stored)


def split(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """The halves of (B, H, L, D), as (2 * B, H, L, P); each head's peak goes into peak, zeros before."""
    B, H, L, D = x.shape
    P, BLOCK_D = padded(D), block_d(D)
    halves = torch.empty(2 * B, H, L, P, dtype=torch.float16, device=x.device)
    if x.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        sizes = dict(BLOCK_M=ROWS, BLOCK_D=BLOCK_D, num_warps=4)
        launcher(_head_peaks_kernel)[(B * H, min(PARTS, cdiv(L, ROWS)))](x, peak, *x.stride()[:3], H, L, D, **sizes)
        launcher(_split_head_kernel)[(B * H * cdiv(L, ROWS),)](x, peak, halves, *x.stride()[:3], B, H, L, D, P, **sizes)
    return halves
