"""The tables of `whet bench transformer-np`: a row for each cell of the matrix, and where the time of a step goes."""

from collections.abc import Mapping

from whet.figures import ms
from whet.report.table import Column, Table, columns

CELLS = [
    *columns("way", "checkpointed", "CUDA graph"), Column("ms", ms), Column("spread", rank=3), Column("tokens/s", "{:,.0f}"),
    Column("peak MB", "{:,.0f}", 1), Column("vs baseline", "{:.2f}x"), Column("interval", rank=3),
    Column("budget", "{:.0%}", 2), Column("note"),
]


def cells_table(shape: Mapping) -> Table:
    """One row for each way, with and without checkpointed blocks and a CUDA graph; what did not run has its reason."""
    table = Table(f"{shape['target']}: one training step of {shape['points']}, {shape['precision']}", CELLS)
    for c in shape["cells"]:
        low, high = (c.get(f"speedup_{end}") for end in ("low", "high"))
        between = f"{low:.2f} to {high:.2f}" if low and high else ""
        spread = f"{ms(c['low'])} to {ms(c['high'])}" if c["ok"] else ""
        note = c["why"] or (f"proved with {c['proved']}" if c.get("proved") else "")
        table.add(
            c["way"], "yes" if c["checkpointed"] else "", "yes" if c["graph"] else "", c.get("ms"), spread,
            c.get("tokens_per_s"), c.get("peak_mb"), c.get("speedup"), between, c.get("share") if c["ok"] else None, note,
        )
    return table


def stages_table(shape: Mapping) -> Table | None:
    """Where the time of each way's plain step goes; None where no way ran."""
    shown = [c for c in shape["cells"] if c.get("stages")]
    if not shown:
        return None
    stages = list(shown[0]["stages"])
    table = Table(f"{shape['target']}: where a step's time goes, ms", [*columns("way"), *columns(*stages, form=ms)])
    for c in shown:
        table.add(c["way"], *(c["stages"].get(stage) for stage in stages))
    return table
