"""Modules that are alike in all but their weights' values: how they are told, and what is found of one holds for all."""

import contextlib
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from whet.swap import Met

PLAIN = (bool, int, float, str, type(None), torch.dtype)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_ALL_MODULES = tuple(getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS)
PLACE = "layer_idx"  # where a module stands: like modules differ in it


def digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@functools.cache
def source_of(cls: Hashable) -> str:
    """A hash of what a class computes: the source of its forward, or its code where there is none to read."""
    forward = cast(type[nn.Module], cls).forward
    try:
        return digest(inspect.getsource(forward))
    except (OSError, TypeError):
        code = getattr(forward, "__code__", None)
        return digest(code.co_code, code.co_names, code.co_consts) if code is not None else str(cls)


def facts_of(call: Met) -> tuple:
    """Sizes, layouts and dtypes of a call's tensors, and its plain values."""
    found = []
    for where, x in tree_flatten_with_path((call.args, call.kwargs))[0]:
        if isinstance(x, torch.Tensor):
            fact: Any = (tuple(x.shape), x.stride(), str(x.dtype), x.device.type, x.requires_grad)
        else:
            fact = x if isinstance(x, PLAIN) else type(x).__qualname__
        found.append((str(where), fact))
    return tuple(found)


def hooked(module: nn.Module) -> bool:
    """Whether something else sees what it is given or gives."""
    return any(getattr(module, name) for name in HOOKS)


def watched(module: nn.Module, but: str = "") -> bool:
    """Whether someone hangs on this module's own call: hooks, its own or all modules', or a forward in place of its class's.

    but   the Python module whose forward does not count
    """
    own = vars(module).get("forward")
    replaced = own is not None and not (but and getattr(own, "__module__", "") == but)
    return hooked(module) or replaced or any(OF_ALL_MODULES)


def named(value: Any) -> str:
    """A function by its name, anything else by its class's: two modules may hold different activations by one attribute."""
    if isinstance(value, functools.partial):
        return f"{named(value.func)} {value.args} {value.keywords}"
    it = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(it, '__module__', '')}.{it.__qualname__}"


def form_of(module: nn.Module) -> str:
    """A hash of all of a module but its weights' values and its place: what is equal here is computed alike."""
    facts = []
    for path, m in module.named_modules():
        tensors = (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
        facts.append((
            path, f"{type(m).__module__}.{type(m).__qualname__}", source_of(cast(Hashable, type(m))), "forward" in vars(m),
            hooked(m),
            [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in tensors],
            [(k, v if isinstance(v, PLAIN) else named(v)) for k, v in sorted(vars(m).items()) if k != PLACE],
        ))
    return digest(facts)


class Found(threading.local):
    """What was found in the recognition that this thread is in; None: it is in none."""

    memory: dict | None = None


FOUND = Found()


@contextlib.contextmanager
def found_once() -> Iterator[None]:
    """While it is on, what `alike` is asked of one module holds for all that are like it."""
    before, FOUND.memory = FOUND.memory, {}
    try:
        yield
    finally:
        FOUND.memory = before


def alike(module: nn.Module, what: Hashable, look: Callable[[], Any]) -> Any:
    """What `look` finds of a module, by what was asked; of one that is like another, what was found there.

    A recogniser's look at the code that a module runs, never a proof: those are of each module.
    """
    if FOUND.memory is None or any(map(watched, module.modules())):
        return look()
    key = what, form_of(module)
    if key not in FOUND.memory:
        FOUND.memory[key] = look()
    return FOUND.memory[key]
