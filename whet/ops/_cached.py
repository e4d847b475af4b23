"""What ops that write keys and values into a cache have in common: what they check, and what their kernels refuse."""

import torch

from whet.op import floating, same_device
from whet.ops._rows import KERNEL_DTYPES


def check_caches(qkv, k_cache, v_cache, cos, sin, q_norm, k_norm, **others) -> str | None:
    """None, or why these do not go together: qkv (B, T, heads) and caches (B, KV, S, D). others: on the same device."""
    named = dict(qkv=qkv, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    if reason := floating(**named) or same_device(**named, **others):
        return reason
    if qkv.dim() != 3 or k_cache.dim() != 4:
        return f"qkv must be (B, T, heads) and k_cache (B, KV, S, D), got {tuple(qkv.shape)} and {tuple(k_cache.shape)}"
    B = qkv.shape[0]
    if v_cache.shape != k_cache.shape or k_cache.shape[0] != B or v_cache.dtype != k_cache.dtype:
        got = f"{tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}"
        return f"k_cache and v_cache must both be ({B}, KV, S, D) of one dtype, got {got}"
    return None


def check_tables(k_cache, cos, sin, q_norm, k_norm, positions: int) -> str | None:
    """None, or what is wrong with the rotation's tables, which must cover so many positions, or with the norms."""
    S, D = k_cache.shape[2:]
    if cos.shape != sin.shape or cos.shape[1:] != (D // 2,) or cos.shape[0] < positions:
        return f"cos and sin must have shape ({S}, {D // 2}), got {tuple(cos.shape)} and {tuple(sin.shape)}"
    if (q_norm is None) != (k_norm is None) or any(t is not None and t.shape != (D,) for t in (q_norm, k_norm)):
        got = " and ".join(str(tuple(t.shape)) if t is not None else "None" for t in (q_norm, k_norm))
        return f"q_norm and k_norm must both be None or have shape ({D},), got {got}"
    return None


def tensors_refused(qkv, k_cache, v_cache, q_norm, k_norm) -> str | None:
    """None, or what a kernel does not take of their dtypes and gradients."""
    plain = [t for t in (qkv, k_cache, v_cache, q_norm, k_norm) if t is not None]
    if qkv.dtype not in KERNEL_DTYPES or any(t.dtype != qkv.dtype for t in plain):
        got = ", ".join(str(t.dtype) for t in plain)
        return f"qkv, the caches and the norms must all be float32, all float16 or all bfloat16, got {got}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in plain):
        return "is for inference and keeps no gradients: call it under torch.no_grad()"
    return None


def layout_refused(whole: dict, qkv, k_cache, v_cache, **lined) -> str | None:
    """None, or what a kernel does not take of their heads and how they lie.

    lined   others that must be contiguous along the last dimension
    whole   those that must be altogether, or None
    """
    if k_cache.shape[3] > 256:
        return f"heads of at most 256 columns, got {k_cache.shape[3]}"
    for name, t in dict(qkv=qkv, k_cache=k_cache, v_cache=v_cache, **lined).items():
        if t.stride(-1) != 1:
            return f"{name} must be contiguous along its last dimension, got strides {t.stride()}"
        if name in ("k_cache", "v_cache") and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)):
            return f"{name} is changed in place and its elements must not share memory, got strides {t.stride()}"
    uneven = [name for name, t in whole.items() if t is not None and not t.is_contiguous()]
    return f"{' and '.join(uneven)} must be contiguous" if uneven else None
