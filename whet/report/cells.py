"""Figures and names as text for the cells of tables and pages; whet.figures formats a single figure."""

import math
import re
from collections.abc import Sequence

from markupsafe import Markup, escape

from whet.figures import SMALLEST, percent

LONG = 20  # letters of a word that fits any line, even on a phone


def number(value) -> float | None:
    """A finite figure, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def aligned(values: Sequence[float | None]) -> list[str]:
    """A column of figures with the same number of decimals: three digits for the smallest, at most five for the largest."""
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
    """HTML of a text, with a line break allowed after a dot, a colon or a bracket of its long paths and kernel names."""
    ends = r"(?<=[._/:,<(])(?=[^\s\d._/:,<(])"
    words = (re.split(ends, word) if len(word) > LONG else [word] for word in re.split(r"(?<=\s)", name))
    return Markup("").join(Markup("<wbr>").join(map(escape, parts)) for parts in words)
