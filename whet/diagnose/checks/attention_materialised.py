"""Attention with its scores in memory: a product of queries and keys, a softmax, a product with values, each L x L."""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure
from whet.measure import compare

LEAST_SCORES = 128 * 128  # per head: below it the scores of a head fit where one block of a fused kernel keeps them
LEAST = 0.01  # share of the step that it must cost on a GPU, where it is measured
PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::matmul")


@dataclasses.dataclass
class WholeScores:
    """One attention: its softmax, the products before and after it, and every op on a tensor of its scores' size."""

    softmax: Event
    before: Event
    after: Event
    touching: list[Event] = dataclasses.field(default_factory=list)

    @property
    def scores(self) -> Seen:
        return self.softmax.inputs[0]

    @property
    def by_sdpa(self) -> bool:
        """torch's own attention, in its plain form: only that uses this softmax."""
        return self.softmax.op == "aten::_safe_softmax"

    @property
    def module(self) -> str:
        """The module that holds all three."""
        parts = [e.module.split(".") for e in (self.before, self.softmax, self.after)]
        shared = [p[0] for p in zip(*parts) if len(set(p)) == 1]
        return ".".join(shared)


def score_sized(t: Seen, scores: Seen) -> bool:
    """As many elements as the scores, and their last two sizes in either order."""
    return t.numel == scores.numel and len(t.shape) > 2 and sorted(t.shape[-2:]) == sorted(scores.shape[-2:])


def attentions(events: list[Event]) -> list[WholeScores]:
    """Every softmax that stands between two products of its size, with no other softmax between."""
    softmaxes = [e for e in events if e.op in ("aten::_softmax", "aten::_safe_softmax") and e.phase == "forward"]
    softmaxes = [e for e in softmaxes if len(e.inputs[0].shape) >= 3 and last_dim(e)]
    found = []
    for i, e in enumerate(softmaxes):
        start = softmaxes[i - 1].index + 1 if i else 0
        end = softmaxes[i + 1].index if i + 1 < len(softmaxes) else len(events)
        products = [p for p in events[start:end] if p.op in PRODUCTS and p.phase == "forward"]
        before = [p for p in products if p.index < e.index and score_sized(p.outputs[0], e.inputs[0])]
        after = [p for p in products if p.index > e.index and any(score_sized(t, e.inputs[0]) for t in p.inputs)]
        if before and after:
            found.append(WholeScores(e, before[-1], after[0]))
            found[-1].touching = [t for t in events[before[-1].index : after[0].index + 1] if touches(t, e.inputs[0])]
    for same in grouped(found, lambda a: (a.module, a.scores.shape)):
        within = {m for a in same for m in (a.module, a.before.module, a.softmax.module, a.after.module)}
        back = [e for e in events if e.phase == "backward" and e.module in within and touches(e, same[0].scores)]
        each = len(back) // len(same)  # one module's attentions are undone last to first
        for i, a in enumerate(reversed(same)):
            a.touching += back[i * each : (i + 1) * each]
    return found


def touches(e: Event, scores: Seen) -> bool:
    return not e.view and any(score_sized(t, scores) for t in (*e.inputs, *e.outputs))


def grouped(found: list[WholeScores], key: Callable[[WholeScores], tuple]) -> list[list[WholeScores]]:
    groups: dict[tuple, list[WholeScores]] = {}
    for a in found:
        groups.setdefault(key(a), []).append(a)
    return list(groups.values())


def last_dim(e: Event) -> bool:
    dim = next((a for a in e.args if type(a) is int), -1)
    return dim in (-1, len(e.inputs[0].shape) - 1)


def excess_ms(run: Run, a: WholeScores) -> float:
    """What its scores cost in memory traffic; less one product, which a fused backward does again."""
    cost = 0.0
    for e in a.touching:
        dtype = e.inputs[0].dtype if e.inputs else e.outputs[0].dtype
        ours = sum(t.bytes for t in (*e.inputs, *e.outputs) if score_sized(t, a.scores))
        cost += run.floor_ms(e.bytes, e.flops, dtype)
        if e.flops:
            cost -= run.floor_ms(e.bytes - ours, e.flops, dtype)
    again = any(e.phase == "backward" for e in a.touching)
    return max(0.0, cost - (run.floor_ms(0, a.before.flops, a.before.inputs[-1].dtype) if again else 0.0))


def kept_bytes(events: list[Event], ours: Callable[[Seen], bool]) -> int:
    """Bytes of these tensors that the forward wrote and the backward reads."""
    written: dict[int, tuple[str, int]] = {}
    kept: dict[int, int] = {}
    for e in events:
        for t in e.inputs:
            phase, size = written.get(t.storage, ("", 0))
            if e.phase == "backward" and phase == "forward" and ours(t):
                kept[t.storage] = size
        for t in () if e.view else e.outputs:
            written[t.storage] = (e.phase, t.bytes)
    return sum(kept.values())


def plain(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(mask, float("-inf"))).softmax(-1) @ v


