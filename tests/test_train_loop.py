"""The training loop on a CPU: a falling loss, resumes bit for bit, kills, accumulation, divergence, the run folder."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from warm import child

from whet.train import loop, start
from whet.train.data import ShardWriter
from whet.train.log import read_log
from whet.train.loop import train
from whet.train.recipe import TrainRecipe, made, names, parse_setting, read
from whet.train.watch import Diverged

SMALL = {
    "model.name": "gpt2", "model.size": "tiny", "model.layers": 2, "model.width": 32, "model.heads": 2, "model.kv_heads": 1,
    "train.steps": 12, "train.batch_size": 4, "train.seq_len": 16, "train.lr": 3e-3, "train.precision": "float32",
    "run.log_every": 4, "run.val_every": 6, "run.save_every": 3, "run.keep": 10,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A text that repeats, so that there is something to learn at once."""
    folder = tmp_path_factory.mktemp("shards")
    text = np.frombuffer(b"the cat sat on the mat. " * 400, np.uint8).astype(np.uint16)
    with ShardWriter(folder, "train", 10**6) as writer:
        writer.write(text)
    (folder / "shards.json").write_text(json.dumps(
        dict(format=1, tokenizer="bytes", vocab=257, eos=256, files=1, tokens=len(text), source=["a test"])))
    return folder


def small(shards: Path, **changes) -> TrainRecipe:
    return made(SMALL | {"data.path": str(shards)} | {k.replace("__", "."): v for k, v in changes.items()}, "small")


def quiet(recipe: TrainRecipe, folder: Path, **options):
    return train(recipe, folder, say=lambda text: None, **options)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_log(folder / "log.jsonl") if line["kind"] == "step"]


def test_the_loss_falls_and_the_run_folder_says_what_was_done(shards, tmp_path):
    outcome = quiet(small(shards, train__steps=30), tmp_path / "run")
    lines = read_log(tmp_path / "run" / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 31)) and steps[-1]["tokens"] == 30 * 64
    assert abs(steps[0]["loss"] - math.log(257)) < 0.5 and steps[-1]["loss"] < steps[0]["loss"] - 1
    assert [line["step"] for line in lines if line["kind"] == "val"] == [6, 12, 18, 24, 30]
    assert outcome.step == 30 and outcome.loss == steps[-1]["loss"] and outcome.val_loss < 5
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["recipe"]["train"]["steps"] == 30 and facts["data"]["fingerprint"] and facts["parameters"] > 0


@pytest.mark.parametrize("changes", [
    {}, dict(train__optimizer="muon"), dict(train__ema=0.9), dict(train__accumulate=2),
    dict(train__precision="bfloat16-weights"), dict(train__precision="bfloat16", train__schedule="wsd"),
], ids=["adamw", "muon", "ema", "accumulate", "masters", "autocast"])
@pytest.mark.parametrize("at", [3, 9])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped_bit_for_bit(shards, tmp_path, changes, at):
    whole = small(shards, **changes)
    quiet(whole, tmp_path / "whole")
    part, real = tmp_path / "part", loop.saved

    class Enough(Exception):
        pass

    def saved(run):
        real(run)
        if run.step == at:
            raise Enough

    loop.saved = saved
    try:
        with pytest.raises(Enough):
            quiet(whole, part)
    finally:
        loop.saved = real
    torch.manual_seed(999)
    quiet(whole, part, resume=True)
    assert losses(part) == losses(tmp_path / "whole")
    vals = [[line["loss"] for line in read_log(f / "log.jsonl") if line["kind"] == "val"] for f in (part, tmp_path / "whole")]
    assert vals[0] == vals[1]
    assert "resume" in [line.get("what") for line in read_log(part / "log.jsonl")]


def test_a_run_that_was_killed_at_any_moment_goes_on_with_the_same_losses(shards, tmp_path):
    flat = SMALL | {"data.path": str(shards), "train.steps": 60, "run.save_every": 2}
    whole, part = tmp_path / "whole", tmp_path / "part"
    unstopped = child(flat, whole)
    for wanted in (7, 23, 41):
        process = child(flat, part, resume=part.exists())
        deadline = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < deadline:
            if (reached := losses(part)) and reached[-1][0] >= wanted:
                process.kill()
                break
        process.join()
    last = child(flat, part, resume=True)
    for folder, process in ((part, last), (whole, unstopped)):
        process.join()
        assert process.exitcode == 0, folder.with_suffix(".out").read_text()
    assert losses(part) == losses(whole)


