"""An MLP of PyTorch's products and the fused activations of activated_linear and gated_linear, and its gradients."""

import torch.nn.functional as F

from whet.op import autocast_of, rows
from whet.ops import activated_linear, gated_linear
from whet.ops._products import inside_end_backward
from whet.ops._rows import KERNEL_DTYPES
from whet.torch_ops import Fused, may_ask


def forward(x, up, down, gate, activation, need_dx, need_dup, need_ddown):
    """y, and for the backward x @ up.T and x @ gate.T, of no elements without a gate."""
    pre = F.linear(x, up)
    if gate is None:
        return F.linear(activated_linear.activated(pre, activation), down), pre, pre.new_empty(0)
    pre_gate = F.linear(x, gate)
    return F.linear(gated_linear.activated(pre_gate, pre, activation), down), pre, pre_gate


def gradients(dy, x, up, down, gate, pre, pre_gate, activation, need_dx, need_dup, need_ddown, over=False):
    """dx, dup, ddown and dgate, each of no elements where it is not asked for.  pre_gate None: there is no gate.

    need_dup is of up and gate. The second product for dx is added to the first: the sum is rounded once, and read by no kernel.
    over: pre and pre_gate are contiguous and nobody else's, and are written over.
    """
    none, inner, pre = dy.new_empty(0), need_dx or need_dup, rows(pre)
    if pre_gate is None:
        dpre, ddown = activated_linear.backward(dy, pre, down, activation, inner, need_ddown, over)
    else:
        given = dy, rows(pre_gate), pre, down, activation, inner, need_ddown
        dpre_gate, dpre, ddown = gated_linear.backward(*given, over)
    dx, dup, dgate = none, none, none
    if need_dx:
        dx = dpre @ up
        if pre_gate is not None:
            dx.addmm_(dpre_gate, gate)
        dx = dx.view(*dy.shape[:-1], up.shape[1])
    if need_dup:
        dup = dpre.t() @ rows(x)
        dgate = none if pre_gate is None else dpre_gate.t() @ rows(x)
    return dx, dup, ddown, dgate


def fakes(dy, D, H, gated, need_dx, need_dup, need_ddown):
    """What `gradients` gives, by shape."""
    dx = dy.new_empty((*dy.shape[:-1], D) if need_dx else 0)
    dup, dgate = (dy.new_empty((H, D) if need_dup and there else 0) for there in (True, gated))
    return dx, dup, dy.new_empty((dy.shape[-1], H) if need_ddown else 0), dgate


def inside_gradients(dy, D, H, gated, need_dx, need_dup, need_ddown, over=False) -> int:
    """Bytes that `gradients` takes besides: of the pre-activations, and until dx and dup come of the hidden values.

    over: the pre-activations themselves too, which were made for it.
    """
    M, parts = dy.numel() // max(1, dy.shape[-1]), 2 if gated else 1
    many = parts * (need_dx or need_dup)
    later = (M * D * need_dx + many * H * D * need_dup) * dy.element_size()
    end = inside_end_backward(dy, M, H, dy.shape[-1], many, need_ddown, over)
    return (parts if over else many) * M * H * dy.element_size() + max(0, end - later)


def inside(x, up, down, *rest) -> int:
    """Bytes besides, forward: the hidden values. All products are PyTorch's there, also in float32."""
    return x.numel() // max(1, x.shape[-1]) * up.shape[0] * x.element_size()


def inside_backward(dy, x, up, down, gate, pre, pre_gate, gated, D, activation, *need) -> int:
    return inside_gradients(dy, D, pre.shape[-1], gated, *need)


def backward(dy, x, up, down, gate, pre, pre_gate, gated, D, activation, need_dx, need_dup, need_ddown):
    given = pre_gate if gated else None
    return gradients(dy, x, up, down, gate, pre, given, activation, need_dx, need_dup, need_ddown)


def _bwd_fake(dy, x, up, down, gate, pre, pre_gate, gated, D, activation, *need):
    return fakes(dy, D, pre.shape[-1], gated, *need)


def _fake(x, up, down, gate, *rest):
    pre = x.new_empty((*x.shape[:-1], up.shape[0]))
    return x.new_empty((*x.shape[:-1], down.shape[0])), pre, x.new_empty(0 if gate is None else pre.shape)


def _save(args, results):
    """The pre-activations always; x, up, gate and down only where a gradient asks for them."""
    x, up, down, gate, activation, need_dx, need_dup, need_ddown = args
    given = (x if need_dup else None, up if need_dx else None, down if need_dx or need_dup else None, gate if need_dx else None)
    return (*given, *results[1:]), (gate is not None, x.shape[-1], activation, need_dx, need_dup, need_ddown)


NEED = "str activation, bool need_dx, bool need_dup, bool need_ddown"


def fused(gated: bool) -> Fused:
    """Without a gate and with one: the argument is there in both, its gradient is not."""
    return Fused(
        "mlp_hybrid_gated" if gated else "mlp_hybrid",
        f"(Tensor x, Tensor up, Tensor down, Tensor? gate, {NEED}) -> (Tensor, Tensor, Tensor)", forward, _fake,
        "(Tensor dy, Tensor? x, Tensor? up, Tensor? down, Tensor? gate, Tensor pre, Tensor pre_gate, "
        f"bool gated, SymInt D, {NEED}) -> (Tensor, Tensor, Tensor, Tensor)",
        backward, _bwd_fake,
        save=_save,
        grads_to=(0, 1, 2, 3 if gated else None, None, None, None, None),
        inside=inside, bwd_inside=inside_backward, label="mlp[hybrid]",
    )


FUSED, GATED = fused(False), fused(True)


def refuses(x, up, down, gate=None, activation="silu"):
    for name, t in (("x", x), ("up", up), ("down", down), ("gate", gate)):
        if t is not None and t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    most = x.numel() // max(1, x.shape[-1]) * max(*up.shape, *down.shape)
    return f"x, the hidden values and y must have less than 2^31 elements, got {most:,}" if most >= 1 << 31 else None


def operands(x, up, down, gate):
    """The four in the dtype of the products, autocast's where it is on, and which gradients may be asked for."""
    dtype = autocast_of(x) or x.dtype
    need = may_ask(x), may_ask(up, gate), may_ask(down)
    return [None if t is None else t.to(dtype) for t in (x, up, down, gate)], need


def run(x, up, down, gate=None, activation="silu"):
    given, need = operands(x, up, down, gate)
    return (FUSED if gate is None else GATED)(*given, activation, *need)
