"""The runner's own tokens against the model's formulas: what it chose, its logits, and the keys and values it wrote.

A sequence begins after keys that were drawn, not fed, so that a long context costs nothing; what is not written yet is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from whet.decode.bias import biased_part
from whet.decode.cache import Cache
from whet.decode.hostile import caches
from whet.decode.oracle import by_formulas, full_float32, widened
from whet.decode.runner import DecodeRunner
from whet.models.qwen3 import Qwen3
from whet.verify import Verdict, judge

STEPS = 12  # tokens of a run
OLD = (63, 0, 200, 64, 130, 250)  # tokens in the cache before: a run passes the ends of spans and, from 250, of a bucket
FAR = (1000, 1520, 6000)  # for the persistent kernel: from 1536 on its splits are longer


@dataclass
class Start:
    """Rows of a cache and the tokens they are given first."""

    olds: list[int]
    kv: list[torch.Tensor]
    first: torch.Tensor
    steps: int

    @property
    def end(self) -> int:
        return max(self.olds) + self.steps

    def new(self, kv: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of whole caches, what the steps wrote: (layers, rows, KV, steps, D)."""
        rows = range(len(self.olds))
        return [torch.stack([t[:, b, :, self.olds[b] : self.olds[b] + self.steps] for b in rows], 1) for t in kv]


def starts(model: Qwen3, kind: str, rows: int, context: int, family: str) -> list[Start]:
    steps = min(STEPS, model.c.max_positions // 2)
    last_start = min(context, model.c.max_positions) - steps
    places = list(dict.fromkeys(min(p, last_start) for p in (OLD if kind == "decode" else OLD + FAR)))
    generator = torch.Generator().manual_seed(rows)
    each = [[p] for p in places] if rows == 1 else [[places[b % len(places)] for b in range(rows)]]
    first = torch.randint(model.c.vocab, (rows,), generator=generator).to(model.embed.device)
    return [Start(olds, caches(model, olds, max(olds) + steps, family), first, steps) for olds in each]


def run(runner: DecodeRunner, start: Start, cuts: list[int]) -> dict[str, torch.Tensor]:
    """Tokens and their logits (rows, steps), and what was written; with the persistent kernel the logits of all tokens too."""
    rows, device = len(start.olds), runner.device
    for t, given in zip(runner.cache.kv, start.kv):
        t.fill_(float("nan"))
        t[:, :rows, :, : given.shape[3]] = given
    runner.place_all(start.olds, live=True)
    runner.token[:rows] = start.first
    tokens, values, logits = [], [], []
    for n in cuts:
        if runner.persistent is not None:
            logits.append(torch.full((n, runner.model.c.vocab), float("nan"), device=device))
            burst = runner.persistent_steps(n, logits[-1])
        else:
            burst = runner.steps(n, rows, runner.context(start.end), "greedy")
        burst.read()
        assert burst.logits is not None
        tokens.append(burst.tokens.clone())
        values.append(burst.logits.clone())
    keys, written = start.new([t[:, :rows] for t in runner.cache.kv])
    chosen, value = (torch.cat(t, 1).to(device) for t in (tokens, values))
    found = {"tokens": chosen, "logit": value, "keys": keys, "values": written}
    return found | ({"logits": torch.cat(logits)[None]} if logits else {})


def expected(model: Qwen3, start: Start, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by the formulas of the ops, in the model's dtype, of the tokens that the runner was given and chose."""
    fed = torch.cat([start.first[:, None], tokens[:, :-1]], 1)
    kv = [t.to(model.embed.dtype, copy=True) for t in start.kv]
    with by_formulas(model), full_float32():
        hidden = model.step(fed, kv[0], kv[1], torch.tensor(start.olds, device=fed.device))
        logits = model.logits(hidden) if model.embed.dtype != torch.float64 else exact_logits(model, hidden)
    keys, values = start.new(kv)
    return {"logits": logits, "logit": logits.gather(-1, tokens[..., None]).squeeze(-1), "keys": keys, "values": values}


def exact_logits(model: Qwen3, hidden: torch.Tensor) -> torch.Tensor:
    """model.logits without its rounding to float32."""
    return model.head(model.ops.rms_norm(hidden, model.norm, model.c.eps))


def decode_verdict(model: Qwen3, kind: str, rows: int, context: int, family: str, chosen_badly: Callable) -> Verdict:
    """kind: decode, by the runner's graphs, or persistent."""
    wide = widened(model, torch.float64 if model.embed.dtype == torch.float32 else torch.float32)
    runner, step = None, torch.finfo(model.embed.dtype).eps
    tightest = Verdict(True, 0.0)
    for i, start in enumerate(starts(model, kind, rows, context, family)):
        if runner is None or start.end > runner.cache.capacity:
            cache = Cache(model.c, model.embed.dtype, model.embed.device, max_tokens=model.c.max_positions)
            runner = DecodeRunner(model, cache, rows, "persistent" if kind == "persistent" else "graph")
            runner.extends = False  # what is proved is the step
            runner.hold(rows, start.end)
        found = run(runner, start, [start.steps])
        if not same_bits(found, run(runner, start, [start.steps])):
            return Verdict(False, why="a second run from the same state gives other bits")
        if start.steps > 1 and not same_bits(found, run(runner, start, [1, start.steps - 1])):
            return Verdict(False, why="the same tokens in two bursts have other bits")
        verdict = against_formulas(model, wide, start, found, step, chosen_badly)
        # Once: no fault of a scale depends on the place. Where outliers drown the other channels, eager itself is biased.
        if verdict.ok and i == 0 and family == "plain" and model.embed.dtype != torch.float32:
            verdict = straight(model, wide, start, found, step) or verdict
        if not verdict.ok:
            return Verdict(False, verdict.error, verdict.budget, f"after {start.olds} tokens: {verdict.why}")
        tightest = max(tightest, verdict, key=lambda v: v.share)
    return tightest


def against_formulas(model, wide, start: Start, found: dict, step: float, chosen_badly: Callable) -> Verdict:
    V = model.c.vocab
    if found["tokens"].min() < 0 or found["tokens"].max() >= V:
        return Verdict(False, why=f"tokens must be from 0 to {V - 1}, got {found['tokens'].tolist()[0]}")
    wanted, eager = (expected(m, start, found["tokens"]) for m in (wide, model))
    if reason := chosen_badly(found["tokens"], wanted["logits"].double(), eager["logits"].double(), step):
        return Verdict(False, why=reason)
    names = [name for name in ("keys", "values", "logit", "logits") if name in found]
    ours, plain, exact = ({n: t[n] for n in names} for t in (found, eager, wanted))
    return judge(ours, plain, exact, step)


def straight(model: Qwen3, wide: Qwen3, start: Start, found: dict, step: float) -> Verdict | None:
    """None, or that the error is biased towards a fault."""
    def again(m):
        return expected(m, start, found["tokens"])

    reason = biased_part(wide, found, again(model), again(wide), again, step)
    return Verdict(False, why=reason) if reason else None


def same_bits(a: dict, b: dict) -> bool:
    return all(torch.equal(t, b[name]) for name, t in a.items())
