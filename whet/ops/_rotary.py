"""Tables of rotary embeddings: cos and sin of every position and pair of channels."""

import torch


def frequencies(rotary_dim, theta=10000.0, device=None):
    """Radians per position of each pair of channels, theta^(-2i/rotary_dim), in float64."""
    return theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)


def tables_of(P, radians, factor=1.0):
    """cos and sin of p * radians for positions p < P, times the factor: two fp32 tables (P, pairs).

    Computed in float64 and rounded once: computed in fp32 the angle at position 65535 is off by 0.0013 (128 channels).
    """
    angle = torch.outer(torch.arange(P, dtype=torch.float64, device=radians.device), radians)
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def tables(P, rotary_dim, theta=10000.0, device=None):
    """cos and sin of p * theta^(-2i/rotary_dim) for positions p < P: two fp32 tables (P, rotary_dim/2)."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rope: rotary_dim must be even and at least 2, got {rotary_dim}")
    return tables_of(P, frequencies(rotary_dim, theta, device))
