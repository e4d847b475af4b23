"""Linear layers with rows that are no whole loads of the tensor cores: padded as they run, the weights stored as they are.

A head of 50257 words is the usual one; its weight stays tied to the embedding. The file's name stands before lm_head, so that
the head of a model whose loss takes over in training is a padded one wherever logits are asked for.
"""

import types
from collections.abc import Iterator

from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap._biases import covered_biases
from whet.swap._few import fewest_rows, rows_of
from whet.swap._padded import Pads, multiply, odd, pads_of, sizes
from whet.swap._proof import plainly_called
from whet.swap.aligned_mlp import linears_of_mlps


def edits_with(more: Pads, fewest: int):
    def forward(self, input):
        if rows_of(input) < fewest:
            return type(self).forward(self, input)
        return multiply(self, input, more)

    return lambda module, ops: [Edit(module, "forward", types.MethodType(forward, module))]


def described(k: int, n: int, more: Pads) -> str:
    sides = ("in", k, more.more_in), ("out", n, more.more_out)
    return " and ".join(f"{side} padded to {size + extra}" for side, size, extra in sides if extra)


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    taken: set[int] | None = None
    for path, module in model.named_modules():
        if path not in met or not odd(module):
            continue
        taken = linears_of_mlps(model, met) if taken is None else taken
        if id(module) in taken:
            continue
        if "forward" in vars(module) or not plainly_called(met[path]):
            yield Left(path, "it has a forward of its own, or is called with more than one tensor")
            continue
        more, (k, n) = pads_of(module), sizes(module)
        yield Site(
            path, module, edits_with(more, fewest_rows(met[path])), f"linear of {k} to {n}", form=described(k, n, more),
            asks=False, covers=covered_biases(path, module, ("",)),
        )
