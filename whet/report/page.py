"""A record -> one HTML page that needs no network and no script: what `whet doctor --html` and `whet optimize --html` write.

page(record) takes what report.record.make returns and shows the sections that have figures. Here figures become text;
page.html.j2 has the prose and the style.
"""

import re
from collections.abc import Sequence

from whet.figures import ms
from whet.race import FASTEST, NOISY
from whet.report import findings, swap_tables, tables
from whet.report.cells import aligned, breakable, number, share, shown, text
from whet.report.findings import OUTSIDE, PHASES, module, none_found, work
from whet.report.roofline import Point, plot
from whet.report.table import Column, Table, columns
from whet.report.templates import fill

MANY = 12  # modules above which those of one kind share a row
SHOWN = 16  # rows of bars before the rest is folded away
POINTS = 14  # in the roofline: more labels than that cover one another
KINDS = {"train": "one training step", "forward": "one forward pass", "decode": "one decoded token"}
SECTIONS = {
    "checked": ("findings", "Findings"), "applied": ("applied", "Applied"),
    "swapped": ("swapped", "Replaced"),
    "breakdown": ("breakdown", "Breakdown"), "parts": ("parts", "Inside a layer"),
    "roofline": ("roofline", "Roofline"), "kernels": ("kernels", "Kernels"), "plans": ("plans", "Plans"),
    "choices": ("choices", "Kernel choices"), "memory": ("memory", "Memory"), "whatif": ("whatif", "Fusing"),
    "undone": ("undone", "Notes"),
}
WHOLE = ("peak", "total", "reserved")  # entries of memory that are sums over the owners


def page(made: dict) -> str:
    """The record as a page. Whatever it does not hold is left out."""
    return fill("page.html.j2", **view(made))


def view(made: dict) -> dict:
    """Every section as plain text and geometry; a section without figures is empty."""
    m = made.get("measured") if isinstance(made.get("measured"), dict) else {}
    m, entries = m or {}, (m or {}).get("entries") or []
    step, rows = number((m.get("step") or {}).get("ms")), [module(r) for r in m.get("modules") or []]
    kinds = grouped(rows)
    points = module_points(kinds) or entry_points(entries)
    found = {
        **head(made, m), "findings": [finding(f, step) for f in m.get("findings") or []], "checked": "findings" in m,
        "none_found": none_found(m), "overlap": m.get("overlap") or "", "unseen": m.get("unseen") or "",
        "applied": applied(m), "swapped": swap_tables.view(m), "memory": memory(m),
        "breakdown": breakdown(m, rows, kinds, step),
        "modules": findings.modules_table(m), "roofline": roofline(points, m),
        "parts": findings.layers_table(m), "kernels": findings.kernels_table(m), "whatif": findings.whatif_table(m),
        "choices": choices(entries), "candidates": tables.calls_table(entries), "plans": tables.plans_table(m),
        "failed": m.get("failed") or {}, "notes": notes(m, entries),
    }
    found["undone"] = found["failed"] or found["notes"]
    return found | {"sections": [link for key, link in SECTIONS.items() if found[key]]}


def head(made: dict, m: dict) -> dict:
    command = made.get("command") or "whet"
    target = m.get("target") or command
    sentence = m.get("sentence") or (outcome(m) if m.get("plans") else swap_tables.sentence(m) if "groups" in m else "")
    words = command.split()
    name = " ".join(words[:2]) if words[0] == "whet" else words[0]
    return {
        "title": f"{name}: {target}", "name": name, "target": breakable(target), "kind": KINDS.get(m.get("kind") or "", ""),
        "sentence": breakable(sentence), "stats": stats(m), "machine": machine(made.get("machine") or {}), "command": command,
        "commit": made.get("commit") or m.get("commit") or "unknown", "at": made.get("at") or "",
    }


