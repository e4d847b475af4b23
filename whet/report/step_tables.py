"""A training step by every way, as a table, of one model or of several. Takes the records of `whet step`: plain dicts."""

from pathlib import Path

from rich.console import Console

from whet.figures import ms
from whet.race import TIE, Ratio, Timing, apart
from whet.report.markdown import absent, grid, read, source
from whet.report.table import Column, Table, columns

GIB = 1024
BEFORE, AFTER = "as it is", "whet.optimize"
WAYS = (
    Column("way"), *columns("ms", "low", "high", form=ms), Column("vs as it is", "{:.2f}x"), Column("GiB", "{:.1f}"),
    Column("ready in s", "{:.0f}", 2), Column("busy ms", ms, 1), Column("kernels", "{:,}", 2), Column("busy with, ms", rank=3),
)


def size(m: dict) -> str:
    """'4 x 2,048', with the memory that whet was held to."""
    return " x ".join(f"{n:,}" for n in m["batch"]) + (f", whet within {m['max_memory']}" if m.get("max_memory") else "")


def ways_table(m: dict) -> Table:
    table = Table(f"{m['target']}: a training step of {size(m)}, {m['dtype']}", WAYS)
    for row in m["ways"]:
        if row.get("timing") is None:
            table.add(row["way"], None, None, None, None, None, None, None, None, row.get("why"))
            continue
        t, parts = row["timing"], row.get("busy_ms") or {}
        words = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
        memory = row.get("memory_mib")
        table.add(
            row["way"], t["ms"], t["low"], t["high"], row.get("speedup"), None if memory is None else memory / GIB,
            row.get("ready_s"), sum(parts.values()) if parts else None, row.get("kernels"), words,
        )
    return table


def show(console: Console, m: dict) -> None:
    console.print(ways_table(m))
    for row in m["ways"]:
        if row.get("again_s") is not None:
            console.print(f"{row['way']} again, with what the lock keeps: {row['again_s']:.1f} s")
        if row["way"] == "whet.compile_step":
            for line in row.get("notes") or []:
                console.print(line)


def cell(row: dict | None) -> str:
    """A way's time and memory, or a dash."""
    if not row or not row.get("timing"):
        return "-"
    memory = row.get("memory_mib")
    return f"{ms(row['timing']['ms'])}" + (f", {memory / GIB:.1f} GiB" if memory is not None else "")


def summary(root: Path) -> str:
    """One training step of each recorded model by every way: a Markdown table."""
    found, rows = read(root, "step"), []
    names = list(dict.fromkeys(row["way"] for r in found.values() for row in r["measured"]["ways"]))
    for r in found.values():
        m, by_way = r["measured"], {row["way"]: row for row in r["measured"]["ways"]}
        others = [w["timing"]["ms"] for n, w in by_way.items() if w.get("timing") and not n.startswith("whet")]
        ours = [w["timing"]["ms"] for n, w in by_way.items() if w.get("timing") and n.startswith("whet")]
        best = f"{min(others) / min(ours):.2f}x" if others and ours else "-"
        rows.append((f"{m['target']}, {size(m)}", *(cell(by_way.get(n)) for n in names), best))
    head = ("model, batch (ms, memory)", *names, "whet over the best other")
    return f"{grid(head, rows)}\n\n{source(found)}" if rows else absent("step")


def failure(m: dict) -> str:
    """Why one of several models has no times, or none of itself or of whet's ways; empty where these ran.

    A rival that is not installed or does not run is no failure.
    """
    ours = [row for row in m.get("ways", ()) if row["way"] == BEFORE or row["way"].startswith("whet")]
    return m.get("why") or "; ".join(f"{row['way']}: {row['why']}" for row in ours if row.get("why"))


def speedup(m: dict) -> Ratio | None:
    """How many times as long the step as it is takes as the optimised one; None where one of them has no time."""
    timed = {row["way"]: Timing(**row["timing"]) for row in m.get("ways", ()) if row.get("timing")}
    return apart(timed[BEFORE], timed[AFTER]) if {BEFORE, AFTER} <= timed.keys() else None


def speedup_cell(ratio: Ratio | None) -> str | None:
    """'1.52x (1.50 to 1.54)': the interval is as wide as both medians may be off."""
    return None if ratio is None else f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def models_table(models: list[dict]) -> Table:
    """One row per model."""
    names = list(dict.fromkeys(row["way"] for m in models for row in m.get("ways", ())))
    failed = any(map(failure, models))
    table = Table("a training step of each model, ms", (
        Column("model"), Column("batch"), *columns(*names, form=ms), Column(f"{AFTER} vs {BEFORE}", str),
        *columns(f"GiB {BEFORE}", f"GiB {AFTER}", form="{:.1f}", rank=1), Column("ready in s", "{:.0f}", 2),
        Column("again with the lock, s", "{:.1f}", 2), *([Column("failed")] if failed else []),
    ))
    for m in models:
        by_way = {row["way"]: row for row in m.get("ways", ())}
        memory = [by_way.get(way, {}).get("memory_mib") for way in (BEFORE, AFTER)]
        after = by_way.get(AFTER, {})
        table.add(
            m["target"], size(m) if "batch" in m else None, *((by_way.get(n, {}).get("timing") or {}).get("ms") for n in names),
            speedup_cell(speedup(m)), *(None if mib is None else mib / GIB for mib in memory), after.get("ready_s"),
            after.get("again_s"), *([failure(m)] if failed else []),
        )
    return table


def slower_line(models: list[dict]) -> str:
    """In how many models whet.optimize is slower by more than a tie; empty where none has both times."""
    found, failed = [r for r in map(speedup, models) if r], sum(bool(failure(m)) for m in models)
    slower = sum(1 / ratio.value > 1 + TIE for ratio in found)
    words = [f"{AFTER} is slower than the model {BEFORE} in {slower} of {len(found)}"] * bool(found)
    return "; ".join(words + [f"{failed} failed"] * bool(failed))


def show_models(console: Console, models: list[dict]) -> None:
    console.print(models_table(models))
    if line := slower_line(models):
        console.print(line)


def families(root: Path) -> str:
    """The models of each run of several, a row each: a Markdown table. Of several runs of one model the newest counts."""
    found = read(root, "steps")
    models = list({(m["target"], *m.get("batch", ())): m for r in found.values() for m in r["measured"]["models"]}.values())
    if not models:
        return absent("steps")
    line = slower_line(models)
    return "\n\n".join((models_table(models).to_markdown(), *([f"{line}."] if line else []), source(found)))
