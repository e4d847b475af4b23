"""The only clock. Candidates interleaved, cold L2, median and spread, eager and graph time, host overhead, peak memory.

eager   the GPU is idle when the clock starts, so the host's launch work is inside the figure, as it is in a user's loop
graph   the run is captured once as a CUDA graph and its replay is timed: GPU work alone
CPU     wall clock around the call; says nothing about a GPU
"""

import contextlib
import functools
import gc
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from whet import machine
from whet.choices import Choices
from whet.op import Cost, Op, as_tuple, discover
from whet.verify import leaf_copies, upstream

FLUSH_BYTES = 256 * 2**20  # several times the largest L2 (H200: 60 MiB; MI300X: 256 MiB of Infinity Cache)
MODES = ("eager", "graph")
SLOW_MS = 100.0  # a run of this length needs no more warming up than itself


@dataclass(frozen=True)
class Timing:
    ms: float  # median
    low: float  # first quartile
    high: float  # third quartile
    samples: int
    host_us: float | None = None  # host time to issue the work, eager mode on a GPU
    peak_mib: float | None = None  # extra device memory at the highest point of one run

    @property
    def spread(self) -> float:
        """How far apart two medians must lie to differ: the 95% notch of their quartiles, and never under 1%."""
        return max(1.57 * (self.high - self.low) / self.samples**0.5, 0.01 * self.ms)

    def as_dict(self) -> dict:
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


def tie(a: Timing, b: Timing) -> bool:
    """A difference inside the spread is no difference."""
    return abs(a.ms - b.ms) <= max(a.spread, b.spread)


def fastest(timings: dict[str, Timing], order: tuple[str, ...]) -> tuple[str, bool]:
    """The name to choose and whether it won by a tie: the simplest (earliest in order) that the best does not beat."""
    best = min(timings, key=lambda n: timings[n].ms)
    for name in order:
        if name in timings and tie(timings[name], timings[best]):
            return name, name != best
    return best, False


def compare(
    runs: dict[str, Callable], mode: str = "eager", seconds: float = 0.4, flush: bool = True, least: int = 5
) -> dict[str, Timing]:
    """Time the candidates in turns: every round runs each once, so drift touches all alike.

    seconds: time to spend per candidate; least: rounds to run however slow they are, three where all are very slow.
    """
    if mode not in MODES:
        raise ValueError(f"compare: mode must be one of {MODES}, got {mode!r}")
    if mode == "graph" and not torch.cuda.is_available():
        raise ValueError("compare: mode graph needs a GPU")
    if not runs:
        return {}
    if not torch.cuda.is_available():
        return _compare_cpu(runs, seconds, least)
    memory, slow = {}, {}
    for name, run in runs.items():
        memory[name] = peak_mib(run)
        slow[name] = _once_gpu(run, False, False)[0] > SLOW_MS
    graphs = {name: Graph(run, warm_up=1 if slow[name] else 3) for name, run in runs.items()} if mode == "graph" else {}
    once = {name: functools.partial(_once_gpu, graphs.get(name) or run, bool(graphs), flush) for name, run in runs.items()}
    first = {name: min(f()[0] for _ in range(1 if slow[name] else 3)) for name, f in once.items()}
    per_round = sum(max(ms, 0.05) + 0.15 for ms in first.values()) / 1e3
    least = min(least, 3) if all(slow.values()) else least
    rounds = int(min(200, max(least, seconds * len(runs) / per_round)))
    samples: dict[str, list] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, f in once.items():
            samples[name].append(f())
    result = {}
    for name, pairs in samples.items():
        host = statistics.median(h for _, h in pairs) * 1e6 if mode == "eager" else None
        result[name] = _timing([ms for ms, _ in pairs], host, memory[name])
    del graphs, once
    return result


def _timing(ms: list[float], host_us: float | None = None, peak: float | None = None) -> Timing:
    quartiles = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [ms[0]] * 3
    return Timing(statistics.median(ms), quartiles[0], quartiles[2], len(ms), host_us, peak)


