"""A script run as it is, and watched: its model and first batch, its losses, and each reading of a clock.

Nothing of the script is changed. What it prints is kept aside.
"""

import contextlib
import io
import itertools
import os
import runpy
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from whet.diagnose.modules import tensors_in
from whet.diagnose.target import CannotRun, Target, imports_from_own_folder, raised_at
from whet.diagnose.watch import state_of
from whet.figures import error_line
from whet.measure import now
from whet.workload import find_loss

CLOCKS = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
LOOKED = 16  # backwards of a script at most between which it is looked at whether gradients are cleared
SAMPLED = 2  # parameters of an optimizer that stand for the others
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
class Clearing:
    """Whether gradients are cleared between the steps of one optimizer."""

    line: str  # where its step is called
    sample: list[torch.Tensor]  # parameters whose gradient was not zero when it last stepped
    rounds: int = 0  # pairs of steps with a backward between them
    kept: int = 0  # of these, in how many the gradients were there whenever a backward began
    backwards: int = 0  # since the last step
    cleared: bool = False

    def stepped(self, sample: list[torch.Tensor]) -> None:
        if self.backwards and self.sample:
            self.rounds += 1
            self.kept += not self.cleared
        self.sample, self.backwards, self.cleared = sample, 0, False

    def backward(self) -> None:
        self.backwards += 1
        self.cleared = self.cleared or any(state_of(p.grad) in ("none", "zero") for p in self.sample)


@dataclass
class Script:
    path: Path
    readings: dict[str, Reading] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    classes: int | None = None  # over which the first loss is a mean cross-entropy, where it is one
    steps: int = 0
    replays: int = 0  # of CUDA graphs: such a script's launches are one
    seconds: float = 0.0
    printed: str = ""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # those that stepped
    clearing: dict[str, Clearing] = field(default_factory=dict)  # by the optimizer's class, numbered where there are several


@dataclass
class ModelCall:
    """A model called by the script itself: with what, in which modes, and the gradient that came back to what it returned."""

    model: nn.Module
    args: tuple
    kwargs: dict
    modes: list[tuple[nn.Module, bool]]
    autocast: tuple[str, torch.dtype] | None
    outside: bool  # the model returned no loss
    grads: dict[int, torch.Tensor] = field(default_factory=dict)  # by the tensor's place in what was returned
    loss: float = 0.0  # whose gradient it is

    def around(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])

    def loss_with(self, out) -> torch.Tensor | None:
        """A loss of the same value that hands the model the same gradient, for one that is computed outside the model."""
        outs = list(tensors_in(out))
        held = {i: g for i, g in self.grads.items() if i < len(outs) and outs[i].shape == g.shape and outs[i].requires_grad}
        return LossOutside.apply(self.loss, tuple(held.values()), *(outs[i] for i in held)) if held else None


class LossOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, grads, *outs):
        ctx.grads = grads
        return outs[0].new_full((), loss, dtype=torch.float32)

    @staticmethod
    def backward(ctx, *_):
        return None, None, *ctx.grads


