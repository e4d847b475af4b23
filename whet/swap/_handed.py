"""Logits that are never computed: what a head hands on in their place, and a loss takes.

A `Handed` is no tensor, and good only for what comes between a head and its loss: F.cross_entropy takes it, however it is
called. Where a forward does anything else with it, that raises, and the forward runs again as it was.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.op import autocast_of
from whet.swap import Edit, new_forward

ROWS_ALONE = "only the rows of logits that were not computed can be reshaped"


class HandedOn:
    """Of one model: whether its head hands hidden states on, and whether a loss took them; loss: linear_cross_entropy.

    The first time that a forward does something else with them it runs again as it was, and so it does from then on.
    """

    def __init__(self, loss: Callable):
        self.loss, self.off = loss, False
        self.thread: int | None = None  # in which a forward hands on now; others are to get logits
        self.handed = self.used = self.ever = False

    @property
    def on(self) -> bool:
        return self.thread is not None and self.thread == threading.get_ident()

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """(whether that is the result, what the forward gives with its head handing on)."""
        if self.off or self.thread is not None:
            return False, None
        self.thread, self.handed, self.used = threading.get_ident(), False, False
        try:
            out = forward(*args, **kwargs)
        except Exception:  # maybe for what only logits allow; what else is wrong is met again when it runs as it was
            if not self.handed:
                raise
            return self._fell_back()
        finally:
            self.thread = None
        self.ever = self.ever or self.used
        return (True, out) if self.used or not self.handed else self._fell_back()

    def _fell_back(self) -> tuple[bool, Any]:
        if self.ever:
            warnings.warn("whet: this forward needs its logits; from now on head and loss run as they were", stacklevel=5)
        self.off, self.used = True, False
        return False, None

    def __deepcopy__(self, memo: dict) -> "HandedOn":
        return HandedOn(self.loss)


class Handed:
    """Hidden states and their head, reshaped and cut by rows as logits would be."""

    def __init__(self, hidden: torch.Tensor, head: nn.Linear, state: HandedOn, dtype: torch.dtype | None = None):
        self.hidden, self.head, self.state, self.autocast = hidden, head, state, autocast_of(hidden)
        self.dtype, self.device, self.words = dtype or self.autocast or hidden.dtype, hidden.device, head.weight.shape[0]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.cross_entropy:
            raise TypeError(f"{getattr(func, '__name__', func)} of logits that were not computed")
        return cross_entropy(*args, **(kwargs or {}))

    def like(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> "Handed":
        """The same with other rows, or in another dtype, and multiplied as the head would have."""
        other = Handed(hidden, self.head, self.state, dtype or self.dtype)
        other.autocast = self.autocast
        return other

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
        return self.like(self.hidden, torch.float32)

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
    state, head, kind = input.state, input.head, input.device.type
    if head.weight.shape[0] != input.words or target.dtype not in (torch.int64, torch.int32):
        raise TypeError("its weight was lent for the head's call alone, or its targets are no int64 or int32")
    options = ignore_index, reduction, label_smoothing, None, None
    with torch.autocast(kind, input.autocast, enabled=input.autocast is not None):
        loss = state.loss(input.hidden, head.weight, target, *options, head.bias)
    state.used = True
    return loss.to(torch.float32 if torch.is_autocast_enabled(kind) else input.dtype)


def head_forward(self, hidden):
    state = self._whet_handed
    if not state.on or type(self) is not nn.Linear:  # a unit of FSDP's has its weight during this call alone
        return self._whet_forward(hidden)
    state.handed = True
    return Handed(hidden, self, state)


def edits_of(head: nn.Module, module: nn.Module, forward: Callable, ops) -> list[Edit]:
    """What makes a head hand on to a loss of linear_cross_entropy's, while its module runs this forward."""
    state = HandedOn(ops.linear_cross_entropy)
    return [
        *new_forward(head, head_forward), Edit(head, "_whet_handed", state),
        *new_forward(module, forward), Edit(module, "_whet_handed", state),
    ]


def served(module: Any) -> bool:
    return module._whet_handed.used
