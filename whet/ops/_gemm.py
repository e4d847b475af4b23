"""What the decode ops share where there are many rows of x: the product on tensor cores, weights widened as they come."""

import torch
import triton
import triton.language as tl

from whet import machine
from whet.ops._chain import begin, chain, ready
from whet.ops.attention.common import dot_add


@triton.jit
def widened(w, s_ptr, n, g, stride_sn, dtype: tl.constexpr, QUANT: tl.constexpr):
    """A tile of stored weights in the dtype of the product; int8 and fp8 are exact and scaled after it."""
    wide = w.to(tl.float32)
    if QUANT == "int4":
        wide = (wide - 8.0) * tl.load(s_ptr + n[:, None] * stride_sn + g).to(tl.float32)
    return wide.to(dtype)


@triton.jit
def _many_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, res_ptr,  # inputs; scale, bias and res may be absent
    y_ptr,  # output
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    M, N,
    KS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, CHAINED: tl.constexpr,
):
    """y = x @ w.T [+ bias] [+ res], or with PAIRED silu(that) * the same of rows N onward, on tensor cores.

    Fuses   what follows the product.
    Moves   w and its scales in, once for BLOCK_M rows of x; x once a program; y, res.
    Rounds  int4 times its scale to the storage dtype, as operand; sums in fp32; y once.
    """
    begin(CHAINED)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ready(CHAINED)

    for i in range(0, KS, BLOCK_K):
        k = i + tl.arange(0, BLOCK_K)
        at = n[:, None] * stride_wn + k[None, :]
        inside = (n < N)[:, None] & (k < KS)[None, :]
        stored = tl.load(w_ptr + at, mask=inside, other=0.0)
        up = (N + n)[:, None] * stride_wn + k[None, :]
        stored_up = tl.load(w_ptr + up, mask=inside, other=0.0) if PAIRED else stored
        for half in tl.static_range(2 if QUANT == "int4" else 1):
            g = (half * KS + i) // GROUP
            in_x = (m < M)[:, None] & (k < KS)[None, :]
            x = tl.load(x_ptr + m[:, None] * stride_xm + half * KS + k[None, :], mask=in_x, other=0.0)
            w, w_up = stored, stored_up
            if QUANT == "int4":
                w, w_up = (stored >> (4 * half)) & 15, (stored_up >> (4 * half)) & 15
            wide = widened(w, scale_ptr, tl.minimum(n, N - 1), g, stride_sn, dtype, QUANT)
            acc = dot_add(acc, x, tl.trans(wide))
            if PAIRED:
                wide_up = widened(w_up, scale_ptr, N + tl.minimum(n, N - 1), g, stride_sn, dtype, QUANT)
                acc_up = dot_add(acc_up, x, tl.trans(wide_up))

    if QUANT == "int8" or QUANT == "fp8":
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
        if PAIRED:
            acc_up *= tl.load(scale_ptr + N + n, mask=n < N, other=0.0)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if PAIRED:
        acc = acc * tl.sigmoid(acc) * acc_up
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if res_ptr is not None:
        acc += tl.load(res_ptr + m[:, None] * stride_rm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], acc, mask=inside)


def cut(N: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, warps, stages: narrow enough that every SM has rows of w; less at once where memory is small."""
    capability = machine.this_machine().capability
    if dtype == torch.float32 or not capability or capability < (9, 0):
        return 16, 64, 4, 2
    if N < 2048:
        return 16, 256, 4, 5
    return (32, 128, 4, 4) if N < 2**16 else (64, 64, 4, 4)


def many(x, norm, w, scale, bias, res, y, strides, eps, how) -> torch.Tensor:
    """Launch the product of many rows of x, normed first where it is to be."""
    M, N = y.shape
    if norm is not None:
        x = normed(x, norm, eps)
        strides = (x.stride(0), *strides[1:])
    BLOCK_M = 64  # for few rows too: narrower tiles go through slower tensor instructions
    BLOCK_N, BLOCK_K, warps, stages = cut(N, x.dtype)
    if how["QUANT"] == "int4":
        BLOCK_K = min(BLOCK_K, how["GROUP"])
    _many_kernel[(triton.cdiv(N, BLOCK_N), triton.cdiv(M, BLOCK_M))](
        x, w, scale, bias, res, y, *strides, M, N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=warps, num_stages=stages, **how,
    )
    return y


@triton.jit
def _normed_kernel(
    x_ptr, norm_ptr,  # inputs
    y_ptr,  # output
    stride_xm,
    K, eps,
    BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):
    """y = x * rsqrt(mean(x^2) + eps) * norm.  One program, one row; rms_norm as a link of a chain.

    Moves   x and norm in, y out.
    Rounds  y once, at the store; fp32 inside.
    """
    begin(CHAINED)
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    ready(CHAINED)
    x = tl.load(x_ptr + m * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x) / K + eps)
    tl.store(y_ptr + m * K + k, x * rstd * norm, mask=k < K)


def normed(x, norm, eps) -> torch.Tensor:
    M, K = x.shape
    y = torch.empty(M, K, dtype=x.dtype, device=x.device)
    _normed_kernel[(M,)](x, norm, y, x.stride(0), K, eps, BLOCK_K=triton.next_power_of_2(K), num_warps=4, **chain())
    return y
