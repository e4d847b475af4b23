"""whet train, data and compare as a demanding user meets them: what is shown, and what is wrong in one line."""

import hashlib
import io
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors import SafetensorError
from test_train_commands import SETTINGS, invoke
from test_train_loop import losses, quiet, shards, small  # noqa: F401

from whet.choices import Choices
from whet.commands import _console, train
from whet.op import Call, Op
from whet.train import loop
from whet.train.data import ShardWriter
from whet.train.kernels import KernelChoices, forced
from whet.train.loop import train as train_run
from whet.train.recipe import ModelPart, TrainRecipe, read


def one_line(*words: str) -> str:
    """What the command refuses with: one line on stderr, exit code 2."""
    result = invoke(*words)
    assert result.exit_code == 2 and result.stderr.startswith("whet: "), (result.exit_code, result.output, result.exception)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_on_a_terminal_a_line_shows_the_step_that_runs_and_brackets_stay(shards, monkeypatch):  # noqa: F811
    terminal = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None, markup=False, highlight=False)
    monkeypatch.setattr(_console, "console", terminal)
    monkeypatch.setattr(train, "console", terminal)
    given = [*SETTINGS, "--set", f"data.path={shards}", "--set", "run.log_every=0"]
    result = invoke("train", "gpt2-d12", *given, "--name", "live")
    assert result.exit_code == 0, result.output
    shown = terminal.file.getvalue()
    assert "by the recipe's table [cpu]: tiny, 3 steps" in shown
    assert "step 3/3  loss" in shown and "3/3 " in shown and "tok/s" in shown


def test_in_a_log_no_second_line_of_a_step_is_printed(shards):  # noqa: F811
    result = invoke("train", "gpt2-d12", *SETTINGS, "--set", f"data.path={shards}", "--name", "logged")
    assert result.exit_code == 0 and result.output.count("step 3/3  loss") == 1


@pytest.mark.parametrize(("text", "said"), [
    ("train.clip=nan", "train.clip must be at least 0, got nan"), ("train.ema=nan", "train.ema must be from 0 to below 1"),
    ("data.val=nan", "data.val must be from 0 to below 1"), ("train.checkpointed_blocks=-2", "must be at least -1"),
    ("train.seed=-1", "train.seed must be at least 0"), ("train.seed=99999999999999999999", "train.seed must be below"),
    ("train.warmup=3", "train.warmup must be below train.steps, 3, got 3"), ("train.lr=fast", "must be a number, got 'fast'"),
    ("train.steps=1e3", "must be a whole number"), ("kernels.force=triton", "must be a table"),
    ("train.=3", "train is a part: set one of its keys"), ("train.lr=nan", "lr must be a number above 0"),
    ("data.path=nowhere", "make shards with"), ("model.width=1000000000000", "out of memory: RuntimeError"),
])
def test_a_value_that_cannot_be_is_one_line(text, said):
    assert said in one_line("train", "gpt2-d12", *SETTINGS, "--set", text, "--name", "never")
    assert not Path("runs/never").exists()


@pytest.mark.parametrize(("name", "content", "said"), [
    ("bytes.toml", b"\xff\xfe[train]", "bytes.toml is not UTF-8"), ("cpu.toml", b"cpu = 3", "cpu is a table, [cpu]"),
    ("part.toml", b"train = 3", "train is a table, [train]"), ("nan.toml", b"[train]\nlr = nan", "lr must be a number above 0"),
    ("broken.toml", b"[train", "is no TOML"), ("none.toml", None, "none.toml is not there"),
    ("dir.toml", b"", "is a directory"),
])
def test_a_recipe_that_cannot_be_read_is_one_line(name, content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "dir.toml":
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content)
    assert said in one_line("train", f"./{name}")


@pytest.mark.parametrize("name", ["..", "../out", "/tmp/out", ".", "a/../..", "a\nb", "a\0b"])
def test_a_name_stays_below_the_folder_of_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--name must be a folder below --runs" in one_line("train", "gpt2-d12", *SETTINGS, "--name", name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_a_runs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/file").write_text("mine")
    assert "runs/file is a file" in one_line("train", "gpt2-d12", *SETTINGS, "--name", "file")
    assert "File name too long" in one_line("train", "gpt2-d12", *SETTINGS, "--name", "x" * 300)
    assert Path("runs/file").read_text() == "mine"


