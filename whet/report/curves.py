"""Curves over a linear axis as plain geometry: ticks, and the paths of lines. curves.html.j2 draws them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from whet.report.roofline import CHAR

Points = Sequence[tuple[float, float]]
ARMS = 5  # colours; after that they come again, dashed
SIZES = (("wide", 1000, 360, 10, 7), ("narrow", 330, 260, 5, 5))  # class, px, px, and ticks across and up at most
START = 0.15  # of the axis: how high a loss was before that does not count, or nothing after it could be seen
SMOOTHED = 40  # an average runs over the number of lines of a log divided by this,
LONGEST = 100  # and over so many lines at most


@dataclass(frozen=True)
class Curve:
    """One line of a chart. arm: which colour; faint: one that stands behind; dots: its points are few and are marked.

    shape   "line"; "area": filled, its points go around it; "scatter": its points alone
    """

    name: str
    points: Points
    arm: int = 0
    faint: bool = False
    dots: bool = False
    shape: str = "line"

    @property
    def look(self) -> str:
        """Its CSS classes."""
        shape = f" {self.shape}" if self.shape != "line" else ""
        return f"arm{self.arm % ARMS}" + " dashed" * (self.arm >= ARMS) + " faint" * self.faint + shape


def smoothed(points: Points) -> tuple[list[tuple[float, float]], int]:
    """Exponential moving average without the bias of its start, and the number of points that it runs over."""
    span = max(1, min(LONGEST, len(points) // SMOOTHED))
    keep, total, weight, found = 1 - 2 / (span + 1), 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + 1 - keep
        found.append((x, total / weight))
    return found, span


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """Few enough points to draw: of each part the first, lowest, highest and last, so that no dip is lost."""
    if len(points) <= most:
        return list(points)
    found: list[tuple[float, float]] = []
    parts = max(1, most // 4)
    for i in range(parts):
        part = range(len(points) * i // parts, len(points) * (i + 1) // parts)
        ends = {part[0], part[-1], min(part, key=lambda j: points[j][1]), max(part, key=lambda j: points[j][1])}
        found += [points[j] for j in sorted(ends)]
    return found


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Round values between the two, 1, 2 or 5 apart in some decade, with as many decimals as they need."""
    least = (high - low) / max(1, most - 1)
    decade = 10.0 ** math.floor(math.log10(least))
    apart = next(decade * n for n in (1, 2, 5, 10) if decade * n >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(apart) + 1e-9))
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    return [(n * apart, f"{n * apart + 0.0:,.{decimals}f}") for n in range(first, last + 1)]


def below(points: Points, top: float) -> list[list[tuple[float, float]]]:
    """The parts of a line that lie under `top`, each ending where the line crosses it."""
    parts: list[list[tuple[float, float]]] = [[points[0]] if points and points[0][1] <= top else []]
    for (x0, y0), (x1, y1) in pairwise(points):
        if (y0 <= top) != (y1 <= top):
            cross = (x0 + (x1 - x0) * (top - y0) / (y1 - y0), top)
            parts[-1:] = [[*parts[-1], cross], []] if y0 <= top else [*parts[-1:], [cross]]
        if y1 <= top:
            parts[-1].append((x1, y1))
    return [part for part in parts if part]


def span_of(curves: Sequence[Curve], zero: bool, cut: bool) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) of what is drawn. zero: from 0 on; cut: a high start does not count for the top."""
    xs = [x for c in curves for x, _ in c.points]
    left, right = min(0.0, *xs), max(xs)
    after = [y for c in curves for x, y in c.points if not cut or x >= left + START * (right - left)]
    low, high = 0.0 if zero else min(after), max(after)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return left, right if right > left else left + 1.0, low - room * (not zero), high + room


def chart(curves: Sequence[Curve], size: tuple, x_title: str, y_title: str, zero=False, cut=False) -> dict | None:
    """What to draw, in px; None where no curve has a point."""
    curves = [c for c in curves if c.points]
    if not curves:
        return None
    name, width, height, across, up = size
    low_x, high_x, low, high = span_of(curves, zero, cut)
    marks, right, top, bottom = ticks(low, high, up), width - 14.0, 24.0, height - 38.0
    left = round(10 + CHAR * max((len(text) for _, text in marks), default=1), 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(left + (x - low_x) / (high_x - low_x) * (right - left), 1),
            round(bottom - (y - low) / (high - low) * (bottom - top), 1),
        )

    def inside(text: str, at: float) -> float:
        return round(min(max(at, CHAR * len(text) / 2), width - CHAR * len(text) / 2), 1)

    lines = []
    for c in curves:
        most = width // 2 if c.shape == "line" else len(c.points)  # the others are few, and not in the order of x
        parts = [[place(*p) for p in part] for part in below(thinned(c.points, most), high)] if c.shape != "scatter" else []
        path = " ".join(f"M{part[0][0]} {part[0][1]}" + "".join(f" L{x} {y}" for x, y in part[1:]) for part in parts)
        path += " Z" * (c.shape == "area")
        marked = c.shape == "scatter" or c.dots and len(c.points) <= width // 12
        dots = [place(x, y) for x, y in c.points if y <= high] if marked else []
        lines.append({"name": c.name, "look": c.look, "path": path, "dots": dots})
    x_marks = [(place(x, low)[0], text) for x, text in ticks(low_x, high_x, across)]
    return {
        "size": name, "width": width, "height": height, "left": left, "right": right, "top": top, "bottom": bottom,
        "x_ticks": [(at, text, inside(text, at)) for at, text in x_marks],
        "y_ticks": [(place(low_x, y)[1], text) for y, text in marks],
        "x_title": x_title, "y_title": y_title, "lines": lines,
        "cut": high if any(y > high for c in curves for _, y in c.points) else None,
    }


def charts(curves: Sequence[Curve], x_title: str, y_title: str, zero=False, cut=False) -> list[dict]:
    """The chart for a wide page and for a phone; nothing where there is no point."""
    drawn = [chart(curves, size, x_title, y_title, zero, cut) for size in SIZES]
    return [d for d in drawn if d is not None]
