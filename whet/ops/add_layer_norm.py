"""add_layer_norm: add the residual, then layer_norm of the sum; both the norm and the sum are results."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, nbytes, same_device
from whet.ops import _out_dtype
from whet.ops._rows import KERNEL_DTYPES, ROW_LIMITS, bwd_tile, cdiv, column_sum, programs, tile, unit_rows
from whet.ops.layer_norm import OP as LAYER_NORM
from whet.ops.layer_norm import centred
from whet.ops.layer_norm import reference as layer_norm
from whet.ops.layer_norm import refuses as norm_refuses
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families


def reference(x, res, w, b=None, eps=1e-5, out_dtype=None):
    """h = x + res, rounded;  y = (h - mean(h)) * rsqrt(var(h) + eps) * w + b, wide inside.  b may be None.  Returns (y, h).

    out_dtype     the dtype of y (None: that of h); under autocast, pass that of the product that reads y
    """
    h = x + res
    return layer_norm(h, w, b, eps, out_dtype), h


def inputs(
    dtype, device, M, N, bias=True, layout="contiguous", w_dtype=None, res_dtype=None, w_layout="contiguous",
    out_dtype=None,
):
    args = LAYER_NORM.inputs(dtype, device, M, N, bias, layout, w_dtype, w_layout)
    res = lay(torch.randn(M, N, dtype=dtype, device=device), layout).to(res_dtype and getattr(torch, res_dtype) or dtype)
    out = _out_dtype.from_case(out_dtype, torch.promote_types(dtype, res.dtype))
    return dict(x=args.pop("x"), res=res) | args | dict(out_dtype=out)


def case_of(x, res, w, b=None, eps=1e-5, out_dtype=None):
    case = LAYER_NORM.case_of(x, w, b, eps)
    case |= {} if res.dtype == x.dtype else dict(res_dtype=str(res.dtype).removeprefix("torch."))
    return case | _out_dtype.to_case(out_dtype, torch.promote_types(x.dtype, res.dtype))


def check(x, res, w, b=None, eps=1e-5, out_dtype=None):
    if reason := floating(x=x, res=res, w=w, b=b) or same_device(x=x, res=res, w=w, b=b):
        return reason
    if x.dim() and res.shape != x.shape:
        return f"res must have shape {tuple(x.shape)} to match x, got {tuple(res.shape)}"
    return LAYER_NORM.check(x, w, b, eps, out_dtype)


def cost(x, res, w, b=None, eps=1e-5, out_dtype=None):
    dtype = torch.promote_types(x.dtype, res.dtype)
    h, y = (x.numel() * t.itemsize for t in (dtype, out_dtype or dtype))
    return Cost(
        bytes=nbytes(x, res, w, b) + h + y, flops=8 * x.numel(),
        bwd_bytes=y + 2 * h + nbytes(w) + h + nbytes(w, b), bwd_flops=12 * x.numel(),
    )


@triton.jit
def _add_layer_norm_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr,  # inputs
    y_ptr, h_ptr, mean_ptr, rstd_ptr,  # outputs
    stride_xm, stride_rm, stride_ym,
    M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """h = x + res;  c = h - mean(h);  y = c * rsqrt(mean(c^2) + eps) * w + b.  One program, BLOCK_M rows.

    Fuses   the add into the norm: h stays in registers, where its mean and then its variance are taken; and the cast to y's
            dtype, which may be another than h's.
    Moves   x, res, w, b in; y, h, mean, rstd out = (4*M*N + 2*N) * itemsize + 8*M.  Add, then F.layer_norm: 5*M*N.
    Rounds  h to storage dtype before its mean is taken, as eager does; y once, at the store; fp32 inside. h is centred twice,
            as in layer_norm. y and h share a stride.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    res = tl.load(res_ptr + m[:, None] * stride_rm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)

    stored = (x + res).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + m[:, None] * stride_ym + n[None, :], stored, mask=inside)
    mean, c = centred(stored.to(tl.float32), n < N, N)
    rstd = 1.0 / tl.sqrt_rn((tl.sum(c * c, axis=1) / N + eps).to(tl.float32))  # Inductor hands eps over in 64 bits
    tl.store(mean_ptr + m, mean, mask=m < M)
    tl.store(rstd_ptr + m, rstd, mask=m < M)

    y = c * rstd[:, None] * w[None, :]
    if HAS_BIAS:
        y += b[None, :]
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], y, mask=inside)


