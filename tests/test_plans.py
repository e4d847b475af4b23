"""How plans are ranked: raced together, in groups where memory is short, kept as they were where noise leaves it open."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import whet.plans
from whet.measure import Race
from whet.models.tiny_llama import MODEL
from whet.plans import BEFORE, Plan, PlanResult, Trial, conclude, distrusted
from whet.race import NOISY, TIED, Ratio, race_outcome, timing
from whet.subjects import BuiltIn

ROOT = Path(__file__).parent.parent
STOCK, TUNED, COMPILED = Plan("", "v", "stock"), Plan("", "v", "tuned"), Plan("", "v", "tuned", compiled=True)


def plans(result: dict) -> dict[str, dict]:
    return {p["name"]: p for p in result["plans"]}


def rival(ms: dict[str, float], rounds: int = 12, busy: str = "") -> Race:
    """A race in which every plan took the same time in each round."""
    times = {name: [t] * rounds for name, t in ms.items()}
    return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, BEFORE), busy, times)


class Held(Trial):
    """Plans without a model: each takes a given time, and memory holds so many of them beside the plain one."""

    def __init__(self, most: int = 99):
        self.subject, self.seconds, self.most = BuiltIn(MODEL, MODEL.sizes["tiny"], MODEL.recipes["tiny"]), 0.02, most
        self.results, self.entered, self.heats, self.wrong = {}, {}, [], set()
        self.before_result = PlanResult(self.subject.before(), ok=True, speedup=1.0)
        self.before = type("Step", (), {"step": staticmethod(lambda: None)})

    def enter(self, name: str, plan: Plan = STOCK, why: str = "") -> None:
        self.results[name] = PlanResult(replace(plan, name=name), ok=not why, why=why, share=0.5)
        if not why:
            self.entered[name] = lambda: None
        else:
            self.wrong.add(name)

    def _run(self, plan: Plan) -> list[PlanResult]:
        full = len(self.entered) >= self.most
        if full:
            self.results[plan.name] = PlanResult(plan, why="out of memory")
        else:
            self.enter(plan.name)
        return [self.results[plan.name]]


def raced(monkeypatch, ms: dict[str, float], most: int = 99, speed: tuple[float, ...] = (1.0,) * 9) -> dict:
    """What is concluded of plans that take so long, in as many races as memory makes of them; speed: the machine's in each."""
    heats = iter(speed)

    def together(runs, keep, **_):
        slow = 1 / next(heats)
        return rival({name: slow * (ms | {BEFORE: 10.0})[name] for name in runs})

    monkeypatch.setattr(whet.plans, "race", together)
    trial = Held(most)
    for name in ms:
        trial.run(Plan(name, "v", "stock"))
    trial.heat()
    return conclude("x", trial, [])


def test_within_a_tie_the_simpler_plan_is_kept(monkeypatch):
    done = raced(monkeypatch, {"eager": 5.0, "eager + choices": 4.98})
    assert done["chosen"] == "eager" and done["tied"] and done["speedup"] == 2.0 and done["why"] == TIED
    assert plans(done)["eager"]["vs_best"] == pytest.approx(5.0 / 4.98, abs=1e-4)
    done = raced(monkeypatch, {"eager": 5.0, "eager + choices": 4.98, "torch.compile": 2.0})
    assert done["chosen"] == "torch.compile" and not done["tied"] and done["speedup"] == 5.0


def test_plans_that_memory_does_not_hold_together_are_ranked_through_the_plain_model(monkeypatch):
    """The machine ran at half speed in the second race: its plan is the better one all the same."""
    done = raced(monkeypatch, {"eager": 5.0, "eager + choices": 4.0, "torch.compile": 3.0}, most=2, speed=(1.0, 0.5))
    assert done["chosen"] == "torch.compile" and done["speedup"] == pytest.approx(10 / 3, abs=1e-3)
    assert plans(done)["eager"]["vs_best"] == pytest.approx(5 / 3, abs=1e-3) and "2 groups" in done["why"]
    assert plans(done)["torch.compile"]["ms"] == pytest.approx(6.0), "its own time is what it was"


