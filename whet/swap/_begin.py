"""What optimize() is given, checked, and made a step that can be run again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from whet.swap import Met
from whet.swap._replace import quiet
from whet.workload import Workload

MODES = ("train", "infer")


def refuse(model: Any, mode: str | None, keep_logits: bool | None = None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"optimize: model must be a torch.nn.Module, got {type(model).__name__}")
    if mode not in (None, *MODES):
        raise ValueError(f"optimize: mode must be one of {MODES} or None, got {mode!r}")
    if keep_logits not in (None, True, False):
        raise ValueError(f"optimize: keep_logits must be True, False or None, got {keep_logits!r}")
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ValueError(f"optimize: parameter {meta[0]} is on the meta device ({len(meta)} such); load the weights first")


@contextlib.contextmanager
def prepared(model: nn.Module, mode: str | None, call: Met, loss: Callable | None) -> Iterator[Workload]:
    """The workload, with modes, gradients, buffers and random numbers of the model afterwards as they were."""
    training = [(m, m.training) for m in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    work = Workload(model, call.args, call.kwargs, "train", loss_with=loss)
    try:
        with quiet(model):
            if mode == "infer":
                work.kind = "infer"
            else:
                model.train()
                work.kind = "train" if mode == "train" or work.loss(work.forward()) is not None else "infer"
            if work.kind != "train":
                for module, flag in training:
                    module.training = flag
            yield work
    finally:
        for module, flag in training:
            module.training = flag
        for p, grad in grads:
            p.grad = grad
