"""The tables of `whet bench` records: every call and mode in full, and a summary by op."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from whet.figures import ms
from whet.op import Call, Impl, base, discover
from whet.report import markdown
from whet.report.markdown import MODES, Records, absent, by_machine, grid, merged, order, ours, read, shape, source, times
from whet.report.tables import best, left_out, proved, roofline

MEMORY = ("linear_cross_entropy",)  # ops whose point is memory as much as time


def sections(records: Records) -> list[tuple[str, Records, list[dict]]]:
    """(heading, records used, entries) per machine, dtype and pass, entries in the order of their ops' shapes."""
    found = []
    for group in by_machine(records):
        gpu = next(iter(group.values()))["machine"]["name"]
        kinds: dict[tuple[str, bool], list[tuple[str, dict]]] = {}
        for name, e in merged(group):
            kinds.setdefault((e["call"]["dtype"], e["call"]["grad"]), []).append((name, e))
        for (dtype, grad), items in kinds.items():
            heading = f"{gpu}, {dtype}, {'forward and backward' if grad else 'forward'}"
            used = {name: r for name, r in group.items() if any(name == n for n, _ in items)}
            found.append((heading, used, sorted((e for _, e in items), key=order)))
    return found


def ratio(e: dict) -> float | None:
    """The time of the fastest impl that is not whet's own kernel, over the time of the chosen one; 1 where they are the same.

    None for calls at another precision than their inputs': without whet nothing computes the same.
    """
    timed = {} if e["call"]["case"].get("precision") else times(e)
    others, chosen = [t for n, t in timed.items() if not ours(e, n)], base(e.get("chosen", ""))
    return min(others) / timed[chosen] if others and chosen in timed else None


def split(entries: list[dict]) -> list[tuple[list[str], list[dict]]]:
    """(columns, entries) per table: one for all ops whose impls others have too, one for each op that has its own.

    Impls of another precision are nobody's but the op's that asks for it: refused wherever that was not asked for.
    """
    shared = columns([name for name, among in having().items() if len(among) > 1 and not any(i.implies for i in among)])
    impls: dict[str, set[str]] = {}
    for e in entries:
        impls.setdefault(e["call"]["op"], set()).update(
            base(n) for n, c in e["candidates"].items() if "refused: changes the precision" not in c.get("why", "")
        )
    groups: dict[str, list[dict]] = {}
    for e in entries:
        groups.setdefault("" if impls[e["call"]["op"]] <= set(shared) else e["call"]["op"], []).append(e)
    found = []
    for alone, mine in groups.items():
        found.append((columns({n for e in mine for n in times(e)}) if alone else shared, mine))
    return found


def having() -> dict[str, list[Impl]]:
    """{name: the impls of that name}, over all ops, simplest first."""
    found: dict[str, list[Impl]] = {}
    for op in discover().values():
        for name, impl in op.impls.items():
            found.setdefault(name, []).append(impl)
    return dict(sorted(found.items(), key=lambda item: item[1][0].rank))


def columns(names: Iterable[str]) -> list[str]:
    """Impls in the order of a table's columns: the simplest first, whet's own last."""
    known = having()
    return sorted(names, key=lambda n: (known[n][0].ours, list(known).index(n)))


def called(e: dict) -> str:
    return f"{e['call']['op']} {shape(e)}"


def bench(root: Path) -> str:
    """Every op, shape and mode: each impl's time, the chosen one, its ratio to the best other, its share of the roofline."""
    parts = []
    for heading, used, entries in sections(read(root, "bench")):
        parts.append(f"{heading}; times in ms.")
        for names, mine in split(entries):
            head = ("op", "shape", "mode", *names, "chosen", "vs best other", "of roofline")
            parts += [grid(head, [bench_row(e, names) for e in mine], text=3), *memory(mine, names)]
        notes = [*(f"\\* {line}" for line in proved(entries, called)), *left_out(entries)]
        parts += [*markdown.bullets(notes), source(used)]
    return "\n\n".join(parts) or absent("bench")


def bench_row(e: dict, columns: list[str]) -> list[str]:
    timed, r, chosen = times(e), ratio(e), e.get("chosen", "-")
    smaller = " *" if any(c.get("proved") for c in e["candidates"].values()) else ""
    cells = [f"**{ms(timed[n])}**" if n == base(chosen) and n in timed else ms(timed.get(n)) for n in columns]
    roof = roofline(e, timed.get(base(chosen)))
    return [e["call"]["op"], shape(e) + smaller, e["mode"], *cells, chosen, f"{r:.2f}x" if r else "-", roof]


def memory(entries: list[dict], columns: list[str]) -> list[str]:
    """Extra device memory of the ops in MEMORY, from eager mode where it was timed: more candidates run there."""
    by_call = {Call(**e["call"]).key: e for e in entries if e["call"]["op"] in MEMORY}  # eager comes last and stays
    rows = []
    for e in by_call.values():
        held = {n: mib for n, name in best(e).items() if (mib := e["candidates"][name].get("peak_mib")) is not None}
        if held:
            rows.append((e["call"]["op"], shape(e), *(f"{held[n]:.0f}" if n in held else "-" for n in columns)))
    if not rows:
        return []
    return ["Extra device memory at the highest point of one run, MiB.", grid(("op", "shape", *columns), rows, text=2)]


def summary(root: Path, training: bool = False) -> str:
    """Per op: the geometric mean over shapes of chosen against best other, and the worst of them, per mode.

    Calls at another precision than their inputs' are left out: without whet nothing computes the same.
    training: only calls with a backward, and of all tables the longest.
    """
    parts, columns = [], {"graph": "in a CUDA graph, mean (worst)", "eager": "launched from Python, mean (worst)"}
    for heading, used, entries in sections(read(root, "bench")):
        entries = [e for e in entries if not e["call"]["case"].get("precision") and e["call"]["grad"] >= training]
        ops = dict.fromkeys(e["call"]["op"] for e in entries)
        rows = [summary_row(op, [e for e in entries if e["call"]["op"] == op]) for op in ops]
        head = (f"op ({heading.partition(', ')[2]})", "shapes", *(columns[mode] for mode in MODES), "whet's kernel chosen")
        parts += [f"{grid(head, [*rows, summary_row('all', entries)])}\n\n{source(used)}"] if rows else []
    shown = [max(parts, key=lambda text: text.count("\n"))] if training and parts else parts
    return "\n\n".join(shown) or absent("bench")


def summary_row(name: str, entries: list[dict]) -> list[str]:
    row = [name, str(len({Call(**e["call"]).key for e in entries}))]
    for mode in MODES:
        found = [r for e in entries if e["mode"] == mode and (r := ratio(e))]
        row.append(f"{statistics.geometric_mean(found):.2f}x ({min(found):.2f}x)" if found else "-")
    return [*row, f"{sum(ours(e, e.get('chosen', '')) for e in entries)} of {len(entries)}"]
