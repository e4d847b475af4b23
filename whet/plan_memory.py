"""The peak memory of a step, predicted from shapes: the step runs on fake tensors, which have sizes and no values.

    found = predict(lambda: Workload(model, kwargs=batch, optimizer=optimizer))   # a live model, or one built inside
    found.peak, found.kept     # bytes at the highest point, and between steps

Every storage that the step makes is followed from the op that allocates it until its last owner lets it go: parameters,
gradients, an optimizer's moments, what autograd saves, temporaries. Checkpointed blocks are followed as they run again. What a
kernel's launcher allocates inside itself is seen where it is declared, `Fused.inside`, and so is the workspace of cuBLAS; what
the allocator loses between blocks is not.
A CUDA graph takes a step's own peak over what was there before it: that memory is the graph's private pool, which stays its own
between replays, so of a captured step `kept` is its peak, and its stream has a workspace of its own.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.choices import Choices
from whet.compiled import NotTraced
from whet.figures import error_line
from whet.plan import BEFORE, Plan
from whet.torch_ops import INSIDE
from whet.workload import Workload, tensors_in

STEPS = 2  # the first makes the optimizer's moments, the second runs beside them
BLOCK = {"cuda": 512}  # bytes that the allocator rounds to; none elsewhere
WITHIN = 0.15  # how far a prediction may lie from what is measured, as a share of that
HOPPER_WORKSPACE, WORKSPACE = 32 * 2**20, 4096 * 2 * 2**10 + 16 * 8 * 2**10  # of cuBLAS, for each stream: torch's defaults


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of a step on a device: at its highest point, and what stays between two steps."""

    peak: int
    kept: int

    def captured(self, device: str = "cuda") -> "PredictedMemory":
        """Of the same step as a CUDA graph."""
        more = workspace(device)
        return PredictedMemory(self.peak + more, self.peak + more)


def workspace(device: str) -> int:
    """Bytes that products keep for each stream."""
    if device != "cuda" or not torch.cuda.is_available():
        return 0
    return HOPPER_WORKSPACE if torch.cuda.get_device_capability() >= (9, 0) else WORKSPACE


