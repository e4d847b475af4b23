"""Training runs as HTML pages that need no network and no script: one run, and a comparison of several.

run_page(run) takes run.json with the `steps`, `vals` and `events` of its log and the `medians` of its figures beside it, as
TrainRun.as_dict() returns them; compare_page(comparison, runs) what whet.train.compare returns and the runs of each arm.
Whatever is missing is left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from whet.figures import ms
from whet.report import compare_tables
from whet.report.cells import breakable, number
from whet.report.compare_tables import count, duration
from whet.report.curves import Curve, charts, smoothed
from whet.report.page import machine
from whet.report.table import Column, Table
from whet.report.templates import fill

TOKENS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
TIMES = ((3600.0, "hours"), (60.0, "minutes"))
RUN_SECTIONS = {
    "loss": "Loss", "task": "A task", "speed": "Throughput", "lr": "Learning rate", "choices": "Kernel choices", "plan": "Plan",
    "events": "Events", "recipe": "Recipe",
}
COMPARE_SECTIONS = {
    "measures": "Comparison", "arms": "Runs", "differences": "What differs", "curves": "Curves", "notes": "Notes",
}


def points(lines: Sequence[Mapping], x: str, y: str) -> list[tuple[float, float]]:
    """(x, y) of the lines of a log that have both."""
    pairs = ((number(line.get(x)), number(line.get(y))) for line in lines)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def scaled(curves: Sequence[Curve], axis: str) -> tuple[list[Curve], str]:
    """The curves in units that make short ticks, and the title of the axis."""
    largest = max((x for c in curves for x, _ in c.points), default=0.0)
    if axis == "step":
        return list(curves), "steps"
    sizes, word, plain = (TOKENS, "tokens", "tokens") if axis == "tokens" else (TIMES, "training time", "training time, s")
    size, unit = next(((n, u) for n, u in sizes if largest >= 2 * n), (1.0, ""))
    found = [Curve(c.name, [(x / size, y) for x, y in c.points], c.arm, c.faint, c.dots) for c in curves]
    return found, f"{word}, {unit}" if unit else plain


def figure(curves: Sequence[Curve], axis: str, y_title: str, caption: str, legend: list, zero=False, cut=False) -> dict:
    """One figure of a page: the chart in two sizes, its caption and its legend."""
    drawn, x_title = scaled([c for c in curves if c.points], axis)
    made, label = charts(drawn, x_title, y_title, zero, cut), f"{y_title} over {x_title}"
    return {"charts": made, "caption": caption, "legend": legend, "label": label}


def loss_curves(run: Mapping, axis: str, arm: int = 0, name: str = "") -> tuple[list[Curve], int]:
    """Training loss, averaged, behind the validation loss; and over how many lines of the log the average runs."""
    train, span = smoothed(points(run.get("steps") or [], axis, "loss"))
    vals = points(run.get("vals") or [], axis, "loss")
    return [Curve(f"{name}training loss", train, arm, faint=True), Curve(f"{name}validation loss", vals, arm, dots=True)], span


def exact_curve(run: Mapping, axis: str) -> Curve:
    """What the exact GP would have for a validation loss, over the evaluations of a run on tasks."""
    found = [(x, -y) for x, y in points(run.get("vals") or [], axis, "exact_gp")]
    return Curve("the exact GP", found, 2)


def task_figure(task: Any) -> dict:
    """One held-out task: its context, the truth, the prediction of the mixture with its band, and the exact GP's mean."""
    task = task if isinstance(task, Mapping) else {}
    names = ("x", "truth", "mean", "sd", "exact_mean", "context_x", "context_y")
    x, truth, mean, sd, exact, context_x, context_y = ([number(v) or 0.0 for v in task.get(name) or []] for name in names)
    high, low = ([(a, m + side * 2 * s) for a, m, s in zip(x, mean, sd)] for side in (1, -1))
    curves = [
        Curve("mean ± 2 standard deviations", [*high, *low[::-1]], shape="area"), Curve("the mixture's mean", [*zip(x, mean)]),
        Curve("the exact GP's mean", [*zip(x, exact)], 2), Curve("the function", [*zip(x, truth)], 3),
        Curve("context", [*zip(context_x, context_y)], 4, shape="scatter"),
    ]
    curves, law = [c for c in curves if c.points], task.get("law") if isinstance(task.get("law"), Mapping) else {}
    said = ", ".join(f"{k} {v if isinstance(v, str) else f'{number(v) or 0:.3g}'}" for k, v in (law or {}).items())
    caption = f"A held-out task at step {task.get('step')}, drawn from {said or 'a Gaussian process'}."
    legend = [(c.look, c.name) for c in curves]
    return {"charts": charts(curves, "x", "y"), "caption": caption, "legend": legend, "label": "y over x of one task"}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value under its full name, as text."""
    found: dict[str, str] = {}
    for key, v in values.items():
        if isinstance(v, Mapping):
            found |= flat(v, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = v if isinstance(v, str) else json.dumps(v, default=str)
    return found


def choices_table(choices: Any) -> Table:
    """What serves each call. choices: {call: impl}, perhaps under "table", perhaps with more beside it."""
    table = Table("kernel choices", (Column("call", code=True), Column("chosen", code=True)))
    for key, text in flat(choices if isinstance(choices, Mapping) else {"": choices} if choices else {}).items():
        table.add(key.removeprefix("table."), text)
    return table


def settings_table(recipe: Mapping[str, Any]) -> Table:
    table = Table("recipe", (Column("setting", code=True), Column("value", code=True)))
    for key, text in flat(recipe).items():
        table.add(key, text or "''")
    return table


def events_table(events: Sequence[Mapping]) -> Table:
    table = Table("events", (Column("step", "{:,}"), Column("event"), Column("what happened")))
    for e in events:
        table.add(e.get("step"), str(e.get("what") or ""), str(e.get("text") or ""))
    return table


def plan_of(run: Mapping) -> str:
    """The plan of run.json, else of the last event that chose one."""
    texts = [str(e.get("text") or "") for e in run.get("events") or [] if e.get("what") == "plan"]
    return str(run.get("plan") or (texts[-1] if texts else ""))


def last(lines: Sequence[Mapping], key: str) -> float | None:
    return next((v for line in reversed(lines) if (v := number(line.get(key))) is not None), None)


def run_stats(run: Mapping) -> list[tuple[str, str, str]]:
    """The headline figures of a run: (name, figure with unit, remark)."""
    steps, vals = run.get("steps") or [], run.get("vals") or []
    medians = run.get("medians") or {}
    rate, mfu, took = (number(medians.get(key)) for key in ("tok_s", "mfu", "ms"))
    memory = [v for line in steps if (v := number(line.get("memory_mib"))) is not None]
    loss, val = last(steps, "loss"), last(vals, "loss")
    best = min((v for line in vals if (v := number(line.get("loss"))) is not None), default=None)
    found = [("validation loss", f"{val:.4f}", f"lowest {best:.4f}")] if val is not None and best is not None else []
    if val is not None and (exact := last(vals, "exact_gp")) is not None:
        found = [("log-likelihood a target", f"{-val:.4f}", f"the exact GP's {exact:.4f}")]
    found += [("training loss", f"{loss:.4f}", "of the last step")] if loss is not None else []
    if steps:
        tokens, seconds = last(steps, "tokens"), last(steps, "time_s")
        found.append(("steps", f"{steps[-1].get('step', 0):,}", f"{count(tokens)} tokens"))
        found += [("training time", duration(seconds), "without evaluation and saving")] if seconds is not None else []
    if rate:
        found.append(("tokens/s", f"{rate:,.0f}", "median" + (f", {ms(took)} ms a step" if took else "")))
    found += [("MFU", f"{100 * mfu:.0f}%", "of the rate measured for a matrix product")] if mfu else []
    found += [("peak memory", f"{max(memory):,.0f} MiB", "")] if memory else []
    parameters = number(run.get("parameters"))
    return found + ([("parameters", count(parameters), "")] if parameters else [])


def head(name: str, target: str, sentence: str, stats: list, lines: list[str], command: str, commit: str) -> dict:
    """What the page's header and footer show."""
    return {
        "title": f"{name}: {target}", "name": name, "kind": "", "target": breakable(target), "sentence": breakable(sentence),
        "stats": stats, "machine": lines, "command": command, "commit": commit or "unknown", "at": "",
    }


