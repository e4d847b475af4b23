"""Steps that wait for their batch: the loop is timed with its loader and without it."""

import itertools
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from whet.diagnose.modules import tensors_in
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import restored
from whet.figures import figure
from whet.measure import Stopwatch, now

LEAST = 0.05  # of the step: a wait below it comes and goes with the machine's other work
BATCHES, SECONDS = 8, 2.0  # looked at, whichever ends first


def iteration_times(run: Run) -> tuple[float, float, float, int] | None:
    """ms: a mean wait for a batch, an iteration with the loader, one without; and how many there were."""
    target, waits, watch = run.target, [], Stopwatch(run.target.device)
    limit = BATCHES + 2 * getattr(target.loader, "num_workers", 0)  # what workers had ready before the first step hides a wait
    with restored(target):
        target.step()
        batches = iter(target.loader)
        if next(batches, None) is None:  # the first also waits for workers to start
            return None
        with watch("with"):
            started = before = now()
            for batch in itertools.islice(batches, limit):
                moved(batch, target.device)
                waits.append(now() - before)
                target.step()
                before = now()
                if before - started > SECONDS:
                    break
        with watch("without"):
            alone = 0
            while alone < len(waits) and now() - before <= SECONDS:
                target.step()
                alone += 1
    if not waits:
        return None
    return 1e3 * sum(waits) / len(waits), watch.ms("with") / len(waits), watch.ms("without") / max(1, alone), len(waits)


def moved(batch, device: str) -> None:
    """A batch put where the model is, as a loop must."""
    for t in tensors_in(batch) if device == "cuda" else ():
        t.to(device, non_blocking=t.is_pinned())


def workers_for(wait_ms: float, step_ms: float) -> int:
    """How many workers make a batch within a step, one more for what they cost each other, of the CPUs there are."""
    return max(1, min(math.ceil(wait_ms / step_ms) + 1, os.cpu_count() or 1))


def advice(loader, wait_ms: float, step_ms: float, gpu: bool) -> str:
    if not isinstance(loader, DataLoader):
        return "Make the next batch in another process while the step runs: torch.utils.data.DataLoader with num_workers does"
    pinned = ", pin_memory=True and .to(device, non_blocking=True)" if gpu and not loader.pin_memory else ""
    if loader.num_workers == 0:
        return f"Give the DataLoader num_workers={workers_for(wait_ms, step_ms)} and persistent_workers=True{pinned}"
    return f"Give the DataLoader more than {loader.num_workers} workers, or do less in the dataset's __getitem__{pinned}"


def find(run: Run):
    loader = run.target.loader
    if loader is None:
        return
    found = iteration_times(run)
    if found is None:
        return
    wait, with_loader, step, count = found
    cost = min(wait, with_loader - step)  # what overlaps with the step costs nothing, what is no wait is noise
    if cost < LEAST * step:
        return
    settings = [f"num_workers={loader.num_workers}, pin_memory={loader.pin_memory}"] if isinstance(loader, DataLoader) else []
    yield Finding(
        "input_stalls", f"each step waits {figure(cost)} ms for its batch, and takes {figure(step)} ms itself",
        [f"over {count} batches: {figure(wait)} ms until one is there, {figure(with_loader)} ms an iteration, "
         f"{figure(step)} without it",
         *settings],
        fix=advice(loader, wait, step, run.gpu), cost_ms=cost, gain_ms=cost, measured=True,
    )


class Batches(Dataset):
    """Whole batches; a slow one sorts each time what it could have kept sorted."""

    def __init__(self, slow: bool):
        self.x, self.slow = torch.randn(256, 512), slow

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if self.slow:
            torch.randn(2**20).sort()
        return self.x


class StallsExample(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))

    def forward(self, x):
        return self.layers(x).square().mean()


def example(slow: bool) -> Target:
    data = Batches(slow)
    return target_of("example", dict(model=StallsExample(), batch=data.x, loader=DataLoader(data, batch_size=None)))


CHECK = Check("input_stalls", "steps that wait for their batch", find, lambda: example(True), lambda: example(False))
