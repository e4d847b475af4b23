"""Records -> the tables of README.md and docs/*.md, docs/results.md and the pictures; the code -> docs/ops.md and docs/api.md.

python -m whet.report.readme           rewrite them in place
python -m whet.report.readme --check   exit 1 if one is out of step with the records or with the code

A table lies between the lines `<!-- table:NAME -->` and `<!-- /table -->`; what is between them is generated, never edited.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from whet.choices import implied
from whet.op import Impl, Op, discover, untiled
from whet.report import api, bench_tables, clinic_tables, decode, front, pictures, proof_tables, run_tables, step_tables
from whet.report.markdown import grid, keep
from whet.report.templates import fill as fill_template

REGION = re.compile(r"^<!-- table:([\w-]+) -->\n(.*?)^<!-- /table -->$", re.M | re.S)
OPENING = re.compile(r"^<!-- table:", re.M)
TABLES: dict[str, Callable[[Path], str]] = {
    "bench": bench_tables.bench, "summary": bench_tables.summary, "machine": run_tables.machine, "plans": run_tables.plans,
    "gpu-tests": run_tables.gpu_tests, "gpu-counts": run_tables.gpu_counts, "optimize-run": front.optimize_run,
    "finding": front.finding, "ops": lambda root: bench_tables.summary(root, training=True),
    "decoders": lambda root: decode.summary(root, compared=True),
    "checks": clinic_tables.checks, "predictions": clinic_tables.predictions, **decode.TABLES,
    "ways": step_tables.summary, "families": step_tables.families,
    "proved": proof_tables.proved, "mutants": proof_tables.mutants,
}


def regions(text: str) -> dict[str, str]:
    return {match[1]: match[2] for match in REGION.finditer(text)}


def fill(text: str, root: Path, name: str) -> str:
    """The text with every region generated again."""
    found = REGION.findall(text)
    if len(found) != len(OPENING.findall(text)):
        raise ValueError(f"{name}: a table region is not closed; it ends with the line <!-- /table -->")
    for region, _ in found:
        if region not in TABLES:
            raise ValueError(f"{name}: unknown table {region!r}; there are {', '.join(TABLES)}")
    return REGION.sub(lambda match: f"<!-- table:{match[1]} -->\n{TABLES[match[1]](root)}\n<!-- /table -->", text)


NEEDS = {"torch": "-", "triton": "a GPU (or TRITON_INTERPRET=1)", "cudnn": "a GPU with cuDNN"}


def ops_page(ops: dict[str, Op]) -> str:
    links = ", ".join(f"[{name}](#{name})" for name in ops)
    return fill_template("ops.md.j2", links=links, sections="".join(op_section(op) for op in ops.values()))


def op_section(op: Op) -> str:
    rows = [
        (name, impl.words, NEEDS.get(impl.needs, f"`{impl.needs}` and a GPU"), "; ".join(impl.limits) or "-")
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


def results(root: Path) -> str:
    return fill_template("results.md.j2", table=lambda name: TABLES[name](root))


def made_whole(root: Path) -> dict[Path, str]:
    """The pages that are generated completely, and the pictures."""
    docs = root / "docs"
    pages = {docs / "ops.md": ops_page(discover()), docs / "api.md": api.page(), docs / "results.md": results(root)}
    return pages | pictures.rendered(root)


def rendered(root: Path) -> dict[Path, str]:
    """Every page with generated parts, with the text that it should have."""
    whole = made_whole(root)
    pages = [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]
    return {path: fill(path.read_text(), root, path.name) for path in pages if path not in whole} | whole


def stale(held: str, wanted: str) -> str:
    """The tables of a page that are out of step, for the line that reports it."""
    old, new = regions(held), regions(wanted)
    tables = [name for name in new if old.get(name) != new[name]]
    return f"table {', '.join(tables)} is " if tables else ""


def main(argv: list[str] | None = None) -> int:
    return keep("python -m whet.report.readme", __doc__ or "", rendered, argv, stale)


if __name__ == "__main__":
    sys.exit(main())
