"""The roofline plot as plain geometry: where the roofs, the points and their labels stand. The page's template draws it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

CHAR, LINE = 6.3, 14.0  # px that a letter and a line of the plot's 11 px text take, in the widest of the usual system fonts
SMALL, LARGE = 3.5, 8.0  # px, a point's radius: its area goes with its time
AWAY = (2, 14, 26, 40, 56)  # px from the point at which a label is tried
APART = 3.0  # px between one label and the next

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One module, or modules of one kind together."""

    name: str
    ms: float
    intensity: float  # flops per byte
    tflops: float  # reached
    share: float | None  # of the roof
    bound: str


class Scale:
    """A quantity along an axis of the plot, by its logarithm; room is left at both ends."""

    def __init__(self, values: list[float], start: float, end: float):
        self.low, self.high = math.log10(min(values) / 1.6), math.log10(max(values) * 1.6)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        first, last = math.ceil(self.low), math.floor(self.high)
        every = max(1, math.ceil((last - first + 1) / most))
        return [(self(10.0**n), decade(n)) for n in range(first, last + 1, every)]


def decade(n: int) -> str:
    return f"{10.0**n:,.{max(0, -n)}f}" if -4 < n < 7 else f"1e{n}"


def plot(points: list[Point], ceilings: dict, width: int, height: int, named: bool) -> dict | None:
    """What to draw, in px; None where there is no roof or no point. named: labels hold the name where it fits."""
    gbs, rates = ceilings.get("copy_gbs"), {k: v for k, v in (ceilings.get("tflops") or {}).items() if v and v > 0}
    if not (points and gbs and gbs > 0 and rates):
        return None
    ridges = [rate * 1e3 / gbs for rate in rates.values()]
    xs, ys = [p.intensity for p in points], [p.tflops for p in points]
    left, right, top, bottom = 46.0, width - 14.0, 10.0, height - 40.0
    x = Scale([*xs, min(ridges) / 10, max(ridges) * 2], left, right)
    y = Scale([*ys, min(rates.values()) / 10, max(rates.values())], bottom, top)
    inside = (left, top, right, bottom)
    memory = memory_roof(gbs, max(rates.values()), x, y)
    roofs = [{"x1": x(rate * 1e3 / gbs), "x2": right, "y": y(rate)} for rate in rates.values()]
    longest = max(p.ms for p in points)
    marks = [mark(i, p, x, y, longest, LARGE if named else 0.75 * LARGE) for i, p in enumerate(points, 1)]
    taken = [(m["x"] - m["r"], m["y"] - m["r"], m["x"] + m["r"], m["y"] + m["r"]) for m in marks] + along(memory)
    names = roof_names(rates, y, right, taken)
    lines = [(r["x1"], r["y"] - 1, r["x2"], r["y"] + 1) for r in roofs] + slope(memory)
    for m, p in zip(marks, points):
        texts = [f"{m['number']} {ending(p.name)}"] if named else []
        m["label"] = placed(m, [*texts, str(m["number"])], taken, lines, inside)
    return {
        "width": width, "height": height, "left": left, "right": right, "top": top, "bottom": bottom,
        "x_ticks": x.ticks(8 if named else 5), "y_ticks": y.ticks(8), "memory": memory, "roofs": roofs, "names": names,
        "marks": marks,
    }


def memory_roof(gbs: float, highest: float, x: Scale, y: Scale) -> dict:
    """The slope from the plot's left or bottom edge up to the highest compute roof, and its text along it."""
    start = max(10.0**x.low, 10.0**y.low * 1e3 / gbs)
    x1, y1, x2, y2 = x(start), y(start * gbs / 1e3), x(highest * 1e3 / gbs), y(highest)
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    middle = {"tx": round(x1 + 0.3 * (x2 - x1), 1), "ty": round(y1 + 0.3 * (y2 - y1), 1), "angle": round(angle, 1)}
    return {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "text": f"copy {gbs:,.0f} GB/s", **middle}


