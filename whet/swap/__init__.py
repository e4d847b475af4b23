"""Recognisers: find in a live model what whet has an op for, prove that the op computes the same, replace it, put it back.

A recogniser is one file here with a function `find(model, met)` that yields a Site for each place it would replace, and a
Left for each that it looked at and leaves alone, with the reason. No list to edit: every file without a leading
underscore is one. What a Site proposes is used only after `prove` (in _proof.py) ran the module both ways.
"""

import functools
import importlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from whet.choices import Choices


@dataclass(frozen=True)
class Edit:
    """An attribute that one live object is given: its instance's own, so that no other object of its class changes."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Met:
    """What a module was called with, the first time in a forward of the batch."""

    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class Site:
    """One replacement that a recogniser proposes.

    path     of the module in the model; "" is the model itself
    edits    edits(module, ops) -> what makes this module, or a copy of it, ask `ops`
    words    what it is and what serves it: "RMSNorm of 1024, eps 1e-06"
    compares outputs, by their keys, that the proof compares; empty: all of them
    serves   serves(module) -> whether the replacement was what ran, asked after a run; None: it always is
    drops    "": nothing; else the logits are None afterwards: "unless kept", or only where that is "asked" for
    unasked  the reason to leave it where a run of it asks for no op at all: it took its own way out
    covers   (kind, path) of sites that have no effect where this one is replaced
    """

    path: str
    module: nn.Module
    edits: Callable[[nn.Module, Choices], list[Edit]]
    words: str
    compares: tuple[str, ...] = ()
    serves: Callable[[nn.Module], bool] | None = None
    drops: str = ""
    unasked: str = "on this batch it comes to no op that could be replaced"
    covers: tuple[tuple[str, str], ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Left:
    """A module that a recogniser looked at and leaves as it is."""

    path: str
    why: str
    kind: str = ""


def new_forward(module: nn.Module, forward: Callable) -> list[Edit]:
    """What gives a module another forward(self, ...), and keeps its own as self._whet_forward.

    Both are bound methods of the instance: a deep copy of the model gets its own.
    """
    return [Edit(module, "_whet_forward", module.forward), Edit(module, "forward", types.MethodType(forward, module))]


ABSENT = object()


@dataclass
class Journal:
    """Edits that were made, so that each can be undone exactly, in the opposite order."""

    made: list[tuple[Edit, Any]] = field(default_factory=list)

    def make(self, edits: list[Edit]) -> None:
        for edit in edits:
            own = edit.owner.__dict__
            self.made.append((edit, own.get(edit.name, ABSENT)))
            own[edit.name] = edit.value

    def undo(self) -> None:
        while self.made:
            edit, before = self.made.pop()
            if before is ABSENT:
                edit.owner.__dict__.pop(edit.name, None)
            else:
                edit.owner.__dict__[edit.name] = before


@functools.cache
def discover() -> dict[str, Callable[[nn.Module, dict[str, Met]], Iterator[Site | Left]]]:
    """{name: find} of every recogniser."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}").find for name in names}