def run_page(run: Mapping, command: str = "whet train") -> str:
    """A run's curves, choices, plan, events and recipe as one page."""
    steps, recipe = run.get("steps") or [], run.get("recipe") if isinstance(run.get("recipe"), Mapping) else {}
    curves, span = loss_curves(run, "tokens")
    exact = exact_curve(run, "tokens")
    curves += [exact] if exact.points else []
    averaged = f"averaged over about {span} lines of the log" if span > 1 else "as it is logged"
    legend = [(c.look, c.name) for c in curves if c.points]
    speed, lr = (Curve(name, points(steps, "step", key)) for name, key in (("tokens/s", "tok_s"), ("learning rate", "lr")))
    data, world = run.get("data") if isinstance(run.get("data"), Mapping) else {}, run.get("world") or 1
    lines = [*machine(dict(run.get("machine") or {})), *([f"{world} processes"] if world != 1 else [])]
    lines += [f"data: {data['source']}"] if data and data.get("source") else []
    found: dict[str, Any] = {
        "loss": figure(curves, "tokens", "loss", f"The training loss is {averaged}.", legend, cut=True),
        "task": task_figure(run.get("task")),
        "speed": figure([speed], "step", "tokens/s", "Of each step, evaluation and saving left out.", [], zero=True),
        "lr": figure([lr], "step", "learning rate", "As the schedule set it.", [], zero=True),
        "choices": choices_table(run.get("choices")), "plan": plan_of(run), "events": events_table(run.get("events") or []),
        "recipe": settings_table(recipe or {}),
    }
    there = {k: bool(v["charts"]) if isinstance(v, dict) else bool(v) for k, v in found.items()}
    links = [(key, text) for key, text in RUN_SECTIONS.items() if there[key]]
    top = head(
        "whet train", str(run.get("name") or ""), "", run_stats(run), lines, command, str(run.get("commit") or "")
    )
    return fill("run.html.j2", **top, **found, sections=links, shown={key for key, _ in links})


