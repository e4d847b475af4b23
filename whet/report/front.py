"""What README shows of the records: excerpts of real runs as a terminal shows them, and three small tables."""

import io
from pathlib import Path

from rich.console import Console

from whet.figures import ms, percent
from whet.report import bench_tables, decode, findings, run_tables, tables
from whet.report.markdown import MODES, absent, grid, read, source

WIDTH = 144  # columns: the table of plans fits without wrapping
COLUMNS = {  # of decoding's table, each the fastest of some systems
    "Transformers, eager": ("transformers",), "Transformers, compiled": ("transformers-static",),
    "gpt-fast style, compiled": ("gpt-fast", "gpt-fast-tuned"), "whet": ("whet graph", "whet persistent"),
}


def terminal() -> Console:
    """A console that keeps what it is told, as plain text."""
    return Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)


def screen(command: str, console: Console) -> str:
    """A command and what it printed, empty lines left out, as a block of text."""
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(("```text", f"$ {command}", *filter(None, lines), "```"))


def optimize_run(root: Path) -> str:
    """The end of a run of `whet optimize`: the plans, and which one was chosen."""
    if (found := run_tables.main_run(root)) is None:
        return absent("optimize")
    name, r = found
    result, console = r["measured"], terminal()
    console.print(tables.plans_table(result))
    for line in tables.busy([], result):
        console.print(line, soft_wrap=True)
    if result.get("speedup"):
        console.print(f"{result['chosen']}: {result['speedup']:.2f}x the plain eager model, every gradient verified.")
    return f"{screen(r['command'], console)}\n{source({name: r})}"


def finding(root: Path) -> str:
    """What the doctor said of a model from another library: its first sentence, and the first finding that it measured."""
    for name, r in read(root, "doctor").items():
        made = r["measured"]
        measured = [f for f in made["findings"] if f["measured"]]
        if "exercises/" in r["command"] or not measured:
            continue
        console = terminal()
        findings.show(console, {"sentence": made["sentence"], "findings": measured[:1], "step": made["step"]})
        return f"{screen(r['command'], console)}\n{source({name: r})}"
    return absent("doctor")


def ops(root: Path) -> str:
    """Each op, forward and backward: the chosen one against the best that can be had without whet. Of the first machine."""
    for heading, used, entries in bench_tables.sections(read(root, "bench")):
        entries = [e for e in entries if not e["call"]["case"].get("precision")]
        if not entries or not entries[0]["call"]["grad"]:
            continue
        names = list(dict.fromkeys(e["call"]["op"] for e in entries))
        groups = {name: [e for e in entries if e["call"]["op"] == name] for name in names} | {"all": entries}
        rows = []
        for name, mine in groups.items():
            op, shapes, *cells, won = bench_tables.summary_row(name, mine)
            pairs = [f"{mean} ({worst})" if mean != "-" else "-" for mean, worst in zip(cells[::2], cells[1::2])]
            rows.append((op, shapes, *pairs, won))
        columns = {"graph": "in a CUDA graph, mean (worst)", "eager": "launched from Python, mean (worst)"}
        head = (f"op ({heading.partition(', ')[2]})", "shapes", *(columns[mode] for mode in MODES), "whet's kernel chosen")
        return f"{grid(head, rows)}\n\n{source(used)}"
    return absent("bench")


def steps(root: Path) -> str:
    """One training step: the plain model, the best plan of stock PyTorch, and the plan that was chosen."""
    found, rows = read(root, "optimize"), []
    for r in found.values():
        timed = {p["name"]: p for p in r["measured"]["plans"] if p.get("ms")}
        stock = [p["ms"] for p in timed.values() if p.get("choices") == "stock" and "before_ms" in p]
        if chosen := timed.get(r["measured"]["chosen"]):
            plain, best = chosen.get("before_ms", chosen["ms"]), min(stock, default=None)
            over = f"{best / chosen['ms']:.2f}x" if best else "-"
            rows.append((r["measured"]["target"], ms(plain), ms(best), ms(chosen["ms"]), f"{chosen['speedup']:.2f}x", over))
    head = ("model, precision", "plain, ms", "best stock plan, ms", "chosen plan, ms", "against plain", "against best stock")
    return f"{grid(head, rows)}\n\n{source(found)}" if rows else absent("optimize")


def decoders(root: Path) -> str:
    """Tokens a second where a rival was timed too, of several ways of one kind the fastest; whet's share of the floor."""
    parts = []
    for used, measured in decode.newest(root):
        timed = [r for r in decode.ordered(measured["rows"]) if not r["quant"]]
        rows = []
        for at in dict.fromkeys(decode.point(r) for r in timed):
            here = [r for r in timed if decode.point(r) == at]
            fastest = [max((r for r in here if r["system"] in some), key=rate, default=None) for some in COLUMNS.values()]
            floor = fastest[-1].get("of_floor") if fastest[-1] else None
            if not any(fastest[:-1]):
                continue
            cells = ("-" if r is None else f"{rate(r):,.0f}" for r in fastest)
            model = f"{measured['model']}, {measured['weights']} weights, {measured['dtype']}"
            rows.append((model, str(at[0]), f"{at[1]:,}", *cells, percent(floor) if floor else "-"))
        head = ("greedy, tokens a second", "batch", "context", *COLUMNS, "whet, of the floor")
        if rows:
            parts += [grid(head, rows), source(used)]
    return "\n\n".join(parts) or absent("decode")


def rate(r: dict) -> float:
    return r["tokens_per_s"]


TABLES = {"optimize-run": optimize_run, "finding": finding, "ops": ops, "steps": steps, "decoders": decoders}
