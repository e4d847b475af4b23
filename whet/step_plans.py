"""The plans of a training step that whet was handed: as it is, compiled, as a CUDA graph; tried on copies, never on the model.

The user's own loop is one more subject of plans.Trial: every plan's loss and gradients are verified against float64, and
those that pass race the step as it is.
"""

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whet.choices import Choices
from whet.diagnose.target import CannotRun, Target
from whet.figures import error_line, ms
from whet.graphs import Graph
from whet.measure import free_memory
from whet.plan import BEFORE, Plan, compiled, graphed
from whet.plans import OUT_OF_MEMORY, Trial
from whet.subjects import Evidence, Given, compiled_forward
from whet.swap import Journal, Met
from whet.swap import _memory as memory
from whet.swap._optimize import Optimized
from whet.swap._proof import Float64Everywhere
from whet.swap._replace import quiet
from whet.workload import Workload, asks, quick_collections

AS_IT_IS = Plan("as it is", "", "own")
PLANS = ("CUDA graph", "torch.compile", "torch.compile + CUDA graph")


class LossOf(nn.Module):
    """A model and the loss that a loop computes of it, as one module that returns the loss.

    loss   loss(output), as whet.optimize takes it, or loss(model, batch)
    """

    def __init__(self, model: nn.Module, loss: Callable):
        super().__init__()
        self.model, self.loss_of = model, loss
        given = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in given if p.kind in plain and p.default is p.empty]
        if len(names) not in (1, 2) or names == ["input", "target"]:
            raise ValueError(
                f"compile_step: loss must take the output, or the model and the batch, got one of ({', '.join(names)}); "
                "write loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
        self.of_batch = len(names) == 2

    def forward(self, *args, **kwargs):
        return self.loss_of(self.model, *args) if self.of_batch else self.loss_of(self.model(*args, **kwargs))


class Rates:
    """Learning rates as tensors that a CUDA graph reads: the groups keep their numbers, and schedulers go on setting those."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.groups = list(optimizer.param_groups)
        self.tensors = [torch.zeros((), dtype=torch.float32, device=g["params"][0].device) for g in self.groups]
        self.last: list[Any] = [None] * len(self.groups)
        self.follow()

    def follow(self) -> None:
        """The tensors are given what the groups say now. Nothing waits for the device."""
        for i, (group, tensor) in enumerate(zip(self.groups, self.tensors)):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                tensor.copy_(lr)
                self.last[i] = None
            elif lr != self.last[i]:
                tensor.fill_(lr)
                self.last[i] = lr

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While it is on, the groups hold the tensors."""
        before = [g["lr"] for g in self.groups]
        try:
            for group, tensor in zip(self.groups, self.tensors):
                group["lr"] = tensor
            yield
        finally:
            for group, lr in zip(self.groups, before):
                group["lr"] = lr


def outside_because(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer's step cannot be part of a CUDA graph; empty where it can."""
    kind = type(optimizer).__name__
    if not all(group.get("capturable") for group in optimizer.param_groups):
        known = "capturable" in optimizer.defaults
        return f"{kind} was made without capturable=True" if known else f"{kind} has no capturable form"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind} has hooks around its step, which a replay would not run"
    return ""


@dataclass
class LoopWork(Workload):
    """A step of the user's loop."""

    def forward(self) -> Any:
        if torch._C._is_any_autocast_enabled():  # of a region around the loop: its weights in 16 bits are those of a step ago
            torch.clear_autocast_cache()
        return super().forward()

    def captured(self, beside: "CapturedLoop | AddingLoop | None" = None) -> "CapturedLoop":
        return CapturedLoop(self, beside)


class CapturedLoop:
    """A step as the replay of a CUDA graph: up to and with the optimizer where that can be captured, else up to it.

    beside   another of the same model: they run one after the other, so the memory of one serves both
    """

    graph: Graph

    def __init__(self, work: LoopWork, beside: "CapturedLoop | AddingLoop | None" = None):
        assert work.optimizer is not None
        self.optimizer, self.outside = work.optimizer, outside_because(work.optimizer)
        shared: Graph | None = beside.graph if beside is not None else None
        if self.outside:
            self.graph = Graph(work.to_gradients, beside=shared)
        else:
            self.rates = Rates(work.optimizer)
            with self.rates.lent():
                self.graph = Graph(work.step, beside=shared)
        self.grads = [(p, p.grad) for p in work.model.parameters()]

    def __call__(self) -> torch.Tensor:
        """The loss, which the next replay overwrites."""
        for p, grad in self.grads:
            p.grad = grad
        if self.outside:
            loss = self.graph()
            self.optimizer.step()
            return loss
        self.rates.follow()
        return self.graph()


class AddingLoop:
    """Steps whose gradients are added up, as the replays of two CUDA graphs: forward and backward; then clip and optimizer.

    The first adds to gradients that stay where they are. An optimizer that cannot be captured runs outside, and so does clip.
    beside   a loop of the same model, whose memory serves both, and whose gradients too where it adds them up
    """

    graph: Graph
    grads: list[tuple[nn.Parameter, torch.Tensor]]

    def __init__(self, work: LoopWork, beside: "CapturedLoop | AddingLoop | None" = None):
        assert work.optimizer is not None
        adding = replace(work, accumulate=True, clip=None)
        self.update_of = replace(work)
        adding.clear()
        adding.to_gradients()
        params = list(work.model.parameters())
        reached, self.others = [p for p in params if p.grad is not None], [p for p in params if p.grad is None]
        if isinstance(beside, AddingLoop):
            if [id(p) for p in reached] != [id(p) for p, _ in beside.grads]:
                raise ValueError("its backward reaches other parameters than that of another shape of batch")
            self.grads = beside.grads
        else:
            self.grads = [(p, torch.zeros_like(p)) for p in reached]
        self.begin(anew=True)
        self.graph = Graph(adding.to_gradients, beside=beside.graph if beside is not None else None)
        self.rates: Rates | None = None
        if not outside_because(work.optimizer):
            self.rates = Rates(work.optimizer)
            with self.rates.lent():
                self.update = Graph(self.update_of.update, beside=self.graph)

    @torch.no_grad()
    def begin(self, anew: bool) -> None:
        """The gradients that the graphs know are the parameters' own. anew: they are zero, else what was added up so far."""
        if anew:
            torch._foreach_zero_([grad for _, grad in self.grads])
            for p in self.others:
                p.grad = None
        for p, grad in self.grads:
            if not anew and p.grad is not grad:
                grad.zero_() if p.grad is None else grad.copy_(p.grad)
            p.grad = grad

    def misses(self) -> bool:
        """Whether a gradient was added up that these graphs do not know."""
        return any(p.grad is not None for p in self.others)

    def __call__(self, anew: bool, update: bool) -> torch.Tensor:
        """The loss of one batch, which the next replay overwrites. anew: none was added up before; update: none comes after."""
        self.begin(anew)
        loss = self.graph()
        if update and self.rates is not None:
            self.rates.follow()
            self.update()
        elif update:
            self.update_of.update()
        return loss


def reports(model: nn.Module) -> list[tuple[nn.Module, Optimized]]:
    """What whet.optimize did to this model or a part of it."""
    found = [(m, m.__dict__.get("whet")) for m in model.modules()]
    return [(m, report) for m, report in found if isinstance(report, Optimized)]


@contextlib.contextmanager
def without_reports(model: nn.Module) -> Iterator[None]:
    """While it is on, the model does not carry its report, which a copy has no use for."""
    found = reports(model)
    try:
        for module, _ in found:
            del module.__dict__["whet"]
        yield
    finally:
        for module, report in found:
            module.__dict__["whet"] = report


@contextlib.contextmanager
def before_optimize(model: nn.Module) -> Iterator[None]:
    """While it is on, what whet.optimize replaced is as it was."""
    found = reports(model)
    try:
        for _, report in found:
            report.replaced.restore()
        yield
    finally:
        for _, report in found:
            report.replaced.ask(report.choices)


@contextlib.contextmanager
def as_graph(model: nn.Module, graph: bool = True) -> Iterator[None]:
    """While it is on, what whet.optimize replaced is what it found best where a CUDA graph launches, not the host."""
    with contextlib.ExitStack() as stack:
        for _, report in reports(model) if graph else ():
            stack.enter_context(report.in_mode("graph"))
        yield


def ask_by_plan(model: nn.Module, plan: Plan) -> None:
    """From now on a model that asks `ops`, and has `choices_by_mode`, asks those that were tuned for how the plan runs."""
    for module in asks(model):
        if by_mode := module.__dict__.get("choices_by_mode"):
            module.ops = by_mode.get(plan.mode, module.ops)


def checkpointed(work: Workload) -> None:
    """From now on the blocks of this workload's model keep no activations."""
    for _, block in memory.blocks_of(work.model, Met(work.args, work.kwargs)):
        Journal().make(memory.edits(block, Choices()))


class Loop(Given):
    """The step of a user's loop. It runs as it is, compiled, and each as a CUDA graph."""

    makes = LoopWork

    def _copy(self) -> Workload:
        with without_reports(self.target.model):
            return super()._copy()

    def plans(self) -> list[Plan]:
        graph = [Plan("CUDA graph", "", "own", graph=True)] if self.device == "cuda" else []
        return [*graph, *compiled([Plan("eager", "", "own")])]

    def truth(self) -> Evidence:
        """In float64 and of the model before whet.optimize; where memory does not hold that, with its blocks checkpointed.

        Where it does not hold that either, the step as it is.
        """
        for lean in (lambda work: None, checkpointed):
            try:
                with before_optimize(self.target.model), Float64Everywhere():
                    return self._in_float64(lean)
            except CannotRun as e:
                if OUT_OF_MEMORY not in str(e):
                    raise
            free_memory()
        self.notes.append("verified against the step as it is, since a step in float64 is out of memory")
        return self._tried(replace(self._copy(), optimizer=None).evidence, "the step as it is")

    def workload(self, plan: Plan, choices: Any, precision: str) -> Workload:
        with as_graph(self.target.model, plan.graph):
            work = self._copy()
        ask_by_plan(work.model, plan)
        if plan.compiled:
            work.run = compiled_forward(work.model)
        return work


class LoopTrial(Trial):
    """Plans of a loop; what torch.compile made for the loop's other shapes is kept."""

    predicts = False  # a loop waits for its first step

    def let_go(self) -> None:
        gc.collect()


@dataclass(frozen=True)
class ChosenStep:
    """The plan of a step, why, and what was measured."""

    plan: Plan
    why: str
    figures: dict[str, float]
    plans: tuple[dict, ...] = ()  # every plan that was tried, as records hold it, the step as it is first
    run: Callable | None = None  # called in the model's place, where what was tried is what runs

    def to_record(self) -> dict:
        return {"chosen": self.plan.name, "why": self.why, "plans": list(self.plans)}


def choose(work: LoopWork, seconds: float, compiled: bool = True, only: tuple[str, ...] = ()) -> ChosenStep:
    """The best plan of this step, tried on copies. Whatever fails costs plans, never the step."""
    modes = [(m, m.training) for m in work.model.modules()]
    try:
        with quiet(work.model), quick_collections():
            return _choose(work, seconds, compiled, only)
    except Exception as e:
        return ChosenStep(AS_IT_IS, f"no other plan could be tried: {error_line(e)}", {})
    finally:
        for module, training in modes:
            module.training = training
        free_memory()


def _choose(work: LoopWork, seconds: float, compiled: bool, only: tuple[str, ...]) -> ChosenStep:
    subject = Loop(Target(
        work.model, work.args, work.kwargs, optimizer=work.optimizer, precision=work.precision, clip=work.clip,
        name="compile_step",
    ))
    trial = LoopTrial(subject, work.precision or "float32", seconds)
    trial.only = only
    for plan in subject.plans():
        if (compiled or not plan.compiled) and (not only or {plan.name, graphed(plan).name} & set(only)):
            trial.run(plan)
    trial.heat()
    found = trial.outcome()
    lost = [f"{r.name} is out: {r.why}" for r in trial.results.values() if not r.ok]
    tried = tuple(with_first(trial))
    if found.chosen == BEFORE:
        return ChosenStep(AS_IT_IS, "; ".join([found.why, *lost, *subject.notes]), {}, tried)
    result = trial.results[found.chosen]
    assert result.timing is not None and result.before_ms is not None and result.speedup is not None
    times = f"{ms(result.before_ms)} ms before, {ms(result.timing.ms)} ms after, {result.speedup:.2f}x"
    figures = {"before_ms": result.before_ms, "after_ms": round(result.timing.ms, 4), "speedup": result.speedup}
    return ChosenStep(result.plan, "; ".join([f"{times}: {found.why}", *lost, *subject.notes]), figures, tried)


def with_first(trial: Trial) -> Iterator[dict]:
    """Every plan of a trial as a record, after the step as it is, whose time is that of its last race."""
    results = [r for r in trial.results.values() if r.name != BEFORE]
    before = next((r.before_ms for r in reversed(results) if r.before_ms), None)
    yield {"name": AS_IT_IS.name, "ok": True, "why": ""} | ({"ms": before} if before else {})
    yield from (r.to_record() for r in results)
