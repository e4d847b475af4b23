"""whet.compile_step: forward, backward, clip and optimizer of a training loop, run by the best plan for each shape of batch."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from whet.diagnose.target import as_inputs
from whet.figures import error_line
from whet.machine import float32_precision
from whet.plan import Plan
from whet.step_plans import (
    AS_IT_IS,
    PLANS,
    AddingLoop,
    CapturedLoop,
    ChosenStep,
    LoopWork,
    LossOf,
    as_graph,
    ask_by_plan,
    choose,
    outside_because,
)
from whet.step_shared import choose_shared, shared
from whet.subjects import compiled_forward
from whet.swap._state import as_before
from whet.trackers import log_choices
from whet.workload import PRECISIONS, NoLoss

SHAPES = 4  # that a plan is chosen for: each may compile and hold a graph of its own
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass
class ServedShape:
    """What serves batches of one shape.

    reports  what whet.optimize had done to the model: held, so that their ids stay theirs
    """

    words: str
    plan: Plan
    why: str
    work: LoopWork
    reports: list
    graph: CapturedLoop | None = None
    adding: AddingLoop | None = None  # the graphs of steps that add gradients up
    captured_with: Hashable = None

    def __str__(self) -> str:
        return f"{self.words}: {self.plan.name}: {self.why}"

    def without_graph(self, why: str) -> None:
        """From now on the same plan without its CUDA graph."""
        name = "torch.compile" if self.plan.compiled else AS_IT_IS.name
        self.plan, self.why = replace(self.plan, name=name, graph=False), f"{why}; {self.why}"
        self.graph = self.adding = None


@dataclass(frozen=True)
class StepReport:
    """Which plan serves which shape of batch, and why: print it."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines) or "no batch yet"


