"""Head and loss of a model that calls F.cross_entropy in its own forward: logits are None, where that is asked for.

In a training step the head hands a `Handed` on in the place of logits: no tensor, and good only for what comes between a
head and its loss. Where the forward does anything else with it, that raises, and the forward runs again as it was.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from whet.swap import Edit, Left, Met, Site, new_forward
from whet.swap._globals import plain_function, stand_ins, with_globals
from whet.swap._packed import is_plain
from whet.swap._proof import outputs_left

NAME = "cross_entropy"


class Handed:
    """Logits that were not computed: hidden states and the head's weight, reshaped and cut by rows as logits would be."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None):
        self.hidden, self.weight, self.dtype, self.device = hidden, weight, dtype or hidden.dtype, hidden.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def contiguous(self) -> "Handed":
        return self

    def float(self) -> "Handed":
        return Handed(self.hidden, self.weight, torch.float32)

    def view(self, *shape) -> "Handed":
        *rows, words = shape[0] if isinstance(shape[0], (tuple, list)) else shape
        if words != self.weight.shape[0] and (words != -1 or -1 in rows):
            raise TypeError(f"only the rows of logits that were not computed can be reshaped, got {shape}")
        hidden = self.hidden.reshape(*rows, self.hidden.shape[-1])
        if words == -1 and hidden.numel() != self.hidden.numel():
            raise TypeError(f"only the rows of logits that were not computed can be reshaped, got {shape}")
        return Handed(hidden, self.weight, self.dtype)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Handed":
        if end_dim % self.dim() == self.dim() - 1:
            raise TypeError("the words of logits that were not computed cannot be flattened")
        return Handed(self.hidden.flatten(start_dim, end_dim), self.weight, self.dtype)

    def __getitem__(self, where) -> "Handed":
        """Rows: logits[:, :-1] or logits[:, :-1, :]; the words stay whole."""
        where = where if isinstance(where, tuple) else (where,)
        if not all(isinstance(w, slice) for w in where) or (len(where) == self.dim() and where[-1] != slice(None)):
            raise TypeError("only rows of logits that were not computed can be sliced")
        return Handed(self.hidden[where], self.weight, self.dtype)


@dataclass
class HandedOn:
    """Whether the head hands hidden states on, and whether a loss took them."""

    on: bool = False
    used: bool = False


def cross_entropy_of(ops, state: HandedOn) -> Callable:
    theirs, fused = F.cross_entropy, ops.linear_cross_entropy

    def cross_entropy(
        input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
    ):
        if not isinstance(input, Handed):
            return theirs(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        by_class = input.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        if weight is not None or size_average is not None or reduce is not None or not by_class or reduction != "mean":
            raise TypeError("this loss is not one of linear_cross_entropy's")
        state.used = True
        return fused(input.hidden, input.weight, target, ignore_index, reduction, label_smoothing).to(input.dtype)

    return cross_entropy


def head_forward(self, hidden):
    on = self._whet_handed.on and type(self) is nn.Linear  # a unit of FSDP's has its weight during this call alone
    return Handed(hidden, self.weight) if on else self._whet_forward(hidden)


def forward(self, *args, **kwargs):
    """The forward with head and loss in one, in training; as it was elsewhere, and where its loss is never come to."""
    state = self._whet_handed
    if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return self._whet_forward(*args, **kwargs)
    state.on, state.used = True, False
    try:
        out = self._whet_handing(*args, **kwargs)
    except Exception:  # it did with the logits what only logits allow; what else is wrong is raised again below
        if state.used:
            raise
    finally:
        state.on = False
    if not state.used:
        return self._whet_forward(*args, **kwargs)
    return tree_map(lambda v: None if isinstance(v, Handed) else v, out)


def own_forward(module: nn.Module) -> types.FunctionType | None:
    """The function behind this module's forward, where it calls F.cross_entropy."""
    function = plain_function(module.forward)
    return function if function is not None and NAME in function.__code__.co_names else None


def heads_of(module: nn.Module, function: types.FunctionType) -> list[str]:
    """Names of linear layers that the forward names."""
    return [n for n, m in module.named_children() if isinstance(m, nn.Linear) and n in function.__code__.co_names]


def edits(module: nn.Module, ops, head: str) -> list[Edit]:
    state, linear, function = HandedOn(), module.get_submodule(head), own_forward(module)
    assert function is not None
    handing = with_globals(function, **stand_ins(function, F, NAME, cross_entropy_of(ops, state)))
    return [
        *new_forward(linear, head_forward), Edit(linear, "_whet_handed", state), Edit(module, "_whet_handed", state),
        Edit(module, "_whet_handing", types.MethodType(handing, module)), *new_forward(module, forward),
    ]


def served(module: Any) -> bool:
    return module._whet_handed.used


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        function = own_forward(module)
        if path not in met or function is None or callable(getattr(module, "get_output_embeddings", None)):
            continue
        heads = heads_of(module, function)
        if len(heads) != 1:
            yield Left(path, f"it calls cross_entropy and names {len(heads)} linear layers: which is its head is not clear")
            continue
        linear = module.get_submodule(heads[0])
        if type(linear) is not nn.Linear or linear.bias is not None or not is_plain(linear.weight):
            yield Left(path, f"its head {heads[0]} is not a plain linear layer without a bias")
            continue
        if not module.training:
            yield Left(path, "it is in eval mode, where logits are wanted beside the loss")
            continue

        def with_head(module, ops, head=heads[0]):
            return edits(module, ops, head)

        site = Site(
            path, module, with_head, f"head of {linear.out_features:,} words and its loss", serves=served, drops="asked",
            unasked="its forward does more with the logits than hand them to a loss that linear_cross_entropy computes",
        )
        yield Site(**(vars(site) | {"compares": outputs_left(site, met[path])}))
