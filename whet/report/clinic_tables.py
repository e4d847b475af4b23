"""The doctor's tables in docs: its checks, and its predictions of fusing against the measured gain of real kernels."""

from pathlib import Path

from whet.diagnose.checks import discover
from whet.diagnose.whatif import LAUNCH_MS
from whet.figures import ms
from whet.report.markdown import Records, absent, by_machine, grid, merged, order, ours, read, shape, source, times


def checks(root: Path) -> str:
    """Every check of the doctor, and whether it needs a GPU."""
    rows = [(f"`{c.name}`", c.title, "a GPU" if c.gpu else "anything") for c in discover().values()]
    return grid(("check", "looks for", "needs"), rows, text=3)


def predicted(e: dict) -> tuple[float, float, float] | None:
    """(formula's ms, predicted gain, gain of whet's kernel) of a call that moves memory, forward and backward in a graph."""
    timed = times(e)
    kernels = [t for name, t in timed.items() if ours(e, name)]
    if e["mode"] != "graph" or e["bound"] != "memory" or not e["call"]["grad"] or not kernels or "eager" not in timed:
        return None
    return timed["eager"], timed["eager"] - e["floor_ms"] - 2 * LAUNCH_MS, timed["eager"] - min(kernels)


def predictions(root: Path) -> str:
    """Predicted against measured gain, from the newest record of each call on each machine."""
    parts = []
    for group in by_machine(read(root, "bench")):
        found = [(name, e, p) for name, e in merged(group) if (p := predicted(e))]
        found.sort(key=lambda item: order(item[1]))
        rows = [
            (e["call"]["op"], shape(e), ms(now), ms(gain), ms(real), f"{gain / real:.2f}") for _, e, (now, gain, real) in found
        ]
        used: Records = {name: r for name, r in group.items() if any(name == n for n, _, _ in found)}
        if rows:
            head = ("op", "shape", "formula ms", "predicted gain ms", "measured gain ms", "predicted / measured")
            parts += [grid(head, rows, text=2), source(used)]
    return "\n\n".join(parts) or absent("bench")
