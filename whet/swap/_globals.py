"""A function in whose eyes a few global names mean something else: how one module's forward calls an op of whet."""

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def plain_function(method: Any) -> types.FunctionType | None:
    """The Python function behind a bound method, where its globals may be replaced: it sets none, nor asks its __name__."""
    function = getattr(method, "__func__", None)
    if not isinstance(function, types.FunctionType):
        return None
    return None if needs_its_globals(function.__code__) else function


@functools.cache
def needs_its_globals(code: types.CodeType) -> bool:
    """Whether it sets a global, or asks for its __name__."""
    used = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    return any(op in ("STORE_GLOBAL", "DELETE_GLOBAL") or (op, name) == ("LOAD_GLOBAL", "__name__") for op, name in used)


def methods_naming(module: nn.Module, name: str) -> Iterator[str]:
    """Names of the module's own methods, torch's not among them, whose code names this."""
    classes = [c for c in type(module).__mro__ if not c.__module__.startswith("torch.")]
    for method in dict.fromkeys(k for c in classes for k, v in vars(c).items() if isinstance(v, types.FunctionType)):
        function = plain_function(getattr(module, method))
        if function is not None and name in function.__code__.co_names:
            yield method


def with_globals(function: types.FunctionType, **names) -> types.FunctionType:
    """The same function, in whose eyes these global names mean something else.

    Without __name__ among them: torch.compile would look the others up in the module of that name.
    """
    scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | names
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    return made


def stand_ins(function: types.FunctionType, home: types.ModuleType, name: str, ours: Callable) -> dict[str, Any]:
    """{global: what stands in for it} so that `home.name`, however this function writes it, is ours.

    Written as name(...), F.name(...), nn.functional.name(...) or torch.nn.functional.name(...): each module on the way is
    a copy of its namespace with that one entry changed. The module itself is not touched.
    """
    theirs = getattr(home, name)
    found: dict[str, Any] = {}
    for word in function.__code__.co_names:
        value = function.__globals__.get(word)
        if value is theirs:
            found[word] = ours
        elif isinstance(value, types.ModuleType) and f"{home.__name__}.".startswith(f"{value.__name__}."):
            found[word] = _changed(value, home.__name__[len(value.__name__) + 1:].split("."), name, ours)
    return found


def _changed(module: types.ModuleType, way: list[str], name: str, ours: Callable) -> types.ModuleType:
    """A copy of a module's namespace in which the module at the end of the way has ours under this name."""
    made = types.ModuleType(module.__name__, module.__doc__)
    made.__dict__.update(module.__dict__)
    first, *rest = way
    made.__dict__[first or name] = _changed(getattr(module, first), rest or [""], name, ours) if first else ours
    return made
