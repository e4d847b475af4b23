"""A language model's head and loss in one: the logits of a training step are never whole in memory.

The model's own forward runs as it is. Its head hands the hidden states on, its loss function gets them in the place of
logits, and computes both. Where anything else touches the logits in between, that shows, and the model is left alone.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.swap import Edit, Left, Met, Site, new_forward


@dataclass
class Passed:
    """The hidden states on their way from the head to the loss."""

    on: bool = False
    hidden: torch.Tensor | None = None
    used: bool = False


def head_of(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def refusal(model: nn.Module, head: Any) -> str | None:
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    if name != "ForCausalLMLoss":
        return f"its loss is {name or 'its own'}, not Transformers' ForCausalLMLoss"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain linear layer"
    return None


def head_forward(self, hidden):
    if not self._whet_passed.on:
        return self._whet_forward(hidden)
    self._whet_passed.hidden = hidden
    return hidden


def forward(self, *args, **kwargs):
    if not self.training or kwargs.get("labels") is None or kwargs.get("return_dict") is False:
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
    if not passed.used:
        return self._whet_forward(*args, **kwargs)
    out.logits = None
    return out


def edits(model: nn.Module, ops) -> list[Edit]:
    head, passed, loss_of = head_of(model), Passed(), ops.linear_cross_entropy

    def loss(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **options):
        passed, head = self._whet_passed, head_of(self)
        w, b = head.weight, head.bias
        if not passed.on or logits is not passed.hidden or vocab_size != w.shape[0]:
            counts = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return self._whet_loss(logits, labels, vocab_size, **counts, **options)
        passed.used = True
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


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    head = head_of(model)
    if head is None or "" not in met or met[""].kwargs.get("labels") is None:
        return
    if why := refusal(model, head):
        yield Left("", why)
        return
    if not model.training:
        yield Left("", "it is in eval mode, where logits are wanted beside the loss")
        return
    words = f"head of {head.weight.shape[0]:,} words{'' if head.bias is None else ', with a bias,'} and its loss"
    yield Site(
        "", model, edits, words, compares=("['loss']",), serves=served, drops="unless kept",
        unasked="its forward computes the loss itself, or changes the logits, and never asks its loss_function",
    )
