"""whet optimize --max-memory: leaner impls and blocks computed again, by prediction; the fastest of the plans that fit."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from whet.choices import Choices
from whet.diagnose.target import Target
from whet.lock import Lock
from whet.measure import Race
from whet.models import find, recipe_of
from whet.op import Call
from whet.plan import BEFORE, Plan, PlanResult, graphed
from whet.plan_limits import AIM, Leaner, Limit, fastest, kept_bytes, leaner, refuse_early, rounds, steps_down, told, within
from whet.plan_memory import PlanMemory, PredictedMemory
from whet.plans import Trial, best_plan
from whet.race import TIED, race_outcome, timing
from whet.subjects import BuiltIn, Given

GIB = 2**30
MLP = Call("mlp", dict(M=256, D=64, H=512, O=64, gated=False, activation="silu", layout="contiguous"), "bfloat16", True)
TUNED = Plan("eager + choices", "tuned", "tuned")


class Stack(nn.Module):
    """Four blocks, each of which keeps many values for its backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@functools.cache
def given() -> Given:
    torch.manual_seed(0)
    return Given(Target(Stack(), (torch.randn(512, 32),), kind="train", name="mine"))


def gpt() -> BuiltIn:
    model, size = find("gpt2:tiny@8x128")
    return BuiltIn(model, model.sizes[size], recipe_of("gpt2:tiny@8x128"), "gpt2:tiny@8x128")


def entry(call: Call, chosen: str, ms: dict[str, float], mode: str = "eager", count: int = 3) -> dict[str, dict]:
    candidates = {name: {"ok": True, "ms": t} for name, t in ms.items()}
    named = dict(op=call.op, case=call.case, dtype=call.dtype, grad=call.grad)
    return {f"{call.key} @ {mode}": {"call": named, "mode": mode, "count": count, "chosen": chosen, "candidates": candidates}}


class Shapes(PlanMemory):
    """10 GiB, 1 less for each block that is computed again, and 2 less where mlp recomputes; a CUDA graph takes 1 more."""

    def __init__(self):
        super().__init__(lambda *_: pytest.fail("it was built"), "cpu", [])

    def of(self, plan, choices, precision):
        lean = choices is not None and "hybrid_recompute" in choices.table.values()
        return None if plan.compiled else PredictedMemory((10 - plan.blocks - 2 * lean + plan.graph) * GIB, GIB)


def added(most: float, choices: Choices | None = None, plan: Plan = TUNED, entries: dict | None = None, graphs=False):
    limit = Limit(int(most * GIB), Shapes(), "float32", graphs)
    return limit, limit.plans(plan, choices, entries or {}, 4)


def test_bytes_that_a_call_keeps_are_those_of_what_its_backward_needs():
    hidden = 256 * 512 * 2
    kept = {name: kept_bytes(MLP, name, "cpu") for name in ("torch", "hybrid", "hybrid_recompute", "triton", "compile")}
    assert kept["hybrid"] - kept["hybrid_recompute"] == hidden and kept["triton"] == kept["hybrid_recompute"]
    assert kept["torch"] - kept["hybrid"] >= hidden and kept["compile"] is None


def test_leaner_candidates_come_by_what_a_byte_costs_in_time():
    ms = {"hybrid": 1.0, "hybrid_recompute": 1.3, "triton": 2.0, "compile": 0.5, "torch": 1.1}
    found = leaner(entry(MLP, "hybrid", ms), {MLP.key: "hybrid"}, "eager", "cpu")
    assert [one.candidate for one in found] == ["hybrid_recompute", "triton"]
    assert found[0].saved == 3 * 256 * 512 * 2 and found[0].ms == pytest.approx(0.9)
    assert not leaner(entry(MLP, "hybrid", ms), {MLP.key: "hybrid"}, "graph", "cpu"), "of that mode nothing was timed"
    unsure = entry(MLP, "hybrid", ms)
    next(iter(unsure.values()))["candidates"]["hybrid_recompute"]["ok"] = False
    assert [one.candidate for one in leaner(unsure, {MLP.key: "hybrid"}, "eager", "cpu")] == ["triton"]


