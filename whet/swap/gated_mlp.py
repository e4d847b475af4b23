"""Gated MLPs: down(act(gate(x)) * up(x)), act a SiLU or a GELU, gate and up apart or in one product; the linears stay."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.swap import Left, Met, Site, new_forward
from whet.swap._proof import Float64Everywhere, close, copied, plainly_called, random_kept

CLOSE = 1e-5  # of the size of the result; of several formulas as close as that, the nearest
SPREAD = 4.0  # the largest gate of the probe: there a SiLU and both GELUs differ
ACTIVATIONS: dict[str, tuple[str, tuple, Callable]] = {  # words: op, options after gate and up, the stock function
    "SwiGLU": ("swiglu", (), F.silu),
    "GEGLU": ("geglu", ("none",), F.gelu),
    "GEGLU by tanh": ("geglu", ("tanh",), lambda x: F.gelu(x, approximate="tanh")),
}


@dataclass(frozen=True)
class GatedForm:
    """What a gated MLP computes.

    activation   one of ACTIVATIONS
    names        of its linears: (gate, up, down) or (gate_up, down)
    in_training  whether it computes the same in training mode; dropout does not
    """

    activation: str
    names: tuple[str, ...]
    in_training: bool = True


def linears(module: nn.Module) -> dict[str, Any]:
    """Children that take and give a known number of features: nn.Linear, and what wraps one."""
    sized = {n: m for n, m in module.named_children() if hasattr(m, "in_features") and hasattr(m, "out_features")}
    return {n: m for n, m in sized.items() if isinstance(m.in_features, int)}


def layouts(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """(gate, up, down) or (gate_up, down), by the names of children, where the sizes fit."""
    found = linears(module)
    wide = {n: (m.in_features, m.out_features) for n, m in found.items()}
    if len(found) == 3:
        for gate, up, down in itertools.permutations(found):
            if wide[gate] == wide[up] and wide[down][0] == wide[gate][1] and wide[down][1] == wide[gate][0]:
                yield gate, up, down
    if len(found) == 2:
        for packed, down in itertools.permutations(found):
            if wide[packed][1] == 2 * wide[down][0] and wide[down][1] == wide[packed][0]:
                yield packed, down


def formula(module: nn.Module, form: GatedForm, x: torch.Tensor) -> torch.Tensor:
    *inner, down = (getattr(module, name) for name in form.names)
    gate, up = (inner[0](x), inner[1](x)) if len(inner) == 2 else inner[0](x).chunk(2, -1)
    return down(ACTIVATIONS[form.activation][2](gate) * up)


def apart_by(module: nn.Module, form: GatedForm, x: torch.Tensor) -> float:
    """How far the formula lies from what the module computes, as a share of the largest value; linears drop alike in both."""
    torch.manual_seed(0)
    got = module(x)
    torch.manual_seed(0)
    want = formula(module, form, x)
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max() / want.abs().max())


def form_of(module: nn.Module, x: torch.Tensor) -> GatedForm | None:
    """What the module computes in eval mode, where that is a gated activation between its linears.

    Asked of a copy whose weights are moved at random: a down that starts at zero would make every formula right.
    """
    twin = copied(module, torch.float64).eval()
    with torch.no_grad(), random_kept(), Float64Everywhere():
        torch.manual_seed(0)
        for p in (p for p in twin.parameters() if p.is_floating_point() and p.dim()):
            p.add_(torch.randn_like(p) * p.shape[-1] ** -0.5)
        x = x.detach().double()
        errors = {}
        for names in layouts(twin):
            spread = x * (SPREAD / getattr(twin, names[0])(x).abs().max())
            for form in (GatedForm(activation, names) for activation in ACTIVATIONS):
                if close(twin(x), formula(twin, form, x), CLOSE):
                    errors[form] = apart_by(twin, form, spread)
        best = min(errors, key=lambda form: errors[form], default=None)
        if best is None or not errors[best] <= CLOSE:
            return None
        return replace(best, in_training=apart_by(twin.train(), best, x) <= CLOSE)


def replaced(ops, form: GatedForm) -> Callable:
    op, options, _ = ACTIVATIONS[form.activation]
    activation, (*inner, down) = getattr(ops, op), form.names

    def apart(self, x, *rest, **others):
        if rest or others or self.training and not form.in_training:
            return self._whet_forward(x, *rest, **others)
        gate, up = inner
        return getattr(self, down)(activation(getattr(self, gate)(x), getattr(self, up)(x), *options))

    def packed(self, x, *rest, **others):
        if rest or others or self.training and not form.in_training:
            return self._whet_forward(x, *rest, **others)
        return getattr(self, down)(activation(getattr(self, inner[0])(x), None, *options))

    return apart if len(inner) == 2 else packed


def refusal(module: nn.Module, form: GatedForm | None) -> str | None:
    if form is None:
        return f"{type(module).__name__} has the linears of a gated MLP and computes no SwiGLU and no GEGLU"
    if module.training and not form.in_training:
        return f"it is a {form.activation} in eval mode and another function in training, as with dropout"
    weights = [getattr(getattr(module, name), "weight", None) for name in form.names]
    dtypes = {w.dtype for w in weights if isinstance(w, torch.Tensor)}
    if len(dtypes) > 1:  # such as T5's, whose wo stays in float32: its forward casts in between
        return f"its linears have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    return None


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        if path not in met or not any(True for _ in layouts(module)):
            continue
        if not plainly_called(met[path]):
            yield Left(path, "it is called with more than one tensor")
            continue
        form = form_of(module, met[path].args[0])
        if why := refusal(module, form):
            yield Left(path, why)
            continue
        assert form is not None

        def edits(module, ops, form=form):
            return new_forward(module, replaced(ops, form))

        inside = [n for n, _ in module.named_children() if n not in form.names]
        yield Site(
            path, module, edits, f"{form.activation} between {', '.join(form.names)}",
            covers=tuple(("activations", f"{path}.{n}" if path else n) for n in inside),
        )
