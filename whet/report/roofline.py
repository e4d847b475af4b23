"""The roofline plot as plain geometry: the places of roofs, points and labels. The page's template draws it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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
    """A logarithmic axis, with some room at both ends."""

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
    right, top, bottom = width - 14.0, 10.0, height - 40.0
    y = Scale([*(p.tflops for p in points), min(rates.values()) / 10, max(rates.values())], bottom, top)
    left = round(24 + CHAR * max(len(text) for _, text in y.ticks(8)), 1)
    x = Scale([*(p.intensity for p in points), min(ridges) / 10, max(ridges) * 2], left, right)
    memory, inside = memory_roof(gbs, max(rates.values()), x, y), (left, 0.0, right, bottom)
    roofs = [{"x1": x(rate * 1e3 / gbs), "x2": right, "y": y(rate)} for rate in rates.values()]
    longest = max(p.ms for p in points)
    marks = [mark(i, p, x, y, longest, LARGE if named else 0.75 * LARGE) for i, p in enumerate(points, 1)]
    lines = [(r["x1"], r["y"] - 1, r["x2"], r["y"] + 1) for r in roofs] + slope(memory)
    room = Room(inside, [(m["x"] - m["r"], m["y"] - m["r"], m["x"] + m["r"], m["y"] + m["r"]) for m in marks], lines)
    names = roof_names(rates, y, room)
    memory |= slope_text(memory, room)
    for m, p in zip(marks, points):
        texts = [f"{m['number']} {ending(p.name)}"] if named else []
        m["label"] = placed(m, [*texts, str(m["number"])], room)
    return {
        "width": width, "height": height, "left": left, "right": right, "top": top, "bottom": bottom, "memory": memory,
        "x_ticks": [(at, text, min(at, width - CHAR * len(text) / 2)) for at, text in x.ticks(8 if named else 5)],
        "y_ticks": y.ticks(8), "roofs": roofs, "names": names, "marks": marks, "texts": room.texts,
    }


class Room:
    """Where texts may be placed: inside a box, off the points, off one another, and if possible off the lines of the roofs."""

    def __init__(self, inside: Box, points: list[Box], lines: list[Box]):
        self.inside, self.taken, self.lines = inside, points, lines
        self.texts: list[tuple[str, list[Box]]] = []  # placed so far

    def cost(self, boxes: list[Box]) -> float:
        """How much of a text would lie outside or cover something, in px²; 0: the place is free."""
        outside = sum(area(box) - shared(box, self.inside) for box in boxes)
        return outside + sum(shared(box, other) for box in boxes for other in self.taken)

    def take(self, places: Iterable[tuple[str, list[Box], Any]]) -> Any:
        """Takes the best place: free, else covering least; then the longest text; then off the lines; then the first.

        A place is a text, the boxes that it fills, and what to return.
        """
        def rank(place: tuple[str, list[Box], Any]) -> tuple[float, int, bool]:
            text, boxes, _ = place
            return self.cost(boxes), -len(text), any(overlap(box, line) for box in boxes for line in self.lines)

        text, boxes, found = min(places, key=rank)
        self.texts.append((text, boxes))
        self.taken = [*self.taken, *((b[0] - APART, b[1], b[2] + APART, b[3]) for b in boxes)]
        return found


def memory_roof(gbs: float, highest: float, x: Scale, y: Scale) -> dict:
    """The slope from the plot's left or bottom edge up to the highest compute roof."""
    start = max(10.0**x.low, 10.0**y.low * 1e3 / gbs)
    ends = {"x1": x(start), "y1": y(start * gbs / 1e3), "x2": x(highest * 1e3 / gbs), "y2": y(highest)}
    angle = math.degrees(math.atan2(ends["y2"] - ends["y1"], ends["x2"] - ends["x1"]))
    return {**ends, "text": f"copy {gbs:,.0f} GB/s", "angle": round(angle, 1)}