def test_seeds_are_looked_at_before_the_first_run(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    words = ["train", "gpt2-d12", *SETTINGS, "--set", f"data.path={shards}", "--name", "arm", "--seeds"]
    for seeds in ("01,1", "1,\u0663", "1,"):
        assert "each once" in one_line(*words, seeds)
    assert "train.seed must be below" in one_line(*words, "1,99999999999")
    Path("runs/arm-seed2").mkdir(parents=True)
    Path("runs/arm-seed2/run.json").write_text("{}")
    assert "runs/arm-seed2 holds a run already" in one_line(*words, "1,2") and not Path("runs/arm-seed1").exists()


def test_a_tracker_that_is_missing_leaves_no_run_behind(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs the package wandb"):
        quiet(small(shards, run__wandb="offline"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    planted = types.ModuleType("wandb")
    planted.init = lambda **_: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", planted)
    with pytest.raises(ValueError, match="run.wandb=online: ZeroDivisionError.*run.wandb=offline"):
        quiet(small(shards, run__wandb="online"), tmp_path / "run")


def test_a_shard_named_alone_is_looked_at_whatever_shards_json_says(tmp_path):
    with ShardWriter(tmp_path, "train", 10**6) as writer:
        writer.write(np.full(2000, 60000, np.uint16))
    meta = dict(format=1, tokenizer="bytes", vocab=257, eos=256, files=9, tokens=9, source=["other shards"])
    (tmp_path / "shards.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="has token 60000, and the model's vocabulary ends at 256"):
        quiet(small(tmp_path / "train_000000.bin"), tmp_path / "run")


def test_what_a_run_cannot_do_here_is_said(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text('[model]\nsize = "tiny"\n')
    given = [*SETTINGS, "--set", f"data.path={shards}", "--set", "train.precision=float32"]
    plan = ["--set", "kernels.plan=CUDA graph"]
    result = invoke("train", "./own.toml", *given, "--set", "dist.mode=ddp", "--retune-every", "1", *plan)
    assert result.exit_code == 0, result.output
    assert "kernels.plan=CUDA graph does not serve here: it needs a GPU" in result.output
    assert "as it is: no other plan is tried" in result.output
    assert "no GPU here, and the recipe has no table [cpu]: its own sizes: tiny, 3 steps" in result.output
    assert "kernels.retune_every does nothing here" in result.output and "dist.mode=ddp has one process here" in result.output


def test_a_stopped_run_says_what_it_keeps(shards, tmp_path, monkeypatch):  # noqa: F811
    def stop(run):
        if run.step == 2:
            raise KeyboardInterrupt
        return real(run)

    real = loop.one_step
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "one_step", stop)
    words = ["train", "gpt2-d12", *SETTINGS, "--set", f"data.path={shards}", "--name"]
    result = invoke(*words, "early")
    assert result.exit_code == 130 and "runs/early has no checkpoint yet" in result.stderr
    result = invoke(*words, "later", "--set", "run.save_every=1")
    assert result.exit_code == 130 and "runs/later keeps its checkpoints; go on with --resume" in result.stderr


def test_text_that_is_none_is_said_and_empty_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"\xff\xfe")
    assert "there is no text in a.txt: files that are not UTF-8, skipped: 1" in one_line("data", "a.txt", "-o", "out")
    assert "empty name" in one_line("data", "", "-o", "out") and "empty name" in one_line("data", "a.txt", "-o", "")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_another_model_of_the_same_shapes_is_not_resumed(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=2), tmp_path / "run")
    for key, value in (("activation", "relu2"), ("theta", 500.0)):
        with pytest.raises(ValueError, match=f"is of a model with {key} .* resume with --set model.{key}="):
            quiet(small(shards, train__steps=4, **{f"model__{key}": value}), tmp_path / "run", resume=True)


def test_a_resume_says_what_it_does_otherwise_than_the_run_began(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=2), tmp_path / "run")
    said = []
    train_run(small(shards, train__steps=4, train__lr=1e-3), tmp_path / "run", resume=True, say=said.append)
    assert "resumed from step-00000002, with train.steps 4, which was 2; train.lr 0.001, which was 0.003" in said
    said.clear()
    train_run(small(shards, train__steps=4, train__lr=1e-3), tmp_path / "run", resume=True, say=said.append)
    assert "resumed from step-00000004" in said


def test_damaged_lines_of_a_log_and_a_file_among_the_checkpoints_do_not_stop_a_resume(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=3), tmp_path / "run")
    with open(tmp_path / "run" / "log.jsonl", "ab") as f:
        f.write(b'\xff\xfe\n[1]\n3\nnull\n{"kind": "st')
    (tmp_path / "run" / "checkpoints" / "step-00000009").write_text("no folder")
    quiet(small(shards, train__steps=4), tmp_path / "run", resume=True)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_whole_checkpoint_that_another_program_wrote_is_refused(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=3), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000003"
    state, done = (json.loads((folder / name).read_text()) for name in ("state.json", "done.json"))
    del state["state"]["loader"]
    text = json.dumps(state).encode()
    (folder / "state.json").write_bytes(text)
    done["files"]["state.json"] = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    (folder / "done.json").write_text(json.dumps(done))
    with pytest.raises(ValueError, match="step-00000003 is no checkpoint of `whet train`: its state has no loader"):
        quiet(small(shards, train__steps=4), tmp_path / "run", resume=True)


def test_sizes_of_a_folders_model_cannot_be_set():
    said = one_line("train", "gpt2-d12", "--set", "model.path=folder", "--set", "model.layers=3")
    assert "model.layers cannot be set: model.path is a folder" in said


def test_the_block_of_choices_says_what_was_forced():
    call = Call("rms_norm", {"M": 4, "N": 8}, "float32", True)
    figures = {"ok": True, "share": 0.0, "why": "", "ms": 1.0, "low": 0.9, "high": 1.1, "samples": 9}
    entry = dict(call=vars(call), mode="eager", chosen="torch", candidates={"torch": figures, "eager": figures | {"ms": 2.0}})
    made = KernelChoices([(call, 1)], {"eager": forced(Choices(), [(call, 1)], {"rms_norm": "eager"})}, {"a": entry})
    assert "Using:   PyTorch (torch)" in "\n".join(made.lines("4 x 8"))
    made.force = {"rms_norm": "eager"}
    assert made.forced_lines() == ["kernels.force.rms_norm=eager: it serves every rms_norm of the model"], "it was verified"
    shown = "\n".join(made.lines("4 x 8"))
    assert "Using:   eager, by kernels.force.rms_norm" in shown and "rms_norm=eager" in shown and "(torch)" not in shown


def test_choices_reach_every_tracker_and_a_run_that_failed_is_shown_as_such(shards, tmp_path, monkeypatch):  # noqa: F811
    """By the names that W&B and TensorBoard have for what is asked of them."""
    ended, texts, purged = [], [], []
    summary: dict = {}
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda exit_code: ended.append(exit_code), summary=summary)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run, run=run))
    writer = types.SimpleNamespace(add_text=lambda *a: texts.append(a), add_scalar=lambda *_: None, close=lambda: None)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder, purge_step: purged.append(purge_step) or writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    given = dict(run__wandb="offline", run__tensorboard=True)
    quiet(small(shards, train__steps=3, **given), tmp_path / "run")
    assert "rms_norm" in summary["whet/kernels"] and texts[0] == ("whet/kernels", summary["whet/kernels"])
    monkeypatch.setattr(loop, "one_step", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(small(shards, train__steps=4, **given), tmp_path / "run", resume=True)
    assert ended == [0, 1] and purged == [None, 4], "steps after the checkpoint are taken back"


@pytest.mark.parametrize("there", [False, True])
def test_a_tracker_that_is_missing_or_broken_is_said_before_kernels_are_chosen(there, shards, tmp_path, monkeypatch):  # noqa: F811
    if there:
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "__init__.py").write_text("import a_package_that_is_not_there")
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("whet.train.start.select", lambda *_: pytest.fail("kernels were chosen"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    said = one_line("train", "gpt2-d12", *SETTINGS, "--set", f"data.path={shards}", "--set", "run.wandb=offline")
    broken = "cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_not_there'; pip install --upgrade"
    assert (broken if there else "is not installed: pip install wandb, or whet with its extra, whet[wandb]") in said


def test_runs_where_nothing_can_be_written_are_refused_before_kernels_are_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    assert "file/a/x cannot be a run's folder: " in (said := one_line("train", "gpt2-d12", "--runs", "file/a", "--name", "x"))
    assert "file is no folder; name another" in said
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "is write-protected; name another" in one_line("train", "gpt2-d12", "--name", "x")


def test_a_sample_takes_no_seed_that_a_generator_does_not(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=1), tmp_path / "run")
    for seed in ("99999999999999999999", "-1"):
        assert f"--seed must be from 0 to 2**63 - 1, got {seed}" in one_line("sample", str(tmp_path / "run"), "--seed", seed)


def test_a_checkpoint_that_is_passed_over_in_sampling_is_one_plain_line(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=2, run__save_every=1), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "done.json").unlink()
    result = invoke("sample", str(tmp_path / "run"), "the", "--tokens", "2")
    assert result.exit_code == 0 and result.stdout.startswith("the")
    assert result.stderr.startswith("whet: checkpoint: ") and "step-00000002 is skipped: it is torn" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_sample_of_a_run_whose_data_is_gone_names_the_option_for_its_tokenizer(shards, tmp_path):  # noqa: F811
    shutil.copytree(shards, tmp_path / "data")
    quiet(small(tmp_path / "data", train__steps=1), tmp_path / "run")
    shutil.rmtree(tmp_path / "data")
    assert "; or name one with --tokenizer" in one_line("sample", str(tmp_path / "run"), "the", "--tokens", "2")
    assert invoke("sample", str(tmp_path / "run"), "the", "--tokens", "2", "--tokenizer", "bytes").stdout.startswith("the")


