"""What optimize() is given: a model and a batch that it can work on, or one line that says why not and what to do."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from whet.figures import error_line
from whet.swap import Met
from whet.workload import Workload, tensors_in

INSTEAD = {  # classes around a model, by name, and what to do instead
    "OptimizedModule": "is compiled: give model._orig_mod, and compile afterwards",
    "DistributedDataParallel": "is wrapped: give model.module, which the wrapper goes on calling",
    "DataParallel": "is wrapped: give model.module, before the first step",
    "FullyShardedDataParallel": "is sharded: optimize first, then wrap",
    "FSDPModule": "is sharded: optimize first, then fully_shard",
    "ScriptModule": "is TorchScript, which has no Python forward to replace: give the module it was made from",
}


def refuse_model(model: nn.Module) -> None:
    """Raise where the model is not one whose parts can be copied, run both ways and replaced."""
    if torch._C._current_graph_task_id() != -1:
        raise ValueError("optimize: called inside a backward, whose gradients it would disturb; call it between two steps")
    for cls in type(model).__mro__:
        if cls.__name__ in INSTEAD and cls.__module__.startswith("torch."):
            raise ValueError(f"optimize: the model {INSTEAD[cls.__name__]}")
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"optimize: parameter {name} is on the meta device; load the weights first")
        if p.is_inference():
            raise ValueError(f"optimize: parameter {name} was made under torch.inference_mode; make the model outside it")
        if is_dtensor(p):
            raise ValueError(f"optimize: parameter {name} is a DTensor; optimize first, then shard")


def is_dtensor(t: Any) -> bool:
    return any(cls.__name__ == "DTensor" for cls in type(t).__mro__)


def usable(call: Met) -> Met:
    """The batch, less what torch.inference_mode forbids: a tensor made under it cannot be saved for a backward."""
    if not call.args and not call.kwargs:
        raise ValueError("optimize: batch is empty; give what the model's forward takes")

    def own(t: torch.Tensor) -> torch.Tensor:
        if t.is_meta:
            raise ValueError("optimize: the batch has a tensor on the meta device, which has no values")
        return t.clone() if t.is_inference() else t

    with torch.inference_mode(False):
        return Met(tree_map_only(torch.Tensor, own, call.args), tree_map_only(torch.Tensor, own, call.kwargs))


def tried(work: Workload) -> torch.Tensor | None:
    """The loss of a first forward; one that fails is the caller's to mend, and the error says what the model said."""
    try:
        out = work.forward()
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        raise ValueError(f"optimize: the model's forward fails on this batch{elsewhere(work)}: {error_line(e)}") from e
    return work.loss(out)


def elsewhere(work: Workload) -> str:
    """Where the batch is and the model is not, for an error."""
    homes = {p.device for p in work.model.parameters()}
    away = {t.device for t in tensors_in((work.args, work.kwargs))} - homes
    return f", part of which is on {away.pop()} and the model on {homes.pop()}" if homes and away else ""


def kind_of(work: Workload, mode: str | None) -> str:
    """ "train" where the forward gives a loss that reaches a parameter; refused where it does not and training is asked."""
    if mode == "infer":
        with torch.no_grad():
            tried(work)
        return "infer"
    loss = tried(work)
    if mode == "train" and loss is None:
        raise ValueError("optimize: mode='train', and the model returned no loss: give labels in the batch, or loss=")
    if mode == "train" and loss is not None and not loss.requires_grad:
        raise ValueError("optimize: mode='train', and the loss needs no gradient: every parameter is frozen; use mode='infer'")
    return "train" if loss is not None and loss.requires_grad else "infer"


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Gradients can be taken, under torch.no_grad() too; hooks that act on them, such as an optimizer's step, do not run."""
    tables = [p._post_accumulate_grad_hooks for p in model.parameters()]
    held = [(table, dict(table)) for table in tables if table]
    for table, _ in held:
        table.clear()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for table, hooks in held:
            table.update(hooks)
