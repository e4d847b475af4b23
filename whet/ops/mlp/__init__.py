"""mlp: a whole MLP, the product with up, the activation and the product with down, gated where a gate is given.

torch    PyTorch's calls: autograd keeps x, the pre-activations and the hidden values.
hybrid   PyTorch's products with whet's activations: x and the pre-activations are kept, M*H elements less, gated 2*M*H less.
hybrid_recompute  the same with x alone kept: the backward makes the pre-activations again, by one product more, gated two.
triton   the forward in one kernel: x alone is kept, and the backward makes the pre-activations again.

At D = O = 512 and H = 1408 the products are 2.9 MFLOP a row, with a gate 4.3, for 2 KB of x and y: all ways are bound by the
tensor cores. Not writing the hidden values saves two passes over M*H elements, a fifth of the time; the fused kernel pays more
than that for the weights it reads again and the hidden values it makes twice. On paper it is slower than hybrid, and there for
its memory; the tuner decides. The count is in docs/kernels.md.
"""

import torch
import torch.nn.functional as F

from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, same_device
from whet.ops import activated_linear, gated_linear
from whet.ops.mlp import hybrid, kernel, recompute
from whet.parts import row_pieces
from whet.values import families

GATED = ("silu", *gated_linear.GELUS)  # of the activations, those that a gate may have
LIMITS = ("dtypes other than fp32, fp16, bf16", "2^31 elements of x, the hidden values or y")


def reference(x, up, down, gate=None, activation="silu"):
    """y = act(x @ up.T) @ down.T, with a gate (act(x @ gate.T) * (x @ up.T)) @ down.T.

    x (..., D);  up, gate (H, D);  down (O, H);  activation "silu", "gelu", "gelu_tanh" or, without a gate, "relu2", relu(.)^2.
    """
    if gate is None:
        return activated_linear.reference(F.linear(x, up), down, activation)
    return gated_linear.reference(F.linear(x, gate), F.linear(x, up), down, activation)


def inputs(
    dtype, device, M, D, H, O, gated=False, activation="silu", layout="contiguous", up_layout="contiguous",  # noqa: E741
    down_layout="contiguous", gate_layout="contiguous",
):
    def weight(N, K, layout):
        return lay((max(1, K) ** -0.5 * torch.randn(N, K, device=device)).to(dtype), layout)

    x = lay(torch.randn(M, D, dtype=dtype, device=device), layout)
    gate = weight(H, D, gate_layout) if gated else None
    return dict(x=x, up=weight(H, D, up_layout), down=weight(O, H, down_layout), gate=gate, activation=activation)


def case_of(x, up, down, gate=None, activation="silu"):
    M, (H, D) = x.numel() // max(1, x.shape[-1]), up.shape
    case = dict(M=M, D=D, H=H, O=down.shape[0], gated=gate is not None, activation=activation, layout=layout_of(x))
    named = (("up", up), ("down", down), ("gate", gate))
    return case | {f"{k}_layout": layout_of(t) for k, t in named if t is not None and not t.is_contiguous()}


def check(x, up, down, gate=None, activation="silu"):
    named = dict(x=x, up=up, down=down, gate=gate)
    if reason := floating(**named) or same_device(**named):
        return reason
    if x.dim() < 1 or up.dim() != 2 or up.shape[1] != x.shape[-1] or up.numel() < 1:
        return f"up must have shape (H, {x.shape[-1] if x.dim() else 'D'}) to match x.shape[-1], got {tuple(up.shape)}"
    if gate is not None and gate.shape != up.shape:
        return f"gate must have shape {tuple(up.shape)} to match up, got {tuple(gate.shape)}"
    if down.dim() != 2 or down.shape[1] != up.shape[0] or down.numel() < 1:
        return f"down must have shape (O, {up.shape[0]}) to match up.shape[0], got {tuple(down.shape)}"
    if gate is not None and activation not in GATED:
        return f"activation must be one of {list(GATED)} where there is a gate, got {activation!r}; leave out the gate"
    if not torch.is_autocast_enabled(x.device.type):
        for name, t in named.items():
            if t is not None and t.dtype != x.dtype:
                return f"{name} must have x's dtype {x.dtype} outside autocast, got {t.dtype}"
    return None


