"""gelu: x times the standard normal's cumulative probability of x, exactly or through tanh."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes
from whet.ops._rows import KERNEL_DTYPES
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families

CHOICES = ("none", "tanh")
BLOCK, WARPS = 2048, 4  # 16 elements a thread: two 16-byte loads of bf16 in flight


def reference(x, approximate="none"):
    """y = x * (1 + erf(x / sqrt(2))) / 2; approximate="tanh": x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))) / 2."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    if approximate == "tanh":
        p = torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h))
    else:
        p = torch.erf(h * math.sqrt(0.5))
    return (0.5 * h * (1 + p)).to(x.dtype)


def inputs(dtype, device, M, N, approximate="none", layout="contiguous"):
    return dict(x=lay(2 * torch.randn(M, N, dtype=dtype, device=device), layout), approximate=approximate)


def case_of(x, approximate="none"):
    N = x.shape[-1] if x.dim() else 1
    return dict(M=x.numel() // max(1, N), N=N, approximate=approximate, layout=layout_of(x))


def check(x, approximate="none"):
    return floating(x=x)


def cost(x, approximate="none"):
    return Cost(bytes=nbytes(x, x), flops=10 * x.numel(), bwd_bytes=nbytes(x, x, x), bwd_flops=20 * x.numel())


@triton.jit
def _tanh_phi(x):
    """p = (1 + tanh(z)) / 2 = sigmoid(2z) for z = sqrt(2/pi) * (x + 0.044715 * x^3), and its derivative over x.

    From exp(-|2z|), which cannot overflow.  1 - p is never taken: dx would multiply its rounding error by 56 at x = 6.
    """
    xx = tl.minimum(x * x, 1000.0)  # there p is 0 or 1 already; beyond 1e19 an infinite square would make dx NaN
    z2 = x * (1.5957691216057308 + 0.07135481627260025 * xx)
    e = tl.exp(-tl.abs(z2))
    r = 1.0 / (1.0 + e)
    return tl.where(z2 < 0, e * r, r), e * r * r * (1.5957691216057308 + 0.21406444881780076 * xx)


@triton.jit
def _phi(x):
    """The standard normal's cumulative probability of x, and its density, to fp32 precision."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _half_phi(x):
    """_phi for x held in 16 bits: relative error under 5e-6 for every x, also where 1 + erf(x) cancels.

    Phi(-a) = t * Q(t) * exp(-a^2 / 2), t = 1 / (1 + 0.31 * a), Q a minimax fit on [0, 14].  On sm_90 the forward takes 27
    instructions an element in place of erf's 37, the backward 31 for 47; at 4.27 TB/s there is time for 31 and 46.
    """
    t = 1.0 / (1.0 + 0.31 * tl.abs(x))
    q = 0.01574750880892237 + t * (0.18044879373741474 + t * -0.0739288554741394)
    q = 0.12386059664995802 + t * (0.12044208088157873 + t * (0.13342755290472622 + t * q))
    e = tl.exp2(x * x * -0.7213475204444817)
    tail = t * q * e
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804014327 * e


@triton.jit
def _gelu_kernel(
    x_ptr,  # input
    y_ptr,  # output
    N,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = x * Phi(x).  One program, BLOCK elements.

    Fuses   the whole formula.
    Moves   x in; y out = 2*N * itemsize.
    Rounds  once, at the store; fp32 inside.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if TANH:
        p, _ = _tanh_phi(x)
    elif x_ptr.dtype.element_ty == tl.float32:
        p, _ = _phi(x)
    else:
        p, _ = _half_phi(x)
    tl.store(y_ptr + n, x * p, mask=n < N)


@triton.jit
def _gelu_bwd_kernel(
    dy_ptr, x_ptr,  # inputs
    dx_ptr,  # output
    N,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):
    """dx = dy * (Phi(x) + x * Phi'(x)), Phi recomputed from x.  One program, BLOCK elements.

    Fuses   the whole formula; nothing but x is kept from the forward.
    Moves   dy, x in; dx out = 3*N * itemsize.
    Rounds  once, at the store; fp32 inside.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if TANH:
        p, density = _tanh_phi(x)
    elif x_ptr.dtype.element_ty == tl.float32:
        p, density = _phi(x)
    else:
        p, density = _half_phi(x)
    tl.store(dx_ptr + n, dy * (p + x * density), mask=n < N)


def forward(x, approximate):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if N := y.numel():
        _gelu_kernel[(triton.cdiv(N, BLOCK),)](x.contiguous(), y, N, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS)
    return y


def backward(dy, x, approximate):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if N := dx.numel():
        _gelu_bwd_kernel[(triton.cdiv(N, BLOCK),)](
            dy.contiguous(), x.contiguous(), dx, N, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS
        )
    return dx


FUSED = Fused(
    "gelu",
    "(Tensor x, str approximate) -> Tensor", forward, lambda x, approximate: x.new_empty(x.shape),
    "(Tensor dy, Tensor x, str approximate) -> Tensor", backward, lambda dy, x, approximate: x.new_empty(x.shape),
    save=lambda args, results: ((args[0],), (args[1],)),
    grads_to=(0, None),
)


def refuses(x, approximate="none"):
    return None if x.dtype in KERNEL_DTYPES else f"x must be float32, float16 or bfloat16, got {x.dtype}"


def run_triton(x, approximate="none"):
    return FUSED(x, approximate)


def run_torch(x, approximate="none"):
    return F.gelu(x, approximate=approximate)


OP = Op(
    name="gelu",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=tuple(
        case | dict(approximate=approximate)
        for approximate in CHOICES
        for case in (
            dict(M=1, N=128), dict(M=7, N=100), dict(M=33, N=384), dict(M=0, N=64), dict(M=3, N=1),
            dict(M=9, N=96, layout="sliced"), dict(M=9, N=96, layout="transposed"), dict(M=9, N=96, layout="expanded"),
        )
    ),
    shapes={f"{M}x{N}": dict(M=M, N=N) for M, N in ((16384, 3072), (16384, 11008), (4096, 1536))},
    cost=cost,
    grads=("x",),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16",)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    hostile=families(("x",)),
    pieces=row_pieces("x"),
    kinds=dict(approximate=" | ".join(map(repr, CHOICES))),
)
