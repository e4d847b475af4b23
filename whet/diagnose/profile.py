"""Where a step's time goes: forward and backward time of each module, kernels, launches, the GPU's idle share.

A profiled step is slower than the user's. So shares come from the profile and the step's length from the clock: what the
kernels leave of the measured step is idle time, and the rows add up to it. On a CPU the profiler's own cost lies within the
ops: where they come to more than the measured step, each is scaled by the same factor to fit it.
"""

import bisect
import collections
import contextlib
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from whet.diagnose.modules import Modules, watched_step
from whet.diagnose.target import Target
from whet.diagnose.watch import restored
from whet.measure import Timing, compare

MARK = "whet|"
COMPILED = "## Call CompiledFxGraph"  # how the profiler names a graph of Inductor's
TAKES = 3  # steps profiled on a CPU, the shortest kept: a stall of a busy machine's would be reported as the slowest part
LONG_MS = 200.0  # a step as long as this is profiled once
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Kernel:
    """One kernel of the step; on a CPU, one op by itself, without the ops it called."""

    name: str
    us: float
    phase: str
    module: str
    op: str  # the aten op that launched it; its own name on a CPU


@dataclass
class ProfileRow:
    """A module's own work, that of modules inside it not counted."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    optimizer_us: float = 0.0
    launches: int = 0
    host_us: float = 0.0  # time the host spent in it, launching included

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us + self.optimizer_us


@dataclass
class Profile:
    step: Timing  # un-profiled
    kernels: list[Kernel]
    rows: dict[str, ProfileRow]  # by module path
    syncs: int  # times the host waited for the GPU within the step
    device: str
    host_us: float = 0.0
    trace: object = field(default=None, repr=False)  # the profiler, for its Perfetto trace

    @property
    def busy_us(self) -> float:
        return sum(k.us for k in self.kernels)

    @property
    def idle_us(self) -> float:
        """What the kernels leave of the measured step. On a CPU: what is spent between ops, in Python."""
        return max(0.0, self.step.ms * 1e3 - self.busy_us)

    @property
    def idle_share(self) -> float:
        return self.idle_us / (self.step.ms * 1e3)

    @property
    def launches(self) -> int:
        return len(self.kernels)

    def under(self, path: str) -> ProfileRow:
        """A module with everything inside it."""
        total = ProfileRow()
        for name, row in self.rows.items():
            if name == path or name.startswith(f"{path}.") or not path:
                for f in ("forward_us", "backward_us", "optimizer_us", "launches", "host_us"):
                    setattr(total, f, getattr(total, f) + getattr(row, f))
        return total

    def top(self, n: int = 10) -> list[tuple[str, float, int]]:
        """Kernels by name: (name, us, how often), the longest first."""
        found: dict[str, list[float]] = collections.defaultdict(list)
        for k in self.kernels:
            found[k.name].append(k.us)
        return sorted(((name, sum(us), len(us)) for name, us in found.items()), key=lambda x: -x[1])[:n]


class Range:
    """A record_function that is closed by name."""

    def __init__(self, phase: str, path: str):
        self.range = record_function(f"{MARK}{phase}|{path}")
        self.range.__enter__()

    def close(self) -> None:
        self.range.__exit__(None, None, None)


def profiled(target: Target, seconds: float = 1.0, warm_up: int = 2) -> Profile:
    """Time the step as it is, then profile one."""
    with restored(target):
        step = timed(target, seconds)
        for _ in range(warm_up):
            watched_step(target, Modules(target.model))
        takes = 1 if target.device == "cuda" or step.ms > LONG_MS else TAKES
        found = [read(taken(target), step, target.device) for _ in range(takes)]
    return min(found, key=lambda p: p.host_us)


def taken(target: Target) -> profile:
    gpu = target.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    modules = Modules(target.model, Range)
    with modules.attached(), profile(activities=activities) as prof, record_function(f"{MARK}step|"):
        watched_step(target, modules)
        if gpu:
            torch.cuda.synchronize()
    return prof


def timed(target: Target, seconds: float) -> Timing:
    """The step as it is; that of a script that replays CUDA graphs as a graph too, where it can be captured."""
    if getattr(target.script, "replays", 0):
        with contextlib.suppress(RuntimeError):
            return compare({"step": target.step}, mode="graph", seconds=seconds, flush=False)["step"]
        torch.cuda.synchronize()
    return compare({"step": target.step}, mode="eager", seconds=seconds, flush=False)["step"]


def read(prof, step: Timing, device: str) -> Profile:
    events = prof.profiler.kineto_results.events()
    spans = Spans([e for e in events if e.name().startswith(MARK) and on_cpu(e)])
    kernels = gpu_kernels(events, spans) if device == "cuda" else cpu_kernels(events, spans)
    whole, limit_us = sum(k.us for k in kernels), step.ms * 1e3
    if device != "cuda" and whole > limit_us:
        kernels = [replace(k, us=k.us * limit_us / whole) for k in kernels]
    rows: dict[str, ProfileRow] = collections.defaultdict(ProfileRow)
    for k in kernels:
        row = rows[k.module]
        setattr(row, f"{k.phase}_us", getattr(row, f"{k.phase}_us") + k.us)
        row.launches += 1
    for path, us in spans.host().items():
        rows[path].host_us += us
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
    syncs = sum(e.name() in waits for e in events)
    syncs = max(0, syncs - 1) if device == "cuda" else 0  # the last is this module's own
    return Profile(step, kernels, dict(rows), syncs, device, spans.whole_us, prof)


def on_cpu(e) -> bool:
    return e.device_type() == torch.autograd.DeviceType.CPU


class Nest:
    """Named intervals, one within another or apart."""

    def __init__(self, items: list[tuple[int, int, str]]):
        self.items = sorted(items, key=lambda s: (s[0], -s[1]))
        self.starts = [s[0] for s in self.items]
        self.parents: list[int] = []
        stack: list[int] = []
        for i, (start, _, _) in enumerate(self.items):
            while stack and self.items[stack[-1]][1] <= start:
                stack.pop()
            self.parents.append(stack[-1] if stack else -1)
            stack.append(i)

    def at(self, ns: int) -> str:
        """The innermost interval around a time, "" where there is none."""
        i = bisect.bisect_right(self.starts, ns) - 1
        while i >= 0 and not self.items[i][0] <= ns < self.items[i][1]:
            i = self.parents[i]
        return self.items[i][2] if i >= 0 else ""

    def own(self) -> list[float]:
        """Each interval's length in us, less those within it."""
        lengths = [(end - start) / 1e3 for start, end, _ in self.items]
        left = list(lengths)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                left[parent] -= lengths[i]
        return left


