"""A linear layer as a product of padded matrices: zeros are added to weight, bias and input as it runs, and none is stored.

Padding a weight of K x N reads and writes it once, 2*K*N elements beside the 2*M*K*N flops of the product, and its gradient is
a slice: little at many rows, more than the product at few. So a layer that meets few rows runs as it is. In training the padded
weight is held until the backward, which multiplies by it: as much memory again as the weights that are padded.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from whet.alignment import SMALL, pads
from whet.padding import sizes as sizes
from whet.swap._alike import hooked, watched


class Pads(NamedTuple):
    """Zeros that a linear layer gets: columns of its input, columns of its result."""

    more_in: int
    more_out: int


def plain(module: Any) -> bool:
    """nn.Linear or Transformers' Conv1D itself, with a weight as PyTorch makes it: no wrapper, no quantised or sharded one."""
    kind = type(module)
    conv = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return (kind is nn.Linear or conv) and type(module._parameters.get("weight")) is nn.Parameter


def unhooked(module: Any) -> bool:
    """Plain, and nothing else sees what it is given or gives."""
    return plain(module) and not hooked(module)


def only_weights(module: Any) -> bool:
    """Whether its weight and bias say all of a linear layer: nothing would be missed if it were not called."""
    return plain(module) and not watched(module)


def product_dtype(linear: Any) -> torch.dtype:
    """What it multiplies in, here and now."""
    w = linear.weight
    return torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype


def pads_of(linear: Any) -> Pads:
    """None of either where it is aligned, or too small to matter."""
    dtype, (k, n) = product_dtype(linear), sizes(linear)
    return Pads(pads(k, dtype), pads(n, dtype)) if min(k, n) >= SMALL else Pads(0, 0)


def odd(module: Any) -> bool:
    """A plain linear layer that is misaligned."""
    return plain(module) and any(pads_of(module))


def matrix(linear: Any, more: Pads) -> torch.Tensor:
    """Its weight as F.linear takes it, (out, in), with zeros added; the weight itself where there are none to add."""
    w, linear_like = linear.weight, isinstance(linear, nn.Linear)
    last, first = more if linear_like else (more.more_out, more.more_in)
    w = F.pad(w, (0, last, 0, first)) if first or last else w
    return w if linear_like else w.t()


def bias(linear: Any, more: Pads) -> torch.Tensor | None:
    return linear.bias if linear.bias is None or not more.more_out else F.pad(linear.bias, (0, more.more_out))


def widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros up to this width; itself where it has it."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def multiply(linear: Any, x: torch.Tensor, more: Pads, wide: bool = False) -> torch.Tensor:
    """The layer on an input that is padded, or will be. wide: the result keeps what was added; else it is contiguous.

    A slice alone would be a view whose rows lie apart: a kernel that takes no strides would read it wrongly.
    """
    k, n = sizes(linear)
    y = F.linear(widened(x, k + more.more_in), matrix(linear, more), bias(linear, more))
    return y if wide or not more.more_out else y[..., :n].contiguous()


def multiply_both(inner: list, x: torch.Tensor, more: Pads) -> torch.Tensor:
    """Gate and up, apart or packed in one layer, as one product: their results beside each other, each padded.

    Both weights are copied once, and the gradient of each is a slice. Backward dx is one product, where two have a sum.
    """
    if len(inner) == 2:
        weights, biases = [matrix(m, more) for m in inner], [bias(m, more) for m in inner]
    else:
        weights = [F.pad(w, (0, more.more_in, 0, more.more_out)) for w in matrix(inner[0], Pads(0, 0)).chunk(2)]
        biases = [] if inner[0].bias is None else [F.pad(b, (0, more.more_out)) for b in inner[0].bias.chunk(2)]
    given, w = [b for b in biases if b is not None], torch.cat(weights)
    return F.linear(widened(x, w.shape[1]), w, torch.cat(given) if given else None)
