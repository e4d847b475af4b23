"""swiglu: silu(gate) * up, of two tensors or of the two halves of one packed projection."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops._rows import KERNEL_DTYPES, cdiv, unit_rows
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families

TILE, WARPS = 1024, 4  # 8 elements a thread of every tensor: one 16-byte load each of bf16


def reference(gate, up=None):
    """y = silu(gate) * up, computed wide, rounded once.  up=None: gate is packed, its first half the gate, its second up."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    return (g * torch.sigmoid(g) * up.to(wide)).to(gate.dtype)


def inputs(dtype, device, M, N, packed=False, layout="contiguous"):
    if packed:
        return dict(gate=lay(torch.randn(M, 2 * N, dtype=dtype, device=device), layout), up=None)
    gate, up = (lay(torch.randn(M, N, dtype=dtype, device=device), layout) for _ in range(2))
    return dict(gate=gate, up=up)


def case_of(gate, up=None):
    width = gate.shape[-1]
    N = width // 2 if up is None else width
    return dict(M=gate.numel() // max(1, width), N=N, packed=up is None, layout=layout_of(gate))


def check(gate, up=None):
    if reason := floating(gate=gate, up=up) or same_device(gate=gate, up=up):
        return reason
    if gate.dim() < 1:
        return "gate must have at least one dimension, got a scalar"
    if up is None:
        return f"gate.shape[-1] must be even when up is None, got {gate.shape[-1]}" if gate.shape[-1] % 2 else None
    if up.shape != gate.shape:
        return f"up must have shape {tuple(gate.shape)} to match gate, got {tuple(up.shape)}"
    if up.dtype != gate.dtype:
        return f"up must have gate's dtype {gate.dtype}, got {up.dtype}"
    return None


def cost(gate, up=None):
    both = nbytes(gate, up)
    n = gate.numel() // 2 if up is None else gate.numel()
    return Cost(bytes=both + both // 2, flops=5 * n, bwd_bytes=both + both // 2 + both, bwd_flops=10 * n)


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr,  # inputs
    y_ptr,  # output
    stride_gm, stride_um, stride_ym,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y = gate * sigmoid(gate) * up.  One program, BLOCK_M x BLOCK_N elements, neighbours along a row.

    Fuses   the whole formula; gate and up may be the halves of one packed row.
    Moves   gate, up in; y out = 3*M*N * itemsize.  F.silu, then the product: 5*M*N.
    Rounds  once, at the store; fp32 inside.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    m = (pid // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    gate = tl.load(gate_ptr + m[:, None] * stride_gm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + m[:, None] * stride_um + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr,  # inputs
    dgate_ptr, dup_ptr,  # outputs
    stride_dym, stride_gm, stride_um, stride_dgm, stride_dum,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """s = sigmoid(gate);  dgate = dy * up * s * (1 + gate * (1 - s));  dup = dy * gate * s.

    Fuses   both gradients, silu recomputed; dgate and dup may be the halves of one packed row, so nothing is concatenated.
    Moves   dy, gate, up in; dgate, dup out = 5*M*N * itemsize.
    Rounds  once, at the store; fp32 inside.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    m = (pid // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + m[:, None] * stride_gm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + m[:, None] * stride_um + n[None, :], mask=inside, other=0.0).to(tl.float32)

    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(dgate_ptr + m[:, None] * stride_dgm + n[None, :], dy * up * (s + silu * (1.0 - s)), mask=inside)
    tl.store(dup_ptr + m[:, None] * stride_dum + n[None, :], dy * silu, mask=inside)


def cut(N: int) -> tuple[int, int]:
    """BLOCK_M, BLOCK_N of TILE elements: the longest stretch of a row that leaves at most one lane in sixteen idle."""
    BLOCK_N = TILE
    while BLOCK_N > 64 and 16 * (cdiv(N, BLOCK_N) * BLOCK_N - N) > N:
        BLOCK_N //= 2
    return TILE // BLOCK_N, BLOCK_N


def as_rows(*tensors):
    """All as (M, N) with unit stride in N; as one long row where every one is contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [unit_rows(t) for t in tensors]


def halves(packed):
    """Gate and up as (M, N) views of the rows of a packed tensor."""
    packed = unit_rows(packed)
    return packed.chunk(2, 1)


def launch(kernel, *tensors):
    M, N = tensors[0].shape
    BLOCK_M, BLOCK_N = cut(N)
    grid = (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)
    kernel[grid](*tensors, *(t.stride(0) for t in tensors), M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=WARPS)


def forward(gate, up):
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y.numel():
        launch(_swiglu_kernel, *as_rows(gate, up, y))
    return y


def backward(dy, gate, up):
    dgate, dup = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    if dgate.numel():
        launch(_swiglu_bwd_kernel, *as_rows(dy, gate, up, dgate, dup))
    return dgate, dup


def forward_packed(packed):
    y = torch.empty(*packed.shape[:-1], packed.shape[-1] // 2, dtype=packed.dtype, device=packed.device)
    if y.numel():
        launch(_swiglu_kernel, *halves(packed), unit_rows(y))
    return y


def backward_packed(dy, packed):
    grad = torch.empty_like(packed, memory_format=torch.contiguous_format)
    if grad.numel():
        launch(_swiglu_bwd_kernel, unit_rows(dy), *halves(packed), *halves(grad))
    return grad


FUSED = Fused(
    "swiglu",
    "(Tensor gate, Tensor up) -> Tensor", forward, lambda gate, up: gate.new_empty(gate.shape),
    "(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)", backward,
    lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    save=lambda args, results: (args, ()),
    grads_to=(0, 1),
)
PACKED = Fused(
    "swiglu_packed",
    "(Tensor packed) -> Tensor", forward_packed,
    lambda packed: packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2)),
    "(Tensor dy, Tensor packed) -> Tensor", backward_packed, lambda dy, packed: packed.new_empty(packed.shape),
    save=lambda args, results: (args, ()),
    grads_to=(0,),
)


def refuses(gate, up=None):
    return None if gate.dtype in KERNEL_DTYPES else f"gate must be float32, float16 or bfloat16, got {gate.dtype}"


def run_triton(gate, up=None):
    return PACKED(gate) if up is None else FUSED(gate, up)


def run_torch(gate, up=None):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def liger_refuses(gate, up=None):
    return None if up is None else "up must be packed into gate: its two-tensor backward overwrites gate and up"


def run_liger(gate, up=None):
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(rows(gate)).view(*gate.shape[:-1], -1)  # its backward returns 2-D


OP = Op(
    name="swiglu",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128), dict(M=7, N=100), dict(M=33, N=384), dict(M=0, N=64), dict(M=3, N=1), dict(M=5, N=1365),
        dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
        dict(M=1, N=128, packed=True), dict(M=7, N=100, packed=True), dict(M=0, N=64, packed=True),
        dict(M=5, N=1365, packed=True), dict(M=9, N=96, packed=True, layout="sliced"),
        dict(M=9, N=96, packed=True, layout="transposed"), dict(M=9, N=96, packed=True, layout="expanded"),
    ),
    shapes={
        "16384x11008": dict(M=16384, N=11008), "16384x11008 packed": dict(M=16384, N=11008, packed=True),
        "4096x1536": dict(M=4096, N=1536), "1024x2048 packed": dict(M=1024, N=2048, packed=True),
    },
    cost=cost,
    grads=("gate", "up"),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16",)),
        "liger": Impl(run_liger, liger_refuses, needs="liger_kernel", limits=("gate and up as two tensors",)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    hostile=families(("gate", "up")),
    pieces=row_pieces("gate", "up"),
)
