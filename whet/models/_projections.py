"""Projections that some variants of a model fuse: cut into the plain ones, joined again, and filled from plain ones."""

from collections.abc import Callable, Iterable, Mapping

import torch

Splits = Mapping[str, Mapping[str, int]]  # fused name -> {plain name: rows}
Parameters = dict[str, torch.Tensor]


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
