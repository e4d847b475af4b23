"""What a decoder is compared with: the model by its plain formulas, in its own dtype or a wider one."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from whet.choices import Choices
from whet.models.qwen3 import Qwen3
from whet.workload import matmul_precision


@functools.cache
def formulas() -> Choices:
    return Choices(default="eager")


@contextlib.contextmanager
def by_formulas(model: Qwen3) -> Iterator[None]:
    """Every op its plain formula."""
    before, model.ops = model.ops, formulas()
    try:
        yield
    finally:
        model.ops = before


@torch.no_grad()
def widened(model: Any, dtype: torch.dtype) -> Any:
    """The function that the stored weights mean, quantised or not, in another dtype, every op by its plain formula."""
    wide = type(model)(model.c, "plain", device=model.embed.device, dtype=dtype).requires_grad_(False)
    ours, shared = dict(wide.named_modules()), model.head.data is model.embed
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if name != "data":
                getattr(ours[path], name).copy_(p)
            elif module is not model.head or not shared:
                ours[path].replace(module.dense(dtype).clone(), None)
    return wide


def full_float32() -> contextlib.AbstractContextManager[None]:
    """float32 products with all 24 bits: TF32 keeps 11, and would be no reference."""
    return matmul_precision("highest")