def test_a_table_goes_down_call_by_call_and_never_back_up():
    found = [Leaner("a", "hybrid", 10, 0.1), Leaner("b", "lean", 5, 0.1), Leaner("a", "less", 4, 0.1)]
    found.append(Leaner("a", "least", 20, 9.0))
    assert [*steps_down({"a": "torch", "b": "torch"}, found)] == [
        {"a": "hybrid", "b": "torch"}, {"a": "hybrid", "b": "lean"}, {"a": "least", "b": "lean"},
    ]


def test_what_fits_by_prediction_has_no_leaner_plan_beside_it():
    assert added(11.0)[1] == [] and added(4.0, plan=Plan("torch.compile", "tuned", "tuned", compiled=True))[1] == []


def test_the_fewest_blocks_and_leaner_impls_are_each_a_plan_and_both_where_neither_is_enough():
    entries, table = entry(MLP, "hybrid", {"hybrid": 1.0, "hybrid_recompute": 1.3}), {MLP.key: "hybrid"}
    _, plans = added(9.0, Choices(table), Plan("eager", "stock", "stock"))
    assert [(p.name, p.blocks) for p in plans] == [("eager, 2 of 4 blocks computed again", 2)], "9 GiB itself is too near"
    limit, plans = added(9.0, Choices(table), entries=entries)
    assert [(p.name, p.choices, p.blocks) for p in plans] == [
        ("eager + choices, 2 of 4 blocks computed again", "tuned", 2), ("eager + choices, leaner", "tuned, leaner", 0),
    ]
    assert limit.choices["tuned, leaner"].table == {MLP.key: "hybrid_recompute"}
    _, plans = added(5.0, Choices(table), entries=entries)
    assert [(p.name, p.blocks) for p in plans] == [("eager + choices, leaner, 4 of 4 blocks computed again", 4)]
    _, plans = added(9.0, Choices(table), entries={k.replace("eager", "graph"): e for k, e in entries.items()}, graphs=True)
    assert [p.blocks for p in plans] == [3, 1], "a CUDA graph takes a GiB more, and is to fit as well"


def test_where_all_of_it_is_not_enough_the_least_that_any_plan_takes_is_said():
    entries = entry(MLP, "hybrid", {"hybrid": 1.0, "hybrid_recompute": 1.3})
    limit, plans = added(3.0, Choices({MLP.key: "hybrid"}), entries=entries)
    assert plans == []
    with pytest.raises(ValueError, match=r"^optimize: mine: no plan takes 3\.00 GiB or less; the least any plan takes is "
                                         r"4\.00 GiB: eager \+ choices, leaner, 4 of 4 blocks computed again, by prediction$"):
        limit.refuse_in_vain("mine", 4)
    near, _ = added(3.9, Choices({MLP.key: "hybrid"}), entries=entries)
    near.refuse_in_vain("mine", 4)  # the prediction may be off by that much


@pytest.mark.parametrize("name", ["eager + choices", "eager + choices + CUDA graph", "CUDA graph", "torch.compile"])
def test_a_leaner_plan_belongs_to_the_one_that_only_may_name(name):
    plan = Plan(name.removesuffix(" + CUDA graph"), "tuned", "tuned")
    lean = Plan(f"{plan.name}, leaner, 2 of 4 blocks computed again", "tuned", "lean", blocks=2)
    assert (graphed(lean) if name.endswith(" + CUDA graph") else lean).base == name
    assert plan.base == plan.name


COMPILED = {"compile": 0.5, "hybrid": 1.0, "hybrid_recompute": 1.3, "torch": 1.1}


def test_where_torch_compile_serves_a_call_the_fastest_that_can_be_told_takes_its_place():
    class Unknown(Shapes):
        def of(self, plan, choices, precision):
            return None if "compile" in choices.table.values() else super().of(plan, choices, precision)

    def plans(most):
        limit = Limit(int(most * GIB), Unknown(), "float32", False)
        found = limit.plans(TUNED, Choices({MLP.key: "compile"}), entry(MLP, "compile", COMPILED), 4)
        return [(p.name, limit.choices[p.choices].table[MLP.key], p.blocks) for p in found]

    assert plans(11.0) == [("eager + choices, leaner", "hybrid", 0)]
    again = "of 4 blocks computed again"
    assert plans(9.0) == [
        (f"eager + choices, leaner, 2 {again}", "hybrid", 2), ("eager + choices, leaner still", "hybrid_recompute", 0),
    ]
    assert plans(7.0) == [
        (f"eager + choices, leaner, 4 {again}", "hybrid", 4),
        (f"eager + choices, leaner still, 2 {again}", "hybrid_recompute", 2),
    ]
    assert plans(1.0) == []


