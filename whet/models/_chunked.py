"""A mean loss over many rows, a chunk of them at a time: what a row's loss makes on the way is in memory for one chunk.

The gradients of a chunk are made with its loss, in the forward, so that nothing is computed twice; the backward scales them.
"""

from collections.abc import Callable, Sequence

import torch

CHUNK_BYTES = 448 << 20  # 16,000 rows of ten groups of 1408 values in bfloat16: products stay large


def chunks_of(rows: int, row_bytes: int) -> int:
    """How many chunks so many rows are cut into; 1 where two chunks would hold them."""
    count = -(-rows * row_bytes // CHUNK_BYTES)
    return count if count > 2 else 1


class _ChunkedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_of: Callable, count: int, x, targets, *weights):
        asked = [t.requires_grad for t in (x, *weights)]
        total, dx = 0.0, torch.empty_like(x) if asked[0] else None
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights if w.requires_grad]
        step, start = -(-len(x) // count), 0
        for rows, aims in zip(x.split(step), targets.split(step)):
            rows = rows.detach().requires_grad_(asked[0])
            with torch.enable_grad():
                loss = loss_of(rows, aims) * (len(rows) / len(x))
                given = [t for t, is_asked in zip((rows, *weights), asked) if is_asked]
                found = [*torch.autograd.grad(loss, given)]
            total = total + loss.detach()
            if dx is not None:
                dx[start : start + len(rows)] = found.pop(0)
            for summed, part in zip(sums, found):
                summed += part
            start += len(rows)
        ctx.asked = asked
        ctx.save_for_backward(*([] if dx is None else [dx]), *(s.to(w.dtype) for s, w in zip(sums, filter(_is_asked, weights))))
        return total

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            raise RuntimeError("a mean in chunks has no second derivative: leave out create_graph=True, or take fewer rows")
        made = iter(ctx.saved_tensors)
        dx, *dweights = [next(made) * dloss if is_asked else None for is_asked in ctx.asked]
        return None, None, dx, None, *dweights


def _is_asked(t: torch.Tensor) -> bool:
    return t.requires_grad


def chunked_mean(loss_of: Callable, x, targets, weights: Sequence[torch.Tensor], count: int):
    """The mean of a loss over the rows of x (..., D) and targets (...).

    loss_of   loss_of(rows of x, their targets) is the mean over these, and differentiable by x and the weights alone
    count     into so many chunks rows are cut; all are one where it is 1, without gradients, under torch.compile, and where
              targets ask for a gradient, which chunks do not give
    """
    whole = count == 1 or torch.compiler.is_compiling() or not torch.is_grad_enabled() or targets.requires_grad
    if whole or not any(map(_is_asked, (x, *weights))):
        return loss_of(x, targets)
    return _ChunkedMean.apply(loss_of, count, x.flatten(0, -2), targets.flatten(), *weights)
