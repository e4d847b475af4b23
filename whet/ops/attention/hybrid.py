"""whet's forward with cuDNN's backward behind it: o and the log-sum-exp are handed over, and nothing is computed twice."""

import functools

import torch

from whet.ops.attention.common import LN2, ready, shaped
from whet.ops.attention.meaning import dtype_of, span

MAX_D = 128  # cuDNN's widest head in training


def refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """Beyond what the forward refuses: what cuDNN's backward does not do, or does only with a mask."""
    (Lq, D), Lk = q.shape[2:], k.shape[2]
    if dtype_of(q) not in (torch.float16, torch.bfloat16):
        return f"q, k and v must be float16 or bfloat16, got {dtype_of(q)}"
    if D % 8 or D > MAX_D:
        return f"the head size must be a multiple of 8 up to {MAX_D}, got {D}"
    if not q.numel() or not Lk or Lq == 1:
        return f"q, k and v must not be empty, nor q a single row, got {tuple(q.shape)} and {tuple(k.shape)}"
    offset, left, _ = span(causal, window, Lq, Lk)
    if left is not None or offset:
        got = ", ".join(f"{name}={value!r}" for name, value in (("causal", causal), ("window", window)) if value is not None)
        return f"cuDNN's backward supports only full or top-left causal, got {got}, {Lq} queries, {Lk} keys; use impl='triton'"
    return None


def apart(x: torch.Tensor) -> torch.Tensor:
    """A copy of x in its own order, rows 16 bytes further apart: strides that no one else's tensors have."""
    order = sorted(range(3), key=x.stride, reverse=True)
    wide = x.new_empty(*(x.shape[d] for d in order), x.shape[3] + 8)
    return wide.permute(*(order.index(d) for d in range(3)), 3)[..., : x.shape[3]].copy_(x)


@functools.lru_cache(maxsize=1024)
def promised(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The strides of `shaped` for such a tensor. Kept: on the meta device empty_like is Python, 0.1 ms a call."""
    return shaped(torch.empty_strided(shape, stride, dtype=dtype, device="meta")).stride()


def laid(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """x with the strides that the fakes promise for a result like `given`."""
    strides = promised(given.shape, given.stride(), given.dtype)
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def backward(do, q, k, v, o, lse, scale: float, causal: bool):
    """torch keeps a cuDNN plan for the strides of q, k and v alone, and so reads o and do by the strides of the first call's.

    The plan must be ours alone, therefore: v has strides of its own, and o and do always have those that q's give. cuDNN
    takes every tensor to start at a multiple of 16 bytes, which a gradient cut out of a longer one need not.
    """
    given, (q, k, v) = (q, k, v), (ready(q), ready(k), apart(v))
    o, do = (ready(laid(x, q)) for x in (o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, (lse * LN2).unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )
    return tuple(laid(grad, x) for grad, x in zip(grads, given))
