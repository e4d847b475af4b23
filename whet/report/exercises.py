"""The exercises as a terminal table: what each stage trains to, how fast, what is wrong with it and what helps."""

from rich.table import Table

from whet.figures import ms


def exercises_table(rows: list[dict]) -> Table:
    """One line per stage, as whet.exercise.run gives them."""
    columns = ("stage", "loss", "samples/s", "step", "forward", "backward", "optimizer", "issue", "fix")
    table = Table(*columns, title="exercises: one tiny Llama, one thing wrong at a time; ms", title_justify="left")
    for r in rows:
        parts = (ms(r[f"{part}_ms"]) for part in ("step", "forward", "backward", "optimizer"))
        right = r["issue"] == "none"
        table.add_row(
            str(r["stage"]), f"{r['loss']:.2f}", f"{r['samples_per_s']:.1f}", *parts, "-" if right else r["issue"],
            "-" if right else r["fix"], style="bold green" if right else None,
        )
    return table
