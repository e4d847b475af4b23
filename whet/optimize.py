"""Record a model's calls, choose an impl for each, then choose how the whole model runs; verified whole, timed whole.

A plan is a variant of the model, its choices, torch.compile or not, CUDA graph or not. Every plan's loss and every one of
its gradients must pass against the plain variant in float64 before it is timed, and it is timed in turns with the
plain eager model, so its speed-up is a ratio from one run.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from whet.choices import Choices, Recorder
from whet.lock import Lock
from whet.machine import commit
from whet.measure import Graph, Timing, compare, fastest, now
from whet.models import Model, find
from whet.op import Call, discover
from whet.tune import modes_here, reduced_note, save_plans, tune
from whet.verify import judge

STEPS = {"float32": None, "tf32": 2.0**-10, "bfloat16": torch.finfo(torch.bfloat16).eps}  # a matmul operand's rounding step
PRECISIONS = tuple(STEPS)
BEFORE = "before: plain eager"


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


def record_calls(model: Model, config, device: str) -> list[tuple[Call, int]]:
    """One training forward with every op watched. Only shapes matter, so precision and values do not."""
    recorder = Recorder()
    module = model.build(config, model.tuned, recorder).to(device)
    if bad := [n for n, p in module.named_parameters() if not torch.isfinite(p).all()]:
        raise ValueError(f"{model.name}: parameter {bad[0]} has NaN or infinite values ({len(bad)} such); fix them first")
    module(**model.batch(config, device))
    return list(recorder.calls.values())


@contextlib.contextmanager
def precision_set(precision: str, device: str) -> Iterator[None]:
    """float32 as it stands, TF32 matmuls, or bfloat16 autocast. Never chosen for the user: only what was asked."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class Runner:
    """One plan made real: a model with the given weights, its optimizer, and a step to call."""

    def __init__(self, model: Model, config, plan: Plan, choices: Choices, weights: dict, device: str, precision: str):
        self.model, self.config, self.device, self.precision = model, config, device, precision
        self.weights = model.adapt(config, plan.variant, weights)
        self.module = model.build(config, plan.variant, choices).to(device)
        self.restore()
        self.data = model.batch(config, device)
        before = plan.name == BEFORE
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=config.lr, fused=None if before else True, capturable=not before and device == "cuda"
        )
        self.forward = torch.compile(self.module, dynamic=False) if plan.compiled else self.module
        self.step: Callable = self.one_step
        if plan.graph:
            self.capture()

    def capture(self) -> None:
        """From now on a step is the replay of one CUDA graph: forward, backward and optimizer."""
        self.step = Graph(self.one_step)

    def one_step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with precision_set(self.precision, self.device):
            loss = self.forward(**self.data)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self.module.named_parameters():
            p.copy_(self.weights[name])

    def evidence(self) -> dict[str, torch.Tensor]:
        """Loss and every gradient of one step from the given weights, under the plain variant's names."""
        self.restore()
        loss = self.step()
        grads = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        plain = self.model.canonical(self.config, grads)
        found = {"output loss": loss.clone()} | {f"grad {n}": g.clone() for n, g in plain.items()}
        self.restore()
        return found


