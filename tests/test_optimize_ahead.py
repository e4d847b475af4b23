"""Verification that begins before all parts are proved: of what they will ask for, once, and harmless where that is wrong."""

import pytest
import torch
from swapping import FAMILIES, built, state
from test_optimize_lock import data, stack

from whet.choices import Choices
from whet.judge import Verdict
from whet.lock import Lock
from whet.op import Call
from whet.swap import _ahead, _groups, _optimize, _proof
from whet.swap._ahead import Ahead, but_the_first, expected, in_order
from whet.swap._optimize import OptimizeTask, optimize
from whet.swap._replace import as_call, recognise
from whet.tune import Tuned
from whet.workload import Workload


def task(model, given) -> OptimizeTask:
    call = as_call(given)
    work = Workload(model, call.args, call.kwargs, "train", loss_with=lambda out: getattr(out, "loss", out).sum())
    return OptimizeTask([work], [work], [call], 0.001, lambda *step: None, None)


def test_the_first_of_each_kind_of_like_modules_is_proved_and_one_that_differs_too():
    model = stack()
    model.layers[2].mlp.other = 1.5
    sites = [s for s, _ in recognise(model, as_call(data()), Choices()).sites]
    taken = but_the_first(sites, {}, Choices())
    assert {s.path for s in sites if id(s) not in taken} == {"layers.0.mlp", "layers.0.norm", "layers.2.mlp"}


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_what_is_expected_is_what_all_the_proved_parts_ask_for_and_the_model_is_left_alone(name):
    pytest.importorskip("transformers")
    model = built(name, torch.float32).train()
    before, asked = state(model), task(model, FAMILIES[name].batch())
    calls = expected(model, asked)
    assert state(model) == before and calls
    found = recognise(model, asked.calls[0], Choices())
    assert in_order(calls) == in_order(_groups.recorded(found, asked.works, found.sites))


def test_where_nothing_can_be_expected_nothing_is_started(monkeypatch):
    model = stack()
    monkeypatch.setattr(_ahead, "recorded", lambda *args: 1 / 0)
    before = state(model)
    with _ahead.verifying(model, task(model, data()), lock=Lock(), modes=("eager",), reach=1.25) as started:
        assert started is None
    assert state(model) == before


class Started:
    """In the place of Tuning."""

    def __init__(self):
        self.calls, self.finished, self.waited, self.ended = [], 0, 0, 0
        self.work = self.hands = self

    def __call__(self, calls, **options):
        self.calls.append(calls)
        self.options = options
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended += 1

    def finish(self, seconds):
        self.finished += 1
        return Tuned({"eager": Choices()}, {})

    def wait(self):
        self.waited += 1


def test_calls_that_were_not_expected_wait_for_the_children_and_are_tuned_by_themselves():
    one, two = (Call("rms_norm", {"M": m, "N": 32, "layout": "contiguous"}, "float32", True) for m in (8, 16))
    for calls in ([(one, 1)], [(one, 2), (two, 1)], [(one, 3)]):
        started = Started()
        ahead = Ahead([(two, 1), (one, 1)], started)
        assert ahead.tuned(calls, 0.1) is None and (started.finished, started.waited) == (0, 1)
    started = Started()
    ahead = Ahead([(two, 1), (one, 1)], started)
    assert ahead.tuned([(one, 1), (two, 1)], 0.1) is not None and ahead.tuned([(one, 1), (two, 1)], 0.1) is None
    assert (started.finished, started.waited) == (1, 0)


@pytest.fixture
def started(monkeypatch):
    found = Started()
    monkeypatch.setattr(_ahead, "Tuning", found)
    monkeypatch.setattr(_optimize, "_worth_starting_ahead", lambda decided: True)
    monkeypatch.setattr(_optimize, "hands_here", lambda: 0)
    monkeypatch.setattr(_optimize, "tune", lambda calls, *rest, **options: found.again.append(len(list(calls))) or
                        Tuned({"eager": Choices()}, {}))
    found.again = []
    return found


def test_what_was_begun_is_finished_once_and_nothing_is_tuned_again(started, tmp_path):
    report = optimize(stack(), data(), lock=Lock.read(tmp_path / "whet.lock"), seconds=0.001).whet
    assert len(started.calls) == started.finished == started.ended == 1 and not started.again and not started.waited
    assert started.options["reach"] == _optimize.REACH and started.options["modes"] == ("eager",)
    assert {"layers.0.mlp", "layers.3.norm"} <= {s.path for g in report.groups for s, _ in g.sites}


def test_a_module_that_fails_its_own_proof_is_left_and_the_rest_is_tuned(started, tmp_path, monkeypatch):
    real = _proof.prove

    def prove(site, call, ops):
        return Verdict(False, why="planted") if site.path == "layers.3.mlp" else real(site, call, ops)

    monkeypatch.setattr(_proof, "prove", prove)
    report = optimize(stack(), data(), lock=Lock.read(tmp_path / "whet.lock"), seconds=0.001).whet
    assert any(x.path == "layers.3.mlp" and "planted" in x.why for x in report.replaced.left)
    assert not started.finished and started.waited == 1 and started.again and started.ended == 1


def test_an_error_later_on_ends_what_was_begun(started, monkeypatch):
    monkeypatch.setattr(_optimize, "_decide", lambda *args: 1 / 0)
    model = stack()
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        optimize(model, data(), lock=Lock(), seconds=0.001)
    assert started.ended == 1 and state(model) == before


def test_where_memory_is_short_beside_the_children_it_is_tried_again_without_them(started, monkeypatch):
    def scarce(run):
        def once(*args, **options):
            if not started.waited:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(*args, **options)

        return once

    monkeypatch.setattr(_optimize, "recorded", scarce(_groups.recorded))
    optimize(stack(), data(), lock=Lock(), seconds=0.001)
    assert started.waited == 1

    real, started.waited = _proof.prove, 0

    def prove(site, call, ops):
        return (scarce(real) if site.path == "layers.3.mlp" else real)(site, call, ops)

    monkeypatch.setattr(_optimize, "recorded", _groups.recorded)
    monkeypatch.setattr(_proof, "prove", prove)
    report = optimize(stack(), data(), lock=Lock(), seconds=0.001).whet
    assert started.waited == 1 and not any("memory" in x.why for x in report.replaced.left)


def test_without_children_memory_that_is_short_is_an_error():
    def short():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        _ahead.with_memory(None, short)
    assert _ahead.with_memory(None, lambda: 1, lambda made: True) == 1
