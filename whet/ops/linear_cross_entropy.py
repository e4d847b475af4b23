"""linear_cross_entropy: the loss of the last layer, x @ w.T + b and cross_entropy in one, without ever holding all logits.

Fuses   the projection, the softmax and both gradients: logits live in one chunk of rows at a time.
Moves   three matrix products, and each chunk of logits four times over; no M*V buffer. Extra memory: a chunk (CHUNK_BYTES, w's
        size, or MANY_BYTES where rows are many), dx and dw. Where V is misaligned also a copy of w with rows of
        zeros, read and written once a walk over the chunks and held for that walk alone: of a vocabulary of 50257 all three
        products are 50304 wide. An aligned V has no copy; nor has a misaligned D, with which no product has only aligned rows.
Rounds  logits to x's dtype, as F.linear does; the softmax in fp32; its gradient, unscaled, to x's dtype. dx is rounded after
        its product and after the upstream scale. dw is summed over chunks in fp32 and rounded once, or, for bf16 weights
        whose fp32 sum would pass ACCUMULATOR_BYTES, summed in bf16 with one rounding per chunk. db is summed in fp32.
        precision="fp8": x and w to E4M3, the gradient of the logits to E5M2; the products add in fp32, x @ w.T of a D up to
        1024 in the 14 bits of the tensor cores. Extra memory: a chunk two and a half times, x and w twice in a byte.
"""

import torch
import torch.nn.functional as F
import triton

from whet.alignment import aligned, pads
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _cross_entropy as kernels
from whet.ops._fp8 import LOWEST, rounded
from whet.ops._fp8_loss import NO_FP8, fp8_refuses, run_fp8
from whet.ops._loss_chunks import chunks, scaled, sum_dtype
from whet.ops._loss_products import LossProducts
from whet.ops._loss_products import inside as inside_products
from whet.ops._products import by_halves, floored
from whet.ops._rows import KERNEL_DTYPES, unit_rows
from whet.ops.cross_entropy import HOSTILE, KINDS, check_options, loss_pieces, options_of, some_options, some_targets
from whet.ops.cross_entropy import reference as loss_of_logits
from whet.ops.cross_entropy import run_torch as torch_loss_of_logits
from whet.torch_ops import Fused
from whet.values import families

COLUMNS = 16  # logits rows lie a multiple apart: whole vectors for the row kernels, which Triton sees in multiples of 16


def reference(
    x, w, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, b=None,
    precision=None,
):
    """cross_entropy(x @ w.T + b, target): x (..., D), w (V, D), target (...), b (V,) or None; the rest is cross_entropy's.

    precision: "fp8" rounds x and w to E4M3, each with one power-of-two scale; the gradient passes straight through. float64
        is not rounded. The kernel rounds the gradient of the logits to E5M2 as well.
    """
    if precision == "fp8":
        x, w = rounded(x), rounded(w)
    return loss_of_logits(F.linear(x, w, b), target, ignore_index, reduction, label_smoothing, softcap, num_items)


def inputs(
    dtype, device, M, D, V, layout="contiguous", w_layout="contiguous", target_dtype="int64", ignored="some", bias=False,
    precision=None, **options,
):
    args = some_options(M, device, **options)
    x = lay(torch.randn(M, D, device=device).to(dtype), layout)
    w = lay((2 * D**-0.5 * torch.randn(V, D, device=device)).to(dtype), w_layout)
    target = some_targets(M, V, device, target_dtype, args["ignore_index"], ignored)
    b = torch.randn(V, device=device).to(dtype) if bias else None
    return dict(x=x, w=w, target=target, **args, b=b, precision=precision)


