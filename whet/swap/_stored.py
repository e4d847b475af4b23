"""whet.pad_weights: misaligned products of a live model at an aligned width, the zeros stored with the weights.

Called before the optimizer is made. What whet.optimize pads as it runs, by a copy of each weight in each step, is padded once.
Each MLP is tried on a copy in float64: values and gradients are its own, and every gradient of what was added is exactly zero.
Then the whole model is: what a layer gives may be read by anything.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whet.alignment import padded_size
from whet.figures import error_line
from whet.padding import cut as cut_to
from whet.padding import fill_state, holders, logical_shapes, noted, pad_inner, pad_linear, unpad
from whet.swap import Left, Met
from whet.swap._begin import refuse
from whet.swap._given import usable
from whet.swap._packed import is_plain
from whet.swap._padded import odd, only_weights, pads_of, sizes
from whet.swap._proof import Float64Everywhere, cast, copied, floating, plainly_called, random_kept
from whet.swap._replace import as_call, cut, met_in, quiet, uncached
from whet.swap.aligned_mlp import inners
from whet.swap.gated_mlp import layouts

CLOSE = 1e-9  # of the largest value, in float64: sums in another order and nothing else


@dataclass(frozen=True)
class StoredPad:
    """One place that is stored padded: linears inside a module between which all is wider, or the sides of one linear.

    firsts, last   names inside the module at the path; last "": the module itself is the linear
    inputs, outputs   sizes that it is stored at, 0 for as they are
    """

    path: str
    words: str
    firsts: tuple[str, ...] = ()
    last: str = ""
    inputs: int = 0
    outputs: int = 0

    def apply(self, model: nn.Module, within: nn.Module | None = None) -> None:
        """within: the module itself, where it stands alone"""
        module = within if within is not None else model.get_submodule(self.path)
        if self.last:
            pad_inner([getattr(module, n) for n in self.firsts], getattr(module, self.last), self.inputs, model)
        else:
            pad_linear(module, self.inputs, self.outputs, model)


@dataclass
class StoredPads:
    """What pad_weights() did: print it."""

    made: list[StoredPad] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    more: int = 0  # elements that were added

    def __str__(self) -> str:
        head = f"{len(self.made)} stored padded, {self.more:,} elements of zeros added" if self.made else "nothing was padded"
        lines = [f"{pad.path or 'the model'}: {pad.words}" for pad in self.made]
        return "\n".join([head, *lines, *(f"{left.path or 'the model'} is left: {left.why}" for left in self.left)])


def pad_weights(
    model: nn.Module, batch: Any, dtype: torch.dtype | None = None, optimizer: torch.optim.Optimizer | None = None
) -> StoredPads:
    """Store misaligned weights of a live model with zeros up to an aligned width; in exact arithmetic the function stays.

    batch      what the model's forward takes, a small one will do
    dtype      what products are computed in, where that is an autocast's: torch.bfloat16; None: what they are now
    optimizer  one that was made before; what it remembers of steps is padded too
    Call it before the optimizer is made, before DDP, FSDP or torch.compile is put around the model, and before whet.optimize.
    Parameters stay the objects that they are; parameters(), their gradients and an optimizer's state have the padded shape.
    state_dict() and checkpoints have the logical one, whet.unpad_weights(model, optimizer) takes it all back.
    """
    refuse(model, None, who="pad_weights")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"pad_weights: dtype must be a torch.dtype, such as torch.bfloat16, or None, got {dtype!r}")
    if "whet" in vars(model):
        raise ValueError("pad_weights: the model was optimised; call whet.pad_weights first, or whet.restore(model) before it")
    call = cut(usable(as_call(batch)))
    report, before = StoredPads(), sum(p.numel() for p in model.parameters())
    kind = next(model.parameters()).device.type
    set_to = torch.autocast(kind, dtype) if dtype is not None and dtype != torch.float32 else contextlib.nullcontext()
    with quiet(model), uncached(model), random_kept():
        with set_to:
            met = met_in(model, call)
            proposed = list(found(model, met, report.left))
        twin = copied(model, torch.float64).eval()
        for group in (proposed, *([p] for p in proposed)):
            todo = [p for p in group if p not in report.made]
            why = differs(twin, call, [*report.made, *todo]) if todo else ""
            if not why:
                report.made += todo
            elif len(group) == 1:
                report.left.append(Left(todo[0].path, f"{todo[0].words}: {why}"))
    for pad in report.made:
        pad.apply(model)
    if optimizer is not None:
        fill_state(model, optimizer)
    report.more = sum(p.numel() for p in model.parameters()) - before
    return report


def unpad_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Weights that pad_weights() stored padded, and what this optimizer remembers of them, at their own shapes, values kept."""
    if "whet" in vars(model):
        raise ValueError("unpad_weights: the model was optimised as it is stored; call whet.restore(model) first")
    return unpad(model, optimizer)


