"""What the doctor looks at: a model and a batch, however they are given, made into a step that can be run again."""

import contextlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet import models
from whet.choices import current
from whet.figures import error_line
from whet.machine import this_machine
from whet.workload import NoLoss, Phase, Workload, find_loss

PLACES = ("stdlib", "purelib", "platlib")  # of Python and of packages
KINDS = ("train", "forward", "decode")
MEANS = "a built-in model (tiny-llama:tiny), file.py:function returning model and batch, or a script (file.py)"


class CannotRun(ValueError):
    """What was given cannot be run; the message says why, in one line."""


def raised_at(e: BaseException) -> str:
    """The same with the file and line of the user's own code that it came from, as far as any is in the traceback."""
    not_theirs = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *map(sysconfig.get_path, PLACES), "<")
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(not_theirs)]
    return error_line(e) + (f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else "")


@dataclass(kw_only=True)
class Target(Workload):
    """A workload that the doctor looks at, and what it knows of where it came from. kind may be "decode", too.

    loader                an iterable of batches, where the input pipeline is to be watched too
    step_with             replaces the step altogether: a decode step, or one of the user's own
    notes                 what could not be done as asked, and what is done instead
    script                what a script did while it ran: its first losses and clock readings (see script.py)
    """

    name: str
    loader: Any = None
    step_with: Callable[[], Any] | None = None
    notes: list[str] = field(default_factory=list)
    script: Any = None

    def step(self, phase: Phase = lambda name: contextlib.nullcontext()) -> torch.Tensor | None:
        if self.step_with is not None:
            return find_loss(self.step_with())
        try:
            return super().step(phase)
        except NoLoss as e:
            raise CannotRun(f"{self.name}: {e}") from None


def as_inputs(batch) -> tuple[tuple, dict]:
    """A batch as the arguments of a forward: a mapping by name, a tuple in order, anything else alone."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def resolve(text: str, kind: str | None = None, device: str | None = None) -> Target:
    """A Target from what a user types. Scripts are run by script.py, which makes its own."""
    device = device or this_machine().device
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        if not function:
            raise CannotRun(f"{text}: a script is run, not resolved")
        return of_function(Path(path), function, kind, device)
    try:
        model, size = models.find(text)
    except ValueError as e:
        raise CannotRun(f"{e}; a target is {MEANS}") from None
    config = model.sizes[size]
    module = model.build(config, model.tuned, current()).to(device)
    return target_of(f"{model.name}:{size}", (module, model.batch(config, model.recipes[size], device)), kind)


def load(path: Path):
    """The module in a file, run as `import` would."""
    if not path.exists():
        raise CannotRun(f"{path} does not exist; a target is {MEANS}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with imports_from_own_folder(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def imports_from_own_folder(path: Path):
    """A file's own folder is where its imports are looked for first, as when it is run."""
    home = str(path.resolve().parent)
    sys.path.insert(0, home)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the list
            sys.path.remove(home)


def of_function(path: Path, function: str, kind: str | None, device: str) -> Target:
    try:
        module = load(path)
    except CannotRun:
        raise
    except (Exception, SystemExit) as e:
        raise CannotRun(f"{path}: importing it raised {raised_at(e)}") from e
    made = getattr(module, function, None)
    if not callable(made):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise CannotRun(f"{path} has no function {function!r}; there are {', '.join(own) or 'none'}")
    try:
        given = made(**({"device": device} if "device" in inspect.signature(made).parameters else {}))
    except (Exception, SystemExit) as e:
        raise CannotRun(f"{path}:{function} raised {raised_at(e)}") from e
    return target_of(f"{path.name}:{function}", given, kind)


def target_of(name: str, given, kind: str | None = None) -> Target:
    """A Target of what a user's function returned: (model, batch), (model, batch, optimizer), a dict of these, or a Target."""
    if isinstance(given, Target):
        return given
    if isinstance(given, Mapping):
        known = {"model", "batch", "optimizer", "loader", "step"}
        if unknown := set(given) - known:
            raise CannotRun(f"{name}: returned {sorted(unknown)}; a dict may have {sorted(known)}")
        parts = dict(given)
    elif isinstance(given, (tuple, list)) and 2 <= len(given) <= 3:
        parts = dict(zip(("model", "batch", "optimizer"), given))
    else:
        raise CannotRun(f"{name}: must return model and batch, got {type(given).__name__}")
    if not isinstance(parts.get("model"), nn.Module):
        raise CannotRun(f"{name}: the model must be an nn.Module, got {type(parts.get('model')).__name__}")
    if isinstance(parts.get("batch"), torch.utils.data.DataLoader):
        parts["loader"] = parts.pop("batch")
    if parts.get("batch") is None and parts.get("loader") is not None:
        parts["batch"] = next(iter(parts["loader"]), ())
    args, kwargs = as_inputs(parts.get("batch", ()))
    target = Target(
        parts["model"], args, kwargs, kind or "train", parts.get("optimizer"),
        name=name, loader=parts.get("loader"), step_with=parts.get("step"),
    )
    return with_known_kind(target, asked=kind)


@contextlib.contextmanager
def state_preserved(model: nn.Module):
    """A model's buffers and the random generators as they were: what is only looked at leaves no trace in them."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, b in before:
                    buffer.copy_(b)


def with_known_kind(target: Target, asked: str | None) -> Target:
    """The kind made certain by running one forward: without a loss there is nothing to train."""
    if target.step_with is not None or target.kind != "train":
        return target
    try:
        with state_preserved(target.model):
            loss = find_loss(target.forward())
    except torch.OutOfMemoryError as e:
        raise CannotRun(f"{target.name}: out of memory in the forward: {str(e).splitlines()[0]}") from e
    except (Exception, SystemExit) as e:
        raise CannotRun(f"{target.name}: the forward raised {raised_at(e)}") from e
    if loss is None or not loss.requires_grad:
        if asked == "train":
            raise CannotRun(f"{target.name}: the model returned no loss to train on: a scalar, .loss or ['loss']")
        target.kind = "forward"
        why = "returned no loss" if loss is None else "returned a loss that needs no gradient"
        target.notes.append(f"the model {why}, so only its forward is looked at")
    return target
