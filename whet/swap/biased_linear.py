"""Linear layers with a bias, in training: its gradient is summed over rows by a kernel, the products stay as they are.

Where only values are asked for, for few rows, and under torch.compile, where Inductor sums it itself, the layer runs as it was.
"""

import types
from collections.abc import Iterator

import torch
from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap._biases import bias_trained
from whet.swap._few import rows_of
from whet.swap._padded import Pads, matrix, sizes
from whet.swap._proof import plainly_called

FEWEST = 1024  # rows: fewer are summed in less time than a launch takes
NO_PADS = Pads(0, 0)


def edits_with(fewest: int):
    """fewest: never more than the proof's rows, or that would prove nothing."""
    def edits(module: nn.Module, ops) -> list[Edit]:
        op = ops.linear_bias

        def forward(self, input):
            summed = bias_trained(self) and torch.is_grad_enabled() and rows_of(input) >= fewest
            if not summed or torch.compiler.is_compiling():
                return type(self).forward(self, input)
            return op(input, matrix(self, NO_PADS), self.bias)

        return [Edit(module, "forward", types.MethodType(forward, module))]

    return edits


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules() if torch.is_grad_enabled() else ():
        if path not in met or not module.training or not bias_trained(module):
            continue
        call = met[path]
        if "forward" in vars(module) or not plainly_called(call) or not call.args[0].is_floating_point():
            yield Left(path, "it has a forward of its own, or is called with more than one tensor")
            continue
        (k, n), fewest = sizes(module), min(FEWEST, rows_of(call.args[0]))
        yield Site(path, module, edits_with(fewest), f"linear of {k} to {n} with a bias")
