"""cross_entropy: the negative log-probability that a row of logits gives its target."""

import torch
import torch.nn.functional as F

from whet.op import DTYPE_NAMES, Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops import _cross_entropy as kernels
from whet.ops._rows import KERNEL_DTYPES, unit_rows
from whet.parts import row_pieces
from whet.torch_ops import Fused
from whet.values import Option, families, relaid

KINDS = dict(reduction="'none' | 'mean' | 'sum'", softcap="number | None", num_items="number | tensor | None")
TARGETS = (torch.int64, torch.int32)


def reference(
    logits, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, weight=None,
    z_loss=0.0,
):
    """loss = -log softmax(logits)[target], in float32 (float64 for float64 logits); logits (..., V), target (...).

    softcap: softcap * tanh(logits / softcap) first. mean divides by the targets that are not ignore_index, or by num_items
    (a number or a 0-dim tensor, for gradient accumulation). A target outside 0 .. V-1 gives an undefined loss.
    weight (V,): a factor of each class, as in F.cross_entropy; mean then divides by the sum of the targets' weights.
    z_loss: z_loss * logsumexp(logits)^2 is added to each row that counts.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    z, t = rows(logits).to(wide), target.reshape(-1).long()
    z, w = z if softcap is None else softcap * torch.tanh(z / softcap), None if weight is None else weight.detach().to(wide)
    loss = row_losses(z, t, ignore_index, label_smoothing, w) + z_losses(z, t, ignore_index, z_loss)
    if reduction == "none":
        return loss.reshape(target.shape)
    count = num_items if num_items is not None else counted(t, ignore_index, w)
    return (loss.sum() / count).to(wide) if reduction == "mean" else loss.sum()


def row_losses(z, target, ignore_index, label_smoothing, weight):
    """The smoothed, weighted negative log-probability of each row's target; zero where ignored."""
    logp = F.log_softmax(z, dim=-1)
    loss = F.nll_loss(logp, target, weight, ignore_index=ignore_index, reduction="none")
    if not label_smoothing:
        return loss
    mean = (logp if weight is None else logp * weight).mean(-1)
    return (1 - label_smoothing) * loss - label_smoothing * torch.where(target == ignore_index, 0, mean)


def z_losses(z, target, ignore_index, z_loss):
    """z_loss * logsumexp(z)^2 of each row; zero where ignored."""
    return z_loss * torch.where(target == ignore_index, 0, torch.logsumexp(z, -1).square()) if z_loss else 0.0


def counted(target, ignore_index, weight=None):
    """What a mean divides by: the targets that count, or the sum of their weights."""
    counts = target != ignore_index
    return counts.sum() if weight is None else torch.where(counts, weight[torch.where(counts, target, 0).long()], 0).sum()


def some_targets(M, V, device, dtype="int64", ignore_index=-100, ignored="some"):
    """Random targets, of which none, some (the first row, and a fifth) or all are ignored."""
    target = torch.randint(0, V, (M,), device=device)
    if ignored != "none":
        drop = torch.rand(M, device=device) < (2.0 if ignored == "all" else 0.2)
        drop[:1] = M > 1 or ignored == "all"
        target = torch.where(drop, ignore_index, target)
    return target.to(getattr(torch, dtype))


def some_options(M, device, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None):
    """The options of a case as arguments; num_items is 'number' or 'tensor' there."""
    items = {None: None, "number": M + 3, "tensor": torch.full((), M + 3, device=device)}[num_items]
    options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, softcap=softcap)
    return options | dict(num_items=items)


def inputs(
    dtype, device, M, V, layout="contiguous", target_dtype="int64", ignored="some", weighted=False, z_loss=0.0, **options,
):
    args = some_options(M, device, **options)
    logits = lay((2 * torch.randn(M, V, device=device)).to(dtype), layout)
    args |= dict(weight=torch.rand(V, device=device) + 0.5 if weighted else None, z_loss=z_loss)
    return dict(logits=logits, target=some_targets(M, V, device, target_dtype, args["ignore_index"], ignored), **args)


def options_of(target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None):
    """What a case says of the options: only what differs from the defaults, so that keys stay short."""
    items = None if num_items is None else "tensor" if isinstance(num_items, torch.Tensor) else "number"
    given = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, softcap=softcap)
    usual = dict(ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None)
    case = {k: v for k, v in given.items() if v != usual[k]} | ({} if items is None else dict(num_items=items))
    return case if target.dtype == torch.int64 else case | dict(target_dtype=str(target.dtype).removeprefix("torch."))


def targets(change):
    """The family of other targets: change(target, ignore_index, V) gives them."""

    def family(args):
        V = args["logits"].shape[-1] if "logits" in args else args["w"].shape[0]
        new = change(args["target"].clone(), args["ignore_index"], V) if args["target"].numel() else None
        return None if new is None else args | dict(target=new)

    return family


def one_target(target, ignore_index, V):
    target[:-1] = ignore_index
    target[-1] = V - 1
    return target


