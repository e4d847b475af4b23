"""best_plan(): every plan verified whole and timed, the reason kept for each that lost, the result found again in the lock."""

import contextlib
import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import without

import whet.plans
from whet import machine, models, subjects
from whet.choices import Choices
from whet.lock import Lock
from whet.models import Recipe
from whet.models.tiny_llama import MODEL, RECIPES, SIZES, TinyLlamaConfig
from whet.op import Impl, discover
from whet.plan import asked_plans
from whet.plans import BEFORE, PRECISIONS, Plan, PlanRunner, best_plan
from whet.race import NOISY
from whet.subjects import BuiltIn
from whet.verify import Verdict, judge
from whet.workload import in_precision

SMALL = TinyLlamaConfig(hidden=32, layers=1, heads=2, kv_heads=1, vocab=31)
RECIPE = Recipe(batch=2, seq_len=8)
TARGET = "tiny-llama:test"
SUBJECT = BuiltIn(MODEL, SMALL, RECIPE)
OPS = {"rms_norm", "add_rms_norm", "rope", "attention", "linear", "gated_linear", "linear_cross_entropy"}


@contextlib.contextmanager
def few_candidates(patch: pytest.MonkeyPatch):
    """The tiny model, and no torch.compile of single ops: whole plans are compiled anyway."""
    patch.setitem(SIZES, "test", SMALL)
    patch.setitem(RECIPES, "test", RECIPE)
    with without("compile", "liger"):
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """One full run: its result, its lock, and the progress it showed."""
    path, shown = tmp_path_factory.mktemp("optimize") / "whet.lock", []
    with pytest.MonkeyPatch.context() as patch, few_candidates(patch):
        result = best_plan(TARGET, Lock.read(path), seconds=0.02, progress=lambda *step: shown.append(step))
    return result, path, shown


@pytest.fixture
def small(monkeypatch):
    """The tiny model with its plans that need no compilation."""
    monkeypatch.setitem(SIZES, "test", SMALL)
    monkeypatch.setitem(RECIPES, "test", RECIPE)
    every = BuiltIn.plans
    monkeypatch.setattr(BuiltIn, "plans", lambda self: [p for p in every(self) if not p.compiled])


@pytest.fixture
def tuned(first):
    """A lock of its own that knows every call, and no plan."""
    data = copy.deepcopy(json.loads(first[1].read_text()))
    for part in data["machines"].values():
        part["plans"] = {}
    return Lock(data=data)


class Reached(Exception):
    pass


def stop(*_, **__):
    raise Reached


def named(result: dict) -> dict[str, dict]:
    return {p["name"]: p for p in result["plans"]}


def test_every_plan_is_in_the_result_timed_or_with_its_reason(first):
    found = named(first[0])
    assert {BEFORE, *(p.name for p in SUBJECT.plans())} <= set(found)
    for plan in found.values():
        assert plan["ok"] or plan["why"], plan
        if plan["ok"]:
            assert plan["low"] <= plan["ms"] <= plan["high"] and plan["samples"] >= 3
            assert plan["samples_per_s"] == pytest.approx(RECIPE.batch / plan["ms"] * 1e3, rel=0.01)
            assert plan["vs_best_low"] <= plan["vs_best"] <= plan["vs_best_high"] and plan["speedup"] > 0
        if plan["ok"] and plan["name"] != BEFORE:
            assert 0 <= plan["share"] <= 1 and plan["before_ms"] > 0
    assert all(found[p.name]["ok"] for p in SUBJECT.plans()), {n: p["why"] for n, p in found.items()}


def test_the_chosen_plan_is_verified_and_no_other_is_clearly_faster(first):
    result = first[0]
    chosen = named(result)[result["chosen"]]
    assert chosen["ok"] and result["speedup"] == chosen["speedup"]
    best = min((p for p in result["plans"] if p["ok"]), key=lambda p: p["vs_best"])
    assert best["vs_best"] == 1.0
    if result["chosen"] != best["name"]:
        assert result["tied"] or result["why"].startswith(NOISY)


def test_every_call_of_the_model_has_an_entry_with_a_choice_and_reasons(first):
    entries = first[0]["entries"]
    assert {e["call"]["op"] for e in entries} == OPS
    for e in entries:
        assert e["chosen"] in e["candidates"] and e["candidates"][e["chosen"]]["ok"] and e["why"] and e["count"] >= 1
        assert set(e["candidates"]) >= {"eager", "triton"}
        for c in e["candidates"].values():
            assert c["why"] or c["ok"]
    counts = {e["call"]["op"]: e["count"] for e in entries}
    assert counts["rms_norm"] == 1 and counts["add_rms_norm"] == 2, "one layer: the first norm alone, two with the add inside"


def test_the_result_is_plain_json(first):
    assert json.loads(json.dumps(first[0], allow_nan=False)) == first[0]


