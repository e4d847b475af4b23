"""The doctor's words on a terminal, from plain dicts as records hold them."""

from rich.console import Console

from whet.figures import ms, percent
from whet.report.fit import Table


def show(console: Console, made: dict) -> None:
    """The sentence, the findings in order, and what the rest of the profile says."""
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
        console.print(f"Not looked at by any check: {made['unseen']}.")
    for name, why in made.get("failed", {}).items():
        console.print(f"not looked at: {name} ({why})")
    if applied := made.get("applied"):
        show_applied(console, applied)
    console.print()
    if made.get("modules"):
        console.print(modules_table(made, most=8))


def none_found(made: dict) -> str:
    """That nothing was found, and by how many checks: it is no proof that nothing is there."""
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
    return "" if f["gain_ms"] is None else f" (gives back about {ms(f['gain_ms'])} ms)"


def show_applied(console: Console, applied: dict) -> None:
    if not applied["fixes"]:
        console.print("applied: nothing, no fix here is mechanical")
        return
    for fix in applied["fixes"]:
        console.print(f"applied: {fix}")
    console.print(f"step: {ms(applied['before_ms'])} ms before, {ms(applied['after_ms'])} ms after")


def modules_table(made: dict, most: int = 24) -> Table:
    """Each kind of module's own time, forward and backward, and what bounds it."""
    gpu = made.get("device") == "cuda"
    work = "kernels" if gpu else "ops"
    columns = ("module", "forward ms", "backward ms", "of step", work, "kept MiB", "of roofline", "bound by")
    title = f"step {ms(made['step']['ms'])} ms: work of each module, what is inside it not counted"
    order = ("of step", "forward ms", "backward ms", "bound by", work, "of roofline", "kept MiB")
    table = Table(*columns, order=order, title=title)
    rows = made["modules"]
    for m in rows[:most]:
        roofline = "-" if m["of_roofline"] is None else percent(m["of_roofline"])
        count = f" (x{m['count']})" if m["count"] > 1 else ""
        table.add_row(
            (m["path"] or "(outside any module)") + count, ms(m["forward_ms"]), ms(m["backward_ms"] + m["optimizer_ms"]),
            percent(m["share"]), str(m["launches"]), f"{m['kept_mib']:.1f}", roofline, m["bound"],
        )
    if rest := rows[most:]:
        total = sum(m["share"] for m in rest)
        table.add_row(f"({len(rest)} more)", *[""] * 2, percent(total), str(sum(m["launches"] for m in rest)), "", "", "")
    idle = made["idle_ms"] / made["step"]["ms"]
    table.add_row("GPU idle" if gpu else "between ops", ms(made["idle_ms"]), "", percent(idle), "", "", "", "")
    return table


def show_profile(console: Console, made: dict) -> None:
    console.print(made["sentence"])
    for note in made.get("notes", []):
        console.print(f"note: {note}")
    console.print(modules_table(made))
    table = Table("kernel" if made["device"] == "cuda" else "op", "ms", "times", title="most time")
    for k in made["kernels"]:
        table.add_row(k["name"][:90], ms(k["ms"]), str(k["count"]))
    console.print(table)
    if made.get("layers"):
        console.print(layers_table(made))
    if made.get("whatif"):
        console.print(whatif_table(made))
    told = f"{made['launches']} kernels, GPU busy {ms(made['busy_ms'])} ms, {made['syncs']} waits for the GPU"
    console.print(told if made["device"] == "cuda" else f"{made['launches']} ops, {ms(made['busy_ms'])} ms in them")
    if made.get("after"):
        show_after(console, made)


def show_after(console: Console, made: dict) -> None:
    """A decoder's token before and after, and what it is made of after."""
    after, work = made["after"], "kernels" if made["device"] == "cuda" else "ops"
    busy = "GPU busy ms" if made["device"] == "cuda" else "ms in ops"
    table = Table("one token", "ms", "tokens/s", work, busy, "of floor", title="before and after")
    for name, m in (("before: plain formulas, launched one by one", made | {"tokens_per_s": 1e3 / made["step"]["ms"]}),
                    ("after: decode ops" + (", one graph" if made["device"] == "cuda" else ""), after)):
        share = percent(after["floor_ms"] / m["step"]["ms"]) if "floor_ms" in after else "-"
        rate = f"{m['tokens_per_s']:.0f}"
        table.add_row(name, ms(m["step"]["ms"]), rate, f"{m['launches']:g}", ms(m["busy_ms"]), share)
    console.print(table)
    if after["layers"]:
        console.print(layers_table(after))
    table = Table("kernel" if made["device"] == "cuda" else "op", "ms", "times", title="after: most time")
    for k in after["kernels"]:
        table.add_row(k["name"][:90], ms(k["ms"]), f"{k['count']:g}")
    console.print(table)
    floor = f", {after['floor_ms'] * 1e3:.0f} us at the measured copy rate" if "floor_ms" in after else ""
    console.print(f"a token must read {after['bytes'] / 1e6:.1f} MB{floor}")


def layers_table(made: dict) -> Table:
    """A decoder's token: every layer's parts together."""
    title = f"one token: {made['tokens_per_s']:.0f} tokens/s"
    table = Table("part", "ms", "share", "kernels", title=title)
    for row in made["layers"]:
        table.add_row(row["part"], ms(row["ms"]), percent(row["share"]), f"{row['launches']:g}")
    return table


def whatif_table(made: dict) -> Table:
    """Chains that one kernel could do."""
    columns = ("module", "phase", "chain", "times", "now ms", "fused ms", "step after ms", "realised by")
    title = "what fusing would give, from bytes, launches and ceilings"
    table = Table(*columns, keep=("chain", "now ms", "fused ms"), title=title)
    for w in made["whatif"]:
        realised = w["realised_by"] + (f", {ms(w['realised_ms'])} ms given back" if w.get("realised_ms") else "")
        table.add_row(
            w["module"] or "-", w["phase"], " ".join(w["chain"]), str(w["count"]), ms(w["now_ms"]), ms(w["fused_ms"]),
            ms(w["step_ms_after"]), realised or "-",
        )
    return table
