"""Activation modules that compute a GELU, by erf or by tanh, however they write it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from whet.swap import Left, Met, Site, new_forward
from whet.swap._packed import is_packed
from whet.swap._proof import close, in_float64, plainly_called

CLOSE = 1e-9  # erf and tanh lie 5e-4 apart


def approximate_of(module: nn.Module, x: torch.Tensor) -> str | None:
    """Which GELU it is; None: another function."""
    probe = torch.linspace(-6, 6, 97, dtype=torch.float64, device=x.device)
    try:
        got = in_float64(module, probe)
    except Exception:  # it takes no tensor of one dimension, as Flatten: it is not elementwise
        return None
    for approximate in ("none", "tanh"):
        want = F.gelu(probe, approximate=approximate)
        if close(got, want, CLOSE):
            return approximate
    return None


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        bare = not any(True for _ in module.parameters()) and not any(module.children()) and not is_packed(module)
        if path not in met or not bare or not plainly_called(met[path]) or not met[path].args[0].is_floating_point():
            continue
        approximate = approximate_of(module, met[path].args[0])
        if approximate is None:
            continue

        def edits(module, ops, approximate=approximate):
            gelu = ops.gelu
            return new_forward(module, lambda self, x: gelu(x, approximate))

        yield Site(path, module, edits, "GELU" if approximate == "none" else "GELU by tanh")
