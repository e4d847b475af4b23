"""Linear layers with a bias that is trained: which they are, and which of them another replacement covers."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from whet.alignment import SMALL
from whet.swap._padded import plain


def bias_trained(module: Any) -> bool:
    """Plain, with a bias that asks for a gradient, and not too small to matter: what biased_linear is for."""
    return plain(module) and module.bias is not None and module.bias.requires_grad and min(module.weight.shape) >= SMALL


def covered_biases(path: str, module: nn.Module, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """What a site at a path covers of biased_linear's: those of these linears inside, "" for the module itself."""
    trained = [n for n in names if bias_trained(module.get_submodule(n))]
    return tuple(("biased_linear", ".".join(filter(None, (path, n)))) for n in trained)
