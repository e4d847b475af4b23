"""Calls of few rows, such as one token at a time: a module runs as it was, whose launches are all that such a call costs."""

from typing import Any

import torch

from whet.alignment import SMALL
from whet.swap import Met


def rows_of(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[-1]) if x.dim() else 1


def first_tensor(args: tuple, kwargs: dict) -> torch.Tensor | None:
    found: Any = args[0] if args else next(iter(kwargs.values()), None)
    return found if isinstance(found, torch.Tensor) else None


def fewest_rows(call: Met) -> int:
    """Under so many rows a module runs as it is; never more than the proof's, or that would prove nothing."""
    x = first_tensor(call.args, call.kwargs)
    return 0 if x is None else min(SMALL, rows_of(x))


def few(args: tuple, kwargs: dict, fewest: int) -> bool:
    """Whether a call has fewer rows than that."""
    x = first_tensor(args, kwargs)
    return x is not None and x.dim() > 0 and x.numel() < fewest * x.shape[-1]
