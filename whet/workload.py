"""A model doing its work: model, batch, loss, optimizer and precision, and one step of it in named phases.

    work = Workload(model, kwargs=batch, optimizer=optimizer)
    work.step()                          # one training step; the loss
    work.step(phase=Stopwatch("cuda"))   # the same, each phase inside phase("forward"), phase("backward"), phase("optimizer")
    work.calls()                         # the ops it asks for, and how often
    work.evidence()                      # the loss and every gradient
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from whet.choices import Choices, Recorder
from whet.graphs import Graph
from whet.machine import float32_precision, set_float32_precision
from whet.op import Call

ROUNDING = {"float32": None, "tf32": 2.0**-10, "bfloat16": torch.finfo(torch.bfloat16).eps}  # of a product's operands
PRECISIONS = tuple(ROUNDING)
PHASES = ("forward", "backward", "optimizer")
Phase = Callable[[str], contextlib.AbstractContextManager]


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Within the block gc.collect(), which every CUDA graph and every reading of memory calls, looks at new objects alone.

    Half a million objects of PyTorch, its compiler and a model take it a fifth of a second each time.
    """
    if gc.get_freeze_count():  # the process has frozen objects itself, or this is within another such block
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class NoLoss(ValueError):
    """A step was to be trained on what has no loss."""


@contextlib.contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """float32 products with all 24 bits ("highest") or as TF32 ("high")."""
    before = float32_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        set_float32_precision(before)


@contextlib.contextmanager
def in_precision(precision: str, device: str) -> Iterator[None]:
    """float32 as it stands, TF32 products, or bfloat16 autocast. Never chosen for the user: only what was asked."""
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")
    with matmul_precision("high" if precision == "tf32" else "highest"), autocast:
        yield


def find_loss(out: Any) -> torch.Tensor | None:
    """A scalar that can be differentiated: what was returned, its `loss`, its entry "loss", or the first in it."""
    if isinstance(out, Mapping):
        out = out.get("loss")
    elif not isinstance(out, torch.Tensor) and getattr(out, "loss", None) is not None:
        out = out.loss
    elif isinstance(out, (tuple, list)) and out:
        out = next((t for t in out if isinstance(t, torch.Tensor) and not t.dim() and t.is_floating_point()), None)
    return out if isinstance(out, torch.Tensor) and out.dim() == 0 and out.is_floating_point() else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and objects with fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, SimpleNamespace) or is_dataclass(value) and hasattr(value, "__dict__"):
        for v in () if isinstance(value, type) else vars(value).values():
            yield from tensors_in(v)


def asks(model: nn.Module) -> list[Any]:
    """The parts of a model that ask a Choices of theirs, their `ops`."""
    return [m for m in model.modules() if isinstance(getattr(m, "ops", None), Choices)]


@contextlib.contextmanager
def asking(model: nn.Module, ops: Choices) -> Iterator[None]:
    """While it is on, every part of the model that has its `ops` asks these instead."""
    before = [(m, m.ops) for m in asks(model)]
    for m, _ in before:
        m.ops = ops
    try:
        yield
    finally:
        for m, was in before:
            m.ops = was


