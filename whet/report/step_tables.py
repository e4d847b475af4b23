"""A training step by every way, as a table. Takes the record of `whet step`: plain dicts."""

from rich.console import Console

from whet.figures import ms
from whet.report.table import Column, Table, columns

GIB = 1024
WAYS = (
    Column("way"), *columns("ms", "low", "high", form=ms), Column("vs as it is", "{:.2f}x"), Column("GiB", "{:.1f}"),
    Column("ready in s", "{:.0f}", 2), Column("busy ms", ms, 1), Column("kernels", "{:,}", 2), Column("busy with, ms", rank=3),
)


def ways_table(m: dict) -> Table:
    rows, tokens = m["batch"]
    table = Table(f"{m['target']}: a training step of {rows} x {tokens:,}, {m['dtype']}", WAYS)
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