def cost(x, up, down, gate=None, activation="silu"):
    M = x.numel() // max(1, x.shape[-1])
    products = 2 * M * (up.numel() + down.numel() + (0 if gate is None else gate.numel()))
    given, y, hidden = nbytes(x, up, down, gate), M * down.shape[0] * x.element_size(), M * up.shape[0]
    return Cost(
        bytes=given + y, flops=products + 10 * hidden, bwd_bytes=2 * given + y, bwd_flops=2 * products + 20 * hidden
    )


def run_torch(x, up, down, gate=None, activation="silu"):
    if gate is None:
        return activated_linear.run_torch(F.linear(x, up), down, activation)
    return gated_linear.run_torch(F.linear(x, gate), F.linear(x, up), down, activation)


OP = Op(
    name="mlp",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, D=64, H=128, O=16), dict(M=7, D=40, H=100, O=24, activation="relu2"),
        dict(M=33, D=80, H=72, O=40, gated=True), dict(M=0, D=64, H=32, O=8), dict(M=0, D=64, H=32, O=8, gated=True),
        dict(M=5, D=19, H=37, O=7, activation="gelu_tanh"), dict(M=3, D=1, H=1, O=1, activation="relu2"),
        dict(M=5, D=19, H=37, O=9, gated=True, activation="gelu_tanh"), dict(M=70, D=100, H=77, O=270, activation="gelu"),
        dict(M=9, D=32, H=96, O=16, gated=True, activation="gelu", layout="sliced"),
        dict(M=9, D=32, H=96, O=16, layout="transposed"), dict(M=9, D=32, H=96, O=16, layout="expanded", gated=True),
        dict(M=9, D=32, H=96, O=16, up_layout="transposed", down_layout="sliced", activation="relu2"),
        dict(M=9, D=32, H=96, O=16, gated=True, up_layout="sliced", down_layout="transposed", gate_layout="transposed"),
    ),
    shapes={
        "18048x512x1365": dict(M=18048, D=512, H=1365, O=512), "18048x512x1408": dict(M=18048, D=512, H=1408, O=512),
        "18048x512x1365 gated": dict(M=18048, D=512, H=1365, O=512, gated=True),
        "18048x512x1408 gated": dict(M=18048, D=512, H=1408, O=512, gated=True),
        "88000x512x1408": dict(M=88000, D=512, H=1408, O=512),
        "88000x512x1408 gated": dict(M=88000, D=512, H=1408, O=512, gated=True),
        "8192x2048x5632 gated": dict(M=8192, D=2048, H=5632, O=2048, gated=True),
    },
    cost=cost,
    grads=("x", "up", "down", "gate"),
    impls={
        "torch": Impl(run_torch),
        "hybrid": Impl(
            hybrid.run, hybrid.refuses, needs="triton", limits=LIMITS,
            words="PyTorch's products with whet's own elementwise kernels; the hidden values are not kept for the backward",
        ),
        "hybrid_recompute": Impl(
            recompute.run, hybrid.refuses, needs="triton", limits=LIMITS,
            words="PyTorch's products with whet's own elementwise kernels; x alone is kept for the backward",
        ),
        "triton": Impl(
            kernel.run, kernel.refuses, needs="triton", tiles=kernel.tiles,
            limits=(*LIMITS, f"more than {kernel.MAX_O} rows of down"),
            words="whet's own kernel, the whole forward in one; x alone is kept for the backward",
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, D=32, H=100, O=32),
    hostile=families(("x",), ("up", "down", "gate"), limit=2.0**7),
    pieces=row_pieces("x", added=("up", "down", "gate")),
    kinds={"gate": "tensor | None", "activation": " | ".join(map(repr, activated_linear.ACTIVATIONS))},
)