def outcome(m: dict) -> str:
    """The result of a record with plans, in one sentence."""
    chosen = chosen_plan(m)
    after, before = number(chosen.get("ms")), number(chosen.get("before_ms"))
    noisy = (m.get("why") or "").startswith(NOISY)
    if after is None or before is None:
        kept = "The machine was too noisy to decide." if noisy else "No plan is faster than the plain model."
        return kept + (f" A step takes {text(after)} ms." if after else "")
    tie = " (a tie: the simpler is kept)" if m.get("tied") else f" ({m['why']})" if noisy else ""
    times = f"{number(chosen.get('speedup')) or before / after:.2f} times as fast"
    return f"{times}: a step takes {text(after)} ms, was {text(before)} ms, with {tables.plan_label(chosen['name'])}{tie}."


def chosen_plan(m: dict) -> dict:
    return next((p for p in m.get("plans") or [] if p.get("name") == m.get("chosen")), {})


def stats(m: dict) -> list[tuple[str, str, str]]:
    """The headline figures: (name, figure with unit, remark)."""
    step, plan = m.get("step") or {}, chosen_plan(m)
    timed = step if step.get("ms") else plan
    whole, busy, idle = number(timed.get("ms")), number(m.get("busy_ms")), number(m.get("idle_ms"))
    found = []
    if whole is not None:
        low, high, n = number(timed.get("low")), number(timed.get("high")), timed.get("samples")
        spread = f"{text(low)} to {text(high)}" if low is not None and high is not None else ""
        found.append(("step", f"{text(whole)} ms", ", ".join([spread] * bool(spread) + [f"{n} samples"] * bool(n))))
    if busy is not None:
        found.append(("busy", f"{text(busy)} ms", f"{share(busy, whole)} of the step"))
    if idle is not None:
        found.append(("idle", f"{text(idle)} ms", f"{share(idle, whole)} of the step"))
    gpu_only = [("syncs", "syncs", "the host waits for the GPU")] if work(m) == "kernels" else []
    for key, name, rest in (("launches", work(m), "run in a step"), *gpu_only):
        found += [(name, f"{m[key]:,}", rest)] if number(m.get(key)) is not None else []
    found += [("tokens/s", shown(m["tokens_per_s"], ",.0f"), "decoded")] if number(m.get("tokens_per_s")) else []
    if plan and number(m.get("speedup")):
        found.append(("speed-up", f"{m['speedup']:.2f}x", "of the plain eager step beside it"))
    if number(plan.get("peak_mb")):
        found.append(("peak memory", f"{plan['peak_mb']:,.0f} MB", "of the chosen plan"))
    return found


def machine(m: dict) -> list[str]:
    return [line for line in (m.get("name"), tables.hardware(m), tables.versions(m)) if line]


def finding(f: dict, step: float | None) -> dict:
    cost, gain = number(f.get("cost_ms")), number(f.get("gain_ms"))
    how = "measured here" if f.get("measured") else "computed from counts"
    return {
        "check": (f.get("check") or "").replace("_", " "), "cause": breakable(f.get("cause") or ""),
        "evidence": [breakable(str(e)) for e in f.get("evidence") or []], "fix": breakable(f.get("fix") or ""),
        "wrong": bool(f.get("wrong")), "applies": bool(f.get("applies")),
        "cost": of_step(cost, step), "gain": of_step(gain, step),
        "how": how if cost is not None or gain is not None else "",
        "module": breakable(f.get("module") or ""), "line": breakable(str(f.get("line") or "")),
    }


def of_step(ms: float | None, step: float | None) -> str:
    """'1.40 ms, 12% of the step'; nothing where there is no time."""
    return "" if ms is None else f"{text(ms)} ms, {share(ms, step)} of the step" if step else f"{text(ms)} ms"


def applied(m: dict) -> dict | None:
    """The fixes that were applied to the live model, and the step before and after them."""
    done = m.get("applied")
    if not done:
        return None
    before, after = number(done.get("before_ms")), number(done.get("after_ms"))
    times = f"The step: {text(before)} ms before, {text(after)} ms after." if None not in (before, after) else ""
    return {"fixes": done.get("fixes") or [], "times": times, "left": done.get("left") or []}


