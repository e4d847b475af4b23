"""Record a model's calls, choose an impl for each, then choose how the whole model runs; verified whole, timed whole.

A plan is a variant of the model, its choices, torch.compile or not, CUDA graph or not. Every plan's loss and every one of
its gradients must pass against the plain variant in float64 before it is timed. Those that pass stay in memory and race
each other and the plain eager model in turns, so that every speed-up is a ratio from one run.
"""

import gc
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from whet.choices import Choices
from whet.decode.cache import free_bytes
from whet.duel import duel, rival_of
from whet.figures import error_line
from whet.lock import Lock
from whet.machine import commit
from whet.measure import Race, free_memory, memory_allocated, now, race
from whet.op import Call
from whet.plan import BEFORE, Plan, PlanResult, asked_plans, graphed, peak_memory
from whet.plan_limits import Limit, fastest, refuse_early, rounds
from whet.plan_memory import PlanMemory, lacking
from whet.race import Outcome, leanest, paired
from whet.subjects import BuiltIn, Subject, subject_of
from whet.swap._memory import gib
from whet.tune import Tuning, entries_of, forget, modes_here, reduced_note, save_plans
from whet.verify import judge
from whet.workload import PRECISIONS

OUT_OF_MEMORY = "out of memory"
SHARE = 0.4  # of the device's memory that the model as it was may take, so that plans fit beside it
Weights = Mapping[str, torch.Tensor]
ROOM = 1.2  # times the most memory that a plan took: what must be free for the next one beside those that wait for the race


class PlanRunner:
    """One plan made real: a model with the given weights, its optimizer, and a step to call. subject: None is the trial's."""

    def __init__(
        self, trial: "Trial", plan: Plan, choices: Choices | None, precision: str, weights: Weights | None = None,
        subject: Subject | None = None,
    ):
        self.subject = subject or trial.subject
        self.weights = self.subject.weights(plan) if weights is None else weights
        self.work = self.subject.workload(plan, choices, precision)
        self.restore()
        self.step: Callable = self.work.outcome
        if plan.graph:
            self.capture()

    def capture(self) -> None:
        """From now on a step is the replay of one CUDA graph: forward, backward and optimizer."""
        self.step = self.work.captured()

    @torch.no_grad()
    def restore(self) -> None:
        model = self.work.model
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if name in self.weights:
                t.copy_(self.weights[name])

    def evidence(self) -> dict[str, torch.Tensor]:
        """What one step from the given weights computes, by the names that the truth has."""
        self.restore()
        found = self.work.evidence(self.step, self.subject.canonical)
        self.restore()
        return found


def _reason(e: Exception) -> str:
    if isinstance(e, torch.cuda.OutOfMemoryError):
        return OUT_OF_MEMORY
    return error_line(e)


