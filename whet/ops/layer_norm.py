"""layer_norm: centre each row, scale it to unit variance, then by a learned weight and bias."""

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


def reference(x, w, b=None, eps=1e-5, out_dtype=None):
    """y = (x - mean(x)) * rsqrt(var(x) + eps) * w + b, over the last dimension; computed wide, rounded once.  b may be None.

    out_dtype     the dtype of y (None: that of x); under autocast, pass that of the product that reads y
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.to(wide)
    return (y if b is None else y + b.to(wide)).to(out_dtype or x.dtype)


def inputs(
    dtype, device, M, N, bias=True, layout="contiguous", w_dtype=None, w_layout="contiguous", out_dtype=None,
):
    x = lay(torch.randn(M, N, dtype=dtype, device=device) + 0.5, layout)
    w_type = w_dtype and getattr(torch, w_dtype) or dtype
    w, b = (torch.rand(N, device=device) + 0.5).to(w_type), torch.randn(N, device=device).to(w_type)
    out = _out_dtype.from_case(out_dtype, dtype)
    return dict(x=x, w=lay(w, w_layout), b=lay(b, w_layout) if bias else None, eps=1e-5, out_dtype=out)


def case_of(x, w, b=None, eps=1e-5, out_dtype=None):
    case = dict(M=x.numel() // max(1, x.shape[-1]), N=x.shape[-1], bias=b is not None, layout=layout_of(x))
    case |= {} if w.is_contiguous() else dict(w_layout=layout_of(w))
    case |= {} if w.dtype == x.dtype else dict(w_dtype=str(w.dtype).removeprefix("torch."))
    return case | _out_dtype.to_case(out_dtype, x.dtype)


def check(x, w, b=None, eps=1e-5, out_dtype=None):
    if reason := floating(x=x, w=w, b=b) or same_device(x=x, w=w, b=b):
        return reason
    if x.dim() < 1:
        return "x must have at least one dimension, got a scalar"
    if w.shape != x.shape[-1:]:
        return f"w must have shape ({x.shape[-1]},) to match x.shape[-1], got {tuple(w.shape)}"
    if b is not None and b.shape != w.shape:
        return f"b must have shape ({x.shape[-1]},) to match x.shape[-1], got {tuple(b.shape)}"
    return _out_dtype.unknown(out_dtype)


def cost(x, w, b=None, eps=1e-5, out_dtype=None):
    y = x.numel() * (out_dtype or x.dtype).itemsize
    return Cost(
        bytes=nbytes(x, w, b) + y, flops=7 * x.numel(),
        bwd_bytes=y + nbytes(x, w) + nbytes(x, w, b), bwd_flops=11 * x.numel(),
    )


@triton.jit
def centred(x, in_row, N):
    """A row's mean, and the row less that: centred twice, so that what rounding leaves of the mean is gone as well."""
    mean = tl.sum(x, axis=1) / N
    c = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    left = tl.div_rn(tl.sum(c, axis=1), tl.zeros_like(mean) + N)  # exact in a constant row, where c is a few steps of x
    mean += left
    return mean, tl.where(in_row[None, :], c - left[:, None], 0.0)


