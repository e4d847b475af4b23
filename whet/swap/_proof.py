"""Does a replacement compute what the module computes?  Values and gradients, both ways, against the module in float64."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from typing import cast as cast_to

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_map

from whet.choices import Choices
from whet.figures import error_line
from whet.judge import Verdict, judge
from whet.swap import Journal, Met, Site
from whet.swap._packed import is_plain, keep_packed

FAR = 4  # times what lies between: rows that are farther apart are copied nearer together
WIDE = (torch.float32, torch.float16, torch.bfloat16)


class Float64Everywhere(TorchDispatchMode):
    """What a module would round to a narrower dtype stays in float64: `.float()`, `.to(torch.float32)`, a softmax's dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in WIDE:
            kwargs["dtype"] = torch.float64
        return func(*[torch.float64 if isinstance(a, torch.dtype) and a in WIDE else a for a in args], **kwargs)


def random_kept() -> contextlib.AbstractContextManager:
    """Within the block random numbers may be drawn and seeded; afterwards those of every device go on as they were."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))


def plainly_called(call: Met) -> bool:
    """With one tensor and nothing else."""
    return len(call.args) == 1 and isinstance(call.args[0], torch.Tensor) and not call.kwargs


def in_float64(module: nn.Module, *args: Any) -> Any:
    """What a copy of the module in float64 returns, without gradients."""
    with torch.no_grad(), Float64Everywhere():
        return copied(module, torch.float64)(*args)


def close(got: Any, want: torch.Tensor, share: float) -> bool:
    """The same shape, and nowhere further apart than a share of the largest value."""
    return isinstance(got, torch.Tensor) and got.shape == want.shape and bool(
        (got - want).abs().max() <= share * want.abs().max()
    )


def copied(module: nn.Module, dtype: torch.dtype, own: torch.dtype | None = None) -> nn.Module:
    """A copy in another dtype, with its own config, modes as they are. Packed weights stay, their linears compute in `own`."""
    made: dict[int, Any] = {}  # each tensor is copied once, in the dtype that it is to have
    for t in (*module.parameters(), *module.buffers()):
        if is_plain(t):
            new = t.detach().to(dtype, copy=True)
            made[id(t)] = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
    twin = copy.deepcopy(module, made)._apply(lambda t: t.to(dtype) if is_plain(t) else t)
    if own is not None and own != dtype:
        keep_packed(twin, own)
    return twin


def own_dtype(given: Iterable[torch.Tensor]) -> torch.dtype:
    """What a module computes in: the dtype of the first of its tensors that is not packed."""
    return next((t.dtype for t in given if is_plain(t)), torch.float32)


def laid_as(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy that lies in memory as this tensor does, also where rows are apart or one stands for all: kernels go by that."""
    t = t.detach()
    plain = type(t) is torch.Tensor and t.layout == torch.strided and not t.is_nested and not t.is_quantized
    strides = laid_strides(t) if plain else None
    if strides is None:
        return t.clone() if t.dtype == dtype else t.to(dtype)
    laid = torch.empty_strided(t.shape, strides, dtype=dtype, device=t.device)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    laid[once].copy_(t[once])
    return laid


def laid_strides(t: torch.Tensor) -> list[int] | None:
    """The strides of a copy: the tensor's, but that what lies far apart there lies near here; None where places are shared."""
    strides, last, end = list(t.stride()), 0, 1
    for d in sorted((d for d in range(t.dim()) if t.shape[d] > 1 and strides[d]), key=t.stride):
        if t.stride(d) <= last:
            return None
        last += t.stride(d) * (t.shape[d] - 1)
        strides[d] = t.stride(d) if t.stride(d) <= FAR * end else (end + 15) // 8 * 8  # loads stay aligned
        end = max(end, strides[d] * t.shape[d])
    return strides


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments as fresh leaves: floating tensors in this dtype, asking for a gradient where they did."""
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        if not t.is_floating_point():
            return t.clone()
        return laid_as(t, dtype).requires_grad_(t.requires_grad)

    return tree_map(one, value)


def floating(value: Any) -> dict[str, torch.Tensor]:
    """The floating-point tensors in arguments or results, by where they are."""
    if isinstance(value, torch.Tensor):
        return {"": value} if value.is_floating_point() else {}
    flat = tree_flatten_with_path(dict(value) if isinstance(value, Mapping) else value)[0]
    return {
        "".join(map(str, where)): t for where, t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()
    }


def ran(
    module: nn.Module, call: Met, dtype: torch.dtype, compares: tuple[str, ...], exact: bool = False,
    like: Mapping | None = None,
) -> dict:
    """Outputs, and gradients of every argument and parameter, of one run with the call's arguments in a dtype.

    like   results of another run, in whose dtypes gradients come back from outside
    """
    args, kwargs = cast(call.args, dtype), cast(call.kwargs, dtype)
    params = dict(module.named_parameters())
    held = {n: p.grad for n, p in params.items()}
    for p in params.values():
        p.grad = None
    try:
        with random_kept(), Float64Everywhere() if exact else contextlib.nullcontext():
            torch.manual_seed(0)
            outs = {k: t for k, t in floating(module(*args, **kwargs)).items() if not compares or k in compares}
            wanted = {k: t for k, t in outs.items() if t.requires_grad}
            grads = [upstream(t, (like or {}).get(f"output {k}", t).dtype) for k, t in wanted.items()]
            torch.autograd.backward([*wanted.values()], grads)
        found: dict[str, torch.Tensor | None] = {f"output {k}": t.detach() for k, t in outs.items()}
        leaves = {k: t for k, t in floating((args, kwargs)).items() if t.requires_grad}
        found |= {f"grad argument {k}": t.grad for k, t in leaves.items()}
        return found | {f"grad {n}": p.grad for n, p in params.items() if p.requires_grad}
    finally:
        for n, p in params.items():
            p.grad = held[n]


def upstream(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A gradient to come back from outside, with all digits of a dtype, by default the tensor's."""
    made = torch.Generator(device="cpu").manual_seed(t.numel())
    return torch.randn(t.shape, generator=made).to(dtype or t.dtype).to(t.device, t.dtype)


