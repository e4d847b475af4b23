"""The plan of a training step that several processes take together: DDP's or FSDP2's, as it is or under torch.compile.

Nothing can be tried on a copy there: a step of one process waits for the others. So all of them try the plan at once, on the
model itself and up to the gradients: each verifies what it has of them, and a time is that of the slowest process. They take
the same steps and see the same figures, and so choose alike.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from whet.diagnose.target import Target
from whet.figures import error_line, ms
from whet.judge import Verdict, judge
from whet.measure import Race, free_memory, race
from whet.plan import Plan
from whet.prove import random_states
from whet.step_plans import AS_IT_IS, ChosenStep, Loop, LoopWork, LossOf, ask_by_plan
from whet.subjects import Evidence
from whet.swap._replace import quiet
from whet.torch_ops import own_code
from whet.workload import ROUNDING, coarsest_rounding, quick_collections, tensors_in, watched_dtypes

COMPILED = Plan("torch.compile", "", "own", compiled=True)
NO_GRAPH = "CUDA graphs are not tried of several processes"
SHARDED = "sharded weights are not gathered in float64"


def shared() -> bool:
    """Whether this is one of several processes that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class CompiledParts:
    """A model some of whose parts run under torch.compile while it is called: what hooks do around them stays as it is.

    Of DDP's that is the model inside, which torch.compile cuts where a bucket of gradients is full, so that they are sent while
    the backward goes on; of FSDP2's each unit but the outermost, whose weights are gathered before it runs.

    failed   why a part could not be compiled, while that is `watched`: the part then runs as it is, so that this process
             goes on to send and receive what the others wait for
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.failed: Exception | None = None
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        units = [m.module for m in wrapped] or [m for m in model.modules() if isinstance(m, FSDPModule)][1:]
        alike: dict[Any, Callable] = {}  # by the function of a forward: blocks that are alike share what was compiled
        self.forwards = [(m, compiled_alike(m.forward, alike)) for m in units]

    def watched(self, *args, **kwargs) -> Any:
        return self._run([(m, self._or_as_it_is(m.forward, compiled)) for m, compiled in self.forwards], args, kwargs)

    def __call__(self, *args, **kwargs) -> Any:
        return self._run(self.forwards, args, kwargs)

    def _or_as_it_is(self, plain: Callable, compiled: Callable) -> Callable:
        def forward(*args, **kwargs) -> Any:
            if self.failed is None:
                try:
                    return compiled(*args, **kwargs)
                except Exception as e:
                    self.failed = e
            return plain(*args, **kwargs)

        return forward

    def _run(self, forwards: list[tuple[nn.Module, Callable]], args: tuple, kwargs: dict) -> Any:
        before = [(m, m.__dict__.get("forward")) for m, _ in forwards]
        for module, forward in forwards:
            module.__dict__["forward"] = forward
        try:
            return self.model(*args, **kwargs)
        finally:
            for module, own in before:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own


def compiled_alike(forward: Any, alike: dict[Any, Callable]) -> Callable:
    """A module's forward under torch.compile, by what was compiled for a module of the same code."""
    if not isinstance(forward, types.MethodType):
        return torch.compile(forward, dynamic=False)
    if forward.__func__ not in alike:
        alike[forward.__func__] = torch.compile(own_code(forward).__func__, dynamic=False)  # type: ignore[attr-defined]
    return types.MethodType(alike[forward.__func__], forward.__self__)


class Disagreed(Exception):
    """Some process cannot go on; all of them know why."""


def gathered(value: Any) -> list:
    """What each process has, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def reason_of_any(why: str) -> str:
    """'rank 1: why' of the first process that has a reason; empty where none has."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(gathered(why)) if reason), "")


@contextlib.contextmanager
def in_step(what: str) -> Iterator[None]:
    """What fails within it in one process ends the trial in all of them, once each has come to its end."""
    why, error = "", None
    try:
        yield
    except Exception as e:
        why, error = f"{what}: {error_line(e)}", e
    if found := reason_of_any(why):
        raise Disagreed(found) from error


