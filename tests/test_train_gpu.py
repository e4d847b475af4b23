"""The training loop on a GPU: CUDA graphs, chosen kernels, accumulation, resumes, retunes, the torch.compile plan."""

import json
import math

import pytest
from test_train_loop import losses, quiet, shards, small  # noqa: F401

from whet.lock import Lock
from whet.train import loop
from whet.train.log import read_log
from whet.train.overhead import measure_overhead

GRAPH = {"kernels__plan": "CUDA graph", "kernels__tune": False, "train__steps": 12, "train__seq_len": 64, "model__width": 128}
TUNED = GRAPH | {"kernels__tune": True}


@pytest.fixture(scope="module")
def lock() -> Lock:
    """Kernels are chosen once for all runs of a shape."""
    return Lock()


def plan_of(folder) -> str:
    return json.loads((folder / "run.json").read_text())["plan"]


def close(a: list, b: list) -> bool:
    """The same steps, and losses that two orders of summation may give in float32 after a dozen updates."""
    return [x[0] for x in a] == [x[0] for x in b] and all(math.isclose(x[1], y[1], rel_tol=1e-3) for x, y in zip(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [
    {}, dict(train__accumulate=2), dict(train__optimizer="muon"), dict(train__ema=0.9), dict(train__checkpointed_blocks=-1),
    dict(kernels__tune=True),
], ids=["", "accumulate", "muon", "ema", "checkpointed", "tuned"])
def test_a_run_by_a_cuda_graph_has_the_losses_of_the_step_as_it_is(shards, lock, tmp_path, changes):  # noqa: F811
    plain = small(shards, **GRAPH | changes | dict(kernels__plan="as it is", kernels__tune=False))
    quiet(plain, tmp_path / "plain")
    quiet(small(shards, **GRAPH | changes), tmp_path / "graph", lock=lock)
    assert "CUDA graph" in plan_of(tmp_path / "graph") and "could not be captured" not in plan_of(tmp_path / "graph")
    said = [line["text"] for line in read_log(tmp_path / "graph" / "log.jsonl") if line["kind"] == "event"]
    assert not any("could not be captured" in text or "changed after" in text for text in said), said
    found = losses(tmp_path / "graph")
    assert close(found, losses(tmp_path / "plain")) and found[-1][1] < found[0][1] - 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-weights", "tf32"])
def test_every_precision_trains_by_the_best_plan(shards, tmp_path, precision):  # noqa: F811
    auto = dict(kernels__plan="auto", train__precision=precision)
    outcome = quiet(small(shards, **GRAPH | auto), tmp_path / "run")
    assert outcome.step == 12 and outcome.loss < losses(tmp_path / "run")[0][1] - 1
    last = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "step"][-1]
    assert last["memory_mib"] > 0 and (last["mfu"] or 0) >= 0


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, dict(train__accumulate=2)], ids=["", "accumulate"])
def test_a_stopped_run_goes_on_with_the_losses_of_one_that_was_not(shards, lock, tmp_path, monkeypatch, changes):  # noqa: F811
    recipe = small(shards, **GRAPH | changes)
    quiet(recipe, tmp_path / "whole", lock=lock)
    real = loop.saved

    class Enough(Exception):
        pass

    def stop(run):
        real(run)
        if run.step == 6:
            raise Enough

    monkeypatch.setattr(loop, "saved", stop)
    with pytest.raises(Enough):
        quiet(recipe, tmp_path / "part", lock=lock)
    monkeypatch.setattr(loop, "saved", real)
    quiet(recipe, tmp_path / "part", resume=True, lock=lock)
    assert close(losses(tmp_path / "part"), losses(tmp_path / "whole"))


@pytest.mark.gpu
def test_kernels_timed_again_while_a_graph_serves_leave_the_losses_as_they_are(shards, lock, tmp_path):  # noqa: F811
    quiet(small(shards, **TUNED), tmp_path / "once", lock=lock)
    quiet(small(shards, **TUNED | dict(kernels__retune_every=5)), tmp_path / "again", lock=lock)
    assert close(losses(tmp_path / "again"), losses(tmp_path / "once"))
    assert sum(line.get("what") == "retune" for line in read_log(tmp_path / "again" / "log.jsonl")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["torch.compile", "torch.compile + CUDA graph"])
def test_a_named_plan_is_chosen_or_the_step_as_it_is(shards, tmp_path, plan):  # noqa: F811
    quiet(small(shards, **GRAPH | dict(kernels__plan=plan)), tmp_path / "run")
    said = plan_of(tmp_path / "run")
    assert f": {plan}: " in said or ": as it is: " in said, said


@pytest.mark.gpu
def test_the_loops_own_cost_over_a_graph_is_measured(shards, tmp_path):  # noqa: F811
    quiet(small(shards, **GRAPH), tmp_path / "run", after=measure_overhead)
    found = json.loads((tmp_path / "run" / "run.json").read_text())["overhead"]
    assert found["loop_ms"] > 0 and found["low"] <= found["ratio"] <= found["high"]