def compare_page(c: dict, runs: Sequence[Sequence[Mapping]], command: str = "whet compare", commit: str = "") -> str:
    """A comparison as one page. runs: those of each arm, in the order of the arms."""
    names = [a["name"] for a in c["arms"]]
    figures = [overlaid(runs, names, axis) for axis in ("tokens", "time_s")]
    speeds = [
        Curve(names[i], smoothed(points(run.get("steps") or [], "step", "tok_s"))[0], i)
        for i, arm in enumerate(runs) for run in arm
    ]
    caption = "Tokens/s, averaged over as many steps as the losses."
    figures.append(figure(speeds, "step", "tokens/s", caption, arm_legend(names), zero=True))
    differences = compare_tables.differences_table(c)
    found: dict[str, Any] = {
        "measures": compare_tables.measures_table(c) if len(names) > 1 else None, "arms": compare_tables.arms_table(c),
        "differences": differences if len(differences) else None, "curves": [f for f in figures if f["charts"]],
        "notes": c["notes"],
    }
    links = [(key, text) for key, text in COMPARE_SECTIONS.items() if found[key]]
    lines = list(dict.fromkeys(a["machine"] for a in c["arms"]))
    top = head("whet compare", ", ".join(names), compare_tables.headline(c), [], lines, command, commit)
    return fill("compare.html.j2", **top, **found, base=c["base"], sections=links)


def arm_legend(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(Curve(name, (), i).look, name) for i, name in enumerate(names)]


def overlaid(runs: Sequence[Sequence[Mapping]], names: Sequence[str], axis: str) -> dict:
    """The losses of all runs in one figure, a colour for each arm."""
    curves, spans = list[Curve](), [1]
    for i, arm in enumerate(runs):
        for run in arm:
            more, span = loss_curves(run, axis, i, f"{names[i]}, ")
            curves, spans = curves + more, [*spans, span]
    faint = f", faint the training loss{f' averaged over about {max(spans)} lines of the log' if max(spans) > 1 else ''}"
    by = "tokens" if axis == "tokens" else "training time, evaluation and saving left out"
    return figure(curves, axis, "loss", f"Losses over {by}: strong the validation loss{faint}.", arm_legend(names), cut=True)
