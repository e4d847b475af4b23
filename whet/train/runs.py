"""Run folders, read back: run.json and log.jsonl of a training run as a TrainRun.

    run = read_run("runs/gpt2-d12-20260101-120000")
    run.recipe, run.steps[-1].loss, run.vals[-1].loss, run.median("tok_s")

A last line that was cut off in writing is left out, and so is one that is damaged, which `damaged` counts. Where a log goes
back, as that of a resumed run may, the later lines count.
"""

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from whet.train.log import FORMAT, LOG, RUN, TASK

PAGE = "page.html"
FIGURES = ("loss", "lr", "grad_norm", "ms", "tok_s", "mfu", "memory_mib", "time_s")
WARM_UP = 10  # steps at the start, and after a resume, whose times are left out: they compile, and fill the allocator


@dataclass(frozen=True)
class StepLine:
    """One line of the log about a training step; None where the log has no finite figure."""

    step: int
    tokens: int
    loss: float | None
    lr: float | None = None
    grad_norm: float | None = None
    ms: float | None = None
    tok_s: float | None = None
    mfu: float | None = None
    memory_mib: float | None = None
    time_s: float | None = None


@dataclass(frozen=True)
class ValLine:
    """One evaluation. time_s: training time so far, without evaluations and checkpoints; sequences: that it ran over.

    exact_gp   of tasks: the log-likelihood a target that the exact GP gives
    """

    step: int
    tokens: int
    loss: float | None
    time_s: float | None = None
    sequences: int | None = None
    exact_gp: float | None = None


@dataclass(frozen=True)
class EventLine:
    step: int
    what: str
    text: str = ""


@dataclass(frozen=True)
class TrainRun:
    """A run folder. `facts` is run.json as it is."""

    path: Path
    facts: Mapping[str, Any]
    steps: list[StepLine] = field(default_factory=list)
    vals: list[ValLine] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    damaged: int = 0  # lines of the log that could not be read, but for a last one

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.facts["recipe"]

    @property
    def data(self) -> Mapping[str, Any]:
        return table(self.facts, "data")

    @property
    def machine(self) -> Mapping[str, Any]:
        return table(self.facts, "machine")

    @property
    def seed(self) -> int | None:
        found = self.facts.get("seed", table(self.recipe, "train").get("seed"))
        return None if found is None else int(found)

    @property
    def diverged(self) -> int | None:
        """The first step at which a loss was not finite; None where all were."""
        bad = [line.step for line in self.steps if line.loss is None] + [v.step for v in self.vals if v.loss is None]
        return min(bad, default=None)

    @property
    def final_loss(self) -> float | None:
        """The loss of the last evaluation."""
        return self.vals[-1].loss if self.vals else None

    @property
    def memory_mib(self) -> float | None:
        return max((line.memory_mib for line in self.steps if line.memory_mib is not None), default=None)

    def warm(self) -> list[StepLine]:
        """The steps whose times count: without WARM_UP steps at the start and after a resume; all, where none would be left."""
        starts = [0, *(e.step for e in self.events if e.what == "resume")]
        found = [line for line in self.steps if not any(s < line.step <= s + WARM_UP for s in starts)]
        return found or self.steps

    def median(self, key: str) -> float | None:
        """The median of a figure of the steps that are warm: "tok_s", "ms" or "mfu"."""
        values = [value for line in self.warm() if (value := getattr(line, key)) is not None]
        return statistics.median(values) if values else None

    def curve(self, axis: str) -> list[tuple[float, float]]:
        """The evaluations as (step, tokens or time_s; loss), without those that lack either."""
        pairs = ((getattr(v, axis), v.loss) for v in self.vals)
        return [(float(x), y) for x, y in pairs if x is not None and y is not None]

    def as_dict(self) -> dict:
        """run.json with the log, in plain values: what whet.report.run_pages takes."""
        found = {**self.facts, "name": self.name, "steps": [asdict(line) for line in self.steps]}
        found |= {"vals": [asdict(v) for v in self.vals], "events": [asdict(e) for e in self.events]}
        with contextlib.suppress(OSError, ValueError):  # runs on tokens have none
            found["task"] = json.loads((self.path / TASK).read_text(encoding="utf-8"))
        return found | {"medians": {key: self.median(key) for key in ("tok_s", "ms", "mfu")}}


