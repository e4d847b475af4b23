"""Training where a recipe changes between resumes, data or checkpoints are missing, and several processes share a run."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_train_loop import SMALL, losses, quiet, shards, small  # noqa: F401
from typer.testing import CliRunner

from whet.commands import app
from whet.train import loop, overhead, start
from whet.train.build import built
from whet.train.export import load_run, tokenizer_of
from whet.train.kernels import KernelChoices, forced, select
from whet.train.log import read_log
from whet.train.loop import train as train_run
from whet.train.recipe import made, parse_setting, read
from whet.train.runs import read_run
from whet.train.watch import Diverged


def steps_of(folder: Path) -> list[dict]:
    return [line for line in read_log(folder / "log.jsonl") if line["kind"] == "step"]


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def test_a_resume_trains_with_the_learning_rate_that_its_log_shows(shards, tmp_path, monkeypatch):  # noqa: F811
    constant = dict(train__schedule="constant", run__save_every=3)
    quiet(small(shards, train__steps=3, **constant), tmp_path / "run")
    seen, real = [], loop.one_step
    monkeypatch.setattr(loop, "one_step", lambda run: seen.append([g["lr"] for g in run.optimizer.param_groups]) or real(run))
    changed = small(shards, train__steps=4, train__lr=1e-5, train__weight_decay=0.5, train__batch_size=2, **constant)
    quiet(changed, tmp_path / "run", resume=True)
    assert seen == [[1e-5, 1e-5]] and steps_of(tmp_path / "run")[-1]["lr"] == 1e-5
    assert [line["tokens"] for line in steps_of(tmp_path / "run")] == [64, 128, 192, 224], "what is behind keeps its count"


def test_a_run_that_is_over_keeps_its_losses_when_it_is_resumed(shards, tmp_path):  # noqa: F811
    first = quiet(small(shards, train__steps=6), tmp_path / "run")
    again = quiet(small(shards, train__steps=6), tmp_path / "run", resume=True)
    assert (again.loss, again.val_loss, again.tokens) == (first.loss, first.val_loss, first.tokens)
    assert math.isfinite(again.loss)


def test_a_run_goes_on_from_good_checkpoints_beside_a_damaged_run_json(shards, tmp_path):  # noqa: F811
    folder, said = tmp_path / "run", []
    quiet(small(shards, train__steps=3, run__save_every=3), folder)
    (folder / "run.json").write_text('{"recipe": ')
    train_run(small(shards, train__steps=6, run__save_every=3), folder, resume=True, say=said.append)
    assert any(line == f"{folder / 'run.json'} is damaged, and is written anew" for line in said), said
    assert read_run(folder).steps and [line["step"] for line in steps_of(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("changes", [dict(train__seq_len=8), dict(train__seed=7)])
def test_what_would_change_the_order_of_the_data_is_not_resumed(shards, tmp_path, changes):  # noqa: F811
    quiet(small(shards, train__steps=3), tmp_path / "run")
    with pytest.raises(ValueError, match="the order of the data would be another"):
        quiet(small(shards, train__steps=6, **changes), tmp_path / "run", resume=True)


def test_checkpoints_of_which_none_is_good_are_neither_removed_nor_begun_over(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=6), tmp_path / "run")
    before = losses(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"no checkpoint .* is good: step-00000006: it is torn"):
        quiet(small(shards, train__steps=6), tmp_path / "run", resume=True)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2 and losses(tmp_path / "run") == before


def test_a_resumed_run_draws_the_random_numbers_of_one_that_was_not_stopped(shards, tmp_path, monkeypatch):  # noqa: F811
    """What chooses kernels draws numbers too, as many as it likes; dropout must not see that."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.5)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    flat = {k: v for k, v in SMALL.items() if not k.startswith("model.")} | {
        "model.path": str(tmp_path / "model"), "data.path": str(shards), "run.val_every": 0, "train.schedule": "constant"}
    real = start.select
    monkeypatch.setattr(start, "select", lambda *args: torch.rand(random.randint(1, 99)) is None or real(*args))
    quiet(made(flat | {"train.steps": 6}, "mine"), tmp_path / "whole")
    quiet(made(flat | {"train.steps": 3}, "mine"), tmp_path / "part")
    quiet(made(flat | {"train.steps": 6}, "mine"), tmp_path / "part", resume=True)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_weights_that_bad_gradients_spoilt_are_not_saved(shards, tmp_path, monkeypatch):  # noqa: F811
    real = loop.one_step

    def poisoned(run):
        hook = run.made.model.norm.weight.register_hook(lambda g: g * math.inf) if run.step == 5 else None
        try:
            return real(run)
        finally:
            if hook is not None:
                hook.remove()

    monkeypatch.setattr(loop, "one_step", poisoned)
    with pytest.raises(Diverged, match=r"stopped at step 6: the norm of the gradients is (nan|inf).*step-00000003"):
        quiet(small(shards), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "step-00000006").exists()


