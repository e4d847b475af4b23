"""Gated MLPs: down(act(gate(x)) * up(x)), act a SiLU or a GELU; the linears stay, and their products take several forms.

Where the linears are plain ones, gate and up can also be one product with both weights beside each other, and an inner size
that is no whole number of the tensor cores' loads can be padded. Which is fastest is measured. In training a wide down does not
keep what it is given: gated_linear makes that again in the backward.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.alignment import SMALL, pads
from whet.swap import Edit, Edits, Left, Met, Site, new_forward
from whet.swap._alike import alike
from whet.swap._biases import covered_biases
from whet.swap._few import few, fewest_rows
from whet.swap._packed import is_plain
from whet.swap._padded import Pads, multiply, multiply_both, odd, only_weights, product_dtype, sizes
from whet.swap._proof import Float64Everywhere, close, copied, plainly_called, random_kept
from whet.swap.float32_linear import only_product

CLOSE = 1e-5  # of the size of the result; of several formulas as close as that, the nearest
SPREAD = 4.0  # the largest gate of the probe: there a SiLU and both GELUs differ
WIDE = 1024  # features of down's result from which making act(gate) * up again costs under 2% of the MLP's products
ACTIVATIONS: dict[str, tuple[str, tuple, str, Callable]] = {  # op, its options, gated_linear's name for it, the stock function
    "SwiGLU": ("swiglu", (), "silu", F.silu),
    "GEGLU": ("geglu", ("none",), "gelu", F.gelu),
    "GEGLU by tanh": ("geglu", ("tanh",), "gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
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
    return down(ACTIVATIONS[form.activation][-1](gate) * up)


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
    twin = copied(module, torch.float64, x.dtype).eval()
    with torch.no_grad(), random_kept(), Float64Everywhere():
        torch.manual_seed(0)
        for p in (p for p in twin.parameters() if is_plain(p) and p.dim()):
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


def plain_linears(module: nn.Module, form: GatedForm) -> bool:
    """Whether the products may be made of the weights, the linears not called; gate and up alike in having a bias."""
    found = [getattr(module, name) for name in form.names]
    return all(map(only_weights, found)) and len({m.bias is None for m in found[:-1]}) == 1


def padded_by(module: nn.Module, form: GatedForm) -> tuple[Pads, Pads]:
    """What is added: to gate and up each, and to down."""
    *inner, down = (getattr(module, name) for name in form.names)
    (size, out), dtype = sizes(down), product_dtype(down)
    if min(size, out) < SMALL:
        return Pads(0, 0), Pads(0, 0)
    return Pads(pads(sizes(inner[0])[0], dtype), pads(size, dtype)), Pads(pads(size, dtype), pads(out, dtype))


def kept_less(down: Any) -> bool:
    """Whether down's product may be gated_linear's here and now: in training, of a wide plain layer without a bias.

    torch.compile, to which that op is opaque, decides for itself what is kept.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(down, nn.Linear):
        return False
    return down.bias is None and down.out_features >= WIDE and only_product(down)


class GatedEnd:
    """What lies between the first products and the last: the activation, and down's product where they are one op."""

    def __init__(self, ops: Any, form: GatedForm):
        op, self.options, self.name, _ = ACTIVATIONS[form.activation]
        self.activation, self.linear = getattr(ops, op), ops.gated_linear

    def activated(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return self.activation(gate, up, *self.options)

    def down(self, down: Any, gate: torch.Tensor, up: torch.Tensor | None, multiplied: Callable) -> torch.Tensor:
        """multiplied(down, h): down's product in its usual form."""
        if kept_less(down):
            return self.linear(gate, up, down.weight, self.name)
        return multiplied(down, self.activated(gate, up))


def called(module: nn.Module, names: tuple[str, ...], op: GatedEnd, x: torch.Tensor) -> torch.Tensor:
    """By calling the linears, whatever they are."""
    *inner, down = (getattr(module, name) for name in names)
    return op.down(down, inner[0](x), inner[1](x) if len(inner) == 2 else None, lambda down, h: down(h))


def in_one_product(more: Pads, more_down: Pads) -> Callable:
    def run(inner: list, down: Any, op: GatedEnd, x: torch.Tensor) -> torch.Tensor:
        packed = multiply_both(inner, x, more)
        if any(more_down):
            return multiply(down, op.activated(packed, None), more_down)
        return op.down(down, packed, None, lambda down, h: multiply(down, h, more_down))

    return run


def apart(more: Pads, more_down: Pads) -> Callable:
    def run(inner: list, down: Any, op: GatedEnd, x: torch.Tensor) -> torch.Tensor:
        gate, up = (multiply(m, x, more, wide=True) for m in inner)
        return multiply(down, op.activated(gate, up), more_down)

    return run


def edits_with(form: GatedForm, fewest: int, products: Callable | None = None) -> Edits:
    """products: of the weights, where the linears are plain ones still; None: by calling them."""

    def edits(module: nn.Module, ops) -> list[Edit]:
        op = GatedEnd(ops, form)

        def forward(self, x, *rest, **others):
            if rest or others or few((x,), {}, fewest) or self.training and not form.in_training:
                return self._whet_forward(x, *rest, **others)
            if products is None or not plain_linears(self, form):
                return called(self, form.names, op, x)
            *inner, down = (getattr(self, name) for name in form.names)
            return products(inner, down, op, x)

        return new_forward(module, forward)

    return edits


def product_forms(module: nn.Module, form: GatedForm, call: Met) -> dict[str, Edits]:
    """What the products can be besides calls of the linears, the simplest first."""
    if not plain_linears(module, form):
        return {}
    none, fewest, separate = Pads(0, 0), fewest_rows(call), len(form.names) == 3
    found = {"gate and up in one product": in_one_product(none, none)} if separate else {}
    more = padded_by(module, form)
    if any(map(any, more)):
        padded = f"padded to {sizes(getattr(module, form.names[-1]))[0] + more[1].more_in}"
        found |= {padded: apart(*more), f"gate and up in one product, {padded}": in_one_product(*more)} if separate else {
            padded: in_one_product(*more)
        }
    return {name: edits_with(form, fewest, products) for name, products in found.items()}


def gated_linears(module: nn.Module, call: Met) -> list:
    """The linears of a gated MLP that is misaligned, which is padded here; none of any other module."""
    if not any(map(odd, module.children())) or not any(True for _ in layouts(module)):
        return []
    form = form_of(module, call.args[0])
    if form is None or refusal(module, form) or not plain_linears(module, form) or not any(map(any, padded_by(module, form))):
        return []
    return [getattr(module, name) for name in form.names]


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
        x = met[path].args[0]
        form = alike(module, (form_of, x.dtype), functools.partial(form_of, module, x))
        if why := refusal(module, form):
            yield Left(path, why)
            continue
        assert form is not None

        words, apart_name = f"{form.activation} between {', '.join(form.names)}", "gate and up apart"
        forms, fewest = product_forms(module, form, met[path]), fewest_rows(met[path])
        inside = [n for n, _ in module.named_children() if n not in form.names]
        yield Site(
            path, module, edits_with(form, fewest), words, form=apart_name if len(form.names) == 3 else "", forms=forms,
            covers=tuple(("activations", f"{path}.{n}" if path else n) for n in inside)
            + covered_biases(path, module, form.names),
        )