def test_a_candidate_that_torch_compile_does_not_serve_keeps_its_place():
    known = told(entry(MLP, "hybrid", COMPILED), {MLP.key: "hybrid", "another": "compile"}, "eager", "cpu")
    assert known == {MLP.key: "hybrid", "another": "compile"}, "of another nothing was timed"


def test_what_a_cuda_graph_takes_is_that_of_the_choices_made_for_one():
    """Launched from Python another impl may be the fastest, which keeps less or more."""
    tables = {"eager": Choices({MLP.key: "hybrid_recompute"}), "graph": Choices({MLP.key: "hybrid"})}
    limit = Limit(10 * GIB, Shapes(), "float32", True)
    entries = entry(MLP, "hybrid", COMPILED, mode="graph")
    found = within([TUNED], gpt(), limit, lambda plan: tables[plan.mode], entries)
    assert [(p.name, p.blocks) for p in found[1:]] == [
        ("eager + choices, 2 of 4 blocks computed again", 2), ("eager + choices, leaner", 0),
    ]


def test_where_plans_took_more_than_predicted_leaner_ones_still_are_tried():
    limit, subject = Limit(9 * GIB, Shapes(), "float32", False), gpt()
    found, tried = dict[str, PlanResult](), []
    for plans in rounds([Plan("eager", "stock", "stock")], subject, limit, lambda plan: Choices(), {}, found):
        for plan in plans:
            mb = (10 - plan.blocks) * GIB / 1e6
            found[plan.name] = PlanResult(plan, ok=True, predicted_mb=mb, peak_mb=1.2 * mb)
        tried.append([p.blocks for p in plans])
    assert tried == [[0, 2], [3]], "7 GiB by prediction are 8.4"
    assert not limit.missed(found.values())


def test_other_leaner_choices_of_a_later_round_have_another_name():
    limit = Limit(9 * GIB, Shapes(), "float32", False)
    names = [limit._leaner(TUNED, Choices({MLP.key: impl})).name for impl in ("hybrid", "triton", "hybrid")]
    assert names == ["eager + choices, leaner", "eager + choices, leaner still", "eager + choices, leaner"]


def test_where_what_took_less_is_wrong_it_is_not_said_that_none_takes_as_little():
    found = results({BEFORE: 3000.0, "eager": 2000.0, "eager, leaner": 900.0})
    found["eager, leaner"].lost("the gradient of w is off")
    limit = Limit(10**9, Shapes(), "float32", False)
    with pytest.raises(ValueError, match="takes is 1.86 GiB: eager; eager, leaner: the gradient of w is off$"):
        fastest([heat({BEFORE: 10.0, "eager": 5.0})], found, limit, "mine")
    unknown = results({BEFORE: 3000.0, "torch.compile": None})
    with pytest.raises(ValueError, match=r"2.79 GiB: before: plain eager; torch\.compile: its memory is not known here$"):
        fastest([heat({BEFORE: 10.0, "torch.compile": 5.0})], unknown, limit, "mine")


def test_without_a_gpu_a_model_that_cannot_be_predicted_is_refused_before_its_plans_run():
    class Nothing(Shapes):
        def of(self, plan, choices, precision):
            self.notes[:] = ["swapped: nothing", "memory is not predicted: it looks at values"]

    why = "mine: what plans take is not known without a GPU: memory is not predicted: it looks at values$"
    with pytest.raises(ValueError, match=why):
        within([], given(), Limit(GIB, Nothing(), "float32", False), lambda plan: None, {})


def results(mb: dict[str, float | None]) -> dict[str, PlanResult]:
    return {n: PlanResult(Plan(n, "v", "stock"), ok=True, peak_mb=m) for n, m in mb.items()}