class Watcher:
    def __init__(self, path: Path):
        self.script = Script(path)
        self.folder = str(path.resolve().parent)
        self.calls: list[ModelCall] = []  # up to the first backward
        self.first: ModelCall | None = None
        self.optimizers: dict[torch.optim.Optimizer, Clearing] = {}
        self.depth = 0
        self.loss = 0.0  # of the backward that is going on
        self.scaled: tuple[Any, Any] = (None, None)  # what a GradScaler made last, and of what

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

    def called(self, module, args, kwargs, out) -> None:
        """Of calls before the first backward the newest of each model is kept: an evaluation may come before the training."""
        done = self.script.steps or any(c.grads for c in self.calls)
        if done or not any(True for _ in module.parameters()):
            return
        device = next(module.parameters()).device.type
        on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
        cast = (device, torch.get_autocast_dtype(device)) if on else None
        call = ModelCall(module, args, dict(kwargs), [(m, m.training) for m in module.modules()], cast, find_loss(out) is None)
        self.first = self.first or call
        outs = [(i, t) for i, t in enumerate(tensors_in(out)) if t.requires_grad and t.grad_fn is not None]
        if outs:
            self.calls = [*(c for c in self.calls if c.model is not module), call]
        for i, t in outs:
            t.register_hook(lambda g, i=i: self.returned(call, i, g))

    def returned(self, call: ModelCall, i: int, grad: torch.Tensor) -> None:
        if i not in call.grads:
            call.grads[i], call.loss = grad.detach().clone(), self.loss

    def backward(self, run: Callable) -> Callable:
        def backward(tensor, *args, **kwargs):
            self.script.steps += 1
            readable = not capturing()
            for seen in self.optimizers.values() if readable and self.script.steps <= LOOKED else ():
                seen.backward()
            loss = self.scaled[1] if tensor is self.scaled[0] else tensor
            if readable and loss.dim() == 0 and len(self.script.losses) < 3:
                self.loss = float(loss.detach())
                self.script.classes = self.script.classes if self.script.losses else classes_of(loss)
                self.script.losses.append(self.loss)
            self.scaled = (None, None)
            return run(tensor, *args, **kwargs)

        return backward

    def scales(self, run: Callable) -> Callable:
        def scale(scaler, outputs):
            made = run(scaler, outputs)
            self.scaled = (made, outputs)
            return made

        return scale

    def replayed(self, run: Callable) -> Callable:
        def replay(graph):
            self.script.replays += 1
            return run(graph)

        return replay

    def stepped(self, optimizer, *_) -> None:
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = seen = Clearing(self.line(), [])
            name = type(optimizer).__name__
            again = sum(known.split(" ")[0] == name for known in self.script.clearing)
            self.script.clearing[f"{name} {again + 1}" if again else name] = seen
            self.script.optimizers.append(optimizer)
        if self.script.steps <= LOOKED and not capturing():
            given = (p for group in optimizer.param_groups for p in group["params"] if state_of(p.grad) == "ok")
            self.optimizers[optimizer].stepped(list(itertools.islice(given, SAMPLED)))

    def line(self) -> str:
        """The innermost line of the script's own folder."""
        frame = sys._getframe(1)
        while frame is not None:
            if os.path.realpath(frame.f_code.co_filename).startswith(self.folder):
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def chosen(self) -> ModelCall | None:
        """The largest model that a gradient came back to; of a script that trains none, the first it called."""
        trained = [c for c in self.calls if c.grads]
        return max(trained, key=lambda c: sum(p.numel() for p in c.model.parameters()), default=self.first)

    def target(self) -> Target | None:
        call = self.chosen()
        if call is None:
            return None
        for module, training in call.modes:
            module.training = training
        own = {id(p) for p in call.model.parameters()}
        fits = [o for o in self.optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
        target = Target(
            call.model, call.args, call.kwargs, "train" if call.grads else "forward", fits[0] if fits else None,
            name=self.script.path.name, script=self.script, around=call.around, loss_with=call.loss_with,
        )
        others = [c for c in self.calls if c.grads and c is not call]
        if others:
            name = type(call.model).__name__
            target.notes.append(f"the script trains {len(others) + 1} models; the largest, {name}, is looked at")
        if call.grads and call.outside:
            target.notes.append("the script makes its loss outside the model: that loss's gradient is used, its time left out")
        if self.script.steps and not call.grads:
            target.notes.append("no gradient of the script's came back to this model, so only its forward is looked at")
        return target

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        plain = {name: getattr(time, name) for name in CLOCKS}
        timer, backward = timeit.default_timer, torch.Tensor.backward
        replay, scale = torch.cuda.CUDAGraph.replay, torch.amp.GradScaler.scale
        hooks: list[Any] = [Calls(self), register_optimizer_step_pre_hook(self.stepped)]
        for name, clock in plain.items():
            setattr(time, name, self.reads(clock))
        timeit.default_timer = self.reads(timer)
        torch.Tensor.backward = self.backward(backward)  # type: ignore[method-assign,assignment]
        torch.cuda.CUDAGraph.replay = self.replayed(replay)  # type: ignore[method-assign,assignment]
        torch.amp.GradScaler.scale = self.scales(scale)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            for name, clock in plain.items():
                setattr(time, name, clock)
            timeit.default_timer = timer
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
            torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


class Calls:
    """A hook on the calls of modules that no module makes. It sees keyword arguments, which torch's global hook does not."""

    def __init__(self, watcher: Watcher):
        self.plain = plain = nn.Module.__call__

        def call(module, *args, **kwargs):
            if torch.compiler.is_compiling() or watcher.depth:
                return plain(module, *args, **kwargs)
            watcher.depth += 1
            try:
                out = plain(module, *args, **kwargs)
            finally:
                watcher.depth -= 1
            watcher.called(module, args, kwargs, out)
            return out

        nn.Module.__call__ = call  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        nn.Module.__call__ = self.plain  # type: ignore[method-assign]


def capturing() -> bool:
    """Whether a CUDA graph is being captured: no value can be read on the host until it is replayed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def pending() -> bool:
    """Whether GPU work that was asked for is not done."""
    ready = torch.cuda.is_available() and torch.cuda.is_initialized() and not capturing()
    return ready and not torch.cuda.current_stream().query()


def run_script(path: Path, argv: list[str] | None = None) -> Target:
    """Run a script to its end, watched, and make a Target of the first model it called."""
    if not path.exists():
        raise CannotRun(f"{path} does not exist")
    watcher, printed, errors = Watcher(path), io.StringIO(), io.StringIO()
    before, given, folder, grad = now(), sys.argv, os.getcwd(), torch.is_grad_enabled()
    sys.argv = [str(path), *(argv or [])]
    try:
        aside = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors)
        with imports_from_own_folder(path), watcher.on(), silenced(sys.stdout, 1), aside[0], aside[1]:
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as e:
        if e.code not in (0, None):
            code = f"exit code {e.code}: {last_line(errors, printed)}" if isinstance(e.code, int) else error_line(e)
            raise CannotRun(f"{path}: it stopped with {code}") from None
    except torch.OutOfMemoryError as e:
        raise CannotRun(f"{path}: out of memory: {str(e).splitlines()[0]}") from e
    except Exception as e:
        raise CannotRun(f"{path}: it raised {raised_at(e)}") from e
    finally:
        sys.argv = given
        os.chdir(folder)
        torch.set_grad_enabled(grad)
    script = watcher.script
    script.seconds, script.printed = now() - before, printed.getvalue()
    target = watcher.target()
    if target is None:
        raise CannotRun(f"{path}: it called no nn.Module with parameters, so there is nothing to look at")
    return target


def classes_of(loss: torch.Tensor) -> int | None:
    """Over how many classes a loss is the mean cross-entropy: read from the two nodes that F.cross_entropy leaves behind it."""
    node = loss.grad_fn
    if node is None or not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", None) != 1:
        return None
    below = node.next_functions[0][0]
    made = below is not None and below.name().startswith("LogSoftmax")
    return below._saved_result.shape[1] if made else None  # type: ignore[union-attr]


@contextlib.contextmanager
def silenced(stream: TextIO, fd: int) -> Iterator[None]:
    """What is written to a stream past Python, by libraries and child processes, is dropped."""
    stream.flush()
    kept = os.dup(fd)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), fd)
        try:
            yield
        finally:
            os.dup2(kept, fd)
            os.close(kept)


def last_line(*printed: io.StringIO) -> str:
    """The last line that was printed, errors before the rest."""
    lines = [line for stream in printed for line in reversed(stream.getvalue().splitlines()) if line.strip()]
    return lines[0] if lines else "it printed nothing"
