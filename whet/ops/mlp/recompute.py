"""An MLP of PyTorch's products that keeps x alone: the backward makes the pre-activations again, by one product, gated two."""

import torch.nn.functional as F

from whet.op import rows
from whet.ops import _gated, activated_linear
from whet.ops.mlp import hybrid
from whet.torch_ops import Fused


def forward(x, up, down, gate, activation, need_dx, need_dup, need_ddown):
    """y. The hidden values are written over the pre-activations, which nobody else has."""
    pre = F.linear(x, up)
    if gate is None:
        return F.linear(activated_linear.activated(pre, activation, over=True), down)
    return F.linear(_gated.forward(F.linear(x, gate), pre, activation, over=True), down)


def backward(dy, x, up, down, gate, activation, need_dx, need_dup, need_ddown):
    """The hybrid's, after the first products made once more; their gradients are written over them."""
    flat = rows(x)
    pre, pre_gate = F.linear(flat, up), None if gate is None else F.linear(flat, gate)
    return hybrid.gradients(dy, x, up, down, gate, pre, pre_gate, activation, need_dx, need_dup, need_ddown, over=True)


def bwd_fake(dy, x, up, down, gate, activation, *need):
    return hybrid.fakes(dy, x.shape[-1], up.shape[0], gate is not None, *need)


def inside(x, up, down, gate, *rest) -> int:
    """Bytes besides, forward: the pre-activations, the gate's until y comes."""
    values = hybrid.inside(x, up, down)
    return values if gate is None else values + max(0, (up.shape[0] - down.shape[0]) * values // up.shape[0])


def inside_backward(dy, x, up, down, gate, activation, need_dx, need_dup, need_ddown) -> int:
    need = need_dx, need_dup, need_ddown
    return hybrid.inside_gradients(dy, x.shape[-1], up.shape[0], gate is not None, *need, True)


def kept(args, results):
    """x and the weights; down only where the hidden values' gradient asks for it."""
    x, up, down, gate, activation, need_dx, need_dup, need_ddown, *_ = args
    return (x, up, down if need_dx or need_dup else None, gate), (activation, need_dx, need_dup, need_ddown)


BWD_SCHEMA = (
    f"(Tensor dy, Tensor x, Tensor up, Tensor? down, Tensor? gate, {hybrid.NEED}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def fused(gated: bool) -> Fused:
    """Without a gate and with one: the argument is there in both, its gradient is not."""
    return Fused(
        "mlp_recompute_gated" if gated else "mlp_recompute",
        f"(Tensor x, Tensor up, Tensor down, Tensor? gate, {hybrid.NEED}) -> Tensor", forward,
        lambda x, up, down, *rest: x.new_empty((*x.shape[:-1], down.shape[0])),
        BWD_SCHEMA, backward, bwd_fake,
        save=kept,
        grads_to=(0, 1, 2, 3 if gated else None, None, None, None, None),
        inside=inside, bwd_inside=inside_backward, label="mlp[hybrid_recompute]",
    )


FUSED, GATED = fused(False), fused(True)


def run(x, up, down, gate=None, activation="silu"):
    given, need = hybrid.operands(x, up, down, gate)
    return (FUSED if gate is None else GATED)(*given, activation, *need)