def table(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def read_run(folder: str | Path) -> TrainRun:
    """The run in a folder; ValueError, in one line, where the folder is no run."""
    path = Path(folder)
    facts = read_facts(path)
    run, damaged = TrainRun(path, facts), 0
    lines = log_lines(path / LOG)
    for i, text in enumerate(lines, 1):
        try:
            add(run, json.loads(text))
        except (KeyError, TypeError, ValueError):
            damaged += i < len(lines)
    return replace(run, damaged=damaged)


class DamagedFacts(ValueError):
    """A run.json that is no JSON."""


def read_facts(path: Path) -> dict:
    if not path.is_dir():
        raise ValueError(f"run: there is no folder {path}; name a run folder, such as runs/NAME")
    try:
        facts = json.loads((path / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = len(list(path.glob(f"*/{RUN}")))
        hint = f"there are {inside} in it: name them, {path}/*" if inside else "name a folder that `whet train` wrote"
        raise ValueError(f"run: {path} is no run folder, it has no {RUN}; {hint}") from None
    except OSError as e:
        raise ValueError(f"run: {path / RUN} cannot be read ({e.strerror})") from None
    except ValueError as e:
        raise DamagedFacts(f"run: {path / RUN} is damaged ({e}); restore it from a copy") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("recipe"), dict):
        raise ValueError(f"run: {path / RUN} has no recipe; name a folder that `whet train` wrote")
    if facts.get("format") != FORMAT:
        known = f"format {facts.get('format')}, and this whet reads {FORMAT}"
        raise ValueError(f"run: {path / RUN} has {known}; use the whet that wrote it")
    return facts


def log_lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ValueError(f"run: {path} cannot be read ({e.strerror})") from None
    return [line for line in text.split("\n") if line.strip()]


def add(run: TrainRun, line: Any) -> None:
    """One line of the log to the run; a kind that is not known is passed over."""
    kind = line["kind"]
    if kind == "event":
        event = EventLine(int(line.get("step") or 0), str(line["what"]), str(line.get("text") or ""))
        if event.what == "resume":
            go_back(run, event.step)
        run.events.append(event)
    elif kind == "step":
        step = int(line["step"])
        if run.steps and step <= run.steps[-1].step:
            go_back(run, step - 1)
        run.steps.append(StepLine(step, int(line["tokens"]), **{key: finite(line.get(key)) for key in FIGURES}))
    elif kind == "val":
        loss, time_s, sequences = finite(line["loss"]), finite(line.get("time_s")), line.get("sequences")
        counted, exact = None if sequences is None else int(sequences), finite(line.get("exact_gp"))
        val = ValLine(int(line["step"]), int(line["tokens"]), loss, time_s, counted, exact)
        run.vals[:] = [v for v in run.vals if v.step < val.step] + [val]


def go_back(run: TrainRun, step: int) -> None:
    """Takes back the steps and evaluations after `step`: training goes on from there."""
    run.steps[:] = [line for line in run.steps if line.step <= step]
    run.vals[:] = [v for v in run.vals if v.step <= step]


def finite(value: Any) -> float | None:
    """A figure of the log, which writes those that are not finite as text; None for these, and where there is none."""
    known = math.nan if value is None else float(value)
    return known if math.isfinite(known) else None


def write_page(folder: str | Path) -> Path:
    """Writes page.html into a run folder: curves, choices, plan, recipe and events of the run."""
    from whet.report.run_pages import run_page

    run = read_run(folder)
    path = run.path / PAGE
    path.write_text(run_page(run.as_dict()), encoding="utf-8")
    return path