@triton.jit
def _add_layer_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr,  # inputs
    dx_ptr, dw_ptr, db_ptr,  # outputs; dw and db as (programs, N) fp32
    stride_dym, stride_dhm, stride_hm, stride_dxm,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DH: tl.constexpr,
):
    """u = (h - mean) * rstd;  dx = dres = (w*dy - u * mean(u*w*dy) - mean(w*dy)) * rstd + dh;  dw = sum(dy*u);  db = sum(dy).

    Fuses   the norm's gradient, the residual's, dw and db: dy, dh and h are read once. Programs stride over rows, the last
            first; each keeps its share of dw, db in registers.
    Moves   dy, in y's dtype, dh, h, w, mean, rstd in; dx out = 4*M*N * itemsize, 3*M*N where the sum is not used again, and
            one fp32 row each of dw and db per program.
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
        h = tl.load(h_ptr + m[:, None] * stride_hm + n[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
        if HAS_DH:
            dh = tl.load(dh_ptr + m[:, None] * stride_dhm + n[None, :], mask=inside, other=0.0).to(tl.float32)

        u = (h - mean) * rstd
        dw += dy * u  # dy is 0 outside, so u need not be
        if HAS_BIAS:
            db += dy
        wdy = dy * w[None, :]
        along = tl.sum(u * wdy, axis=1)[:, None] / N
        level = tl.sum(wdy, axis=1)[:, None] / N
        dx = (wdy - (u * along + level)) * rstd  # without the brackets 4 bytes spill in fp32 rows of 8192 on sm_90
        if HAS_DH:
            dx += dh
        tl.store(dx_ptr + m[:, None] * stride_dxm + n[None, :], dx, mask=inside)

    tl.store(dw_ptr + pid.to(tl.int64) * N + n, tl.sum(dw, axis=0), mask=in_row)
    if HAS_BIAS:
        tl.store(db_ptr + pid.to(tl.int64) * N + n, tl.sum(db, axis=0), mask=in_row)


def forward(x, res, w, b, eps, out_dtype):
    flat, flat_res, w, b = unit_rows(x), unit_rows(res), w.contiguous(), None if b is None else b.contiguous()
    M, N = flat.shape
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, res.dtype), device=x.device)
    y = torch.empty_like(h, dtype=out_dtype)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    if y.numel():
        BLOCK_M, BLOCK_N, warps = tile(N)
        launcher(_add_layer_norm_kernel)[(cdiv(M, BLOCK_M),)](
            flat, flat_res, w, w if b is None else b, y, h, mean, rstd, flat.stride(0), flat_res.stride(0), N, M, N, eps,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_BIAS=b is not None, num_warps=warps,
        )
    return y, h, mean, rstd


def backward(dy, dh, h, w, mean, rstd, b=None):
    """dx, which is the residual's too, dw and, with a bias, db."""
    dx, *sums = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (h, w, b) if t is not None)
    if dy is None:  # only the sum was used
        dx = torch.zeros_like(h) if dh is None else dh.clone(memory_format=torch.contiguous_format)
    if dy is None or not dx.numel():
        return dx, *(s.zero_() for s in sums)
    flat, dy, w = unit_rows(h), unit_rows(dy), w.contiguous()
    flat_dh = flat if dh is None else unit_rows(dh)
    M, N = flat.shape
    BLOCK_M, BLOCK_N, warps, per_sm = bwd_tile(N)
    G = programs(cdiv(M, BLOCK_M), per_sm)
    partials = [torch.empty(G, N, dtype=torch.float32, device=h.device) for _ in sums]
    launcher(_add_layer_norm_bwd_kernel)[(G,)](
        dy, flat_dh, flat, w, mean, rstd, dx, partials[0], rstd if b is None else partials[1],
        dy.stride(0), flat_dh.stride(0), flat.stride(0), N, M, N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_BIAS=b is not None, HAS_DH=dh is not None, num_warps=warps,
    )
    return dx, *(column_sum(partial, s) for partial, s in zip(partials, sums))


