"""Models, one file each, found by discovery: every module here that defines MODEL can be optimized, benched and trained."""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, apart from what it is."""

    batch: int = 8
    seq_len: int = 128
    lr: float = 3e-4
    seed: int = 42


@dataclass(frozen=True)
class TaskRecipe(Recipe):
    """A Recipe of a model that takes regression tasks: `context` of the seq_len points of a task, the rest are targets."""

    context: int = 64

    def __post_init__(self):
        if not 0 < self.context < self.seq_len:
            raise ValueError(f"recipe: a task needs more points than its {self.context:,} of context, got {self.seq_len:,}")


class Decoder(Protocol):
    """What a model must have to be decoded: hidden states over a cache of keys and values, and what becomes of them."""

    def extend(self, tokens: Any, cache_k: Any, cache_v: Any, positions: Any, start: int = 0) -> torch.Tensor:
        """Hidden states of any number of new tokens for each row, whose keys and values go into the cache."""

    def step(self, tokens: Any, cache_k: Any, cache_v: Any, positions: Any, context: int = 0) -> torch.Tensor:
        """extend for a few tokens a row, by the decode ops."""

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next token of each row, and its logit."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm and the head."""


class Sampleable(Protocol):
    """What a model must have to be sampled. c is its configuration, of which layers and max_positions are read."""

    c: Any

    def logits(self, tokens: Any, last: bool = False, cache: Any = None) -> torch.Tensor:
        """(B, T, vocab); last: of the last token alone. cache: a LayerCache for each layer, of the tokens before these."""


@dataclass(frozen=True)
class Model:
    """What a model file offers.

    sizes, recipes                                by the name of a size: the architecture, and how it is trained
    build(config, variant, ops, seed) -> module   the variants compute the same function from the same parameters
    batch(config, recipe, device) -> dict         keyword arguments of forward, which returns the loss
    takes                                         "tokens" and labels, or "tasks": features and targets of regression
    decodes, samples                              whether what is built is a Decoder, and whether it is Sampleable
    canonical(config, named) -> dict              parameters (or gradients) of any variant under the plain variant's names
    adapt(config, variant, named) -> dict         the inverse: plain names to the variant's own
    to_hf(config, named) -> dict, dict            config.json and the parameters for Transformers; None: it is not exported
    """

    name: str
    sizes: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    build: Callable[..., torch.nn.Module]
    batch: Callable[[Any, Recipe, str], dict]
    canonical: Callable[[Any, Mapping], dict]
    adapt: Callable[[Any, str, Mapping], dict]
    plain: str  # the variant that is the meaning: materialised, unfused
    stock: str  # the best variant with stock calls only
    tuned: str  # the variant that asks its choices for every op
    decodes: bool = False
    takes: str = "tokens"
    samples: bool = False
    to_hf: Callable[[Any, Mapping], tuple[dict, dict]] | None = None


@functools.cache
def discover() -> dict[str, Model]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {m.MODEL.name: m.MODEL for m in (importlib.import_module(f"{__name__}.{name}") for name in names)}


def recipe_of(target: str) -> Recipe:
    """How the size is trained; 'gpt2:d12@4x512': with batches of 4 rows of 512 tokens, or of tasks of 512 points."""
    model, size = find(target)
    found = re.fullmatch(r"(\d+)x(\d+)", target.partition("@")[2])
    if "@" in target and not (found and int(found[1]) and int(found[2])):
        raise ValueError(f"{target}: after @ come the rows and the tokens of a batch, such as {model.name}:{size}@4x512")
    return replace(model.recipes[size], batch=int(found[1]), seq_len=int(found[2])) if found else model.recipes[size]


def find(target: str) -> tuple[Model, str]:
    """'tiny-llama:small' -> the model and the size; a plain name means its first size. What follows @ is the recipe's."""
    name, _, size = target.partition("@")[0].partition(":")
    models = discover()
    if name not in models:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(models)}")
    model = models[name]
    size = size or next(iter(model.sizes))
    if size not in model.sizes:
        raise ValueError(f"{name} has no size {size!r}; there are {', '.join(model.sizes)}")
    return model, size
