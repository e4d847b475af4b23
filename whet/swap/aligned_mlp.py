"""MLPs whose inner size is no whole number of tensor cores' loads: padded inside, whatever the activation, weights as they are.

The module's own forward runs. Its first linears give rows with zeros added, what comes in between works on those, and its last
linear takes them. A weight of the last has zeros where the rows have more, so that nothing added reaches the result.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whet.alignment import SMALL, padded_size, pads
from whet.choices import Choices
from whet.swap import Edit, Left, Met, Site, new_forward
from whet.swap._biases import covered_biases
from whet.swap._few import fewest_rows, rows_of
from whet.swap._padded import Pads, multiply, only_weights, pads_of, product_dtype, sizes, unhooked
from whet.swap._proof import cast, close, copied, edited, plainly_called, random_kept
from whet.swap.gated_mlp import gated_linears

CLOSE = 1e-5  # of the size of the result, in float32: whether the module is an MLP at all


@dataclass
class InnerPads:
    """Whether an MLP's linears are to give and take padded rows, and how many have."""

    on: bool = False
    ran: int = 0


@dataclass(frozen=True)
class Inner:
    """An MLP's inner size, and the names of the linears that give it and of the one that takes it."""

    size: int
    firsts: tuple[str, ...]
    last: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.firsts, self.last)


def inners(module: nn.Module) -> Iterator[Inner]:
    """Inner sizes that are misaligned, by the sizes of the module's linears."""
    wide = {n: sizes(m) for n, m in module.named_children() if only_weights(m)}
    for last, (size, out) in wide.items():
        firsts = tuple(n for n, (_, given) in wide.items() if given == size and n != last)
        if firsts and min(size, out) >= SMALL and pads(size, product_dtype(getattr(module, last))):
            yield Inner(size, firsts, last)


def linear_forward(more: Pads, wide: bool):
    def forward(self, input):
        if not self._whet_inner.on:
            return type(self).forward(self, input)
        self._whet_inner.ran += 1
        return multiply(self, input, more, wide)

    return forward


def mlp_forward(names: tuple[str, ...], fewest: int):
    def forward(self, x, *rest, **others):
        state = self._whet_inner
        ours = all(unhooked(getattr(self, name)) for name in names)  # a wrapper or hook that came later meets the plain size
        if not ours or rest or others or rows_of(x) < fewest:
            return self._whet_forward(x, *rest, **others)
        state.on, state.ran = True, 0
        try:
            return self._whet_forward(x)
        finally:
            state.on = False

    return forward


def edits_with(inner: Inner, fewest: int):
    def edits(module: nn.Module, ops) -> list[Edit]:
        state, more = InnerPads(), padded_size(inner.size) - inner.size
        made = [*new_forward(module, mlp_forward(inner.names, fewest)), Edit(module, "_whet_inner", state)]
        for name in inner.names:
            linear = getattr(module, name)
            given, first = pads_of(linear), name in inner.firsts
            forward = linear_forward(Pads(given.more_in, more) if first else Pads(more, given.more_out), wide=first)
            made += [Edit(linear, "_whet_inner", state), Edit(linear, "forward", types.MethodType(forward, linear))]
        return made

    return edits


def served_by(count: int):
    def served(module: Any) -> bool:
        return module._whet_inner.ran >= count

    return served


def site_of(path: str, module: nn.Module, call: Met) -> tuple[Site, Inner] | None:
    """The first inner size that can be padded, tried on a copy: an attention's linears have the sizes of an MLP's, too."""
    for inner in inners(module):
        site = Site(
            path, module, edits_with(inner, fewest_rows(call)), f"inner size {inner.size} between {', '.join(inner.names)}",
            form=f"padded to {padded_size(inner.size)}", serves=served_by(len(inner.names)), asks=False,
            covers=covered_biases(path, module, inner.names),
        )
        if works(site, call):
            return site, inner
    return None


def works(site: Site, call: Met) -> bool:
    """Whether the values are the module's, on a copy in float32 and eval mode; `prove` then asks for gradients, too."""
    twin, args = copied(site.module, torch.float32).eval(), cast(call.args, torch.float32)
    with torch.no_grad(), random_kept():
        want = twin(*args)
        try:
            with edited(twin, site, Choices()):
                return close(twin(*args), want, CLOSE) and site.serves is not None and site.serves(twin)
        except Exception:  # what comes in between needs the plain size: no MLP
            return False


def sites(model: nn.Module, met: dict[str, Met]) -> Iterator[tuple[Site, Inner]]:
    for path, module in model.named_modules():
        if path not in met or not plainly_called(met[path]) or not any(True for _ in inners(module)):
            continue
        if not gated_linears(module, met[path]) and (found := site_of(path, module, met[path])) is not None:
            yield found


def linears_of_mlps(model: nn.Module, met: dict[str, Met]) -> set[int]:
    """By id: linears that an MLP pads as a whole, here or in gated_mlp."""
    found = {id(getattr(site.module, name)) for site, inner in sites(model, met) for name in inner.names}
    for path, module in model.named_modules():
        if path in met and plainly_called(met[path]):
            found |= {id(linear) for linear in gated_linears(module, met[path])}
    return found


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    yield from (site for site, _ in sites(model, met))
