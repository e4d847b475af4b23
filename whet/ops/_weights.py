"""Weights of a product as they are stored: plain, int8 or fp8 with a scale for each row, int4 with a scale for each group.

int8, float8_e4m3fn   w (N, K), scale float32 (N,):              w[n, k] * scale[n]
int4                  w uint8 (N, K/2), scale (N, K/G):          (nibble - 8) * scale[n, k // G]; a byte holds column j in its
                      low half and column j + K/2 in its high half, so that a kernel meets x in two plain pieces
"""

import torch

from whet.op import floating

QUANTISED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
GROUPS = (128, 64, 32)


def quant_of(w: torch.Tensor) -> str | None:
    return QUANTISED.get(w.dtype)


def columns(w: torch.Tensor) -> int:
    """K, however w is packed."""
    return w.shape[1] * (2 if w.dtype == torch.uint8 else 1)


def group_of(K: int) -> int:
    """Columns that share a scale in int4."""
    fits = [g for g in GROUPS if K % (2 * g) == 0]
    if not fits:
        raise ValueError(f"int4: the columns must be a multiple of {2 * GROUPS[-1]}, got {K}")
    return fits[0]


def dense(w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The weights as an ordinary matrix (N, K) in dtype; products with them are what the stored form means."""
    if scale is None:
        return w.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if w.dtype != torch.uint8:
        return (w.to(wide) * scale.to(wide)[:, None]).to(dtype)
    halves = torch.cat([(w & 15).to(wide), (w >> 4).to(wide)], dim=1) - 8
    return (halves * scale.to(wide).repeat_interleave(halves.shape[1] // scale.shape[1], dim=1)).to(dtype)


def check_weight(w: torch.Tensor, scale: torch.Tensor | None, K: int, N: int | None = None, name: str = "w") -> str | None:
    """None, or why w and its scale cannot be multiplied with rows of K."""
    if w.dim() != 2 or columns(w) != K or N not in (None, w.shape[0]):
        expected = f"({'N' if N is None else N}, {K}{'/2), two int4 to a byte' if w.dtype == torch.uint8 else ')'}"
        return f"{name} must have shape {expected}, got {tuple(w.shape)}"
    quant = quant_of(w)
    if reason := floating(**({} if quant else {name: w}), scale=scale):
        return reason
    if (quant is None) != (scale is None):
        return f"scale must be {f'given with {quant} weights' if quant else 'None for weights that are not quantised'}"
    if scale is None:
        return None
    if quant == "int4" and K % (2 * GROUPS[-1]):
        return f"{name} in int4 must have a multiple of {2 * GROUPS[-1]} columns, got {K}"
    shape = (w.shape[0], K // group_of(K)) if quant == "int4" else (w.shape[0],)
    return None if scale.shape == shape else f"scale must have shape {shape} to match {name}, got {tuple(scale.shape)}"


def random_weight(
    N: int, K: int, quant: str | None, dtype: torch.dtype, device: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight and its scale for tests and benchmarks: values about 1/sqrt(K), as a trained model's."""
    if quant is None:
        return torch.randn(N, K, dtype=dtype, device=device) * K**-0.5, None
    if quant == "int4":
        w = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
        return w, (torch.rand(N, K // group_of(K), device=device) + 0.5).mul(K**-0.5 / 4).to(dtype)
    if quant == "int8":
        w = torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)
    elif quant == "fp8":
        w = (torch.randn(N, K, device=device) * 64).to(torch.float8_e4m3fn)
    else:
        raise ValueError(f"quant must be None or one of {sorted(QUANTISED.values())}, got {quant!r}")
    return w, (torch.rand(N, device=device) + 0.5) * (K**-0.5 / 64)
