"""RMSNorm of every query and key head and the rotation that follows it, in Hugging Face attention: both in one op.

`apply_rotary_pos_emb(q_norm(q), k_norm(k), cos, sin)`: the attention's own forward runs with norms whose results wait for the
rotation; where something else is done with one first, it is computed by its module.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from whet.choices import Choices
from whet.swap import Edit, Left, Met, Site
from whet.swap._alike import watched
from whet.swap._deferred import Deferred, SelfWith, StandIn, noticed, own_function, settled
from whet.swap._few import few, fewest_rows
from whet.swap._globals import with_globals
from whet.swap.norms import FORMS, KnownNorm, eps_in, norms_in
from whet.swap.rotary import ARGUMENTS, NAME, own_forward, plain_options, tables_and_rows


class Unnormed(Deferred):
    """The norm of x, not computed yet; heads and tokens may change places meanwhile."""

    def __init__(self, module: nn.Module, norm: KnownNorm, x: torch.Tensor, swapped: bool = False):
        self.module, self.norm, self.x, self.swapped = module, norm, x, swapped
        self.normed: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self.normed is None:
            self.normed = self.module(self.x)
        return self.normed.transpose(1, 2) if self.swapped else self.normed

    def transpose(self, *dims):
        if dims != (1, 2) or self.x.dim() != 4 or self.normed is not None:
            return self.tensor().transpose(*dims)
        return Unnormed(self.module, self.norm, self.x, not self.swapped)

    def heads(self) -> torch.Tensor:
        return self.x.transpose(1, 2) if self.swapped else self.x

    def weight(self) -> torch.Tensor:
        return FORMS[self.norm.form][1](self.module, self.x)


def fits(q: Any, k: Any, cos: torch.Tensor) -> bool:
    """Whether both are norms that wait, of one eps, before a rotation of whole heads."""
    if not isinstance(q, Unnormed) or not isinstance(k, Unnormed) or q.norm.eps != k.norm.eps or cos.dim() != 3:
        return False
    heads = q.heads()
    return heads.dim() == 4 and k.x.dim() == 4 and heads.shape[2] == cos.shape[1] and heads.shape[3] == cos.shape[2]


def rotation(op: Callable, theirs: Callable, note: Callable) -> Callable:
    def apply_rotary_pos_emb(q, k, cos, sin, *rest, **options):
        if not plain_options(rest, options) or not fits(q, k, cos):
            return theirs(settled(q), settled(k), cos, sin, *rest, **options)
        note(q.module, k.module)
        cos, sin, rows = tables_and_rows(cos, sin)
        return op(q.heads(), k.heads(), q.weight(), k.weight(), cos, sin, rows, eps_in(q.norm.eps, q.x))

    return apply_rotary_pos_emb


def call_norm(module: nn.Module, *args, norm: KnownNorm, **kwargs) -> Any:
    if len(args) != 1 or kwargs or watched(module) or type(module) is not norm.type:
        return module(*map(settled, args), **kwargs)
    return Unnormed(module, norm, args[0])


def run(module: nn.Module, function: Callable, norms: dict[str, KnownNorm], call: Met) -> Any:
    """The attention's own forward, its norms standing in for themselves."""
    def stand_in(name: str, value: Any) -> Any:
        return StandIn(value, functools.partial(call_norm, norm=norms[name])) if name in norms else value

    return function(SelfWith(module, stand_in), *call.args, **call.kwargs)


def with_rotation(own: types.FunctionType, op: Callable, note: Callable) -> types.FunctionType:
    return with_globals(own, **{NAME: rotation(op, own.__globals__[NAME], note)})


def replaced(own: types.FunctionType, op: Callable, norms: dict[str, KnownNorm], fewest: int) -> Callable:
    function = with_rotation(own, op, lambda *modules: None)

    def forward(self, *args, **kwargs):
        if few(args, kwargs, fewest) or torch.compiler.is_compiling():  # Inductor fuses norm and rotation itself
            return own(self, *args, **kwargs)
        return run(self, function, norms, Met(args, kwargs))

    return forward


def norms_rotated(module: nn.Module, own: types.FunctionType, norms: dict[str, KnownNorm], call: Met) -> list[nn.Module]:
    """The norms whose results are rotated, in one run of the module."""
    return noticed(module, lambda note: run(module, with_rotation(own, Choices().qk_norm_rope, note), norms, call))


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        own = own_forward(module)
        if path not in met or own is None or own_function(module) is not own:
            continue
        if tuple(inspect.signature(own.__globals__[NAME]).parameters)[:4] != ARGUMENTS:
            continue
        children = {name: (where, norm) for name, where, norm in norms_in(path, module, met, "rms_norm")}
        norms = {name: norm for name, (_, norm) in children.items()}
        rotated = norms_rotated(module, own, norms, met[path]) if len(norms) > 1 else []
        used = {name: norm for name, norm in norms.items() if any(getattr(module, name) is m for m in rotated)}
        if not used:
            continue
        fewest = fewest_rows(met[path])

        def edits(module, ops, norms=used, fewest=fewest):
            own = own_forward(module)
            assert own is not None
            return [Edit(module, "forward", types.MethodType(replaced(own, ops.qk_norm_rope, norms, fewest), module))]

        words = f"{next(iter(used.values())).words}, of each query and key head, and rotary embedding"
        covers = (("rotary", path), *(("norms", children[name][0]) for name in used))
        yield Site(path, module, edits, words, covers=covers)