def named(r: dict) -> str:
    return r["path"] or OUTSIDE


def grouped(rows: list[dict]) -> list[dict]:
    """Modules, the longest first. Where there are many, those whose paths differ only in a number share a row."""
    kinds: dict[str, list[dict]] = {}
    for r in rows:
        path = re.sub(r"(?<![^.])\d+(?![^.])", "*", r["path"]) if len(rows) > MANY else r["path"]
        kinds.setdefault(path, []).append(r)
    return sorted((together(path, of) for path, of in kinds.items()), key=lambda r: -r["ms"])


def together(path: str, of: list[dict]) -> dict:
    if len(of) == 1:
        return of[0]
    keys = (*PHASES, "ms", "count", "launches", "kept_mib", "flops", "bytes", "floor_ms")
    total = {k: sum(r[k] or 0 for r in of) for k in keys}
    bound = max(of, key=lambda r: r["ms"])["bound"]
    reached = min(1.0, total["floor_ms"] / total["ms"]) if total["ms"] and total["floor_ms"] else None
    return total | {"path": path, "bound": bound, "of_roofline": reached, "members": of}


def breakdown(m: dict, rows: list[dict], kinds: list[dict], step: float | None) -> dict | None:
    """Stacked bars of the modules, and one of the idle time; the sums by phase only where no row counts another's work."""
    idle = number(m.get("idle_ms"))
    if not kinds:
        return None
    busy = number(m.get("busy_ms")) or sum(r["ms"] for r in kinds)
    sums = {p: sum(r[p] or 0.0 for r in kinds) for p in PHASES}
    parts = [f"{p} {text(v)} ms" for p, v in sums.items() if v] if sum(sums.values()) <= 1.02 * busy else []
    longest = max([r["ms"] for r in kinds] + [idle or 0.0]) or 1.0
    column = aligned([*(r["ms"] for r in kinds), idle or 0.0])
    gap = None if idle is None else {"ms": column[-1], "share": share(idle, step), "width": round(100 * idle / longest, 2)}
    bars = all_bars(kinds, longest, step, [idle or 0.0])
    return {
        "bars": bars[:SHOWN], "rest": bars[SHOWN:], "phases": [p for p, v in sums.items() if v], "sums": ", ".join(parts),
        "wide": max(len(named(r)) + (6 if r["count"] > 1 else 2) for r in kinds), "grouped": any(r["count"] > 1 for r in kinds),
        "rest_ms": text(sum(r["ms"] for r in kinds[SHOWN:])),
        "idle": gap, "idle_is": "no kernel runs" if m.get("device") != "cpu" else "between ops, in Python",
    }


def all_bars(rows: list[dict], longest: float, step: float | None, others: Sequence[float] = ()) -> list[dict]:
    """others: figures that stand in the same column."""
    return [bar(r, longest, step, ms) for r, ms in zip(rows, aligned([*(r["ms"] for r in rows), *others]))]


def bar(r: dict, longest: float, step: float | None, ms: str) -> dict:
    widths = [(p, round(100 * (r[p] or 0.0) / longest, 2), text(r[p])) for p in PHASES if r[p]]
    most = max((o["ms"] for o in r["members"]), default=0.0) or 1.0
    return {
        "name": breakable(named(r)), "count": r["count"], "ms": ms, "share": share(r["ms"], step) if step else "",
        "widths": widths, "by_phase": ", ".join(f"{p} {ms} ms" for p, _, ms in widths), "longest": text(most),
        "members": all_bars(sorted(r["members"], key=lambda o: -o["ms"]), most, step),
    }


def module_points(kinds: list[dict]) -> list[Point]:
    return [
        Point(named(r) + (f" x{r['count']}" if r["count"] > 1 else ""), r["ms"], r["flops"] / r["bytes"],
              r["flops"] / r["ms"] / 1e9, r["of_roofline"], r["bound"])
        for r in kinds if r["ms"] and r["flops"] and r["bytes"]
    ]