@dataclass
class SharedTrial:
    """A step's gradients in all processes, as it is and compiled.

    inner   the same step of a model without DDP, whose names of parameters count; of FSDP2's the model itself
    ddp     what sends its gradients; None: FSDP2's shares
    """

    work: LoopWork
    inner: nn.Module
    ddp: DistributedDataParallel | None

    def __post_init__(self):
        self.parts = CompiledParts(self.work.model)
        self.compiled = replace(self.work, run=self.parts)
        self.params = list(self.inner.named_parameters())

    def gradients(self, compiled: bool) -> torch.Tensor:
        """A step up to its gradients, which are left in the parameters; the loss."""
        ask_by_plan(self.work.model, COMPILED if compiled else AS_IT_IS)
        return (self.compiled if compiled else self.work).to_gradients()

    def evidence(self, compiled: bool, precision: str | None) -> Evidence:
        """The loss, and the gradients that this process has after they were sent: of a share its rows."""
        ask_by_plan(self.work.model, COMPILED if compiled else AS_IT_IS)
        loss = replace(self.compiled if compiled else self.work, precision=precision).to_gradients()
        grads = {name: p.grad for name, p in self.params if p.grad is not None}
        local = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
        return {"output loss": loss.clone()} | {f"grad {name}": g.clone() for name, g in local.items()}

    def verdict(self) -> tuple[Verdict, str]:
        """Whether the compiled step is right in this process, and what there is to say of how that was found."""
        precision = self.work.precision
        with in_step("the step as it is"), watched_dtypes(self.work.model) as dtypes:
            eager = self.evidence(False, precision)
        if len({str(sorted(names)) for names in gathered(list(eager))}) > 1:
            raise Disagreed("the processes have gradients of other parameters")
        if self.ddp is not None:
            (truth, rounding), note = self.truth_of_all(eager), ""
        else:
            truth, against = eager, "the step as it is"
            rounding = ROUNDING[precision] if precision and precision != "float32" else coarsest_rounding(dtypes)
            if precision in ("bfloat16", "tf32"):
                with in_step("the step in float32"):
                    truth, against = self.evidence(False, "float32"), "the step in float32"
            note = f"verified against {against}, since {SHARDED}"
        with in_step(COMPILED.name):
            self.compile()
        with in_step(COMPILED.name):
            found = judge(dict.fromkeys(truth) | self.evidence(True, precision), eager, truth, rounding)
        return found, note

    def truth_of_all(self, eager: Evidence) -> tuple[Evidence, float | None]:
        """The step in float64 of a copy that sends nothing, its gradients the means over the processes as DDP's are.

        The loss stays that of this process. And the rounding that gradients are judged by.
        """
        with in_step("the step in float64"):
            given = self.work
            subject = Loop(Target(self.inner, given.args, given.kwargs, precision=given.precision, name="compile_step"))
            truth, rounding = subject.truth(), subject.rounding(given.precision or "float32")
            if set(truth) != set(eager):
                raise ValueError("a copy without DDP has gradients of other parameters")
        for name in sorted(n for n in truth if n.startswith("grad ")):
            dist.all_reduce(truth[name])
            truth[name] /= dist.get_world_size()
        return truth, rounding

    def compile(self) -> None:
        """What fails while it is compiled fails here, where no process is left waiting for what this one does not send."""
        ask_by_plan(self.work.model, COMPILED)
        with self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext():
            replace(self.work, run=self.parts.watched).to_gradients()
        if self.parts.failed is not None:
            raise self.parts.failed

    def raced(self, seconds: float) -> Race:
        device = next(t.device for t in tensors_in([p.to_local() if isinstance(p, DTensor) else p for _, p in self.params]))

        def slowest(value: float) -> float:
            found = torch.tensor([value], dtype=torch.float64, device=device)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return found.item()

        runs = {AS_IT_IS.name: lambda: self.gradients(False), COMPILED.name: lambda: self.gradients(True)}
        return race(runs, keep=AS_IT_IS.name, seconds=seconds, flush=False, slowest=slowest)


@contextlib.contextmanager
def without_chance(model: nn.Module) -> Iterator[list[str]]:
    """Dropout is off in the block; modes and gradients are afterwards as they were. What was switched off, in words."""
    modes = [(m, m.training) for m in model.modules()]
    grads = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]  # DDP's may lie in its buckets
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p]
    try:
        for dropout in dropouts:
            dropout.eval()
        for p, _ in grads:
            p.grad = None
        yield ["dropout is off, so that plans can be compared"] if dropouts else []
    finally:
        for module, training in modes:
            module.training = training
        for p, grad in grads:
            p.grad = grad


