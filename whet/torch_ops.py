"""Kernels as torch library ops: fake and autograd registered, so torch.compile, graphs and checkpointing see them.

A `Fused` pairs a forward launcher with a backward launcher. Traced code (torch.compile, dispatch modes, functorch) goes
through the torch.library op; plain eager code through an autograd.Function over the same two launchers, which costs
less host time per call; and where nothing asks for a gradient the forward launcher is called as it is, which costs least.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from whet import machine
from whet.interpret import mend
from whet.launch import SOURCES, traced

mend()
LIB = torch.library.Library("whet", "FRAGMENT")  # noqa: TOR901
INSIDE: dict[Any, Callable] = {}  # by op: see Fused.inside
# Bound here: five look-ups of attributes cost as much as such a call.
_transform, _jvp = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.TransformType.Jvp
_modes, _grad_enabled = torch._C._len_torch_dispatch_stack, torch.is_grad_enabled
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # of torch.cuda.current_device(): a tensor is there already


def define(name: str, schema: str, launch: Callable, fake: Callable, visible: bool = False):
    """Register one torch library op for every device, visible to Inductor or opaque. Returns the callable op."""
    LIB.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"whet::{name}", fake, lib=LIB)
    if visible:
        _show(name, launch)
    return getattr(torch.ops.whet, name).default


def _show(name: str, launch: Callable) -> None:
    """Where a graph is traced for a GPU, put what the launcher does in place of the op: its kernels become nodes of their own.

    Inductor then launches them as it does its own kernels; the op it would call through Python at every step. An exported
    program keeps the op, as it does triton_op's.
    """
    from torch._library.triton import triton_ops_to_kernels
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    plain = {torch.Tensor, FakeTensor, FunctionalTensor}

    def rule(mode, op, types, args, kwargs):
        if not plain.issuperset(types) or not _on_gpu(args) or machine.triton_mode() == "interpret" or _exported():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode, traced():
            return launch(*args, **kwargs)

    torch.library.register_torch_dispatch(f"whet::{name}", FunctionalTensorMode, rule, lib=LIB)
    triton_ops_to_kernels[f"whet::{name}"] = [SOURCES]


def _on_gpu(args) -> bool:
    return next(a for a in args if isinstance(a, torch.Tensor)).is_cuda


def _exported() -> bool:
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


@dataclass(frozen=True)
class Forward:
    """A kernel for inference: op `name`, without a gradient. What it changes in place is marked in its schema."""

    name: str
    schema: str
    launch: Callable
    fake: Callable
    op: Any = field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "op", define(self.name, self.schema, self.launch, self.fake))

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self.op(*args)
        run, x = self.op if _watched(f"{self.name}[triton]") else self.launch, args[0]
        if x.is_cuda and x.get_device() != _current_device():
            with torch.cuda.device(x.device):
                return run(*args)
        return run(*args)


@dataclass(frozen=True)
class Fused:
    """A differentiable kernel: op `name` and its gradient `name_bwd`.

    forward(*args) -> (out_0 .. out_{n_out-1}, residual...)      residuals are kept for the backward, never shown
    save(args, results) -> (tensors, constants)                  what the backward needs
    backward(*douts, *tensors, *constants) -> (grad...)          a dout is None where that output was not used
    grads_to                                                     per forward argument: which grad it takes, or None
    grads_from                                                   per grad: the outputs that it comes from; empty: all of them
    inside(*args), bwd_inside(*args)                             bytes that each of the two allocates and lets go
    """

    name: str
    schema: str
    forward: Callable
    fake: Callable
    bwd_schema: str
    backward: Callable
    bwd_fake: Callable
    save: Callable
    grads_to: tuple[int | None, ...]
    n_out: int = 1
    grads_from: tuple[tuple[int, ...], ...] = ()
    inside: Callable | None = None
    bwd_inside: Callable | None = None
    label: str = ""  # op and impl in messages; name[triton] where empty
    visible: bool = False  # Inductor sees the kernels of the forward, which allocates, takes views, launches, and no more
    bwd_visible: bool = False  # and those of the backward
    op: Any = field(init=False, default=None)
    function: Any = field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "op", define(self.name, self.schema, self.forward, self.fake, self.visible))
        bwd_op = define(self.name + "_bwd", self.bwd_schema, self.backward, self.bwd_fake, self.bwd_visible)
        INSIDE.update({op: bytes_of for op, bytes_of in ((self.op, self.inside), (bwd_op, self.bwd_inside)) if bytes_of})
        object.__setattr__(self, "label", self.label or f"{self.name}[triton]")
        message = f"{self.label}: double backward is not supported; use impl='eager' where you need it"

        def setup(ctx, inputs, output):
            _keep(ctx, self, inputs, output if isinstance(output, tuple) else (output,))

        def once(ctx, *douts):
            if all(d is None for d in douts[: self.n_out]):
                return (None,) * len(self.grads_to)
            return self._spread(bwd_op(*douts[: self.n_out], *ctx.saved_tensors, *ctx.constants), douts)

        def never(ctx, *_):
            raise RuntimeError(message)

        torch.library.register_autograd(f"whet::{self.name}", once, setup_context=setup, lib=LIB)
        torch.library.register_autograd(f"whet::{self.name}_bwd", never, setup_context=lambda *_, **__: None, lib=LIB)
        object.__setattr__(self, "function", _function(self, message))

    def _spread(self, grads, douts):
        """The gradients by argument; none, as in PyTorch's own, of an argument that no used output depends on."""
        grads = grads if isinstance(grads, tuple) else (grads,)
        if self.grads_from:
            grads = tuple(g if any(douts[o] is not None for o in outs) else None for g, outs in zip(grads, self.grads_from))
        return tuple(None if i is None else grads[i] for i in self.grads_to)

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self._through_library(args)
        run = self._looked_at if _watched(self.label) else self._recorded if _asked(args) else self._alone
        x = args[0]
        if x.is_cuda and x.get_device() != _current_device():
            with torch.cuda.device(x.device):
                return run(args)
        return run(args)

    def _through_library(self, args):
        return self._shown(self.op(*args))

    def _looked_at(self, args):
        try:
            return self._through_library(args)
        except RuntimeError as e:
            if "setup_context" not in str(e):
                raise
            why = "torch.func's gradients are not supported; use impl='eager' where you need them, or .backward()"
            raise RuntimeError(f"{self.label}: {why}") from None

    def _recorded(self, args):
        return self.function.apply(*args)

    def _alone(self, args):
        return self._shown(self.forward(*args))

    def _shown(self, out):
        return out[: self.n_out] if self.n_out > 1 else out[0] if isinstance(out, (tuple, list)) else out


