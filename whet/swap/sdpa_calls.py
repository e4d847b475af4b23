"""Attention of a module whose own code calls F.scaled_dot_product_attention: that one call, for this module alone."""

import types
from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import nn

from whet.swap import Edit, Left, Met, Site
from whet.swap._globals import methods_naming, plain_function, stand_ins, with_globals

NAME = "scaled_dot_product_attention"


def fits(q, k, v, enable_gqa: bool) -> bool:
    """Whether ops.attention takes these: (B, H, L, D) of one dtype and one D, heads that SDPA would pair in the same way."""
    if q.is_nested or k.is_nested or v.is_nested or not (q.dim() == k.dim() == v.dim() == 4):
        return False
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not (q.dtype == k.dtype == v.dtype):
        return False
    heads, kv = q.shape[1], k.shape[1]
    return heads == kv or bool(enable_gqa and kv and heads % kv == 0)


def attention(ops) -> Callable:
    """SDPA through ops.attention where that has an argument for all that is asked; through SDPA elsewhere."""
    theirs, attend = F.scaled_dot_product_attention, ops.attention

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None or dropout_p or not fits(query, key, value, enable_gqa):
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return attend(query, key, value, "top-left" if is_causal else None, None, scale)

    return scaled_dot_product_attention


def edits(module: nn.Module, ops) -> list[Edit]:
    ours, made = attention(ops), []
    for name in methods_naming(module, NAME):
        function = plain_function(getattr(module, name))
        assert function is not None
        served = with_globals(function, **stand_ins(function, F, NAME, ours))
        made.append(Edit(module, name, types.MethodType(served, module)))
    return made


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        if path not in met:
            continue
        if isinstance(module, nn.MultiheadAttention):
            yield Left(path, "nn.MultiheadAttention calls its attention inside torch, out of reach")
            continue
        if not any(True for _ in methods_naming(module, NAME)):
            continue
        yield Site(
            path, module, edits, "scaled dot-product attention",
            unasked="it is called with a mask, dropout or shapes that ops.attention has no argument for",
        )
