"""A script run as it is, and watched: its model and first batch, its losses, and each reading of a clock.

Nothing of the script is changed. What it prints is kept aside.
"""

import contextlib
import io
import os
import runpy
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from whet.diagnose.target import CannotRun, Target, at_home
from whet.measure import now

CLOCKS = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
PROBED = 3  # how often a line is waited for, to learn how much work its reading missed


@dataclass
class Reading:
    """One line of the script that reads a clock."""

    line: str
    function: str
    times: int = 0
    pending: int = 0  # of these, how often GPU work was still going on
    missed_ms: list[float] = field(default_factory=list)  # what that work took yet, measured for the first few


@dataclass
class Script:
    path: Path
    readings: dict[str, Reading] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    replays: int = 0  # of CUDA graphs: such a script's launches are one
    seconds: float = 0.0
    printed: str = ""


class Watcher:
    def __init__(self, path: Path):
        self.script = Script(path)
        self.folder = str(path.resolve().parent)
        self.model: nn.Module | None = None
        self.inputs: tuple[tuple, dict] = ((), {})
        self.optimizer: torch.optim.Optimizer | None = None
        self.depth = 0

    def reads(self, clock: Callable) -> Callable:
        def read(*args):
            value = clock(*args)
            frame = sys._getframe(1)
            if os.path.realpath(frame.f_code.co_filename).startswith(self.folder):
                self.note(frame)
            return value

        return read

    def note(self, frame) -> None:
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        reading = self.script.readings.setdefault(line, Reading(line, frame.f_code.co_name))
        reading.times += 1
        if pending():
            reading.pending += 1
            if len(reading.missed_ms) < PROBED and reading.times > 2:  # the first calls also wait for compilers
                before = now()
                torch.cuda.synchronize()
                reading.missed_ms.append((now() - before) * 1e3)

    def called(self, module, args, kwargs) -> None:
        if self.model is None and any(True for _ in module.parameters()):
            self.model, self.inputs = module, (args, dict(kwargs))

    def backward(self, run: Callable) -> Callable:
        def backward(tensor, *args, **kwargs):
            self.script.steps += 1
            if tensor.dim() == 0 and len(self.script.losses) < 3:
                self.script.losses.append(float(tensor.detach()))
            return run(tensor, *args, **kwargs)

        return backward

    def replayed(self, run: Callable) -> Callable:
        def replay(graph):
            self.script.replays += 1
            return run(graph)

        return replay

    def stepped(self, optimizer, *_) -> None:
        self.optimizer = self.optimizer or optimizer

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        plain = {name: getattr(time, name) for name in CLOCKS}
        timer, backward = timeit.default_timer, torch.Tensor.backward
        replay = torch.cuda.CUDAGraph.replay
        hooks: list[Any] = [Calls(self.called), register_optimizer_step_pre_hook(self.stepped)]
        for name, clock in plain.items():
            setattr(time, name, self.reads(clock))
        timeit.default_timer = self.reads(timer)
        torch.Tensor.backward = self.backward(backward)  # type: ignore[method-assign,assignment]
        torch.cuda.CUDAGraph.replay = self.replayed(replay)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            for name, clock in plain.items():
                setattr(time, name, clock)
            timeit.default_timer = timer
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


class Calls:
    """A hook on every module's call that sees keyword arguments, which torch's global hook does not."""

    def __init__(self, called: Callable):
        self.plain = plain = nn.Module.__call__

        def call(module, *args, **kwargs):
            called(module, args, kwargs)
            return plain(module, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        nn.Module.__call__ = self.plain  # type: ignore[method-assign]


def pending() -> bool:
    """Whether GPU work that was asked for is not done."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.current_stream().query()


def run_script(path: Path, argv: list[str] | None = None) -> Target:
    """Run a script to its end, watched, and make a Target of the first model it called."""
    if not path.exists():
        raise CannotRun(f"{path} does not exist")
    watcher, printed = Watcher(path), io.StringIO()
    before, given = now(), sys.argv
    sys.argv = [str(path), *(argv or [])]
    try:
        with at_home(path), watcher.on(), contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as e:
        if e.code not in (0, None):
            raise CannotRun(f"{path}: it stopped with exit code {e.code}: {last_line(printed)}") from None
    except torch.OutOfMemoryError as e:
        raise CannotRun(f"{path}: out of memory: {str(e).splitlines()[0]}") from e
    except Exception as e:
        raise CannotRun(f"{path}: it raised {type(e).__name__}: {e}") from e
    finally:
        sys.argv = given
    script = watcher.script
    script.seconds, script.printed = now() - before, printed.getvalue()
    if watcher.model is None:
        raise CannotRun(f"{path}: it called no nn.Module with parameters, so there is nothing to look at")
    args, kwargs = watcher.inputs
    kind = "train" if script.steps else "forward"
    return Target(path.name, watcher.model, args, kwargs, kind, watcher.optimizer, script=script)


def last_line(printed: io.StringIO) -> str:
    return next((line for line in reversed(printed.getvalue().splitlines()) if line.strip()), "it printed nothing")
