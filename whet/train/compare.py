"""Training runs against one another: what differs in their recipes, how fast they are, and their losses where they are equal.

    found = compare(group(["runs/a", "runs/b"]))        # plain values; whet.report.run_pages shows them

Runs that differ only in their seed are one arm. Every other arm is held against the first: by the loss at the largest number of
steps, of tokens and of training seconds that all runs have, interpolated linearly between evaluations, by what it takes to
reach a loss, and by tokens/s. Over several seeds Welch's t-test says whether a difference is significant. Where a difference
would mean nothing, losses on other data or times on another GPU, it is withheld.
"""

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from whet.train.runs import WARM_UP, TrainRun, read_run, table
from whet.train.welch import CONFIDENCE, welch

SEED = "train.seed"
AXES = {"step": "steps", "tokens": "tokens", "time_s": "training time"}
LOSS, TIME = "loss", "time"  # what a measure rests on, and is withheld for
LINEAR = "between two evaluations the loss is interpolated linearly"
Losses = list[tuple[float, float]]


@dataclass(frozen=True)
class Arm:
    """Runs of one recipe with several seeds, or those that --arm names."""

    name: str
    runs: list[TrainRun]

    @property
    def repeated(self) -> bool:
        """Whether a seed occurs twice: such runs do not show how far seeds lie apart."""
        seeds = [r.seed for r in self.runs]
        return len(set(seeds)) < len(seeds)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}, at any depth."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def unseeded(run: TrainRun) -> dict[str, Any]:
    return {key: value for key, value in flat(run.recipe).items() if key != SEED}


def group(folders: Sequence[str], named: Sequence[str] = ()) -> list[Arm]:
    """The arms of run folders: those named by 'name=RUN,RUN' first, then the others by their recipes without the seed."""
    arms = [parse_arm(text) for text in named]
    by_recipe: dict[str, list[TrainRun]] = {}
    for run in map(read_run, folders):
        by_recipe.setdefault(json.dumps(unseeded(run), sort_keys=True, default=str), []).append(run)
    for runs in by_recipe.values():
        arms.append(Arm(arm_name(runs, [a.name for a in arms]), runs))
    if not arms:
        raise ValueError("compare: there are no runs; name run folders, such as runs/a runs/b")
    if twice := repeats([a.name for a in arms]):
        raise ValueError(f"compare: two arms are named {twice[0]!r}; name each by its own --arm name=RUN,RUN")
    if twice := repeats([str(r.path.resolve()) for a in arms for r in a.runs]):
        raise ValueError(f"compare: {twice[0]} is given twice; name each run once")
    for run in (r for a in arms for r in a.runs):
        if not run.steps:
            raise ValueError(f"compare: {run.path} has no step in its log; leave it out, or train it first")
    return arms


def parse_arm(text: str) -> Arm:
    name, sign, folders = text.partition("=")
    paths = [p.strip() for p in folders.split(",") if p.strip()]
    if not (name.strip() and sign and paths):
        raise ValueError(f"compare: --arm takes name=RUN,RUN, such as base=runs/a,runs/b, got {text!r}")
    return Arm(name.strip(), [read_run(p) for p in paths])


def arm_name(runs: list[TrainRun], taken: Sequence[str]) -> str:
    """What the names of its folders begin with; else the first folder's name, or its path where that is taken."""
    first, last = min(r.name for r in runs), max(r.name for r in runs)
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    common = first[:same].rstrip("-_. ").removesuffix("seed").rstrip("-_. ") if len(runs) > 1 else first
    return next((n for n in (common, runs[0].name) if n and n not in taken), str(runs[0].path))


def repeats(values: Sequence[str]) -> list[str]:
    return [v for i, v in enumerate(values) if v in values[:i]]


def interpolate(curve: Losses, x: float) -> float | None:
    """The loss at x on the straight line between the evaluations around it; None outside of them."""
    at = bisect_left(curve, x, key=lambda point: point[0])
    if at == len(curve) or at == 0 and curve[0][0] != x:
        return None
    (x1, y1), (x0, y0) = curve[at], curve[max(0, at - 1)]
    return y1 if x1 == x else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def reached(curve: Losses, target: float) -> float | None:
    """Where the line through the evaluations first comes down to the target; None: never."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 > target >= y1:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


def common_point(curves: Sequence[Losses]) -> float | None:
    """The largest x that every curve reaches; None where one begins after another's end, or is empty."""
    if not all(curves):
        return None
    last = min(curve[-1][0] for curve in curves)
    return last if last >= max(curve[0][0] for curve in curves) else None


def sample(values: Iterable[float | None]) -> dict:
    """Values of an arm's runs, their mean where all have one, and their standard deviation where there are two."""
    found = list(values)
    known = [v for v in found if v is not None]
    whole = bool(known) and len(known) == len(found)
    return {
        "values": found, "mean": statistics.fmean(known) if whole else None,
        "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
    }