@contextlib.contextmanager
def gradients_sent(model: nn.Module) -> Iterator[None]:
    """Gradients are sent in the block, also where the step at hand leaves that to a later one."""
    wrapped = [(m, m.require_backward_grad_sync) for m in model.modules() if isinstance(m, DistributedDataParallel)]
    units = [(m, reduces(m)) for m in model.modules() if isinstance(m, FSDPModule)]
    try:
        for ddp, _ in wrapped:
            ddp.require_backward_grad_sync = True
        for unit, _ in units:
            unit.set_requires_gradient_sync(True, recurse=False)
        yield
    finally:
        for ddp, before in wrapped:
            ddp.require_backward_grad_sync = before
        for unit, before in units:
            unit.set_requires_gradient_sync(before, recurse=False)


def reduces(unit: FSDPModule) -> bool:
    """Whether a unit's gradients are sent after a backward; PyTorch lets this be set and not be asked."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]  # one until PyTorch 2.11
    return all(group.reduce_grads for group in groups if group is not None)


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """(the model without DDP, with the loss that it was given; DDP), or (the model, None) where FSDP2 shards it.

    ValueError where neither is around it.
    """
    inner = model.model if isinstance(model, LossOf) else model
    if isinstance(inner, DistributedDataParallel):
        return (LossOf(inner.module, model.loss_of) if isinstance(model, LossOf) else inner.module), inner
    if isinstance(inner, FSDPModule):
        return model, None
    raise ValueError("several processes train together, and only DDP's and FSDP2's steps are tried")


def choose_shared(
    work: LoopWork, seconds: float, compiled: bool = True, only: tuple[str, ...] = (), unseen: str = ""
) -> ChosenStep:
    """The best plan of a step of several processes, the same in all of them. Whatever fails costs the plan, never the step.

    unseen   why no plan can be tried with this process's batch, which those of the others need not share
    """
    if not compiled or only and not any(name.startswith(COMPILED.name) for name in only):
        return ChosenStep(AS_IT_IS, NO_GRAPH if only else "no other plan is tried", {})
    try:
        inner, ddp = unwrapped(work.model)
    except ValueError as e:
        return ChosenStep(AS_IT_IS, str(e), {})
    if found := reason_of_any(unseen):
        return ChosenStep(AS_IT_IS, found, {})
    try:
        with quiet(work.model), quick_collections(), gradients_sent(work.model), without_chance(work.model) as notes:
            with in_step(COMPILED.name):
                trial = SharedTrial(replace(work, optimizer=None, clip=None), inner, ddp)
            if not trial.parts.forwards:
                return ChosenStep(AS_IT_IS, "FSDP2 has one unit, and units inside it are what is compiled", {})
            return _chosen(trial, seconds, notes)
    except Disagreed as e:
        return ChosenStep(AS_IT_IS, f"no other plan could be tried: {e}", {})
    finally:
        ask_by_plan(work.model, AS_IT_IS)
        for unit in work.model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # where a step did not come to its end
        free_memory()


def _chosen(trial: SharedTrial, seconds: float, notes: list[str]) -> ChosenStep:
    before = random_states()
    verdict, note = trial.verdict()
    notes = [*notes, *([note] if note else [])]
    drew = not all(map(torch.equal, before, random_states()))
    why = "a step draws random numbers, so no plan can be verified" if drew else verdict.why
    if wrong := reason_of_any(why):
        return ChosenStep(AS_IT_IS, "; ".join([f"{COMPILED.name} is out: {wrong}", *notes]), {})
    with in_step("the race"):
        raced = trial.raced(seconds)
    times = {name: t.ms for name, t in raced.timings.items()}
    was, now = times[AS_IT_IS.name], times[COMPILED.name]
    plans = tuple({"name": name, "ok": True, "why": "", "ms": round(t, 4)} for name, t in times.items())
    where = f"in {dist.get_world_size()} processes up to the gradients"
    text = f"{ms(was)} ms before, {ms(now)} ms after, {was / now:.2f}x, {where}"
    why = "; ".join([f"{text}: {raced.outcome.why}", *notes])
    if raced.outcome.chosen == AS_IT_IS.name:
        return ChosenStep(AS_IT_IS, why, {}, plans)
    figures = {"before_ms": round(was, 4), "after_ms": round(now, 4), "speedup": round(was / now, 4)}
    return ChosenStep(COMPILED, why, figures, plans, trial.parts)
