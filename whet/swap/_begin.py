"""What optimize() is given, checked, and made a step that can be run again."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from whet.machine import float32_precision, set_float32_precision
from whet.swap import Met
from whet.swap._given import kind_of, refuse_model, undisturbed
from whet.swap._memory import measurable
from whet.swap._replace import quiet
from whet.swap._state import as_before
from whet.workload import Workload

if TYPE_CHECKING:
    from whet.swap._optimize import Optimized

MODES = ("train", "infer")
ALLOWED = {"tf32": "float32 products as TF32: torch.set_float32_matmul_precision('high') is set until whet.restore"}
NO_FP8 = (
    "optimize: allow='fp8' is not offered: a part is replaced only where it computes what the module computes, and attention "
    "in FP8 does not; ask for it by whet.ops.attention(..., precision='fp8')"
)


def refuse(model: Any, mode: str | None, keep_logits: bool | None = None, who: str = "optimize") -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{who}: model must be a torch.nn.Module, got {type(model).__name__}")
    if mode not in (None, *MODES):
        raise ValueError(f"optimize: mode must be one of {MODES} or None, got {mode!r}")
    if keep_logits not in (None, True, False):
        raise ValueError(f"optimize: keep_logits must be True, False or None, got {keep_logits!r}")
    refuse_model(model)


@contextlib.contextmanager
def prepared(model: nn.Module, mode: str | None, call: Met, loss: Callable | None) -> Iterator[Workload]:
    """The workload, with modes, gradients, buffers and random numbers of the model afterwards as they were."""
    training = [(m, m.training) for m in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    work = Workload(model, call.args, call.kwargs, "train", loss_with=loss)
    try:
        with undisturbed(model), quiet(model):
            if mode != "infer":
                model.train()
            work.kind = kind_of(work, mode)
            if work.kind != "train":
                for module, flag in training:
                    module.training = flag
            yield work
    finally:
        for module, flag in training:
            module.training = flag
        for p, grad in grads:
            p.grad = grad


def allowed(allow: str | Iterable[str]) -> tuple[str, ...]:
    """What may change the precision: names of ALLOWED, one, several, or a string with commas."""
    names = allow.split(",") if isinstance(allow, str) else list(allow)
    found = tuple(dict.fromkeys(n.strip().lower() for n in names if n.strip()))
    if "fp8" in found:
        raise ValueError(NO_FP8)
    if unknown := [n for n in found if n not in ALLOWED]:
        raise ValueError(f"optimize: allow must be of {', '.join(ALLOWED)}, got {unknown[0]!r}")
    if "tf32" in found and not torch.cuda.is_available():
        raise ValueError("optimize: allow='tf32' needs a GPU, and there is none here")
    return found


@contextlib.contextmanager
def in_allowed(report: "Optimized", names: tuple[str, ...]) -> Iterator[None]:
    """What was allowed is set, and stays so unless something is raised; the report keeps what was set before."""
    before = float32_precision()
    report.allow = names
    if "tf32" in names:
        report.precision_before = before
        torch.set_float32_matmul_precision("high")
    try:
        yield
    except BaseException:
        set_float32_precision(before)
        raise


def refuse_step_options(work: Workload, optimizer: Any, limit: int | None) -> None:
    """ValueError where an option of a training step is given and does not fit this one."""
    given = {"optimizer": optimizer is not None, "max_memory": limit is not None}
    if work.kind != "train" and any(given.values()):
        name = next(k for k, there in given.items() if there)
        raise ValueError(f"optimize: {name} is for a training step, and this is a forward pass; give mode='train' or a loss")
    if limit is not None and not measurable(work.device):
        raise ValueError(f"optimize: max_memory needs a GPU: of a {work.device} the peak memory of a step is not known")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimize: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    mine = set(map(id, work.model.parameters()))
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimize: optimizer steps none of the model's parameters")


def with_optimizer(
    report: "Optimized", works: list[Workload], optimizer: torch.optim.Optimizer | None
) -> list[Workload]:
    """The whole steps to be timed: with the optimizer's, where there is one."""
    report.optimizer = type(optimizer).__name__ if optimizer is not None else ""
    return [replace(work, optimizer=optimizer) for work in works]


def undone(work: Workload) -> contextlib.AbstractContextManager:
    """Within the block steps may be run; what an optimizer changed is afterwards as it was, kept in the host's memory."""
    return contextlib.nullcontext() if work.optimizer is None else as_before(work.model, work.optimizer, "cpu")