def case_of(x, w, target, b=None, precision=None, **options):
    case = dict(M=x.numel() // max(1, x.shape[-1]), D=x.shape[-1], V=w.shape[0], layout=layout_of(x))
    case |= {} if w.is_contiguous() else dict(w_layout=layout_of(w))
    case |= ({} if b is None else dict(bias=True)) | ({} if precision is None else dict(precision=precision))
    return case | options_of(target, **options)


def check(x, w, target, b=None, precision=None, **options):
    if reason := floating(x=x, w=w, b=b) or same_device(x=x, w=w, target=target, b=b):
        return reason
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1] or w.numel() < 1:
        return f"w must have shape (V, {x.shape[-1] if x.dim() else 'D'}) to match x.shape[-1], got {tuple(w.shape)}"
    if target.shape != x.shape[:-1]:
        return f"target must have shape {tuple(x.shape[:-1])} to match x.shape[:-1], got {tuple(target.shape)}"
    if w.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"w must have x's dtype {x.dtype} outside autocast, got {w.dtype}"
    if b is not None and b.shape != w.shape[:1]:
        return f"b must have shape ({w.shape[0]},) to match w.shape[0], got {tuple(b.shape)}"
    if b is not None and b.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"b must have x's dtype {x.dtype} outside autocast, got {b.dtype}"
    return check_options(target, **options)


def cost(x, w, target, b=None, **options):
    product, given = 2 * x.numel() * w.shape[0], nbytes(x, w, target, b)
    how = "float8_e4m3fn" if options.get("precision") == "fp8" else ""
    bwd = dict(bwd_bytes=given + nbytes(x, w, b), bwd_flops=2 * product, bwd_dtype=how)
    made = Cost(bytes=given + 4, flops=product, dtype=how, **bwd)
    return made if how else floored(made, x)


def zero_rows(w: torch.Tensor) -> int:
    """How many rows of zeros w is padded with: rows aligned in memory are not enough where a product has an odd size.

    Halves have whole rows of their own.
    """
    if by_halves(w):
        return 0
    return pads(w.shape[0], w.dtype) if aligned(w.shape[1], w.dtype) else 0


def padded(t: torch.Tensor, more: int) -> torch.Tensor:
    """A copy with so many rows of zeros at its end; itself where there are none to add, or nothing to add them to."""
    if not more or not t.numel():
        return t
    out = torch.empty((t.shape[0] + more, *t.shape[1:]), dtype=t.dtype, device=t.device)
    out[: t.shape[0]].copy_(t)
    out[t.shape[0] :].zero_()
    return out


class Walk:
    """The rows of one call, chunk by chunk, with the gradients that were asked for. A b of no elements is none.

    w and b are padded to the width of the products; so is the sum of dw, whose first V rows are the gradient: a view.
    """

    def __init__(self, x, w, b, target, need_dx: bool, need_dw: bool, need_db: bool):
        self.x, self.target = unit_rows(x), target.reshape(-1).contiguous()
        self.M, self.V = self.x.shape[0], w.shape[0]
        more = zero_rows(w) if self.M else 0
        self.w, self.width = padded(w, more), self.V + more
        self.products = LossProducts(self.w, padded(b, more))
        self.dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
        self.dw = torch.empty(self.w.shape if need_dw else 0, dtype=sum_dtype(w), device=x.device)
        self.db = torch.zeros(b.shape if need_db else 0, dtype=torch.float32, device=x.device)
        if not self.M:
            self.dw.zero_()

    def __iter__(self):
        """(rows, logits of those rows) with logits padded to whole COLUMNS; the buffer is used again for the next."""
        P = triton.cdiv(self.width, COLUMNS) * COLUMNS
        cuts = chunks(self.M, P * self.x.element_size(), self.w.numel() * self.w.element_size())
        buffer = torch.empty(cuts[0].stop if cuts else 0, P, dtype=self.x.dtype, device=self.x.device)
        for cut in cuts:
            z = buffer[: cut.stop - cut.start]
            self.products.logits(self.x[cut], z[:, : self.width])
            yield cut, z

    def add(self, cut: slice, dz: torch.Tensor):
        dz = dz[:, : self.width]
        if self.dx.numel():
            self.products.dx(dz, self.dx.view(self.x.shape)[cut])
        if self.dw.numel():
            self.products.add_dw(self.dw, dz, self.x[cut], first=cut.start == 0)
        if self.db.numel():
            self.db += dz[:, : self.V].sum(0, dtype=torch.float32)


