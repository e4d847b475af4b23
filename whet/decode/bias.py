"""Is a decoder's error biased towards a fault? Rounding has no direction; a wrong scale has one.

The model's formulas are run again with one part scaled a little: the output of one head, the values of another, gate, up, a
norm. The difference is the direction in which that fault would move the logits. The error is regressed on it: the slope is the
fault's size. Rounding leaves a slope within its standard error of zero; a head that is 1% off leaves 0.01, which no comparison
of single bfloat16 logits could see. A bias counts if it is significant, and beyond eager's own by a share of a rounding step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

DELTA = 2.0**-6  # how much a part is scaled: little enough to be a direction, much more than the rounding of float32
SIGNIFICANT = 10.0  # standard errors. A right kernel on plain weights comes to 5.4: errors of one token are not independent
SHARE = 1 / 8  # of a rounding step


def biased_part(
    wide: Any, found: dict, eager: dict, wanted: dict, again: Callable[[Any], dict], step: float
) -> str | None:
    """None, or the part towards whose fault the error is biased.

    wide    the model of the oracle; its parts are scaled in place, and put back
    again   the formulas' results of a model on the same tokens, as eager and wanted are
    """
    for name in ("keys", "values"):  # (layers, rows, KV, steps, D): one slope for each head of each layer
        a, e = (regressed(t[name] - wanted[name], wanted[name], (1, 3, 4)) for t in (found, eager))
        if (bias := suspicious(a, e, step)) is not None:
            layer, head = divmod(int(bias[0]), wanted[name].shape[2])
            return f"{name} of layer {layer}, head {head}, are biased by {bias[1]:.1e} of their size"
    if "logits" not in found:
        return None
    few = torch.arange(min(wide.c.vocab, wide.c.hidden), device=wanted["logits"].device)  # more would not be independent
    columns = few * (wide.c.vocab // len(few))
    errors = [(t["logits"] - wanted["logits"])[..., columns] for t in (found, eager)]
    for label, part in faults(wide):
        kept = part.clone()
        part.mul_(1 + DELTA)
        direction = (again(wide)["logits"] - wanted["logits"])[..., columns] / DELTA
        part.copy_(kept)
        a, e = (regressed(error, direction, None) for error in errors)
        if (bias := suspicious(a, e, step)) is not None:
            return f"logits are biased as if {label} were off by {bias[1]:.1e} of its size"
    return None


def faults(model) -> Iterator[tuple[str, torch.Tensor]]:
    """Parts of a model that a kernel could scale wrongly, and the weights that would do the same."""
    c, D = model.c, model.c.head_dim
    q, k, _ = c.qkv_rows
    for i, layer in enumerate(model.layers):
        for h in range(c.heads):
            yield f"the output of head {h} in layer {i}", layer.o.data[:, h * D : (h + 1) * D]
        for h in range(c.kv_heads):
            yield f"the values of head {h} in layer {i}", layer.qkv.data[q + k + h * D : q + k + (h + 1) * D]
        yield f"the queries of layer {i}", layer.q_norm if c.qk_norm else layer.qkv.data[:q]
        yield f"the gate of layer {i}", layer.gate_up.data[: c.ffn]
        yield f"the up projection of layer {i}", layer.gate_up.data[c.ffn :]
        yield f"the first norm of layer {i}", layer.norm1
        yield f"the second norm of layer {i}", layer.norm2
    yield "the final norm", model.norm


def regressed(error: torch.Tensor, on: torch.Tensor, dims: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes of the error on a direction, over these dimensions or over all, and their standard errors."""
    dims = tuple(range(on.dim())) if dims is None else dims
    error, on = error.double(), on.double()
    power = on.square().sum(dims, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    slope = (error * on).sum(dims, keepdim=True) / power
    noise = ((error - slope * on) * on).square().sum(dims, keepdim=True).sqrt() / power
    return slope.flatten(), noise.flatten()


def suspicious(a: tuple[torch.Tensor, ...], e: tuple[torch.Tensor, ...], step: float) -> tuple[int, float] | None:
    """The place and size of the slope that is furthest beyond what eager's own explains, if one is."""
    (slope, noise), (of_eager, its_noise) = a, e
    sure = (slope - of_eager).abs() > SIGNIFICANT * (noise.square() + its_noise.square()).sqrt()
    beyond = torch.where(sure, slope.abs() - 2 * of_eager.abs() - SHARE * step, -torch.inf)
    at = int(beyond.argmax())
    return (at, slope[at].item()) if beyond[at] > 0 else None
