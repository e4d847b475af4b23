"""activated_linear: the end of an MLP without a gate, act(x) times w.T, which keeps x alone for the backward.

act(x), as large as x, is what a linear layer keeps to compute the gradient of w. Here the kernel that computes the gradient of
x writes it once more, over its own upstream gradient: M*N elements less are held from forward to backward, for M*N more
written. The products are those of `_products`. Opaque to torch.compile.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.compiled import compiled
from whet.launch import launcher
from whet.op import Cost, Impl, Op, autocast_of, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops._phi import _gelu_factor
from whet.ops._products import by_halves, floored, inside_end, inside_end_backward, matmul_forward, matmul_grad_w, matmul_grad_x
from whet.ops._rows import KERNEL_DTYPES, cdiv, unit_rows
from whet.ops.gelu import reference as gelu_reference
from whet.parts import row_pieces
from whet.torch_ops import Fused, may_ask
from whet.values import families

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu2")
BLOCK, WARPS = 2048, 4  # 16 elements a thread: two 16-byte loads of bf16 in flight


def act(x, activation):
    """The activation by PyTorch's own calls, rounded to x's dtype."""
    if activation == "relu2":
        return F.relu(x).square()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def reference(x, w, activation="gelu"):
    """y = act(x) @ w.T.  x (..., N);  w (D, N);  activation "gelu", "gelu_tanh", "silu" or "relu2", which is relu(x)^2."""
    if activation in ("gelu", "gelu_tanh"):
        return F.linear(gelu_reference(x, "tanh" if activation == "gelu_tanh" else "none"), w)
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.sigmoid(h) if activation == "silu" else torch.relu(h) * torch.relu(h)
    return F.linear(h.to(x.dtype), w)


def inputs(dtype, device, M, N, D, activation="gelu", layout="contiguous", w_layout="contiguous"):
    x = lay(torch.randn(M, N, dtype=dtype, device=device), layout)
    w = lay((max(1, N) ** -0.5 * torch.randn(D, N, device=device)).to(dtype), w_layout)
    return dict(x=x, w=w, activation=activation)


def case_of(x, w, activation="gelu"):
    N = x.shape[-1]
    case = dict(M=x.numel() // max(1, N), N=N, D=w.shape[0], activation=activation, layout=layout_of(x))
    return case if w.is_contiguous() else case | dict(w_layout=layout_of(w))


def check(x, w, activation="gelu"):
    if reason := floating(x=x, w=w) or same_device(x=x, w=w):
        return reason
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1] or w.numel() < 1:
        return f"w must have shape (D, {x.shape[-1] if x.dim() else 'N'}) to match x.shape[-1], got {tuple(w.shape)}"
    if w.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"w must have x's dtype {x.dtype} outside autocast, got {w.dtype}"
    return None


def cost(x, w, activation="gelu"):
    M = x.numel() // max(1, x.shape[-1])
    product, given, y = 2 * M * w.numel(), nbytes(x, w), M * w.shape[0] * x.element_size()
    bwd = dict(bwd_bytes=2 * given + y, bwd_flops=2 * product + 20 * x.numel())
    return floored(Cost(bytes=given + y, flops=product + 10 * x.numel(), **bwd), x)


@triton.jit
def _act_and_slope(x, x_ptr, RELU2: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr):
    """act(x) and its derivative, for x loaded from x_ptr and widened to fp32."""
    if RELU2:
        p = tl.where(x < 0.0, 0.0, x)  # NaN stays
        return p * p, 2.0 * p
    else:
        if SILU:
            p = tl.sigmoid(x)
            density = p * (1.0 - p)
        else:
            p, density = _gelu_factor(x, x_ptr, TANH)
        return x * p, p + x * density


@triton.jit
def _act_kernel(
    x_ptr,  # input
    h_ptr,  # output
    numel,
    RELU2: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
):
    """h = act(x).  One program, BLOCK elements.

    Fuses   the whole formula.
    Moves   x in; h out = 2*M*N * itemsize.
    Rounds  once, at the store; fp32 inside.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < numel, other=0.0).to(tl.float32)
    h, _ = _act_and_slope(x, x_ptr, RELU2, SILU, TANH)
    tl.store(h_ptr + n, h, mask=n < numel)