def measured(a: WholeScores, masked: bool, train: bool) -> tuple[float, float]:
    """ms of one attention of this size: by its formula, and by scaled_dot_product_attention."""
    *heads, lq, lk = a.scores.shape
    q0, width = a.before.inputs[-2], a.before.inputs[-2].shape[-1]
    batch, count = (heads[0], math.prod(heads[1:])) if len(heads) > 1 else (1, heads[0])
    sizes = ((batch, count, lq, width), (batch, count, lk, width), (batch, count, lk, a.after.outputs[0].shape[-1]))
    q, k, v = (torch.randn(s, device=q0.device).to(q0.dtype).requires_grad_(train) for s in sizes)
    causal = masked and lq == lk
    mask = torch.ones(lq, lk, dtype=torch.bool, device=q0.device).triu(1) if causal else None
    upstream = torch.randn(*sizes[0][:3], sizes[2][-1], device=q0.device).to(q0.dtype)

    def step(attend):
        with torch.set_grad_enabled(train):
            out = attend(q, k, v)
        return torch.autograd.grad(out, (q, k, v), upstream) if train else out

    runs: dict[str, Callable] = {
        "plain": functools.partial(step, functools.partial(plain, mask=mask)),
        "fused": functools.partial(step, functools.partial(F.scaled_dot_product_attention, is_causal=causal)),
    }
    found = compare(runs, seconds=0.3)
    return found["plain"].ms, found["fused"].ms


def is_masked(a: WholeScores, events: list[Event]) -> bool:
    between = [e for e in events[a.before.index + 1 : a.softmax.index] if e in a.touching]
    return any(e.op.startswith(("aten::masked_fill", "aten::where", "aten::add")) for e in between)


def find(run: Run):
    seen = attentions(run.watched.events)
    if not run.gpu:  # a GPU has fused kernels for calls that the CPU has none for
        seen = [a for a in seen if not a.by_sdpa]
    for found in grouped(seen, lambda a: (pattern(a.module), a.scores.shape, a.scores.dtype)):
        a = found[0]
        large = a.scores.shape[-1] * a.scores.shape[-2] >= LEAST_SCORES
        masked, figures = is_masked(a, run.watched.events), []
        if run.gpu:
            now, fused = measured(a, masked, run.target.kind == "train")
            cost = len(found) * (now - fused)
            timed_text = f"measured at its size: {figure(now)} ms by its formula, {figure(fused)} ms by"
            figures = [f"{timed_text} scaled_dot_product_attention"]
            if cost < LEAST * run.step_ms:
                continue
        elif large:
            cost = sum(excess_ms(run, f) for f in found)
            figures = ["cost: the scores' bytes over this machine's copy rate"]
        else:
            continue
        yield finding(run, found, cost, figures, masked)


def finding(run: Run, found: list[WholeScores], cost: float, figures: list[str], masked: bool) -> Finding:
    a = found[0]
    shape, mib = " x ".join(map(str, a.scores.shape)), a.scores.bytes / 2**20
    where = pattern(a.module) or "the model itself"
    passes = sum(score_sized(t, a.scores) for e in a.touching for t in (*e.inputs, *e.outputs))
    kept = sum(kept_bytes(f.touching, lambda t: score_sized(t, a.scores)) for f in found) / 2**20
    lines = sorted({f.softmax.line for f in found})
    often = f", {len(found)} times" if len(found) > 1 else ""
    evidence = [
        f"{where}: {a.before.op}, {a.softmax.op}, {a.after.op} at {', '.join(lines)}{often}",
        f"scores {shape} {str(a.scores.dtype).removeprefix('torch.')}: {figure(mib)} MiB, "
        f"read or written {passes} times a step",
        *([f"{figure(kept)} MiB of that size kept for the backward"] if kept else []), *figures,
    ]
    return Finding(
        "attention_materialised",
        f"{where} " + ("falls back to the plain form of scaled_dot_product_attention, which " if a.by_sdpa else "")
        + f"holds attention scores of {shape} in memory" + ("" if run.gpu else ", which costs the more on a GPU"),
        evidence, fix_for(run, a, masked), cost or None, cost or None, measured=run.gpu, module=a.module, line=a.softmax.line,
    )


def fix_for(run: Run, a: WholeScores, masked: bool) -> str:
    modules = dict(run.target.model.named_modules())
    if isinstance(modules.get(a.module), nn.MultiheadAttention):
        return "Call it with need_weights=False: it then runs scaled_dot_product_attention and holds no scores"
    if a.by_sdpa:
        return "Give it what its fused kernels need: half precision, head widths divisible by 8, is_causal in place of a mask"
    causal = "with is_causal=True where its mask is causal, " if masked else ""
    return f"Call F.scaled_dot_product_attention, {causal}or whet.ops.attention"


class Heads(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused, self.qkv, self.out = fused, nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            y = plain(q, k, v, future)
        return self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Heads(fused) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def example(fused: bool) -> Target:
    torch.manual_seed(0)
    return target_of("example", (Blocks(fused), torch.randn(2, 160, 64)))


CHECK = Check(
    "attention_materialised", "attention with its scores in memory", find, lambda: example(False), lambda: example(True)
)