class StorageBytes(TorchDispatchMode):
    """Bytes of the storages on a device that are alive now, and the most that there were."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.block = device, BLOCK.get(device, 1)
        self.now = self.peak = 0
        self.held: dict[int, Any] = {}  # weak references to storages that are counted

    def count(self, t: torch.Tensor) -> None:
        """A tensor's storage, the first time that it is met."""
        if t.device.type != self.device:
            return
        storage = t.untyped_storage()
        key, size = id(storage), -(-storage.nbytes() // self.block) * self.block
        if key in self.held:
            return

        def gone(_, key=key, size=size):
            self.now -= size
            self.held.pop(key, None)

        self.held[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.count(t)
        if inside := INSIDE.get(func):
            self.peak = max(self.peak, self.now + inside(*args))
        return out


def own_copy(model: nn.Module, *rest: Any) -> tuple:
    """A deep copy of a model and what belongs to it: batch, optimizer. Inside `predict` fake tensors take the tensors' place.

    What an optimizer remembers of its steps is not copied there: fake steps make it anew.
    """
    mode = detect_fake_mode()
    if mode is None:
        return copy.deepcopy((model, *rest))
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers(), *tensors_in(rest)):
        if id(t) not in memo:
            made = torch.empty_like(t) if isinstance(t, FakeTensor) else mode.from_tensor(t.detach())
            made.requires_grad_(t.requires_grad)
            memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    with contextlib.ExitStack() as stack:
        for optimizer in (x for x in rest if isinstance(x, torch.optim.Optimizer)):
            stack.enter_context(without_state(optimizer))
        return copy.deepcopy((model, *rest), memo)


def moved(module: nn.Module, device: str) -> nn.Module:
    """module.to(device), also of fake parameters, which nn.Module cannot swap once an op has written to them."""
    if detect_fake_mode() is None:
        return module.to(device)
    made: dict[torch.Tensor, torch.Tensor] = {}  # by what it was, which a tied weight is twice
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, t in [(name, t) for name, t in held.items() if t is not None]:
                if t not in made:
                    new = torch.empty_like(t, device=device)
                    made[t] = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
                held[name] = made[t]  # type: ignore[assignment]
    return module


@contextlib.contextmanager
def without_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it is on, the optimizer remembers nothing of its steps."""
    state, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    try:
        yield
    finally:
        optimizer.state = state


def faked(work: Workload) -> Workload:
    """A copy of a workload with fake tensors, which runs op by op."""
    made = copy.copy(work)
    made.model, made.args, made.kwargs, made.optimizer = own_copy(work.model, work.args, work.kwargs, work.optimizer)
    made.run = None
    return made


def as_on_device(optimizer: torch.optim.Optimizer | None, device: str) -> None:
    """An optimizer of fake tensors takes the way that it takes by default of real ones: on CUDA several tensors at once."""
    for group in optimizer.param_groups if optimizer is not None and device == "cuda" else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def predict(make: Callable[[], Workload]) -> PredictedMemory:
    """The memory of a step that runs op by op, not compiled. Nothing is computed, and no memory of the device is used.

    make   gives the workload: of a live model, which stays as it is, or of one that it builds, which then has no values
    What asks for a value, as a model that looks at its batch does, raises; so does what torch.compile serves.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(range(torch.cuda.device_count())), mode:
        work = make()
        if any(not isinstance(p, FakeTensor) for p in work.model.parameters()):
            work = faked(work)
        as_on_device(work.optimizer, work.device)
        with StorageBytes(work.device) as counted:
            for t in (*work.model.parameters(), *work.model.buffers(), *tensors_in((work.args, work.kwargs))):
                counted.count(t)
            for _ in range(STEPS):
                work.outcome()
    more = workspace(work.device)
    return PredictedMemory(counted.peak + more, counted.now + more)


class PlanMemory:
    """What plans of one subject take, each way to run it predicted once; not a compiled one's: Inductor decides what it keeps.

    workload   workload(plan, choices, precision), as a subject has it
    notes      where it is said once why a plan's memory could not be predicted
    """

    def __init__(self, workload: Callable[[Plan, Choices | None, str], Workload], device: str, notes: list[str]):
        self.workload, self.device, self.notes = workload, device, notes
        self.found: dict[tuple, PredictedMemory | None] = {}

    def of(self, plan: Plan, choices: Choices | None, precision: str) -> PredictedMemory | None:
        """None: it cannot be told."""
        if plan.compiled:
            return None
        table = () if choices is None else (choices.default, *sorted(choices.table.items()))
        key = plan.variant, plan.choices, plan.blocks, plan.name == BEFORE, precision, table
        if key not in self.found:
            fresh = None if choices is None else Choices(choices.table, choices.default)
            try:
                self.found[key] = predict(lambda: self.workload(replace(plan, graph=False), fresh, precision))
            except Exception as e:  # a model that looks at values, or an op without a fake: it is only not known
                if not any(found is None for found in self.found.values()):
                    why = str(e) if isinstance(e, NotTraced) else error_line(e)
                    self.notes.append(f"memory is not predicted of every plan: {why}")
                self.found[key] = None
        step = self.found[key]
        return step.captured(self.device) if step is not None and plan.graph else step

    def refuse(self, name: str, plans: list[Plan], precision: str, free: int) -> None:
        """ValueError, with the figures, before anything is built, where even a step with PyTorch's own calls does not fit."""
        for plan in [p for p in plans if p.choices == "stock" and not p.compiled][:1]:
            if why := lacking(self.of(plan, Choices(), precision), free):
                raise ValueError(f"optimize: {name}: {why}; use a smaller size or batch, or free some memory")


def lacking(predicted: PredictedMemory | None, free: int) -> str:
    """Why a step surely does not fit what is free, were the prediction too high by all that it may be; empty where it may."""
    if predicted is None or predicted.peak * (1 - WITHIN) <= free:
        return ""
    return f"a step takes {predicted.peak / 2**30:,.1f} GiB by prediction, and {free / 2**30:,.1f} GiB are free"
