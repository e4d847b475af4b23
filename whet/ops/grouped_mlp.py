"""grouped_mlp: K small MLPs over one shared input, y[..., k, :] = silu(x @ up[k].T) @ down[k].T, without K launches."""

import torch
import torch.nn.functional as F

from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, same_device
from whet.parts import row_pieces
from whet.values import families

PROVED = 2**28  # hidden values of the largest call whose float64 oracle is made at once


def reference(x, up, down):
    """y[..., k, :] = silu(x @ up[k].T) @ down[k].T.  x (..., D);  up (K, H, D);  down (K, O, H);  y (..., K, O).

    The hidden values are rounded to the dtype of the product before and after the activation.
    """
    ys = []
    for into, out in zip(up, down):
        pre = F.linear(x, into)
        h = pre.to(torch.promote_types(pre.dtype, torch.float32))
        ys.append(F.linear((h * torch.sigmoid(h)).to(pre.dtype), out))
    return torch.stack(ys, dim=-2)


def inputs(
    dtype, device, M, D, H, K, O, layout="contiguous", up_layout="contiguous", down_layout="contiguous",  # noqa: E741
):
    x = lay(torch.randn(M, D, dtype=dtype, device=device), layout)
    up = lay((D**-0.5 * torch.randn(K, H, D, device=device)).to(dtype), up_layout)
    down = lay((H**-0.5 * torch.randn(K, O, H, device=device)).to(dtype), down_layout)
    return dict(x=x, up=up, down=down)


def case_of(x, up, down):
    K, H, D = up.shape
    case = dict(M=x.numel() // max(1, D), D=D, H=H, K=K, O=down.shape[1], layout=layout_of(x))
    return case | {f"{name}_layout": layout_of(t) for name, t in (("up", up), ("down", down)) if not t.is_contiguous()}


def check(x, up, down):
    if reason := floating(x=x, up=up, down=down) or same_device(x=x, up=up, down=down):
        return reason
    D = x.shape[-1] if x.dim() else "D"
    if up.dim() != 3 or up.shape[2] != D or up.numel() < 1:
        return f"up must have shape (K, H, {D}) to match x.shape[-1], got {tuple(up.shape)}"
    K, H, _ = up.shape
    if down.dim() != 3 or down.shape[0] != K or down.shape[2] != H or down.numel() < 1:
        return f"down must have shape ({K}, O, {H}) to match up, got {tuple(down.shape)}"
    if not torch.is_autocast_enabled(x.device.type):
        for name, t in (("up", up), ("down", down)):
            if t.dtype != x.dtype:
                return f"{name} must have x's dtype {x.dtype} outside autocast, got {t.dtype}"
    return None


def cost(x, up, down):
    (K, H, _), M = up.shape, x.numel() // max(1, x.shape[-1])
    products, given, y = 2 * M * (up.numel() + down.numel()), nbytes(x, up, down), M * K * down.shape[1] * x.element_size()
    return Cost(
        bytes=given + y, flops=products + 5 * M * K * H, bwd_bytes=2 * given + y, bwd_flops=2 * products + 10 * M * K * H
    )


def proof(case):
    """The case with so few rows that the oracle's hidden values fit."""
    return case | dict(M=min(case["M"], max(1, PROVED // (case["K"] * case["H"]))))


def run_torch(x, up, down):
    """One product for all first layers, which shares x and adds up its gradient; a batched one, strided, for the second."""
    (K, H, D), O = up.shape, down.shape[1]  # noqa: E741
    h = F.silu(F.linear(x, up.reshape(K * H, D))).view(-1, K, H)
    return torch.bmm(h.transpose(0, 1), down.transpose(1, 2)).transpose(0, 1).reshape(*x.shape[:-1], K, O)


OP = Op(
    name="grouped_mlp",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, D=16, H=32, K=2, O=3), dict(M=7, D=20, H=37, K=3, O=3), dict(M=33, D=16, H=64, K=1, O=4),
        dict(M=0, D=16, H=24, K=2, O=3), dict(M=5, D=7, H=13, K=4, O=1), dict(M=3, D=1, H=1, K=1, O=1),
        dict(M=70, D=24, H=136, K=2, O=16), dict(M=6, D=16, H=24, K=3, O=17), dict(M=140, D=8, H=21, K=2, O=5),
        dict(M=9, D=16, H=40, K=3, O=3, layout="sliced"), dict(M=9, D=16, H=40, K=3, O=3, layout="transposed"),
        dict(M=9, D=16, H=40, K=3, O=3, layout="expanded"), dict(M=9, D=16, H=24, K=3, O=3, up_layout="sliced"),
        dict(M=9, D=16, H=24, K=3, O=3, up_layout="transposed"), dict(M=9, D=16, H=24, K=3, O=3, down_layout="sliced"),
        dict(M=9, D=16, H=27, K=3, O=3, up_layout="expanded", down_layout="transposed"),
    ),
    shapes={
        "16000x512x1408x10x3": dict(M=16000, D=512, H=1408, K=10, O=3),
        "128000x512x1376x10x3": dict(M=128000, D=512, H=1376, K=10, O=3),
        "32000x512x1365x10x3": dict(M=32000, D=512, H=1365, K=10, O=3),
    },
    cost=cost,
    grads=("x", "up", "down"),
    impls={"torch": Impl(run_torch)},
    dynamic=("M",),
    tiny=dict(M=16, D=32, H=100, K=3),
    proof=proof,
    hostile=families(("x",), ("up", "down"), limit=2.0**7),
    pieces=row_pieces("x", added=("up", "down")),
)
