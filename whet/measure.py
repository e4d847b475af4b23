"""The only clock. Candidates interleaved, cold L2, median and spread, eager and graph time, host overhead, peak memory.

eager   the GPU is idle when the clock starts, so the host's launch work is inside the figure, as it is in a user's loop
graph   the run is captured once as a CUDA graph and its replay is timed: GPU work alone
CPU     wall clock around the call; says nothing about a GPU
"""

import contextlib
import functools
import gc
import operator
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from whet import busy, machine
from whet.choices import Choices
from whet.graphs import Graph, finish
from whet.op import Op, as_tuple, discover
from whet.race import Outcome, Timing, fewest, race_outcome, timing
from whet.roof import Ceilings, keep_ceilings, known_ceilings
from whet.verify import leaf_copies, upstream

FLUSH_BYTES = 256 * 2**20  # several times the largest L2 (H200: 60 MiB; MI300X: 256 MiB of Infinity Cache)
MODES = ("eager", "graph")
SLOW_MS = 100.0  # a run of this length needs no more warming up than itself
SCREEN, SCREEN_ROUNDS = 0.4, 100  # of the time given, and at most so many rounds: as long as all candidates of a race run
EARLY_LOOKS = (3, 5)  # rounds after which those that are slower by a wide margin need run no more
LIMIT = 4.0  # times the time given: when a race that is not settled ends,
LATE_ROUNDS, LIMIT_S = 80, 60.0  # but not before so many rounds or seconds,
MAX_ROUNDS = 400  # and never after so many rounds
LEAST_MS = 1e-6  # what a run takes at least, so that ratios of times have a meaning whatever the clock's steps
SLEEP_CYCLES = 2_000_000  # about a millisecond


class Turns:
    """Candidates run in turns: each round runs each once, in an order of its own, so that none always follows the same one.

    slowest  of a time here, that of the slowest of the processes that run the same together
    """

    def __init__(self, runs: dict[str, Callable], mode: str, flush: bool, slowest: Callable[[float], float] = float):
        if mode not in MODES:
            raise ValueError(f"compare: mode must be one of {MODES}, got {mode!r}")
        if mode == "graph" and not torch.cuda.is_available():
            raise ValueError("compare: mode graph needs a GPU")
        self.gpu, self.slowest = torch.cuda.is_available(), slowest
        self.host = self.gpu and mode == "eager"  # whether host time means something
        self.memory: dict[str, float | None] = dict.fromkeys(runs)
        self.slow = dict.fromkeys(runs, False)
        self.once = {name: functools.partial(_once_cpu, run) for name, run in runs.items()}
        if self.gpu:
            self._ready_gpu(runs, mode, flush)
        warm = {name: 1 if self.slow[name] else 3 if self.gpu else 2 for name in runs}
        first = {name: min(once()[0] for _ in range(warm[name])) for name, once in self.once.items()}
        least, beside = (0.05, 0.15) if self.gpu else (1e-3, 0.0)  # ms; beside a run on a GPU: the flush and the events
        self.round_s = sum(max(ms, least) + beside for ms in first.values()) / 1e3
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        self.rounds, self.random, self.order = 0, random.Random(0), list(runs)

    def _ready_gpu(self, runs: dict[str, Callable], mode: str, flush: bool) -> None:
        for name, run in runs.items():
            self.memory[name] = peak_mib(run)
            self.slow[name] = self.slowest(_once_gpu(run, False, False)[0]) > SLOW_MS
        graphs = {n: Graph(run, warm_up=1 if self.slow[n] else 3) for n, run in runs.items()} if mode == "graph" else {}
        self.once = {n: functools.partial(_once_gpu, graphs.get(n) or run, bool(graphs), flush) for n, run in runs.items()}

    def run(self, names: Collection[str]) -> None:
        """One round; every second one is the one before it backwards."""
        if self.rounds % 2 == 0:
            self.random.shuffle(self.order)
        else:
            self.order.reverse()
        for name in self.order:
            if name in names:
                ms, host = self.once[name]()
                self.samples[name].append((max(self.slowest(ms), LEAST_MS), host))
        self.rounds += 1

    def times(self) -> dict[str, list[float]]:
        return {name: [ms for ms, _ in taken] for name, taken in self.samples.items()}

    def timings(self) -> dict[str, Timing]:
        hosts = {n: statistics.median(h for _, h in taken) * 1e6 if self.host else None for n, taken in self.samples.items()}
        return {n: timing(ms, hosts[n], self.memory[n]) for n, ms in self.times().items()}


