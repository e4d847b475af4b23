"""duel(): one model's step in turns with another's, refused where their batches differ or the other does not train."""

import math
from dataclasses import replace

import pytest
import torch
from test_optimize import MODEL, RECIPE, SMALL, few_candidates

from whet import duel as module
from whet.duel import duel, rival_of
from whet.lock import Lock
from whet.measure import Race
from whet.models.tiny_llama import RECIPES, SIZES
from whet.plans import Trial, best_plan
from whet.race import race_outcome, timing
from whet.report.tables import against_line
from whet.subjects import BuiltIn, subject_of

OTHER = replace(SMALL, layers=2)


@pytest.fixture(autouse=True)
def two_sizes(monkeypatch):
    with few_candidates(monkeypatch):
        monkeypatch.setitem(SIZES, "other", OTHER)
        monkeypatch.setitem(RECIPES, "other", RECIPE)
        every = BuiltIn.plans
        monkeypatch.setattr(BuiltIn, "plans", lambda self: [replace(p, choices="stock") for p in every(self) if p.compiled][:1])
        monkeypatch.setattr(torch, "compile", lambda run, **_: run)  # what Inductor makes of it is not what is tested
        yield


def timed(monkeypatch, ms: dict[str, float]) -> None:
    """A race in which each step runs once and takes the given time."""
    def together(runs, keep, **_):
        for run in runs.values():
            run()
        times = {name: [ms["rival" if name.startswith("tiny-llama") else "plan"]] * 12 for name in runs}
        return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, keep), "", times)

    monkeypatch.setattr(module, "race", together)


def test_the_chosen_plan_runs_in_turns_with_the_other_model(monkeypatch, tmp_path):
    timed(monkeypatch, {"rival": 6.0, "plan": 4.0})
    found = best_plan("tiny-llama:test", Lock.read(tmp_path / "whet.lock"), seconds=0.01, against="tiny-llama:other")
    other = found["against"]
    assert other["speedup"] == 1.5 and other["plan"] == found["chosen"] and other["name"] == "tiny-llama:other torch.compile"
    assert str(OTHER) in other["config"] and other["ms"] == 6.0 and other["plan_ms"] == 4.0
    kept = next(p for p in found["plans"] if p["name"] == found["chosen"])
    assert kept["ms"] > 0, "what the plans' own race measured stays"
    assert "1.50x" in against_line(other) and "6.000 ms" in against_line(other)


def test_a_plan_that_is_wrong_when_built_again_is_not_timed(monkeypatch):
    timed(monkeypatch, {"rival": 6.0, "plan": 4.0})
    subject = subject_of("tiny-llama:test")
    trial, plan = Trial(subject, "float32", 0.01), subject.plans()[0]
    trial.run(plan)
    assert trial.beside(rival_of(subject, "tiny-llama:other"), plan.name)["speedup"] == 1.5
    trial.truth, trial.eager = ({name: t + 1.0 for name, t in part.items()} for part in (trial.truth, trial.eager))
    with pytest.raises(ValueError, match="no longer right: "):
        trial.beside(rival_of(subject, "tiny-llama:other"), plan.name)


def test_models_with_other_batches_are_not_compared():
    with pytest.raises(ValueError, match="batches of 4x8, and tiny-llama:test of 2x8; name tiny-llama:other@2x8"):
        rival_of(subject_of("tiny-llama:test"), "tiny-llama:other@4x8")
    with pytest.raises(ValueError, match="unknown model"):
        rival_of(subject_of("tiny-llama:test"), "nothing:here")


@pytest.mark.parametrize("broken, why", [("loss", "its loss is nan"), ("gradient", "no gradient reaches")])
def test_a_rival_that_does_not_train_is_refused(monkeypatch, broken, why):
    build = MODEL.build

    class Broken(build):
        def forward(self, tokens, labels):
            loss = super().forward(tokens, labels)
            return loss * math.nan if broken == "loss" else loss.detach() + 0 * self.norm.sum()

    rival = BuiltIn(replace(MODEL, build=Broken), OTHER, RECIPE, "tiny-llama:other")
    with pytest.raises(ValueError, match=why):
        duel("plan", lambda: None, rival, "float32", 0.01)
