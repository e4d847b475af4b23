"""add_rms_norm: add the residual, then rms_norm of the sum; both the norm and the sum are results."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _out_dtype
from whet.ops._rows import KERNEL_DTYPES, ROW_LIMITS, bwd_tile, cdiv, column_sum, programs, row_refused, tile, unit_rows
from whet.ops.rms_norm import reference as rms_norm
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families


def reference(x, res, w, eps=1e-6, out_dtype=None):
    """h = x + res, rounded;  y = h * rsqrt(mean(h^2) + eps) * w, over the last dimension, wide inside.  Returns (y, h).

    out_dtype     the dtype of y (None: that of h); under autocast, pass that of the product that reads y
    """
    h = x + res
    return rms_norm(h, w, eps, out_dtype), h


def inputs(
    dtype, device, M, N, layout="contiguous", w_dtype=None, res_dtype=None, w_layout="contiguous", out_dtype=None,
):
    x, res = (lay(torch.randn(M, N, dtype=dtype, device=device), layout) for _ in range(2))
    w = (torch.rand(N, device=device) + 0.5).to(w_dtype and getattr(torch, w_dtype) or dtype)
    res = res.to(res_dtype and getattr(torch, res_dtype) or dtype)
    out = _out_dtype.from_case(out_dtype, torch.promote_types(dtype, res.dtype))
    return dict(x=x, res=res, w=lay(w, w_layout), eps=1e-6, out_dtype=out)


def case_of(x, res, w, eps=1e-6, out_dtype=None):
    case = dict(M=x.numel() // max(1, x.shape[-1]), N=x.shape[-1], layout=layout_of(x))
    case |= {} if w.is_contiguous() else dict(w_layout=layout_of(w))
    if w.dtype != x.dtype:
        case["w_dtype"] = str(w.dtype).removeprefix("torch.")
    case |= {} if res.dtype == x.dtype else dict(res_dtype=str(res.dtype).removeprefix("torch."))
    return case | _out_dtype.to_case(out_dtype, torch.promote_types(x.dtype, res.dtype))


def check(x, res, w, eps=1e-6, out_dtype=None):
    if reason := floating(x=x, res=res, w=w) or same_device(x=x, res=res, w=w):
        return reason
    if x.dim() < 1:
        return "x must have at least one dimension, got a scalar"
    if res.shape != x.shape:
        return f"res must have shape {tuple(x.shape)} to match x, got {tuple(res.shape)}"
    if w.shape != x.shape[-1:]:
        return f"w must have shape ({x.shape[-1]},) to match x.shape[-1], got {tuple(w.shape)}"
    return _out_dtype.unknown(out_dtype)


def cost(x, res, w, eps=1e-6, out_dtype=None):
    dtype = torch.promote_types(x.dtype, res.dtype)
    h, y = (x.numel() * t.itemsize for t in (dtype, out_dtype or dtype))
    return Cost(
        bytes=nbytes(x, res, w) + h + y, flops=5 * x.numel(),
        bwd_bytes=y + 2 * h + nbytes(w) + h + nbytes(w), bwd_flops=9 * x.numel(),
    )


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, res_ptr, w_ptr,  # inputs
    y_ptr, h_ptr, rstd_ptr,  # outputs
    stride_xm, stride_rm, stride_ym,
    M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """h = x + res;  y = h * rsqrt(mean(h^2) + eps) * w.  One program, BLOCK_M rows; y and h share a stride.

    Fuses   the add into the norm: h stays in registers; and the cast to y's dtype, which may be another than h's.
    Moves   x, res, w in; y, h, rstd out = (4*M*N + N) * itemsize + 4*M.  Add, then F.rms_norm: 5*M*N.
    Rounds  h to storage dtype before squaring, as eager does; y once, at the store; fp32 inside.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    res = tl.load(res_ptr + m[:, None] * stride_rm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)

    stored = (x + res).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + m[:, None] * stride_ym + n[None, :], stored, mask=inside)
    h = stored.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn((tl.sum(h * h, axis=1) / N + eps).to(tl.float32))  # Inductor hands eps over in 64 bits
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], h * rstd[:, None] * w[None, :], mask=inside)


