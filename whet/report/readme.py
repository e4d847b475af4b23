"""Records -> the tables of README.md and docs/*.md; the ops themselves -> docs/ops.md.

python -m whet.report.readme           rewrite them in place
python -m whet.report.readme --check   exit 1 if one is out of step with the records or with the ops

A table stands between the lines `<!-- table:NAME -->` and `<!-- /table -->`. What is between them is made here, never by hand.
"""

import argparse
import inspect
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from whet.choices import implied
from whet.figures import ms, percent
from whet.op import SIMPLICITY, Call, Impl, Op, base, discover, ours, untiled
from whet.report import clinic_tables, decode, proof_tables
from whet.report.markdown import (
    MODES,
    Records,
    absent,
    by_machine,
    grid,
    merged,
    order,
    read,
    shape,
    short,
    source,
    times,
    versions,
)
from whet.report.tables import best, left_out, proved, roofline

ROOT = Path(__file__).resolve().parents[2]
REGION = re.compile(r"^<!-- table:([\w-]+) -->\n(.*?)^<!-- /table -->$", re.M | re.S)
OPENING = re.compile(r"^<!-- table:", re.M)
SHARED = ("eager", "torch", "compile", "liger", "triton")  # the columns of the common table; an op with others has its own
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
    """Time of the best that can be had without whet, over the time of the chosen. 1 where that best is itself chosen.

    None where there is no such thing: what serves a call at another precision beside whet's kernel is whet's own formula.
    """
    timed = {} if e["call"]["case"].get("precision") else times(e)
    others, chosen = [t for n, t in timed.items() if not ours(n)], base(e.get("chosen", ""))
    return min(others) / timed[chosen] if others and chosen in timed else None