@triton.jit
def _act_bwd_kernel(
    dh_ptr, x_ptr,  # inputs; where AGAIN h = act(x) is written over dh
    dx_ptr,  # output
    numel,
    RELU2: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):
    """dx = dh * act'(x);  where AGAIN h = act(x), over dh.  One program, BLOCK elements.

    Fuses   the gradient and the activation made again; nothing but x is kept from the forward.
    Moves   dh, x in; dx out = 3*M*N * itemsize; with h 4.
    Rounds  once, at each store; fp32 inside.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dh = tl.load(dh_ptr + n, mask=n < numel, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + n, mask=n < numel, other=0.0).to(tl.float32)
    h, slope = _act_and_slope(x, x_ptr, RELU2, SILU, TANH)
    tl.store(dx_ptr + n, dh * slope, mask=n < numel)
    if AGAIN:
        tl.store(dh_ptr + n, h, mask=n < numel)


def formula(activation: str) -> dict:
    """The constexprs of an activation."""
    return dict(RELU2=activation == "relu2", SILU=activation == "silu", TANH=activation == "gelu_tanh")


def activated(x, activation, over=False):
    """act(x), contiguous.  over: it is written over x, which is contiguous then."""
    h = x if over else torch.empty_like(x, memory_format=torch.contiguous_format)
    if numel := h.numel():
        programs = cdiv(numel, BLOCK)
        launcher(_act_kernel)[(programs,)](x.contiguous(), h, numel, **formula(activation), BLOCK=BLOCK, num_warps=WARPS)
    return h


def forward(x, w, activation, need_dx, need_dw):
    return matmul_forward(activated(x, activation), w)


def backward(dy, x, w, activation, need_dx, need_dw, over=False):
    """dx and dw, each of no elements where it is not asked for. By halves dw comes first: they are let go before dx is made.

    over: dx is written over x, which is contiguous then.
    """
    flat, dw = unit_rows(dy), dy.new_empty(0)
    first = need_dw and (not need_dx or by_halves(dy))
    if first:
        dw = matmul_grad_w(flat, rows(activated(x, activation)))
    if not need_dx:
        return dy.new_empty(0), dw
    h = matmul_grad_x(flat, w)  # dh until the kernel has run
    dx = x if over else torch.empty_like(x, memory_format=torch.contiguous_format)
    if numel := dx.numel():
        launcher(_act_bwd_kernel)[(cdiv(numel, BLOCK),)](
            h, x.contiguous(), dx, numel, **formula(activation), AGAIN=need_dw and not first, BLOCK=BLOCK, num_warps=WARPS
        )
    return dx, matmul_grad_w(flat, h) if need_dw and not first else dw


def _bwd_fake(dy, x, w, activation, need_dx, need_dw):
    return dy.new_empty(x.shape if need_dx else 0), dy.new_empty((dy.shape[-1], x.shape[-1]) if need_dw else 0)


def _save(args, results):
    """x always; w only where dx asks for it."""
    x, w, activation, need_dx, need_dw = args
    return (x, w if need_dx else None), (activation, need_dx, need_dw)


def inside(x, w, *rest) -> int:
    return inside_end(x, x.numel() // max(1, x.shape[-1]), x.shape[-1], w.shape[0])


def inside_backward(dy, x, w, activation, need_dx, need_dw) -> int:
    return inside_end_backward(dy, x.numel() // max(1, x.shape[-1]), x.shape[-1], dy.shape[-1], int(need_dx), need_dw)


FUSED = Fused(
    "activated_linear",
    "(Tensor x, Tensor w, str activation, bool need_dx, bool need_dw) -> Tensor", forward,
    lambda x, w, *rest: x.new_empty((*x.shape[:-1], w.shape[0])),
    "(Tensor dy, Tensor x, Tensor? w, str activation, bool need_dx, bool need_dw) -> (Tensor, Tensor)",
    backward, _bwd_fake,
    save=_save,
    grads_to=(0, 1, None, None, None), inside=inside, bwd_inside=inside_backward,
)


def refuses(x, w, activation="gelu"):
    for name, t in (("x", x), ("w", w)):
        if t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    most = max(x.numel(), x.numel() // max(1, x.shape[-1]) * w.shape[0])
    return f"x and y must have less than 2^31 elements, got {most:,}" if most >= 1 << 31 else None


def keeps_more(x, w, activation="gelu"):
    return "Inductor keeps act(x) for the backward, which this op is there not to do"


def run_triton(x, w, activation="gelu"):
    if autocast_of(x) not in (None, x.dtype):  # the activation is as wide as its input, and rounded for the product
        return F.linear(act(x, activation), w)
    return FUSED(x, w.to(x.dtype), activation, may_ask(x), may_ask(w))  # autocast's, too


def run_torch(x, w, activation="gelu"):
    return F.linear(act(x, activation), w)


OP = Op(
    name="activated_linear",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128, D=16), dict(M=7, N=100, D=24, activation="relu2"), dict(M=33, N=64, D=40, activation="silu"),
        dict(M=0, N=64, D=8), dict(M=5, N=37, D=7, activation="gelu_tanh"), dict(M=3, N=1, D=1, activation="relu2"),
        dict(M=5, N=37, D=9, activation="relu2"), dict(M=9, N=96, D=16, layout="sliced"),
        dict(M=9, N=96, D=16, layout="transposed", activation="silu"), dict(M=9, N=96, D=16, layout="expanded"),
        dict(M=9, N=96, D=16, w_layout="transposed", activation="relu2"),
        dict(M=9, N=96, D=16, w_layout="sliced", activation="gelu_tanh"),
    ),
    shapes={
        "16384x3072x768": dict(M=16384, N=3072, D=768),
        "32768x2304x768 relu2": dict(M=32768, N=2304, D=768, activation="relu2"),
        "8192x5632x2048 silu": dict(M=8192, N=5632, D=2048, activation="silu"),
    },
    cost=cost,
    grads=("x", "w"),
    impls={
        "torch": Impl(run_torch),
        "compile": Impl(compiled(reference), keeps_more, limits=("any call: it keeps act(x) for the backward",)),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", "2^31 elements of x or y"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, N=100, D=32),
    hostile=families(("x",), ("w",), limit=2.0**7),
    pieces=row_pieces("x", added=("w",)),
    kinds={"activation": " | ".join(map(repr, ACTIVATIONS))},
)
