"""Quantised linear layers in a proof: they keep their packed weights and their own dtype, whatever the rest is copied to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_plain(t: Any) -> bool:
    """Numbers as they are: no integers, no float8, no subclass of Tensor that holds them in another way, or elsewhere."""
    return type(t) in (torch.Tensor, nn.Parameter) and t.dtype in FLOATS


def is_packed(module: Any) -> bool:
    """A linear layer, by the sizes it names, without a weight of plain numbers."""
    sized = isinstance(getattr(module, "in_features", None), int) and isinstance(getattr(module, "out_features", None), int)
    return sized and not any(module.children()) and not is_plain(getattr(module, "weight", None))


class InOwnDtype(torch.autograd.Function):
    """A module's forward and backward in a dtype of its own, and out of sight of any dispatch mode."""

    @staticmethod
    def forward(ctx, x, forward: Callable, dtype: torch.dtype):
        with _disable_current_modes(), torch.enable_grad():
            ctx.x = x.detach().to(dtype).requires_grad_(ctx.needs_input_grad[0])
            ctx.out = forward(ctx.x)
            return ctx.out.detach().to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        with _disable_current_modes():
            torch.autograd.backward(ctx.out, grad.to(ctx.out.dtype))
            return ctx.x.grad.to(grad.dtype), None, None


def keep_packed(module: nn.Module, dtype: torch.dtype) -> None:
    """Every packed linear of this copy takes and gives what the copy computes in, and computes in this dtype."""
    for m in module.modules():
        if is_packed(m):
            own = m.forward
            m.__dict__["forward"] = lambda x, own=own: InOwnDtype.apply(x, own, dtype)
