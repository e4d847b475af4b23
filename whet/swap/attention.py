"""Attention of Hugging Face models, by their own attention interface: for this model's config alone."""

from collections.abc import Iterator

from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap._causal import mask

NAME = "whet"
INTERNAL = "_attn_implementation_internal"
KEPT = ("output_attentions", "softcap", "position_bias", "s_aux", "cache", "head_mask")  # options that SDPA's own serves


def asked(option) -> bool:
    return option is not None and option is not False


def attend(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None, **options
):
    """As transformers' sdpa_attention_forward; what the op has no argument for goes there."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    ops = getattr(module, "_whet_ops", None)  # a module that was left shares its config with those that were not
    if ops is None or attention_mask is not None or dropout or any(asked(options.get(name)) for name in KEPT):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            sliding_window=sliding_window, **options,
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    kind = "top-left" if causal and query.shape[2] > 1 else None
    return ops.attention(query, key, value, kind, None, scaling).transpose(1, 2), None


def register() -> bool:
    """Make the interface known to Transformers, masks as for SDPA: None where the kernel's own causal mask does."""
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


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    found = [(path, module) for path, module in model.named_modules() if path in met and asks_interface(module)]
    if not found or not register():
        return
    for path, module in found:
        chosen = getattr(module.config, "_attn_implementation", None)
        if chosen != "sdpa":
            yield Left(path, f"its attention is set to {chosen!r}, by whoever made it; 'sdpa' is what is replaced")
            continue

        def edits(module, ops):
            return [Edit(module.config, INTERNAL, NAME), Edit(module, "_whet_ops", ops)]

        yield Site(
            path, module, edits, "scaled dot-product attention",
            unasked="it is called with a mask, a position bias or dropout, which ops.attention has no argument for",
        )
