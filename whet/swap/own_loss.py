"""Head and loss of a Hugging Face model whose loss is not the causal one: BERT's, T5's and Whisper's labels are not shifted.

Its forward and its loss run as they are, with what the head hands on in the place of logits.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map

from whet.swap import Edit, Left, Met, Site
from whet.swap._handed import Handed, edits_of, served
from whet.swap.lm_head import asks_causal_loss, head_of, head_site, language_model, plain


def forward(self, *args, **kwargs):
    asked = self.training and kwargs.get("labels") is not None and kwargs.get("return_dict") is not False
    if asked and torch.is_grad_enabled() and plain(head_of(self)) and not torch.compiler.is_compiling():
        done, out = self._whet_handed.run(self._whet_forward, args, kwargs)
        if done and not isinstance(out, Mapping):
            return tree_map(lambda v: None if isinstance(v, Handed) else v, out)
        if done:
            return type(out)(**{k: v for k, v in out.items() if not isinstance(v, Handed)})
    return self._whet_forward(*args, **kwargs)


def edits(model: nn.Module, ops) -> list[Edit]:
    return edits_of(head_of(model), model, forward, ops)


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    path = language_model(model, met)
    if path is None or head_of(model.get_submodule(path)) is None or asks_causal_loss(model.get_submodule(path)):
        return
    yield head_site(model, met, path, edits, served)
