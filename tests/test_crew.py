"""Children that are started ahead: taken while there are any, stopped where nobody took them."""

from types import SimpleNamespace

import pytest
import torch

from whet import worker
from whet.swap import _optimize
from whet.worker import Crew, hands_here


class Idle:
    lives, fails = True, False

    def __init__(self, preload=None, warm=False):
        self.preload, self.warm, self.started, self.stopped = preload, warm, False, False

    def start(self):
        self.started = True
        if self.fails:
            raise KeyboardInterrupt

    def alive(self):
        return self.lives

    def stop(self):
        self.stopped = True


def test_a_crew_is_started_at_once_taken_one_by_one_and_the_rest_stopped(monkeypatch):
    monkeypatch.setattr(worker, "Worker", Idle)
    with Crew(3) as crew:
        idle = list(crew.idle)
        assert all(w.started and w.warm for w in idle)
        taken = [crew.take(), crew.take()]
        other = crew.take("ops.py")
        assert other.preload == "ops.py" and not other.started, "one that waits has not loaded that file"
    assert [w.stopped for w in idle] == [w not in taken for w in idle] and sum(w.stopped for w in idle) == 1
    assert not Crew(0).take().started


def test_one_that_died_is_not_taken_and_a_start_that_fails_leaves_none(monkeypatch):
    monkeypatch.setattr(worker, "Worker", Idle)
    with Crew(2) as crew:
        dead = crew.idle[-1]
        dead.lives = False
        assert crew.take() is not dead and dead.stopped and not crew.take().started
    crew = Crew(3)
    crew.idle[1].fails, made = True, list(crew.idle)
    with pytest.raises(KeyboardInterrupt), crew:
        pass
    assert all(w.stopped for w in made)


def test_only_a_model_that_the_lock_has_not_met_starts_one_and_only_on_a_gpu(monkeypatch):
    class Model(torch.nn.Module):
        pass

    asked = []
    monkeypatch.setattr(_optimize, "Crew", lambda count: asked.append(count) or Crew(0))
    monkeypatch.setattr(_optimize, "_attempt", lambda *args: True)
    report, lock = _optimize.Optimized(Model(), _optimize.Replaced(Model())), SimpleNamespace(swaps={})
    task = _optimize.OptimizeTask([SimpleNamespace(kind="train")], [], [], 0.1, lambda *args: None, None)
    leads = True
    monkeypatch.setattr(_optimize, "leader", lambda: leads)
    for there, met in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(_optimize, "modes_here", lambda: ("eager",))
        if met:
            lock.swaps["model: Model, 3 modules 0123"] = {}
        _optimize._optimize(report, task, lock)
    assert asked == [0, hands_here(), 0]
    leads = False
    lock.swaps.clear()
    _optimize._optimize(report, task, lock)
    assert asked[-1] == 0, "of several ranks one verifies"
