"""A training step of one model by every way a user could take: as it is, Liger's, torch.compile's, and whet's own two.

Each way gets its own copy of the model and its own optimizer; all are timed in turns, in one process. Rivals are timed, not
verified: what whet puts in their place is.
"""

import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whet.figures import error_line
from whet.lock import Lock
from whet.measure import compare, free_memory, now, peak_mib
from whet.step import compile_step
from whet.subjects import compiled_forward
from whet.swap._optimize import Progress, optimize, restore
from whet.workload import Workload

AS_IT_IS, LIGER, COMPILED, OPTIMIZED, STEP = "as it is", "liger", "torch.compile", "whet.optimize", "whet.compile_step"
WAYS = (AS_IT_IS, LIGER, COMPILED, OPTIMIZED, STEP)
PARTS = {  # of a kernel's name: the first that fits
    "attention": r"sdpa|fmha|flash|attention|attend|_bwd_d(q|kv)|span"
    r"|^_(fp8_)?(forward|dq|dkdv|delta|one_tile|fused|quantize|reach|head_peaks|split_head)"
    r"(_hopper|_float32)?_kernel",  # whet's own
    "optimizer": r"multi_tensor|adam",
    "products": r"gemm|nvjet|cutlass|cublas|splitK|matmul|_mm_|^_product(_hopper)?_kernel",
}
REST = "memory-bound"
LR = 1e-4
SECONDS: float = inspect.signature(optimize).parameters["seconds"].default


class Unlogged:
    """A tracker that keeps nothing: the choices are in the record."""

    def add_text(self, *_) -> None: ...

    def add_scalar(self, *_) -> None: ...


@dataclass
class WayOfStep:
    """One way to run the step: what runs it, how long it took to get ready, and what it says of itself."""

    model: nn.Module
    run: Callable[[], Any]
    held_mib: float
    ready_s: float
    again_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepOptions:
    """lock, seconds, max_memory: as optimize() takes them; compiled: whether compile_step tries torch.compile, too."""

    lock: Lock
    seconds: float
    compiled: bool = True
    max_memory: str | None = None


def adamw(model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=on_gpu, capturable=capturable and on_gpu)


def graph_pools_mib() -> float:
    """Memory that CUDA graphs hold for themselves."""
    if not torch.cuda.is_available():
        return 0.0
    pools = [s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(pools) / 2**20


def held_mib(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Weights, buffers and the optimizer's state."""
    state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor) and t.is_cuda]
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *state)}
    return sum(tensors.values()) / 2**20


Globals = list[tuple[dict, str, Any]]  # (of a module, name, value)


@contextlib.contextmanager
def patched(found: Globals) -> Iterator[None]:
    """While it is on, these globals have these values."""
    before = [(names, name, names[name]) for names, name, _ in found]
    try:
        for names, name, value in found:
            names[name] = value
        yield
    finally:
        for names, name, value in before:
            names[name] = value


