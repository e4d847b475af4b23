"""A language model's head and loss in one: the logits of a training step are never whole in memory.

The model's own forward runs as it is. Its head hands the hidden states on, its loss function gets them in the place of
logits, and computes both. Where anything else touches the logits in between, that shows, and the model is left alone.
The model may be inside another one, such as PEFT's; then that is what is proved and timed.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.figures import error_line
from whet.padding import head_for_loss, logical_sizes
from whet.swap import Edit, Edits, Left, Met, Site, new_forward
from whet.swap._biases import covered_biases
from whet.swap._packed import is_plain
from whet.swap._proof import outputs_left


@dataclass
class Passed:
    """The hidden states on their way from the head to the loss."""

    on: bool = False
    hidden: torch.Tensor | None = None
    used: bool = False


def head_of(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def language_model(model: nn.Module, met: dict[str, Met]) -> str | None:
    """Path of the one module that is called with labels and has a loss function of Transformers': the model, or inside it."""
    paths = [
        path for path, m in model.named_modules()
        if path in met and met[path].kwargs.get("labels") is not None and hasattr(type(m), "loss_function")
    ]
    return paths[0] if len(paths) == 1 else None


def plain(head: Any) -> bool:
    """Whether its weight is there to be read: no adapter around, not packed, not sharded (FSDP lends it to its own call)."""
    return type(head) is nn.Linear and is_plain(head.weight)


def head_forward(self, hidden):
    if not self._whet_passed.on:
        return self._whet_forward(hidden)
    self._whet_passed.hidden = hidden
    return hidden


def forward(self, *args, **kwargs):
    asked = self.training and kwargs.get("labels") is not None and kwargs.get("return_dict") is not False
    if not asked or not plain(head_of(self)):
        return self._whet_forward(*args, **kwargs)
    passed = self._whet_passed
    passed.on, passed.used = True, False
    try:
        out = self._whet_forward(*args, **kwargs)
    except Exception:  # of a loss that was given hidden states for logits; what else is wrong is raised again below
        if passed.used:
            raise
    finally:
        passed.on, passed.hidden = False, None
    if not passed.used or not isinstance(out, Mapping):
        return self._whet_forward(*args, **kwargs)
    return type(out)(**{k: v for k, v in out.items() if k != "logits"})  # out["logits"] has hidden states, whatever .logits is


def edits(model: nn.Module, ops) -> list[Edit]:
    head, passed, loss_of = head_of(model), Passed(), ops.linear_cross_entropy

    def loss(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **options):
        passed, head = self._whet_passed, head_of(self)
        if not passed.on or logits is not passed.hidden or vocab_size != logical_sizes(head)[1]:
            counts = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return self._whet_loss(logits, labels, vocab_size, **counts, **options)
        passed.used = True
        w, b = head_for_loss(head, logits.dtype)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return loss_of(logits, w, shift_labels.to(logits.device), ignore_index, "mean", 0.0, None, num_items_in_batch, b)

    return [
        *new_forward(head, head_forward), *new_forward(model, forward), Edit(head, "_whet_passed", passed),
        Edit(model, "_whet_passed", passed), Edit(model, "_whet_loss", model.loss_function),
        Edit(model, "_loss_function", types.MethodType(loss, model)),
    ]


def served(model: Any) -> bool:
    return model._whet_passed.used


def head_site(model: nn.Module, met: dict[str, Met], path: str, edits: Edits, served: Callable) -> Site | Left:
    """Head and loss of the language model at a path as one; where another is around it, that is what is proved and timed."""
    inner: Any = model.get_submodule(path)
    head = head_of(inner)
    if type(head) is not nn.Linear:
        return Left(path, f"its head is a {type(head).__name__}, not a plain linear layer")
    if not plain(head):
        return Left(path, f"its head's weight is a {type(head.weight).__name__} of {head.weight.dtype}, not a plain parameter")
    if not inner.training:
        return Left(path, "it is in eval mode, where logits are wanted beside the loss")
    words = f"head of {logical_sizes(head)[1]:,} words{'' if head.bias is None else ', with a bias,'} and its loss"
    site = Site(
        "", model, lambda model, ops: edits(model.get_submodule(path), ops), words, compares=("['loss']",),
        serves=lambda model: served(model.get_submodule(path)), drops="unless kept",
        covers=covered_biases("", model, [n for n, m in model.named_modules() if m is head]),
        unasked="its forward does more with the logits than hand them to a loss that linear_cross_entropy computes",
    )
    if not path:
        return site
    try:
        compares = outputs_left(site, met[""])
    except Exception as e:
        return Left(path, f"{words}: what is around it fails without its logits: {error_line(e)}")
    return replace(site, compares=compares, drops="unless kept" if compares == ("['loss']",) else "asked")


def asks_causal_loss(model: nn.Module) -> bool:
    """Whether its forward names its loss function, and that is the one by which tokens predict the next."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    asked = code is not None and "loss_function" in code.co_names
    return asked and getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    path = language_model(model, met)
    if path is None:
        if head_of(model) is not None and met.get("", Met((), {})).kwargs.get("labels") is not None:
            yield Left("", "which of its modules computes the loss is not clear")
    elif head_of(model.get_submodule(path)) is not None and asks_causal_loss(model.get_submodule(path)):
        yield head_site(model, met, path, edits, served)
