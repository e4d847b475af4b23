"""Projections of a model, and those that some variants fuse: cut into the plain ones, joined again, filled from plain ones."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F

from whet.op import autocast_of

Splits = Mapping[str, Mapping[str, int]]  # fused name -> {plain name: rows}
Parameters = dict[str, torch.Tensor]


def project(x, weight, ops):
    """x @ weight.T, by `ops` where the product is in float32: of 16 bits PyTorch's own runs on tensor cores as it is."""
    return ops.linear(x, weight) if (autocast_of(x) or x.dtype) == torch.float32 else F.linear(x, weight)


def cut(splits: Splits, named: Mapping[str, torch.Tensor]) -> Parameters:
    """Weights and biases of fused projections as those of the plain ones; the others as they are."""
    plain: Parameters = {}
    for name, t in named.items():
        path, _, kind = name.rpartition(".")
        head, _, part = path.rpartition(".")
        if part in splits:
            pieces = t.split([*splits[part].values()])
            plain |= {f"{head}.{n}.{kind}": piece for n, piece in zip(splits[part], pieces)}
        else:
            plain[name] = t
    return plain


def joined(splits: Splits, fused: Iterable[str], plain: Mapping[str, torch.Tensor]) -> Parameters:
    """The inverse, for the fused projections that are named."""
    named = dict(plain)
    for part in fused:
        for name in plain:
            head, found, kind = name.rpartition(f".{next(iter(splits[part]))}.")
            if found:
                named[f"{head}.{part}.{kind}"] = torch.cat([named.pop(f"{head}.{n}.{kind}") for n in splits[part]])
    return named


@torch.no_grad()
def fill(model: str, named: Parameters, canonical: Callable, adapt: Callable, plain: Mapping[str, torch.Tensor]) -> None:
    """Set a variant's parameters from those of the plain one; ValueError where a name or a shape is another.

    canonical, adapt   of the variant: its parameters under the plain names, and back
    """
    wanted, given = ({n: tuple(t.shape) for n, t in m.items()} for m in (canonical(named), plain))
    for name in sorted({*wanted, *given}):
        if (shape := wanted.get(name, "none")) != (got := given.get(name, "none")):
            raise ValueError(f"{model}: parameter {name}: expected {shape}, got {got}")
    for name, value in adapt(plain).items():
        named[name].copy_(value)
