"""Self-attention that a plain module writes out itself (q k^T, mask, softmax, v), known by what it computes of one tensor.

The formula is looked for over the module's own linear layers, in float64, with fresh weights, at the batch's length and at
longer ones: a window or a bias that a short sequence does not show is seen there. Only lengths up to the longest that
agreed are served, with the module's numbers and mode as they were; all else gets the module's own forward.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whet.ops.attention import OP
from whet.swap import Left, Met, Site, new_forward
from whet.swap._globals import methods_naming
from whet.swap._proof import Float64Everywhere, close, copied, plainly_called, random_kept
from whet.swap.attention import asks_interface

CLOSE = 1e-7
LENGTHS = (128, 256, 512, 1024, 2048)  # and those of its buffers, a mask's among them


@dataclass(frozen=True)
class AttentionForm:
    """Names of the linears, (q, k, v, out) or (packed, out); heads of queries and of keys; causal as the op takes it.

    longest   sequence that it was seen for
    any_mode  whether it is the same in training and in evaluation
    """

    linears: tuple[str, ...]
    heads: int
    kv_heads: int
    causal: str | None
    longest: int = 0
    any_mode: bool = False


def settings(module: nn.Module, any_mode: bool) -> dict[str, Any]:
    """The module's numbers, words and switches, and its dropouts'; modes too, unless it computes the same in any."""
    own = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, type(None))) and k != "training"}
    own |= {n: m.p for n, m in module.named_children() if isinstance(m, nn.Dropout)}
    return own if any_mode else own | {"": [m.training for m in module.modules()]}


def projections(module: nn.Module) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names, width of queries, width of keys) where the sizes of the linear children are those of self-attention."""
    found = {n: (m.in_features, m.out_features) for n, m in module.named_children() if isinstance(m, nn.Linear)}
    if len(found) == 2:
        for packed, out in itertools.permutations(found):
            (C, wide), (inner, back) = found[packed], found[out]
            if wide == 3 * inner and back == C:
                yield (packed, out), inner, inner
    if len(found) == 4:
        for q, k, v, out in itertools.permutations(found):
            if len({found[n][0] for n in (q, k, v)}) == 1 and found[k] == found[v] and found[out] == found[q][::-1]:
                yield (q, k, v, out), found[q][1], found[k][1]


def forms(module: nn.Module) -> Iterator[AttentionForm]:
    numbers = sorted({v for v in vars(module).values() if type(v) is int and v > 0}, reverse=True)
    for linears, wide, narrow in projections(module):
        heads = [(h, h * narrow // wide) for h in numbers if wide % h == 0 and h * narrow % wide == 0 and h * narrow >= wide]
        for (h, kv), causal in itertools.product(heads, ("top-left", None)):
            yield AttentionForm(linears, h, kv, causal)


def computed(module: nn.Module, form: AttentionForm, x: torch.Tensor, attend: Callable) -> torch.Tensor:
    *inner, out = (getattr(module, name) for name in form.linears)
    q, k, v = (linear(x) for linear in inner) if len(inner) == 3 else inner[0](x).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, form.heads), (k, form.kv_heads), (v, form.kv_heads)))
    return out(attend(q, k, v, form.causal).transpose(1, 2).flatten(2))


def form_of(module: nn.Module, x: torch.Tensor) -> AttentionForm | None:
    """The form that the module computes, and how long a sequence it was seen to do so for."""
    twin = copied(module, torch.float64)
    with torch.no_grad(), random_kept(), Float64Everywhere():
        for p in twin.parameters():  # those of a fresh model may be zero, which every form agrees with
            p.copy_(torch.randn(p.shape, dtype=p.dtype, device=p.device) * p.shape[-1] ** -0.5)
        x = torch.randn(x.shape, dtype=torch.float64, device=x.device)
        got = twin(x)
        for form in forms(twin):
            want = computed(twin, form, x, OP.reference)
            if not close(got, want, CLOSE):
                continue
            longest = longest_of(twin, form, x)
            any_mode = all(close(twin.train(mode)(x), want, CLOSE) for mode in (True, False))
            return replace(form, longest=longest, any_mode=any_mode)
    return None


def longest_of(twin: nn.Module, form: AttentionForm, x: torch.Tensor) -> int:
    """The longest sequence that the module computes this form for, of those tried, each longer than the one before."""
    longest, sizes = x.shape[1], {b.shape[-1] for b in twin.buffers() if b.dim() and b.shape[-1] <= LENGTHS[-1]}
    for length in sorted(n for n in sizes | set(LENGTHS) if n > longest):
        longer = torch.randn(1, length, x.shape[2], dtype=torch.float64, device=x.device)
        try:
            if not close(twin(longer), computed(twin, form, longer, OP.reference), CLOSE):
                break
        except Exception:  # longer than its mask
            break
        longest = length
    return longest


def replaced(ops, form: AttentionForm, known: dict[str, Any]) -> Callable:
    attend = ops.attention

    def forward(self, x, *rest, **options):
        own = rest or options or torch.compiler.is_compiling() or x.dim() != 3 or x.shape[1] > form.longest
        if own or settings(self, form.any_mode) != known:
            return self._whet_forward(x, *rest, **options)
        return computed(self, form, x, attend)

    return forward


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        if path not in met or not plainly_called(met[path]) or not any(True for _ in forms(module)):
            continue
        x, calls_sdpa = met[path].args[0], any(True for _ in methods_naming(module, "scaled_dot_product_attention"))
        if calls_sdpa or asks_interface(module) or x.dim() != 3 or not x.is_floating_point():
            continue
        form = form_of(module, x)
        if form is None:
            name = type(module).__name__
            yield Left(path, f"{name} has the linears of self-attention and computes another function, or drops out")
            continue

        known = settings(module, form.any_mode)

        def edits(module, ops, form=form, known=known):
            return new_forward(module, replaced(ops, form, known))

        kind = "causal self-attention" if form.causal else "self-attention"
        yield Site(path, module, edits, f"{kind} of {form.heads} heads, to {form.longest:,} tokens")
