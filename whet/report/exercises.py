"""The exercises as a terminal table: what each stage trains to, how fast, what is wrong with it and what helps."""


from whet.figures import ms
from whet.report.fit import Table


def exercises_table(rows: list[dict]) -> Table:
    """One line per stage, as whet.exercise.run gives them."""
    columns = ("stage", "loss", "samples/s", "step", "forward", "backward", "optimizer", "issue", "fix")
    keep, order = ("stage", "loss", "samples/s"), ("issue", "step", "fix", "forward", "backward", "optimizer")
    table = Table(*columns, keep=keep, order=order, title="exercises: one tiny Llama, one thing wrong at a time; ms")
    for r in rows:
        parts = (ms(r[f"{part}_ms"]) for part in ("step", "forward", "backward", "optimizer"))
        right = r["issue"] == "none"
        table.add_row(
            str(r["stage"]), f"{r['loss']:.2f}", f"{r['samples_per_s']:.1f}", *parts, "-" if right else r["issue"],
            "-" if right else r["fix"], style="bold green" if right else None,
        )
    return table