def test_progress_never_runs_past_its_total(first):
    assert first[2] and all(0 <= done <= total for _, done, total in first[2])
    assert any("plan" in text for text, _, _ in first[2])


def test_the_lock_holds_calls_and_plans(first):
    lock = Lock.read(first[1])
    assert f"{TARGET} float32" in lock.plans and len(lock.calls) == len(first[0]["entries"])
    assert "entries" not in lock.plans[f"{TARGET} float32"], "the calls are in the lock once"


def test_a_second_run_comes_from_the_lock_and_runs_nothing(first, small, monkeypatch):
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: pytest.fail("a process was started"))
    monkeypatch.setattr(whet.plans, "Trial", lambda *_: pytest.fail("plans were tried"))
    before = first[1].read_text()
    again = best_plan(TARGET, Lock.read(first[1]))
    assert again["from_lock"] and not first[0]["from_lock"]
    assert {**again, "from_lock": False} == first[0]
    assert first[1].read_text() == before


@pytest.mark.parametrize("how", ["again", "config", "precision"])
def test_plans_are_measured_anew_when_asked_or_when_they_do_not_apply(how, first, small, monkeypatch):
    monkeypatch.setattr(whet.plans, "Trial", stop)
    monkeypatch.setattr(whet.plans, "Tuning", lambda *_, **__: pytest.fail("calls were tuned"))
    if how == "config":
        monkeypatch.setitem(RECIPES, "test", replace(RECIPE, seed=7))
    with pytest.raises(Reached):
        best_plan(TARGET, Lock.read(first[1]), precision="tf32" if how == "precision" else "float32", again=how == "again")


def test_a_plan_that_raises_loses_its_candidacy_with_the_reason(small, tuned, monkeypatch):
    class Failing(PlanRunner):
        def __init__(self, trial, plan, *rest):
            if plan.choices == "tuned":
                raise RuntimeError("CUDA error: an illegal memory access\nand a long trace")
            super().__init__(trial, plan, *rest)

    monkeypatch.setattr(whet.plans, "PlanRunner", Failing)
    result = best_plan(TARGET, tuned, seconds=0.02)
    lost = named(result)["eager + choices"]
    assert not lost["ok"] and "ms" not in lost
    assert lost["why"] == "RuntimeError: CUDA error: an illegal memory access"
    assert named(result)["eager"]["ok"] and result["chosen"] != "eager + choices"


def wrong(value):
    def run(x, w, eps=1e-6, out_dtype=None):
        return discover()["rms_norm"].reference(x, w, eps) * value

    return run


def cut(x, w, eps=1e-6, out_dtype=None):
    """Right values, no gradient for w."""
    return discover()["rms_norm"].reference(x, w.detach(), eps)


@pytest.mark.parametrize(
    "run, reason",
    [(wrong(1.01), "exceeds"), (wrong(float("nan")), "non-finite"), (cut, "the graph is cut")],
    ids=["scaled", "nan", "cut"],
)
def test_a_wrong_kernel_is_caught_by_the_whole_model(run, reason, small, tuned, monkeypatch):
    """Whatever the lock says of a kernel, a plan that uses it must still pass."""
    monkeypatch.setitem(discover()["rms_norm"].impls, "compile", Impl(run))
    for e in tuned.calls.values():
        if e["call"]["op"] == "rms_norm":
            e["chosen"] = "compile"
    result = best_plan(TARGET, tuned, seconds=0.02)
    lost = named(result)["eager + choices"]
    assert not lost["ok"] and reason in lost["why"] and "ms" not in lost
    assert named(result)["eager"]["ok"] and result["chosen"] != "eager + choices"
    assert tuned.table("eager") == {} and result["forgotten"] == ["eager"], "they steer no call any more"
    assert {e["call"]["op"] for e in result["entries"]} == OPS and "taken out of the lock" in result["note"]


def test_with_no_plan_left_the_model_stays_as_it_was(small, tuned, monkeypatch):
    monkeypatch.setattr(whet.plans, "judge", lambda *_: Verdict(False, why="planted"))
    result = best_plan(TARGET, tuned, seconds=0.02)
    assert result["chosen"] == BEFORE and result["speedup"] == 1.0
    assert all(p["why"] == "planted" for p in result["plans"] if p["name"] != BEFORE)