@triton.jit
def _layer_norm_kernel(
    x_ptr, w_ptr, b_ptr,  # inputs
    y_ptr, mean_ptr, rstd_ptr,  # outputs
    stride_xm, stride_ym,
    M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """c = x - mean(x);  y = c * rsqrt(mean(c^2) + eps) * w + b.  One program, BLOCK_M rows.

    Fuses   the whole formula: a row is read once, its mean and then its variance taken in registers; and the cast to y's dtype,
            which may be another than x's.
    Moves   x, w, b in; y, mean, rstd out = (2*M*N + 2*N) * itemsize + 8*M.
    Rounds  once, at the store; fp32 inside. The variance is of centred values: no cancellation. They are centred twice: what
            rounding leaves of the mean is small beside it, not beside the values' spread, which in a constant row is zero.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)

    mean, c = centred(x, n < N, N)
    rstd = 1.0 / tl.sqrt_rn((tl.sum(c * c, axis=1) / N + eps).to(tl.float32))  # Inductor hands eps over in 64 bits
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, rstd, mask=m < M)

    y = c * rstd[:, None] * w[None, :]
    if HAS_BIAS:
        y += b[None, :]
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], y, mask=inside)


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,  # inputs
    dx_ptr, dw_ptr, db_ptr,  # outputs; dw and db as (programs, N) fp32
    stride_dym, stride_xm, stride_dxm,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """u = (x - mean) * rstd;  dx = (w*dy - u * mean(u*w*dy) - mean(w*dy)) * rstd;  dw = sum of dy*u;  db = sum of dy.

    Fuses   dx, dw and db: x and dy are read once. Programs stride over rows, the last first; each keeps
            its share of dw, db in registers.
    Moves   dy, in y's dtype, x, w, mean, rstd in; dx out = 3*M*N * itemsize, and one fp32 row each of dw and db per program.
    Rounds  dx once, at the store; dw and db are summed in fp32 in a fixed order, then rounded once.
    """
    pid = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    in_row = n < N
    w = tl.load(w_ptr + n, mask=in_row, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    blocks = tl.cdiv(M, BLOCK_M)
    for i in range(pid, blocks, tl.num_programs(0)):
        m = ((blocks - 1 - i) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # rows stay under 2^31, elements need not
        inside = (m < M)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]

        u = (x - mean) * rstd
        dw += dy * u  # dy is 0 outside, so u need not be
        if HAS_BIAS:
            db += dy
        wdy = dy * w[None, :]
        along = tl.sum(u * wdy, axis=1)[:, None] / N
        level = tl.sum(wdy, axis=1)[:, None] / N
        tl.store(dx_ptr + m[:, None] * stride_dxm + n[None, :], (wdy - u * along - level) * rstd, mask=inside)

    tl.store(dw_ptr + pid.to(tl.int64) * N + n, tl.sum(dw, axis=0), mask=in_row)
    if HAS_BIAS:
        tl.store(db_ptr + pid.to(tl.int64) * N + n, tl.sum(db, axis=0), mask=in_row)


def forward(x, w, b, eps, out_dtype):
    flat, w, b = unit_rows(x), w.contiguous(), None if b is None else b.contiguous()
    M, N = flat.shape
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    if y.numel():
        BLOCK_M, BLOCK_N, warps = tile(N)
        launcher(_layer_norm_kernel)[(cdiv(M, BLOCK_M),)](
            flat, w, w if b is None else b, y, mean, rstd, flat.stride(0), N, M, N, eps,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_BIAS=b is not None, num_warps=warps,
        )
    return y, mean, rstd


def backward(dy, x, w, mean, rstd, b=None):
    """dx, dw and, with a bias, db."""
    flat, dy, w = unit_rows(x), unit_rows(dy), w.contiguous()
    M, N = flat.shape
    dx, *sums = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, w, b) if t is not None)
    if not dx.numel():
        return dx, *(s.zero_() for s in sums)
    BLOCK_M, BLOCK_N, warps, per_sm = bwd_tile(N)
    G = programs(cdiv(M, BLOCK_M), per_sm)
    partials = [torch.empty(G, N, dtype=torch.float32, device=x.device) for _ in sums]
    launcher(_layer_norm_bwd_kernel)[(G,)](
        dy, flat, w, mean, rstd, dx, partials[0], rstd if b is None else partials[1], dy.stride(0), flat.stride(0), N, M, N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_BIAS=b is not None, num_warps=warps,
    )
    return dx, *(column_sum(partial, s) for partial, s in zip(partials, sums))


def _fake(x, w, b, eps, out_dtype):
    M = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=out_dtype), *(x.new_empty(M, dtype=torch.float32) for _ in range(2))


WITH_BIAS = Fused(
    "layer_norm",
    "(Tensor x, Tensor w, Tensor b, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)", forward, _fake,
    "(Tensor dy, Tensor x, Tensor w, Tensor mean, Tensor rstd, Tensor b) -> (Tensor, Tensor, Tensor)", backward,
    lambda dy, x, w, mean, rstd, b: (x.new_empty(x.shape), w.new_empty(w.shape), b.new_empty(b.shape)),
    save=lambda args, results: ((args[0], args[1], results[1], results[2], args[2]), ()),
    grads_to=(0, 1, 2, None, None),
    visible=True, bwd_visible=True,
)
WITHOUT_BIAS = Fused(
    "layer_norm_no_bias",
    "(Tensor x, Tensor w, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)",
    lambda x, w, *rest: forward(x, w, None, *rest), lambda x, w, *rest: _fake(x, w, None, *rest),
    "(Tensor dy, Tensor x, Tensor w, Tensor mean, Tensor rstd) -> (Tensor, Tensor)", backward,
    lambda dy, x, w, mean, rstd: (x.new_empty(x.shape), w.new_empty(w.shape)),
    save=lambda args, results: ((args[0], args[1], results[1], results[2]), ()),
    grads_to=(0, 1, None, None),
    visible=True, bwd_visible=True,
)


def refuses(x, w, b=None, eps=1e-5, out_dtype=None):
    for name, t in (("x", x), ("w", w), ("b", b)):
        if t is not None and t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    return _out_dtype.kernel_refuses(out_dtype) or row_refused(x.shape[-1])


def run_triton(x, w, b=None, eps=1e-5, out_dtype=None):
    return WITHOUT_BIAS(x, w, eps, out_dtype) if b is None else WITH_BIAS(x, w, b, eps, out_dtype)


def torch_refuses(x, w, b=None, eps=1e-5, out_dtype=None):
    for name, t in (("w", w), ("b", b)):
        if t is not None and t.dtype != x.dtype:
            return f"{name} must have x's dtype {x.dtype}, got {t.dtype}"
    if x.shape[-1] == 1:  # measured on the CPU in fp32: 3e-5
        return "x.shape[-1] must be at least 2, got 1: its gradient there is rounding noise, not 0"
    return _out_dtype.twice_rounded(out_dtype, x.dtype)


def run_torch(x, w, b=None, eps=1e-5, out_dtype=None):
    y = F.layer_norm(x, w.shape, w, b, eps)
    return y if out_dtype is None else y.to(out_dtype)


def liger_refuses(x, w, b=None, eps=1e-5, out_dtype=None):
    return "b must be given: its kernels always read a bias" if b is None else _out_dtype.twice_rounded(out_dtype, x.dtype)


def run_liger(x, w, b=None, eps=1e-5, out_dtype=None):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    y = LigerLayerNormFunction.apply(rows(x), w, b, eps).view(x.shape)
    return y if out_dtype is None else y.to(out_dtype)


OP = Op(
    name="layer_norm",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128), dict(M=7, N=100), dict(M=64, N=768), dict(M=0, N=64), dict(M=3, N=1), dict(M=33, N=384, bias=False),
        dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
        dict(M=5, N=4112), dict(M=5, N=2050), dict(M=5, N=1030, bias=False), dict(M=0, N=64, bias=False),
        dict(M=16, N=64, w_dtype="float32"), dict(M=16, N=64, bias=False, w_dtype="float32"),
        dict(M=5, N=48, w_layout="strided"), dict(M=5, N=48, w_layout="expanded"),
        dict(M=7, N=100, out_dtype="bfloat16"), dict(M=5, N=48, bias=False, out_dtype="bfloat16"),
        dict(M=16, N=64, w_dtype="float32", out_dtype="float32"),
    ),
    shapes={f"{M}x{N}": dict(M=M, N=N) for M, N in ((4096, 768), (16384, 1024), (16384, 4096), (4096, 8192))},
    cost=cost,
    grads=("x", "w", "b"),
    impls={
        "torch": Impl(
            run_torch, torch_refuses,
            limits=("a weight or bias of another dtype than x", "rows of one element", _out_dtype.TWICE_ROUNDED),
        ),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=(
                "dtypes other than fp32, fp16, bf16", *ROW_LIMITS,
            ),
        ),
        "liger": Impl(run_liger, liger_refuses, needs="liger_kernel", limits=("no bias", _out_dtype.TWICE_ROUNDED)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    kinds=dict(out_dtype="dtype | None"),
    hostile=families(("x",), ("w", "b"), options={"eps 0.01": dict(eps=1e-2)}),
    pieces=row_pieces("x", added=("w", "b")),
)
