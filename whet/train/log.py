"""What a run leaves behind as it goes: run.json, log.jsonl, a tracker's curves, and a line for whoever watches."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.figures import error_line
from whet.trackers import log_choices

Progress = Callable[[str, int, int], None]
RUN, LOG, TASK, FORMAT = "run.json", "log.jsonl", "task.json", 1


def read_log(path: Path) -> list[dict]:
    """The lines of a log; one that is damaged, as a last one that was cut short by a kill, is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


class RunLog:
    """The log of a run. Only rank 0 writes; the others' is silent.

    say    prints a line
    live   shows a line in the place of the one before, with the step and the number of steps
    """

    def __init__(self, folder: Path, writes: bool, say: Callable[[str], None], live: Progress = lambda text, done, total: None):
        self.folder, self.writes, self.live = folder, writes, live
        self.say = say if writes else lambda text: None
        self.path = folder / LOG
        self.tensorboard: Any = None
        self.wandb: Any = None

    def start(self, facts: dict, tensorboard: bool, wandb: str, step: int = 0) -> None:
        """run.json, and the trackers that were asked for; one that cannot be had is an error before any step.

        step   from which the run goes on: TensorBoard hides what an earlier process wrote of later ones
        """
        if not self.writes:
            return
        writer, package = self.packages(tensorboard, wandb)
        self.facts(facts)  # once nothing is missing: a folder with run.json is a run
        if writer is not None:
            self.tensorboard = writer.SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else None)
        if package is not None:
            where: Any = dict(name=self.folder.name, dir=str(self.folder), mode=wandb, id=facts["id"], resume="allow")
            try:
                self.wandb = package.init(project="whet", config=facts["recipe"], **where)
            except Exception as e:  # no login, no network: wandb has an error for each
                fix = f"begin with --resume and run.wandb=offline, or without it; {self.folder} has no step yet"
                raise ValueError(f"train: run.wandb={wandb}: {error_line(e)}; {fix}") from None

    def packages(self, tensorboard: bool, wandb: str) -> tuple[Any, Any]:
        """Those of the trackers that are asked for; None for the others. ValueError where one is missing."""
        asked = {"torch.utils.tensorboard": ("tensorboard", tensorboard), "wandb": ("wandb", wandb)}
        writer, package = (self._package(m, name) if self.writes and on else None for m, (name, on) in asked.items())
        return writer, package

    @staticmethod
    def _package(module: str, name: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as e:
            if importlib.util.find_spec(name):
                why = f"the package {name}, which cannot be imported: {error_line(e)}; pip install --upgrade {name}"
            else:
                why = f"the package {name}, which is not installed: pip install {name}, or whet with its extra, whet[{name}]"
            raise ValueError(f"train: run.{name} needs {why}") from None

    def facts(self, facts: dict) -> None:
        """Write run.json."""
        self._file(RUN, facts)

    def task(self, facts: dict) -> None:
        """Write task.json: a held-out task as the model predicts it by now."""
        self._file(TASK, facts)

    def _file(self, name: str, facts: dict) -> None:
        if not self.writes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            made = self.folder / f".{name}.tmp"
            made.write_text(json.dumps(facts, indent=1) + "\n")
            os.replace(made, self.folder / name)
        except OSError as e:
            why = f"{self.folder} cannot be written: {e.strerror or e}; name another by --name or --runs"
            raise ValueError(f"train: {why}") from None

    def cut_back(self, step: int) -> None:
        """Forget what was logged after this step: a resumed run goes on from there."""
        if self.writes and self.path.exists():
            kept = [line for line in read_log(self.path) if line.get("step", 0) <= step]
            made = self.folder / f".{LOG}.tmp"
            made.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(made, self.path)

    def write(self, **line: Any) -> None:
        """One line; figures also go to the trackers. A number that is not finite is written as text: JSON has none."""
        if not self.writes:
            return
        plain = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            with open(self.path, "a") as f:
                f.write(json.dumps(plain) + "\n")
        except OSError as e:
            fix = "checkpoints are intact; once there is room, go on with --resume"
            raise ValueError(f"train: {self.path} cannot be written: {e.strerror or e}; {fix}") from None
        self._track(line)

    def _track(self, line: dict) -> None:
        step, kind = line.get("step", 0), line["kind"]
        figures = {f"{kind}/{k}": v for k, v in line.items() if isinstance(v, (int, float)) and k not in ("step",)}
        try:
            if self.tensorboard is not None:
                for name, value in figures.items():
                    self.tensorboard.add_scalar(name, value, step)
            if self.wandb is not None and figures:
                self.wandb.log(figures, step=step)
        except Exception as e:  # a tracker that fails costs its curve, never the run
            print(f"whet: the tracker took no more: {error_line(e)}", file=sys.stderr)
            self.tensorboard = self.wandb = None

    def event(self, step: int, what: str, text: str) -> None:
        self.write(kind="event", step=step, what=what, text=text)
        self.say(text)

    def choices(self, text: str, figures: dict[str, float]) -> None:
        """The kernel choices, into the run summary of whatever tracker is open."""
        if self.tensorboard is not None:
            log_choices("kernels", text, figures, self.tensorboard)
        if self.wandb is not None:
            log_choices("kernels", text, figures)

    def close(self) -> None:
        """Trackers too; a run that an exception ends is shown as failed."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(sys.exc_info()[0] is not None))


def step_line(at: dict, unit: str = "tok") -> str:
    """'step 120/1000  loss 3.412  1,234 tok/s  41% MFU  5.1 GiB  4:10 left'."""
    parts = [f"step {at['step']}/{at['steps']}", f"loss {at['loss']:.4f}"]
    parts += [f"lr {at['lr']:.2e}"] if at.get("lr") is not None else []
    parts.append(f"{at['tok_s']:,.0f} {unit}/s")
    if at.get("mfu") is not None:
        parts.append(f"{100 * at['mfu']:.0f}% MFU")
    if at.get("memory_mib") is not None:
        parts.append(f"{at['memory_mib'] / 1024:.1f} GiB")
    left = round(at["left_s"])
    return "  ".join([*parts, f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"])