Prepared = tuple[PlanResult, PlanRunner | None, int]  # and the device memory that it holds


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
    """All plans of one subject: each built and verified, then raced together."""

    predicts = True  # the memory of each, before it is built
    only: Collection[str] = ()  # the names of those that may be chosen; none: all
    limit: Limit | None = None

    def __init__(self, subject: Subject, precision: str, seconds: float, memory: PlanMemory | None = None):
        self.subject, self.precision, self.seconds = subject, precision, seconds
        self.graphs = subject.device == "cuda"
        self.memory = memory or PlanMemory(subject.workload, subject.device, subject.notes)
        self.choices: dict[str, Choices] = {}
        self.ready: dict[str, Prepared] = {}
        self.results: dict[str, PlanResult] = {}
        self.entered: dict[str, Callable] = {}  # the steps of verified plans that wait in memory for the race
        self.heats: list[Race] = []
        self.wrong: set[str] = set()  # plans that failed their check
        self.rounding, self.proof = subject.rounding(precision), subject.proof()
        self.truth = self.proof.truth()
        while not self._begun(subject.before()):
            free_memory()

    def _begun(self, before: Plan) -> bool:
        """The model as it was, run and kept for the race; False where it left no room for others, and another can be tried."""
        self.before_result = PlanResult(before, ok=True, speedup=1.0)
        precision = "float32" if self.proof is self.subject else self.precision  # float32 would take minutes a step there
        if self._lacks(self.before_result, precision) and self.subject.before_in_less():
            return False
        try:
            self.eager = self.evidence(before)  # the error that eager itself makes at this precision: the budget
            gc.collect()
            weights = self.subject.weights(before)
            with peak_memory(self.before_result, memory_allocated()):
                self.before = self.runner(before, precision, weights)
                self.before.step()
                self.before.step()
        except torch.OutOfMemoryError:
            if not self.subject.before_in_less():
                raise
            return False
        most = SHARE * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else math.inf
        if (self.before_result.peak_mb or 0) * 1e6 <= most or not self.subject.before_in_less():
            return True
        del self.before
        return False

    def choices_of(self, plan: Plan) -> Choices | None:
        fixed = {"eager": Choices(default="eager"), "stock": Choices(), "own": None}
        name = plan.mode if plan.choices == "tuned" else plan.choices
        return fixed[name] if name in fixed and plan.choices != "tuned" else self.choices[name]

    def runner(self, plan: Plan, precision: str | None = None, weights: Weights | None = None) -> PlanRunner:
        return PlanRunner(self, plan, self.choices_of(plan), precision or self.precision, weights)

    def evidence(self, plan: Plan, runner: PlanRunner | None = None) -> dict[str, torch.Tensor]:
        """What one step by the plan computes: by the runner, unless something smaller is verified in the subject's place."""
        if runner is None or self.proof is not self.subject:
            runner = PlanRunner(self, plan, self.choices_of(plan), self.precision, None, self.proof)
        return runner.evidence()

    def _lacks(self, result: PlanResult, precision: str) -> str:
        """Why a plan surely does not fit the memory that is free now; what it is predicted to take is noted."""
        if not self.predicts:
            return ""
        found = self.memory.of(result.plan, self.choices_of(result.plan), precision)
        result.predicted_mb = round(found.peak / 1e6, 1) if found is not None else None
        return lacking(found, free_bytes(torch.device(self.subject.device)))

    def run_all(self, todo: Sequence[Plan], progress: Callable[[str, int, int], None]) -> None:
        for i, plan in enumerate(todo):
            progress(f"plan: {plan.name}", i, len(todo) + 1)
            self.run(plan)
        progress("plans: racing", len(todo), len(todo) + 1)
        self.heat()
        progress("done", len(todo) + 1, len(todo) + 1)

    def run(self, plan: Plan) -> None:
        """Build and verify the plan; where memory is short, first race those that wait in it, and let them go."""
        results = self._run(plan)
        if self.entered and any(r.why.startswith(OUT_OF_MEMORY) for r in results):
            self.heat()
            self._run(plan)
        if not self._room():
            self.heat()

    def _run(self, plan: Plan) -> list[PlanResult]:
        """The plan, and on a GPU the same under a CUDA graph; where both choose alike a model is compiled once for both."""
        results, runner, held, after = list[PlanResult](), None, 0, graphed(plan)
        both = self.graphs and not plan.graph and self._asked(after)
        shared = both and plan.compiled and (
            plan.choices != "tuned" or self.choices[plan.mode].table == self.choices[after.mode].table
        )
        if self._asked(plan) or shared:
            result, runner, held = self.ready.pop(plan.name) if plan.name in self.ready else self.prepare(plan)
            results += [self.finish(result, runner)] if self._asked(plan) else []
        if both:
            result, runner, _ = self.prepare(after, runner if shared else None, held)
            results.append(self.finish(result, runner))
        return results

    def _asked(self, plan: Plan) -> bool:
        return not self.only or plan.base in self.only

    def _room(self) -> bool:
        if not torch.cuda.is_available():
            return True
        torch.cuda.empty_cache()  # what stays reserved lies in the pools of CUDA graphs, which nothing else can use
        free = torch.cuda.mem_get_info()[0]
        return free > ROOM * max(r.peak_mb or 0.0 for r in (self.before_result, *self.results.values())) * 1e6

    def prepare(self, plan: Plan, runner: PlanRunner | None = None, held: int = 0) -> Prepared:
        """Build, compile and warm up, which may be done while others use the GPU; or capture a runner, which holds so much."""
        gc.collect()
        result = PlanResult(plan)
        why = f"{OUT_OF_MEMORY}: {lack}" if (lack := self._lacks(result, self.precision)) else ""
        if (why := why or (self.limit.surely_over(result) if self.limit else "")) and runner is None:
            result.why = why
            return result, None, 0
        weights = self.subject.weights(plan) if runner is None else None  # the trial's, not the plan's
        started, origin = now(), memory_allocated() - (held if runner is not None else 0)  # others lie beside it by now
        try:
            with peak_memory(result, origin):
                if runner is None:
                    runner = self.runner(plan, None, weights)
                else:
                    runner.capture()
                runner.step()
                runner.step()
            result.ready_s = round(now() - started, 2)
        except Exception as e:
            result.why, runner = _reason(e), None
        return result, runner, memory_allocated() - origin

    def prepare_early(self, todo: list[Plan]) -> None:
        """Compile what waits for no choice, while children verify candidates."""
        for plan in todo:
            if plan.compiled and plan.choices != "tuned":
                self.ready[plan.name] = self.prepare(plan)

    def finish(self, result: PlanResult, runner: PlanRunner | None) -> PlanResult:
        """Verify, then enter for the race. A plan that fails keeps its reason and loses its candidacy."""
        self.results[result.name] = result
        if runner is None:
            return result
        try:
            verdict = judge(self._complete(self.evidence(result.plan, runner)), self.eager, self.truth, self.rounding)
            result.ok, result.why, result.share = verdict.ok, verdict.why, round(verdict.share, 4)
            if verdict.ok:
                self.entered[result.name] = runner.step
            else:
                self.wrong.add(result.name)
        except Exception as e:  # whatever a plan dies of costs its candidacy, never the run
            result.lost(_reason(e))
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
                why = _reason(e.cause)
                if e.name != BEFORE:
                    out = [e.name]
                else:  # without memory for the plain model the last plan gives way; whatever else it dies of costs all
                    out = list(self.entered)[-1 if why == OUT_OF_MEMORY else 0 :]
                for name in out:
                    self.results[name].lost(why)
                    del self.entered[name]
            runs.clear()
            free_memory()
        self.entered.clear()
        self.let_go()

    def beside(self, rival: BuiltIn, chosen: str) -> dict:
        """The chosen plan, built and verified once more, in turns with another model under torch.compile."""
        if chosen == BEFORE:
            return duel(chosen, self.before.step, rival, self.precision, self.seconds)
        kept = self.results[chosen]
        result, runner, _ = self.prepare(kept.plan)
        if not self.finish(result, runner).ok:
            raise ValueError(f"optimize: {chosen}, built once more, is no longer right: {result.why}")
        self.results[chosen] = kept
        found = duel(chosen, self.entered.pop(chosen), rival, self.precision, self.seconds)
        self.let_go()
        return found

    def let_go(self) -> None:
        """The memory of plans that were raced, and what torch.compile made for them."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()

    def _note(self, raced: Race) -> None:
        self.heats.append(raced)
        before = raced.timings[BEFORE]
        for name, t in raced.timings.items():
            result = self.before_result if name == BEFORE else self.results[name]
            result.timing, result.samples_per_s = t, round(self.subject.samples / t.ms * 1e3, 1)
            if name != BEFORE:
                gain = paired(raced.times[BEFORE], raced.times[name])
                result.before_ms, result.speedup = round(before.ms, 4), round(gain.value, 4)

    def outcome(self) -> Outcome:
        """What the race chose; where plans tie and one takes much less memory, that one."""
        results = {BEFORE: self.before_result, **self.results}
        found = fastest(self.heats, results, self.limit, self.subject.name)
        raced = {n: r for n, r in results.items() if n in found.ratios and r.ok}
        return leanest(found, {
            n: replace(r.timing, peak_mib=r.peak_mb * 1e6 / 2**20) for n, r in raced.items() if r.timing and r.peak_mb
        })


def best_plan(
    target: str, lock: Lock | None = None, precision: str = "float32", again: bool = False, seconds: float = 0.5,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None, against: str = "", only: Collection[str] = (),
    max_memory: int = 0,
) -> dict:
    """The proof: calls, candidates and choices, plans before and after. From the lock when it already holds it.

    target     a model and a size, 'tiny-llama:small', or a function that returns model and batch, 'file.py:function'
    precision  float32 (the model's own), tf32 or bfloat16 (autocast): only ever what is asked for
    again      measure plans anew even if the lock has them; what a function returns is always measured
    against    another built-in model, under torch.compile, that the chosen plan runs in turns with; plans are measured anew
    only       names of the plans to try, as the result has them; the lock then keeps the choices, not these plans
    max_memory bytes that the chosen plan may take: leaner ones are tried beside those that take more, and no lock keeps them
    """
    if precision not in PRECISIONS:
        raise ValueError(f"optimize: precision must be one of {PRECISIONS}, got {precision!r}")
    subject, lock = subject_of(target), Lock.of(lock)
    key, rival = f"{subject.name} {precision}", rival_of(subject, against) if against else None
    known = lock.plans.get(key) if subject.stored and not rival and not only and not max_memory else None
    if known and not again and known["config"] == subject.config:
        entries = entries_of(lock, [Call(**item["call"]) for item in known["calls"]])
        return known | {"from_lock": True, "entries": list(entries.values())}
    started, memory = now(), PlanMemory(subject.workload, subject.device, subject.notes)
    todo = asked_plans(subject.plans(), only, subject.device == "cuda")
    refuse_early(memory, subject, precision, max_memory)
    progress("recording calls", 0, 1)
    calls, recorded = subject.calls(precision), now()
    trial = Trial(subject, precision, seconds, memory)
    trial.only = only
    with Tuning(calls, lock, progress=progress) as tuning:
        trial.prepare_early(todo)  # while children verify candidates
        tuned = tuning.finish(seconds=0.1)
    trial.choices, after = tuned.choices, now()
    trial.limit = Limit(max_memory, memory, precision, trial.graphs, trial.choices) if max_memory else None
    for plans in rounds(todo, subject, trial.limit, trial.choices_of, tuned.entries, trial.results):
        trial.run_all(plans, progress)
    result = conclude(key + (f" within {gib(max_memory)}" if max_memory else ""), trial, calls)
    if rival:
        progress(f"{against} beside {result['chosen']}", len(todo), len(todo) + 1)
        result["against"] = trial.beside(rival, result["chosen"])
    phases = {"record": recorded - started, "tune": after - recorded, "plans": now() - after}
    result |= {"seconds": round(now() - started, 1), "phases": {k: round(v, 1) for k, v in phases.items()}}
    if result["forgotten"]:
        forget(lock, [key for key, entry in tuned.entries.items() if entry["mode"] in result["forgotten"]])
    if subject.stored and not only and not max_memory:
        save_plans(lock, key, result)
    return result | {"from_lock": False, "entries": list(tuned.entries.values())}


def conclude(key: str, trial: Trial, calls: list[tuple[Call, int]]) -> dict:
    """The plan that the race chose, every plan with the ratio that decided, and what there is to say of them."""
    found, results, subject = trial.outcome(), [trial.before_result, *trial.results.values()], trial.subject
    for r in results:
        r.ratio = found.ratios.get(r.name)
    busy = next((heat.busy for heat in trial.heats if heat.busy), "")
    forgotten = distrusted(results, trial.wrong)
    lost = f" The choices for {' and '.join(forgotten)} mode failed in the whole model and were taken out of the lock."
    return {
        "target": key, "config": subject.config, "kind": subject.kind, "notes": subject.notes,
        "plans": [r.to_record() for r in results], "chosen": found.chosen, "tied": found.tied, "why": found.why,
        "note": (reduced_note() if calls else "") + (lost if forgotten else ""), "commit": commit(), "forgotten": forgotten,
        "speedup": next(r.speedup or 1.0 for r in results if r.name == found.chosen),
        "calls": [{"call": asdict(call), "count": count} for call, count in calls],
    } | ({"busy": busy} if busy else {})


def distrusted(results: list[PlanResult], wrong: Collection[str]) -> list[str]:
    """The modes whose choices made the whole model wrong: as they stand, or in every plan that used them and was checked."""
    found = []
    for mode in modes_here():
        using = [r for r in results if r.plan.choices == "tuned" and _mode(r.plan) == mode]
        failed = [r for r in using if r.name in wrong]
        if any(not r.plan.compiled for r in failed) or (failed and not any(r.ok for r in using)):
            found.append(mode)
    return found


def _mode(plan: Plan) -> str:
    """The mode in which the choices of a plan were made."""
    return modes_here()[-1] if plan.compiled else "graph" if plan.graph else "eager"
