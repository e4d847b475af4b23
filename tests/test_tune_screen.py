"""tune(reach=): what a quick look finds far slower than the stock call is not proved, and its entry says so."""

import dataclasses
import threading
import time

import pytest
from conftest import without

import whet.tune
import whet.worker
from whet.lock import Lock
from whet.op import Call, Impl, discover
from whet.tune import Work
from whet.worker import Hands, _args, answer_verify, far_slower, flops_of, in_shares

OP = discover()["rms_norm"]
CALL = Call("rms_norm", {"M": 8, "N": 32, "layout": "contiguous"}, "float32", True)


def slow(x, w, eps=1e-6, out_dtype=None):
    time.sleep(0.005)
    return OP.reference(x, w, eps)


def broken(x, w, eps=1e-6, out_dtype=None):
    raise RuntimeError("planted")


@pytest.fixture
def planted(monkeypatch):
    with without(*(set(OP.impls) - {"eager", "torch"})):
        monkeypatch.setitem(OP.impls, "slow", Impl(slow))
        yield


LOOK = dict(beside=["torch"], modes=["eager"])


@pytest.mark.usefixtures("planted")
def test_a_candidate_far_slower_than_the_stock_call_is_not_proved_and_one_within_reach_is():
    out = answer_verify(CALL, "slow", **LOOK, reach=1.5)
    assert not out["ok"] and out["screened"] > 1.5
    assert "times as slow as torch at a quick look, so it cannot be chosen" in out["why"]
    assert answer_verify(CALL, "slow", **LOOK, reach=1e9)["ok"] and answer_verify(CALL, "slow")["ok"]


@pytest.mark.usefixtures("planted")
def test_where_the_stock_call_does_not_run_the_others_are_proved(monkeypatch):
    monkeypatch.setitem(OP.impls, "torch", Impl(broken))
    assert answer_verify(CALL, "slow", **LOOK, reach=1.5)["ok"]


def looked(monkeypatch, ratios: dict[tuple[str, str], float], impl: str = "slow", **look) -> tuple[float, str] | None:
    """What a look finds where these are the ratios by (mode, other)."""
    monkeypatch.setattr(whet.worker, "slower_by", lambda op, name, other, args, grad, mode: ratios[mode, other])
    beside, modes = look.get("beside", ["torch", "eager"]), look.get("modes", ["eager", "graph"])
    return far_slower(OP, _args(OP, CALL), True, impl, beside, modes, 1.25)


@pytest.mark.usefixtures("planted")
def test_it_must_be_slower_than_one_of_the_others_in_every_mode_in_which_it_could_be_chosen(monkeypatch):
    ratios = {("eager", "torch"): 3.0, ("graph", "torch"): 0.7, ("graph", "eager"): 1.5}
    found = looked(monkeypatch, ratios)
    assert found == (1.5, "3.0 times as slow as torch and 1.5 times as slow as eager in a CUDA graph")
    assert looked(monkeypatch, ratios | {("graph", "eager"): 1.2}) is None
    assert looked(monkeypatch, ratios, beside=["torch"]) is None
    monkeypatch.setitem(OP.impls, "slow", Impl(slow, no_graph="it waits"))
    assert looked(monkeypatch, ratios, beside=["torch"]) == (3.0, "3.0 times as slow as torch")
    assert looked(monkeypatch, ratios, modes=["graph"]) is None, "what is not chosen in any of the modes has no ratio"


def test_compiled_candidates_and_packages_are_looked_at_beside_whets_kernel_too():
    work = Work([(CALL, 1)], Lock(), ("eager", "graph"), lambda *step: None, 1.0, None, True, 1.25)
    work.names[CALL.key] = ["eager", "torch", "compile", "triton", "liger"]
    others = {name: work._look(CALL, name).get("beside") for name in work.names[CALL.key]}
    both = ["torch", "triton"]
    assert others == {"eager": None, "torch": None, "compile": both, "triton": ["torch"], "liger": both}
    assert work._look(CALL, "compile")["modes"] == ["eager", "graph"]


def verified(monkeypatch, lock: Lock, reach: float | None, stock_ok: bool = True) -> dict[str, list]:
    """{candidate: the looks that were asked for} of a verification of CALL."""
    asked: dict[str, list] = {}

    def answer(worker, call, name, limit_s, **screen):
        asked.setdefault(name, []).append(screen)
        ok = name != "torch" or stock_ok
        return {"ok": False, "share": 0.0, "why": "slow", "screened": 3.0} if screen else {"ok": ok, "share": 0.1, "why": ""}

    monkeypatch.setattr(whet.tune, "_ask_verify", answer)
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)
    work = Work([(CALL, 1)], lock, ("eager",), lambda *step: None, 1.0, None, True, reach)
    work.start()
    work.verify_rest()
    return asked


@pytest.mark.usefixtures("planted")
def test_only_the_others_are_looked_at_and_a_tuning_in_full_proves_what_was_left_out(monkeypatch):
    lock = Lock()
    asked = verified(monkeypatch, lock, 1.5)
    look = LOOK | {"reach": 1.5}
    assert asked == {"eager": [{}], "torch": [{}], "slow": [look]}
    entry = lock.calls[f"{CALL.key} @ eager"]
    assert entry["candidates"]["slow"]["screened"] == 3.0
    assert verified(monkeypatch, lock, 1.5) == {}, "what was found is kept"
    assert verified(monkeypatch, lock, None) == {"slow": [{}]} and entry["candidates"]["slow"]["ok"]