class CompiledStep:
    """A training step to be called with a batch; `report` says which plan serves which shape. Made by compile_step."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable | None, clip: float | None,
        precision: str | None, seconds: float, log_to: Any, compiled: bool = True, plans: bool | Sequence[str] = True,
    ):
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        self.model: nn.Module = model if loss is None else LossOf(model, loss)
        self.optimizer, self.clip, self.precision = optimizer, clip, precision
        self.seconds, self.log_to, self.compiled, self.plans = seconds, log_to, compiled, plans
        self.reset()
        self.updates, self.pending = 0, False
        self.norm: torch.Tensor | None = None  # of the last gradients before they were clipped; a CUDA graph overwrites it

    def reset(self) -> None:
        """Forget every plan: the next batch of each shape is chosen for anew."""
        self.served: dict[Hashable, ServedShape] = {}
        self.others = 0
        self.params, self.modules = list(self.model.parameters()), list(self.model.modules())

    def prepare(self, batch: Any) -> None:
        """Choose the plan for batches of this shape now, and run no step."""
        self._served(*self._inputs(batch))

    @property
    def report(self) -> StepReport:
        lines = [str(s) for s in self.served.values()]
        more = f"{self.others} steps of other shapes: {AS_IT_IS.name}: plans are chosen for the first {SHAPES} shapes"
        return StepReport((*lines, *([more] if self.others else [])))

    def __call__(self, batch: Any, update: bool = True) -> torch.Tensor:
        """One step; the loss, detached.

        update   False: this batch's gradients are added up, and clip and optimizer left to a later call
        """
        args, kwargs = self._inputs(batch)
        served, loss = self._served(args, kwargs), None
        if served.plan.graph:
            loss = self._replayed(served, args, kwargs, update)
        if loss is None:
            loss = self._run(served, args, kwargs, update)
        self.pending = not update
        self.updates += update
        return loss

    def _inputs(self, batch: Any) -> tuple[tuple, dict]:
        if isinstance(self.model, LossOf) and self.model.of_batch:
            return (dict(batch) if isinstance(batch, Mapping) else batch,), {}
        return as_inputs(batch)

    def _run(self, served: ServedShape, args: tuple, kwargs: dict, update: bool) -> torch.Tensor:
        """By the plan without a graph."""
        work = replace(served.work, args=args, kwargs=kwargs, accumulate=self.pending, clip=self.clip if update else None)
        try:
            loss = work.step() if update else work.to_gradients()
        except NoLoss:
            raise ValueError(
                "compile_step: the model returned no loss: a scalar, .loss or ['loss']; give loss=, a function of its output "
                "or of the model and the batch"
            ) from None
        assert loss is not None
        self.norm = work.norm
        return loss

    def _served(self, args: tuple, kwargs: dict) -> ServedShape:
        reports = [m.__dict__["whet"] for m in self.modules if "whet" in m.__dict__]
        key = (tuple(map(id, reports)), self._key(args, kwargs))
        if key in self.served:
            return self.served[key]
        work = LoopWork(self.model, args, kwargs, "train", self.optimizer, self.precision, clip=self.clip)
        if len(self.served) >= SHAPES:
            self.others += 1
            return ServedShape("", AS_IT_IS, "", work, reports)
        chosen = self._chosen(work)
        plan, why, work.run = chosen.plan, chosen.why, chosen.run
        ask_by_plan(self.model, plan)
        if plan.compiled and work.run is None:
            work.run = compiled_forward(self.model)
        if plan.graph and (outside := outside_because(self.optimizer)):
            why += f"; the optimizer runs outside the graph: {outside}"
        work.args, work.kwargs = (), {}
        served = self.served[key] = ServedShape(described(args, kwargs), plan, why, work, reports)
        log_choices("compile_step", str(served), chosen.figures, self.log_to)
        return served

    def _chosen(self, work: LoopWork) -> ChosenStep:
        """The plan of batches of a shape that was not met before."""
        leaves = tree_flatten((work.args, work.kwargs))[0]
        strange = next((type(x).__name__ for x in leaves if not isinstance(x, (torch.Tensor, *PLAIN))), "")
        unseen = f"the batch holds a {strange}, whose tensors are not seen" if strange else ""
        if not self.plans:
            return ChosenStep(AS_IT_IS, "no other plan is tried", {})
        only = () if self.plans is True else tuple(self.plans)
        if not shared():
            return ChosenStep(AS_IT_IS, unseen, {}) if unseen else choose(work, self.seconds, self.compiled, only)
        if self.served:  # another process may have met this shape before, or never will
            first = next(iter(self.served.values()))
            why = f"as for {first.words}: processes that train together choose once"
            return ChosenStep(first.plan, why, {}, run=first.work.run)
        return choose_shared(work, self.seconds, self.compiled, only, unseen)

    def _key(self, args: tuple, kwargs: dict) -> Hashable:
        """What a plan holds for: shapes and layouts of the batch, its other values, and the precision set around the loop."""
        leaves, spec = tree_flatten((args, kwargs))
        facts = tuple(
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor)
            else (type(x), x if isinstance(x, PLAIN) else None) for x in leaves
        )
        kind = self.params[0].device.type if self.params else "cpu"
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return str(spec), facts, autocast, float32_precision()

    def _facts(self) -> Hashable:
        """What a captured graph has fixed: where parameters lie, which are trained, modes, and the optimizer's constants."""
        constants = [k for k in self.optimizer.defaults if k != "lr"]
        return (
            tuple((p.data_ptr(), p.requires_grad) for p in self.params), tuple(m.training for m in self.modules),
            tuple(repr(group.get(k)) for group in self.optimizer.param_groups for k in constants),
            tuple((id(group), len(group["params"])) for group in self.optimizer.param_groups),  # loading a state makes new ones
        )

    def _replayed(self, served: ServedShape, args: tuple, kwargs: dict, update: bool) -> torch.Tensor | None:
        """By the plan's CUDA graphs, captured when first wanted; None where they cannot serve this step."""
        added = self.pending or not update
        if (served.graph or served.adding) and served.captured_with != self._facts():
            served.without_graph("the model, a mode or an optimizer's setting changed after the capture; reset() chooses anew")
        elif (served.adding if added else served.graph) is None:
            if not outside_because(self.optimizer) and not self.updates and not self.optimizer.state:
                return None  # the first step makes the optimizer's state, which a graph must find
            try:
                self._capture(served, args, kwargs, added)
            except Exception as e:
                served.without_graph(f"it could not be captured: {error_line(e)}")
        if not served.plan.graph:
            ask_by_plan(self.model, served.plan)
            log_choices("compile_step", str(served), None, self.log_to)
            return None
        if self.pending and served.adding is not None and served.adding.misses():
            return None
        mine = tree_flatten((served.work.args, served.work.kwargs))[0]
        for held, given in zip(mine, tree_flatten((args, kwargs))[0]):
            if isinstance(held, torch.Tensor):
                held.copy_(given, non_blocking=True)
        if added:
            assert served.adding is not None
            loss = served.adding(not self.pending, update)
            self.norm = served.adding.update_of.norm
        else:
            assert served.graph is not None
            loss = served.graph()
            self.norm = served.work.norm
        return loss.clone()

    def _capture(self, served: ServedShape, args: tuple, kwargs: dict, added: bool) -> None:
        """The warm-up before a capture runs steps: weights, gradients and optimizer are afterwards as they were."""
        work = served.work
        if served.graph is None and served.adding is None:
            work.args, work.kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        beside = [g for s in self.served.values() for g in (s.adding, s.graph) if g is not None]
        so_far = [(p, None if p.grad is None else p.grad.clone()) for p in self.params] if self.pending else []
        try:
            with unchanged(self.model, self.optimizer), as_graph(self.model):
                if added:
                    beside.sort(key=lambda g: isinstance(g, CapturedLoop))  # one that adds has the gradients
                    served.adding = AddingLoop(work, next(iter(beside), None))
                else:
                    served.graph = work.captured(next(iter(beside), None))
        finally:
            for p, grad in so_far:
                p.grad = grad
        served.captured_with = self._facts()


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """As `as_before`, and the optimizer must find all of its state there."""
    with as_before(model, optimizer) as seen:
        yield
    if seen.made:
        raise RuntimeError("the optimizer made new state while the step was captured")


