"""Head and loss of a model that calls F.cross_entropy in its own forward. Returned logits are None where that is asked for."""

import types
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_map

from whet.swap import Left, Met, Site
from whet.swap._biases import covered_biases
from whet.swap._globals import plain_function
from whet.swap._handed import Handed, edits_of, served
from whet.swap._packed import is_plain
from whet.swap._proof import outputs_left

NAME = "cross_entropy"


def forward(self, *args, **kwargs):
    """The forward with head and loss in one, in training; as it was elsewhere, and where its loss is never come to."""
    if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        done, out = self._whet_handed.run(self._whet_forward, args, kwargs)
        if done:
            return tree_map(lambda v: None if isinstance(v, Handed) else v, out)
    return self._whet_forward(*args, **kwargs)


def own_forward(module: nn.Module) -> types.FunctionType | None:
    """The function behind this module's forward, where it calls F.cross_entropy."""
    function = plain_function(module.forward)
    return function if function is not None and NAME in function.__code__.co_names else None


def heads_of(module: nn.Module, function: types.FunctionType) -> list[str]:
    """Names of linear layers that the forward names."""
    return [n for n, m in module.named_children() if isinstance(m, nn.Linear) and n in function.__code__.co_names]


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    taken = list[nn.Module]()
    for path, module in model.named_modules():
        function = own_forward(module)
        if path not in met or function is None or callable(getattr(module, "get_output_embeddings", None)):
            continue
        heads = heads_of(module, function)
        if len(heads) != 1:
            yield Left(path, f"it calls cross_entropy and names {len(heads)} linear layers: which is its head is not clear")
            continue
        linear = module.get_submodule(heads[0])
        if type(linear) is not nn.Linear or not is_plain(linear.weight):
            yield Left(path, f"its head {heads[0]} is not a plain linear layer")
            continue
        if any(linear is other for other in taken):
            yield Left(path, f"its head {heads[0]} is another module's, too")
            continue
        taken.append(linear)
        if not module.training:
            yield Left(path, "it is in eval mode, where logits are wanted beside the loss")
            continue

        def with_head(module, ops, head=heads[0]):
            return edits_of(module.get_submodule(head), module, forward, ops)

        site = Site(
            path, module, with_head, f"head of {linear.out_features:,} words and its loss", serves=served, drops="asked",
            covers=covered_biases(path, module, heads),
            unasked="its forward does more with the logits than hand them to a loss that linear_cross_entropy computes",
        )
        left, whole = outputs_left(site, met[path]), outputs_left(replace(site, edits=lambda module, ops: []), met[path])
        yield replace(site, compares=left, drops="asked" if left != whole else "unless kept")
