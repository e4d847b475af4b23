"""A model's weights made smaller at load: int8 or fp8 with a scale for each row, int4 with a scale for each group of columns.

The formats are those of whet/ops/_weights.py. A scale is rounded to the model's dtype before the weights are divided by it,
so that a product in that dtype and one in float32 mean the same weights. embed stays as it is: a step reads one row of it.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from whet.ops._weights import group_of, quant_of

QUANTS = ("int8", "int4", "fp8")
FUSED = ("qkv", "o", "gate_up", "down")
SMALL = ("norm1", "qkv_bias", "q_norm", "k_norm", "o_bias", "norm2")
# int4: shares of the full range that are tried for each group. On normal values in groups of 128 these nine leave 73.3% of
# the error that the largest value over 7 leaves, six steps of 0.04 from 1 on 74.9%, seventeen of 0.02 from 1.06 on 73.1%.
CLIPS = tuple(1.05 - 0.025 * i for i in range(9))
# Elements worked on at once in float32. On a CPU int4 takes 53 ns an element in blocks of 2^15, 25 of 2^18, 50 of 2^24; on a
# GPU 2^24 are 64 MB a copy.
BLOCK = {"cpu": 2**18, "cuda": 2**24}


def quantize(model: Any, quant: str) -> None:
    """Replace the model's fused weights and its head by quantised ones, in place. A model that cannot be is left as it was."""
    if quant not in QUANTS:
        raise ValueError(f"quantize: quant must be one of {', '.join(QUANTS)}, got {quant!r}")
    found = dict(weights(model))
    for name, w in found.items():
        if reason := refuses(w.data, quant):
            raise ValueError(f"quantize[{quant}]: {name} {reason}")
    for name, w in found.items():
        if not torch.isfinite(torch.stack(torch.aminmax(w.data.detach()))).all():
            raise ValueError(f"quantize[{quant}]: {name} holds values that are not finite, expected none; check the checkpoint")
    for w in found.values():
        w.replace(*quantized(w.data, quant))


def weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Every weight that a product is made with, by name."""
    for i, layer in enumerate(model.layers):
        for part in FUSED:
            yield f"layers.{i}.{part}", getattr(layer, part)
    yield "head", model.head


def refuses(w: torch.Tensor, quant: str) -> str | None:
    """None, or why w cannot be quantised so."""
    if have := quant_of(w):
        return f"is {have} already, expected weights that are not quantised; load the model again"
    if quant == "int4":
        try:
            group_of(w.shape[1])
        except ValueError as e:
            return f"cannot be packed: {str(e).removeprefix('int4: ')}; use int8 or fp8"
    return None


@torch.no_grad()
def quantized(w: torch.Tensor, quant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w (N, K) as stored, and its scale. Rows are done in blocks: no float32 copy of the whole is made."""
    encode = {"int8": to_int8, "fp8": to_fp8, "int4": to_int4}[quant]
    rows = max(1, BLOCK.get(w.device.type, BLOCK["cuda"]) // w.shape[1])
    pieces = [encode(block.float(), w.dtype) for block in w.split(rows)]
    return torch.cat([p for p, _ in pieces]), torch.cat([s for _, s in pieces])


def to_int8(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = divisor(w.abs().amax(1) / 127, dtype)
    return (w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def to_fp8(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamped before the cast: past its largest value float8_e4m3fn has no infinity, only NaN."""
    top = torch.finfo(torch.float8_e4m3fn).max
    scale = divisor(w.abs().amax(1) / top, dtype)
    return (w / scale[:, None]).clamp_(-top, top).to(torch.float8_e4m3fn), scale


def to_int4(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    N, K = w.shape
    groups = w.view(N, -1, group_of(K))
    scale = int4_scale(groups, dtype)
    low, high = (nibbles(groups, scale) + 8).to(torch.uint8).view(N, K).chunk(2, dim=1)
    return low | high << 4, scale.squeeze(-1).to(dtype)


def int4_scale(groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the clipped ranges tried, for each group the one with the least squared error, a value's counted by its size.

    The value furthest from zero goes to -8, which reaches one step beyond 7: a positive one makes the scale negative.
    Large weights matter more than their squared error says. SmolLM2-135M on 1,024 tokens, KL from float32: 0.38 so, 0.48
    with all errors counted equally, 0.47 with the largest value at 7. (That file's weights were rounded to four bits before.)
    """
    counts = groups.abs()
    furthest = groups.gather(-1, counts.argmax(-1, keepdim=True))
    best, least = torch.ones_like(furthest), torch.full_like(furthest, math.inf)
    for clip in CLIPS:
        scale = divisor(furthest * (clip / -8), dtype)
        error = nibbles(groups, scale).mul_(scale).sub_(groups).square_().mul_(counts).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def nibbles(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / scale).round_().clamp_(-8, 7)


def divisor(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as dtype holds it, in float32; 1 where everything is zero."""
    stored = scale.to(dtype).float()
    return torch.where(stored == 0, 1.0, stored)


def bytes_per_token(model: Any, context: int) -> int:
    """What a decode step at batch 1 must read: every weight once, one row of embed, and the keys and values of the context."""
    if context < 0:
        raise ValueError(f"bytes_per_token: context must be at least 0 tokens, got {context}")
    c, total = model.c, size(model.embed[0]) + size(model.norm)
    total += sum(size(w.data) + size(w.scale) for _, w in weights(model))
    total += sum(size(getattr(layer, part)) for layer in model.layers for part in SMALL)
    seen = context if c.window is None else min(context, c.window)
    return total + 2 * c.layers * c.kv_heads * c.head_dim * seen * model.embed.element_size()


def size(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.numel() * t.element_size()