def test_a_forced_impl_stays_when_kernels_are_timed_again(shards, monkeypatch):  # noqa: F811
    from whet.choices import Choices
    from whet.lock import Lock
    from whet.train import kernels
    from whet.tune import Tuned
    from whet.workload import Workload

    model = built(small(shards), "cpu", 257).model
    batch = dict(tokens=torch.zeros(2, 16, dtype=torch.long), labels=torch.zeros(2, 16, dtype=torch.long))
    found = select(Workload(model, (), batch), False, {"attention": "eager"}, Lock(), lambda *args: None)
    monkeypatch.setattr(kernels, "tune", lambda calls, lock, seconds: Tuned({m: Choices() for m in found.by_mode}, {}))
    again = found.retimed(0.01)
    assert {impl for key, impl in again.table().items() if key.startswith("attention ")} == {"eager"}
    assert again.table() == found.table() and forced(Choices(), found.calls, {}).table == {}


def test_every_rank_times_again_also_those_that_hold_no_entries(shards, tmp_path, monkeypatch):  # noqa: F811
    """Only rank 0 has the lock's entries; the others must take part, or rank 0 waits for them forever."""
    asked = []
    monkeypatch.setattr(KernelChoices, "retimed", lambda self, seconds: asked.append(seconds) or self)
    real = start.select
    monkeypatch.setattr(start, "select", lambda *args: replace(real(*args), entries={}, tuned=True))
    quiet(small(shards, kernels__retune_every=5), tmp_path / "run")
    assert len(asked) == 2


@pytest.mark.parametrize("changes", [{}, dict(train__accumulate=2)], ids=["", "accumulate"])
def test_the_loops_own_cost_is_measured_after_the_last_checkpoint(shards, tmp_path, changes, monkeypatch):  # noqa: F811
    monkeypatch.setattr(overhead, "AT_LEAST_S", 0.02)
    run = tmp_path / "run"
    quiet(small(shards, train__steps=6, **changes), run, after=overhead.measure_overhead)
    facts, lines = json.loads((run / "run.json").read_text()), read_log(run / "log.jsonl")
    assert facts["overhead"]["ratio"] > 0.5 and facts["overhead"]["bare_ms"] > 0 and facts["recipe"]["train"]["steps"] == 6
    assert lines[-1]["what"] == "overhead" and [line["step"] for line in lines if line["kind"] == "step"][-1] == 6


@pytest.mark.parametrize("plan, want", [
    ("auto", True), ("as it is", False), ("torch.compile", ("torch.compile",)), ("CUDA graph", ("CUDA graph",)),
])
def test_a_plan_that_is_named_is_the_only_one_that_is_tried_on_a_gpu(plan, want):
    said: list[str] = []
    log = SimpleNamespace(say=said.append)
    run = SimpleNamespace(device="cuda", recipe=made(SMALL | {"kernels.plan": plan}, "small"), log=log)
    assert start.plans_of(run) == want and not said
    run.device = "cpu"
    assert start.plans_of(run) is False
    assert [plan in line and "needs a GPU" in line for line in said] == [True] * isinstance(want, tuple)


def test_the_choices_on_record_are_those_of_the_plan_that_runs(shards, tmp_path, monkeypatch):  # noqa: F811
    from whet.choices import Choices
    from whet.train import kernels

    monkeypatch.setattr(kernels, "modes_here", lambda: ("eager", "graph"))
    real = start.select
    by_mode = {"eager": Choices(), "graph": Choices(default="eager")}
    monkeypatch.setattr(start, "select", lambda *args: replace(real(*args), by_mode=by_mode))
    quiet(small(shards, train__steps=1), tmp_path / "run")
    assert "torch" in json.loads((tmp_path / "run" / "run.json").read_text())["choices"].values()


