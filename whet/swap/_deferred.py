"""A module's own forward, run with another `self`: its children give results that wait for what is asked of them next.

The forward is the module's own code; only what it finds under `self.<child>` is a stand-in, and only while it runs. Results
that wait are `Deferred`: whatever is done with one that it does not wait for is done with its tensor.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from whet.swap._alike import alike
from whet.swap._replace import quiet


class Deferred:
    """A tensor that may not be computed yet: in every use but those that a subclass knows, it is its tensor."""

    def tensor(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(settled, args), **tree_map(settled, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)


def noticed(module: nn.Module, run: Callable[[Callable], Any]) -> list[nn.Module]:
    """The modules that a run notes, run(note), with the module afterwards as it was; none where the run fails."""
    def look() -> list[str]:
        found: list[nn.Module] = []
        try:
            with quiet(module), torch.no_grad():
                run(lambda *modules: found.extend(modules))
        except Exception:  # its code asks of self or of a child's result what only the real ones have
            return []
        return [path for path, m in module.named_modules() if any(m is noted for noted in found)]

    return [module.get_submodule(path) for path in alike(module, run.__code__, look)]


def settled(value: Any) -> Any:
    """A value as it is; of one that waits, its tensor."""
    return value.tensor() if isinstance(value, Deferred) else value


def _operator(name: str) -> Callable:
    def operator(self, *others):
        return getattr(self.tensor(), name)(*map(settled, others))

    return operator


OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg", "abs",
    "lt", "le", "gt", "ge", "eq", "ne", "getitem", "setitem", "len", "iter", "bool", "float", "int",
)
for _name in OPERATORS:  # Python looks these up on the class
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


class SelfWith:
    """A module in whose eyes some attributes are others: stand_in(name, value) -> what it finds under that name."""

    def __init__(self, module: nn.Module, stand_in: Callable[[str, Any], Any]):
        self.__dict__.update(_whet_module=module, _whet_stand_in=stand_in)

    @property  # type: ignore[misc]
    def __class__(self):  # so that isinstance and super() in its code go on working
        return type(self.__dict__["_whet_module"])

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_whet_stand_in"](name, getattr(self.__dict__["_whet_module"], name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_whet_module"], name, settled(value))


class StandIn:
    """A child as its parent's forward sees it: called by `call`, all else its own."""

    def __init__(self, module: nn.Module, call: Callable):
        self._whet_module, self._whet_call = module, call

    @property  # type: ignore[misc]
    def __class__(self):
        return type(self._whet_module)

    def __call__(self, *args, **kwargs):
        return self._whet_call(self._whet_module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whet_module, name)


def own_function(module: nn.Module) -> types.FunctionType | None:
    """The Python function behind a module's forward, which can be given another self."""
    function, bound_to = (getattr(module.forward, name, None) for name in ("__func__", "__self__"))
    return function if isinstance(function, types.FunctionType) and bound_to is module else None