@dataclass
class Workload:
    """One step that can be run again: kind "train" is forward, backward and, with an optimizer, its step.

    model, args, kwargs   model(*args, **kwargs) is one forward
    kind        "train"; anything else is a forward without gradients
    optimizer   None: gradients are made and not used
    precision   one of PRECISIONS, set around forward and backward; None: whatever the process is set to
    loss_with   makes the loss of what the model returns, where that is done outside it
    around      a context that the forward is to run in: a script's autocast
    run         called in the model's place: the same model, compiled
    clip        the norm that gradients are clipped to before the optimizer sees them
    accumulate  gradients are added to those that are there
    norm        of the last gradients before they were clipped
    """

    model: nn.Module
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    kind: str = "train"
    optimizer: torch.optim.Optimizer | None = None
    precision: str | None = None
    loss_with: Callable[[Any], torch.Tensor | None] | None = None
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    run: Callable | None = None
    clip: float | None = None
    accumulate: bool = False
    norm: torch.Tensor | None = field(default=None, init=False, compare=False)

    @property
    def device(self) -> str:
        tensors = [*self.model.parameters(), *(t for t in (*self.args, *self.kwargs.values()) if isinstance(t, torch.Tensor))]
        return tensors[0].device.type if tensors else "cpu"

    def set(self) -> contextlib.AbstractContextManager:
        """The precision of this workload, while the block runs."""
        return contextlib.nullcontext() if self.precision is None else in_precision(self.precision, self.device)

    def forward(self) -> Any:
        """What the model returns."""
        with self.around(), self.set():
            return (self.run or self.model)(*self.args, **self.kwargs)

    def loss(self, out: Any) -> torch.Tensor | None:
        """The loss in what the model returned."""
        found = find_loss(out)
        return found if found is not None or self.loss_with is None else self.loss_with(out)

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def forward_to_loss(self) -> torch.Tensor:
        """The first phase: gradients of the step before are let go, then the forward."""
        if not self.accumulate:
            self.clear()
        loss = self.loss(self.forward())
        if loss is None:
            raise NoLoss("the model returned no loss: a scalar, .loss or ['loss']")
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        with self.set():
            loss.backward()

    def step(self, phase: Phase = lambda name: contextlib.nullcontext()) -> torch.Tensor | None:
        """One step; the loss where there is one. Each phase runs inside phase(its name)."""
        if self.kind != "train":
            with phase("forward"), torch.no_grad():
                self.forward()
            return None
        loss = self.to_gradients(phase)
        if self.optimizer is not None:
            with phase("optimizer"):
                self.optimizer.step()
        return loss

    def to_gradients(self, phase: Phase = lambda name: contextlib.nullcontext()) -> torch.Tensor:
        """A training step up to its optimizer; the loss."""
        with phase("forward"):
            loss = self.forward_to_loss()
        with phase("backward"):
            self.backward(loss)
            self.clip_gradients()
        return loss.detach()

    def clip_gradients(self) -> None:
        if self.clip is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self) -> None:
        """What follows the last backward of gradients that were added up."""
        self.clip_gradients()
        assert self.optimizer is not None
        self.optimizer.step()

    def captured(self) -> Callable:
        """This step as the replay of one CUDA graph."""
        return Graph(self.outcome)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def outcome(self) -> Any:
        """One step and what it gives: the loss; of a forward alone, what the model returned."""
        if self.kind == "train":
            return self.step()
        with torch.no_grad():
            return self.forward()

    def evidence(
        self, outcome: Callable | None = None, canonical: Callable[[Mapping], Mapping] = dict
    ) -> dict[str, torch.Tensor]:
        """The loss and every gradient of one step; of a forward alone, every tensor that it returned.

        outcome     called in the place of this workload's own: the same step, captured
        canonical   names the gradients as those of another workload are named
        """
        found = (outcome or self.outcome)()
        if self.kind != "train":
            return {f"output {i}": t.clone() for i, t in enumerate(tensors_in(found))}
        return {"output loss": found.clone()} | {f"grad {name}": g.clone() for name, g in canonical(self.gradients()).items()}

    def without_gradient(self) -> list[str]:
        """Parameters that the last backward did not reach, or reached with zeros."""
        return [name for name, p in self.model.named_parameters() if p.grad is None or not p.grad.any()]

    def calls(self) -> list[tuple[Call, int]]:
        """The ops that one forward asks for, and how often. Only shapes matter, so values do not."""
        recorder = Recorder()
        with asking(self.model, recorder):
            self.forward()
        return list(recorder.calls.values())


@contextlib.contextmanager
def watched_dtypes(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """The dtypes of what modules return in the block, and of the weights."""
    found = {p.dtype for p in model.parameters()}

    def look(module: nn.Module, args: Any, out: Any) -> None:
        found.update(t.dtype for t in tensors_in(out))

    hooks = [m.register_forward_hook(look) for m in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def coarsest_rounding(dtypes: Iterable[torch.dtype]) -> float | None:
    """The largest rounding step of these, and of products as the process is set; None where that is float32's."""
    steps = [torch.finfo(d).eps for d in dtypes if d.is_floating_point and d.itemsize < 4]
    steps += [2.0**-10] if float32_precision() != "highest" else []
    return max(steps, default=None)