def test_only_the_plans_that_are_named_are_tried(monkeypatch):
    from whet import step_plans
    from whet.plan import Plan

    tried = []
    plans = [Plan("CUDA graph", "", "own", graph=True), Plan("torch.compile", "", "own", compiled=True)]
    monkeypatch.setattr(step_plans.Loop, "plans", lambda self: plans)
    monkeypatch.setattr(step_plans.LoopTrial, "run", lambda self, plan: tried.append(plan.name))
    model = step_plans.LossOf(torch.nn.Linear(2, 2), lambda out: out.sum())
    work = step_plans.LoopWork(model, (torch.ones(1, 2),), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for only in ((), ("CUDA graph",), ("torch.compile",), ("torch.compile + CUDA graph",)):
        tried.append(only)
        step_plans.choose(work, 0.001, True, only)
    assert tried == [
        (), "CUDA graph", "torch.compile", ("CUDA graph",), "CUDA graph", ("torch.compile",), "torch.compile",
        ("torch.compile + CUDA graph",), "torch.compile",
    ]
    with pytest.raises(ValueError, match="plans must be of CUDA graph, torch.compile, .*, got 'graph'"):
        start.compile_step(model, work.optimizer, plans=["graph"])


@pytest.mark.parametrize("text", ["run.keep=0", "run.log_every=-1", "run.save_every=-5", "kernels.retune_every=-1"])
def test_a_count_that_would_fail_hours_later_is_refused_at_once(text):
    with pytest.raises(ValueError, match=f"{text.partition('=')[0]} must be at least"):
        read("gpt2-d12", dict([parse_setting(text)]))


def test_a_recipe_of_ones_own_may_build_on_one_of_whets(tmp_path):
    for name in ("mine", "gpt2-d12"):
        (tmp_path / f"{name}.toml").write_text('base = "gpt2-d12"\n[train]\nlr = 1e-3\n')
        found = read(str(tmp_path / f"{name}.toml"))
        assert found.train.lr == 1e-3 and found.train.warmup == read("gpt2-d12").train.warmup


def test_a_folder_of_pickles_and_rows_that_are_too_long_are_refused(shards, tmp_path):  # noqa: F811
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    model.save_pretrained(tmp_path / "model")
    flat = {"model.path": str(tmp_path / "model"), "data.path": str(shards), "train.steps": 1, "train.batch_size": 2,
            "train.precision": "float32", "run.val_every": 0, "run.save_every": 0}
    with pytest.raises(ValueError, match="train.seq_len must be below 16"):
        quiet(made(flat | {"train.seq_len": 16}, "mine"), tmp_path / "long")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    quiet(made(flat | {"train.seq_len": 15}, "mine"), tmp_path / "run")
    assert invoke("export", str(tmp_path / "run"), str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle"):
        quiet(made(flat | {"train.seq_len": 15}, "mine"), tmp_path / "pickled")


def test_products_are_counted_whatever_holds_their_weights(shards, tmp_path):  # noqa: F811
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=300)).save_pretrained(tmp_path)
    found = built(made({"model.path": str(tmp_path), "train.seq_len": 8, "train.precision": "float32"}, "mine"), "cpu")
    assert found.flops_per_token(8) == 6 * (257 * 16 + 12 * 16 * 16) + 12 * 16 * 8, "its layers are Conv1D, its head is tied"
    own = built(made(SMALL | {"model.size": "hf", "model.kv_heads": 2, "model.max_positions": 600}, "own"), "cpu", 257)
    assert own.flops_per_token(8) == 6 * (own.model.embed.weight.numel() + 2 * 12 * 32 * 32) + 12 * 2 * 32 * 8


def test_a_run_is_sampled_where_its_data_is_gone(shards, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    for path in shards.iterdir():
        (tmp_path / "data" / path.name).write_bytes(path.read_bytes())
    quiet(small(tmp_path / "data", train__steps=1), tmp_path / "run")
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    run = load_run(tmp_path / "run")
    assert run.trained.vocab == 257 and tokenizer_of(run.recipe, "bytes").eos == 256
    result = invoke("sample", str(tmp_path / "run"), "x" * 300, "--tokens", "1", "--tokenizer", "bytes")
    assert result.exit_code == 0 and result.output.startswith("x" * 300), "long lines are not broken"


def test_validation_that_cannot_be_is_said_at_the_start(shards, tmp_path):  # noqa: F811
    said: list[str] = []
    loop.train(small(shards, train__steps=1, data__val=0.0), tmp_path / "run", say=said.append)
    assert "no validation: 0 sequences of 16 + 1 tokens are held out; raise data.val" in said


def test_of_several_processes_one_prints_and_writes_the_page(shards, tmp_path):  # noqa: F811
    """Without --name each process would name its folder by its own clock; only the first one's is there."""
    late = "import os, runpy, sys\nimport whet.commands.train as t\nreal = t.stamp\n"
    late += "t.stamp = lambda: real() + os.environ['RANK']\nsys.argv[0] = 'whet'\nfrom whet.commands import app\napp()\n"
    (tmp_path / "late.py").write_text(late)
    settings = {"train.steps": 1, "train.batch_size": 2, "train.seq_len": 16, "model.layers": 1, "model.width": 32,
                "model.heads": 2, "model.kv_heads": 1, "dist.mode": "ddp", "data.path": str(shards)}
    words = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "late.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "train", "gpt2-d12", *words, "--json"], env=env, cwd=tmp_path, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / json.loads(done.stdout)["folder"]
    assert (folder / "page.html").exists() and len(list((tmp_path / "runs").iterdir())) == 1