def test_gradients_of_several_forwards_are_those_of_one_large_batch(shards, tmp_path):
    """The same sequences, so the same mean; only the order of the sums differs."""
    for name, changes in (("one", {}), ("two", dict(train__batch_size=2, train__accumulate=2))):
        quiet(small(shards, train__steps=4, run__save_every=0, run__val_every=0, **changes), tmp_path / name)
    one, two = (torch.tensor([loss for _, loss in losses(tmp_path / name)]) for name in ("one", "two"))
    torch.testing.assert_close(one, two)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_first_bad_module(shards, tmp_path, monkeypatch):
    real = loop.one_step

    def poisoned(run):
        if run.step == 7:
            with torch.no_grad():
                run.made.model.blocks[1].norm2.weight[3] = math.nan
        return real(run)

    monkeypatch.setattr(loop, "one_step", poisoned)
    with pytest.raises(Diverged) as stopped:
        quiet(small(shards), tmp_path / "run")
    assert "stopped at step 8: the loss is nan" in str(stopped.value) and "step-00000006" in str(stopped.value)
    assert "is not finite" in str(stopped.value) and "\n" not in str(stopped.value)
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["what"] == "stop"


def test_a_module_that_gives_infinities_is_found_where_weights_are_fine(shards, tmp_path):
    from whet.train.build import built
    from whet.train.watch import first_bad_module

    made_of = built(small(shards), "cpu", 257)
    with torch.no_grad():
        made_of.model.blocks[0].up.weight.fill_(1e30)
        made_of.model.blocks[0].down.weight.fill_(1e30)
    batch = dict(tokens=torch.arange(64)[None], labels=torch.arange(64)[None])
    assert "blocks.0" in first_bad_module(made_of.model, batch, "float32", "cpu")


def test_a_loss_far_above_its_start_stops_the_run():
    from whet.train.watch import gone_bad

    assert gone_bad(5.0, 5.5) == "" and gone_bad(10.9, 5.5) == "" and "was 5.5 at the start" in gone_bad(11.2, 5.5)
    assert gone_bad(1.9, 0.5) == "" and "was 0.5 at the start" in gone_bad(3.6, 0.5), "a fine-tuned model begins low"