def cell(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def split(entries: list[dict]) -> list[tuple[list[str], list[dict]]]:
    """(columns, entries) per table: one for all ops that have the shared impls, one for each op that has others."""
    impls: dict[str, set[str]] = {}
    for e in entries:
        impls.setdefault(e["call"]["op"], set()).update(base(n) for n in e["candidates"])
    groups: dict[str, list[dict]] = {}
    for e in entries:
        groups.setdefault("" if impls[e["call"]["op"]] <= set(SHARED) else e["call"]["op"], []).append(e)
    found = []
    for alone, mine in groups.items():
        names = {n for e in mine for n in times(e)} if alone else set(SHARED)
        found.append((sorted(names, key=lambda n: (ours(n), SIMPLICITY.index(n))), mine))
    return found


def called(e: dict) -> str:
    return f"{e['call']['op']} {shape(e)}"


def bench(root: Path) -> str:
    """Every op, shape and mode: each impl's time, the chosen one, how it stands to the others and to the roofline."""
    parts = []
    for heading, used, entries in sections(read(root, "bench")):
        parts.append(f"{heading}; times in ms.")
        for columns, mine in split(entries):
            head = ("op", "shape", "mode", *columns, "chosen", "vs best other", "of roofline")
            parts += [grid(head, [bench_row(e, columns) for e in mine], text=3), *memory(mine, columns)]
        if notes := [*(f"\\* {line}" for line in proved(entries, called)), *left_out(entries)]:
            parts.append("\n".join(f"- {line}" for line in notes))
        parts.append(source(used))
    return "\n\n".join(parts) or absent("bench")


def bench_row(e: dict, columns: list[str]) -> list[str]:
    timed, r, chosen = times(e), ratio(e), e.get("chosen", "-")
    smaller = " *" if any(c.get("proved") for c in e["candidates"].values()) else ""
    cells = [cell(ms(timed.get(n)), n == base(chosen) and n in timed) for n in columns]
    roof = roofline(e, timed.get(base(chosen)))
    return [e["call"]["op"], shape(e) + smaller, e["mode"], *cells, chosen, f"{r:.2f}x" if r else "-", roof]


def memory(entries: list[dict], columns: list[str]) -> list[str]:
    """Extra device memory of the ops that are about it: eager mode where it was timed, since more candidates run there."""
    by_call = {Call(**e["call"]).key: e for e in entries if e["call"]["op"] in MEMORY}  # eager comes last and stays
    rows = []
    for e in by_call.values():
        held = {n: mib for n, name in best(e).items() if (mib := e["candidates"][name].get("peak_mib")) is not None}
        if held:
            rows.append((e["call"]["op"], shape(e), *(f"{held[n]:.0f}" if n in held else "-" for n in columns)))
    if not rows:
        return []
    return ["Extra device memory at the highest point of one run, MiB.", grid(("op", "shape", *columns), rows, text=2)]


def summary(root: Path) -> str:
    """Per op: the geometric mean over shapes of chosen against best other, and the worst of them, per mode.

    Calls at another precision than their inputs' are left out: nothing that can be had without whet does what they do.
    """
    columns = [text for mode in MODES for text in (f"{mode}: mean", f"{mode}: worst")]
    parts = []
    for heading, used, entries in sections(read(root, "bench")):
        entries = [e for e in entries if not e["call"]["case"].get("precision")]
        ops = list(dict.fromkeys(e["call"]["op"] for e in entries))
        rows = [summary_row(op, [e for e in entries if e["call"]["op"] == op]) for op in ops]
        rows.append(summary_row("all", entries))
        parts += [f"{heading}.", grid(("op", "shapes", *columns, "whet's kernel chosen"), rows), source(used)]
    return "\n\n".join(parts) or absent("bench")


def summary_row(name: str, entries: list[dict]) -> list[str]:
    row = [name, str(len({Call(**e["call"]).key for e in entries}))]
    for mode in MODES:
        found = [r for e in entries if e["mode"] == mode and (r := ratio(e))]
        row += [f"{statistics.geometric_mean(found):.2f}x", f"{min(found):.2f}x"] if found else ["-", "-"]
    return [*row, f"{sum(ours(e.get('chosen', '')) for e in entries)} of {len(entries)}"]


def plans(root: Path) -> str:
    """What `whet optimize` found, one table per record."""
    parts = []
    for name, r in read(root, "optimize").items():
        result = r["measured"]
        rows = []
        for p in result["plans"]:
            timed, chosen = p.get("ms"), p["name"] == result["chosen"]
            rows.append([cell(t, chosen) for t in (p["name"], verified(p))] + [
                cell(t, chosen) for t in (
                    ms(timed), ms(p.get("before_ms")), f"{p['samples_per_s']:.0f}" if timed else "-",
                    f"{p['speedup']:.2f}x" if timed else "-",
                    f"{p['peak_mb']:.0f}" if p.get("peak_mb") else "-",
                )
            ])
        tie = " (a tie: the simpler is kept)" if result["tied"] else ""
        stored = " The plans were read from the lock, not measured again by this command." if result.get("from_lock") else ""
        parts += [
            f"{result['target']}, one training step; chosen: {result['chosen']}{tie}. `{result['config']}`.{stored}",
            grid(("plan", "verified", "step, ms", "baseline beside it, ms", "samples/s", "speed-up", "peak MB"), rows, text=2),
            source({name: r}),
        ]
    return "\n\n".join(parts) or absent("optimize")


def verified(plan: dict) -> str:
    if not plan["ok"]:
        return f"no: {plan['why']}"
    return f"yes, {percent(plan['share'])} of the error budget" if "share" in plan else "the baseline"


def machine(root: Path) -> str:
    """What was measured on: GPU, versions, and the measured ceilings that the rooflines refer to."""
    parts = []
    for group in by_machine(read(root, "bench") | read(root, "optimize")):
        m = next(iter(group.values()))["machine"]
        capability = f", compute capability {m['capability'][0]}.{m['capability'][1]}" if m["capability"] else ""
        rows = [
            ("GPU", f"{m['name']}{capability}, {m['sms']} SMs, {m['memory_gib']} GiB, L2 {m['l2_mib']:.0f} MiB"),
            ("versions", versions(m)),
        ]
        with_roof = {name: r for name, r in group.items() if r["measured"].get("ceilings")}
        for roof in [r["measured"]["ceilings"] for r in with_roof.values()][-1:]:
            rows.append(("copy, measured", f"{roof['copy_gbs']:.0f} GB/s, bytes read plus bytes written"))
            rows.append(("matmul, measured", ", ".join(f"{k} {v:.0f} TFLOP/s" for k, v in roof["tflops"].items())))
        parts += [grid(("", ""), rows, text=2), source(dict(list((with_roof or group).items())[-1:]))]
    return "\n\n".join(parts) or absent("bench")


def listed(tests: list[str]) -> str:
    """A few tests by name, more by their number in each file."""
    if len(tests) <= 3:
        return ", ".join(f"`{test}`" for test in tests)
    files = [test.partition("::")[0] for test in tests]
    return ", ".join(f"{files.count(file)} of `{file}`" for file in dict.fromkeys(files))


def gpu_tests(root: Path) -> str:
    """How the tests that need a GPU ended, as `make gpu-test` left it; a failure or a part that did not run is named."""
    parts = []
    for name, r in read(root, "gpu").items():
        found = r["measured"]
        counts = found["counts"]
        waiting = f", {counts['not run']:,} did not run" if counts["not run"] else ""
        others = {short(commit): len(tests) for commit, tests in found.get("at other commits", {}).items()}
        at = {short(r["commit"]): sum(counts.values()) - sum(others.values())} | others
        commits = ", ".join(f"`{commit}` ({n:,})" for commit, n in at.items()) if len(at) > 1 else f"`{short(r['commit'])}`"
        parts.append(
            f"{counts['passed']:,} GPU tests passed, {counts['failed']:,} failed, {counts['skipped']:,} skipped{waiting} "
            f"on {r['machine']['name']}, at commit{'s' if len(at) > 1 else ''} {commits}."
        )
        notes = {"failed": list(found["failed"]), "failed first, passed when run again": found["passed after failing"]}
        for test, why in found["skipped"].items():
            notes.setdefault(f"skipped, {why}", []).append(test)
        if lines := [f"- {what}: {listed(names)}" for what, names in notes.items() if names]:
            parts.append("\n".join(lines))
        parts.append(source({name: r}))
    return "\n\n".join(parts) or absent("gpu")


TABLES: dict[str, Callable[[Path], str]] = {
    "bench": bench, "summary": summary, "plans": plans, "machine": machine, "gpu-tests": gpu_tests,
    "checks": clinic_tables.checks, "predictions": clinic_tables.predictions, **decode.TABLES,
    "proved": proof_tables.proved, "mutants": proof_tables.mutants,
}


def regions(text: str) -> dict[str, str]:
    return {match[1]: match[2] for match in REGION.finditer(text)}


def fill(text: str, root: Path, name: str) -> str:
    """The text with every region made anew."""
    found = REGION.findall(text)
    if len(found) != len(OPENING.findall(text)):
        raise ValueError(f"{name}: a table region is not closed; it ends with the line <!-- /table -->")
    for region, _ in found:
        if region not in TABLES:
            raise ValueError(f"{name}: unknown table {region!r}; there are {', '.join(TABLES)}")
    return REGION.sub(lambda match: f"<!-- table:{match[1]} -->\n{TABLES[match[1]](root)}\n<!-- /table -->", text)


IMPLS = {
    "eager": "the reference as it stands", "compile": "torch.compile of the reference", "torch": "the best stock PyTorch call",
    "sdpa_flash": "SDPA held to its FlashAttention backend", "sdpa_efficient": "SDPA held to its memory-efficient backend",
    "sdpa_cudnn": "SDPA held to its cuDNN backend", "flex": "compiled FlexAttention", "liger": "Liger-Kernel's",
    "triton": "whet's own kernel", "triton_fused_bwd": "whet's own kernel, its backward in one pass",
    "triton_cudnn_bwd": "whet's own kernel forward, cuDNN's backward", "triton_fp8": "whet's own kernel in FP8",
}
NEEDS = {"torch": "-", "triton": "a GPU (or TRITON_INTERPRET=1)", "cudnn": "a GPU with cuDNN"}
OPS_HEAD = """\
<!-- made by `python -m whet.report.readme` from whet/ops; edits here are overwritten -->
# Ops

Each op is a function in `whet.ops`. It takes the reference's arguments, and `impl`: `"auto"` (what was chosen by measurement,
else the stock call) or the name of one impl. An impl that cannot serve the arguments raises a `ValueError` that says why;
`"auto"` gives way to the stock call instead. "Refuses" lists what an impl states it cannot do.
"""


def ops_page(ops: dict[str, Op]) -> str:
    links = ", ".join(f"[{name}](#{name})" for name in ops)
    return f"{OPS_HEAD}\n{links}\n" + "".join(op_section(op) for op in ops.values())


def op_section(op: Op) -> str:
    rows = [
        (name, IMPLS[name], NEEDS.get(impl.needs, f"`{impl.needs}` and a GPU"), "; ".join(impl.limits) or "-")
        for name, impl in op.impls.items()
    ]
    parameters = [*op.signature.parameters.values(), inspect.Parameter("impl", inspect.Parameter.KEYWORD_ONLY, default="auto")]
    changed = f" Changes in place: {', '.join(op.mutates)}." if op.mutates else ""
    gradients = f"Gradients: {', '.join(op.grads)}." if op.grads else "For inference: no gradients."
    notes = [
        f"{gradients}{changed} Untuned calls get `{op.stock}`.",
        f"Sizes bucketed by powers of two when tuned: {', '.join(op.dynamic) or 'none'}.",
        f"Shapes that `whet bench {op.name}` times: {', '.join(op.shapes)}.",
        *(note for name, impl in op.impls.items() for note in impl_notes(name, impl)),
    ]
    signature = f"{op.name}{op.signature.replace(parameters=parameters)}"
    meaning = f"```text\n{signature}\n\n{inspect.cleandoc(op.reference.__doc__ or '')}\n```"
    table = grid(("impl", "what it is", "needs", "refuses"), rows, text=4)
    return "\n\n".join((f"\n## {op.name}", meaning, table, "\n".join(notes))) + "\n"


def impl_notes(name: str, impl: Impl) -> list[str]:
    notes = {
        f"`impl=\"{name}\"` sets `{implied(impl)}` unless it is given.": impl.implies,
        f"`{name}` has tiles, tuned as candidates of their own: `{name}@<tile>`.": impl.tiles is not untiled,
        f"`{name}` is known to be inaccurate in {impl.known_inaccurate}. Tuning leaves it out there.": impl.known_inaccurate,
        f"A caveat of `{name}`: {impl.caveat}.": impl.caveat,
        f"`{name}` may spill registers on sm_90: {impl.spills}.": impl.spills,
    }
    return [text for text, true in notes.items() if true]


def rendered(root: Path) -> dict[Path, str]:
    """Every page that holds tables, as it should be."""
    pages = [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]
    return {path: fill(path.read_text(), root, path.name) for path in pages} | {root / "docs" / "ops.md": ops_page(discover())}


def stale(root: Path) -> dict[str, str]:
    """{page: what about it is out of step}; empty when nothing is."""
    found = {}
    for path, wanted in rendered(root).items():
        held = path.read_text() if path.exists() else ""
        if held != wanted:
            old, new = regions(held), regions(wanted)
            tables = [name for name in new if old.get(name) != new[name]]
            what = f"table {', '.join(tables)} is out of step with records/" if tables else "out of step with whet/ops"
            found[path.relative_to(root).as_posix()] = what
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whet.report.readme", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of step (default off)")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout (default: this file's)")
    options = parser.parse_args(argv)
    try:
        found, pages = stale(options.root), rendered(options.root)
    except ValueError as e:
        parser.error(str(e))
    for name, what in found.items():
        if options.check:
            print(f"{name}: {what}; run python -m whet.report.readme")
        else:
            (options.root / name).write_text(pages[options.root / name])
            print(f"{name}: rewritten")
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
