"""When a loss goes bad: how that is known, and which module was the first whose result is not finite."""

import contextlib
import math
from typing import Any

import torch
from torch import nn

from whet.workload import in_precision, tensors_in

EXPLODED = 2.0  # times the loss of the first step, that of a guess: nothing that learns comes near it
LEAST = 3.0  # above the first loss at least: that of a fine-tuned model is no guess, and single batches lie far above it


class Diverged(ValueError):
    """The loss is not finite, or far above where it began."""


def gone_bad(loss: float, first: float) -> str:
    """Why training cannot go on; empty where it can."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    most = max(EXPLODED * first, first + LEAST)
    return f"the loss is {loss:.4g}, and was {first:.4g} at the start" if loss > most else ""


def first_bad_module(model: nn.Module, batch: dict, precision: str | None, device: str) -> str:
    """Parameters that are not finite, else the first module, in the order they run, that gives a number that is not."""
    broken = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if broken:
        return f"{broken[0]} is not finite" + (f" ({len(broken)} parameters are not)" if len(broken) > 1 else "")
    found: list[str] = []

    def look(name: str):
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not found and any(not t.isfinite().all() for t in tensors_in(out) if t.is_floating_point()):
                found.append(name or "the model itself")

        return hook

    hooks = [m.register_forward_hook(look(name)) for name, m in model.named_modules()]
    try:
        with torch.no_grad(), in_precision(precision, device) if precision else contextlib.nullcontext():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the first module whose result is not finite is {found[0]}" if found else "every module's result is finite by now"
