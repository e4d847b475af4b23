"""Record a model's calls, choose an impl for each, then choose how the whole model runs; verified whole, timed whole.

A plan is a variant of the model, its choices, torch.compile or not, CUDA graph or not. Every plan's loss and every one of
its gradients must pass against the plain variant in float64 before it is timed. Those that pass stay in memory and race
each other and the plain eager model in turns, so that every speed-up is a ratio from one run.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from whet.choices import Choices
from whet.figures import error_line
from whet.graphs import Graph
from whet.lock import Lock
from whet.machine import commit
from whet.measure import Race, memory_allocated, now, race
from whet.models import Model, Recipe, find
from whet.op import Call
from whet.race import Outcome, Ratio, decide, paired, through
from whet.torch_ops import own_code
from whet.tune import Tuning, entries_of, forget, modes_here, reduced_note, save_plans
from whet.verify import judge
from whet.workload import PRECISIONS, ROUNDING, Workload

BEFORE = "before: plain eager"
OUT_OF_MEMORY = "out of memory"
ROOM = 1.2  # times the most memory that a plan took: what must be free for the next one beside those that wait for the race


@dataclass(frozen=True)
class Plan:
    name: str
    variant: str  # which of the model's forms
    choices: str  # "eager" (plain formulas), "stock", or "tuned"
    compiled: bool = False
    graph: bool = False

    @property
    def mode(self) -> str:
        """Which choices it uses: host overhead counts only where the host launches each op."""
        return "compile" if self.compiled else "graph" if self.graph else "eager"


def plans(model: Model) -> list[Plan]:
    """Simplest first: a tie keeps the earlier. Each is also tried under a CUDA graph where there is a GPU."""
    plain = [Plan("eager", model.stock, "stock"), Plan("eager + choices", model.tuned, "tuned")]
    return plain + [Plan(p.name.replace("eager", "torch.compile"), p.variant, p.choices, compiled=True) for p in plain]


def record_calls(model: Model, config, recipe: Recipe, device: str, precision: str) -> list[tuple[Call, int]]:
    """The calls of one training forward."""
    module = model.build(config, model.tuned, Choices()).to(device)
    work = Workload(module, (), model.batch(config, recipe, device), precision=precision)
    if bad := [n for n, p in work.model.named_parameters() if not torch.isfinite(p).all()]:
        raise ValueError(f"{model.name}: parameter {bad[0]} has NaN or infinite values ({len(bad)} such); fix them first")
    return work.calls()


class PlanRunner:
    """One plan made real: a model with the given weights, its optimizer, and a step to call."""

    def __init__(self, trial: "Trial", plan: Plan, choices: Choices, precision: str):
        self.trial, device = trial, trial.device
        self.weights = trial.model.adapt(trial.config, plan.variant, trial.weights)
        module = trial.model.build(trial.config, plan.variant, choices).to(device)
        before = plan.name == BEFORE
        how: dict = dict(fused=None if before else True, capturable=not before and device == "cuda")
        self.work = Workload(
            module, (), trial.model.batch(trial.config, trial.recipe, device), precision=precision,
            optimizer=torch.optim.AdamW(module.parameters(), lr=trial.recipe.lr, **how),
            run=torch.compile(own_code(module.forward), dynamic=False) if plan.compiled else None,
        )
        self.restore()
        self.step: Callable = self.work.step
        if plan.graph:
            self.capture()

    def capture(self) -> None:
        """From now on a step is the replay of one CUDA graph: forward, backward and optimizer."""
        self.step = Graph(self.work.step)

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self.work.model.named_parameters():
            p.copy_(self.weights[name])

    def evidence(self) -> dict[str, torch.Tensor]:
        """Loss and every gradient of one step from the given weights, under the plain variant's names."""
        self.restore()
        loss = self.step()
        plain = self.trial.model.canonical(self.trial.config, self.work.gradients())
        found = {"output loss": loss.clone()} | {f"grad {n}": g.clone() for n, g in plain.items()}
        self.restore()
        return found


