"""Models, one file each, found by discovery: every module here that defines MODEL can be optimized, benched and trained."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whet.choices import Choices


@dataclass(frozen=True)
class Model:
    """What a model file offers.

    build(config, variant, ops) -> nn.Module      the variants compute the same function from the same parameters
    batch(config, device) -> dict                 keyword arguments of forward, which returns the loss
    canonical(config, named) -> dict              parameters (or gradients) of any variant under the plain variant's names
    adapt(config, variant, named) -> dict         the inverse: plain names to the variant's own
    """

    name: str
    sizes: Mapping[str, Any]
    build: Callable[[Any, str, Choices], torch.nn.Module]
    batch: Callable[[Any, str], dict]
    canonical: Callable[[Any, Mapping], dict]
    adapt: Callable[[Any, str, Mapping], dict]
    plain: str  # the variant that is the meaning: materialised, unfused
    stock: str  # the best variant with stock calls only
    tuned: str  # the variant that asks its choices for every op


@functools.cache
def discover() -> dict[str, Model]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {m.MODEL.name: m.MODEL for m in (importlib.import_module(f"{__name__}.{name}") for name in names)}


def find(target: str) -> tuple[Model, str]:
    """'tiny-llama:small' -> the model and the size; a plain name means its first size."""
    name, _, size = target.partition(":")
    models = discover()
    if name not in models:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(models)}")
    model = models[name]
    size = size or next(iter(model.sizes))
    if size not in model.sizes:
        raise ValueError(f"{name} has no size {size!r}; there are {', '.join(model.sizes)}")
    return model, size