class Spans:
    """The marked ranges of one step; forward and backward never run at once, so a time has one innermost range."""

    def __init__(self, marks):
        named = [(e, e.name().split("|", 1)[1]) for e in marks]
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns(), name) for e, name in named if name.split("|")[0] in PHASES]
        self.nest = Nest(spans)
        steps = [e for e in marks if e.name() == f"{MARK}step|"]
        self.whole = (steps[0].start_ns(), steps[0].start_ns() + steps[0].duration_ns()) if steps else (0, 0)

    @property
    def whole_us(self) -> float:
        return (self.whole[1] - self.whole[0]) / 1e3

    def at(self, ns: int) -> tuple[str, str]:
        """(phase, module path) of the innermost range around a time; the model's own forward where there is none."""
        phase, _, path = self.nest.at(ns).partition("|")
        return phase or "forward", path

    def host(self) -> dict[str, float]:
        """Host time in each module, that of modules inside it taken off."""
        own: dict[str, float] = collections.defaultdict(float)
        for (_, _, name), us in zip(self.nest.items, self.nest.own()):
            own[name.partition("|")[2]] += us
        return own


def gpu_kernels(events, spans: Spans) -> list[Kernel]:
    """Each kernel belongs to the range, and to the op, in which the host launched it."""
    ops = Nest([(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if on_cpu(e) and "::" in e.name()])
    launched = {e.correlation_id(): e.start_ns() for e in events if on_cpu(e) and e.correlation_id() and is_launch(e.name())}
    found = []
    for e in events:
        if on_cpu(e) or e.name().startswith(MARK) or getattr(e, "is_user_annotation", bool)():
            continue
        at = launched.get(e.correlation_id())
        phase, path = spans.at(at) if at is not None else ("forward", "")
        found.append(Kernel(e.name(), e.duration_ns() / 1e3, phase, path, ops.at(at) if at is not None else ""))
    return found


def is_launch(name: str) -> bool:
    return name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "hipLaunch", "hipExt", "hipModule", "hipMem",
                            "cudaGraphLaunch", "hipGraphLaunch", "cuMemcpy", "cuMemset"))


def op_name(event: str) -> str:
    """The op that an event of a CPU is, "" for all else. Loops that Inductor made are no ops: their graph stands for them."""
    if event.startswith(COMPILED):
        return "torch.compile graph"
    return event if "::" in event and not event.startswith((MARK, "autograd::engine")) else ""


def cpu_kernels(events, spans: Spans) -> list[Kernel]:
    """Each op's own time: what the ops that it calls take is theirs. The engine around a node, hooks included, is no op."""
    named = [(e, op_name(e.name())) for e in events if on_cpu(e)]
    inside = [(e, name) for e, name in named if name and spans.whole[0] <= e.start_ns() < spans.whole[1]]
    nest = Nest([(e.start_ns(), e.start_ns() + e.duration_ns(), name) for e, name in inside])
    found = []
    for (start, _, name), us in zip(nest.items, nest.own()):
        if us > 0:
            found.append(Kernel(name, us, *spans.at(start), name))
    return found
