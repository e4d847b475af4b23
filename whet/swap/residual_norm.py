"""The sum of a residual and the RMSNorm or LayerNorm that follows it, in a block such as a decoder layer's: one op for both.

`h = residual + attn(norm1(x)); out = h + mlp(norm2(h))`, or `norm(dense(x) + residual)` where the norm comes last: the block's
own forward runs with children whose results wait to be summed, and a sum waits for its norm. The children are called as
modules, the norm that is part of the op apart.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from whet.choices import Choices
from whet.op import autocast_of
from whet.swap import Edit, Left, Met, Site
from whet.swap._alike import watched
from whet.swap._deferred import Deferred, SelfWith, StandIn, noticed, own_function, settled
from whet.swap._few import few, fewest_rows
from whet.swap.norms import KnownNorm, norms_in

NORMS = ("rms_norm", "layer_norm")  # the op of each with the sum inside is add_rms_norm, add_layer_norm
ADDS = (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add)


class Addend(Deferred):
    """A child's result, computed: a sum of it with another tensor may wait."""

    def __init__(self, value: torch.Tensor):
        self._value = value

    def tensor(self) -> torch.Tensor:
        return self._value

    def __add__(self, other):
        return added(self, other)

    def __radd__(self, other):
        return added(other, self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in ADDS and len(args) == 2 and not kwargs:
            return added(*args)
        if func is F.dropout and len(args) == 1:
            return dropped(args[0], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class PendingSum(Addend):
    """x + res, which a norm may compute together with its own result."""

    def __init__(self, x: torch.Tensor, res: torch.Tensor):
        self.x, self.res = x, res
        self.sum: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self.sum is None:
            self.sum = self.x + self.res
        return self.sum


def added(x: Any, res: Any) -> Any:
    x, res = settled(x), settled(res)
    if not isinstance(x, torch.Tensor) or not isinstance(res, torch.Tensor) or x.shape != res.shape or x.device != res.device:
        return x + res
    return PendingSum(x, res) if x.is_floating_point() and res.is_floating_point() else x + res


def dropped(value: Addend, p: float = 0.5, training: bool = True, inplace: bool = False) -> Addend:
    """F.dropout of a child's result: itself where nothing is dropped, else ready to be summed as before."""
    return value if p == 0 or not training else Addend(F.dropout(value.tensor(), p, training, inplace))


def addends(out: Any) -> Any:
    """A child's result, or each of several, ready to be summed."""
    if isinstance(out, torch.Tensor):
        return Addend(out)
    return tuple(addends(o) if isinstance(o, torch.Tensor) else o for o in out) if type(out) is tuple else out


def call_child(module: nn.Module, *args, **kwargs) -> Any:
    """A child called as ever, its results ready to be summed."""
    drops = type(module) is not nn.Dropout or (module.p > 0 and module.training)
    if not drops and len(args) == 1 and not kwargs and not watched(module):
        return args[0]  # the identity: what it is given may wait on
    return addends(module(*map(settled, args), **{k: settled(v) for k, v in kwargs.items()}))


def widened(norm: KnownNorm, h: PendingSum) -> bool:
    """Whether autocast may compute the module's LayerNorm in float32 and return that; the op keeps the dtype of the sum."""
    return norm.op == "layer_norm" and autocast_of(h.x) is not None and torch.float32 not in (h.x.dtype, h.res.dtype)


def call_norm(module: nn.Module, *args, norm: KnownNorm, op: Callable, note: Callable, **kwargs) -> Any:
    """The norm of a sum that waits, and that sum, from the op; of anything else, the module's own."""
    h = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(h, PendingSum) or h.sum is not None or type(module) is not norm.type:
        return call_child(module, *args, **kwargs)
    note(module)
    if watched(module) or widened(norm, h):
        return call_child(module, *args, **kwargs)
    y, h.sum = op(h.x, h.res, *norm.arguments(module, h.x))
    return Addend(y)


Summed = dict[str, tuple[KnownNorm, Callable]]  # {name of a child: what it computes, the op of that and the sum}


def with_ops(norms: dict[str, KnownNorm], ops: Choices) -> Summed:
    return {name: (norm, getattr(ops, f"add_{norm.op}")) for name, norm in norms.items()}


def is_part(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is a method of its class's own beside forward, as TransformerEncoderLayer._sa_block is."""
    if not isinstance(value, types.MethodType) or value.__self__ is not module or hasattr(nn.Module, name):
        return False
    return isinstance(value.__func__, types.FunctionType) and not checkpoints(value.__func__)


def run(module: nn.Module, own: Callable, norms: Summed, call: Met, note: Callable) -> Any:
    """The module's own forward, and the methods that it calls, its children standing in for themselves."""
    def stand_in(name: str, value: Any) -> Any:
        if is_part(module, name, value):
            return types.MethodType(value.__func__, seen)
        if not isinstance(value, nn.Module):
            return value
        if name not in norms:
            return StandIn(value, call_child)
        norm, op = norms[name]
        return StandIn(value, functools.partial(call_norm, norm=norm, op=op, note=note))

    seen = SelfWith(module, stand_in)
    out = own(seen, *call.args, **call.kwargs)
    return settled(out) if isinstance(out, (Deferred, torch.Tensor)) else tree_map(settled, out)


def replaced(whole: Callable, own: Callable, norms: Summed, fewest: int) -> Callable:
    """whole: the module's forward; own: what it runs where its layer is not checkpointed."""
    def forward(self, *args, **kwargs):
        if few(args, kwargs, fewest) or torch.compiler.is_compiling():  # Inductor fuses the sum into the norm's formula itself
            return whole(self, *args, **kwargs)
        if whole is not own and self.gradient_checkpointing and self.training:
            return whole(self, *args, **kwargs)
        return run(self, own, norms, Met(args, kwargs), lambda module: None)

    return forward


def checkpoints(function: types.FunctionType) -> bool:
    return any("checkpoint" in name for name in function.__code__.co_names)


def inside(module: nn.Module, function: types.FunctionType | None) -> types.FunctionType | None:
    """The layer's own forward, where Transformers (5.23 on) has put around it what checkpoints the layer when that is on."""
    seen = function
    while seen is not None and checkpoints(seen) and hasattr(module, "gradient_checkpointing"):
        seen = getattr(seen, "__wrapped__", None)
    return seen or function


def is_block(module: nn.Module, own: types.FunctionType) -> bool:
    """Whether every module that its forward calls is a child by name, called there and then: no list, no checkpoint inside."""
    return not checkpoints(own) and not any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in module.children())


def norms_of_sums(module: nn.Module, own: Callable, norms: dict[str, KnownNorm], call: Met) -> list[nn.Module]:
    """The norms that are given a sum with a child's result in one run of the module."""
    return noticed(module, lambda note: run(module, own, with_ops(norms, Choices()), call, note))


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        own = inside(module, own_function(module))
        if path not in met or own is None or not is_block(module, own):
            continue
        children = {name: (where, norm) for name, where, norm in norms_in(path, module, met, *NORMS)}
        norms = {name: norm for name, (_, norm) in children.items()}
        summed = norms_of_sums(module, own, norms, met[path]) if norms else []
        free = {n: norms[n] for n in norms if any(getattr(module, n) is m and not watched(m) for m in summed)}
        if summed and not free:
            yield Left(path, "the norm of its sum has hooks, or a forward of its own, that would not be called")
        if not free:
            continue
        fewest = fewest_rows(met[path])

        def edits(module, ops, norms=free, fewest=fewest):
            whole = own_function(module)
            own = inside(module, whole)
            assert whole is not None and own is not None
            return [Edit(module, "forward", types.MethodType(replaced(whole, own, with_ops(norms, ops), fewest), module))]

        words = ", ".join(sorted({norm.words for norm in free.values()}))
        covers = tuple(("norms", children[name][0]) for name in free)
        yield Site(path, module, edits, f"residual sum and {words}", covers=covers)
