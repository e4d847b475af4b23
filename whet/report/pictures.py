"""Records -> the pictures of README, docs/pictures/*.svg: plain SVG text, so that the same record makes the same bytes.

python -m whet.report.pictures           draw them
python -m whet.report.pictures --check   exit 1 if one is out of step with the records

Light and dark follow the reader's setting. `python -m whet.report.readme` draws them too.
"""

import statistics
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from whet.report import bench_tables, run_tables
from whet.report.markdown import keep, ours, read, short
from whet.report.tables import plan_label
from whet.report.templates import fill

OFTEN = "for how many shapes whet's own kernel was chosen"
WIDTH, ROW, TOP, LEFT, RIGHT = 880, 26, 62, 312, 140  # px: the picture, a row, above the first, beside the bars


def text(x: float, y: float, content: str, kind: str = "", end: bool = False) -> str:
    anchor, style = ' text-anchor="end"' if end else "", f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{style}>{escape(content)}</text>'


def bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.0):.1f}" height="{ROW - 8}" rx="2" class="{kind}"/>'


def drawing(title: str, note: str, height: float, marks: list[str]) -> str:
    """A whole picture: a title that screen readers read too, a line under it, and what was drawn."""
    marks = [text(12, 24, title, "title"), text(12, 44, note, "note"), *marks]
    label = escape(title, {'"': "&quot;"})
    return fill("picture.svg.j2", width=WIDTH, height=round(height), label=label, marks=marks)


def plans(root: Path) -> str | None:
    """How long one training step takes by each plan, as bars. None where there is no record."""
    if (found := run_tables.main_run(root)) is None:
        return None
    name, r = found
    result = r["measured"]
    timed = [p for p in result["plans"] if p.get("ms")]
    longest, room, marks = max(p["ms"] for p in timed), WIDTH - LEFT - RIGHT, []
    for i, p in enumerate(timed):
        y, kind = TOP + i * ROW, "whet" if p.get("choices") == "tuned" else "stock"
        bold = "bold" if p["name"] == result["chosen"] else ""
        length = room * p["ms"] / longest
        marks += [
            text(LEFT - 10, y + 13, plan_label(p["name"]), bold, end=True), bar(LEFT, y, length, kind),
            text(LEFT + length + 8, y + 13, f"{p['ms']:.2f} ms, {p['speedup']:.2f}x", bold),
        ]
    bottom = TOP + len(timed) * ROW
    marks.append(text(12, bottom + 20, "green: whet's choices; grey: stock PyTorch; bold: the plan that was chosen", "note"))
    title = f"One training step of {result['target']} on {r['machine']['name']}"
    return drawing(title, f"records/{name}, commit {short(r['commit'])}; shorter is better", bottom + 32, marks)


def ops(root: Path) -> str | None:
    """Each op in a CUDA graph, forward and backward: a dot for each shape's speed-up, a bar up to their geometric mean."""
    for heading, used, entries in bench_tables.sections(read(root, "bench")):
        ratios: dict[str, list[tuple[float, bool]]] = {}
        for e in entries:
            if e["mode"] == "graph" and e["call"]["grad"] and (r := bench_tables.ratio(e)):
                ratios.setdefault(e["call"]["op"], []).append((r, ours(e, e["chosen"])))
        if ratios:
            return drawn_ops(heading, used, ratios)
    return None


def drawn_ops(heading: str, used: dict, ratios: dict[str, list[tuple[float, bool]]]) -> str:
    largest, room = max(r for some in ratios.values() for r, _ in some), WIDTH - LEFT - RIGHT
    scale, marks = room / (largest * 1.02), []
    one, bottom = LEFT + scale, TOP + len(ratios) * ROW
    for i, (op, some) in enumerate(ratios.items()):
        y, mean = TOP + i * ROW, statistics.geometric_mean([r for r, _ in some])
        won = sum(own for _, own in some)
        marks += [
            text(LEFT - 10, y + 13, op, end=True), bar(LEFT, y, scale * mean, "whet" if won else "stock"),
            *(f'<circle cx="{LEFT + scale * r:.1f}" cy="{y + (ROW - 8) / 2:.1f}" r="3.2" class="dot"/>' for r, _ in some),
            text(WIDTH - 12, y + 13, f"{mean:.2f}x, {won} of {len(some)}", end=True),
        ]
    marks += [
        f'<line x1="{one:.1f}" y1="{TOP - 6}" x2="{one:.1f}" y2="{bottom}" class="rule"/>',
        text(one, bottom + 14, "1x: the best without whet's kernels", "note", end=True),
        text(12, bottom + 32, f"bar: geometric mean; dot: one shape; at the right: the mean, and {OFTEN}", "note"),
    ]
    files = [f"records/{name}, commit {short(r['commit'])}" for name, r in used.items()]
    marks += [text(12, bottom + 50 + 16 * i, line, "note") for i, line in enumerate(files)]
    note = f"{heading}, in a CUDA graph: time of the fastest that is not whet's own kernel over the time of the chosen one"
    return drawing("Speed-up of each op", note, bottom + 46 + 16 * len(files), marks)


PICTURES = {"plans": plans, "ops": ops}


def rendered(root: Path) -> dict[Path, str]:
    """Every picture that there is a record for."""
    drawn = {root / "docs" / "pictures" / f"{name}.svg": draw(root) for name, draw in PICTURES.items()}
    return {path: svg for path, svg in drawn.items() if svg is not None}


def main(argv: list[str] | None = None) -> int:
    return keep("python -m whet.report.pictures", __doc__ or "", rendered, argv)


if __name__ == "__main__":
    sys.exit(main())
