"""gelu: x times the standard normal's cumulative probability of x, exactly or through tanh."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes
from whet.ops._phi import CHOICES, _gelu_factor
from whet.ops._rows import KERNEL_DTYPES, cdiv
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families

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
    p, _ = _gelu_factor(x, x_ptr, TANH)
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
    p, density = _gelu_factor(x, x_ptr, TANH)
    tl.store(dx_ptr + n, dy * (p + x * density), mask=n < N)


def forward(x, approximate):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if N := y.numel():
        launcher(_gelu_kernel)[(cdiv(N, BLOCK),)](
            x.contiguous(), y, N, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS
        )
    return y


def backward(dy, x, approximate):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if N := dx.numel():
        launcher(_gelu_bwd_kernel)[(cdiv(N, BLOCK),)](
            dy.contiguous(), x.contiguous(), dx, N, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS
        )
    return dx


FUSED = Fused(
    "gelu",
    "(Tensor x, str approximate) -> Tensor", forward, lambda x, approximate: x.new_empty(x.shape),
    "(Tensor dy, Tensor x, str approximate) -> Tensor", backward, lambda dy, x, approximate: x.new_empty(x.shape),
    save=lambda args, results: ((args[0],), (args[1],)),
    grads_to=(0, None),
    visible=True, bwd_visible=True,
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