def test_where_noise_leaves_it_open_the_model_stays_as_it_was(monkeypatch):
    def noisy(runs, keep, **_):
        times = {BEFORE: [10.0, 30.0] * 6, "eager": [30.0, 9.0] * 6}
        return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, keep), "times vary by 90%", times)

    monkeypatch.setattr(whet.plans, "race", noisy)
    trial = Held()
    trial.enter("eager")
    trial.heat()
    done = conclude("x", trial, [])
    assert done["chosen"] == BEFORE and done["why"] == f"{NOISY}: kept {BEFORE}" and done["speedup"] == 1.0
    assert done["busy"] == "times vary by 90%"


def test_a_plan_that_dies_in_the_race_costs_its_own_candidacy():
    trial = Held()
    trial.enter("eager")
    trial.enter("torch.compile")

    def broken():
        raise RuntimeError("CUDA error: device-side assert")

    trial.entered["torch.compile"] = broken
    trial.heat()
    lost = trial.results["torch.compile"]
    assert not lost.ok and lost.why == "RuntimeError: CUDA error: device-side assert" and lost.timing is None
    assert trial.results["eager"].timing.ms >= 0 and trial.outcome().chosen in (BEFORE, "eager")


@pytest.mark.parametrize(
    "failed, forgotten",
    [(("plain",), ["eager"]), (("plain", "compiled"), ["eager"]), (("compiled",), []), ((), [])],
    ids=["as they stand", "in every plan", "under the compiler alone", "in none"],
)
def test_choices_that_fail_in_the_whole_model_are_distrusted(failed, forgotten, monkeypatch):
    monkeypatch.setattr(whet.plans, "modes_here", lambda: ("eager",))
    trial = Held()
    for name, plan in (("plain", TUNED), ("compiled", COMPILED)):
        trial.enter(name, plan, why="grad w exceeds" if name in failed else "")
    assert distrusted(list(trial.results.values()), trial.wrong) == forgotten


def test_a_result_is_recorded_by_the_keys_that_records_have_and_what_is_unknown_is_left_out():
    lost = PlanResult(Plan("eager", "v2", "stock"), why="out of memory").to_record()
    assert lost == {
        "name": "eager", "ok": False, "why": "out of memory", "variant": "v2", "choices": "stock", "compiled": False,
        "graph": False,
    }
    done = PlanResult(
        Plan("eager", "v2", "stock"), True, peak_mb=1.0, predicted_mb=1.0, ready_s=2.0, share=0.5,
        timing=timing([1.0, 2.0, 3.0]), samples_per_s=4.0, before_ms=5.0, speedup=6.0, ratio=Ratio(1.0, 0.9, 1.1, 3),
    ).to_record()
    path = next((ROOT / "records").glob("optimize-tiny-llama-small-float32.json"))
    old = json.loads(path.read_text())["measured"]["plans"]
    assert old[1].keys() == done.keys() and old[0].keys() <= done.keys()


def test_of_plans_that_tie_the_one_with_much_less_memory_is_chosen(monkeypatch):
    trial = Held()
    for name, mb in (("roomy", 4000.0), ("near", 3900.0), ("lean", 1000.0)):
        trial.enter(name)
        trial.results[name].peak_mb = mb
    trial._note(rival({BEFORE: 9.0, "roomy": 1.002, "near": 1.0, "lean": 1.001}))
    assert trial.outcome().chosen == "lean" and "leanest" in trial.outcome().why
    trial.results["lean"].peak_mb = 3000.0
    assert trial.outcome().chosen == "roomy"


def test_where_the_plain_model_runs_out_of_memory_the_last_plan_gives_way(monkeypatch):
    trial, raced_with = Held(), []
    for name in ("a", "b", "c"):
        trial.enter(name)

    def together(runs, **_):
        raced_with.append([*runs])
        if len(runs) > 3:
            raise whet.plans.PlanFailed(BEFORE, torch.cuda.OutOfMemoryError())
        return rival({name: 9.0 if name == BEFORE else 1.0 for name in runs})

    monkeypatch.setattr(whet.plans, "race", together)
    trial.heat()
    assert raced_with == [[BEFORE, "a", "b", "c"], [BEFORE, "a", "b"]]
    assert trial.results["c"].why == "out of memory" and trial.results["a"].ok and trial.results["b"].ok
