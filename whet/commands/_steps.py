"""What `whet step` races: a Hugging Face folder, or what a user's function returns; alone, or several one after the other."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from whet.commands._folder import FolderOptions, folder_model
from whet.diagnose.target import resolve
from whet.figures import error_line
from whet.measure import free_memory
from whet.step_rivals import StepOptions, raced_steps
from whet.swap._optimize import Progress
from whet.workload import tensors_in


@dataclass(frozen=True)
class StepTarget:
    """A model with its batch, what a record says of them, and the options that make them again."""

    model: nn.Module
    batch: dict
    facts: dict
    options: str = ""


@dataclass(frozen=True)
class StepRun:
    """What was asked of every target: how folders are built, how ways are raced, and which."""

    folder: FolderOptions
    step: StepOptions
    ways: tuple[str, ...]


def is_function(target: str) -> bool:
    """Whether it is FILE.py:function, and no folder."""
    return target.partition(":")[0].endswith(".py")


def name_of(target: str) -> str:
    """As records call it: the folder's own name, or file.py:function."""
    return Path(target).name if is_function(target) else Path(target).expanduser().resolve().name


def of_target(target: str, options: FolderOptions) -> StepTarget:
    """The model and batch of a folder or of a function; ValueError in one line where they cannot be trained."""
    if is_function(target):
        return of_function(target)
    folder = Path(target).expanduser()
    taken = folder_model(folder, options)
    facts = {
        "target": name_of(target), "config": json.loads((folder / "config.json").read_text()),
        "batch": taken.shape, "dtype": taken.dtype, "weights": taken.weights,
    }
    return StepTarget(taken.model, taken.batch, facts, taken.options)


def of_function(target: str) -> StepTarget:
    """What FILE.py:function returned. An optimizer of its own is not used: every way has an AdamW."""
    path, _, function = target.partition(":")
    if not function:
        raise ValueError(f"step: {target} is a script; name a function of it that returns model and batch: {path}:function")
    given = resolve(target, "train")
    if given.step_with is not None or given.args or not given.kwargs:
        raise ValueError(f"step: {given.name} must return a model and a batch, a dict of what the forward takes by name")
    parameters = list(given.model.parameters())
    shapes = [list(t.shape) for t in tensors_in(given.kwargs) if t.dim()]
    facts = {
        "target": given.name, "config": f"{type(given.model).__name__}, {sum(p.numel() for p in parameters):,} parameters",
        "batch": shapes[0] if shapes else [], "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "weights": "as the function returns them",
    }
    return StepTarget(given.model, given.kwargs, facts)


def raced(taken: StepTarget, run: StepRun, progress: Progress) -> dict:
    """What is measured of one target."""
    rows = raced_steps(taken.model, taken.batch, run.step, progress, run.ways)
    return taken.facts | {"max_memory": run.step.max_memory, "ways": rows}


def raced_or_why(target: str, run: StepRun, progress: Progress) -> dict:
    """What is measured of one of several targets; of one that fails, what is known of it, and why."""
    facts: dict = {"target": name_of(target)}
    try:
        progress("building the model", 0, 1)
        taken = of_target(target, run.folder)
        facts = taken.facts
        return raced(taken, run, progress)
    except Exception as e:  # a target that fails costs its own row
        return facts | {"why": error_line(e)}


def naming(at: str, progress: Progress) -> Progress:
    """The same, with what it is about in front."""
    return lambda text, done, total: progress(f"{at}: {text}", done, total)


def raced_models(targets: Sequence[str], run: StepRun, progress: Progress) -> Iterator[dict]:
    """What is measured of each target. They share this process and the lock; nothing else of one stays for the next."""
    for i, target in enumerate(targets, 1):
        said = naming(f"{name_of(target)}, model {i} of {len(targets)}", progress)
        yield raced_or_why(target, run, said)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        free_memory()
