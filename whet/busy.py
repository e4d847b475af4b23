"""Is this machine busy with something else: what other processes take of the cores, read from the system's own counts."""

import os
from pathlib import Path

import torch

WIDE = 0.25  # quartiles further apart than this share of the median: a quiet machine stays well below
MOVED = 0.10  # a GPU's clock that changes by more than this share while something is timed
SHARE = 0.25  # of a core: what a quiet system does by itself is less
TICKS = 20  # fewer of the system's ticks than this say nothing


def cores() -> set[int]:
    """The cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def ticks() -> tuple[int, int] | None:
    """(ticks in all, ticks that were idle) of these cores since the system began; None where the system does not report it."""
    mine = {f"cpu{n}" for n in cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        counts = [[int(n) for n in line[1:9]] for line in lines if line[0] in mine]  # a guest's time is in its host's already
    except (OSError, ValueError):
        return None
    return (sum(map(sum, counts)), sum(c[3] + c[4] for c in counts)) if counts else None


def own_ticks() -> float:
    """What this process and those it has waited for took."""
    return sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")


class Watch:
    """What others take of the cores while something is timed: from when it is made to when it is asked."""

    def __init__(self) -> None:
        self.before, self.own = ticks(), own_ticks()

    def other_load(self) -> str:
        """One phrase where others took cores that this process has threads for; empty where they did not."""
        after, here = ticks(), len(cores())
        if self.before is None or after is None:
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
            return f"a load average of {load:.1f} on {here} cores" if load > here + 1 else ""
        total, idle = after[0] - self.before[0], after[1] - self.before[1]
        if total < TICKS:
            return ""
        others = here * (total - idle - (own_ticks() - self.own)) / total
        threads = 1 if torch.cuda.is_available() else min(torch.get_num_threads(), here)
        return f"other work took {others:.1f} of {here} cores" if others > here - threads + SHARE else ""


def describe(watch: Watch, spreads: list[float], clocks: tuple[float | None, float | None] = (None, None)) -> str:
    """Every sign of a busy machine, as one line; empty for a quiet one.

    spreads  each candidate's distance between its quartiles, as a share of its median
    clocks   the GPU's clock before and after, MHz
    """
    found = [phrase] if (phrase := watch.other_load()) else []
    middle = sorted(spreads)[len(spreads) // 2] if spreads else 0.0
    if middle > WIDE:
        found.append(f"times vary by {100 * middle:.0f}% between their quartiles")
    before, after = clocks
    if before and after and abs(after / before - 1) > MOVED:
        found.append(f"the GPU's clock went from {before:.0f} to {after:.0f} MHz")
    return "; ".join(found)