def versus(base: Arm, arm: Arm, of_base: dict, of_arm: dict, lower: bool) -> dict:
    """One arm's figure against the first's: the difference of the means, and at several seeds whether it is significant."""
    found: dict[str, Any] = {"arm": arm.name, "against": base.name, "why": ""}
    found |= dict.fromkeys(("difference", "ratio", "low", "high", "p", "df", "significant", "winner"))
    a, b = of_base["mean"], of_arm["mean"]
    if missing := [n.name for n, mean in ((base, a), (arm, b)) if mean is None]:
        return found | {"why": f"no figure for every seed of {' and '.join(missing)}"}
    found |= {"difference": b - a, "ratio": b / a if a else None}
    if few := [n.name for n in (base, arm) if len(n.runs) < 2]:
        return found | {"why": f"only one seed of {' and '.join(few)}"}
    if twice := [n.name for n in (base, arm) if n.repeated]:
        return found | {"why": f"a seed occurs twice in {' and '.join(twice)}, which is no spread over seeds"}
    test = welch(of_base["values"], of_arm["values"])
    if test is None:
        return found | {"why": "no spread over seeds"}
    better = arm.name if (test.difference < 0) == lower else base.name
    return found | {
        "low": test.low, "high": test.high, "p": test.p, "df": test.df, "significant": test.significant,
        "winner": better if test.significant else None,
    }


def different(arms: Sequence[Arm], what: str, of: Callable[[TrainRun], Any]) -> str:
    """'the runs have different ...: x (a), y (b)'; empty where all that have a value have the same."""
    found: dict[str, list[str]] = {}
    for run in (r for arm in arms for r in arm.runs if of(r) is not None):
        found.setdefault(str(of(run)), []).append(run.name)
    parts = (f"{value} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" for value, names in found.items())
    return f"{what}: {', '.join(parts)}" if len(found) > 1 else ""


def validation(run: TrainRun) -> str | None:
    """What the loss was taken over: the tokens of one evaluation, out of the part of the data kept for it; None: of nothing."""
    if not run.vals:
        return None
    train, settings = table(run.recipe, "train"), table(run.recipe, "run")
    logged = {v.sequences for v in run.vals if v.sequences is not None}
    share = table(run.recipe, "data").get("val")
    if logged:
        return f"{'/'.join(f'{n:,}' for n in sorted(logged))} sequences of {train.get('seq_len')}, data.val {share}"
    return f"{settings.get('val_batches')} batches of {train.get('batch_size')} x {train.get('seq_len')}, data.val {share}"


def gpu(run: TrainRun) -> str:
    name, threads = run.machine.get("name", "unknown"), run.machine.get("threads")
    return f"{name}, {threads} threads" if threads else str(name)