def entry_points(entries: list[dict]) -> list[Point]:
    """A point for each call, timed in a CUDA graph where it was, else with launches."""
    found = {}
    for e in sorted(entries, key=lambda e: e.get("mode") == "graph"):
        timed = number(e.get("ms"))
        if timed and e.get("flops") and e.get("bytes") and e.get("floor_ms"):
            found[tables.entry_id(e)] = Point(
                tables.entry_id(e), timed, e["flops"] / e["bytes"], e["flops"] / timed / 1e9, e["floor_ms"] / timed, e["bound"])
    return sorted(found.values(), key=lambda p: -p.ms)


KEY = (
    Column("no.", str), Column("part", code=True), Column("ms", ms),
    *columns("flops per byte", "TFLOP/s", "of roofline", form=str), Column("bound by"),
)


def roofline(points: list[Point], m: dict) -> dict | None:
    """The roofline plot, for a wide page and for a phone, and the table with the figures of both."""
    ceilings, shown = m.get("ceilings") or {}, points[:POINTS]
    wide, narrow = plot(shown, ceilings, 1000, 480, True), plot(shown, ceilings, 330, 340, False)
    if wide is None:
        return None
    key = Table("roofline, the figures", KEY)
    for i, p in enumerate(shown, 1):
        key.add(i, p.name, p.ms, text(p.intensity), text(p.tflops), tables.of_roof(p.share) if p.share else "-", p.bound)
    bounds = list(dict.fromkeys(p.bound for p in shown))
    return {"plots": [("wide", wide), ("narrow", narrow)], "key": key, "left_out": len(points) - len(shown), "bounds": bounds}


CHOICES = (
    Column("call", code=True), *columns("mode", "chosen"), *columns("ms", "± spread", form=ms), Column("rival"),
    Column("rival ms", ms), *columns("vs rival", "vs eager", form="{:.2f}x"), Column("of roofline", str), Column("bound by"),
    Column("error / budget", str), Column("note"),
)


def choices(entries: list[dict]) -> Table:
    """One row per call and mode: the chosen impl, and the best other."""
    table = Table("kernel choices", CHOICES)
    for e in entries:
        chosen, rival = e.get("chosen") or "", e.get("rival") or ""
        c, other = e["candidates"].get(chosen, {}), e["candidates"].get(rival, {})
        timed, floor, why = number(c.get("ms")), number(e.get("floor_ms")), e.get("why") or ""
        table.add(
            tables.counted_id(e), tables.mode_label(e), chosen or "none", timed, tables.spread(c), rival or "-",
            other.get("ms"), e.get("vs_rival"), e.get("vs_eager"),
            tables.of_roof(floor / timed) if floor and timed else "-",
            e.get("bound") or "", tables.budget(c), "" if why == FASTEST else why,
        )
    return table


def memory(m: dict) -> dict | None:
    held = {str(k): v for k, value in (m.get("memory") or {}).items() if (v := number(value))}
    whole = {k: held.pop(k) for k in WHOLE if k in held}
    if not held:
        return None
    largest, total = max(held.values()), sum(held.values())
    bars = [
        {"name": breakable(k), "mib": shown(v / 2**20), "share": share(v, total),
         "width": round(100 * v / largest, 2)}
        for k, v in sorted(held.items(), key=lambda item: -item[1])
    ]
    wide = max(map(len, held)) + 2
    return {"bars": bars, "wide": wide, "total": shown(total / 2**20), "whole": {k: shown(v / 2**20) for k, v in whole.items()}}


def notes(m: dict, entries: list[dict]) -> list[str]:
    found = [str(n) for n in m.get("notes") or []] + [str(n) for n in [m.get("note")] if n]
    found += ["The run was stopped early: only what was timed by then is shown."] * bool(m.get("stopped"))
    found += ["The plans are those of the lock, measured at an earlier time."] * bool(m.get("from_lock"))
    found += [*tables.busy(entries, m), *tables.stale(entries)]
    return [*found, *(f"* {line}" for line in tables.proved(entries)), *tables.left_out(entries)]
