"""The causal mask of a Hugging Face decoder that is given no positions and no mask: none has to be built.

Transformers looks at the positions of every batch, on the host, for sequences packed into one row. Where it may not look,
while a CUDA graph is captured or torch.compile traces, it builds a dense mask, with which attention reads three times as
much. A decoder that makes its positions itself has nothing packed, and its kernels' own causal mask does.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from whet.swap import Edit, Left, Met, Site, new_forward
from whet.swap._spared_masks import KNOWN
from whet.swap.attention import INTERNAL, NAME, register

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
GIVEN = ("attention_mask", "position_ids", "past_key_values", "cache_position", "encoder_hidden_states")
CACHED = "use_cache"
OWN = "allow_is_causal_skip"  # an argument of the makers: such a decoder needs the mask itself
COUNTED = "cumsum"  # positions counted from what the batch holds, not one after the other


def makes_masks(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    makes = code is not None and any(name in code.co_names for name in MAKERS) and hasattr(module, "config")
    return makes and any(getattr(m, "is_causal", False) is True for m in module.modules())


def why_not(module: nn.Module) -> str:
    """Why a decoder's mask is always built; empty where it need not be."""
    code = inspect.unwrap(type(module).forward).__code__
    if any(OWN in const for const in code.co_consts if isinstance(const, tuple)) or OWN in code.co_consts:
        return "it asks for a mask that is always built"
    return "it counts its positions from the batch" if COUNTED in code.co_names else ""


def given(names: Iterable[str], args: tuple, kwargs: dict) -> list[str]:
    """Which of the arguments that a mask depends on were given. names: of the forward's arguments, in order."""
    bound = dict(zip(names, args)) | kwargs
    return [k for k in GIVEN if bound.get(k) is not None] + [CACHED] * bool(bound.get(CACHED))


def forward(self, *args, **kwargs):
    before, KNOWN.config = KNOWN.config, None if given(self._whet_arguments, args, kwargs) else self.config
    try:
        return self._whet_forward(*args, **kwargs)
    finally:
        KNOWN.config = before


def edits(module: Any, ops) -> list[Edit]:
    names = Edit(module, "_whet_arguments", tuple(inspect.signature(module.forward).parameters))
    return [Edit(module.config, INTERNAL, NAME), names, *new_forward(module, forward)]


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    found = [(path, m) for path, m in model.named_modules() if path in met and makes_masks(m)]
    if not found or not register():
        return
    for path, module in found:
        if getattr(module.config, "_attn_implementation", None) != "sdpa":
            continue
        call = met[path]
        if why := why_not(module):
            yield Left(path, why)
        elif not given(inspect.signature(module.forward).parameters, call.args, call.kwargs):
            yield Site(path, module, edits, "causal mask that is not built", asks=False, alone=False)
