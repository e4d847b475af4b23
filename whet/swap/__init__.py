"""Recognisers: find in a live model what whet has an op for, prove that the op computes the same, replace it, put it back.

A recogniser is one file here with a function `find(model, met)` that yields a Site for each place it would replace, and a
Left for each that it looked at and leaves alone, with the reason. No list to edit: every file without a leading
underscore is one. What a Site proposes is used only after `prove` (in _proof.py) ran the module both ways.
"""

import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

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


Edits = Callable[[nn.Module, Choices], Iterable[Edit]]


@dataclass(frozen=True)
class Site:
    """One replacement that a recogniser proposes, in one form or several that compute the same.

    path     of the module in the model; "" is the model itself
    edits    edits(module, ops) -> what makes this module, or a copy of it, ask `ops`
    words    what it is and what serves it: "RMSNorm of 1024, eps 1e-06"
    compares outputs, by their keys, that the proof compares; empty: all of them
    serves   serves(module) -> whether the replacement was what ran, asked after a run; None: it always is
    drops    "": nothing; else the logits are None afterwards: "unless kept", or only where that is "asked" for
    unasked  the reason to leave it where a run of it asks for no op at all: it took its own way out
    asks     False: it is meant to ask for no op, as where a product is padded; `serves` then says whether it ran
    form     the name of what `edits` does, where there is more to say than words and ops do: "padded to 1408"
    alone    False: it is proved and timed with all the others only, as what changes no result and saves work elsewhere
    forms    {name: edits} of other forms; each is proved for itself, and the fastest is used. The simplest first
    covers   (kind, path) of sites that have no effect where this one is replaced
    """

    path: str
    module: nn.Module
    edits: Edits
    words: str
    compares: tuple[str, ...] = ()
    serves: Callable[[nn.Module], bool] | None = None
    drops: str = ""
    unasked: str = "on this batch it comes to no op that could be replaced"
    covers: tuple[tuple[str, str], ...] = ()
    kind: str = ""
    asks: bool = True
    alone: bool = True
    form: str = ""
    forms: dict[str, Edits] = field(default_factory=dict)

    def in_each_form(self) -> list["Site"]:
        """This site in its own form, then in each of the others; none of them has others."""
        named = {self.form: self.edits} | self.forms
        return [replace(self, edits=edits, form=form, forms={}) for form, edits in named.items()]

    def in_form(self, name: str) -> "Site":
        """This site in this one of its forms, or in its first where it has none of the name."""
        named = {site.form: site for site in self.in_each_form()}
        return named.get(name, named[next(iter(named))])

    def with_forms(self, names: Iterable[str]) -> "Site":
        """This site with these of its forms alone."""
        first, *others = (s for s in self.in_each_form() if s.form in set(names))
        return replace(first, forms={s.form: s.edits for s in others})


@dataclass(frozen=True)
class Left:
    """A module that a recogniser looked at and leaves as it is."""

    path: str
    why: str
    kind: str = ""


def new_forward(module: nn.Module, forward: Callable) -> list[Edit]:
    """What gives a module another forward(self, ...), and keeps its own as self._whet_forward.

    Both are bound methods of the instance: a deep copy of the model gets its own. The new one has the signature of the old,
    which a Trainer reads to know what columns of a dataset, and generate to know what options, a model takes.
    """
    code, own = cast(types.FunctionType, forward), inspect.signature(module.forward)
    made = types.FunctionType(code.__code__, code.__globals__, code.__name__, code.__defaults__, code.__closure__)
    made.__kwdefaults__, made.__module__ = code.__kwdefaults__, code.__module__
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    made.__signature__ = own.replace(parameters=[self, *own.parameters.values()])  # type: ignore[attr-defined]
    return [Edit(module, "_whet_forward", module.forward), Edit(module, "forward", types.MethodType(made, module))]


ABSENT = object()


@dataclass
class Journal:
    """Edits that were made, so that each can be undone exactly, in the opposite order."""

    made: list[tuple[Edit, Any]] = field(default_factory=list)

    def make(self, edits: Iterable[Edit]) -> None:
        """One after the other: what is made lazily meets those before it."""
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
