"""One model's step in turns with another's, so that the speed-up of a model over its rival is a ratio from one run."""

import math
from collections.abc import Callable

from whet.choices import Choices
from whet.measure import free_memory, memory_allocated, race
from whet.plan import PlanResult, peak_memory
from whet.race import paired
from whet.subjects import BuiltIn, Subject, subject_of


def rival_of(subject: Subject, target: str) -> BuiltIn:
    """The model that the subject is compared with: another built-in one, at the same batch."""
    rival = subject_of(target)
    if not isinstance(subject, BuiltIn) or not isinstance(rival, BuiltIn):
        both = f"{subject.name} and {target}"
        raise ValueError(f"optimize: --against compares two built-in models, gpt2:d12-fast with gpt2:d12, got {both}")
    mine, its = (f"{r.batch}x{r.seq_len}" for r in (subject.recipe, rival.recipe))
    if mine != its:
        fix = f"{rival.name.partition('@')[0]}@{mine}"
        raise ValueError(f"optimize: --against {target} has batches of {its}, and {subject.name} of {mine}; name {fix}")
    return rival


def duel(name: str, step: Callable, rival: BuiltIn, precision: str, seconds: float) -> dict:
    """A verified plan's step against the rival under torch.compile with PyTorch's own calls: times, memory, and their ratio.

    The rival computes another function, so what is held here is that its loss is finite and that every gradient is alive;
    `whet optimize RIVAL` is what verifies it.
    """
    plan = next(p for p in rival.plans() if p.compiled and p.choices == "stock")
    result = PlanResult(plan)
    with peak_memory(result, memory_allocated()):
        work = rival.workload(plan, Choices(), precision)
        work.step()
        loss = work.step()
    assert loss is not None
    if not math.isfinite(loss.item()) or (dead := work.without_gradient()):
        why = f"its loss is {loss.item()}" if not math.isfinite(loss.item()) else f"no gradient reaches {dead[0]}"
        raise ValueError(f"optimize: --against {rival.name}: {why}")
    label = f"{rival.name} {plan.name}"
    raced = race({label: work.step, name: step}, keep=label, seconds=seconds, flush=False)
    ratio, timing = paired(raced.times[label], raced.times[name]), raced.timings[label]
    del work
    free_memory()
    return {
        "name": label, "config": rival.config, "ms": timing.ms, "low": timing.low, "high": timing.high,
        "peak_mb": result.peak_mb, "plan": name, "plan_ms": raced.timings[name].ms, "speedup": round(ratio.value, 4),
        "speedup_low": round(ratio.low, 4), "speedup_high": round(ratio.high, 4), "rounds": ratio.rounds, "busy": raced.busy,
    }
