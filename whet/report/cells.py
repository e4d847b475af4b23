"""Figures and names as the cells of a page's tables; a figure alone is written by whet.figures, here as in a finding."""

import math
import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from whet.figures import SMALLEST, percent

LONG = 20  # letters of a word that fits any line, even on a phone

def number(value) -> float | None:
    """A finite figure, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def aligned(values: Sequence[float | None]) -> list[str]:
    """One column of figures with one number of decimals: three digits for the smallest, unless the largest gets over five."""
    sizes = [abs(v) for v in values if v is not None and abs(v) >= SMALLEST]
    if not sizes:
        return ["-" if v is None else "0" for v in values]
    most, least = (math.floor(math.log10(size)) for size in (max(sizes), min(sizes)))
    decimals = max(0, min(4, 4 - most, 2 - least))
    return ["-" if v is None else f"{v:,.{decimals}f}" for v in values]


def shown(value, form: str = ",.1f", unit: str = "") -> str:
    known = number(value)
    return "-" if known is None else f"{known:{form}}{unit}"


def text(value: float | None) -> str:
    return aligned([value])[0]


def share(part: float | None, whole: float | None) -> str:
    return percent(part / whole) if part is not None and whole else "-"


def breakable(name: str) -> Markup:
    """A text whose long paths and kernel names may go on in the next line after a dot, a colon, a bracket."""
    ends = r"(?<=[._/:,<(])(?=[^\s\d._/:,<(])"
    words = (re.split(ends, word) if len(word) > LONG else [word] for word in re.split(r"(?<=\s)", name))
    return Markup("").join(Markup("<wbr>").join(map(escape, parts)) for parts in words)


def figures(cells: Sequence) -> list[str]:
    """A column of times aligned; of counts, or of figures that are texts already, as they stand."""
    if not any(isinstance(c, (str, int)) for c in cells):
        return aligned(cells)
    return [f"{c:,}" if isinstance(c, int) else c or "-" for c in cells]


def table(columns: str, rows: Iterable[Sequence], marked: Iterable[bool] = (), codes: Sequence[str] = ()) -> dict | None:
    """columns are split at |; a name that starts with # holds figures. codes: the columns of names out of a program.

    A column that says nothing is left out.
    """
    names = columns.split("|")
    cells = list(zip(*rows))
    if not cells:
        return None
    for i, name in enumerate(names):
        if name.startswith("#"):
            cells[i] = tuple(figures(cells[i]))
        elif name in codes:
            cells[i] = tuple(breakable(c) for c in cells[i])
    kept = [i for i, column in enumerate(cells) if i == 0 or any(c not in ("", "-") for c in column)]
    names, cells = [names[i] for i in kept], [cells[i] for i in kept]
    head = [{"name": n.removeprefix("#"), "figures": n.startswith("#"), "code": n in codes} for n in names]
    body = [{"cells": row, "marked": False, "whole": ""} for row in zip(*cells)]
    for row, chosen in zip(body, marked):
        row["marked"] = bool(chosen)
    return {"columns": head, "rows": body}