@contextlib.contextmanager
def edited(module: nn.Module, site: Site, ops: Choices) -> Iterator[None]:
    journal = Journal()
    try:
        journal.make(site.edits(module, ops))
        yield
    finally:
        journal.undo()


def outputs_left(site: Site, call: Met) -> tuple[str, ...]:
    """Which outputs are still there when the site is replaced."""
    own = own_dtype(site.module.parameters())
    twin = copied(site.module, own)
    with random_kept(), edited(twin, site, Choices()):
        return tuple(floating(twin(*cast(call.args, own), **cast(call.kwargs, own))))


class NotedChoices:
    """Choices that note whether any op was asked."""

    def __init__(self, ops: Choices):
        self.ops, self.any = ops, False

    def measured(self, name: str, *args, **options) -> bool:
        return True  # a proof is of the replacement, at sizes that need not be those of real use

    def __getattr__(self, name: str) -> Callable:
        op = getattr(self.ops, name)

        def noted(*args, **options):
            self.any = True
            return op(*args, **options)

        return noted


def prove_forms(site: Site, call: Met, ops: Choices) -> dict[str, Verdict]:
    """{form: its verdict}: one that fails, or raises, costs only itself."""
    found: dict[str, Verdict] = {}
    for one in site.in_each_form():
        try:
            found[one.form] = prove(one, call, ops)
        except Exception as e:
            found[one.form] = Verdict(False, why=error_line(e))
    return found


def prove(site: Site, call: Met, ops: Choices) -> Verdict:
    """The worst verdict over the model's own dtype and float32, of the site's own form."""
    given = (*site.module.parameters(), *floating((call.args, call.kwargs)).values())
    own = own_dtype(given)
    truth_of = copied(site.module, torch.float64, own)
    worst = Verdict(True, 0.0, float("inf"))
    for dtype in dict.fromkeys((own, torch.float32)):
        twin = copied(site.module, dtype, own)
        rounded = Met(cast(call.args, dtype), cast(call.kwargs, dtype))  # what float64 starts from, too
        for mine, theirs in zip(truth_of.parameters(), twin.parameters()):
            if is_plain(mine):
                mine.data.copy_(theirs.data)
        asked = NotedChoices(ops)
        with edited(twin, site, cast_to(Choices, asked)):
            ours = ran(twin, rounded, dtype, site.compares)
            if not any(k.startswith("output") for k in ours):
                return Verdict(False, why="it returns no floating-point tensor that could be compared")
            if site.asks and not asked.any:
                return Verdict(False, why=site.unasked)
            if site.serves is not None and not site.serves(twin):
                return Verdict(False, why="the module did not come to what was to be replaced")
        eager = ran(twin, rounded, dtype, site.compares)
        try:
            truth = ran(truth_of, rounded, torch.float64, site.compares, exact=True, like=eager)
        except Exception as e:
            return Verdict(False, why=f"the module itself, which is what it is held to, fails in float64: {error_line(e)}")
        if set(ours) != set(eager):
            return Verdict(False, why=f"it returns {sorted(ours)}, the module {sorted(eager)}")
        # A whole model's float32 loss carries the errors of its own dtype, and eager's may be near zero by luck.
        verdict = judge(ours, eager, truth, None if site.path else torch.finfo(dtype).eps)
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict, key=lambda v: v.share)
    return worst
