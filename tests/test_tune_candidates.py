"""The tuner with tile variants, with a smaller case verified in place of the whole, and without an eager to compare with."""

from pathlib import Path

import planted_tiles
import pytest
from conftest import without

from whet.lock import Lock
from whet.measure import Timing
from whet.op import Call, Impl, discover
from whet.tune import tune

OP = discover()["rms_norm"]
CALL = Call("rms_norm", {"M": 8, "N": 32, "layout": "contiguous"}, "float32", True)
SMALL = Call("rms_norm", {"M": 4, "N": 32, "layout": "contiguous"}, "float32", True)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """One tuning of the planted op, in a real child process: its lock and its choices."""
    path = tmp_path_factory.mktemp("tuned") / "whet.lock"
    with pytest.MonkeyPatch.context() as patch, without(*(set(OP.impls) - {"eager", "torch"})):
        patch.setenv("WHET_PLANT", "tiles")
        OP.impls.update(planted_tiles.impls(OP))
        made = tune([(CALL, 1)], Lock(path), modes=("eager",), seconds=0.02, preload=str(Path(planted_tiles.__file__)))
    return Lock.read(path), made.choices


def entry(lock: Lock) -> dict:
    return lock.calls[f"{CALL.key} @ eager"]


def test_every_tile_is_verified_and_timed_like_an_impl_and_the_chosen_name_goes_into_the_lock(tuned):
    lock, made = tuned
    candidates = entry(lock)["candidates"]
    assert list(candidates) == ["eager", "torch", "torch@quick", "torch@wrong", "torch@dies"], "in the order of ties"
    assert candidates["torch"]["ms"] > candidates["torch@quick"]["ms"] > 0
    assert "exceeds" in candidates["torch@wrong"]["why"] and "ms" not in candidates["torch@wrong"]
    assert entry(lock)["chosen"] == "torch@quick" and entry(lock)["ms"] == candidates["torch@quick"]["ms"]
    assert made["eager"].table == made["compile"].table == made["compile + graph"].table == {CALL.key: "torch@quick"}


def test_what_dies_in_timing_costs_its_own_candidacy_also_without_eager(tuned):
    dead = entry(tuned[0])["candidates"]["torch@dies"]
    assert not dead["ok"] and "out of memory" in dead["why"]


def test_a_reduced_proof_is_said_and_the_whole_case_is_asked_whether_it_is_refused(tuned):
    candidates = entry(tuned[0])["candidates"]
    assert candidates["torch"]["ok"] and candidates["torch@quick"]["proved"] == SMALL.key
    eager = candidates["eager"]
    assert (eager["ok"], eager["share"], eager["why"]) == (False, 0.0, "refused: the scores of 8 rows do not fit")


def test_without_eager_there_is_no_ratio_to_it(tuned):
    assert "vs_eager" not in entry(tuned[0]) and entry(tuned[0])["why"] == "fastest of the verified"


TIMES = {"eager": 8.0, "torch": 4.0, "triton": 2.0, "triton@2x2": 1.5, "triton@4x4": 1.0}


def timing(ms: float) -> dict:
    return Timing(ms, ms, ms, 9).as_dict()


class Answers:
    """A child that answers at once: every candidate is right, those in `dead` cannot be timed, nor more than `most` at once."""

    def __init__(self, dead=(), most=99, refused=(), times=TIMES):
        self.dead, self.most, self.refused, self.times, self.asked = dead, most, refused, times, []

    def __call__(self, worker, limit_s, what, call, **request):
        if what == "verify":
            no = request["impl"] in self.refused
            return {"ok": not no, "share": 0.5, "why": "refused: it is too large" if no else ""}
        names = request["impls"]
        self.asked.append(names)
        if len(names) > self.most or set(names) & set(self.dead):
            return {"error": "out of memory"}
        return {"timings": {n: timing(self.times[n]) for n in names}, "floor_ms": 0.1, "bound": "memory"}


@pytest.fixture
def answered(monkeypatch):
    """tune() of one call, against given answers."""
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)

    def run(answers: Answers) -> dict:
        monkeypatch.setattr("whet.worker.Worker.ask", lambda *args, **request: answers(*args, **request))
        lock = Lock()
        tune([(CALL, 1)], lock, modes=("eager",))
        return entry(lock)

    with without(*(set(OP.impls) - set(TIMES))):
        OP.impls["triton"] = Impl(lambda **_: None, tiles=lambda **_: ("2x2", "4x4"))
        yield run


def test_the_rival_is_another_impl_and_not_another_tile(answered):
    found = answered(Answers())
    assert (found["chosen"], found["rival"], found["vs_rival"], found["vs_eager"]) == ("triton@4x4", "torch", 4.0, 8.0)


def test_in_a_tie_between_tiles_the_default_is_kept_then_the_earlier(answered):
    assert answered(Answers(times=TIMES | {"triton@2x2": 1.0, "triton": 1.001}))["chosen"] == "triton"
    assert answered(Answers(times=TIMES | {"triton@2x2": 1.001}))["chosen"] == "triton@2x2"
    assert answered(Answers(times=TIMES | {"torch": 1.001}))["chosen"] == "torch"


def test_eager_that_cannot_be_timed_leaves_the_others_in_the_race(answered):
    answers = Answers(dead=("eager",))
    found = answered(answers)
    assert found["chosen"] == "triton@4x4" and "vs_eager" not in found and found["rival"] == "torch"
    eager = found["candidates"]["eager"]
    assert (eager["ok"], eager["share"], eager["why"]) == (False, 0.5, "out of memory") and "ms" not in eager
    assert answers.asked[-1] == ["torch", "triton", "triton@2x2", "triton@4x4"]


def test_candidates_that_do_not_fit_together_are_timed_one_after_another(answered):
    found = answered(Answers(most=1))
    assert found["chosen"] == "triton@4x4" and all("ms" in c for c in found["candidates"].values())
    assert "one after another" in found["why"] and found["why"].endswith("out of memory")


def test_where_nothing_can_be_timed_the_stock_impl_is_taken_and_the_reason_kept(answered):
    found = answered(Answers(dead=tuple(TIMES)))
    assert found["chosen"] == "torch" and found["why"].endswith("out of memory")
    found = answered(Answers(refused=tuple(TIMES)))
    assert found["chosen"] == "torch" and found["why"].endswith("eager: refused: it is too large")


def test_where_nothing_else_was_timed_a_call_leaves_the_table():
    lock = Lock()
    timed = {"ok": True, "ms": 1.0}
    lock.calls["a call @ graph"] = {"chosen": "liger", "candidates": {"liger": timed}}
    lock.calls["another @ graph"] = {"chosen": "triton@4x4", "candidates": {"triton@4x4": timed, "liger": timed}}
    assert lock.table("graph", without=("liger",)) == {"another": "triton@4x4"}
    assert lock.table("graph") == {"a call": "liger", "another": "triton@4x4"}