def along(roof: dict) -> list[Box]:
    """Small boxes over the text that runs along the slope."""
    turn, half = math.radians(roof["angle"]), CHAR * len(roof["text"]) / 2
    steps = [half * i / 5 for i in range(-5, 6)]
    middles = [(roof["tx"] + d * math.cos(turn) - 9 * math.sin(-turn), roof["ty"] + d * math.sin(turn) - 9) for d in steps]
    return [(x - LINE / 2, y - LINE / 2, x + LINE / 2, y + LINE / 2) for x, y in middles]


def ending(name: str) -> str:
    """'model.layers.*.mlp.down x24' -> 'mlp.down x24': the table under the plot has the whole path."""
    return ".".join(name.split(".")[-2:]).removeprefix("*.")


def slope(roof: dict, parts: int = 60) -> list[Box]:
    """Small boxes over the line of the slope."""
    across, down = (roof["x2"] - roof["x1"]) / parts, (roof["y2"] - roof["y1"]) / parts
    ends = [(roof["x1"] + i * across, roof["y1"] + i * down) for i in range(parts)]
    return [(x, y + down, x + across, y) for x, y in ends]


def roof_names(rates: dict[str, float], y: Scale, right: float, taken: list[Box]) -> list[dict]:
    """A text on each compute roof, under it where a point stands above; roofs too near each other share one, on the highest."""
    shared: list[tuple[float, str]] = []
    for dtype, rate in sorted(rates.items(), key=lambda item: -item[1]):
        text = f"{dtype} {rate:,.{0 if rate >= 10 else 2}f}"
        if shared and y(rate) - shared[-1][0] < LINE:
            shared[-1] = (shared[-1][0], f"{shared[-1][1]}, {text}")
        else:
            shared.append((y(rate), text))
    names = []
    for at, text in shared:
        above, below = (box(right - 2, at + side, text, "end") for side in (-8, 10))
        under = any(overlap(above, t) for t in taken) and not any(overlap(below, t) for t in taken)
        taken.append(below if under else above)
        names.append({"x": right - 2, "y": round(at + (14 if under else -4), 1), "text": text})
    return names


def mark(number: int, p: Point, x: Scale, y: Scale, longest: float, large: float) -> dict:
    r = max(SMALL, large * math.sqrt(p.ms / longest)) if longest else SMALL
    return {"number": number, "x": x(p.intensity), "y": y(p.tflops), "r": round(r, 1), "point": p}


def box(x: float, middle: float, text: str, anchor: str) -> Box:
    wide = CHAR * len(text)
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
    return left, middle - LINE / 2, left + wide, middle + LINE / 2


def placed(m: dict, texts: list[str], taken: list[Box], lines: list[Box], inside: Box) -> dict:
    """The longest text at the nearest place beside its point that covers nothing, or no more than a roof's line."""
    for text, covered in ((t, c) for t in texts for c in (taken + lines, taken)):
        for away, dx, dy, anchor in places(m["r"]):
            found = box(m["x"] + dx, m["y"] + dy, text, anchor)
            if within(found, inside) and not any(overlap(found, other) for other in covered):
                taken.append((found[0] - APART, found[1], found[2] + APART, found[3]))
                return label(m, dx, dy, text, anchor, away > AWAY[0])
    return label(m, m["r"] + AWAY[0], 0, texts[-1], "start", False)


def places(r: float) -> Iterator[tuple[float, float, float, str]]:
    """(how far, dx, dy, anchor) around a point of radius r, the nearest first."""
    for away in AWAY:
        gap = r + away
        yield from ((away, gap, 0, "start"), (away, -gap, 0, "end"))
        yield from ((away, 0, dy, "middle") for dy in (-gap - LINE / 2, gap + LINE / 2))
        yield from ((away, dx, dy, "start" if dx > 0 else "end") for dx in (gap, -gap) for dy in (-gap, gap))


def label(m: dict, dx: float, dy: float, text: str, anchor: str, led: bool) -> dict:
    x, y = m["x"] + dx, m["y"] + dy
    return {"text": text, "x": round(x, 1), "y": round(y + 4, 1), "anchor": anchor, "led": led, "to_y": round(y, 1)}


def within(inner: Box, outer: Box) -> bool:
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