def oracle(model: Model, config, recipe: Recipe, weights: dict, device: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of the plain variant in float64."""
    module = model.build(config, model.plain, Choices(default="eager")).to(device)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])
    return Workload(module.double(), (), model.batch(config, recipe, device)).evidence()


@contextlib.contextmanager
def _peak(into: dict, origin: int) -> Iterator[None]:
    """Device memory at the highest point of the block, over what was held at the origin."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        into["peak_mb"] = round((torch.cuda.max_memory_allocated() - origin) / 1e6, 1)


def _reason(e: Exception) -> str:
    if isinstance(e, torch.cuda.OutOfMemoryError):
        return OUT_OF_MEMORY
    return error_line(e)


class PlanFailed(Exception):
    """A plan raised while it was raced."""

    def __init__(self, name: str, cause: Exception):
        super().__init__(name)
        self.name, self.cause = name, cause


def _named(name: str, step: Callable) -> Callable:
    """A step whose failure says whose it is."""
    def run():
        try:
            return step()
        except Exception as e:
            raise PlanFailed(name, e) from e

    return run


class Trial:
    """All plans of one model: each built and verified, then raced together."""

    def __init__(self, model: Model, config, recipe: Recipe, precision: str, seconds: float):
        self.model, self.config, self.recipe, self.precision, self.seconds = model, config, recipe, precision, seconds
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.graphs = self.device == "cuda"
        self.choices: dict[str, Choices] = {}
        self.ready: dict[str, tuple[dict, PlanRunner | None, int]] = {}
        self.results: dict[str, dict] = {}
        self.entered: dict[str, Callable] = {}  # the steps of verified plans that wait in memory for the race
        self.heats: list[Race] = []
        self.wrong: set[str] = set()  # plans that failed their check
        plain = model.build(config, model.plain, Choices(default="eager"), seed=recipe.seed)
        self.weights = {n: p.detach().to(self.device) for n, p in plain.named_parameters()}
        self.truth = oracle(model, config, recipe, self.weights, self.device)
        before = Plan(BEFORE, model.plain, "eager")
        self.eager = self.runner(before).evidence()  # the error that eager itself makes at this precision: the budget
        self.before_result: dict = {"name": BEFORE, "ok": True, "why": "", "speedup": 1.0}
        gc.collect()
        with _peak(self.before_result, memory_allocated()):
            self.before = self.runner(before, "float32")
            self.before.step()
            self.before.step()

    def runner(self, plan: Plan, precision: str | None = None) -> PlanRunner:
        fixed = {"eager": Choices(default="eager"), "stock": Choices()}
        choices = fixed.get(plan.choices) or self.choices[plan.mode]
        return PlanRunner(self, plan, choices, precision or self.precision)

    def run(self, plan: Plan) -> None:
        """Build and verify the plan; where memory is short, first race those that wait in it, and let them go."""
        results = self._run(plan)
        if self.entered and any(r["why"] == OUT_OF_MEMORY for r in results):
            self.heat()
            self._run(plan)
        if not self._room():
            self.heat()

    def _run(self, plan: Plan) -> list[dict]:
        """The plan, and on a GPU the same under a CUDA graph; a compiled model is compiled once for both."""
        result, runner, origin = self.ready.pop(plan.name) if plan.name in self.ready else self.prepare(plan)
        results = [self.finish(result, runner)]
        if self.graphs:
            if not plan.compiled:
                runner = None  # the two modes may choose different impls
            graphed = replace(plan, name=plan.name + " + CUDA graph", graph=True)
            result, runner, _ = self.prepare(graphed, runner, origin)
            results.append(self.finish(result, runner))
        return results

    def _room(self) -> bool:
        if not torch.cuda.is_available():
            return True
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free > ROOM * max((r.get("peak_mb", 0.0) for r in self.results.values()), default=0.0) * 1e6

    def prepare(
        self, plan: Plan, runner: PlanRunner | None = None, origin: int | None = None
    ) -> tuple[dict, PlanRunner | None, int]:
        """Build (or capture), compile and warm up: the part of a plan that may be done while others use the GPU."""
        gc.collect()
        result: dict = {"name": plan.name, "ok": False, "why": ""} | {k: v for k, v in asdict(plan).items() if k != "name"}
        started, origin = now(), origin if runner is not None and origin is not None else memory_allocated()
        try:
            with _peak(result, origin):
                if runner is None:
                    runner = self.runner(plan)
                else:
                    runner.capture()
                runner.step()
                runner.step()
            result["ready_s"] = round(now() - started, 2)
        except Exception as e:
            result["why"], runner = _reason(e), None
        return result, runner, origin

    def prepare_early(self, todo: list[Plan]) -> None:
        """Compile what waits for no choice, while children verify candidates."""
        for plan in todo:
            if plan.compiled and plan.choices != "tuned":
                self.ready[plan.name] = self.prepare(plan)

    def finish(self, result: dict, runner: PlanRunner | None) -> dict:
        """Verify, then enter for the race. A plan that fails keeps its reason and loses its candidacy."""
        self.results[result["name"]] = result
        if runner is None:
            return result
        try:
            verdict = judge(self._complete(runner.evidence()), self.eager, self.truth, ROUNDING[self.precision])
            result |= {"ok": verdict.ok, "why": verdict.why, "share": round(verdict.share, 4)}
            if verdict.ok:
                self.entered[result["name"]] = runner.step
            else:
                self.wrong.add(result["name"])
        except Exception as e:  # whatever a plan dies of costs its candidacy, never the run
            result |= {"ok": False, "why": _reason(e)}
        return result

    def _complete(self, evidence: dict) -> dict:
        return {name: evidence.get(name) for name in self.truth}

    def heat(self) -> None:
        """Race the plans in memory and the plain model against each other, then let the plans go."""
        while self.entered:
            runs = {name: _named(name, step) for name, step in {BEFORE: self.before.step, **self.entered}.items()}
            try:
                self._note(race(runs, keep=BEFORE, seconds=self.seconds, flush=False))
                break
            except PlanFailed as e:
                for name in list(self.entered) if e.name == BEFORE else [e.name]:
                    self.results[name] |= {"ok": False, "why": _reason(e.cause)}
                    del self.entered[name]
        self.entered.clear()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()

    def _note(self, raced: Race) -> None:
        self.heats.append(raced)
        before = raced.timings[BEFORE]
        for name, t in raced.timings.items():
            result = self.before_result if name == BEFORE else self.results[name]
            result |= {k: v for k, v in t.as_dict().items() if k != "peak_mib"}
            result["samples_per_s"] = round(self.recipe.batch / t.ms * 1e3, 1)
            if name != BEFORE:
                gain = paired(raced.times[BEFORE], raced.times[name])
                result |= {"before_ms": round(before.ms, 4), "speedup": round(gain.value, 4)}

    def outcome(self) -> Outcome:
        """What the race chose. Plans that were not in memory together are compared by their ratios to the plain model."""
        if not self.heats:
            return Outcome(BEFORE, "no other plan passed", {BEFORE: Ratio(1.0, 1.0, 1.0, 0)}, True)
        if len(self.heats) == 1:
            return self.heats[0].outcome
        over = {n: paired(ms, h.times[BEFORE]) for h in self.heats for n, ms in h.times.items()}
        best = min(over, key=lambda n: over[n].value)
        found = decide(list(over), best, lambda a, b: through(over[a], over[b]), BEFORE)
        why = f"{found.why}; raced in {len(self.heats)} groups, since memory does not hold all plans at once"
        return replace(found, why=why)


def best_plan(
    target: str,
    lock: Lock | None = None,
    precision: str = "float32",
    again: bool = False,
    seconds: float = 0.5,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> dict:
    """The proof: calls, candidates and choices, plans before and after. From the lock when it already holds it.

    target     a model and a size, 'tiny-llama:small'
    precision  float32 (the model's own), tf32 or bfloat16 (autocast): only ever what is asked for
    again      measure plans anew even if the lock has them
    """
    if precision not in PRECISIONS:
        raise ValueError(f"optimize: precision must be one of {PRECISIONS}, got {precision!r}")
    model, size = find(target)
    config, recipe, lock = model.sizes[size], model.recipes[size], lock or Lock.read()
    key = f"{model.name}:{size} {precision}"
    known = lock.plans.get(key)
    if known and not again and known["config"] == f"{config} {recipe}":
        entries = entries_of(lock, [Call(**item["call"]) for item in known["calls"]])
        return known | {"from_lock": True, "entries": list(entries.values())}
    started = now()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    progress("recording calls", 0, 1)
    calls = record_calls(model, config, recipe, device, precision)
    recorded = now()
    trial, todo = Trial(model, config, recipe, precision, seconds), plans(model)
    with Tuning(calls, lock, progress=progress) as tuning:
        trial.prepare_early(todo)  # while children verify candidates
        tuned = tuning.finish(seconds=0.1)
    trial.choices, after = tuned.choices, now()
    for i, plan in enumerate(todo):
        progress(f"plan: {plan.name}", i, len(todo) + 1)
        trial.run(plan)
    progress("plans: racing", len(todo), len(todo) + 1)
    trial.heat()
    progress("done", len(todo) + 1, len(todo) + 1)
    result = conclude(key, trial, calls)
    phases = {"record": recorded - started, "tune": after - recorded, "plans": now() - after}
    result |= {"seconds": round(now() - started, 1), "phases": {k: round(v, 1) for k, v in phases.items()}}
    forget(lock, [key for key, entry in tuned.entries.items() if entry["mode"] in result["forgotten"]])
    save_plans(lock, key, result)
    return result | {"from_lock": False, "entries": list(tuned.entries.values())}


def conclude(key: str, trial: Trial, calls: list[tuple[Call, int]]) -> dict:
    """The plan that the race chose, every plan with the ratio that decided, and what there is to say of them."""
    found, results = trial.outcome(), [trial.before_result, *trial.results.values()]
    for r in results:
        if r["name"] in found.ratios and r["ok"]:
            r |= found.ratios[r["name"]].as_dict()
    busy = next((heat.busy for heat in trial.heats if heat.busy), "")
    forgotten = distrusted(results, trial.wrong)
    lost = f" The choices for {' and '.join(forgotten)} mode failed in the whole model and were taken out of the lock."
    return {
        "target": key, "config": f"{trial.config} {trial.recipe}", "plans": results,
        "chosen": found.chosen, "tied": found.tied, "why": found.why,
        "note": reduced_note() + (lost if forgotten else ""), "commit": commit(), "forgotten": forgotten,
        "speedup": next(r.get("speedup", 1.0) for r in results if r["name"] == found.chosen),
        "calls": [{"call": asdict(call), "count": count} for call, count in calls],
    } | ({"busy": busy} if busy else {})


def distrusted(results: list[dict], wrong: Collection[str]) -> list[str]:
    """The modes whose choices made the whole model wrong: as they stand, or in every plan that used them and was checked."""
    found = []
    for mode in modes_here():
        using = [r for r in results if r.get("choices") == "tuned" and _mode(r) == mode]
        failed = [r for r in using if r["name"] in wrong]
        if any(not r["compiled"] for r in failed) or (failed and not any(r["ok"] for r in using)):
            found.append(mode)
    return found


def _mode(result: dict) -> str:
    """The mode in which the choices of a plan were made."""
    return modes_here()[-1] if result["compiled"] else "graph" if result["graph"] else "eager"
