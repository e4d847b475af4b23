"""Attention of Hugging Face models, by their own attention interface: for this model's config alone.

Without a mask ops.attention serves. A mask in which each query sees one run of keys, as padding, packed documents and
windows make it, is read into spans and ops.attention_spans serves. Each only where the proof came to it.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap._few import fewest_rows
from whet.swap._masks import readable, spans_in
from whet.swap._spared_masks import mask

NAME = "whet"
INTERNAL = "_attn_implementation_internal"
KEPT = ("output_attentions", "softcap", "position_bias", "s_aux", "cache", "head_mask")  # options that SDPA's own serves

UNASKED = "it is called with a position bias or dropout, which ops.attention has no argument for"
MASKED = "it is called with a mask in which a query sees more than one run of keys, a position bias or dropout"


def asked(option) -> bool:
    return option is not None and option is not False


def attend(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None, **options
):
    """As transformers' sdpa_attention_forward; what the op has no argument for goes there."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    ops: Any = getattr(module, "_whet_ops", None)  # a module that was left shares its config with those that were not
    masked = attention_mask is not None
    served = ops is not None and masked == module._whet_masked and query.shape[0] * query.shape[2] >= module._whet_fewest
    if served and not dropout and not any(asked(options.get(name)) for name in KEPT):
        if not masked:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            kind = "top-left" if causal and query.shape[2] > 1 else None
            return ops.attention(query, key, value, kind, None, scaling).transpose(1, 2), None
        if fits(query, key, value, attention_mask) and (spans := spans_in(attention_mask)):
            first, last = (t.expand(query.shape[0], -1) for t in spans)
            return ops.attention_spans(query, key, value, first, last, scaling).transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
        sliding_window=sliding_window, **options,
    )


def fits(q, k, v, mask) -> bool:
    """Whether ops.attention_spans takes these, but for the mask's values. One query, a step of decoding, is not worth them."""
    if not readable(mask) or q.shape[2] == 1 or k.shape != v.shape or q.shape[3] != k.shape[3]:
        return False
    return mask.shape[0] in (1, q.shape[0]) and mask.shape[2:] == (q.shape[2], k.shape[2]) and mask.device == q.device


def register() -> bool:
    """Make the interface known to Transformers, masks as for SDPA: None where there is nothing to mask but what is causal."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    return True


def asks_interface(module: nn.Module) -> bool:
    forward = getattr(module.forward, "__func__", None)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def is_masked(module: nn.Module, call: Met) -> bool:
    """Whether a layer was handed a mask."""
    try:
        given = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        given = {}
    return (given | call.kwargs).get("attention_mask") is not None


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    found = [(path, module) for path, module in model.named_modules() if path in met and asks_interface(module)]
    if not found or not register():
        return
    for path, module in found:
        chosen = getattr(module.config, "_attn_implementation", None)
        if chosen != "sdpa":
            yield Left(path, f"its attention is set to {chosen!r}, by whoever made it; 'sdpa' is what is replaced")
            continue

        masked, fewest = is_masked(module, met[path]), fewest_rows(met[path])

        def edits(module, ops, masked=masked, fewest=fewest):
            facts = {"_whet_ops": ops, "_whet_masked": masked, "_whet_fewest": fewest}
            return [Edit(module.config, INTERNAL, NAME), *(Edit(module, name, value) for name, value in facts.items())]

        words = "scaled dot-product attention" + " under a mask" * masked
        yield Site(path, module, edits, words, unasked=MASKED if masked else UNASKED)
