"""A training step by every way, as a table. Takes the record of `whet step`: plain dicts."""

from pathlib import Path

from rich.console import Console

from whet.figures import ms
from whet.report.markdown import absent, grid, read, source
from whet.report.table import Column, Table, columns

GIB = 1024
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
