"""What whet.optimize did to a model, as tables and lines. All take its record: plain dicts."""

import io
import shutil
from collections.abc import Iterator

from rich.console import Console

from whet.figures import ms
from whet.race import FASTEST
from whet.report.cells import number
from whet.report.table import Column, Table, columns
from whet.swap._begin import ALLOWED
from whet.swap._memory import line as memory_line

PLANS = (Column("plan"), *columns("step ms", "as it is, ms", form=ms), Column("speed-up", "{:.2f}x", 1), Column("note"))
WIDTH = 160  # letters, where there is no terminal and COLUMNS says nothing
STEPS = {"train": "training step", "forward": "forward"}
GROUPS = (
    Column("kind"), Column("what"), Column("modules", "{:,}"), Column("impl", rank=2), Column("error / budget", "{:.2f}", 3),
    *columns("before ms", "after ms", form=ms), Column("speed-up", "{:.2f}x", 1), Column("note"),
)


def groups_table(m: dict) -> Table:
    """One row per group of like modules, what was replaced marked."""
    table = Table("found and proved" if m.get("dry_run") else "proved, then timed in turns with the module as it was", GROUPS)
    for g in m.get("groups") or []:
        table.add(
            g.get("kind"), g.get("what"), g.get("modules"), impl(g), g.get("share"), g.get("before_ms"), g.get("after_ms"),
            g.get("speedup"), note(m, g), marked=bool(g.get("replaced")),
        )
    return table


def impl(g: dict) -> str:
    """The form that a group takes, where it has a name, and the candidates that serve it, each by its op."""
    form = [g["form"]] if g.get("form") else []
    return ", ".join(form + [f"{op}: {name}" for op, name in (g.get("impls") or {}).items()])


def note(m: dict, g: dict) -> str:
    """Whether the group was replaced, and why or why not."""
    if m.get("dry_run") and not g.get("decided"):
        return "can be replaced"
    done, why = bool(g.get("would_be") if m.get("dry_run") else g.get("replaced")), g.get("why") or ""
    by = f" (the lock's, {g['decided']})" if g.get("decided") else ""
    if why == FASTEST:
        why = "" if done or (g.get("speedup") or 0.0) > 1 else "it is faster as it was"
    would = "would be " if m.get("dry_run") else ""
    return f"{would}{'replaced' if done else 'left'}{': ' if why else ''}{why}{by}"


def left_table(m: dict) -> Table:
    """Modules that a recogniser looked at and that were not replaced: one row per reason."""
    table, reasons = Table("not replaced", columns("kind", "where", "why")), dict[tuple, list[str]]()
    for x in m.get("left") or []:
        reasons.setdefault((x.get("kind"), x.get("why")), []).append(x.get("path") or "the model")
    for (kind, why), paths in reasons.items():
        table.add(kind, f"{paths[0]} and {len(paths) - 1} more" if paths[1:] else paths[0], why)
    return table


def whole(m: dict) -> str:
    """The step of the whole model before and after; nothing where it was not timed."""
    before, after = number(m.get("before_ms")), number(m.get("after_ms"))
    if not before or not after:
        return ""
    step, batches = STEPS.get(m.get("kind") or "", "step"), m.get("batches") or []
    if m.get("optimizer"):
        step = f"{step} with {m['optimizer']}"
    if len(batches) < 2:
        return f"{step}: {change(before, after)}"
    return "; ".join(f"{step} at {b['batch']}: {change(b['before_ms'], b['after_ms'])}" for b in batches)


def change(before: float, after: float) -> str:
    return f"{ms(before)} ms before, {ms(after)} ms after, {before / after:.2f}x"


def parts(m: dict) -> Iterator[Table | str]:
    """All of it, in the order in which it is shown; what is empty is left out."""
    plans = plans_table(m) if m.get("step_plans") else ""
    lines = [f"allowed: {ALLOWED[name]}" for name in m.get("allow") or [] if name in ALLOWED]
    lines += [*([memory_line(m["memory"])] if m.get("memory") else []), *(m.get("lock_lines") or [])]
    yield from (part for part in (groups_table(m), left_table(m), whole(m), m.get("note") or "", *lines, plans) if part)


def plans_table(m: dict) -> Table:
    """The step of the optimised model by each plan of compile_step."""
    found = m["step_plans"]
    table = Table("the step with its optimizer, by plan of compile_step", PLANS)
    for p in found["plans"]:
        name, why = p.get("name"), p.get("why") or ""
        table.add(name, p.get("ms"), p.get("before_ms"), p.get("speedup"), why, marked=name == found["chosen"])
    return table


def plan_bars(m: dict) -> list[dict]:
    """Each plan's step as a bar, the step as it is first."""
    found = m.get("step_plans") or {}
    timed = [p for p in found.get("plans", ()) if number(p.get("ms"))]
    longest = max((p["ms"] for p in timed), default=1.0)
    return [
        {"name": p["name"], "width": round(100 * p["ms"] / longest, 2), "ms": ms(p["ms"]),
         "chosen": p["name"] == found["chosen"]} for p in timed
    ]


def show(console: Console, m: dict) -> None:
    for part in parts(m):
        console.print(part)


def text(m: dict) -> str:
    """The same as plain text, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False, emoji=False)
    show(console, m)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def sentence(m: dict) -> str:
    """The result in one sentence, for the head of a page."""
    count = sum(g.get("modules") or 0 for g in m.get("groups") or [] if g.get("replaced") or m.get("dry_run"))
    modules = f"{count:,} module{'s' * (count != 1)}"
    if m.get("dry_run"):
        known = sum(bool(g.get("decided")) for g in m.get("groups") or [])
        return f"{modules} can be replaced; {f'times of {known} groups are from the lock' if known else 'nothing was timed'}."
    return f"{modules} replaced. {whole(m).capitalize()}".rstrip(". ") + "."


def view(m: dict) -> dict | None:
    """The section of a page: bars of each group before and after, and both tables."""
    groups = m.get("groups") or []
    if not groups and not m.get("left"):
        return None
    timed = [g for g in groups if number(g.get("before_ms")) and number(g.get("after_ms"))]
    longest = max((max(g["before_ms"], g["after_ms"]) for g in timed), default=1.0)
    names = [f"{g.get('kind')}: {g.get('what')}" for g in timed]
    bars = [
        {"name": name, "replaced": bool(g.get("replaced")),
         "speedup": f"{g['before_ms'] / g['after_ms']:.2f}x",
         "rows": [(when, round(100 * g[f"{when}_ms"] / longest, 2), ms(g[f"{when}_ms"])) for when in ("before", "after")]}
        for name, g in zip(names, timed)
    ]
    wide = min(48, max(map(len, names), default=0) + 2)
    return {"bars": bars, "wide": wide, "whole": whole(m), "groups": groups_table(m), "left": left_table(m),
            "plan_bars": plan_bars(m), "plans": plans_table(m) if m.get("step_plans") else None}
