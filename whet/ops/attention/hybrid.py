"""whet's forward with cuDNN's backward behind it: o and the log-sum-exp are handed over, and nothing is computed twice."""

import torch

from whet.ops.attention.common import LN2, ready
from whet.ops.attention.meaning import dtype_of, span

MAX_D = 128  # cuDNN's widest head in training


def refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """Beyond what the forward refuses: what cuDNN's backward does not do, or is told only through a mask."""
    (Lq, D), Lk = q.shape[2:], k.shape[2]
    if dtype_of(q) not in (torch.float16, torch.bfloat16):
        return f"q, k and v must be float16 or bfloat16, got {dtype_of(q)}"
    if D % 8 or D > MAX_D:
        return f"the head size must be a multiple of 8 up to {MAX_D}, got {D}"
    if not q.numel() or not Lk or Lq == 1:
        return f"q, k and v must not be empty, nor q a single row, got {tuple(q.shape)} and {tuple(k.shape)}"
    offset, left, _ = span(causal, window, Lq, Lk)
    if left is not None or offset:
        return f"cuDNN's backward has no word for causal={causal!r}, window={window!r} of {Lq} queries and {Lk} keys"
    return None


def backward(do, q, k, v, o, lse, scale: float, causal: bool):
    q, k, v = ready(q), ready(k), ready(v)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, (lse * LN2).unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )
