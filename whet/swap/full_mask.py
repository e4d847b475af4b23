"""The full mask of a Hugging Face encoder, or of attention to an encoder's states, given none: none has to be built.

Transformers spares it too, but versions such as 5.17 not while a CUDA graph is captured or torch.compile traces: a dense mask
of ones is built there, with which attention takes a slower kernel. whet's own mask function spares it everywhere. Attention
itself is left to SDPA where it is not replaced.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap.attention import INTERNAL, NAME, asks_interface, is_masked, register

MAKERS = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")


def names_in(module: nn.Module) -> set[str]:
    """What a module's forward, and its methods that this calls, name."""
    cls = type(module)
    named = set(getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ()))
    codes = [getattr(inspect.getattr_static(cls, name, None), "__code__", None) for name in sorted(named)]
    return named.union(*(code.co_names for code in codes if code is not None))


def makes_masks(module: nn.Module) -> bool:
    return hasattr(module, "config") and any(name in names_in(module) for name in MAKERS)


def given(module: nn.Module, call: Met) -> set[str]:
    """The names of the arguments that the module was called with."""
    bound = dict(zip(inspect.signature(module.forward).parameters, call.args)) | call.kwargs
    return {name for name, value in bound.items() if value is not None}


def spares(module: nn.Module, call: Met) -> bool:
    """Whether there is a full mask to spare: a decoder has one for an encoder's states alone."""
    decodes = any(getattr(m, "is_causal", False) is True for m in module.modules())
    names = given(module, call)
    return not any(name.endswith("mask") for name in names) and (not decodes or "encoder_hidden_states" in names)


def unmasked_inside(path: str, module: nn.Module, met: dict[str, Met]) -> bool:
    """Whether attention in it, by the interface, was handed no mask."""
    inside = {f"{path}.{name}" if path else name: m for name, m in module.named_modules() if asks_interface(m)}
    return any(where in met and not is_masked(m, met[where]) for where, m in inside.items())


def edits(module: Any, ops) -> list[Edit]:
    return [Edit(module.config, INTERNAL, NAME)]


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    found = [(path, m) for path, m in model.named_modules() if path in met and makes_masks(m)]
    if not found or not register():
        return
    for path, module in found:
        if getattr(module.config, "_attn_implementation", None) != "sdpa" or not spares(module, met[path]):
            continue
        if unmasked_inside(path, module, met):
            yield Site(path, module, edits, "full mask that is not built", asks=False, alone=False)
