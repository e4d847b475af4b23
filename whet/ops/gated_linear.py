"""gated_linear: the end of a gated MLP, act(gate) * up times w.T, which keeps gate and up alone for the backward.

The product act(gate) * up, as large as gate, is what a linear layer keeps to compute the gradient of w. Here the kernel that
computes the gradients of gate and up writes it once more, over its own upstream gradient: M*N elements less are held
from forward to backward, for M*N more written. The products are those of `_products`. Opaque to torch.compile: there, call
swiglu or geglu and F.linear.
"""

import torch
import torch.nn.functional as F

from whet.compiled import compiled
from whet.op import Cost, Impl, Op, autocast_of, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _gated
from whet.ops._products import by_halves, floored, inside_end, inside_end_backward, matmul_forward, matmul_grad_w, matmul_grad_x
from whet.ops._rows import KERNEL_DTYPES, unit_rows
from whet.ops.geglu import NAMES
from whet.ops.geglu import reference as geglu_reference
from whet.ops.geglu import run_triton as geglu_op
from whet.ops.swiglu import reference as swiglu_reference
from whet.ops.swiglu import run_triton as swiglu_op
from whet.parts import row_pieces
from whet.torch_ops import Fused, may_ask
from whet.values import families

GELUS = {name: approximate for approximate, name in NAMES.items()}  # activation: approximate, as in geglu


def reference(gate, up, w, activation="silu"):
    """y = (act(gate) * up) @ w.T.  gate, up (..., N);  w (D, N);  activation "silu", "gelu" or "gelu_tanh".

    up=None: gate is packed, its first half the gate, its second up.
    """
    h = swiglu_reference(gate, up) if activation == "silu" else geglu_reference(gate, up, GELUS[activation])
    return F.linear(h, w)


def inputs(dtype, device, M, N, D, packed=False, activation="silu", layout="contiguous", w_layout="contiguous"):
    w = lay((max(1, N) ** -0.5 * torch.randn(D, N, device=device)).to(dtype), w_layout)
    return _gated.inputs(dtype, device, M, N, packed, layout) | dict(w=w, activation=activation)


def case_of(gate, up, w, activation="silu"):
    case = _gated.case_of(gate, up) | dict(D=w.shape[0], activation=activation)
    return case if w.is_contiguous() else case | dict(w_layout=layout_of(w))


def check(gate, up, w, activation="silu"):
    if reason := _gated.check(gate, up) or floating(w=w) or same_device(gate=gate, w=w):
        return reason
    N = gate.shape[-1] // (2 if up is None else 1)
    if w.dim() != 2 or w.shape[1] != N or w.numel() < 1:
        return f"w must have shape (D, {N}) to match gate, got {tuple(w.shape)}"
    if w.dtype != gate.dtype and not torch.is_autocast_enabled(gate.device.type):
        return f"w must have gate's dtype {gate.dtype} outside autocast, got {w.dtype}"
    return None


def cost(gate, up, w, activation="silu"):
    inner = _gated.cost(gate, up, flops=11, bwd_flops=24)
    M = gate.numel() // max(1, gate.shape[-1])
    product, given, y = 2 * M * w.numel(), nbytes(gate, up, w), M * w.shape[0] * gate.element_size()
    bwd = dict(bwd_bytes=2 * given + y, bwd_flops=2 * product + inner.bwd_flops)
    return floored(Cost(bytes=given + y, flops=product + inner.flops, **bwd), gate)


def activated(gate, up, activation):
    """act(gate) * up."""
    return _gated.forward_packed(gate, activation) if up is None else _gated.forward(gate, up, activation)


def forward(gate, up, w, activation, need_dgate, need_dw):
    return matmul_forward(activated(gate, up, activation), w)


def backward(dy, gate, up, w, activation, need_dgate, need_dw, over=False):
    """dgate, dup and dw, each of no elements where it is not asked for. dup: None where gate is packed.

    By halves dw comes first: they are let go before dgate and dup are there.
    over: dgate and dup are written over gate and up, which are contiguous then.
    """
    flat, none = unit_rows(dy), dy.new_empty(0)
    dw, first = none, need_dw and (not need_dgate or by_halves(dy))
    if first:
        dw = matmul_grad_w(flat, rows(activated(gate, up, activation)))
    if not need_dgate:
        return none, None if up is None else none, dw
    h = matmul_grad_x(flat, w)  # dh until the kernel has run
    if up is None:
        dgate, dup = _gated.backward_packed(h, gate, activation, need_dw and not first), None
    else:
        dgate, dup = _gated.backward(h, gate, up, activation, need_dw and not first, over)
    return dgate, dup, matmul_grad_w(flat, h) if need_dw and not first else dw


def _bwd_fake(dy, gate, up, w, activation, need_dgate, need_dw):
    dgate, dup = (None if t is None else dy.new_empty(t.shape if need_dgate else 0) for t in (gate, up))
    N = gate.shape[-1] // (2 if up is None else 1)
    return dgate, dup, dy.new_empty((dy.shape[-1], N) if need_dw else 0)


def _without_up(grads):
    return grads[0], grads[2]


