"""Logits that are never computed: what a head hands on in their place, and a loss takes.

A `Handed` is no tensor, and good only for what comes between a head and its loss: F.cross_entropy takes it, however it is
called. Where a forward does anything else with it, that raises, and the forward runs again as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS_ALONE = "only the rows of logits that were not computed can be reshaped"


@dataclass
class HandedOn:
    """Of one model: whether its head hands hidden states on, and whether a loss took them; loss: linear_cross_entropy."""

    loss: Callable
    on: bool = False
    used: bool = False

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """What the forward gives with its head handing on; None where no loss took it and something else was tried with it."""
        self.on, self.used = True, False
        try:
            return forward(*args, **kwargs)
        except Exception:  # it did with the logits what only logits allow; what else is wrong the caller meets again
            if self.used:
                raise
            return None
        finally:
            self.on = False


class Handed:
    """Hidden states and their head, reshaped and cut by rows as logits would be."""

    def __init__(self, hidden: torch.Tensor, head: nn.Linear, state: HandedOn, dtype: torch.dtype | None = None):
        self.hidden, self.head, self.state = hidden, head, state
        self.dtype, self.device, self.words = dtype or hidden.dtype, hidden.device, head.weight.shape[0]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.cross_entropy:
            raise TypeError(f"{getattr(func, '__name__', func)} of logits that were not computed")
        return cross_entropy(*args, **(kwargs or {}))

    def like(self, hidden: torch.Tensor) -> "Handed":
        return Handed(hidden, self.head, self.state, self.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.words))

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def contiguous(self) -> "Handed":
        return self

    def float(self) -> "Handed":
        return Handed(self.hidden, self.head, self.state, torch.float32)

    def view(self, *shape) -> "Handed":
        *rows, words = shape[0] if isinstance(shape[0], (tuple, list)) else shape
        if words != self.words and (words != -1 or -1 in rows):
            raise TypeError(f"{ROWS_ALONE}, got {shape}")
        hidden = self.hidden.reshape(*rows, self.hidden.shape[-1])
        if words == -1 and hidden.numel() != self.hidden.numel():
            raise TypeError(f"{ROWS_ALONE}, got {shape}")
        return self.like(hidden)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Handed":
        if end_dim % self.dim() == self.dim() - 1:
            raise TypeError("the words of logits that were not computed cannot be flattened")
        return self.like(self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, where) -> "Handed":
        """Rows: logits[:, :-1] or logits[:, :-1, :]; the words stay whole."""
        where = where if isinstance(where, tuple) else (where,)
        if not all(isinstance(w, slice) for w in where) or (len(where) == self.dim() and where[-1] != slice(None)):
            raise TypeError("only rows of logits that were not computed can be sliced")
        return self.like(self.hidden[where])


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """F.cross_entropy of a Handed; TypeError where linear_cross_entropy has no argument for it."""
    by_class = isinstance(input, Handed) and isinstance(target, torch.Tensor) and input.dim() == 2 and target.dim() == 1
    if not by_class or target.is_floating_point() or target.shape != input.shape[:1] or reduction not in ("mean", "sum"):
        raise TypeError("this loss is not one of linear_cross_entropy's")
    if weight is not None or size_average is not None or reduce is not None:
        raise TypeError("this loss is not one of linear_cross_entropy's")
    state, head = input.state, input.head
    state.used = True
    options = ignore_index, reduction, label_smoothing, None, None
    return state.loss(input.hidden, head.weight, target, *options, head.bias).to(input.dtype)


def head_forward(self, hidden):
    state = self._whet_handed
    on = state.on and type(self) is nn.Linear  # a unit of FSDP's has its weight during this call alone
    return Handed(hidden, self, state) if on else self._whet_forward(hidden)