def _fake(x, res, w, b, eps, out_dtype):
    h, M = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, res.dtype)), x.numel() // x.shape[-1]
    return h.new_empty(h.shape, dtype=out_dtype), h, *(x.new_empty(M, dtype=torch.float32) for _ in range(2))


WITH_BIAS = Fused(
    "add_layer_norm",
    "(Tensor x, Tensor res, Tensor w, Tensor b, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    forward, _fake,
    "(Tensor? dy, Tensor? dh, Tensor h, Tensor w, Tensor mean, Tensor rstd, Tensor b) -> (Tensor, Tensor, Tensor)", backward,
    lambda dy, dh, h, w, mean, rstd, b: (h.new_empty(h.shape), w.new_empty(w.shape), b.new_empty(b.shape)),
    save=lambda args, results: ((results[1], args[2], results[2], results[3], args[3]), ()),
    grads_to=(0, 0, 1, 2, None, None),  # where x and res differ in dtype, autograd casts the wider gradient
    n_out=2, visible=True, bwd_visible=True, grads_from=((0, 1), (0,), (0,)),
)
WITHOUT_BIAS = Fused(
    "add_layer_norm_no_bias",
    "(Tensor x, Tensor res, Tensor w, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, res, w, *rest: forward(x, res, w, None, *rest), lambda x, res, w, *rest: _fake(x, res, w, None, *rest),
    "(Tensor? dy, Tensor? dh, Tensor h, Tensor w, Tensor mean, Tensor rstd) -> (Tensor, Tensor)", backward,
    lambda dy, dh, h, w, mean, rstd: (h.new_empty(h.shape), w.new_empty(w.shape)),
    save=lambda args, results: ((results[1], args[2], results[2], results[3]), ()),
    grads_to=(0, 0, 1, None, None),
    n_out=2, visible=True, bwd_visible=True, grads_from=((0, 1), (0,)),
)


def refuses(x, res, w, b=None, eps=1e-5, out_dtype=None):
    if res.dtype not in KERNEL_DTYPES:
        return f"res must be float32, float16 or bfloat16, got {res.dtype}"
    return norm_refuses(x, w, b, eps, out_dtype)


def run_triton(x, res, w, b=None, eps=1e-5, out_dtype=None):
    return WITHOUT_BIAS(x, res, w, eps, out_dtype) if b is None else WITH_BIAS(x, res, w, b, eps, out_dtype)


def torch_refuses(x, res, w, b=None, eps=1e-5, out_dtype=None):
    dtype = torch.promote_types(x.dtype, res.dtype)
    for name, t in (("w", w), ("b", b)):
        if t is not None and t.dtype != dtype:
            return f"{name} must have the dtype of x + res, {dtype}, got {t.dtype}"
    if x.shape[-1] == 1:
        return "x.shape[-1] must be at least 2, got 1: its gradient there is rounding noise, not 0"
    return _out_dtype.twice_rounded(out_dtype, dtype)


def run_torch(x, res, w, b=None, eps=1e-5, out_dtype=None):
    h = x + res
    y = F.layer_norm(h, w.shape, w, b, eps)
    return y if out_dtype is None else y.to(out_dtype), h


OP = Op(
    name="add_layer_norm",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        *LAYER_NORM.cases, dict(M=5, N=48, bias=False, w_layout="strided"),
        dict(M=16, N=64, w_dtype="float32", res_dtype="float32"),
        dict(M=16, N=64, bias=False, w_dtype="float32", res_dtype="float32"),
        dict(M=16, N=64, w_dtype="float32", res_dtype="float32", out_dtype="bfloat16"),
    ),
    shapes=LAYER_NORM.shapes,
    cost=cost,
    grads=("x", "res", "w", "b"),
    impls={
        "torch": Impl(
            run_torch, torch_refuses,
            limits=("a weight or bias of another dtype than x + res", "rows of one element", _out_dtype.TWICE_ROUNDED),
        ),
        "triton": Impl(run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", *ROW_LIMITS)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    kinds=dict(out_dtype="dtype | None"),
    hostile=families(("x", "res"), ("w", "b"), options={"eps 0.01": dict(eps=1e-2)}),
    pieces=row_pieces("x", "res", added=("w", "b")),
)
