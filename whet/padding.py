"""Weights stored with zeros up to an aligned width, while the function, the gradients and the state_dict stay those without.

    pad_inner([gate, up], down, 1408)         # rows of gate and up, columns of down: what lies between them is wider
    pad_linear(head, outputs=50304)           # rows of a head, whose extra outputs are cut off as a view
    unpad(model, optimizer)                   # as it was

Every parameter stays the object that it was, so ties, and an optimizer that was made before, still hold it. Its logical shape
is noted at each module that has it: state_dict() gives that shape and load_state_dict() takes it. What is added is zero, its
gradient is exactly zero where the activation between maps 0 to 0, and so SGD, AdamW with weight decay (eps above 0) and Muon
leave it zero. named_parameters(), gradients and an optimizer's own state have the stored shape: `cut_state` and `pad_state` are
for that.
"""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Shape = tuple[int, ...]
OFF = -3e4  # a word's logit that is none: finite, since a block of -inf alone is NaN in an online softmax; fp16 holds it


def logical_shapes(model: nn.Module) -> dict[int, Shape]:
    """By the id of each padded parameter: its shape without what was added."""
    return {id(m._parameters[name]): shape for m in model.modules() for name, shape in noted(m).items()}


def noted(module: nn.Module) -> dict[str, Shape]:
    """The logical shapes of a module's own parameters that are stored padded."""
    return module.__dict__.get("_whet_logical", {})