def _save(args, results):
    """gate and up always; w only where dgate asks for it."""
    *gated, w, activation, need_dgate, need_dw = args
    return (*gated, w if need_dgate else None), (activation, need_dgate, need_dw)


def inside(gate, up, w, *rest) -> int:
    return inside_end(gate, gate.numel() // max(1, gate.shape[-1]), w.shape[1], w.shape[0])


def inside_backward(dy, gate, up, w, activation, need_dgate, need_dw) -> int:
    N = gate.shape[-1] // (2 if up is None else 1)
    return inside_end_backward(dy, gate.numel() // max(1, gate.shape[-1]), N, dy.shape[-1], 2 * need_dgate, need_dw)


FUSED = Fused(
    "gated_linear",
    "(Tensor gate, Tensor up, Tensor w, str activation, bool need_dgate, bool need_dw) -> Tensor", forward,
    lambda gate, up, w, *rest: gate.new_empty((*gate.shape[:-1], w.shape[0])),
    "(Tensor dy, Tensor gate, Tensor up, Tensor? w, str activation, bool need_dgate, bool need_dw) -> (Tensor, Tensor, Tensor)",
    backward, _bwd_fake,
    save=_save,
    grads_to=(0, 1, 2, None, None, None), inside=inside, bwd_inside=inside_backward,
)
PACKED = Fused(
    "gated_linear_packed",
    "(Tensor gate, Tensor w, str activation, bool need_dgate, bool need_dw) -> Tensor",
    lambda gate, *rest: forward(gate, None, *rest),
    lambda gate, w, *rest: gate.new_empty((*gate.shape[:-1], w.shape[0])),
    "(Tensor dy, Tensor gate, Tensor? w, str activation, bool need_dgate, bool need_dw) -> (Tensor, Tensor)",
    lambda dy, gate, *rest: _without_up(backward(dy, gate, None, *rest)),
    lambda dy, gate, *rest: _without_up(_bwd_fake(dy, gate, None, *rest)),
    save=_save,
    grads_to=(0, 1, None, None, None), inside=lambda gate, w, *rest: inside(gate, None, w),
    bwd_inside=lambda dy, gate, *rest: inside_backward(dy, gate, None, *rest),
)


def refuses(gate, up, w, activation="silu"):
    for name, t in (("gate", gate), ("up", up), ("w", w)):
        if t is not None and t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    most = max(gate.numel(), gate.numel() // max(1, gate.shape[-1]) * w.shape[0])
    return f"gate and y must have less than 2^31 elements, got {most:,}" if most >= 1 << 31 else None


def keeps_more(gate, up, w, activation="silu"):
    return "Inductor keeps act(gate) * up for the backward, which this op is there not to do"


def run_triton(gate, up, w, activation="silu"):
    if autocast_of(gate) not in (None, gate.dtype):  # the activation is as wide as its input, and rounded for the product
        return F.linear(swiglu_op(gate, up) if activation == "silu" else geglu_op(gate, up, GELUS[activation]), w)
    w = w.to(gate.dtype)  # autocast's, too
    rest = w, activation, may_ask(gate, up), may_ask(w)
    return PACKED(gate, *rest) if up is None else FUSED(gate, up, *rest)


def run_torch(gate, up, w, activation="silu"):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.linear((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=GELUS[activation])) * up, w)


OP = Op(
    name="gated_linear",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, N=128, D=16), dict(M=7, N=100, D=24), dict(M=33, N=64, D=40, activation="gelu"), dict(M=0, N=64, D=8),
        dict(M=5, N=37, D=7, activation="gelu_tanh"), dict(M=3, N=1, D=1), dict(M=7, N=100, D=24, packed=True),
        dict(M=5, N=37, D=9, packed=True, activation="gelu"), dict(M=0, N=64, D=8, packed=True),
        dict(M=9, N=96, D=16, layout="sliced"), dict(M=9, N=96, D=16, layout="transposed"),
        dict(M=9, N=96, D=16, layout="expanded"), dict(M=9, N=96, D=16, packed=True, layout="sliced"),
        dict(M=9, N=96, D=16, w_layout="transposed"), dict(M=9, N=96, D=16, w_layout="sliced", activation="gelu_tanh"),
    ),
    shapes={
        "8192x3072x1024": dict(M=8192, N=3072, D=1024), "8192x3072x1024 packed": dict(M=8192, N=3072, D=1024, packed=True),
        "8192x8192x2048": dict(M=8192, N=8192, D=2048),
        "8192x9216x2304 gelu": dict(M=8192, N=9216, D=2304, activation="gelu_tanh"),
    },
    cost=cost,
    grads=("gate", "up", "w"),
    impls={
        "torch": Impl(run_torch),
        "compile": Impl(compiled(reference), keeps_more, limits=("any call: it keeps act(gate) * up for the backward",)),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", "2^31 elements of gate or y"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, N=100, D=32),
    hostile=families(("gate", "up"), ("w",), limit=2.0**7),
    pieces=row_pieces("gate", "up", added=("w",)),
    kinds={"up": "tensor | None", "activation": " | ".join(map(repr, ("silu", *GELUS)))},
)