@pytest.mark.usefixtures("planted")
def test_what_was_left_out_for_a_stock_call_that_is_wrong_is_proved_after_all(monkeypatch):
    lock = Lock()
    asked = verified(monkeypatch, lock, 1.5, stock_ok=False)
    assert asked["slow"] == [LOOK | {"reach": 1.5}, {}]
    assert lock.calls[f"{CALL.key} @ eager"]["candidates"]["slow"]["ok"]


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("kernel, again", [
    ({"ok": False, "why": "values"}, True), ({"ok": False, "why": "refused: x"}, False), ({"ok": True, "why": ""}, False),
    ({"ok": False, "why": "not verified: slow", "screened": 2.0}, False), (None, False),
])
def test_what_was_left_out_for_a_kernel_that_is_wrong_is_proved_after_all(monkeypatch, kernel, again):
    lock = Lock()
    verified(monkeypatch, lock, 1.25)
    work = Work([(CALL, 1)], lock, ("eager",), lambda *step: None, 1.0, None, True, 1.25)
    if kernel:
        work.entry(CALL, "eager")["candidates"]["triton"] = kernel
    assert bool(work._screened_in_vain(CALL, "eager")) is again
    assert ("slow" in work.entry(CALL, "eager")["candidates"]) is not again


@pytest.mark.usefixtures("planted")
def test_what_was_left_out_for_one_that_is_wrong_as_it_is_timed_is_proved_and_the_race_run_again(monkeypatch):
    lock, raced = Lock(), []
    asked: dict[str, list] = {}

    def answer(worker, call, name, limit_s, **screen):
        asked.setdefault(name, []).append(bool(screen))
        return {"ok": False, "share": 0.0, "why": "", "screened": 3.0} if screen else {"ok": True, "share": 0.1, "why": ""}

    def time_them(self, call, mode, seconds, names):
        raced.append(names)
        timings = {n: {"ms": 1.0, "low": 1.0, "high": 1.0, "samples": 9} for n in names}
        return {"timings": timings, "outcome": None} | ({"wrong": {"torch": "wrong now"}} if "torch" in names else {})

    monkeypatch.setattr(whet.tune, "_ask_verify", answer)
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)
    monkeypatch.setattr(Work, "_time", time_them)
    work = Work([(CALL, 1)], lock, ("eager",), lambda *step: None, 1.0, None, True, 1.25)
    work.start()
    work.verify_rest()
    work.measure_all(0.01)
    assert asked["slow"] == [True, False] and raced == [["eager", "torch"], ["eager"], ["eager", "slow"]]
    assert lock.calls[f"{CALL.key} @ eager"]["chosen"] in ("eager", "slow")


@pytest.mark.usefixtures("planted")
def test_what_was_left_out_does_not_outlive_what_it_was_compared_with_nor_count_in_another_mode(monkeypatch):
    lock = Lock()
    verified(monkeypatch, lock, 1.25)
    entry = lock.calls[f"{CALL.key} @ eager"]
    work = Work([(CALL, 1)], lock, ("eager",), lambda *step: None, 1.0, None, True, 1.25)
    assert "slow" in entry["candidates"] and work._known(CALL, "slow") is None and work._known(CALL, "torch")
    entry["candidates"]["torch"]["source"] = "of an older one"
    Work([(CALL, 1)], lock, ("eager",), lambda *step: None, 1.0, None, True, 1.25)
    assert list(entry["candidates"]) == ["eager"]


@pytest.mark.usefixtures("planted")
def test_what_refuses_a_call_is_not_looked_at_beside_another(monkeypatch):
    monkeypatch.setitem(OP.impls, "torch", Impl(OP.reference, lambda *args, **options: "no"))
    assert looked(monkeypatch, {("eager", "torch"): 3.0}, beside=["torch"], modes=["eager"]) is None


def test_candidates_of_large_products_are_one_hands_and_the_slowest_begin():
    cases = {"linear_cross_entropy": {"M": 16384, "D": 768, "V": 50257}, "rms_norm": {"M": 8, "N": 32}}
    calls = [(Call(op, {**case, "layout": "contiguous"}, "bfloat16", True), 1) for op, case in cases.items()]
    work = Work(reversed(calls), Lock(), ("eager",), lambda *step: None, 1.0, None, True)
    heavy, *others = in_shares(work.todo)
    assert {call.op for call, _ in heavy} == {"linear_cross_entropy"} and len(heavy) > 1
    assert all(len(share) == 1 and share[0][0].op == "rms_norm" for share in others) and others[0][0][1] == "compile"
    assert sorted(str(item) for item in work.todo) == sorted(str(item) for share in [heavy, *others] for item in share)


def test_an_op_whose_cost_reads_values_has_no_large_calls():
    assert flops_of(dataclasses.replace(OP, cost=lambda x, **rest: x.sum().item()), CALL) == 0 < flops_of(OP, CALL)


def test_a_hand_that_is_stopped_takes_nothing_more_of_its_share():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work(items, shared):
        for item in items:
            done.append(item)
            begun.set()
            go_on.wait(10)

    hands = Hands([[1, 2, 3]], work)
    assert begun.wait(10)
    hands.stop()
    go_on.set()
    hands.wait()
    assert done == [1]


@pytest.mark.parametrize("reach", [None, 1.25])
def test_without_a_gpu_triton_is_interpreted_only_where_evidence_is_asked_for_too(reach, monkeypatch):
    """With a reach only what can be chosen is verified: a Triton kernel cannot be, and the interpreter takes its time."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(whet.tune, "_ask_verify", lambda *_, **__: {"ok": True, "share": 0.0, "why": ""})
    work = Work([(CALL, 1)], Lock(), ("eager",), lambda *_: None, 1.0, None, False, reach)
    found = work._verify(CALL, "triton", None, None)
    assert ("interpreted" in found, "screened" in found) == ((True, False) if reach is None else (False, True))
    assert found["ok"] == (reach is None)