def cut(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that has this shape, as a view; itself where it has it."""
    for dim, n in enumerate(shape):
        t = t if t.shape[dim] == n else t.narrow(dim, 0, n)
    return t


def filled(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A copy with zeros up to this shape; itself where it has it."""
    if tuple(t.shape) == tuple(shape):
        return t
    made = t.new_zeros(tuple(shape))
    cut(made, t.shape).copy_(t.detach())
    return made


@torch.no_grad()
def _resize(p: nn.Parameter, shape: Shape) -> None:
    """A parameter and its gradient cut or filled to this shape; the object stays."""
    grad, p.grad = p.grad, None
    new = _changed(p.data, shape)
    p.data = new.new_empty(0, dtype=torch.float32 if new.dtype == torch.float64 else torch.float64)
    p.data = new  # by way of another dtype: autograd forgets the shape that gradients of a graph still alive are added up in
    if grad is not None:
        p.grad = _changed(grad, shape)


def _changed(t: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Cut or filled to a shape, in memory of its own size."""
    return cut(t, shape).clone() if shape < tuple(t.shape) else filled(t, shape)


def _cut_saved(module: Any, state: dict, prefix: str, local_metadata: Any) -> None:
    for name, shape in noted(module).items():
        if isinstance(t := state.get(prefix + name), torch.Tensor):
            state[prefix + name] = cut(t, shape)


def _fill_loaded(module: Any, state: dict, prefix: str, metadata, strict, missing, unexpected, errors: list) -> None:
    for name, shape in noted(module).items():
        key, stored = prefix + name, getattr(module, name).shape
        if not isinstance(t := state.get(key), torch.Tensor):
            continue
        if tuple(t.shape) == shape:
            state[key] = filled(t, stored)
        else:
            errors.append(f"{key} must have shape {shape}, which is stored padded to {tuple(stored)}, got {tuple(t.shape)}")


def _note(module: Any, name: str, shape: Shape) -> None:
    """A module's parameter is stored padded from now on; the first shape that is noted is the logical one."""
    if not noted(module):
        module.__dict__["_whet_logical"] = {}
        module.register_state_dict_post_hook(_cut_saved)
        module.register_load_state_dict_pre_hook(_fill_loaded)
    noted(module).setdefault(name, shape)


def _forget(module: Any) -> None:
    for hooks, ours in ((module._state_dict_hooks, _cut_saved), (module._load_state_dict_pre_hooks, _fill_loaded)):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is ours]:
            del hooks[key]
    for name, value in module.__dict__.pop("_whet_sizes", {}).items():
        setattr(module, name, value)
    if module.__dict__.pop("_whet_cut", None):
        del module.__dict__["forward"]
    del module.__dict__["_whet_logical"]


def holders(model: nn.Module, p: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Every module that has this parameter, and by which name: tied weights have several."""
    return [(m, name) for m in model.modules() for name, own in m._parameters.items() if own is p]


def _store(model: nn.Module, p: nn.Parameter, shape: Shape) -> None:
    before = tuple(p.shape)
    _resize(p, shape)
    for module, name in holders(model, p):
        _note(module, name, before)


def sizes(linear: Any) -> tuple[int, int]:
    """(in, out) features of an nn.Linear, or of a Conv1D of Transformers, as its weight is stored."""
    first, last = linear.weight.shape
    return (last, first) if isinstance(linear, nn.Linear) else (first, last)


def logical_sizes(linear: Any) -> tuple[int, int]:
    """(in, out) features of a linear layer without what was added."""
    first, last = noted(linear).get("weight", linear.weight.shape)
    return (last, first) if isinstance(linear, nn.Linear) else (first, last)


def _widen(model: nn.Module, linear: Any, inputs: int, outputs: int) -> None:
    """Weight and bias filled to these sizes, and the attributes that name them."""
    inputs, outputs = (max(new, now) for new, now in zip((inputs, outputs), sizes(linear)))
    _store(model, linear.weight, (outputs, inputs) if isinstance(linear, nn.Linear) else (inputs, outputs))
    if linear.bias is not None:
        _store(model, linear.bias, (outputs,))


def _set_size(linear: Any, which: int, size: int) -> None:
    name = (("in_features", "out_features") if isinstance(linear, nn.Linear) else ("nx", "nf"))[which]
    if hasattr(linear, name):
        linear.__dict__.setdefault("_whet_sizes", {}).setdefault(name, getattr(linear, name))
        setattr(linear, name, size)


def pad_inner(firsts: Iterable[Any], last: Any, width: int, model: nn.Module | None = None) -> None:
    """What lies between linear layers becomes this wide: rows of the first ones, columns of the last are filled with zeros.

    What is between them must map 0 to 0, alone or by a product with another: SiLU, GELU, ReLU, ReLU squared, SwiGLU, dropout.
    model   where these parameters may be tied to others
    """
    for linear in firsts:
        _widen(model or linear, linear, 0, width)
        _set_size(linear, 1, width)
    _widen(model or last, last, width, 0)
    _set_size(last, 0, width)


def _forward(self, input):
    """A linear layer that is given its logical inputs, and gives its logical outputs."""
    inputs, outputs = self._whet_cut
    more = sizes(self)[0] - input.shape[-1] if inputs else 0
    y = type(self).forward(self, F.pad(input, (0, more)) if more else input)
    return y[..., :outputs] if outputs else y


def pad_linear(linear: Any, inputs: int = 0, outputs: int = 0, model: nn.Module | None = None) -> None:
    """A linear layer stored at these sizes, 0 for as it is; it takes and gives what it did, the result a view of a wider one.

    Columns for inputs cost a copy of the input in each call.
    model   where its parameters may be tied to others, as a head is to an embedding, whose rows are then filled too
    """
    k, n = sizes(linear)
    known = linear.__dict__.get("_whet_cut", (0, 0))
    _widen(model or linear, linear, inputs, outputs)
    if not isinstance(linear, nn.Linear) and outputs > n:
        _set_size(linear, 1, outputs)
    linear.__dict__["_whet_cut"] = k if inputs > k else known[0], n if outputs > n else known[1]
    linear.__dict__["forward"] = types.MethodType(_forward, linear)


def unpad(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Every padded parameter, and the state that this optimizer has of it, at its logical shape again, with today's values."""
    for p, shape in _padded(model):
        if optimizer is not None:
            resize_state(optimizer, p, tuple(p.shape), shape)
        _resize(p, shape)
    for module in model.modules():
        if noted(module):
            _forget(module)
    return model


def _padded(model: nn.Module) -> Iterator[tuple[nn.Parameter, Shape]]:
    shapes = logical_shapes(model)
    yield from ((p, shapes[id(p)]) for p in model.parameters() if id(p) in shapes)


@torch.no_grad()
def resize_state(optimizer: torch.optim.Optimizer, p: torch.Tensor, before: Shape, shape: Shape) -> None:
    """The state that an optimizer has of a parameter that has or had a shape, cut or filled to another."""
    kept = optimizer.state.get(p, {})
    made = {k: resized(t, before, shape, k).clone() for k, t in kept.items() if isinstance(t, torch.Tensor) and t.dim()}
    kept.update(made)


def fill_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The state that an optimizer had before the model was padded, filled with zeros as the parameters are."""
    for p, shape in _padded(model):
        if any(isinstance(t, torch.Tensor) and t.dim() and t.shape != p.shape for t in optimizer.state.get(p, {}).values()):
            resize_state(optimizer, p, shape, tuple(p.shape))


def resized(t: torch.Tensor, before: Shape, shape: Shape, name: str = "state") -> torch.Tensor:
    """A tensor of an optimizer's state that lies beside a parameter of a shape, for one of another. Numbers stay."""
    if not t.dim():
        return t
    if tuple(t.shape) != before:
        raise ValueError(f"padding: {name} must have its parameter's shape {before} to be cut or filled, got {tuple(t.shape)}")
    return (cut if shape < before else filled)(t, shape)


def cut_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """optimizer.state_dict() at the logical shapes, as it would be of a model that is not padded."""
    return _state(model, optimizer, optimizer.state_dict(), lambda p, shape: (tuple(p.shape), shape))


def pad_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping) -> dict:
    """What `cut_state` gave, or the state_dict() of an optimizer of the model without padding, for load_state_dict() here."""
    return _state(model, optimizer, state, lambda p, shape: (shape, tuple(p.shape)))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping, change: Any) -> dict:
    shapes = logical_shapes(model)
    ids = [i for group in state["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = dict(state["state"])
    for i, p in zip(ids, params):
        if id(p) in shapes and i in kept:
            before, after = change(p, shapes[id(p)])
            kept[i] = {k: resized(t, before, after, k) if isinstance(t, torch.Tensor) else t for k, t in kept[i].items()}
    return {**state, "state": kept}


def head_for_loss(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight, bias) of a head for a loss that multiplies by them: what was added has the logit OFF, so no probability."""
    stored, words = head.weight.shape[0], logical_sizes(head)[1]
    if stored == words:
        return head.weight, head.bias
    own = head.weight.new_zeros(words, dtype=dtype) if head.bias is None else head.bias[:words]
    return head.weight, F.pad(own, (0, stored - words), value=OFF)