def ligered(model: nn.Module) -> Globals:
    """Liger's kernels in this one model; LookupError where Liger has none for its kind.

    Returns what Liger sets for every model of the kind, as its rotation in the place of a function of Transformers: that is
    taken back here, for whoever runs the model to set while it runs. The other ways would run it, too.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise LookupError(f"Liger has no kernels for models of type {kind}")
    modules = [vars(sys.modules[name]) for name in {type(m).__module__ for m in model.modules()} | {type(model).__module__}]
    kept = [(names, dict(names)) for names in modules]
    _apply_liger_kernel_to_instance(model=model)
    made = [(names, k, v) for names, before in kept for k, v in names.items() if k in before and before[k] is not v]
    for names, before in kept:
        names.update(before)
    return made


def within(found: Globals, run: Callable[[], Any]) -> Callable[[], Any]:
    def inside():
        with patched(found):
            return run()

    return inside


def plain_step(model: nn.Module, batch: dict, run: Callable | None = None) -> tuple[Callable[[], Any], torch.optim.Optimizer]:
    optimizer = adamw(model)
    work = Workload(model, (), batch, "train", optimizer)
    work.run = run
    return work.step, optimizer


def ready(way: str, base: nn.Module, batch: dict, asked: StepOptions, progress: Progress) -> WayOfStep:
    """A copy of the model that runs its step this way, warm."""
    kept: Any = dict(mode="train", lock=asked.lock, seconds=asked.seconds, max_memory=asked.max_memory, progress=progress)
    model, began, pools, again, notes = copy.deepcopy(base), now(), graph_pools_mib(), None, list[str]()
    changed = ligered(model) if way == LIGER else []
    if way in (OPTIMIZED, STEP):
        report: Any = optimize(model, batch, **kept).whet
        notes += str(report).splitlines() if way == OPTIMIZED else []
    if way == STEP:
        optimizer = adamw(model, capturable=True)
        step = compile_step(model, optimizer, seconds=asked.seconds, log_to=Unlogged(), compiled=asked.compiled)
        run: Callable[[], Any] = lambda: step(batch)  # noqa: E731
    else:
        forward = compiled_forward(model) if way == COMPILED else None
        run, optimizer = plain_step(model, batch, forward)
        run = within(changed, run) if changed else run
    for _ in range(3):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = now() - began
    if way == STEP:
        notes += str(step.report).splitlines()
    if way == OPTIMIZED:
        began = now()
        optimize(restore(model), batch, **kept)
        again = now() - began
    free_memory()  # also of the graphs in which parts were timed
    held = held_mib(model, optimizer) + graph_pools_mib() - pools
    return WayOfStep(model, run, held, took, again, tuple(notes))


def part_of(kernel: str) -> str:
    """The part of a step that a kernel of this name belongs to."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel, re.IGNORECASE)), REST)


def busy_ms(run: Callable[[], Any]) -> dict:
    """What the GPU is busy with in one step, by part, and how many kernels that takes."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in taken.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found = dict.fromkeys((REST, *PARTS), 0.0)
    for e in kernels:
        found[part_of(e.name)] += e.device_time / 1e3
    return {"busy_ms": {k: round(v, 3) for k, v in found.items()}, "kernels": len(kernels)}


def looked_at(at: WayOfStep) -> dict:
    """Of a way that is ready: its memory, and what it says of itself."""
    extra = peak_mib(at.run, clear=at.model.zero_grad)
    return {
        "ready_s": round(at.ready_s, 1), "notes": list(at.notes),
        "memory_mib": None if extra is None else round(at.held_mib + extra),
        "again_s": None if at.again_s is None else round(at.again_s, 1),
    }


def raced_steps(
    base: nn.Module, batch: dict, asked: StepOptions, progress: Progress, ways: tuple[str, ...] = WAYS
) -> list[dict]:
    """One row per way: time of a step, memory, what the GPU was busy with, or why it could not run."""
    rows: dict[str, dict] = {way: {"way": way} for way in ways}
    there: dict[str, WayOfStep] = {}
    for i, way in enumerate(ways):
        progress(f"making ready: {way}", i, len(ways) + 1)
        try:
            there[way] = ready(way, base, batch, asked, progress)
        except Exception as e:  # a rival that is not installed or does not run costs its row
            rows[way]["why"] = error_line(e)
        free_memory()
    for way, at in list(there.items()):
        try:
            rows[way] |= looked_at(at)
        except Exception as e:  # as one that ran alone, and beside the others has no memory left
            rows[way]["why"] = error_line(e)
            del there[way]
    progress("timing in turns", len(ways), len(ways) + 1)
    timed = compare({way: at.run for way, at in there.items()}, seconds=asked.seconds * 4, flush=False, least=9)
    for way, taken in timed.items():
        rows[way]["timing"] = taken.as_dict()
    first = timed.get(AS_IT_IS)
    for way, taken in timed.items():
        rows[way]["speedup"] = None if first is None else round(first.ms / taken.ms, 4)
    for way, at in there.items():
        progress(f"what the GPU is busy with: {way}", len(ways), len(ways) + 1)
        with contextlib.suppress(Exception):  # a profiler that fails costs its own figures
            rows[way] |= busy_ms(at.run)
    return list(rows.values())