def described(args: tuple, kwargs: dict) -> str:
    """'input_ids (8, 512), labels (8, 512)'."""
    def words(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return str(tuple(x.shape))
        if isinstance(x, (tuple, list)):
            return ", ".join(map(words, x))
        if isinstance(x, Mapping):
            return ", ".join(f"{k} {words(v)}" for k, v in x.items())
        return str(x) if isinstance(x, PLAIN) else type(x).__name__

    return ", ".join([*map(words, args), *([words(kwargs)] if kwargs else [])])


def compile_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable | None = None, clip: float | None = None,
    precision: str | None = None, *, seconds: float = 0.3, log_to: Any = None, compiled: bool = True,
    plans: bool | Sequence[str] = True,
) -> CompiledStep:
    """A training step that runs by the best plan: `loss = step(batch)` is forward, backward, clip and optimizer.

    loss       None where the model returns its loss; loss(output), as whet.optimize takes it; or loss(model, batch)
    clip       the norm that gradients are clipped to; None: they are not
    precision  "float32", "tf32" or "bfloat16" (autocast); None: whatever the process is set to
    seconds    time to race each plan, once for each shape of batch
    compiled   False: torch.compile is not tried, which takes a minute or more of a large model
    plans      False: none is tried, and the step runs as it is; ["CUDA graph"]: these alone are
    log_to     a TensorBoard SummaryWriter for the choices; None: the active W&B run, else one line on stdout
    At the first batch of a shape, plans are verified and raced on copies: the step as it is, torch.compile, and on a GPU
    the CUDA graph of each. `step(batch, update=False)` accumulates gradients; `print(step.report)` shows what serves what.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"compile_step: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"compile_step: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"compile_step: precision must be one of {PRECISIONS} or None, got {precision!r}")
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"compile_step: clip must be a norm above 0 or None, got {clip!r}")
    if unknown := [p for p in plans if p not in PLANS] if not isinstance(plans, bool) else []:
        raise ValueError(f"compile_step: plans must be of {', '.join(PLANS)}, got {unknown[0]!r}")
    return CompiledStep(model, optimizer, loss, clip, precision, seconds, log_to, compiled, plans)