def some_impossible(args):
    """Hostile values: the first quarter of the vocabulary at minus infinity, as a mask leaves it; no target lies there."""
    V = args["logits"].shape[-1]
    if V < 8 or args["label_smoothing"] or args["softcap"] is not None:
        return None
    logits, target = args["logits"].clone(), args["target"]
    logits[..., : V // 4] = float("-inf")
    moved = torch.where((target != args["ignore_index"]) & (target < V // 4), V - 1, target).to(target.dtype)
    return args | dict(logits=relaid(args["logits"], logits), target=moved)


def both_ends(target, ignore_index, V):
    target[::2], target[1::2] = 0, V - 1
    return target


def loss_pieces(*rows, added=()):
    """`pieces` of a loss whose rows are independent: a part of a mean divides by the targets of the whole call."""
    cut = row_pieces(*rows, added=added, along=("target",))

    def pieces(**args):
        if args["reduction"] == "mean" and args["num_items"] is None:
            weight = None if args.get("weight") is None else args["weight"].double()
            args["num_items"] = counted(args["target"], args["ignore_index"], weight).item()
        yield from cut(**args)

    return pieces


HOSTILE = dict(
    all_targets_ignored=targets(lambda t, ignore_index, V: t.fill_(ignore_index)),
    one_target=targets(one_target),
    targets_at_both_ends=targets(both_ends),
    another_smoothing=Option(dict(label_smoothing=0.3)), another_softcap=Option(dict(softcap=2.5)),
)


def case_of(logits, target, weight=None, z_loss=0.0, **options):
    V = logits.shape[-1]
    case = dict(M=logits.numel() // max(1, V), V=V, layout=layout_of(logits)) | options_of(target, **options)
    return case | ({} if weight is None else dict(weighted=True)) | (dict(z_loss=z_loss) if z_loss else {})


def check_options(target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None):
    if target.dtype not in TARGETS:
        return f"target must be int64 or int32, got {str(target.dtype).removeprefix('torch.')}"
    if not 0.0 <= label_smoothing <= 1.0:
        return f"label_smoothing must be between 0 and 1, got {label_smoothing}"
    if softcap is not None and not softcap > 0.0:
        return f"softcap must be positive or None, got {softcap}"
    if num_items is not None and reduction != "mean":
        return f"num_items needs reduction='mean', which it divides, got reduction={reduction!r}"
    if isinstance(num_items, torch.Tensor):
        if num_items.dtype not in (*TARGETS, *DTYPE_NAMES):
            return f"num_items must be int32, int64 or one of {list(DTYPE_NAMES.values())}, got {num_items.dtype}"
        if num_items.dim() or num_items.device != target.device:
            got = f"{tuple(num_items.shape)} on {num_items.device}"
            return f"num_items must be a number or a 0-dim tensor on {target.device}, got {got}"
    return None


def check(logits, target, weight=None, z_loss=0.0, **options):
    if reason := floating(logits=logits, weight=weight) or same_device(logits=logits, target=target, weight=weight):
        return reason
    if logits.dim() < 1 or logits.shape[-1] < 1:
        return f"logits must have a last dimension of at least 1, got {tuple(logits.shape)}"
    if target.shape != logits.shape[:-1]:
        return f"target must have shape {tuple(logits.shape[:-1])} to match logits.shape[:-1], got {tuple(target.shape)}"
    if weight is not None and weight.shape != logits.shape[-1:]:
        return f"weight must have shape ({logits.shape[-1]},) to match logits.shape[-1], got {tuple(weight.shape)}"
    if z_loss < 0.0:
        return f"z_loss must be at least 0, got {z_loss}"
    return check_options(target, **options)


def cost(logits, target, **options):
    return Cost(
        bytes=nbytes(logits, target) + 4, flops=4 * logits.numel(),
        bwd_bytes=nbytes(logits, target, logits), bwd_flops=4 * logits.numel(),
    )


def forward(logits, target, ignore_index, reduction, smoothing, softcap, num_items):
    z, t = unit_rows(logits), target.reshape(-1).contiguous()
    M, V = z.shape
    loss = torch.empty(target.shape, dtype=torch.float32, device=z.device)  # no view: it may be changed in place
    stats = torch.empty(2, M, dtype=torch.float32, device=z.device)
    kernels.losses(z, V, t, ignore_index, smoothing, softcap, loss, stats)
    if reduction == "none":
        return loss, stats, torch.ones((), dtype=torch.float32, device=z.device)
    loss, scale = kernels.reduced(loss, t, ignore_index, reduction == "mean", num_items)
    return loss, stats, scale


def backward(dloss, logits, target, stats, scale, ignore_index, smoothing, softcap):
    z, t = unit_rows(logits), target.reshape(-1).contiguous()
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    return kernels.dlogits(z, z.shape[1], t, stats, dloss, scale, ignore_index, smoothing, softcap, dz).view(logits.shape)


def _fake(logits, target, ignore_index, reduction, smoothing, softcap, num_items):
    def wide(*shape):
        return logits.new_empty(shape, dtype=torch.float32)

    return wide(*target.shape) if reduction == "none" else wide(), wide(2, logits.numel() // logits.shape[-1]), wide()


FUSED = Fused(
    "cross_entropy",
    "(Tensor logits, Tensor target, int ignore_index, str reduction, float smoothing, float softcap, Tensor? num_items)"
    " -> (Tensor, Tensor, Tensor)", forward, _fake,
    "(Tensor dloss, Tensor logits, Tensor target, Tensor stats, Tensor scale, int ignore_index, float smoothing, float softcap)"
    " -> Tensor", backward, lambda dloss, logits, *_: logits.new_empty(logits.shape),
    save=lambda args, results: ((args[0], args[1], results[1], results[2]), (args[2], args[4], args[5])),
    grads_to=(0, None, None, None, None, None, None),
    visible=True, bwd_visible=True,
)


def refuses(logits, target, weight=None, z_loss=0.0, **options):
    if logits.dtype not in KERNEL_DTYPES:
        return f"logits must be float32, float16 or bfloat16, got {logits.dtype}"
    if weight is not None:
        return f"weight must be None, got class weights of shape {tuple(weight.shape)}; use impl='torch'"
    return f"z_loss must be 0, got {z_loss}; use impl='torch'" if z_loss else None


def run_triton(
    logits, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, weight=None,
    z_loss=0.0,
):
    items = kernels.as_tensor(num_items, logits.device)
    return FUSED(logits, target, ignore_index, reduction, float(label_smoothing), float(softcap or 0.0), items)


def run_torch(
    logits, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, weight=None,
    z_loss=0.0,
):
    z, t = rows(logits).to(torch.promote_types(logits.dtype, torch.float32)), target.reshape(-1).long()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w, how = None if weight is None else weight.detach().to(z.dtype), reduction if num_items is None else "sum"
    loss = F.cross_entropy(z, t, w, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing)
    if z_loss:
        more = z_losses(z, t, ignore_index, z_loss)
        loss = loss + (more if how == "none" else more.sum() if how == "sum" else more.sum() / counted(t, ignore_index, w))
    return loss.view(target.shape) if reduction == "none" else loss if num_items is None else (loss / num_items).to(loss.dtype)


def liger_refuses(logits, target, weight=None, z_loss=0.0, **options):
    if reason := refuses(logits, target, weight, z_loss):
        return reason
    return None if logits.numel() else "logits must not be empty"


def run_liger(
    logits, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, weight=None,
    z_loss=0.0,
):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It writes the gradient over its input and returns the loss in the input's dtype: both ask for a float32 copy.
    z, how = rows(logits).to(torch.float32, copy=True), reduction if num_items is None else "sum"
    loss = LigerCrossEntropyFunction.apply(
        z, target.reshape(-1).contiguous(), None, ignore_index, 0.0, label_smoothing, how, softcap, False
    )[0]
    return loss.view(target.shape) if reduction == "none" else loss if num_items is None else (loss / num_items).to(loss.dtype)


OP = Op(
    name="cross_entropy",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, V=64), dict(M=7, V=100), dict(M=33, V=257, ignored="none"), dict(M=0, V=64), dict(M=4, V=1),
        dict(M=3, V=4099), dict(M=6, V=96, ignored="all"), dict(M=6, V=96, ignored="all", reduction="sum"),
        dict(M=9, V=96, layout="sliced"), dict(M=9, V=96, layout="transposed"), dict(M=9, V=96, layout="expanded"),
        dict(M=9, V=100, reduction="none"), dict(M=9, V=100, reduction="sum"), dict(M=0, V=64, reduction="none"),
        dict(M=9, V=100, label_smoothing=0.1), dict(M=9, V=100, softcap=5.0), dict(M=9, V=100, num_items="number"),
        dict(M=9, V=100, num_items="tensor"), dict(M=9, V=100, target_dtype="int32", ignore_index=3),
        dict(M=9, V=301, reduction="none", label_smoothing=0.2, softcap=10.0, ignore_index=0, layout="sliced"),
        dict(M=9, V=100, weighted=True), dict(M=9, V=100, weighted=True, reduction="none", label_smoothing=0.1),
        dict(M=9, V=100, z_loss=1e-2), dict(M=9, V=100, z_loss=1e-2, weighted=True, softcap=5.0),
        dict(M=9, V=100, z_loss=1e-2, weighted=True, num_items="number", label_smoothing=0.1),
        dict(M=9, V=100, z_loss=1e-2, reduction="none"), dict(M=9, V=100, z_loss=1e-2, reduction="sum", weighted=True),
    ),
    shapes={f"{M}x{V}": dict(M=M, V=V) for M, V in ((8192, 50304), (8192, 151936), (1024, 1000), (4096, 32000))},
    cost=cost,
    grads=("logits",),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", "class weights", "a z_loss"),
        ),
        "liger": Impl(
            run_liger, liger_refuses, needs="liger_kernel", no_graph="reads the number of targets back to the host",
            limits=("dtypes other than fp32, fp16, bf16", "class weights", "a z_loss", "an empty batch"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, V=300),
    hostile=families(("logits",), limit=2.0**12, impossible_tokens=some_impossible, **HOSTILE),
    pieces=loss_pieces("logits"),
    kinds=KINDS,
)