def slope_text(roof: dict, room: Room) -> dict:
    """The place of the slope's text along it, above the line or under it."""
    turn, half = math.radians(roof["angle"]), CHAR * len(roof["text"]) / 2
    steps = [half * i / 5 for i in range(-5, 6)]

    def place(part: float, side: int) -> tuple[str, list[Box], dict]:
        tx, ty = (round(roof[f"{axis}1"] + part * (roof[f"{axis}2"] - roof[f"{axis}1"]), 1) for axis in "xy")
        cx, cy = tx - side * 9 * math.sin(turn), ty + side * 9 * math.cos(turn)
        middles = [(cx + d * math.cos(turn), cy + d * math.sin(turn)) for d in steps]
        boxes = [(x - LINE / 2, y - LINE / 2, x + LINE / 2, y + LINE / 2) for x, y in middles]
        return roof["text"], boxes, {"tx": tx, "ty": ty, "dy": -5 if side < 0 else 13}

    return room.take(place(part / 20, side) for part in (6, 8, 10, 12, 14, 4, 16, 2) for side in (-1, 1))


def ending(name: str) -> str:
    """'model.layers.*.mlp.down x24' -> 'mlp.down x24': the table under the plot has the whole path."""
    return ".".join(name.split(".")[-2:]).removeprefix("*.")


def slope(roof: dict, parts: int = 60) -> list[Box]:
    """Small boxes over the line of the slope."""
    across, down = (roof["x2"] - roof["x1"]) / parts, (roof["y2"] - roof["y1"]) / parts
    ends = [(roof["x1"] + i * across, roof["y1"] + i * down) for i in range(parts)]
    return [(x, y + down, x + across, y) for x, y in ends]


def roof_names(rates: dict[str, float], y: Scale, room: Room) -> list[dict]:
    """A text at each compute roof; roofs too near each other share one, on the highest, where that is not too long."""
    left, right = room.inside[0] + 2, room.inside[2] - 2
    together: list[tuple[float, str]] = []
    for dtype, rate in sorted(rates.items(), key=lambda item: -item[1]):
        text = f"{dtype} {rate:,.{0 if rate >= 10 else 2}f}"
        joined = f"{together[-1][1]}, {text}" if together and y(rate) - together[-1][0] < LINE else ""
        if joined and CHAR * len(joined) <= right - left:
            together[-1] = (together[-1][0], joined)
        else:
            together.append((y(rate), text))
    names = []
    for at, text in together:
        ends = [right - dx for dx in range(0, int(right - left - CHAR * len(text)) + 1, 10)]
        spots = [(x, at + dy) for near in ((-8, 10), (-22, 24)) for x in ends or [right] for dy in near]
        x, middle = room.take((text, [box(*spot, text, "end")], spot) for spot in spots)
        names.append({"x": x, "y": round(middle + 4, 1), "text": text})
    return names


def mark(number: int, p: Point, x: Scale, y: Scale, longest: float, large: float) -> dict:
    r = max(SMALL, large * math.sqrt(p.ms / longest)) if longest else SMALL
    return {"number": number, "x": x(p.intensity), "y": y(p.tflops), "r": round(r, 1), "point": p}


def box(x: float, middle: float, text: str, anchor: str) -> Box:
    wide = CHAR * len(text)
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
    return left, middle - LINE / 2, left + wide, middle + LINE / 2


def placed(m: dict, texts: list[str], room: Room) -> dict:
    """The longest text at the nearest place beside its point that covers nothing, or no more than a roof's line."""
    return room.take(
        (text, [box(m["x"] + dx, m["y"] + dy, text, anchor)], label(m, dx, dy, text, anchor, away > AWAY[0]))
        for text in texts for away, dx, dy, anchor in places(m["r"])
    )


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


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def area(b: Box) -> float:
    return (b[2] - b[0]) * (b[3] - b[1])


def shared(a: Box, b: Box) -> float:
    """The area that two boxes have in common."""
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))) if overlap(a, b) else 0.0