def _watched(label: str) -> bool:
    """A dispatch mode or a functorch transform is looking on. Forward-mode differentiation has no rule here, and is refused."""
    transform = _transform()
    if transform is not None and transform.key() == _jvp:
        raise RuntimeError(f"{label}: forward-mode differentiation is not supported; use impl='eager' where you need it")
    return transform is not None or _modes() > 0


def _asked(args) -> bool:
    """Whether a gradient of this call may be asked for, or a tangent, which autograd then refuses."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return _grad_enabled() and any([isinstance(a, torch.Tensor) and a.requires_grad for a in args])


def may_ask(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient of one of these may be asked for. Inside a functorch transform they do not say, so it may."""
    if not torch.is_grad_enabled():
        return False
    inside = not torch.compiler.is_compiling() and _transform() is not None
    return inside or any(t is not None and t.requires_grad for t in tensors)


def _keep(ctx, fused: Fused, args, results):
    tensors, ctx.constants = fused.save(args, results)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _function(fused: Fused, message: str):
    class NoSecond(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hook, *args):
            return fused.backward(*args)

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError(message)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            results = fused.forward(*args)
            if not isinstance(results, tuple):
                results = (results,)
            _keep(ctx, fused, args, results)
            return results[: fused.n_out] if fused.n_out > 1 else results[0]

        @staticmethod
        def backward(ctx, *douts):
            if all(d is None for d in douts):
                return (None,) * len(fused.grads_to)
            args = (*douts, *ctx.saved_tensors, *ctx.constants)
            if not torch.is_grad_enabled():
                return fused._spread(fused.backward(*args), douts)
            hook = torch.empty(0, requires_grad=True)  # create_graph=True: what follows must hang on something to raise
            return fused._spread(NoSecond.apply(hook, *args), douts)

    return Eager


def own_code(method: Any) -> Callable:
    """The method with a code object of its own.

    torch.compile keeps graphs by code object: two plans of one model that race each other would check each other's guards
    at every step.
    """
    function = method.__func__
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copy, method.__self__)
