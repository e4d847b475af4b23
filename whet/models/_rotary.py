"""Rotary frequencies of the models: theta, and the scalings that stretch a trained context."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from whet.ops import _rotary

SCALINGS = ("default", "linear", "llama3", "yarn", "divisors")  # the last one is GGUF's: a number for each pair


def scaling_of(rope: Mapping[str, Any] | None) -> str:
    return (rope or {}).get("rope_type") or (rope or {}).get("type") or "default"


def tables(P: int, D: int, theta: float, scaling: Mapping[str, Any] | None, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position and pair, two float32 tables (P, D/2); angles in float64, rounded once."""
    radians, factor = frequencies(D, theta, scaling)
    return _rotary.tables_of(P, radians.to(device), factor)


def frequencies(D: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, float64, and the factor on cos and sin: the config's theta and scaling."""
    base = _rotary.frequencies(D, theta)
    rope, kind = scaling or {}, scaling_of(scaling)
    if kind == "default":
        return base, 1.0
    try:
        if kind == "divisors":
            return base / torch.tensor(rope["divisors"], dtype=torch.float64), 1.0
        factor = rope["factor"]
        if kind == "linear":
            return base / factor, 1.0
        trained = rope["original_max_position_embeddings"]
        if kind == "llama3":  # long waves are stretched, short ones kept, between them a ramp
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            turns = trained * base / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return base * (kept + (1 - kept) / factor), 1.0
    except KeyError as e:
        raise ValueError(f"rope_scaling: type {kind} needs {e.args[0]}, got {', '.join(sorted(rope))}") from None
    return yarn(base, theta, rope, factor, trained)


def yarn(base: torch.Tensor, theta: float, rope: Mapping[str, Any], factor: float, trained: int) -> tuple[torch.Tensor, float]:
    """As llama3, with a ramp over pairs rather than turns, and cos and sin scaled by a factor of the stretch."""
    D = 2 * len(base)

    def pair_that_turns(times):
        return D * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    def strength(m):
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    low, high = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = (torch.arange(len(base), dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        m, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = strength(m) / strength(all_dim) if m and all_dim else strength(1)
    return base * (kept + (1 - kept) / factor), float(scale)
