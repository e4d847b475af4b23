"""The doctor's findings and profile: the tables, and the lines on a terminal. From plain dicts, as records hold them."""

import re

from rich.console import Console

from whet.figures import figure, ms, percent
from whet.report.cells import number
from whet.report.table import Column, Table, columns


def show(console: Console, made: dict) -> None:
    """Prints a diagnosis: its summary sentence, the findings in order, and the modules that take the most time."""
    console.print(made["sentence"])
    for note in made.get("notes", []):
        console.print(f"note: {note}")
    console.print()
    step = made.get("step", {}).get("ms")
    for i, f in enumerate(made["findings"], 1):
        console.print(f"{i}. {f['cause']}{cost(f, step)}")
        for line in f["evidence"]:
            console.print(f"     {line}")
        console.print(f"   fix: {f['fix']}{gain(f)}{'; --apply does it' if f['applies'] else ''}")
    if made.get("overlap"):
        console.print(f"{made['overlap']}.")
    if not made["findings"]:
        console.print(none_found(made))
    if made.get("unseen"):
        console.print(f"Not covered by any check: {made['unseen']}.")
    for name, why in made.get("failed", {}).items():
        console.print(f"check {name} could not run: {why}")
    if applied := made.get("applied"):
        show_applied(console, applied)
    console.print()
    if made.get("modules"):
        console.print(modules_table(made, most=8))


def none_found(made: dict) -> str:
    """The line for a diagnosis without findings, with the number of checks that ran."""
    count = f"{made['checks']} checks" if made.get("checks") else "the checks"
    blind = ", but the step could not be seen whole" if made.get("blind") else ""
    return f"No problem found by {count}{blind}."


def cost(f: dict, step: float | None) -> str:
    if f["wrong"]:
        return " [wrong]"
    if f["cost_ms"] is None:
        return ""
    share = f", {percent(f['cost_ms'] / step)} of the step" if step else ""
    return f" [{ms(f['cost_ms'])} ms{share}{'' if f['measured'] else ', by count'}]"


def gain(f: dict) -> str:
    return "" if f["gain_ms"] is None else f" (saves about {ms(f['gain_ms'])} ms)"


def show_applied(console: Console, applied: dict) -> None:
    if not applied["fixes"]:
        console.print("applied: nothing, no fix here is mechanical")
        return
    for fix in applied["fixes"]:
        console.print(f"applied: {fix}")
    console.print(f"step: {ms(applied['before_ms'])} ms before, {ms(applied['after_ms'])} ms after")


PHASES = ("forward", "backward", "optimizer")
OUTSIDE = "(outside any module)"


def work(made: dict) -> str:
    """What a profile counts: kernels on a GPU, ops on a CPU."""
    return "ops" if made.get("device") == "cpu" else "kernels"


def module(r: dict) -> dict:
    """A module of a record with its time over all phases; figures that the record lacks are None."""
    known = {p: number(r.get(f"{p}_ms")) for p in PHASES}
    keys = ("launches", "kept_mib", "flops", "bytes", "floor_ms", "of_roofline")
    return {
        "path": str(r.get("path") or ""), "count": r.get("count") or 1, **known, **{k: number(r.get(k)) for k in keys},
        "ms": sum(v or 0.0 for v in known.values()), "bound": r.get("bound") or "", "members": [],
    }


def modules_table(made: dict, most: int | None = None) -> Table:
    """Each module's own time by phase, and what bounds it.

    most    rows to show; the others are summed in one. None: all
    """
    step, idle, rows = number((made.get("step") or {}).get("ms")), number(made.get("idle_ms")), made.get("modules") or []
    title = f"step {ms(step)} ms: time of each module without its submodules"
    table = Table(title, (
        Column("module", code=True), *columns("forward ms", "backward ms", "optimizer ms", form=ms, rank=2),
        Column("all ms", ms, 1), Column("of step", percent, 1), Column(work(made), "{:,.0f}", 5),
        Column("kept MiB", "{:,.1f}", 7), *columns("GFLOP", "GB moved", form=figure, rank=None), Column("floor ms", ms, None),
        Column("of roofline", percent, 6), Column("bound by", rank=4),
    ))
    for r in map(module, rows[:most]):
        name = (r["path"] or OUTSIDE) + (f" (x{r['count']})" if r["count"] > 1 else "")
        size = [None if r[k] is None else r[k] / 1e9 for k in ("flops", "bytes")]
        table.add(
            name, r["forward"], r["backward"], r["optimizer"] or None, r["ms"], r["ms"] / step if step else None, r["launches"],
            r["kept_mib"], *size, r["floor_ms"], r["of_roofline"], r["bound"],
        )
    nothing = [None] * 4
    if rest := [module(r) for r in rows[len(table):]]:
        total = sum(r["ms"] for r in rest)
        launches = sum(r["launches"] or 0 for r in rest)
        table.add(f"({len(rest)} more)", *nothing[1:], total, total / step if step else None, launches, *nothing, None, "")
    if idle is not None and step and rows:
        name = "GPU idle" if made.get("device") == "cuda" else "between ops"
        table.add(name, *nothing[1:], idle, idle / step, None, *nothing, None, "")
    return table


