"""Models and caches made to show a fault: a few layers of a real model's width with weights and old keys that hide nothing.

plain     residual, attention and MLP of one size, norms between 0.5 and 1.5, keys that differ
hostile   outlier channels, norms of either sign and zero, old keys so similar that each of them counts
small     everything so near to zero that the eps of each norm counts
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from whet.choices import Choices
from whet.decode.quantize import quantize
from whet.models.qwen3 import Layer, Qwen3, Qwen3Config

FAMILIES = ("plain", "hostile", "small")
LAYERS = 2  # the second meets what the first wrote; more would only average faults away
OUTLIERS = 4  # channels
# How much larger they are. In float32 a sum over outliers cancels, and two right orders of it can differ by more than the rule
# grants; what float32 is there for, small faults, shows without them.
OUTLIER = {torch.float32: 2.0}


def few_layers(c: Qwen3Config, layers: int = LAYERS) -> Qwen3Config:
    return replace(c, layers=min(c.layers, layers))


def size_of(family: str, c: Qwen3Config) -> float:
    """The size of the residual stream and of values: about the root of eps, where eps counts."""
    return 2 * c.eps**0.5 if family == "small" else 1.0


@torch.no_grad()
def model_of_family(
    c: Qwen3Config, family: str, dtype: torch.dtype, device: str, quant: str | None = None, ops: str = "triton",
) -> Qwen3:
    """A model of this family's weights, every op of its own by whet's kernels, or by the impl named."""
    model = Qwen3(c, ops=Choices(default=ops), device=device, dtype=dtype).requires_grad_(False)
    generator = torch.Generator(model.embed.device).manual_seed(FAMILIES.index(family) + 1)
    size = size_of(family, c)

    def draw(t: torch.Tensor, std: float) -> None:
        t.normal_(0, std, generator=generator)

    def norm(t: torch.Tensor | None) -> None:
        if t is not None:
            t.copy_(weights_of_norm(t, family, generator))

    draw(model.embed, size)
    if not c.tied:
        draw(model.head.data, c.hidden**-0.5)
    norm(model.norm)
    layer: Layer
    for layer in model.layers:
        for vector in (layer.norm1, layer.norm2, layer.q_norm, layer.k_norm):
            norm(vector)
        draw(layer.qkv.data, size * c.hidden**-0.5)
        draw(layer.o.data, (c.heads * c.head_dim) ** -0.5)
        draw(layer.gate_up.data, c.hidden**-0.5)
        draw(layer.down.data, 2 * size * c.ffn**-0.5)
        for bias in (layer.qkv_bias, layer.o_bias):
            if bias is not None:
                draw(bias, size / 2)
    if family == "hostile":
        channels = torch.randperm(c.hidden, generator=generator, device=generator.device)[:OUTLIERS]
        model.embed[:, channels] *= OUTLIER.get(dtype, 16.0)
    if quant is not None:
        quantize(model, quant)
    return model


def weights_of_norm(like: torch.Tensor, family: str, generator: torch.Generator) -> torch.Tensor:
    """No two equal: norms of ones would hide a wrong index."""
    w = torch.rand(like.shape, generator=generator, device=like.device) + 0.5
    if family != "hostile":
        return w
    drawn = torch.rand(like.shape, generator=generator, device=like.device)
    return torch.where(drawn < 0.5, -w, w) * (drawn > 0.02)


@torch.no_grad()
def caches(model: Qwen3, olds: Sequence[int], capacity: int, family: str) -> list[torch.Tensor]:
    """Keys and values (layers, rows, KV, capacity, D): of row b the first olds[b] are written, all others are NaN.

    A value stands out in the channel of its position, so that one that is missing or counted twice is seen.
    """
    c, like = model.c, model.embed
    generator = torch.Generator(like.device).manual_seed(len(olds) + sum(olds))
    shape = (c.layers, len(olds), c.kv_heads, capacity, c.head_dim)
    made = [torch.full(shape, float("nan"), dtype=like.dtype, device=like.device) for _ in range(2)]
    longest, size = max(olds), size_of(family, c)
    keys, values = (torch.randn((*shape[:3], longest, c.head_dim), generator=generator, device=like.device) for _ in range(2))
    keys *= 0.05 if family == "hostile" else 1.0
    at = torch.arange(longest, device=like.device)
    values[..., at, at % c.head_dim] += 8.0
    for t, drawn in zip(made, (keys, values * size)):
        for row, old in enumerate(olds):
            t[:, row, :, :old] = drawn[:, row, :, :old].to(t.dtype)
    return made