def test_a_lock_that_cannot_be_written_costs_one_line(small, tuned, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    tuned.path = Path(tmp_path / "file" / "whet.lock")
    result = best_plan(TARGET, tuned, seconds=0.02)
    assert named(result)["eager"]["ok"]
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "cannot be written" in said[0]


@pytest.mark.parametrize("name, value", [("blocks.0.norm1", float("nan")), ("embed.weight", float("inf"))])
def test_broken_weights_are_named_before_anything_is_tuned(name, value, small, monkeypatch):
    def build(*args, **options):
        module = MODEL.build(*args, **options)
        with torch.no_grad():
            dict(module.named_parameters())[name].view(-1)[3] = value
        return module

    monkeypatch.setattr(models, "discover", lambda: {"tiny-llama": replace(MODEL, build=build)})
    monkeypatch.setattr(whet.plans, "Tuning", stop)
    with pytest.raises(ValueError, match=f"tiny-llama: parameter {name} has NaN or infinite values"):
        best_plan(TARGET, Lock())


def test_wrong_arguments_are_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"precision must be one of \('float32', 'tf32', 'bfloat16'\), got 'fp8'"):
        best_plan(TARGET, Lock(), precision="fp8")
    with pytest.raises(ValueError, match="unknown model 'gpt-9'; there are .*tiny-llama"):
        best_plan("gpt-9", Lock())
    with pytest.raises(ValueError, match="has no size 'huge'; there are small, "):
        best_plan("tiny-llama:huge", Lock())


def test_calls_are_recorded_at_the_precision_asked_for(device):
    def dtypes(precision):
        calls = BuiltIn(MODEL, SMALL, RECIPE, device=device).calls(precision)
        asked = OPS - {"linear"} if precision == "bfloat16" else OPS  # of 16 bits PyTorch's products are as fast as they get
        assert {call.op for call, _ in calls} == asked and all(call.grad for call, _ in calls)
        return {call.op: call.dtype for call, _ in calls}

    assert dtypes("float32") == dtypes("tf32") == dict.fromkeys(OPS, "float32")
    low = dtypes("bfloat16")
    assert low["rope"] == low["gated_linear"] == "bfloat16"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_ends_with_its_block(precision, device):
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(Reached), in_precision(precision, device):
        assert torch.is_autocast_enabled(device) == (precision == "bfloat16")
        assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
        raise Reached
    assert torch.get_float32_matmul_precision() == before and not torch.is_autocast_enabled(device)


def test_bfloat16_is_tuned_verified_and_timed(small, tuned, monkeypatch):
    with few_candidates(monkeypatch):
        result = best_plan(TARGET, tuned, precision="bfloat16", seconds=0.02)
    assert result["target"].endswith("bfloat16")
    assert all(p["ok"] for p in result["plans"]), {p["name"]: p["why"] for p in result["plans"]}
    assert "bfloat16" in {e["call"]["dtype"] for e in result["entries"]}


def test_a_plan_takes_the_choices_of_the_way_it_runs():
    assert Plan("p", "v3", "tuned").mode == "eager"
    assert Plan("p", "v3", "tuned", graph=True).mode == "graph"
    assert Plan("p", "v3", "tuned", compiled=True).mode == "compile"
    assert Plan("p", "v3", "tuned", compiled=True, graph=True).mode == "compile + graph"


def test_where_an_impl_cannot_be_used_the_next_fastest_verified_one_is():
    lock, times = Lock(), {"eager": 4.0, "torch": 2.0, "triton": 1.5, "liger": 1.0}
    candidates = {name: {"ok": name != "triton", "ms": ms} for name, ms in times.items()}
    lock.calls["a call @ graph"] = {"chosen": "liger", "candidates": candidates}
    lock.calls["another @ graph"] = {"chosen": "torch", "candidates": candidates}
    assert lock.table("graph") == {"a call": "liger", "another": "torch"}
    assert lock.table("graph", without=("liger",)) == {"a call": "torch", "another": "torch"}
    assert lock.table("eager", without=("liger",)) == {}


class Replay:
    """A CUDA graph's shape without a GPU: captures nothing, runs again when called."""

    def __init__(self, run):
        self.run = run

    def __call__(self):
        return self.run()


@pytest.mark.parametrize("alike", [True, False])
def test_every_plan_is_tried_under_a_graph_too_and_a_compiled_one_is_built_once_for_the_same_choices(monkeypatch, alike):
    built = []

    class Counted(PlanRunner):
        def __init__(self, trial, plan, *rest):
            built.append(plan.name)
            super().__init__(trial, plan, *rest)

    monkeypatch.setattr(whet.plans, "PlanRunner", Counted)
    monkeypatch.setattr("whet.workload.Graph", Replay)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    trial = whet.plans.Trial(SUBJECT, "float32", 0.02)
    trial.graphs, trial.choices = True, {mode: Choices() for mode in ("eager", "graph", "compile", "compile + graph")}
    trial.choices["compile"].table |= {} if alike else {"a call": "compile"}
    todo = SUBJECT.plans()
    trial.prepare_early(todo)
    assert list(trial.ready) == ["torch.compile"]
    for plan in todo:
        trial.run(plan)
    assert len(trial.entered) == 2 * len(todo), "all wait in memory for the race"
    trial.heat()
    results = list(trial.results.values())
    assert [r.name for r in results] == [n for p in todo for n in (p.name, p.name + " + CUDA graph")]
    assert all(r.ok and r.timing.ms > 0 and r.ready_s >= 0 for r in results), [r.why for r in results]
    assert [r.plan.graph for r in results] == [False, True] * len(todo)
    assert {n: built.count(n) for n in built if n != BEFORE} == {
        "eager": 1, "eager + CUDA graph": 1, "eager + choices": 1, "eager + choices + CUDA graph": 1,
        "torch.compile": 1, "torch.compile + choices": 1,
    } | ({} if alike else {"torch.compile + choices + CUDA graph": 1})
    assert not trial.ready


