"""geglu: gelu(gate) * up, of two tensors or of the two halves of one packed projection; the GELU exactly or through tanh."""

import math

import torch
import torch.nn.functional as F

from whet.op import Impl, Op
from whet.ops import _gated
from whet.ops._phi import CHOICES
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families

NAMES = dict(zip(CHOICES, ("gelu", "gelu_tanh")))  # approximate: the activation, as _gated has it


def reference(gate, up=None, approximate="none"):
    """y = gelu(gate) * up, computed wide, rounded once; approximate as in gelu.

    up=None: gate is packed, its first half the gate, its second up.
    """
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    if approximate == "tanh":
        p = torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g))
    else:
        p = torch.erf(g * math.sqrt(0.5))
    return (0.5 * g * (1 + p) * up.to(wide)).to(gate.dtype)


def inputs(dtype, device, M, N, packed=False, approximate="none", layout="contiguous"):
    return _gated.inputs(dtype, device, M, N, packed, layout) | dict(approximate=approximate)


def case_of(gate, up=None, approximate="none"):
    return _gated.case_of(gate, up) | dict(approximate=approximate)


def check(gate, up=None, approximate="none"):
    return _gated.check(gate, up)


def cost(gate, up=None, approximate="none"):
    return _gated.cost(gate, up, flops=11, bwd_flops=24)


def forward(gate, up, approximate):
    return _gated.forward(gate, up, NAMES[approximate])


def backward(dy, gate, up, approximate):
    return _gated.backward(dy, gate, up, NAMES[approximate])


def forward_packed(packed, approximate):
    return _gated.forward_packed(packed, NAMES[approximate])


def backward_packed(dy, packed, approximate):
    return _gated.backward_packed(dy, packed, NAMES[approximate])


FUSED = Fused(
    "geglu",
    "(Tensor gate, Tensor up, str approximate) -> Tensor", forward, lambda gate, up, approximate: gate.new_empty(gate.shape),
    "(Tensor dy, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)", backward,
    lambda dy, gate, up, approximate: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    save=lambda args, results: (args[:2], args[2:]),
    grads_to=(0, 1, None),
    visible=True, bwd_visible=True,
)
PACKED = Fused(
    "geglu_packed",
    "(Tensor packed, str approximate) -> Tensor", forward_packed,
    lambda packed, approximate: packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2)),
    "(Tensor dy, Tensor packed, str approximate) -> Tensor", backward_packed,
    lambda dy, packed, approximate: packed.new_empty(packed.shape),
    save=lambda args, results: (args[:1], args[1:]),
    grads_to=(0, None),
    visible=True, bwd_visible=True,
)


def run_triton(gate, up=None, approximate="none"):
    return PACKED(gate, approximate) if up is None else FUSED(gate, up, approximate)


def run_torch(gate, up=None, approximate="none"):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def liger_refuses(gate, up=None, approximate="none"):
    if approximate != "tanh":
        return f"approximate must be 'tanh', got {approximate!r}"
    if up is not None:
        return "up must be packed into gate: its backward overwrites gate and up"
    return None if gate.numel() else "gate must not be empty"


def run_liger(gate, up=None, approximate="none"):
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))


OP = Op(
    name="geglu",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=tuple(
        case | dict(approximate=approximate)
        for approximate in CHOICES
        # Of three negative gates, 1 + erf cancels in all: eager's error, which the budget follows, may be near zero by luck.
        for case in (dict(M=33, N=1), *(c for c in _gated.CASES if c["N"] > 1))
    ),
    shapes={
        "8192x9216 tanh": dict(M=8192, N=9216, approximate="tanh"),  # Gemma 2 2B
        "8192x6912 tanh": dict(M=8192, N=6912, approximate="tanh"),  # Gemma 3 1B
        "16384x1152 packed": dict(M=16384, N=1152, packed=True),  # ModernBERT base
        "4096x2048 tanh": dict(M=4096, N=2048, approximate="tanh"),  # T5 1.1 base
    },
    cost=cost,
    grads=("gate", "up"),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(run_triton, _gated.refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16",)),
        "liger": Impl(
            run_liger, liger_refuses, needs="liger_kernel",
            limits=("approximate='none'", "gate and up as two tensors", "an empty batch"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    hostile=families(("gate", "up")),
    pieces=row_pieces("gate", "up"),
    kinds=dict(approximate=" | ".join(map(repr, CHOICES))),
)