def found(model: nn.Module, met: dict[str, Met], left: list[Left]) -> Iterator[StoredPad]:
    """What can be stored padded, MLPs first, each proved by itself; a linear that is only part of one is not padded alone."""
    wider: dict[int, tuple[int, int]] = {}  # of linears inside MLPs: zeros that their inputs and outputs are given there
    for path, module in model.named_modules():
        if path not in met or not plainly_called(met[path]) or any(id(m) in wider for m in module.children()):
            continue
        for inner in inners(module):
            linears, width = [getattr(module, n) for n in inner.names], padded_size(inner.size)
            words = f"inner size {inner.size} between {', '.join(inner.names)} as {width}"
            pad = StoredPad(path, words, inner.firsts, inner.last, width)
            if tied := [p for m in linears for p in m.parameters(recurse=False) if len(holders(model, p)) > 1]:
                left.append(Left(path, f"{words}: a weight of shape {tuple(tied[0].shape)} is shared with another module"))
            elif not (why := unlike(module, pad, met[path])):
                yield pad
                wider |= {id(m): (0, 1) for m in linears[:-1]} | {id(linears[-1]): (1, 0)}
                break
            elif plain_mlp(module):
                left.append(Left(path, f"{words}: {why}"))
    packed = packed_linears(model, met)
    for path, module in model.named_modules():
        if path not in met or not odd(module) or noted(module):
            continue
        inside = wider.get(id(module), (0, 0))
        inputs, outputs = (0 if taken else more for more, taken in zip(pads_of(module), inside))
        if why := refusal(model, module, met[path], inputs, packed):
            left.append(Left(path, why))
        elif inputs or outputs:
            yield sides(path, module, inputs, outputs)


def plain_mlp(module: nn.Module) -> bool:
    """Whether linears and what has no weights is all there is in it: worth a line where it is left."""
    return all(only_weights(m) or not any(True for _ in m.parameters()) for m in module.children())


def packed_linears(model: nn.Module, met: dict[str, Met]) -> set[int]:
    """By id: linears of gated MLPs with gate and up in one layer, whose halves would each need zeros."""
    modules = [m for path, m in model.named_modules() if path in met]
    return {id(getattr(m, n)) for m in modules for names in layouts(m) if len(names) == 2 for n in names}


def refusal(model: nn.Module, linear: Any, call: Met, inputs: int, packed: set[int]) -> str:
    if id(linear) in packed:
        return "gate and up are packed in one layer; whet.optimize pads it as it runs"
    if "forward" in vars(linear) or not plainly_called(call):
        return "it has a forward of its own, or is called with more than one tensor"
    others = [m for p in linear.parameters(recurse=False) for m, _ in holders(model, p) if m is not linear]
    if any(type(m) is not nn.Embedding or inputs or not isinstance(linear, nn.Linear) for m in others):
        return "its weight is shared with a module that would be another one"
    return ""


def sides(path: str, linear: Any, inputs: int, outputs: int) -> StoredPad:
    k, n = sizes(linear)
    named = [f"{words} of {size} as {size + more}" for words, size, more in
             (("inputs", k, inputs), ("outputs", n, outputs)) if more]
    return StoredPad(path, " and ".join(named), inputs=k + inputs if inputs else 0, outputs=n + outputs if outputs else 0)


def unlike(module: nn.Module, pad: StoredPad, call: Met) -> str:
    """Why an MLP is not itself where it is padded; empty where values and gradients are, and what was added stays zero.

    Asked of copies whose weights are moved at random: a last layer that starts at zero would hide all that is before it.
    """
    own, twin = moved(module), moved(module)
    try:
        pad.apply(twin, twin)
        want, got = stepped(own.eval(), call), stepped(twin.eval(), call)
        if why := apart(got, want):
            return why
        stepped(twin.train(module.training), call)
        shapes = logical_shapes(twin)
        for name, p in twin.named_parameters():
            if id(p) in shapes and p.grad is not None and p.grad.any() and not inside(p.grad, shapes[id(p)]):
                return f"what is added to {name} gets a gradient: what lies between does not map 0 to 0"
    except Exception as e:  # what comes in between needs the plain size: no MLP
        return error_line(e)
    return ""


def inside(t: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether all that is not zero lies within this shape."""
    return int(t.count_nonzero()) == int(cut_to(t, shape).count_nonzero())


def moved(module: nn.Module) -> nn.Module:
    twin = copied(module, torch.float64)
    with torch.no_grad(), random_kept():
        torch.manual_seed(0)
        for p in (p for p in twin.parameters() if is_plain(p) and p.dim()):
            p.add_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    return twin


def stepped(module: nn.Module, call: Met) -> dict[str, torch.Tensor]:
    """The result and the gradients of one call in float64, gradients of padded parameters cut."""
    module.zero_grad()
    with torch.enable_grad(), random_kept(), Float64Everywhere():
        torch.manual_seed(0)
        x = call.args[0].detach().double().requires_grad_(True)
        y = module(x)
        y.backward(torch.randn(y.shape, dtype=y.dtype, device=y.device))
    shapes = logical_shapes(module)
    grads = {n: cut_to(p.grad, shapes.get(id(p), p.shape)) for n, p in module.named_parameters() if p.grad is not None}
    found = {"the result": y.detach(), "the gradient of its input": x.grad}
    return found | {f"the gradient of {n}": g for n, g in grads.items()}


def apart(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    for name, t in want.items():
        other = got.get(name)
        if other is None or other.shape != t.shape:
            return f"{name} has shape {tuple(other.shape) if other is not None else 'none'} in the place of {tuple(t.shape)}"
        if t.numel() and not bool((other - t).abs().max() <= CLOSE * t.abs().max()):
            return f"{name} is another"
    return ""


def differs(twin: nn.Module, call: Met, pads: list[StoredPad]) -> str:
    """Why a model in float64, padded so, gives another result; it is afterwards as it was."""
    args, kwargs = cast(call.args, torch.float64), cast(call.kwargs, torch.float64)
    try:
        with torch.no_grad(), random_kept(), Float64Everywhere():
            want = {k: t.clone() for k, t in floating(twin(*args, **kwargs)).items()}
            for pad in pads:
                pad.apply(twin)
            return apart(floating(twin(*args, **kwargs)), want)
    except Exception as e:
        return error_line(e)
    finally:
        unpad(twin)
