"""The causal mask of a Hugging Face decoder that is given no positions and no mask: none has to be built.

Transformers looks at the positions of every batch, on the host, for sequences packed into one row. Where it may not look,
while a CUDA graph is captured or torch.compile traces, it builds a dense mask, with which attention reads three times
as much. A decoder that makes its positions itself has nothing packed, and its kernels' own causal mask does.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from whet.swap import Edit, Left, Met, Site, new_forward
from whet.swap._causal import KNOWN
from whet.swap.attention import INTERNAL, NAME, register

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
GIVEN = ("attention_mask", "position_ids", "past_key_values", "cache_position", "encoder_hidden_states")


def makes_masks(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    makes = code is not None and any(name in code.co_names for name in MAKERS) and hasattr(module, "config")
    return makes and any(getattr(m, "is_causal", False) is True for m in module.modules())


def given(module: Any, args: tuple, kwargs: dict) -> list[str]:
    """Which of the arguments that a mask depends on were given."""
    names = list(inspect.signature(module._whet_forward).parameters)
    bound = dict(zip(names, args)) | kwargs
    return [k for k in GIVEN if bound.get(k) is not None]


def forward(self, *args, **kwargs):
    if given(self, args, kwargs) or kwargs.get("use_cache"):
        return self._whet_forward(*args, **kwargs)
    before = KNOWN.causal, KNOWN.skipped
    KNOWN.causal, KNOWN.skipped = True, self._whet_skipped
    try:
        return self._whet_forward(*args, **kwargs)
    finally:
        KNOWN.causal, KNOWN.skipped = before


def edits(module: Any, ops) -> list[Edit]:
    return [Edit(module.config, INTERNAL, NAME), Edit(module, "_whet_skipped", {}), *new_forward(module, forward)]


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    found = [(path, m) for path, m in model.named_modules() if path in met and makes_masks(m)]
    if not found or not register():
        return
    for path, module in found:
        if getattr(module.config, "_attn_implementation", None) != "sdpa":
            continue
        if not any(met[path].kwargs.get(k) is not None for k in GIVEN):
            yield Site(path, module, edits, "causal mask that is not built", asks=False, alone=False)