def test_an_export_that_a_full_disk_ends_leaves_no_folder(shards, tmp_path, monkeypatch):  # noqa: F811
    def full(*_, **__):
        (tmp_path / "out" / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    quiet(small(shards, train__steps=1, model__activation="swiglu"), tmp_path / "run")
    monkeypatch.setattr("whet.train.export.save_file", full)
    said = one_line("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert "out cannot be written: SafetensorError: I/O error: No space left" in said and not (tmp_path / "out").exists()


def test_what_is_forced_is_said_and_what_cannot_serve_is_not_written_down(shards, tmp_path, monkeypatch):  # noqa: F811
    said: list[str] = []
    real = Op.unavailable
    monkeypatch.setattr(Op, "unavailable", lambda op, name: "needs a package" if name == "liger" else real(op, name))
    force = {"attention": "eager", "rms_norm": "liger", "swiglu": "eager"}
    train_run(small(shards, train__steps=1, kernels__force=force), tmp_path / "run", say=said.append)
    assert "kernels.force.attention=eager: it serves every attention of the model, and nobody verified it" in said
    assert "kernels.force.rms_norm=liger does not serve here: liger needs a package; another implementation does" in said
    assert any("force.swiglu=eager does nothing here: the model does not call swiglu, only rms_norm, " in line for line in said)
    table = json.loads((tmp_path / "run" / "run.json").read_text())["choices"]
    chosen = {key.split()[0]: impl for key, impl in table.items()}
    assert chosen["attention"] == "eager" and chosen["rms_norm"] == "torch"
    with pytest.raises(ValueError, match="there is no op 'rms_nrm'; did you mean rms_norm"):
        quiet(small(shards, kernels__force={"rms_nrm": "eager"}), tmp_path / "other")


def test_what_a_recipe_sets_itself_counts_over_the_cpu_sizes_of_its_base(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "gpt2-d12"\n[train]\nlr = 1e-4\nsteps = 7\n[cpu]\n"train.steps" = 5\n')
    found = read(str(tmp_path / "mine.toml"), device="cpu")
    assert (found.train.lr, found.train.steps, found.train.batch_size, found.model.size) == (1e-4, 5, 8, "tiny")
    assert read(str(tmp_path / "mine.toml")).train.steps == 7


def test_a_token_past_the_vocabulary_is_one_line_also_where_shards_json_knows_of_none(shards, tmp_path):  # noqa: F811
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    path = next(folder.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:1024] + b"\xff\xfe" * ((path.stat().st_size - 1024) // 2))
    with pytest.raises(ValueError, match="has token 65279, and the model's vocabulary ends at 256: shards.json knows no such"):
        quiet(small(folder), tmp_path / "run")


def test_a_resume_names_settings_that_were_empty_and_says_when_nothing_is_left(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__steps=2), tmp_path / "run")
    said: list[str] = []
    train_run(small(shards, train__steps=2, dist__mode="ddp"), tmp_path / "run", resume=True, say=said.append)
    assert "resumed from step-00000002, with dist.mode ddp, which was ''" in said
    assert "nothing is left to train: train.steps is 2" in said


def test_a_checkpoint_of_another_model_names_what_differs_and_one_that_fits(shards, tmp_path):  # noqa: F811
    folder = tmp_path / "run" / "checkpoints"
    quiet(small(shards, train__steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match="of a model with layers 2, and the recipe's has 3; resume with --set model.layers=2"):
        quiet(small(shards, train__steps=4, model__layers=3), tmp_path / "run", resume=True)
    quiet(small(shards, train__steps=5, model__layers=3), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000005", folder / "step-00000005")
    fix = "step-00000002 is of this one: move step-00000005 away to go on from it"
    with pytest.raises(ValueError, match=f"layers 3, and the recipe's has 2; .*; {fix}"):
        quiet(small(shards, train__steps=6), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="is of gpt2, and the recipe's model is tiny-llama; resume with the recipe it began"):
        llama = TrainRecipe(model=ModelPart("tiny-llama", "tiny"), train=small(shards).train, data=small(shards).data)
        quiet(llama, tmp_path / "other", resume=True)


def test_a_run_that_goes_bad_without_clipping_is_advised_to_clip(shards, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=r"Lower train.lr, lengthen train.warmup, or set train.clip=1$"):
        quiet(small(shards, train__lr=1e4, train__clip=0), tmp_path / "run")


def test_a_run_that_is_there_is_refused_before_processes_wait_for_one_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "together", lambda *_: pytest.fail("the processes were joined"))
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert "holds a run already" in one_line("train", "gpt2-d12", "--name", "one")


def test_a_process_that_loses_another_one_says_so_in_one_line(monkeypatch, tmp_path):
    def lost(*_):
        raise RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36270")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whet.train.loop.train", lost)
    monkeypatch.setenv("RANK", "1")
    assert "process 1 stopped, since another one did: what it printed says why" in one_line("train", "gpt2-d12", "--name", "x")


def test_a_folder_is_loaded_without_bars_and_what_its_weights_lack_is_said(shards, tmp_path, capfd):  # noqa: F811
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    capfd.readouterr()
    said: list[str] = []
    for lacking, name in (("", "whole"), ("lm_head.weight", "torn"), (None, "none")):
        if lacking is None:
            weights.unlink()
        elif lacking:
            kept = {k: t for k, t in load_file(weights).items() if k != lacking}
            save_file(kept, weights, metadata={"format": "pt"})
        recipe = small(shards, train__steps=1)
        recipe = replace(recipe, model=ModelPart(path=str(tmp_path / "hf")))
        train_run(recipe, tmp_path / name, say=said.append)
    assert [line.partition(": ")[2].partition(" ")[2] for line in said if line.startswith("model.path")] == [
        "lacks 1 weights, lm_head.weight first: these begin random", "has no weights: training begins with random ones"]
    assert capfd.readouterr().err == ""