@pytest.mark.parametrize(("changes", "said"), [
    (dict(data__path="nowhere"), "nowhere"),
    (dict(train__batch_size=4096), "too few for a batch"),
    (dict(model__widht=8), "did you mean width?"),
    (dict(model__vocab=64), "the model's vocabulary ends at 63"),
    (dict(kernels__force={"rms_norm": "cuda"}), "kernels.force.rms_norm must be one of"),
    (dict(train__checkpointed_blocks=7), "has 2 repeated blocks"),
    (dict(model__size="d99"), "d99"),
])
def test_what_is_wrong_is_one_line_before_the_first_step(shards, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")) as refused:
        quiet(small(shards, **changes), tmp_path / "run")
    assert "\n" not in str(refused.value) and not losses(tmp_path / "run")


def test_a_folder_with_a_run_is_not_written_over(shards, tmp_path):
    quiet(small(shards, train__steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        quiet(small(shards, train__steps=1), tmp_path / "run")


def test_a_run_is_not_resumed_on_other_data(shards, tmp_path):
    quiet(small(shards, train__steps=3), tmp_path / "run")
    with ShardWriter(tmp_path, "train", 10**6) as writer:
        writer.write(np.arange(4000, dtype=np.uint16) % 200)
    with pytest.raises(ValueError, match="trained on other data"):
        quiet(small(tmp_path, train__steps=6), tmp_path / "run", resume=True)


def test_checkpointed_blocks_change_no_loss(shards, tmp_path):
    for name, blocks in (("none", 0), ("all", -1)):
        quiet(small(shards, train__steps=3, train__checkpointed_blocks=blocks), tmp_path / name)
    assert losses(tmp_path / "none") == losses(tmp_path / "all")


def test_a_forced_impl_serves_every_call_of_its_op(shards, tmp_path):
    quiet(small(shards, train__steps=1, kernels__force={"attention": "eager"}), tmp_path / "run")
    table = json.loads((tmp_path / "run" / "run.json").read_text())["choices"]
    assert {impl for key, impl in table.items() if key.startswith("attention ")} == {"eager"}


def test_a_retune_that_finds_another_winner_switches_and_is_logged(shards, tmp_path, monkeypatch):
    from whet.choices import Choices
    from whet.train.kernels import KernelChoices

    run_of = []

    def retimed(self, seconds):
        run_of.append(seconds)
        by_mode = {mode: Choices(default="eager") for mode in self.by_mode}
        return replace(self, by_mode=by_mode)

    monkeypatch.setattr(KernelChoices, "retimed", retimed)
    monkeypatch.setattr(KernelChoices, "lines", lambda self, batch: [])
    real = start.select
    monkeypatch.setattr(start, "select", lambda *args: replace(real(*args), entries={"planted": {}}, tuned=True))
    quiet(small(shards, kernels__retune_every=5), tmp_path / "run")
    said = [line["text"] for line in read_log(tmp_path / "run" / "log.jsonl") if line.get("what") == "retune"]
    assert len(run_of) == 2 and "-> eager" in said[0] and said[1] == "kernels timed again: the same are fastest"


def test_every_recipe_is_read_for_a_gpu_and_for_a_cpu():
    assert {"gpt2-d12", "gpt2-d12-gqa", "gpt2-d12-mqa", "gpt2-d12-swiglu", "gpt2-d12-hybrid", "gpt2-d12-fast", "llm-med",
            "tiny-llama"} <= set(names())
    from whet.train.build import config_of

    for name in names():
        for device in ("cuda", "cpu"):
            recipe = read(name, {}, device)
            _, config = config_of(recipe, 257)
            assert getattr(config, "vocab", 257) == 257 and recipe.schedule and recipe.optim
    assert read("gpt2-d12-gqa").train.lr == read("gpt2-d12").train.lr, "it is its base but for what it sets"


@pytest.mark.parametrize(("text", "said"), [
    ("train.batchsize=4", "did you mean batch_size?"), ("trian.lr=3", "did you mean train?"),
    ("train.lr=fast", "train.lr must be"), ("train.steps=0", "at least 1"),
    ("kernels.plan=fast", "kernels.plan must be one of"), ("lr=3", "part.key=value"),
    ("train.optimizer=sgd", "optimizer: kind"), ("train.schedule=cosin", "schedule: kind"), ("train.clip=-1", "train.clip"),
])
def test_a_setting_that_cannot_be_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        read("gpt2-d12", dict([parse_setting(text)]))


def test_a_recipe_of_ones_own_may_build_on_another(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "other"\n[train]\nlr = 1e-3\n')
    (tmp_path / "other.toml").write_text('[train]\nlr = 2e-3\nsteps = 7\n[cpu]\n"train.steps" = 3\n')
    found = read(str(tmp_path / "mine.toml"), {}, "cpu")
    assert (found.train.lr, found.train.steps, found.name) == (1e-3, 3, "mine")
    (tmp_path / "other.toml").write_text('base = "mine"\n')
    with pytest.raises(ValueError, match="base must name another recipe"):
        read(str(tmp_path / "mine.toml"))
    (tmp_path / "torn.toml").write_text("[train\n")
    with pytest.raises(ValueError, match="is no TOML"):
        read(str(tmp_path / "torn.toml"))


def test_losses_that_are_read_while_the_next_step_runs_are_the_same(shards, tmp_path, monkeypatch):
    recipe = small(shards, run__log_every=2, run__val_every=5, run__save_every=5, train__steps=13)
    quiet(recipe, tmp_path / "at once")
    monkeypatch.setattr(start.Training, "reads_at_once", False)
    read, real = [], loop.flushed

    def flushed(run, given, *rest):
        read.append((run.step, given.steps[-1][0]))
        return real(run, given, *rest)

    monkeypatch.setattr(loop, "flushed", flushed)
    quiet(recipe, tmp_path / "later")
    assert losses(tmp_path / "later") == losses(tmp_path / "at once")
    assert read == [(3, 2), (5, 4), (5, 5), (7, 6), (9, 8), (10, 10), (13, 12), (13, 13)], "(steps launched, steps read)"
    lines = [read_log(tmp_path / name / "log.jsonl") for name in ("at once", "later")]
    norms = [[line["grad_norm"] for line in of if line.get("step") in (2, 10, 13) and line["kind"] == "step"] for of in lines]
    assert norms[0] == norms[1] and all(norms[0])