def forward(x, w, target, ignore_index, reduction, smoothing, softcap, num_items, b, need_dx, need_dw, need_db):
    """mean and sum: every row has the same upstream gradient, so gradients are made here, unscaled, from logits at hand."""
    walk = Walk(x, w, b, target, need_dx, need_dw, need_db)
    loss = torch.empty(walk.M, dtype=torch.float32, device=x.device)
    stats = torch.empty(2, walk.M, dtype=torch.float32, device=x.device)
    for cut, z in walk:
        if need_dx or need_dw or need_db:
            kernels.losses_and_dlogits(z, walk.V, walk.target[cut], ignore_index, smoothing, softcap, loss[cut])
            walk.add(cut, z)
        else:
            kernels.losses(z, walk.V, walk.target[cut], ignore_index, smoothing, softcap, loss[cut], stats[:, cut])
    loss, scale = kernels.reduced(loss, walk.target, ignore_index, reduction == "mean", num_items)
    return loss, walk.dx, walk.dw[: walk.V], walk.db, scale


def backward(dloss, dx, dw, db, scale):
    return tuple(scaled(grad, dloss, scale, dx.dtype) for grad in (dx, dw, db))


def rows_forward(x, w, target, ignore_index, smoothing, softcap, b, need_dx, need_dw, need_db):
    """none: the upstream gradient differs by row and is not known yet; keep what the softmax is made again from."""
    walk = Walk(x, w, b, target, False, False, False)
    out = torch.empty(target.shape, dtype=torch.float32, device=x.device)  # no view: it may be changed in place
    loss = out.view(-1)
    stats = torch.empty(2, walk.M, dtype=torch.float32, device=x.device)
    for cut, z in walk:
        kernels.losses(z, walk.V, walk.target[cut], ignore_index, smoothing, softcap, loss[cut], stats[:, cut])
    return out, stats


def rows_backward(dloss, x, w, target, b, stats, ignore_index, smoothing, softcap, need_dx, need_dw, need_db):
    walk = Walk(x, w, b, target, need_dx, need_dw, need_db)
    dloss, one = dloss.reshape(-1), torch.ones((), dtype=torch.float32, device=x.device)
    for cut, z in walk:
        kernels.dlogits(z, walk.V, walk.target[cut], stats[:, cut], dloss[cut], one, ignore_index, smoothing, softcap, z)
        walk.add(cut, z)
    return walk.dx, walk.dw[: walk.V].to(w.dtype), walk.db.to(b.dtype)


def _fake(x, w, target, ignore_index, reduction, smoothing, softcap, num_items, b, need_dx, need_dw, need_db):
    scalar = x.new_empty((), dtype=torch.float32)
    dw = w.new_empty(w.shape if need_dw else 0, dtype=sum_dtype(w))
    db = b.new_empty(b.shape if need_db else 0, dtype=torch.float32)
    return scalar, x.new_empty(x.shape if need_dx else 0), dw, db, torch.empty_like(scalar)


def _rows_fake(x, w, target, ignore_index, smoothing, softcap, b, need_dx, need_dw, need_db):
    return x.new_empty(target.shape, dtype=torch.float32), x.new_empty((2, target.numel()), dtype=torch.float32)


def _rows_bwd_fake(dloss, x, w, target, b, stats, ignore_index, smoothing, softcap, need_dx, need_dw, need_db):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in ((x, need_dx), (w, need_dw), (b, need_db)))


def inside_rows_backward(dloss, x, w, target, b, stats, ignore_index, smoothing, softcap, need_dx, need_dw, need_db) -> int:
    """The chunk again, and the sum of dw until it is rounded."""
    summed = w.numel() * sum_dtype(w).itemsize if need_dw and sum_dtype(w) != w.dtype else 0
    return inside(x, w, need_dx, need_dw, need_db) + summed


