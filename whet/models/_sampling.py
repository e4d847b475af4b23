"""Text from a model, token by token, over a cache of keys and values: a new token runs as one row."""

import math

import torch

from whet.choices import Choices
from whet.models import Sampleable


class LayerCache:
    """Keys and values of one layer, of all tokens so far: tensors of `size` tokens, made when the first ones come."""

    def __init__(self, size: int):
        self.size, self.length = size, 0
        self.keys = self.values = torch.empty(0)

    def attend(self, q, k, v, window: int | None, ops: Choices) -> torch.Tensor:
        """Attention of new tokens to those that are cached and to themselves; their keys and values are cached too."""
        old, T = self.length, k.shape[2]
        if not old:
            self.keys, self.values = (t.new_empty(*t.shape[:2], self.size, t.shape[3]) for t in (k, v))
        self.length = old + T
        self.keys[:, :, old : self.length], self.values[:, :, old : self.length] = k, v
        first = max(0, old + 1 - window) if window else 0  # what the first of the new tokens sees
        keys, values = (t[:, :, first : self.length] for t in (self.keys, self.values))
        if T == 1:
            return ops.attention(q, keys, values)
        return ops.attention(q, keys, values, causal="bottom-right", window=window)


def new_cache(layers: int, size: int) -> list[LayerCache]:
    """An empty cache, for so many tokens."""
    return [LayerCache(size) for _ in range(layers)]


@torch.no_grad()
def generate(
    model: Sampleable, tokens, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> torch.Tensor:
    """tokens (B, T) and what follows them; temperature 0: the likeliest each time.

    Past max_positions the context slides: every token then has another position, so that nothing cached holds, and each new
    one runs the last max_positions tokens.
    """
    for name, value, least in (("max_new_tokens", max_new_tokens, 0), ("temperature", temperature, 0), ("top_k", top_k, 1)):
        if value is not None and not value >= least:
            raise ValueError(f"generate: {name} must be at least {least}, got {value}")
    generator, longest = torch.Generator(tokens.device).manual_seed(seed), model.c.max_positions
    cache = new_cache(model.c.layers, min(longest, tokens.shape[1] + max_new_tokens))
    new = tokens
    for _ in range(max_new_tokens):
        cached = tokens.shape[1] <= longest
        z = model.logits(new if cached else tokens[:, -longest:], True, cache if cached else None)[:, 0].float()
        if temperature == 0:
            new = z.argmax(-1, keepdim=True)
        else:
            lowest = z.topk(min(top_k or z.shape[-1], z.shape[-1])).values[:, -1:]
            new = torch.multinomial((z.masked_fill(z < lowest, -math.inf) / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, new], 1)
    return tokens
