"""Steps of an optimizer that are only tried: weights and state are afterwards as they were."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from whet.swap._replace import quiet


@dataclass
class StateSeen:
    """made: whether the optimizer made state that it did not have."""

    made: bool = False


@contextlib.contextmanager
def as_before(model: nn.Module, optimizer: torch.optim.Optimizer, on: str | None = None) -> Iterator[StateSeen]:
    """Weights, buffers, optimizer state and random numbers are afterwards as they were, in the memory that they have.

    on   the device that copies are kept on; None: where the originals are
    """
    def copy(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone() if on is None else t.detach().to(on, copy=True)

    tensors = [(p, copy(p)) for p in {id(p): p for g in optimizer.param_groups for p in g["params"]}.values()]
    state = {p: tree_map_only(torch.Tensor, copy, dict(kept)) for p, kept in optimizer.state.items()}
    seen = StateSeen()
    with quiet(model):
        try:
            yield seen
        finally:
            with torch.no_grad():
                for p, before in tensors:
                    p.copy_(before)
                for p in list(optimizer.state):
                    seen.made |= not set(optimizer.state[p]) <= set(state.get(p, ()))
                    _put_back(optimizer.state, p, state.get(p))


def _put_back(state: Any, p: torch.Tensor, before: dict | None) -> None:
    if before is None:
        del state[p]
        return
    for name in list(state[p]):
        if name not in before:
            del state[p][name]
        elif isinstance(before[name], torch.Tensor):
            state[p][name].copy_(before[name])
        else:
            state[p][name] = before[name]
