"""swiglu: silu(gate) * up, of two tensors or of the two halves of one packed projection."""

import torch
import torch.nn.functional as F

from whet.op import Impl, Op, rows
from whet.ops import _gated
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import families


def reference(gate, up=None):
    """y = silu(gate) * up, computed wide, rounded once.  up=None: gate is packed, its first half the gate, its second up."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    return (g * torch.sigmoid(g) * up.to(wide)).to(gate.dtype)


def cost(gate, up=None):
    return _gated.cost(gate, up, flops=5, bwd_flops=10)


def forward(gate, up):
    return _gated.forward(gate, up, "silu")


def backward(dy, gate, up):
    return _gated.backward(dy, gate, up, "silu")


def forward_packed(packed):
    return _gated.forward_packed(packed, "silu")


def backward_packed(dy, packed):
    return _gated.backward_packed(dy, packed, "silu")


FUSED = Fused(
    "swiglu",
    "(Tensor gate, Tensor up) -> Tensor", forward, lambda gate, up: gate.new_empty(gate.shape),
    "(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)", backward,
    lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    save=lambda args, results: (args, ()),
    grads_to=(0, 1),
    visible=True, bwd_visible=True,
)
PACKED = Fused(
    "swiglu_packed",
    "(Tensor packed) -> Tensor", forward_packed,
    lambda packed: packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2)),
    "(Tensor dy, Tensor packed) -> Tensor", backward_packed, lambda dy, packed: packed.new_empty(packed.shape),
    save=lambda args, results: (args, ()),
    grads_to=(0,),
    visible=True, bwd_visible=True,
)


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
    inputs=_gated.inputs,
    case_of=_gated.case_of,
    check=_gated.check,
    cases=_gated.CASES,
    shapes={
        "16384x11008": dict(M=16384, N=11008), "16384x11008 packed": dict(M=16384, N=11008, packed=True),
        "4096x1536": dict(M=4096, N=1536), "1024x2048 packed": dict(M=1024, N=2048, packed=True),
    },
    cost=cost,
    grads=("gate", "up"),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(run_triton, _gated.refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16",)),
        "liger": Impl(run_liger, liger_refuses, needs="liger_kernel", limits=("gate and up as two tensors",)),
    },
    dynamic=("M",),
    tiny=dict(M=16),
    hostile=families(("gate", "up")),
    pieces=row_pieces("gate", "up"),
)