def withheld(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Why losses, or times, are not held against one another."""
    losses = [
        different(arms, "the runs saw different data", lambda r: str(r.data.get("fingerprint"))[:12]),
        different(arms, "the runs were validated differently", validation),
    ]
    for run in (r for arm in arms for r in arm.runs):
        losses += [f"{run.name} diverged: its loss is not finite at step {run.diverged:,}"] if run.diverged is not None else []
        losses += [f"{run.name} has no evaluation"] if not run.vals else []
    on_cpus = all(run.machine.get("device") == "cpu" for arm in arms for run in arm.runs)
    times = [different(arms, f"the runs had different {'CPUs' if on_cpus else 'GPUs'}", gpu)]
    return {LOSS: [why for why in losses if why], TIME: [why for why in times if why]}


def measures(arms: Sequence[Arm], target: float | None) -> list[dict]:
    """Every figure that arms are held against one another by, without the verdicts."""
    found = []
    curves = {axis: [[run.curve(axis) for run in arm.runs] for arm in arms] for axis in AXES}
    for axis, name in AXES.items():
        at = common_point([c for arm in curves[axis] for c in arm])
        values = [[interpolate(c, at) if at is not None else None for c in arm] for arm in curves[axis]]
        needs = [LOSS, TIME] if axis == "time_s" else [LOSS]
        found.append({"key": f"loss at equal {name}", "unit": "loss", "at": at, "axis": axis, "needs": needs, "values": values})
    for axis, key, needs in (("time_s", "time to target", [LOSS, TIME]), ("tokens", "tokens to target", [LOSS])):
        values = [[reached(c, target) if target is not None else None for c in arm] for arm in curves[axis]]
        found.append({"key": key, "unit": axis, "at": target, "axis": axis, "needs": needs, "values": values})
    rates = [[run.median("tok_s") for run in arm.runs] for arm in arms]
    found.append({"key": "tokens/s", "unit": "tok_s", "at": None, "axis": "", "needs": [TIME], "values": rates})
    return found


def judged(measure: dict, arms: Sequence[Arm], reasons: Mapping[str, list[str]]) -> dict:
    """A measure with every other arm against the first, or why not."""
    samples = [sample(values) for values in measure.pop("values")]
    why = [reason for need in measure.pop("needs") for reason in reasons[need]]
    lower = measure["unit"] != "tok_s"
    pairs = [] if why else [versus(arms[0], arm, samples[0], s, lower) for arm, s in zip(arms[1:], samples[1:])]
    return {**measure, "better": "lower" if lower else "higher", "arms": samples, "versus": pairs, "withheld": why}


def summary(arm: Arm) -> dict:
    """The figures of an arm alone."""
    first = arm.runs[0]
    memory = [m for r in arm.runs if (m := r.memory_mib) is not None]
    return {
        "name": arm.name, "runs": [str(r.path) for r in arm.runs], "seeds": [r.seed for r in arm.runs],
        "parameters": first.facts.get("parameters"), "machine": gpu(first),
        "steps": min(r.steps[-1].step for r in arm.runs), "tokens": min(r.steps[-1].tokens for r in arm.runs),
        "time_s": sample(r.steps[-1].time_s for r in arm.runs), "tok_s": sample(r.median("tok_s") for r in arm.runs),
        "ms": sample(r.median("ms") for r in arm.runs), "mfu": sample(r.median("mfu") for r in arm.runs),
        "memory_mib": max(memory) if memory else None,
        "overhead": sample(table(r.facts, "overhead").get("ratio") for r in arm.runs),
        "final_loss": sample(r.final_loss for r in arm.runs),
    }


def changed(per_run: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[list]]:
    """{key: the values of each arm} of what is not the same in all runs; None where a run lacks the key."""
    keys = list(dict.fromkeys(key for arm in per_run for values in arm for key in values))
    found = {}
    for key in keys:
        arms = [distinct([values.get(key) for values in arm]) for arm in per_run]
        if len(distinct([v for arm in arms for v in arm])) > 1:
            found[key] = arms
    return found


def distinct(values: Sequence) -> list:
    return [v for i, v in enumerate(values) if v not in values[:i]]


def beside(run: TrainRun) -> dict[str, Any]:
    """What may differ without being in the recipe."""
    found = {key: run.facts.get(key) for key in ("parameters", "world", "commit", "plan")}
    found |= {"data": run.data.get("source"), "data.fingerprint": str(run.data.get("fingerprint"))[:12]}
    return found | {"machine": gpu(run), "torch": run.machine.get("torch")}


def notes(arms: Sequence[Arm], target: float | None) -> list[str]:
    found = [f"{LINEAR}; times leave out the first {WARM_UP} steps, and as many after a resume"]
    for arm in arms:
        if keys := list(changed([[unseeded(r) for r in arm.runs]])):
            found.append(f"{arm.name}: its runs differ in more than the seed: {', '.join(keys[:5])}")
        if keys := list(changed([[beside(r) for r in arm.runs]])):
            found.append(f"{arm.name}: its runs differ outside the recipe: {', '.join(keys)}")
        if len({r.steps[-1].step for r in arm.runs}) > 1:
            found.append(f"{arm.name}: its runs ended at different steps; the fewest are shown")
        found += [f"{r.name}: lines of its log that cannot be read, left out: {r.damaged}" for r in arm.runs if r.damaged]
        found += [f"{r.name}: {e.text}" for r in arm.runs for e in r.events if e.what == "stop"]
        early = [r.name for r in arm.runs if target is not None and r.vals and (r.vals[0].loss or target + 1) <= target]
        found += [f"{name} was at the target loss by its first evaluation, and may have reached it earlier" for name in early]
    if len(arms) > 2:
        others = f"with {len(arms) - 1} of them one may seem to differ by chance"
        found.append(f"every interval holds with {CONFIDENCE:.0%} for itself: {others}")
    return found


def default_target(arms: Sequence[Arm]) -> tuple[float | None, str]:
    """The worst final loss of any run, which all of them reach."""
    finals = [(loss, arm.name) for arm in arms for r in arm.runs if (loss := r.final_loss) is not None]
    return max(finals, default=(None, ""))


def compare(arms: Sequence[Arm], target: float | None = None) -> dict:
    """The comparison in plain values, ready for JSON; the first arm is the one that others are held against."""
    if target is not None and not math.isfinite(target):
        raise ValueError(f"compare: --target must be a finite loss, got {target}")
    loss, of = (target, "") if target is not None else default_target(arms)
    reasons = withheld(arms)
    runs = [arm.runs for arm in arms]
    return {
        "arms": [summary(arm) for arm in arms], "base": arms[0].name, "confidence": CONFIDENCE,
        "differences": changed([[unseeded(r) for r in of_arm] for of_arm in runs]),
        "other_differences": changed([[beside(r) for r in of_arm] for of_arm in runs]),
        "target": {"loss": loss, "of": of}, "measures": [judged(m, arms, reasons) for m in measures(arms, loss)],
        "withheld": reasons, "notes": notes(arms, loss),
    }
