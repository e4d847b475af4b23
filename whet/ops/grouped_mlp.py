"""grouped_mlp: K small MLPs over one shared input, without K launches: a product for all first layers, a kernel for the rest.

Besides the products with x, which are PyTorch's, stock calls move the M*K*H hidden values ten times: SiLU reads and writes
them, the second product reads them; the backward writes dh, copies it to the layout of the first product (two), SiLU's gradient
reads it and the pre-activations and writes its own (three), and down's gradient reads the hidden values. The kernels read the
pre-activations once in each direction and write their gradient once: three times. For the backward x, up, down and the
pre-activations are kept, M*K*H elements less than stock calls keep. x's gradient is one product over K*H, so that nothing
is K times as large as x. Opaque to torch.compile.
"""

import math

import torch
import torch.nn.functional as F

from whet.op import Cost, Impl, Op, autocast_of, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _grouped
from whet.ops._rows import KERNEL_DTYPES
from whet.parts import row_pieces
from whet.torch_ops import Fused, may_ask
from whet.values import families

PADDED, ALIGN = 64, 16  # groups of so many columns or more are padded to a multiple of so many: whole loads in every row
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


def width(H: int) -> int:
    """How many columns a group's pre-activations take."""
    return H if H < PADDED else -(-H // ALIGN) * ALIGN


def stacked(up):
    """The first layers as one (K * W, D): rows of zeros after each group's own where W is over H, else a view."""
    K, H, D = up.shape
    W = width(H)
    return (up if W == H else F.pad(up, (0, 0, 0, W - H))).reshape(K * W, D)


def forward(x, up, down, need_dx, need_dup, need_ddown):
    """y, and the pre-activations where a gradient may be asked for."""
    (K, H, _), flat = up.shape, rows(x)
    pre = F.linear(flat, stacked(up)).view(-1, K, width(H))
    y = _grouped.forward(pre, down).view(*x.shape[:-1], K, down.shape[1])
    return y, pre if need_dx or need_dup or need_ddown else pre.new_empty(0)


def _fake(x, up, down, need_dx, need_dup, need_ddown):
    (K, H, _), M = up.shape, math.prod(x.shape[:-1])
    kept = (M, K, width(H)) if need_dx or need_dup or need_ddown else 0
    return x.new_empty((*x.shape[:-1], K, down.shape[1])), x.new_empty(kept)


def backward(dy, x, up, down, pre, need_dx, need_dup, need_ddown):
    """dx, dup and ddown, each of no elements where it is not asked for."""
    (K, O, H), none = down.shape, dy.new_empty(0)  # noqa: E741
    flat = dy.reshape(-1, K, O).contiguous()
    dpre, ddown = _grouped.backward(flat, pre, down, need_dx or need_dup, need_ddown)
    dx = (dpre.flatten(1) @ stacked(up)).view(*dy.shape[:-2], up.shape[2]) if need_dx else none
    dup = (dpre.flatten(1).t() @ rows(x)).view(K, -1, x.shape[-1])[:, :H].contiguous() if need_dup else none
    return dx, dup, ddown if need_ddown else none


def _bwd_fake(dy, x, up, down, pre, need_dx, need_dup, need_ddown):
    K, _, H = down.shape
    dx = dy.new_empty((*dy.shape[:-2], up.shape[2]) if need_dx else 0)
    return dx, dy.new_empty((K, H, x.shape[-1]) if need_dup else 0), dy.new_empty(down.shape if need_ddown else 0)


def inside_backward(dy, x, up, down, *rest) -> int:
    """Bytes besides: the gradient of the pre-activations."""
    K, O, H = down.shape  # noqa: E741
    return dy.numel() // O * width(H) * dy.element_size()


def _save(args, results):
    """down and the pre-activations always; x only where dup asks for it, up only where dx does."""
    x, up, down, need_dx, need_dup, need_ddown = args
    return (x if need_dup else None, up if need_dx else None, down, results[1]), (need_dx, need_dup, need_ddown)


FUSED = Fused(
    "grouped_mlp",
    "(Tensor x, Tensor up, Tensor down, bool need_dx, bool need_dup, bool need_ddown) -> (Tensor, Tensor)", forward, _fake,
    "(Tensor dy, Tensor? x, Tensor? up, Tensor down, Tensor pre, bool need_dx, bool need_dup, bool need_ddown) "
    "-> (Tensor, Tensor, Tensor)",
    backward, _bwd_fake,
    save=_save,
    grads_to=(0, 1, 2, None, None, None), bwd_inside=inside_backward,
)


def refuses(x, up, down):
    for name, t in (("x", x), ("up", up), ("down", down)):
        if t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    most = _grouped.BLOCK_O
    return None if down.shape[1] <= most else f"down must have at most {most} rows in a group, got {down.shape[1]}"


def run_triton(x, up, down):
    if dtype := autocast_of(x):
        x, up, down = x.to(dtype), up.to(dtype), down.to(dtype)
    return FUSED(x, up, down, may_ask(x), may_ask(up), may_ask(down))


def grouped_refuses(x, up, down):
    """What torch.nn.functional.grouped_mm asks of the second product."""
    if not hasattr(F, "grouped_mm"):
        return "this PyTorch has no torch.nn.functional.grouped_mm"
    dtype = autocast_of(x) or x.dtype
    if dtype != torch.bfloat16:
        return f"x must be bfloat16, got {dtype}"
    H = up.shape[1]
    return f"up must have a multiple of 8 rows in a group, got {H}" if H % 8 else None if x.numel() else "x must not be empty"


def run_grouped_mm(x, up, down):
    """The second product by grouped_mm, which wants rows of 16 bytes: outputs are padded to the next multiple of eight.

    To one that is past theirs, so that any upstream gradient is laid out anew, in such rows.
    """
    (K, H, D), O = up.shape, down.shape[1]  # noqa: E741
    h = F.silu(F.linear(x, up.reshape(K * H, D))).view(-1, K, H)
    wide = F.pad(down.to(h.dtype), (0, 0, 0, 8 - O % 8))
    y = F.grouped_mm(h.transpose(0, 1), wide.transpose(1, 2))[..., :O]
    return y.transpose(0, 1).reshape(*x.shape[:-1], K, O)


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
    impls={
        "torch": Impl(run_torch),
        "grouped_mm": Impl(
            run_grouped_mm, grouped_refuses, capability=(9, 0), words="`torch.nn.functional.grouped_mm` for the second product",
            limits=("dtypes other than bf16", "groups of hidden values that are no multiple of 8", "an empty batch"),
        ),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", "more than 16 outputs"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, D=32, H=100, K=3),
    proof=proof,
    hostile=families(("x",), ("up", "down"), limit=2.0**7),
    pieces=row_pieces("x", added=("up", "down")),
)
