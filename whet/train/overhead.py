"""What the loop costs on top of the bare plan of its step: data, schedule, reading of losses, log."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from whet.graphs import synchronize
from whet.measure import now
from whet.race import paired
from whet.train.log import RunLog
from whet.train.loop import looped
from whet.train.runs import read_facts
from whet.train.start import Training

ROUNDS = 20
FEWEST = 7  # that can say anything
AT_LEAST_S = 0.2  # of each round
MOST_S = 120  # of all


def loop_overhead(run: Training, rounds: int = ROUNDS) -> dict:
    """Rounds of steps by the loop and of the bare plan on one batch, in turns: milliseconds of each, and their ratio.

    The weights go on being trained: it is for the end of a run, after its last checkpoint.
    """
    every = run.recipe.run.log_every or 10
    step_s = run.world.mean(torch.tensor([run.time_s], device=run.device)).item() / max(1, run.step)  # the same on every rank
    steps = every * max(1, round(AT_LEAST_S / max(1e-9, step_s * every)))
    steps = max(1, min(steps, round(MOST_S / FEWEST / 2 / max(1e-9, step_s))))
    rounds = max(FEWEST, min(rounds, round(MOST_S / 2 / max(1e-9, steps * step_s))))
    times: dict[str, list[float]] = {"loop": [], "bare": []}
    with tempfile.TemporaryDirectory() as elsewhere:
        run = replace(run, log=RunLog(Path(elsewhere), True, lambda text: None), watched=False)
        for _ in range(rounds):
            for name in times:
                synchronize()
                began = now()
                if name == "loop":
                    looped(run, run.step + steps, only_log=True)
                else:
                    bare(run, steps)
                synchronize()
                times[name].append(1e3 * (now() - began) / steps)
    over = paired(times["loop"], times["bare"])
    found = {f"{name}_ms": round(statistics.median(ms), 4) for name, ms in times.items()}
    ratio = {"ratio": round(over.value, 4), "low": round(over.low, 4), "high": round(over.high, 4)}
    return found | ratio | {"steps": steps, "rounds": rounds}


def measure_overhead(run: Training) -> None:
    """loop_overhead, into run.json and to whoever watches. Rank 0 alone has the log; every rank runs the steps."""
    found = loop_overhead(run)
    text = f"the loop takes {found['loop_ms']:.3f} ms a step, its bare plan {found['bare_ms']:.3f}: {found['ratio']:.4f}x"
    run.log.event(run.step, "overhead", f"{text} ({found['low']:.4f} to {found['high']:.4f})")
    if run.world.rank == 0:
        run.log.facts(read_facts(run.log.folder) | {"overhead": found})


def bare(run: Training, steps: int) -> None:
    """The plan alone, on a batch that is there."""
    assert run.stepper is not None
    served = next(iter(run.stepper.served.values()))
    adds = run.recipe.train.accumulate
    for _ in range(steps):
        for i in range(adds):
            if served.adding is not None:
                served.adding(i == 0, i == adds - 1)
            elif served.graph is not None:
                served.graph()
            else:
                with run.world.without_sync(run.made.model, i + 1 < adds):
                    run.stepper(run.example, update=i == adds - 1)