def inside(x, w, *rest) -> int:
    """Bytes of a chunk of logits, of a padded w, and of what the products take besides. rest ends in what is asked for."""
    (V, D), size = w.shape, x.element_size()
    width = V + zero_rows(w)
    row = triton.cdiv(width, COLUMNS) * COLUMNS * size
    cuts = chunks(x.numel() // D, row, width * D * size)
    rows = cuts[0].stop if cuts else 0
    besides = inside_products(x, width, D, rows, len(cuts), *rest[-3:-1])
    return rows * row + (width * D * size if width > V else 0) + besides


FUSED = Fused(
    "linear_cross_entropy",
    "(Tensor x, Tensor w, Tensor target, int ignore_index, str reduction, float smoothing, float softcap, Tensor? num_items,"
    " Tensor b, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", forward, _fake,
    "(Tensor dloss, Tensor dx, Tensor dw, Tensor db, Tensor scale) -> (Tensor, Tensor, Tensor)", backward,
    lambda dloss, dx, dw, db, scale: tuple(dx.new_empty(grad.shape) for grad in (dx, dw, db)),
    save=lambda args, results: (results[1:], ()), inside=inside,
    grads_to=(0, 1) + (None,) * 6 + (2,) + (None,) * 3,
)

ROWS = Fused(
    "linear_cross_entropy_rows",
    "(Tensor x, Tensor w, Tensor target, int ignore_index, float smoothing, float softcap, Tensor b,"
    " bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor)", rows_forward, _rows_fake,
    "(Tensor dloss, Tensor x, Tensor w, Tensor target, Tensor b, Tensor stats, int ignore_index, float smoothing,"
    " float softcap, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)", rows_backward, _rows_bwd_fake,
    save=lambda args, results: ((*args[:3], args[6], results[1]), (*args[3:6], *args[7:])),
    inside=lambda x, w, *rest: inside(x, w, False, False, False),  # gradients come in the backward
    bwd_inside=inside_rows_backward,
    grads_to=(0, 1) + (None,) * 4 + (2,) + (None,) * 3,
)


def refuses(x, w, target, precision=None, **options):
    if precision is not None:
        return NO_FP8
    if x.dtype not in KERNEL_DTYPES or w.dtype not in KERNEL_DTYPES:
        return f"x and w must be float32, float16 or bfloat16, got {x.dtype} and {w.dtype}"
    return None


def run_triton(
    x, w, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, b=None,
    precision=None,
):
    b = x.new_empty(0) if b is None else b
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
    grad = torch.is_grad_enabled()
    need_dx, need_dw = grad and x.requires_grad, grad and w.requires_grad
    need = need_dx, need_dw, grad and b.requires_grad
    smoothing, cap = float(label_smoothing), float(softcap or 0.0)
    if reduction == "none":
        return ROWS(x, w, target, ignore_index, smoothing, cap, b, *need)
    items = kernels.as_tensor(num_items, x.device)
    return FUSED(x, w, target, ignore_index, reduction, smoothing, cap, items, b, *need)


def torch_refuses(x, w, target, precision=None, **options):
    return None if precision is None else NO_FP8


def run_torch(
    x, w, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, b=None,
    precision=None,
):
    return torch_loss_of_logits(F.linear(x, w, b), target, ignore_index, reduction, label_smoothing, softcap, num_items)


def liger_refuses(x, w, target, b=None, precision=None, **options):
    if precision is not None:
        return NO_FP8
    if x.dtype not in KERNEL_DTYPES:
        return f"x must be float32, float16 or bfloat16, got {x.dtype}"
    if (w.requires_grad or b is not None and b.requires_grad) and not x.requires_grad:
        return "x must require a gradient when w or b does: without it none of w or b is made"
    return None if x.numel() else "x must not be empty"


def run_liger(
    x, w, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, b=None,
    precision=None,
):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    how = reduction if num_items is None else "sum"
    loss = LigerFusedLinearCrossEntropyFunction.apply(
        rows(x), w, target.reshape(-1).contiguous(), b, None, ignore_index, 0.0, label_smoothing, how, softcap
    )[0]
    return loss.view(target.shape) if reduction == "none" else loss if num_items is None else (loss / num_items).to(loss.dtype)


OP = Op(
    name="linear_cross_entropy",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, D=16, V=64), dict(M=7, D=24, V=100), dict(M=33, D=32, V=257, ignored="none"), dict(M=0, D=16, V=64),
        dict(M=5, D=7, V=37), dict(M=6, D=16, V=96, ignored="all", reduction="sum"), dict(M=6, D=16, V=96, ignored="all"),
        dict(M=9, D=16, V=96, layout="sliced"), dict(M=9, D=16, V=96, layout="transposed"),
        dict(M=9, D=16, V=96, layout="expanded"), dict(M=9, D=16, V=96, w_layout="transposed"),
        dict(M=9, D=16, V=100, reduction="none"), dict(M=0, D=16, V=64, reduction="none"),
        dict(M=9, D=16, V=100, reduction="sum"), dict(M=9, D=16, V=100, label_smoothing=0.1),
        dict(M=9, D=16, V=100, softcap=5.0),
        dict(M=9, D=16, V=100, num_items="number"), dict(M=9, D=16, V=100, num_items="tensor"),
        dict(M=9, D=16, V=100, target_dtype="int32", ignore_index=3),
        dict(M=9, D=24, V=301, reduction="none", label_smoothing=0.2, softcap=10.0, ignore_index=0, layout="sliced"),
        dict(M=7, D=24, V=100, bias=True), dict(M=0, D=16, V=64, bias=True),
        dict(M=9, D=16, V=100, bias=True, reduction="none"),
        dict(M=9, D=16, V=101, bias=True, label_smoothing=0.1, softcap=5.0, num_items="tensor", layout="transposed"),
        dict(M=37, D=48, V=101, precision="fp8", bias=True), dict(M=0, D=16, V=64, precision="fp8"),
        dict(M=9, D=32, V=300, precision="fp8", softcap=5.0, num_items="tensor", layout="sliced"),
        dict(M=9, D=16, V=100, precision="fp8", reduction="sum", w_layout="transposed", target_dtype="int32", ignore_index=3),
    ),
    shapes={f"{M}x{D}x{V}": dict(M=M, D=D, V=V) for M, D, V in ((8192, 768, 50304), (8192, 1024, 151936), (1024, 512, 1000))}
    | {"8192x768x50304 fp8": dict(M=8192, D=768, V=50304, precision="fp8")},
    cost=cost,
    grads=("x", "w", "b"),
    impls={
        "torch": Impl(run_torch, torch_refuses, limits=("precision='fp8'",)),
        "triton": Impl(run_triton, refuses, needs="triton", limits=("precision='fp8'", "dtypes other than fp32, fp16, bf16")),
        "triton_fp8": Impl(
            run_fp8, fp8_refuses, needs="triton", capability=LOWEST, implies=dict(precision="fp8"),
            words="whet's own kernels around products in FP8",
            limits=(
                "any precision but 'fp8'", "dtypes other than bf16", "reduction='none'", "label smoothing",
                "one row expanded as w", "a width that is no multiple of 16",
            ),
        ),
        "liger": Impl(
            run_liger, liger_refuses, needs="liger_kernel", no_graph="reads the number of targets back to the host",
            limits=(
                "precision='fp8'", "dtypes other than fp32, fp16, bf16", "an empty batch",
                "a gradient of w or b without one of x",
            ),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, D=32, V=300),
    hostile=families(("x",), ("w", "b"), limit=2.0**8, **HOSTILE),
    coarse=("output 0",),
    pieces=loss_pieces("x", added=("w", "b")),
    kinds=KINDS | dict(precision="None | 'fp8'"),
)
