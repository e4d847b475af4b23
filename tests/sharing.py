"""A pytest plugin: tests share the child processes in which candidates are tried, since each takes seconds to import torch.

A child that was ended, lost or poisoned is never used again: shared is what `with Worker()` would end in good health. One with
a fault planted in it is not shared, and one that verifies does not time. A test about the start or the end of a child asks for
`fresh_children`.
"""

import collections
import os
import weakref

import pytest

from whet.child import Child
from whet.worker import Worker

IDLE = 4  # children kept at most: each holds a quarter of a GiB
STEERING = ("WHET_", "TRITON_", "TORCH", "OMP_", "CUDA_")  # variables that change what a child does


class Pool:
    """Children that wait for the next test, each with what it was started with."""

    def __init__(self):
        self.idle: collections.deque[tuple[tuple, Child]] = collections.deque()
        self.started_with: weakref.WeakKeyDictionary[Child, tuple] = weakref.WeakKeyDictionary()
        self.shares = True

    def kind(self, worker: Worker) -> tuple | None:
        """What a child must have in common with one that this worker would start; None for one that is not shared."""
        if not self.shares or worker.preload:
            return None
        steering = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(STEERING)))
        return worker.interpret, worker.warm, steering

    def take(self, kind: tuple) -> Child | None:
        for entry in list(self.idle):
            if entry[0] == kind:
                self.idle.remove(entry)
                if entry[1].process.poll() is None:
                    return entry[1]
                entry[1].stop()
        return None

    def keep(self, kind: tuple, child: Child) -> None:
        self.idle.append((kind, child))
        while len(self.idle) > IDLE:
            self.idle.popleft()[1].stop()

    def close(self) -> None:
        while self.idle:
            self.idle.pop()[1].stop()


POOL = Pool()


@pytest.fixture(scope="session", autouse=True)
def shared_children(own_cache):
    """Worker takes an idle child where there is one of its kind, and hands a healthy one back."""
    start = Worker.start

    def take_or_start(self: Worker) -> None:
        if self.child is not None:
            return
        kind = POOL.kind(self)
        self.child = POOL.take(kind) if kind else None
        start(self)
        if kind and self.child:
            POOL.started_with[self.child] = kind

    def hand_back(self: Worker, *error) -> None:
        kind = self.child and POOL.started_with.get(self.child)
        if self.child and kind and error[0] is None:
            POOL.keep(kind, self.child)
            self.child = None
        self.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "start", take_or_start)
        patch.setattr(Worker, "__exit__", hand_back)
        yield
        POOL.close()


@pytest.fixture
def fresh_children(monkeypatch):
    """Every child of this test is started for it, and ended with it."""
    monkeypatch.setattr(POOL, "shares", False)