def heat(ms: dict[str, float]) -> Race:
    times = {name: [t] * 12 for name, t in ms.items()}
    return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, BEFORE), "", times)


def test_the_fastest_plan_that_keeps_to_the_limit_is_chosen_and_the_others_say_what_they_took():
    found = results({BEFORE: 3000.0, "eager": 2000.0, "eager, leaner": 900.0, "eager, 1 of 4 blocks": 950.0, "compiled": None})
    limit = Limit(10**9, Shapes(), "float32", False)
    ms = {BEFORE: 10.0, "eager": 5.0, "eager, leaner": 7.0, "eager, 1 of 4 blocks": 8.0, "compiled": 1.0}
    done = fastest([heat(ms)], found, limit, "mine")
    assert done.chosen == "eager, leaner" and done.why.endswith(", of those within 0.93 GiB")
    assert [*done.ratios] == ["eager, leaner", "eager, 1 of 4 blocks"]
    assert found["eager"].why == "over the limit of 0.93 GiB: it takes 1.86 GiB" and found["eager"].ok
    assert found["compiled"].why == "its memory is not known here"
    assert fastest([heat(ms)], results(dict.fromkeys(ms, 900.0)), limit, "mine").chosen == "compiled"
    tied = fastest([heat({BEFORE: 5.0, "eager": 4.98})], results({BEFORE: 3000.0, "eager": 1.0}), limit, "mine")
    assert tied.chosen == "eager" and not tied.why.startswith(TIED)
    with pytest.raises(ValueError, match="no plan takes 0.93 GiB or less; the least any plan takes is 1.86 GiB: eager"):
        fastest([heat({BEFORE: 10.0, "eager": 5.0})], results({BEFORE: 3000.0, "eager": 2000.0}), limit, "mine")


@pytest.mark.parametrize("subject", [given, gpt], ids=["a user's", "built in"])
def test_a_model_over_the_limit_runs_with_blocks_computed_again_and_the_same_gradients(subject):
    made = subject()
    trial = Trial(made, "float32", 0.01)
    base = Plan("eager", "", "own") if isinstance(made, Given) else made.plans()[0]
    some = replace(base, blocks=len(made.blocks) - 1)
    least, whole = (trial.memory.of(p, trial.choices_of(p), "float32").peak for p in (some, base))
    assert least < 0.9 * whole
    limit = trial.limit = Limit(int(least / AIM) + 1, trial.memory, "float32", False)
    todo = within([p for p in [base] if p.choices != "own"], made, limit, trial.choices_of, {})
    assert [p.blocks > 0 for p in todo] == [*[False] * (base.choices != "own"), True]
    for plan in todo:
        trial.run(plan)
    trial.heat()
    done = trial.outcome()
    assert done.chosen == todo[-1].name and "blocks computed again" in done.chosen
    chosen = trial.results[done.chosen]
    assert chosen.ok and chosen.share <= 1 and chosen.predicted_mb * 1e6 <= limit.most
    assert trial.before_result.why.startswith("over the limit of")


def test_a_limit_below_what_stays_between_steps_is_refused_before_any_verification(monkeypatch):
    monkeypatch.setattr("whet.plans.Tuning", lambda *_, **__: pytest.fail("candidates were verified"))
    said = "no plan takes 10.0 KiB or less; parameters, gradients and the optimizer's state alone take"
    with pytest.raises(ValueError, match=said):
        best_plan("gpt2:tiny", Lock(), max_memory=10 * 2**10)


def test_a_limit_that_weights_and_their_gradients_keep_to_is_not_refused_early():
    memory, subject = PlanMemory(gpt().workload, "cpu", []), gpt()
    kept = memory.of(stock := next(p for p in subject.plans() if p.choices == "stock"), Choices(), "float32").kept
    refuse_early(memory, subject, "float32", kept)
    with pytest.raises(ValueError, match="alone take"):
        refuse_early(memory, subject, "float32", kept // 2)
    sizes = [4 * p.numel() for p in subject.workload(stock, Choices(), "float32").model.parameters()]
    assert 4 * sum(sizes) <= kept < 4.1 * sum(sizes), "weights, gradients, two moments, and a batch"