def oracle(model: Model, config, weights: dict, device: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of the plain variant in float64."""
    module = model.build(config, model.plain, Choices(default="eager")).to(device)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])
    module = module.double()
    loss = module(**model.batch(config, device))
    loss.backward()
    return {"output loss": loss.detach()} | {f"grad {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}


def _memory() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


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
        return "out of memory"
    return f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:200]}"


class Trial:
    """All plans of one model tried against one baseline."""

    def __init__(self, model: Model, config, precision: str, seconds: float):
        self.model, self.config, self.precision, self.seconds = model, config, precision, seconds
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.graphs = self.device == "cuda"
        self.choices: dict[str, Choices] = {}
        self.ready: dict[str, tuple[dict, Runner | None, int]] = {}
        plain = model.build(config, model.plain, Choices(default="eager"))
        self.weights = {n: p.detach().to(self.device) for n, p in plain.named_parameters()}
        self.truth = oracle(model, config, self.weights, self.device)
        before = Plan(BEFORE, model.plain, "eager")
        self.eager = self.runner(before).evidence()  # the error that eager itself makes at this precision: the budget
        self.before_result: dict = {"name": BEFORE, "ok": True, "why": "", "speedup": 1.0}
        gc.collect()
        with _peak(self.before_result, _memory()):
            self.before = self.runner(before, "float32")
            self.before.step()
            self.before.step()

    def runner(self, plan: Plan, precision: str | None = None) -> Runner:
        fixed = {"eager": Choices(default="eager"), "stock": Choices()}
        choices = fixed.get(plan.choices) or self.choices[plan.mode]
        return Runner(self.model, self.config, plan, choices, self.weights, self.device, precision or self.precision)

    def run(self, plan: Plan) -> list[dict]:
        """The plan, and on a GPU the same under a CUDA graph; a compiled model is compiled once for both."""
        result, runner, origin = self.ready.pop(plan.name) if plan.name in self.ready else self.prepare(plan)
        results = [self.finish(result, runner)]
        if self.graphs:
            if not plan.compiled:
                runner = None  # the two modes may choose different impls
            graphed = replace(plan, name=plan.name + " + CUDA graph", graph=True)
            result, runner, _ = self.prepare(graphed, runner, origin)
            results.append(self.finish(result, runner))
        if plan.compiled:
            torch._dynamo.reset()
        return results

    def prepare(self, plan: Plan, runner: Runner | None = None, origin: int | None = None) -> tuple[dict, Runner | None, int]:
        """Build (or capture), compile and warm up: the part of a plan that may be done while others use the GPU."""
        gc.collect()
        result: dict = {"name": plan.name, "ok": False, "why": ""} | {k: v for k, v in asdict(plan).items() if k != "name"}
        started, origin = now(), origin if runner is not None and origin is not None else _memory()
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

    def finish(self, result: dict, runner: Runner | None) -> dict:
        """Verify, then time in turns with the baseline. A plan that fails keeps its reason and loses its candidacy."""
        if runner is None:
            return result
        try:
            verdict = judge(self._complete(runner.evidence()), self.eager, self.truth, STEPS[self.precision])
            result |= {"ok": verdict.ok, "why": verdict.why, "share": round(verdict.share, 4)}
            if verdict.ok:
                runs = {BEFORE: self.before.step, result["name"]: runner.step}
                self._note(result, compare(runs, seconds=self.seconds, flush=False, least=3))
        except Exception as e:  # whatever a plan dies of costs its candidacy, never the run
            result |= {"ok": False, "why": _reason(e)}
        return result

    def _complete(self, evidence: dict) -> dict:
        return {name: evidence.get(name) for name in self.truth}

    def _note(self, result: dict, timings: dict[str, Timing]) -> None:
        before, t = timings[BEFORE], timings[result["name"]]
        rate = self.config.batch / t.ms * 1e3
        result |= t.as_dict() | {"before_ms": round(before.ms, 4), "speedup": round(before.ms / t.ms, 4)}
        result["samples_per_s"] = round(rate, 1)
        result.pop("peak_mib")
        samples = self.before_result.setdefault("all_ms", [])
        samples.append(before)
        middle = sorted(samples, key=lambda b: b.ms)[len(samples) // 2]
        self.before_result |= {k: v for k, v in middle.as_dict().items() if k != "peak_mib"}
        self.before_result["samples_per_s"] = round(self.config.batch / middle.ms * 1e3, 1)


def optimize(
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
    config, lock = model.sizes[size], lock or Lock.read()
    key = f"{model.name}:{size} {precision}"
    known = lock.plans.get(key)
    if known and not again and known["config"] == repr(config):
        return known | {"from_lock": True, "entries": _entries(lock, known["calls"])}
    started = now()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    progress("recording calls", 0, 1)
    with precision_set(precision, device):
        calls = record_calls(model, config, device)
    recorded = now()
    trial, results, todo = Trial(model, config, precision, seconds), [], plans(model)
    trial.choices = tune(calls, lock, progress=progress, seconds=0.1, meanwhile=lambda: trial.prepare_early(todo))
    tuned = now()
    for i, plan in enumerate(todo):
        progress(f"plan: {plan.name}", i, len(todo))
        results += trial.run(plan)
    progress("done", len(todo), len(todo))
    trial.before_result.pop("all_ms", None)
    result = conclude(key, config, [trial.before_result, *results], calls)
    phases = {"record": recorded - started, "tune": tuned - recorded, "plans": now() - tuned}
    result |= {"seconds": round(now() - started, 1), "phases": {k: round(v, 1) for k, v in phases.items()}}
    save_plans(lock, key, result)
    return result | {"from_lock": False, "entries": _entries(lock, result["calls"])}


def conclude(key: str, config, results: list[dict], calls: list[tuple[Call, int]]) -> dict:
    """The fastest verified plan; within the spread the simpler one, which comes first.

    Each plan ran in turns with the baseline, at another time than the other plans: so plans are compared by their share
    of the baseline that ran beside them.
    """
    timed = {}
    for r in results:
        if r["ok"] and "ms" in r:
            beside = r.get("before_ms", r["ms"])
            timed[r["name"]] = Timing(r["ms"] / beside, r["low"] / beside, r["high"] / beside, r["samples"])
    chosen, tied = fastest(timed, tuple(timed)) if timed else (BEFORE, False)
    return {
        "target": key, "config": repr(config), "plans": results, "chosen": chosen, "tied": tied,
        "note": reduced_note(), "commit": commit(),
        "speedup": next(r.get("speedup", 1.0) for r in results if r["name"] == chosen),
        "calls": [{"call": asdict(call), "count": count} for call, count in calls],
    }


def _entries(lock: Lock, calls: list[dict]) -> list[dict]:
    """The lock's entries for these calls, each mode: what the proof table shows."""
    ops = discover()
    keys = {(c := Call(**item["call"])).bucketed(ops[c.op]).key: None for item in calls}
    return [lock.calls[f"{k} @ {m}"] for k in keys for m in modes_here() if f"{k} @ {m}" in lock.calls]
