"""rms_norm: scale each row to unit root mean square, then by a learned weight."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _out_dtype
from whet.ops._rows import KERNEL_DTYPES, ROW_LIMITS, bwd_tile, cdiv, column_sum, programs, row_refused, tile, unit_rows
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families


def reference(x, w, eps=1e-6, out_dtype=None):
    """y = x * rsqrt(mean(x^2) + eps) * w, over the last dimension; computed wide, rounded once.

    out_dtype     the dtype of y (None: that of x); under autocast, pass that of the product that reads y
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * rstd * w.to(wide)).to(out_dtype or x.dtype)


def inputs(dtype, device, M, N, layout="contiguous", w_dtype=None, w_layout="contiguous", out_dtype=None):
    x = lay(torch.randn(M, N, dtype=dtype, device=device), layout)
    w = (torch.rand(N, device=device) + 0.5).to(w_dtype and getattr(torch, w_dtype) or dtype)
    return dict(x=x, w=lay(w, w_layout), eps=1e-6, out_dtype=_out_dtype.from_case(out_dtype, dtype))


def case_of(x, w, eps=1e-6, out_dtype=None):
    case = dict(M=x.numel() // max(1, x.shape[-1]), N=x.shape[-1], layout=layout_of(x))
    case |= {} if w.is_contiguous() else dict(w_layout=layout_of(w))
    case |= {} if w.dtype == x.dtype else dict(w_dtype=str(w.dtype).removeprefix("torch."))
    return case | _out_dtype.to_case(out_dtype, x.dtype)


def check(x, w, eps=1e-6, out_dtype=None):
    if reason := floating(x=x, w=w) or same_device(x=x, w=w):
        return reason
    if x.dim() < 1:
        return "x must have at least one dimension, got a scalar"
    if w.shape != x.shape[-1:]:
        return f"w must have shape ({x.shape[-1]},) to match x.shape[-1], got {tuple(w.shape)}"
    return _out_dtype.unknown(out_dtype)


def cost(x, w, eps=1e-6, out_dtype=None):
    y = x.numel() * (out_dtype or x.dtype).itemsize
    return Cost(
        bytes=nbytes(x, w) + y, flops=4 * x.numel(),
        bwd_bytes=y + nbytes(x, w) + nbytes(x, w), bwd_flops=8 * x.numel(),
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr, w_ptr,  # inputs
    y_ptr, rstd_ptr,  # outputs
    stride_xm, stride_ym,
    M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y = x * rsqrt(mean(x^2) + eps) * w.  One program, BLOCK_M rows.

    Fuses   the whole formula: a row is read once; and the cast to y's dtype, which may be another than x's.
    Moves   x, w in; y, rstd out = (2*M*N + N) * itemsize + 4*M.  Unfused: 8*M*N and more.
    Rounds  once, at the store; fp32 inside.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)

    rstd = 1.0 / tl.sqrt_rn((tl.sum(x * x, axis=1) / N + eps).to(tl.float32))  # Inductor hands eps over in 64 bits
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], x * rstd[:, None] * w[None, :], mask=inside)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr,  # inputs
    dx_ptr, partial_ptr,  # outputs
    stride_dym, stride_xm, stride_dxm,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """u = x * rstd;  dx = (w*dy - u * mean(u*w*dy)) * rstd;  dw = sum over rows of dy*u.

    Fuses   dx and dw: x and dy are read once. Programs stride over rows, from the last, which whoever wrote dy left in L2;
            each keeps its share of dw in registers.
    Moves   dy, in y's dtype, x, w, rstd in; dx out = 3*M*N * itemsize, and one fp32 row of dw per program.
    Rounds  dx once, at the store; dw is summed in fp32 in a fixed order, then rounded once.
    """
    pid = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    in_row = n < N
    w = tl.load(w_ptr + n, mask=in_row, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    blocks = tl.cdiv(M, BLOCK_M)
    for i in range(pid, blocks, tl.num_programs(0)):
        m = ((blocks - 1 - i) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # rows stay under 2^31, elements need not
        inside = (m < M)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]

        u = x * rstd
        dw += dy * u
        wdy = dy * w[None, :]
        mean = tl.sum(u * wdy, axis=1)[:, None] / N
        tl.store(dx_ptr + m[:, None] * stride_dxm + n[None, :], (wdy - u * mean) * rstd, mask=inside)

    tl.store(partial_ptr + pid.to(tl.int64) * N + n, tl.sum(dw, axis=0), mask=in_row)


def forward(x, w, eps, out_dtype):
    flat, w = unit_rows(x), w.contiguous()
    M, N = flat.shape
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    if y.numel():
        BLOCK_M, BLOCK_N, warps = tile(N)
        launcher(_rms_norm_kernel)[(cdiv(M, BLOCK_M),)](
            flat, w, y, rstd, flat.stride(0), N, M, N, eps, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps
        )
    return y, rstd


def backward(dy, x, w, rstd):
    flat, dy, w = unit_rows(x), unit_rows(dy), w.contiguous()
    M, N = flat.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    if not dx.numel():
        return dx, dw.zero_()
    # 24 warps an SM, not the 16 of the norms that carry more registers: enough loads in flight to cover their latency.
    BLOCK_M, BLOCK_N, warps, per_sm = bwd_tile(N, warps_per_sm=24)
    G = programs(cdiv(M, BLOCK_M), per_sm)
    partial = torch.empty(G, N, dtype=torch.float32, device=x.device)
    launcher(_rms_norm_bwd_kernel)[(G,)](
        dy, flat, w, rstd, dx, partial, dy.stride(0), flat.stride(0), N, M, N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps,
    )
    return dx, column_sum(partial, dw)


def _fake(x, w, eps, out_dtype):
    M = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(M, dtype=torch.float32)


FUSED = Fused(
    "rms_norm",
    "(Tensor x, Tensor w, float eps, ScalarType? out_dtype) -> (Tensor, Tensor)", forward, _fake,
    "(Tensor dy, Tensor x, Tensor w, Tensor rstd) -> (Tensor, Tensor)", backward,
    lambda dy, x, w, rstd: (x.new_empty(x.shape), w.new_empty(w.shape)),
    save=lambda args, results: ((args[0], args[1], results[1]), ()),
    grads_to=(0, 1, None, None),
    visible=True, bwd_visible=True,
)


def refuses(x, w, eps=1e-6, out_dtype=None):
    if x.dtype not in KERNEL_DTYPES or w.dtype not in KERNEL_DTYPES:
        return f"x and w must be float32, float16 or bfloat16, got {x.dtype} and {w.dtype}"
    return _out_dtype.kernel_refuses(out_dtype) or row_refused(x.shape[-1]) or single(x)


def run_triton(x, w, eps=1e-6, out_dtype=None):
    return FUSED(x, w, eps, out_dtype)


def single(x):
    """Over one element y is the sign of x, and the exact gradient, near zero, is lost in the rounding of what cancels."""
    return None if x.shape[-1] != 1 else "x.shape[-1] must be at least 2: the gradient over one is rounding error, got 1"


def torch_refuses(x, w, eps=1e-6, out_dtype=None):
    # Casting w inside would round its gradient to x's dtype, which is over any budget.
    if w.dtype != x.dtype:
        return f"w must have x's dtype {x.dtype}, got {w.dtype}"
    return single(x) or _out_dtype.twice_rounded(out_dtype, x.dtype)


def run_torch(x, w, eps=1e-6, out_dtype=None):
    y = F.rms_norm(x, w.shape, w, eps)
    return y if out_dtype is None else y.to(out_dtype)


def liger_refuses(x, w, eps=1e-6, out_dtype=None):
    return _out_dtype.twice_rounded(out_dtype, x.dtype)


def run_liger(x, w, eps=1e-6, out_dtype=None):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    y = LigerRMSNormFunction.apply(rows(x), w, eps, 0.0, "gemma" if x.dtype != w.dtype else "llama", False).view(x.shape)
    return y if out_dtype is None else y.to(out_dtype)


OP = Op(
    name="rms_norm",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128), dict(M=7, N=100), dict(M=64, N=1024), dict(M=0, N=64), dict(M=3, N=1), dict(M=33, N=384),
        dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
        dict(M=5, N=4100), dict(M=16, N=64, w_dtype="float32"),
        dict(M=5, N=48, w_layout="strided"), dict(M=5, N=48, w_layout="expanded"),
        dict(M=7, N=100, out_dtype="bfloat16"), dict(M=0, N=64, out_dtype="bfloat16"),
        dict(M=16, N=64, w_dtype="float32", out_dtype="float32"),
    ),
    shapes={f"{M}x{N}": dict(M=M, N=N) for M, N in ((4096, 384), (16384, 1024), (16384, 4096), (4096, 8192))},
    cost=cost,
    grads=("x", "w"),
    impls={
        "torch": Impl(
            run_torch, torch_refuses,
            limits=("a weight of another dtype than x", "rows of one element", _out_dtype.TWICE_ROUNDED),
        ),
        "triton": Impl(
            run_triton, refuses, needs="triton",
            limits=("dtypes other than fp32, fp16, bf16", *ROW_LIMITS, "rows of one element"),
        ),
        "liger": Impl(run_liger, liger_refuses, needs="liger_kernel", limits=(_out_dtype.TWICE_ROUNDED,)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    kinds=dict(out_dtype="dtype | None"),
    hostile=families(("x",), ("w",), options={"eps 0.01": dict(eps=1e-2)}),
    pieces=row_pieces("x", added=("w",)),
)
