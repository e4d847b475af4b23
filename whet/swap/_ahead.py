"""Candidates are verified by children while the model's parts are still being proved, one after another, in this process.

What the parts will ask for is known once one of each kind is found: the rest of a kind is taken for right until it is proved.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from whet.choices import Choices
from whet.judge import Verdict
from whet.measure import free_memory
from whet.op import Call
from whet.swap import Met, Site
from whet.swap._alike import form_of
from whet.swap._groups import recorded
from whet.swap._kept import name_of
from whet.tune import Tuned, Tuning

if TYPE_CHECKING:
    from whet.swap._optimize import OptimizeTask

OUT_OF_MEMORY = "OutOfMemoryError"  # as error_line says it
T = TypeVar("T")


def but_the_first(sites: list[Site], seen: dict[str, Met], ops: Choices) -> dict[int, Verdict]:
    """{id of a site: right} of all but the first of each kind of like modules."""
    firsts: dict[tuple, int] = {}
    for site in sites:
        firsts.setdefault((name_of(site), form_of(site.module)), id(site))
    return {id(s): Verdict(True) for s in sites if id(s) not in firsts.values()}


class Ahead:
    """The tuning that was started for these calls."""

    def __init__(self, calls: list[tuple[Call, int]], tuning: Tuning):
        self.calls, self.tuning, self.used = in_order(calls), tuning, False

    def wait(self) -> None:
        """Until the children are done, and hold no memory any more."""
        if self.tuning.work is not None:
            self.tuning.work.hands.wait()
        free_memory()

    def tuned(self, calls: list[tuple[Call, int]], seconds: float) -> Tuned | None:
        """What serves these calls, where they are those that were expected; None: what was verified is in the lock."""
        if self.used:
            return None
        self.used = True
        if in_order(calls) == self.calls:
            return self.tuning.finish(seconds)
        self.wait()  # two tunings would verify the same
        return None


def with_memory(ahead: Ahead | None, run: Callable[[], T], short: Callable[[T], bool] = lambda made: False) -> T:
    """What it gives; where memory was short beside the children, what it gives once they are done.

    short   whether memory was short, of a result that says so
    """
    try:
        made = run()
        if ahead is None or not short(made):
            return made
    except torch.OutOfMemoryError:
        if ahead is None:
            raise
    ahead.wait()
    return run()


def in_order(calls: list[tuple[Call, int]]) -> list[tuple[str, int]]:
    return sorted((call.key, count) for call, count in calls)


def expected(model: nn.Module, asked: "OptimizeTask") -> list[tuple[Call, int]]:
    """The calls that the model's parts will make, if every module is as right as the first of its kind; none on any error."""
    found = None
    try:
        found = asked.find(model, but_the_first)
        return recorded(found, asked.works, found.sites)
    except Exception:  # it shows again, with a reason, where all of them are proved
        return []
    finally:
        if found is not None:
            found.restore()


@contextlib.contextmanager
def verifying(model: nn.Module, asked: "OptimizeTask", **tuning) -> Iterator[Ahead | None]:
    """Children begin to verify what will be asked for; None where that is nothing.

    tuning   lock, modes and reach, as Tuning takes them
    """
    calls = expected(model, asked)
    if not calls:
        yield None
        return
    with Tuning(calls, progress=asked.progress, crew=asked.crew, **tuning) as started:
        yield Ahead(calls, started)
