"""Linear layers in float32, which PyTorch multiplies without tensor cores: the op linear does with them, as accurately.

Looked for where TF32 is not allowed, on GPUs whose tensor cores are that much faster. A layer that meets few rows runs as it
is: its weight is then read for little more than to be split.
"""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from whet.alignment import SMALL
from whet.machine import float32_precision
from whet.ops._products import by_halves
from whet.swap import Edit, Left, Met, Site
from whet.swap._alike import watched
from whet.swap._biases import covered_biases
from whet.swap._few import first_tensor, rows_of
from whet.swap._padded import Pads, matrix, plain, product_dtype, sizes
from whet.swap._proof import plainly_called

FEWEST = 256  # rows: a weight is read and written to be split, and read again
NO_PADS = Pads(0, 0)


def edits_with(fewest: int):
    """fewest: never more than the proof's rows, or that would prove nothing."""
    def edits(module: nn.Module, ops) -> list[Edit]:
        op = ops.linear

        def forward(self, *args, **kwargs):
            x = first_tensor(args, kwargs)
            if x is None or rows_of(x) < fewest or not in_float32(self, x):
                return type(self).forward(self, *args, **kwargs)
            y = op(x, matrix(self, NO_PADS))
            return y if self.bias is None else y + self.bias

        return [Edit(module, "forward", types.MethodType(forward, module))]

    return edits


def in_float32(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether it multiplies x in float32, here and now, with TF32 not allowed: after optimizing, all of that may change."""
    return x.dtype == product_dtype(module) == torch.float32 and float32_precision() == "highest"


def only_product(module: Any) -> bool:
    """Whether its weight and bias say all of a linear layer, be it replaced here or not."""
    return plain(module) and not watched(module, but=__name__)


def slow(module: nn.Module) -> bool:
    """A plain linear layer, not too small to matter, whose product is in float32 and runs without tensor cores."""
    if not plain(module) or product_dtype(module) != torch.float32:
        return False
    return min(sizes(module)) >= SMALL and by_halves(module.get_parameter("weight"))


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        if path not in met or not slow(module):
            continue
        call = met[path]
        if "forward" in vars(module) or not plainly_called(call):
            yield Left(path, "it has a forward of its own, or is called with more than one tensor")
            continue
        (k, n), fewest = sizes(module), min(FEWEST, rows_of(call.args[0]))
        yield Site(
            path, module, edits_with(fewest), f"linear of {k} to {n} in float32", covers=covered_biases(path, module, ("",)),
        )
