"""Gated activations, act(gate) * up of two tensors or of the halves of one: arguments, kernels, tiles and launchers."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, floating, lay, layout_of, nbytes, same_device
from whet.ops._phi import _gelu_factor
from whet.ops._rows import KERNEL_DTYPES, cdiv, unit_rows

TILE, WARPS = 1024, 4  # 8 elements a thread of every tensor: one 16-byte load each of bf16
CASES: tuple[dict, ...] = (
    dict(M=1, N=128), dict(M=7, N=100), dict(M=33, N=384), dict(M=0, N=64), dict(M=3, N=1), dict(M=5, N=1365),
    dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
    dict(M=1, N=128, packed=True), dict(M=7, N=100, packed=True), dict(M=0, N=64, packed=True),
    dict(M=5, N=1365, packed=True), dict(M=9, N=96, packed=True, layout="sliced"),
    dict(M=9, N=96, packed=True, layout="transposed"), dict(M=9, N=96, packed=True, layout="expanded"),
)


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


def cost(gate, up, flops: int, bwd_flops: int) -> Cost:
    """What is moved, and this many flops an element of the result."""
    both = nbytes(gate, up)
    n = gate.numel() // 2 if up is None else gate.numel()
    return Cost(bytes=both + both // 2, flops=flops * n, bwd_bytes=both + both // 2 + both, bwd_flops=bwd_flops * n)


def refuses(gate, up=None, **options):
    return None if gate.dtype in KERNEL_DTYPES else f"gate must be float32, float16 or bfloat16, got {gate.dtype}"


@triton.jit
def _gate_factor(gate, gate_ptr, SILU: tl.constexpr, TANH: tl.constexpr):
    """p and dp/dgate of act(gate) = gate * p: SiLU's, or a GELU's, exactly or through tanh."""
    if SILU:
        p = tl.sigmoid(gate)
        density = p * (1.0 - p)
    else:
        p, density = _gelu_factor(gate, gate_ptr, TANH)
    return p, density


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr,  # inputs
    y_ptr,  # output
    stride_gm, stride_um, stride_ym,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr,
):
    """y = act(gate) * up.  One program, BLOCK_M x BLOCK_N elements, neighbours along a row.

    Fuses   the whole formula; gate and up may be the halves of one packed row.
    Moves   gate, up in; y out = 3*M*N * itemsize.  PyTorch's activation, then the product: 5*M*N.
    Rounds  once, at the store; fp32 inside.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    m = (pid // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    gate = tl.load(gate_ptr + m[:, None] * stride_gm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + m[:, None] * stride_um + n[None, :], mask=inside, other=0.0).to(tl.float32)
    p, _ = _gate_factor(gate, gate_ptr, SILU, TANH)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], gate * p * up, mask=inside)


@triton.jit
def _gated_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr,  # inputs
    dgate_ptr, dup_ptr,  # outputs
    stride_dym, stride_gm, stride_um, stride_dgm, stride_dum,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr, AGAIN: tl.constexpr,
):
    """act(gate) = gate * p:  dgate = dy * up * (p + gate * p');  dup = dy * gate * p;  where AGAIN y = gate * p * up, over dy.

    Fuses   both gradients, p recomputed; where dup_ptr is None dgate's row is followed by dup's, so nothing is concatenated.
    Moves   dy, gate, up in; dgate, dup out = 5*M*N * itemsize; with y 6.
    Rounds  once, at each store; fp32 inside.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    m = (pid // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]

    dy = tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + m[:, None] * stride_gm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + m[:, None] * stride_um + n[None, :], mask=inside, other=0.0).to(tl.float32)

    p, density = _gate_factor(gate, gate_ptr, SILU, TANH)
    act = gate * p
    tl.store(dgate_ptr + m[:, None] * stride_dgm + n[None, :], dy * up * (p + gate * density), mask=inside)
    if dup_ptr is None:
        dup_rows = dgate_ptr + N + m[:, None] * stride_dgm
    else:
        dup_rows = dup_ptr + m[:, None] * stride_dum
    tl.store(dup_rows + n[None, :], dy * act, mask=inside)
    if AGAIN:
        tl.store(dy_ptr + m[:, None] * stride_dym + n[None, :], act * up, mask=inside)


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


def launch(kernel, *tensors, **variant):
    M, N = tensors[0].shape
    BLOCK_M, BLOCK_N = cut(N)
    grid = (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)
    strides = [0 if t is None else t.stride(0) for t in tensors]
    launcher(kernel)[grid](*tensors, *strides, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=WARPS, **variant)


def formula(activation: str) -> dict:
    """The constexprs of "silu", "gelu" or "gelu_tanh"."""
    return dict(SILU=activation == "silu", TANH=activation == "gelu_tanh")


def forward(gate, up, activation, over=False):
    """act(gate) * up, contiguous.  over: it is written over up, which is contiguous then."""
    y = up if over else torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y.numel():
        launch(_gated_kernel, *as_rows(gate, up, y), **formula(activation))
    return y


def backward(dy, gate, up, activation, again=False, over=False):
    """dgate and dup.  again: what the forward gave is written over dy, over: these over gate and up, contiguous then."""
    dgate, dup = (t if over else torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, up))
    if dgate.numel():
        launch(_gated_bwd_kernel, *as_rows(dy, gate, up, dgate, dup), **formula(activation), AGAIN=again)
    return dgate, dup


def forward_packed(packed, activation):
    y = torch.empty(*packed.shape[:-1], packed.shape[-1] // 2, dtype=packed.dtype, device=packed.device)
    if y.numel():
        launch(_gated_kernel, *halves(packed), unit_rows(y), **formula(activation))
    return y


def backward_packed(dy, packed, activation, again=False):
    """The gradient of the packed tensor: one output to the kernel, since Inductor would copy each of two views of it first."""
    grad = torch.empty_like(packed, memory_format=torch.contiguous_format)
    if grad.numel():
        launch(_gated_bwd_kernel, unit_rows(dy), *halves(packed), unit_rows(grad), None, **formula(activation), AGAIN=again)
    return grad
