"""One token at a time: a decoder's step with its cache filled, as generate() runs it.

A built-in decoder is looked at twice: before, its plain formulas launched one by one; after, its decode ops, on a GPU as one
captured graph. The doctor and the profile's tables are about the first, the profile sets the second beside it.
"""

import collections
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from whet import measure, models
from whet.choices import Choices
from whet.decode.bench.contender import GraphContender
from whet.decode.load import open_model
from whet.decode.quantize import bytes_per_token
from whet.decode.trust import trusted
from whet.diagnose.profile import Range, on_cpu, profiled, taken
from whet.diagnose.target import CannotRun, Target
from whet.figures import error_line

PROMPT = 16  # tokens in the cache before the first step that is looked at
CONTEXT = 128  # the same for a built-in decoder
BURST = 8  # tokens that are looked at together after: the host reads that many at once
PRODUCTS = ("norm, qkv", "output projection, residual", "norm, gate and up, activation", "down, residual")
OTHERS = {"_split_kv": "qk norm, rope, cache, attention", "_combine": "attention, splits combined",
          "_head": "norm, head, argmax", "_choose": "norm, head, argmax"}


@dataclass
class DecodeTarget(Target):
    """A built-in decoder: step_with makes a token before, burst makes BURST tokens after."""

    burst: Callable[[], None] | None = None
    bytes: int = 0  # that a token must read


class ProfiledChoices:
    """Choices whose ops are each a named range while a profiler runs; without one they are the choices themselves."""

    def __init__(self, ops: Choices):
        self.ops = ops

    def __getattr__(self, name: str):
        run = getattr(self.ops, name)

        def ranged(*args, **kwargs):
            if not torch.autograd._profiler_enabled():
                return run(*args, **kwargs)
            span = Range("forward", f"ops.{name}")
            try:
                return run(*args, **kwargs)
            finally:
                span.close()

        return ranged


def built_in(text: str) -> DecodeTarget | None:
    """The decoder that is built in under this name; None where there is none."""
    try:
        known, size = models.find(text)
    except ValueError:
        return None
    if not known.decodes:
        return None
    model, _ = open_model(random_weights=f"{known.name}:{size}")
    if why := trusted(model, "graph").why:
        raise ValueError(f"{text}: {why[0]}")
    contender = GraphContender(model, 1, CONTEXT + BURST)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.embed.device)
    contender.feed(torch.arange(CONTEXT, device=token.device)[None] % model.c.vocab, token)
    at, (k, v) = torch.full((1,), CONTEXT, dtype=torch.int64, device=token.device), contender.runner.cache.kv
    plain: Any = ProfiledChoices(Choices(default="eager"))

    def step():
        tuned, model.ops = model.ops, plain
        try:
            with torch.no_grad():
                model.logits(model.extend(token, k, v, at)).argmax(-1)
        finally:
            model.ops = tuned

    note = f"decoding at batch 1 after {CONTEXT} tokens, by plain formulas launched one by one; after: by the decode ops"
    return DecodeTarget(
        model, kind="decode", name=f"{known.name}:{size}", step_with=step, notes=[note], burst=lambda: contender.run(BURST),
        bytes=bytes_per_token(model, CONTEXT),
    )


def after(target: DecodeTarget, seconds: float) -> dict:
    """The same token by the decode ops: its time, kernels and parts, and the floor that the bytes set."""
    whole = profiled(replace(target, step_with=target.burst), seconds)
    step, floor = whole.step, target.bytes / measure.ceilings().copy_gbs / 1e6
    names = collections.Counter(k.name for k in whole.kernels)
    kernels = [{"name": name, "ms": us / 1e3 / BURST, "count": round(names[name] / BURST, 1)} for name, us, _ in whole.top(12)]
    timing = {f: getattr(step, f) / BURST for f in ("ms", "low", "high")} | {"samples": step.samples}
    made = {
        "step": timing, "launches": round(whole.launches / BURST, 1), "busy_ms": whole.busy_us / 1e3 / BURST,
        "tokens_per_s": 1e3 / timing["ms"], "kernels": kernels, "bytes": target.bytes, "layers": [],
    }
    if target.device != "cuda":
        return made
    own = alone(target)
    each: dict[str, float] = collections.defaultdict(float)
    for name, ms in own:
        each[name] += ms / BURST
    longest = sorted(each, key=lambda name: -each[name])[:12]
    made["kernels"] = [{"name": name, "ms": each[name], "count": round(names[name] / BURST, 1)} for name in longest]
    made["busy_ms"] = sum(each.values())
    return made | {"layers": parts(own), "floor_ms": floor, "of_floor": floor / timing["ms"]}


def alone(target: DecodeTarget) -> list[tuple[str, float]]:
    """Each kernel of a burst and the ms after the one before had ended: in a chain it starts early, and waits until then."""
    events = taken(replace(target, step_with=target.burst)).profiler.kineto_results.events()  # type: ignore[union-attr]
    ran = ((e.start_ns(), e.duration_ns(), e.name()) for e in events if not on_cpu(e) and not e.name().startswith("whet|"))
    return own_time(sorted(ran))


def own_time(ran: list[tuple[int, int, str]]) -> list[tuple[str, float]]:
    """Of (start, duration, name) in ns, by their starts: (name, ms that no earlier one covers)."""
    found, covered = [], 0
    for start, duration, name in ran:
        found.append((name, max(0, start + duration - max(start, covered)) / 1e6))
        covered = max(covered, start + duration)
    return found


def parts(own: list[tuple[str, float]]) -> list[dict]:
    """What each part of a layer takes in one token, all layers together: the products come in the order of a layer."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    products = 0
    for name, ms in own:
        label = next((label for word, label in OTHERS.items() if name.startswith(word)), "embedding, token, position")
        if name.startswith(("_few", "_many")):
            label, products = PRODUCTS[products % len(PRODUCTS)], products + 1
        found[label].append(ms)
    total = sum(map(sum, found.values())) or 1.0
    return [
        {"part": label, "ms": sum(ms) / BURST, "share": sum(ms) / total, "launches": round(len(ms) / BURST, 1)}
        for label, ms in found.items()
    ]


def as_decode(target: Target) -> Target:
    """The step that makes the next token, for models with Transformers' interface; others give one as "step"."""
    if target.step_with is not None:
        return replace(target, kind="decode")
    parameters = inspect.signature(target.model.forward).parameters
    if not {"input_ids", "past_key_values", "use_cache"} <= set(parameters):
        raise CannotRun(
            f"{target.name}: to decode, the model's forward must take input_ids, past_key_values and use_cache, as "
            "Transformers' do; or return a dict with a step of your own: {'model': ..., 'step': function}"
        )
    ids = target.kwargs.get("input_ids", target.args[0] if target.args else None)
    if ids is None:
        raise CannotRun(f"{target.name}: the batch has no input_ids to begin from")
    ids = ids[:1, :PROMPT]
    model = target.model.eval()
    try:
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=True)
        state = {"past": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}
    except Exception as e:
        raise CannotRun(f"{target.name}: the prompt's forward raised {error_line(e)}") from e

    def step():
        with torch.no_grad():
            out = model(input_ids=state["token"], past_key_values=state["past"], use_cache=True)
            state["past"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    note = f"decoding at batch 1 after a prompt of {ids.shape[1]} tokens; the cache grows as generate() grows it"
    return replace(target, kind="decode", step_with=step, notes=[*target.notes, note])
