"""Projections that some variants of a model fuse: cut into the plain ones, and joined again."""

from collections.abc import Iterable, Mapping

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