def compare(
    runs: dict[str, Callable], mode: str = "eager", seconds: float = 0.4, flush: bool = True, least: int = 5
) -> dict[str, Timing]:
    """Time the candidates in turns, all for the same number of rounds.

    seconds: time to spend per candidate; least: rounds to run however slow they are, three where all are very slow.
    """
    turns = Turns(runs, mode, flush)
    if not runs:
        return {}
    least = min(least, 3) if all(turns.slow.values()) else least
    for _ in range(int(min(200 if turns.gpu else 100, max(least, seconds * len(runs) / turns.round_s)))):
        turns.run(list(runs))
    return turns.timings()


@dataclass(frozen=True)
class Race:
    """What a race gave: each candidate's times, the choice with the ratios that decided it, and how busy the machine was."""

    timings: dict[str, Timing]
    outcome: Outcome
    busy: str  # empty: it was quiet
    times: dict[str, list[float]]  # ms, by round


def race(
    runs: dict[str, Callable], keep: str | None, mode: str = "eager", seconds: float = 0.25, flush: bool = True,
    slowest: Callable[[float], float] = float,
) -> Race:
    """Choose among candidates, simplest first, by running them in turns until the choice is sure or time is out.

    keep     what the user had: the choice where time runs out
    seconds  time per candidate that all run for; then whoever is surely slower falls out, and the others go on
    slowest  as Turns takes it: processes that race together choose alike
    """
    turns, watch, left = Turns(runs, mode, flush, slowest), busy.Watch(), list(runs)
    clock, began, given = sm_mhz(), now(), seconds * len(runs)

    def late() -> bool:
        spent = slowest(now() - began)
        long = spent > LIMIT * given and (turns.rounds >= LATE_ROUNDS or spent > LIMIT_S)
        return turns.rounds >= MAX_ROUNDS or (turns.rounds >= fewest(len(left) - 1) and long)

    def look() -> Outcome:
        found = race_outcome(turns.times(), keep)
        left[:] = [n for n in left if not found.ratios[n].slower]
        return found

    for n in range(1, SCREEN_ROUNDS + 1):
        turns.run(left)
        if n in EARLY_LOOKS:
            look()
        if n >= max(EARLY_LOOKS) and slowest(now() - began) >= SCREEN * given:
            break
    while not (found := look()).settled and not late():
        until = max(fewest(len(left) - 1), turns.rounds * 3 // 2)
        while turns.rounds < until and not late():
            turns.run(left)
    timings = turns.timings()
    spreads = [(t.high - t.low) / t.ms for t in timings.values() if t.ms]
    return Race(timings, found, busy.describe(watch, spreads, (clock, sm_mhz())), turns.times())


def sm_mhz() -> float | None:
    """The clock of the GPU at this moment, from a kernel that waits for a number of its cycles; None where there is none."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    end.record()
    end.synchronize()
    return SLEEP_CYCLES / start.elapsed_time(end) / 1e3


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
    finish(end.synchronize)
    return start.elapsed_time(end), host


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def _once_cpu(run: Callable) -> tuple[float, float]:
    before = time.perf_counter()
    run()
    taken = time.perf_counter() - before
    return taken * 1e3, taken


def memory_allocated() -> int:
    """Bytes of device memory that tensors hold; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free_memory() -> None:
    """What nothing refers to any more is given back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_mib(run: Callable, clear: Callable = lambda: None) -> float | None:
    """Device memory one run adds at its highest point, results included.

    clear   lets go of what the run before left behind and this one makes anew, such as gradients
    """
    if not torch.cuda.is_available():
        return None
    run()
    clear()
    gc.collect()
    finish()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    finish()
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


_under_load: dict[str, Ceilings] = {}  # machine's key -> what this process measured while the machine was busy


def slower_by(op: Op, name: str, beside: str, args: dict, grad: bool, mode: str = "eager", rounds: int = 9) -> float:
    """How many times as long a candidate takes as another in this mode, by a quick look; 1 where either does not run.

    Of the ratios within rounds the first quartile: others may work beside this process, and it is not to err to the high side.
    """
    try:
        steps = {n: stepper(op, op.candidate(n).run, args, grad) for n in (beside, name)}
        turns = Turns(steps, mode, flush=torch.cuda.is_available())
        for _ in range(rounds):
            turns.run(list(steps))
    except Exception:
        return 1.0
    times = turns.times()
    return sorted(a / b for a, b in zip(times[name], times[beside]))[rounds // 4]


def ceilings(again: bool = False) -> Ceilings:
    """Measured once per machine and versions, then read from the cache. What is measured under load stays out of the cache."""
    key = machine.this_machine().key
    if not again and (known := known_ceilings() or _under_load.get(key)):
        return known
    found = _measure_ceilings()
    if found.busy:
        _under_load[key] = found
        return found
    keep_ceilings(found)
    return found


def _steady(run: Callable, tries: int = 3) -> Timing:
    """The time of a run that takes the same time each time: taken again while it varies, and of the tries the least varied."""
    found: list[Timing] = []
    while len(found) < tries and (not found or found[-1].high - found[-1].low > busy.WIDE * found[-1].ms):
        found.append(compare({"run": run}, flush=False, seconds=0.3)["run"])
    return min(found, key=lambda t: (t.high - t.low) / t.ms)


def _measure_ceilings() -> Ceilings:
    gpu, watch, taken = torch.cuda.is_available(), busy.Watch(), []
    device = "cuda" if gpu else "cpu"

    def least_ms(run: Callable) -> float:
        taken.append(_steady(run))
        return taken[-1].low

    source = torch.randn(2**29 if gpu else 2**24, device=device)
    target = torch.empty_like(source)
    copy_gbs = 2 * source.numel() * 4 / least_ms(functools.partial(target.copy_, source)) / 1e6
    del source, target
    side = 8192 if gpu else 768
    tflops = {}
    for name in ("bfloat16", "float16", "float32") if gpu else ("float32", "bfloat16"):
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, name)) for _ in range(2))
        tflops[name] = round(2 * side**3 / least_ms(functools.partial(torch.mm, a, b)) / 1e9, 2)
    if gpu and torch.cuda.get_device_capability() >= (8, 9) and not torch.version.hip:
        one = torch.ones((), device=device)
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        mm = functools.partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        tflops["float8_e4m3fn"] = round(2 * side**3 / least_ms(mm) / 1e9, 2)
    spreads = [(t.high - t.low) / t.ms for t in taken]
    return Ceilings(round(copy_gbs, 1), tflops, busy.describe(watch, [max(spreads)]))


def dispatch_us(calls: int = 200, turns: int = 25) -> dict[str, float]:
    """Host time per call that asking Choices adds to calling an impl directly: the best of many turns of each.

    dispatch_us        through the function that Choices writes out for the op's arguments
    dispatch_plain_us  through a plain loop over the arguments: what the writing out saves is the difference
    """
    op, choices, device = discover()["rms_norm"], Choices(default="torch"), machine.this_machine().device
    direct, args = op.impls["torch"].run, (torch.randn(8, 64, device=device), torch.ones(64, device=device), 1e-6)

    def once(run: Callable) -> float:
        if device == "cuda":
            torch.cuda.synchronize()  # an empty launch queue, so that no call waits for room in it
        before = time.perf_counter()
        for _ in range(calls):
            run(*args)
        return time.perf_counter() - before

    with torch.no_grad():
        ways = (choices.rms_norm, looped(direct), direct)
        choices.rms_norm(*args)
        written, plain, least = (min(times) for times in zip(*[[once(run) for run in ways] for _ in range(turns)]))
    return {n: round((s - least) / calls * 1e6, 3) for n, s in (("dispatch_us", written), ("dispatch_plain_us", plain))}


def looped(run: Callable) -> Callable:
    """The look-up of choices.chosen as a loop over the arguments, less its defaults, options and errors."""
    fast: dict = {}
    facts = operator.attrgetter("__class__", "device", "shape", "dtype", "requires_grad")

    def function(*args):
        if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            return run(*args)
        of = [(facts(a), a.stride()) if isinstance(a, torch.Tensor) else (a.__class__, a) for a in args]
        key = (torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), *of)
        return fast.setdefault(key, run)(*args)

    return function


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