def kernels_table(made: dict, title: str = "most time") -> Table:
    """The kernels, or on a CPU the ops, that take the most time."""
    step = number((made.get("step") or {}).get("ms"))
    table = Table(title, (
        Column(work(made)[:-1], code=True, cut=90), Column("ms", ms), Column("of step", percent, 1),
        Column("times", "{:,g}", 2), Column("us each", "{:,.1f}", 3),
    ))
    for k in made.get("kernels") or []:
        took, count = number(k.get("ms")), k.get("count") or 0
        name = re.sub(r"^void |\bat::native::(\(anonymous namespace\)::)?", "", str(k.get("name") or ""))
        table.add(name, took, took / step if took and step else None, count, 1e3 * took / count if took and count else None)
    return table


def show_profile(console: Console, made: dict) -> None:
    console.print(made["sentence"])
    for note in made.get("notes", []):
        console.print(f"note: {note}")
    console.print(modules_table(made, most=24))
    console.print(kernels_table(made))
    for table in (layers_table(made), whatif_table(made)):
        if table:
            console.print(table)
    counts = f"{made['launches']} kernels, GPU busy {ms(made['busy_ms'])} ms, {made['syncs']} waits for the GPU"
    console.print(counts if made["device"] == "cuda" else f"{made['launches']} ops, {ms(made['busy_ms'])} ms in them")
    if made.get("after"):
        show_after(console, made)


def show_after(console: Console, made: dict) -> None:
    """Prints a decoder's token before and after, and its parts after."""
    after = made["after"] | {"device": made["device"]}
    console.print(tokens_table(made))
    if after["layers"]:
        console.print(layers_table(after))
    console.print(kernels_table(after, "after: most time"))
    console.print(must_read(after))


def must_read(after: dict) -> str:
    """The bytes that a token must read, and how long that takes at least."""
    floor = f", {after['floor_ms'] * 1e3:.0f} us at the measured copy rate" if "floor_ms" in after else ""
    return f"a token must read {after['bytes'] / 1e6:,.1f} MB{floor}"


def tokens_table(made: dict) -> Table:
    """A decoder's token before and after."""
    after, gpu = made["after"], made["device"] == "cuda"
    table = Table("before and after", (
        Column("one token"), Column("ms", ms), Column("tokens/s", "{:,.0f}", 1), Column(work(made), "{:g}", 2),
        Column("GPU busy ms" if gpu else "ms in ops", ms, 3), Column("of floor", percent, 4),
    ))
    names = ("before: plain formulas, launched one by one", "after: decode ops" + (", one graph" if gpu else ""))
    for name, m in zip(names, (made, after)):
        took = m["step"]["ms"]
        share = after["floor_ms"] / took if "floor_ms" in after else None
        table.add(name, took, 1e3 / took, m["launches"], m["busy_ms"], share)
    return table


def layers_table(made: dict) -> Table:
    """The work of all layers by what it does; of a decoder, in one token. Empty where the record has no such parts."""
    rate = f"one token, {made['tokens_per_s']:.0f} tokens/s" if number(made.get("tokens_per_s")) else "one step"
    figures = (Column("ms", ms), Column("of the work", percent, 1), Column(work(made), "{:g}", 2))
    table = Table(f"inside the layers: {rate}", (Column("part"), *figures))
    layers = made.get("layers")  # some records have their number here
    for r in layers if isinstance(layers, list) else []:
        table.add(r.get("part") or "", r.get("ms"), r.get("share"), r.get("launches") or 0)
    return table


def whatif_table(made: dict) -> Table:
    """Chains of ops that one kernel could compute, and what that would save."""
    figures = (Column("gain ms", ms, 1), Column("step after ms", ms, 3), Column("gain realised ms", ms, 5))
    table = Table("what fusing would give, from bytes, launches and ceilings", (
        Column("ops fused", code=True), Column("module", rank=2, code=True), Column("phase", rank=6),
        Column("times", "{:,}", 4), *columns("now ms", "fused ms", form=ms), *figures, Column("realised by", rank=5, code=True),
    ))
    for w in made.get("whatif") or []:
        times = (w.get(k) for k in ("now_ms", "fused_ms", "gain_ms", "step_ms_after", "realised_ms"))
        names = (" + ".join(w.get("chain") or []), w.get("module") or OUTSIDE, w.get("phase") or "-")
        table.add(*names, w.get("count") or 1, *times, w.get("realised_by") or "-")
    return table