def _once_gpu(run, is_graph: bool, flush: bool) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if flush:
        _flush_buffer().zero_()
    if not is_graph:
        torch.cuda.synchronize()
    start.record()
    before = time.perf_counter()
    run()
    host = time.perf_counter() - before
    end.record()
    end.synchronize()
    return start.elapsed_time(end), host


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def _compare_cpu(runs: dict[str, Callable], seconds: float, least: int) -> dict[str, Timing]:
    def once(run) -> float:
        before = time.perf_counter()
        run()
        return (time.perf_counter() - before) * 1e3

    first = {name: min(once(run) for _ in range(2)) for name, run in runs.items()}
    rounds = int(min(100, max(least, seconds * len(runs) / max(1e-6, sum(first.values()) / 1e3))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(once(run))
    return {name: _timing(ms) for name, ms in samples.items()}


class Graph:
    """A captured run: call it to replay.

    beside   a graph whose memory this one takes for its own too: one runs after the other, and neither's result is kept
    """

    def __init__(self, run: Callable, warm_up: int = 3, beside: "Graph | None" = None):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=None if beside is None else beside.graph.pool()):
            self.out = run()

    def __call__(self):
        self.graph.replay()
        return self.out


def peak_mib(run: Callable) -> float | None:
    """Device memory one run adds at its highest point, results included."""
    if not torch.cuda.is_available():
        return None
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def stepper(op: Op, run: Callable, args: dict, grad: bool) -> Callable:
    """One forward, and with grad one backward where the op has one, on leaf inputs: what is timed for an op."""
    leaves, wanted = leaf_copies(op, args, grad)
    sources = [leaves[k] for k in wanted]
    if not wanted:
        def forward():
            with torch.no_grad():
                return run(**leaves)

        return forward
    outs = as_tuple(run(**leaves))
    live = [i for i, o in enumerate(outs) if o.requires_grad]
    douts = [upstream(outs[i].detach(), i, "contiguous") for i in live]
    del outs

    def step():
        outs = as_tuple(run(**leaves))
        return torch.autograd.grad([outs[i] for i in live], sources, douts)

    return step


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best, measured: the roofs of the roofline."""

    copy_gbs: float  # device-to-device copy, bytes read plus bytes written
    tflops: dict[str, float]  # dtype name -> square matmul rate

    def floor_ms(self, cost: Cost, backward: bool, dtype: str) -> float:
        """The time below which no impl can go."""
        return max(self._parts(cost, backward, dtype)) * 1e3

    def bound(self, cost: Cost, backward: bool, dtype: str) -> str:
        memory, compute = self._parts(cost, backward, dtype)
        return "memory" if memory >= compute else "compute"

    def _parts(self, cost: Cost, backward: bool, dtype: str) -> tuple[float, float]:
        """Seconds to move the bytes, seconds to do the flops; a dtype whose rate was not measured goes at float32's."""
        rate, forward_rate = (self.tflops.get(d, self.tflops["float32"]) for d in (dtype, cost.dtype or dtype))
        compute = cost.flops / forward_rate + (cost.bwd_flops / rate if backward else 0.0)
        return cost.of(backward)[0] / (self.copy_gbs * 1e9), compute / 1e12


def _ceilings_path() -> Path:
    return machine.cache_dir() / f"ceilings-{re.sub(r'[^A-Za-z0-9.+]+', '-', machine.this_machine().key)}.json"


def known_ceilings() -> Ceilings | None:
    """What the cache has of this GPU and these versions; None where nothing was measured yet. Measures nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = Ceilings(**json.loads(_ceilings_path().read_text()))
        if all(rate > 0 for rate in (known.copy_gbs, known.tflops["float32"], *known.tflops.values())):
            return known
    return None


def ceilings(again: bool = False) -> Ceilings:
    """Measured once per GPU and versions, then read from the cache."""
    if not again and (known := known_ceilings()) is not None:
        return known
    found, path = _measure_ceilings(), _ceilings_path()
    with contextlib.suppress(OSError):  # a read-only home costs the cache, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found)))
    return found


def _measure_ceilings() -> Ceilings:
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    source = torch.randn(2**29 if gpu else 2**24, device=device)
    target = torch.empty_like(source)
    copy = compare({"copy": functools.partial(target.copy_, source)}, flush=False, seconds=0.3)["copy"]
    copy_gbs = 2 * source.numel() * 4 / copy.ms / 1e6
    del source, target
    side = 8192 if gpu else 768
    tflops = {}
    for name in ("bfloat16", "float16", "float32") if gpu else ("float32", "bfloat16"):
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, name)) for _ in range(2))
        t = compare({"mm": functools.partial(torch.mm, a, b)}, flush=False, seconds=0.3)["mm"]
        tflops[name] = round(2 * side**3 / t.low / 1e9, 2)
    if gpu and torch.cuda.get_device_capability() >= (8, 9) and not torch.version.hip:
        one = torch.ones((), device=device)
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        mm = functools.partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        tflops["float8_e4m3fn"] = round(2 * side**3 / compare({"mm": mm}, flush=False, seconds=0.3)["mm"].low / 1e9, 2)
    return Ceilings(round(copy_gbs, 1), tflops)


def dispatch_us(calls: int = 200, turns: int = 25) -> float:
    """Host time per call that asking Choices adds to calling an impl directly: the best of many turns of each."""
    op, choices = discover()["rms_norm"], Choices(default="torch")
    x, w = torch.randn(8, 64, device=machine.this_machine().device), torch.ones(64, device=machine.this_machine().device)

    def best(run: Callable) -> float:
        if x.is_cuda:
            torch.cuda.synchronize()  # an empty launch queue, so that no call waits for room in it
        before = time.perf_counter()
        for _ in range(calls):
            run(x, w, 1e-6)
        return time.perf_counter() - before

    with torch.no_grad():
        choices.rms_norm(x, w, 1e-6)
        pairs = [(best(choices.rms_norm), best(op.impls["torch"].run)) for _ in range(turns)]
    return round((min(t for t, _ in pairs) - min(d for _, d in pairs)) / calls * 1e6, 3)


class Stopwatch:
    """Sections of a loop, each closed by a synchronisation, so that a section's time is its own work's."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    def _now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        before = self._now()
        yield
        self.seconds.setdefault(section, []).append(self._now() - before)

    def ms(self, section: str, skip: int = 0) -> float:
        """Median of a section's times, the first `skip` left out as warm-up."""
        return statistics.median(self.seconds[section][skip:] or self.seconds[section]) * 1e3

    def total(self, section: str) -> float:
        return sum(self.seconds[section])


def now() -> float:
    return time.perf_counter()


class Mark:
    """A point in a device's queue: reached when the work enqueued before it is done. On a CPU that is at once."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.at = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: "Mark") -> float:
        """Seconds between two marks that are both reached."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3


def _begun() -> float:
    """When this process began, on the clock of now(), by the system's book; the import of this module where that is no help."""
    at = time.perf_counter()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return at
    return at - age if 0 <= age < 600 else at


_BEGUN = _begun()


def since_start() -> float:
    """Seconds since this process began: imports are in it."""
    return time.perf_counter() - _BEGUN
