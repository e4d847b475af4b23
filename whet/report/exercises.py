"""The table of the exercises: what each stage trains to, how fast, its issue and the fix."""

from whet.figures import ms
from whet.report.table import Column, Table, columns


def exercises_table(rows: list[dict]) -> Table:
    """One row per stage, as whet.exercise.run returns them."""
    phases = ("step", "forward", "backward", "optimizer")
    table = Table("exercises: one tiny Llama, one thing wrong at a time; ms", (
        Column("stage"), Column("loss", "{:.2f}"), Column("samples/s", "{:.1f}"), Column("step", ms, 2),
        *columns(*phases[1:], form=ms, rank=4), Column("issue", rank=1), Column("fix", rank=3),
    ))
    for r in rows:
        right = r["issue"] == "none"
        advice = ("-", "-") if right else (r["issue"], r["fix"])
        table.add(str(r["stage"]), r["loss"], r["samples_per_s"], *(r[f"{p}_ms"] for p in phases), *advice, marked=right)
    return table