@triton.jit
def _add_rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr,  # inputs
    dx_ptr, partial_ptr,  # outputs
    stride_dym, stride_dhm, stride_hm, stride_dxm,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_DH: tl.constexpr,
):
    """u = h * rstd;  dx = dres = (w*dy - u * mean(u*w*dy)) * rstd + dh;  dw = sum over rows of dy*u.

    Fuses   the norm's gradient, the residual's and dw: dy, dh and h are read once. Programs stride over rows, the last
            first; each keeps its share of dw in registers.
    Moves   dy, in y's dtype, dh, h, w, rstd in; dx out = 4*M*N * itemsize, and one fp32 row of dw per program.
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
        h = tl.load(h_ptr + m[:, None] * stride_hm + n[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
        if HAS_DH:
            dh = tl.load(dh_ptr + m[:, None] * stride_dhm + n[None, :], mask=inside, other=0.0).to(tl.float32)

        u = h * rstd
        dw += dy * u
        wdy = dy * w[None, :]
        mean = tl.sum(u * wdy, axis=1)[:, None] / N
        dx = (wdy - u * mean) * rstd
        if HAS_DH:
            dx += dh
        tl.store(dx_ptr + m[:, None] * stride_dxm + n[None, :], dx, mask=inside)

    tl.store(partial_ptr + pid.to(tl.int64) * N + n, tl.sum(dw, axis=0), mask=in_row)


def forward(x, res, w, eps, out_dtype):
    flat, flat_res, w = unit_rows(x), unit_rows(res), w.contiguous()
    M, N = flat.shape
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, res.dtype), device=x.device)
    y = torch.empty_like(h, dtype=out_dtype)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    if y.numel():
        BLOCK_M, BLOCK_N, warps = tile(N)
        launcher(_add_rms_norm_kernel)[(cdiv(M, BLOCK_M),)](
            flat, flat_res, w, y, h, rstd, flat.stride(0), flat_res.stride(0), N, M, N, eps,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps,
        )
    return y, h, rstd


def backward(dy, dh, h, w, rstd):
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    if dy is None:  # only the sum was used
        dx = torch.zeros_like(h) if dh is None else dh.clone(memory_format=torch.contiguous_format)
        return dx, dw.zero_()
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    if not dx.numel():
        return dx, dw.zero_()
    flat, dy, w = unit_rows(h), unit_rows(dy), w.contiguous()
    flat_dh = flat if dh is None else unit_rows(dh)
    M, N = flat.shape
    BLOCK_M, BLOCK_N, warps, per_sm = bwd_tile(N)
    G = programs(cdiv(M, BLOCK_M), per_sm)
    partial = torch.empty(G, N, dtype=torch.float32, device=h.device)
    launcher(_add_rms_norm_bwd_kernel)[(G,)](
        dy, flat_dh, flat, w, rstd, dx, partial, dy.stride(0), flat_dh.stride(0), flat.stride(0), N, M, N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_DH=dh is not None, num_warps=warps,
    )
    return dx, column_sum(partial, dw)


def _fake(x, res, w, eps, out_dtype):
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, res.dtype))
    return h.new_empty(h.shape, dtype=out_dtype), h, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


FUSED = Fused(
    "add_rms_norm",
    "(Tensor x, Tensor res, Tensor w, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)", forward, _fake,
    "(Tensor? dy, Tensor? dh, Tensor h, Tensor w, Tensor rstd) -> (Tensor, Tensor)", backward,
    lambda dy, dh, h, w, rstd: (h.new_empty(h.shape), w.new_empty(w.shape)),
    save=lambda args, results: ((results[1], args[2], results[2]), ()),
    grads_to=(0, 0, 1, None, None),  # where x and res differ in dtype, autograd casts the wider gradient
    n_out=2, visible=True, bwd_visible=True, grads_from=((0, 1), (0,)),
)


def refuses(x, res, w, eps=1e-6, out_dtype=None):
    if x.dtype not in KERNEL_DTYPES or res.dtype not in KERNEL_DTYPES or w.dtype not in KERNEL_DTYPES:
        return f"x, res and w must be float32, float16 or bfloat16, got {x.dtype}, {res.dtype} and {w.dtype}"
    return _out_dtype.kernel_refuses(out_dtype) or row_refused(x.shape[-1])


def run_triton(x, res, w, eps=1e-6, out_dtype=None):
    return FUSED(x, res, w, eps, out_dtype)


def torch_refuses(x, res, w, eps=1e-6, out_dtype=None):
    dtype = torch.promote_types(x.dtype, res.dtype)
    if w.dtype != dtype:
        return f"w must have the dtype of x + res, {dtype}, got {w.dtype}"
    return _out_dtype.twice_rounded(out_dtype, dtype)


def run_torch(x, res, w, eps=1e-6, out_dtype=None):
    h = x + res
    y = F.rms_norm(h, w.shape, w, eps)
    return y if out_dtype is None else y.to(out_dtype), h


def liger_refuses(x, res, w, eps=1e-6, out_dtype=None):
    if res.dtype != x.dtype:
        return f"res must have x's dtype {x.dtype}, got {res.dtype}"
    return _out_dtype.twice_rounded(out_dtype, x.dtype)


def run_liger(x, res, w, eps=1e-6, out_dtype=None):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    y, h = LigerFusedAddRMSNormFunction.apply(rows(x), rows(res), w, eps, 0.0, "gemma", False)  # gemma: wide, rounded once
    y = y.view(x.shape)
    return y if out_dtype is None else y.to(out_dtype), h.view(x.shape)


OP = Op(
    name="add_rms_norm",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128), dict(M=7, N=100), dict(M=64, N=1024), dict(M=0, N=64), dict(M=3, N=1), dict(M=33, N=384),
        dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
        dict(M=5, N=4112), dict(M=5, N=2050), dict(M=16, N=64, w_dtype="float32"),
        dict(M=16, N=64, w_dtype="float32", res_dtype="float32"),
        dict(M=5, N=48, w_layout="strided"), dict(M=5, N=48, w_layout="expanded"),
        dict(M=7, N=100, out_dtype="bfloat16"), dict(M=0, N=64, out_dtype="bfloat16"),
        dict(M=16, N=64, w_dtype="float32", res_dtype="float32", out_dtype="bfloat16"),
        dict(M=16, N=64, w_dtype="float32", out_dtype="float32"),
    ),
    shapes={f"{M}x{N}": dict(M=M, N=N) for M, N in ((4096, 384), (16384, 1024), (16384, 4096), (4096, 8192))},
    cost=cost,
    grads=("x", "res", "w"),
    impls={
        "torch": Impl(run_torch, torch_refuses, limits=("a weight of another dtype than x + res", _out_dtype.TWICE_ROUNDED)),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=(
                "dtypes other than fp32, fp16, bf16", *ROW_LIMITS,
            ),
        ),
        "liger": Impl(
            run_liger, liger_refuses, needs="liger_kernel",
            limits=("a residual of another dtype than x", _out_dtype.TWICE_ROUNDED),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    kinds=dict(out_dtype="dtype | None"),
    hostile=families(("x", "res"), ("w",), options={"eps 0.01": dict(eps=1e-2)}),
    pieces=row_pieces("x", "res", added=("w",)),
)