def test_the_memory_of_a_graph_of_what_was_compiled_early_is_its_own(monkeypatch):
    """Other plans were built between the two, and wait in memory."""
    now, origins = [0], {}

    class Held(PlanRunner):
        def __init__(self, *args):
            super().__init__(*args)
            now[0] += 10

    @contextlib.contextmanager
    def seen(result, origin):
        origins[result.name] = now[0] - origin
        yield

    monkeypatch.setattr(whet.plans, "PlanRunner", Held)
    monkeypatch.setattr(whet.plans, "memory_allocated", lambda: now[0])
    monkeypatch.setattr(whet.plans, "peak_memory", seen)
    monkeypatch.setattr("whet.workload.Graph", Replay)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    trial = whet.plans.Trial(SUBJECT, "float32", 0.02)
    trial.graphs, todo = True, [p for p in SUBJECT.plans() if p.choices == "stock"]
    trial.prepare_early(todo)
    for plan in todo:
        trial.run(plan)
    assert origins.pop(BEFORE) == 0 and set(origins) == set(trial.entered)
    assert origins == dict.fromkeys(origins, 0) | {"torch.compile + CUDA graph": 10}, "what the runner held, and no other's"


def test_a_plan_that_cannot_be_captured_keeps_its_uncaptured_result(monkeypatch):
    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("whet.workload.Graph", refuse)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    trial = whet.plans.Trial(SUBJECT, "float32", 0.02)
    trial.graphs = True
    for plan in [p for p in SUBJECT.plans() if p.choices == "stock"]:
        trial.run(plan)
        plain, graphed = (trial.results[plan.name + end] for end in ("", " + CUDA graph"))
        assert plain.ok and not graphed.ok and "not permitted when stream is capturing" in graphed.why


def test_plans_that_are_named_are_tried_alone_and_the_lock_keeps_none(small, tuned):
    result = best_plan(TARGET, tuned, seconds=0.02, only=["eager + choices"])
    assert list(named(result)) == [BEFORE, "eager + choices"] and named(result)["eager + choices"]["ok"]
    assert result["entries"] and not tuned.plans
    with pytest.raises(ValueError, match="no plan 'fast' here; there are eager, eager"):
        best_plan(TARGET, tuned, only=["fast"])


def test_of_a_plan_that_is_named_only_as_a_graph_nothing_else_is_raced(monkeypatch):
    monkeypatch.setattr("whet.workload.Graph", Replay)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    trial = whet.plans.Trial(SUBJECT, "float32", 0.02)
    trial.graphs, trial.choices = True, {mode: Choices() for mode in ("eager", "graph", "compile", "compile + graph")}
    trial.only = ["eager + CUDA graph", "torch.compile + choices + CUDA graph"]
    for plan in asked_plans(SUBJECT.plans(), trial.only, graphs=True):
        trial.run(plan)
    assert [*trial.results] == trial.only == [*trial.entered], {n: r.why for n, r in trial.results.items()}


def test_a_model_with_too_many_scores_for_float64_is_verified_with_fewer_layers(small, tuned, monkeypatch):
    monkeypatch.setitem(SIZES, "test", replace(SMALL, layers=3))
    monkeypatch.setitem(subjects.ORACLE_SCORES, machine.this_machine().device, 2 * RECIPE.batch * SMALL.heads * 8 * 8)
    judged = []
    monkeypatch.setattr(whet.plans, "judge", lambda found, *rest: judged.append(found) or judge(found, *rest))
    result = best_plan(TARGET, tuned, seconds=0.02)
    assert all(p["ok"] for p in result["plans"]) and len(judged) == 2
    numbers = [{part for name in found for part in name.split(".") if part.isdigit()} for found in judged]
    assert numbers == [{"0", "1"}] * 2
    assert any(note.startswith("verified with 2 of 3 layers, at the whole batch") for note in result["notes"])
    before = whet.plans.Trial(subjects.subject_of(TARGET), "bfloat16", 0.02).before
    assert (before.work.precision, before.work.model.variant) == ("bfloat16", MODEL.stock), "and not for minutes in float32"
