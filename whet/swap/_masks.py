"""Masks as spans: whether each query of a boolean mask sees one run of keys, and where that run begins and ends."""

from typing import Any

import torch

from whet.ops.attention_spans.meaning import seen

KEPT = "_whet_spans"  # on the mask itself: the layers of a model share one
AT_ONCE = 2**27  # elements of a mask that are looked at together
Spans = tuple[torch.Tensor, torch.Tensor]


def readable(mask: Any) -> bool:
    """Whether the mask's values may be read now, and a change of them would be noticed later.

    While a CUDA graph is captured or torch.compile traces, other values may come in the place of these; of a tensor made
    in inference mode torch keeps no version.
    """
    if type(mask) is not torch.Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or not mask.numel() or mask.is_meta:
        return False
    if mask.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def spans_in(mask: torch.Tensor) -> Spans | None:
    """(first, last), (B, Lq) each, where they say exactly what the mask (B, 1, Lq, Lk) says; None where no spans do.

    The mask is rebuilt from them and compared, which makes the host wait once; asked again of the same mask, unchanged
    since, they are at hand.
    """
    version, found = getattr(mask, KEPT, (None, None))
    if version != mask._version:
        found = _found(mask)
        setattr(mask, KEPT, (mask._version, found))
    return found


def _found(mask: torch.Tensor) -> Spans | None:
    Lk, step = mask.shape[3], max(1, AT_ONCE // (mask.shape[0] * mask.shape[3]))
    ends, same = [], []
    with torch.no_grad():
        for part in mask.split(step, 2):
            first = part[:, 0].view(torch.uint8).argmax(-1)
            last = first + part[:, 0].sum(-1)
            ends.append(torch.stack([first, last]).to(torch.int32))
            same.append((seen(first, last, Lk) == part).all())
        first, last = torch.cat(ends, 2)
        return (first, last) if bool(torch.stack(same).all()) else None
