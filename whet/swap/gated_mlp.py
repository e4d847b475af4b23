"""Gated MLPs: down(silu(gate(x)) * up(x)), gate and up apart or in one product; the linears stay what they are, LoRA or not."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.swap import Left, Met, Site, new_forward
from whet.swap._proof import Float64Everywhere, close, copied, plainly_called

CLOSE = 1e-5


def linears(module: nn.Module) -> dict[str, Any]:
    """Children that take and give a known number of features: nn.Linear, and what wraps one."""
    sized = {n: m for n, m in module.named_children() if hasattr(m, "in_features") and hasattr(m, "out_features")}
    return {n: m for n, m in sized.items() if isinstance(m.in_features, int)}


def forms(module: nn.Module) -> Iterator[tuple[str, ...]]:
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


def formula(module: nn.Module, form: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    *inner, down = (getattr(module, name) for name in form)
    gate, up = (inner[0](x), inner[1](x)) if len(inner) == 2 else inner[0](x).chunk(2, -1)
    return down(F.silu(gate) * up)


def form_of(module: nn.Module, x: torch.Tensor) -> tuple[str, ...] | None:
    """The names of the linears, where the module computes a SwiGLU, in training as in evaluation."""
    twin = copied(module, torch.float64)
    with torch.no_grad(), torch.random.fork_rng(), Float64Everywhere():
        x = x.detach().double()
        got = [twin.train(mode)(x) for mode in (True, False)]
        for form in forms(twin):
            want = formula(twin, form, x)
            if all(close(y, want, CLOSE) for y in got):
                return form
    return None


def replaced(ops, form: tuple[str, ...]) -> Callable:
    swiglu, (*inner, down) = ops.swiglu, form

    def apart(self, x, *rest, **options):
        if rest or options:
            return self._whet_forward(x, *rest, **options)
        gate, up = inner
        return getattr(self, down)(swiglu(getattr(self, gate)(x), getattr(self, up)(x)))

    def packed(self, x, *rest, **options):
        if rest or options:
            return self._whet_forward(x, *rest, **options)
        return getattr(self, down)(swiglu(getattr(self, inner[0])(x)))

    return apart if len(inner) == 2 else packed


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        if path not in met or not any(True for _ in forms(module)):
            continue
        if not plainly_called(met[path]):
            yield Left(path, "it is called with more than one tensor")
            continue
        form = form_of(module, met[path].args[0])
        if form is None:
            yield Left(path, f"{type(module).__name__} has the linears of a gated MLP and computes no SwiGLU, or drops out")
            continue

        def edits(module, ops, form=form):
            return new_forward(module, replaced(ops, form))

        yield Site(path, module, edits, f"SwiGLU between {', '.join(form)}")
