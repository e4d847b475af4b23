"""Clocks read while the GPU is still at work: the times that a script reports are then those of launching, not of the work."""

import ast
import collections
import contextlib
import statistics
import tempfile
from pathlib import Path

from whet.diagnose.claims import Claim, claims, imported, read
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.script import Reading

# Calls after which the GPU has done what was asked of it, or that time by its own events.
WAITS = frozenset((
    "synchronize", "elapsed_time", "Event", "item", "cpu", "tolist", "numpy", "Stopwatch", "compare", "do_bench",
    "blocked_autorange", "block_until_ready",
))
MISSED = 0.05  # of a step: what a time that waited somewhere may leave out, as one that reads the loss before the backward


def reported_times(path: Path) -> tuple[list[Claim], bool]:
    """Every difference of two readings in a script and the files beside it that it imports; whether any mentions a GPU."""
    source = read(path, WAITS)
    found = claims(source)
    for other in imported(source):
        found += claims(read(other.path, WAITS))
    return found, source.for_gpu


def is_false(run: Run, claim: Claim, reading: Reading, for_gpu: bool) -> bool:
    """On a GPU by what was still going on when the clock was read, elsewhere by the source alone."""
    if not run.gpu:
        return for_gpu and claim.works and not claim.waits
    if not reading.pending or not claim.works or claim.waits and claim.around:
        return False
    if not claim.waits:
        return True
    with contextlib.suppress(Exception):
        return statistics.median(reading.missed_ms) >= MISSED * run.step_ms
    return False


def find(run: Run):
    script = run.target.script
    if script is None or not script.readings:
        return
    try:
        found, for_gpu = reported_times(script.path)
    except (OSError, SyntaxError, ValueError):  # a script that is no longer there to be read
        return
    groups: dict[tuple[str, str], list[Claim]] = collections.defaultdict(list)
    for claim in found:
        reading = script.readings.get(claim.reading)
        if reading is not None and is_false(run, claim, reading, for_gpu):
            groups[claim.file, claim.function].append(claim)
    for (file, function), group in groups.items():
        yield finding(run, file, function, group)


def finding(run: Run, file: str, function: str, group: list[Claim]) -> Finding:
    readings = {c.reading: run.target.script.readings[c.reading] for c in group}
    spans = ", ".join(dict.fromkeys(f"{file}:{c.start} to {c.end}" if c.start != c.end else f"{file}:{c.end}" for c in group))
    where = file if function == "<module>" else f"{function} in {file}"
    evidence = [f"times taken from line to line without waiting for the GPU: {spans}"]
    for reading in readings.values():
        going = f", {reading.pending} times while GPU work was still going on" if run.gpu else ""
        left = f", {statistics.median(reading.missed_ms):.2f} ms of it, which the time leaves out" if reading.missed_ms else ""
        often = "once" if reading.times == 1 else f"{reading.times} times"
        evidence.append(f"{reading.line} read the clock {often}{going}{left}")
    says = "its times leave out work that is still going on" if run.gpu else (
        "on a GPU these times leave out work that is still going on"
    )
    return Finding(
        "unsynchronised_timing", f"{where} reads the clock without waiting for the work that it times: {says}", evidence,
        "Call torch.cuda.synchronize() before each reading of the clock, or time with whet.measure.Stopwatch or CUDA events",
        wrong=True, line=group[0].reading,
    )


HEAD = '''
import time

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
width, batch = (4096, 16384) if device == "cuda" else (16, 8)
model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(batch, width, device=device)


def step():
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
'''

UNSYNCHRONISED = HEAD + '''

times = []
for _ in range(6):
    before = time.perf_counter()
    loss = step()
    times.append(time.perf_counter() - before)
print(loss.item(), sorted(times)[3])
'''

SYNCHRONISED = HEAD + '''

def now():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


times = []
for _ in range(6):
    before = now()
    loss = step()
    times.append(now() - before)
print(loss.item(), sorted(times)[3])
'''


def script_of(text: str) -> Path:
    """The text as a file in a folder of its own, so that nothing beside it is imported."""
    ast.parse(text)
    path = Path(tempfile.mkdtemp()) / "timed.py"
    path.write_text(text)
    return path


CHECK = Check(
    "unsynchronised_timing", "clocks read while the GPU is at work", find, lambda: script_of(UNSYNCHRONISED),
    lambda: script_of(SYNCHRONISED),
)
