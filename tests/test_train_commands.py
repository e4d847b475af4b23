"""whet train, sample and export as a user runs them, on a CPU; trackers; a Hugging Face folder that is fine-tuned."""

import json
import math
import sys
import types

import pytest
import torch
from test_train_loop import losses, quiet, shards, small  # noqa: F401
from typer.testing import CliRunner

from whet.autoselect import ModelConfig
from whet.commands import app
from whet.train.build import TrainedModel, config_of
from whet.train.export import LoadedRun, as_tokenizers, by_folders_model, export, load_run, sample
from whet.train.log import RunLog, read_log
from whet.train.recipe import made, read, settings_of
from whet.train.tokenize import ByteTokenizer

SETTINGS = ["--set", "train.steps=3", "--set", "train.batch_size=2", "--set", "train.seq_len=16", "--set", "model.layers=1",
            "--set", "model.width=32", "--set", "model.heads=2", "--set", "model.kv_heads=1"]


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def run(shards):  # noqa: F811
    """The folder of a run that was trained by the command."""
    result = invoke("train", "gpt2-d12-swiglu", *SETTINGS, "--set", f"data.path={shards}", "--name", "first")
    assert result.exit_code == 0, result.output
    assert "no GPU here" in result.output and "3 steps, 96 tokens" in result.output
    return "runs/first"


def test_a_run_is_sampled_and_exported_and_transformers_goes_on_with_the_same_tokens(run, tmp_path):
    sampled = invoke("sample", run, "the cat", "--tokens", "8", "--temperature", "0")
    assert sampled.exit_code == 0 and sampled.output.startswith("the cat")
    exported = invoke("export", run, "out", "--json")
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.output)["architecture"] == "Qwen3ForCausalLM"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words, model = AutoTokenizer.from_pretrained("out"), AutoModelForCausalLM.from_pretrained("out")
    ids = words("the cat", return_tensors="pt").input_ids
    assert ids[0].tolist() == ByteTokenizer().encode("the cat").tolist()
    wide = load_run(tmp_path / run).trained.model.double().logits(ids)
    torch.testing.assert_close(model.double()(ids).logits, wide)
    assert invoke("export", run, "out").exit_code == 2, "a folder that is not empty is left alone"


def test_a_run_of_tiny_llama_is_sampled_and_exported_and_whet_generate_goes_on_with_the_same_text(shards):  # noqa: F811
    sizes = ["model.size=tiny", "model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1",
             f"data.path={shards}"]
    sizes += ["train.steps=30", "train.batch_size=4", "train.seq_len=16", "train.lr=0.01", "train.warmup=1"]
    trained = invoke("train", "tiny-llama", *(word for size in sizes for word in ("--set", size)), "--name", "llama")
    assert trained.exit_code == 0, trained.output
    sampled = invoke("sample", "runs/llama", "the cat", "--max-new-tokens", "24", "--temperature", "0")
    assert sampled.exit_code == 0 and sampled.output.startswith("the cat") and len(set(sampled.output)) > 3
    exported = invoke("export", "runs/llama", "out", "--json")
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.output)["architecture"] == "LlamaForCausalLM"
    generated = invoke("generate", "out", "the cat", "--max-new-tokens", "24", "--device", "cpu", "--json")
    assert generated.exit_code == 0, generated.output
    found = json.loads(generated.stdout)
    assert "the cat" + found["text"] == sampled.output.removesuffix("\n"), (found, sampled.output)


def test_a_model_that_offers_no_logits_and_no_names_of_transformers_is_refused_by_name(tmp_path):
    recipe = made({"model.name": "qwen3", "model.size": "tiny", "train.seq_len": 16}, "mine")
    run = LoadedRun(recipe, TrainedModel(torch.nn.Linear(1, 1), dict, 96, {}), tmp_path, 1)
    with pytest.raises(ValueError, match="a run of model qwen3 cannot be sampled; those of gpt2, tiny-llama can"):
        sample(run, "the cat", 1, 0.0, None, 0, "bytes")
    with pytest.raises(ValueError, match="a run of model qwen3 cannot be exported; those of gpt2, tiny-llama can"):
        export(run, tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


def test_the_page_of_a_run_is_written_at_its_end(run, tmp_path):
    page = (tmp_path / run / "page.html").read_text()
    assert "<svg" in page and "gpt2" in page


def test_a_run_goes_on_by_name_and_what_cannot_be_is_one_line(run):
    assert invoke("train", "gpt2-d12-swiglu", *SETTINGS, "--name", "first").exit_code == 2, "it is there already"
    again = invoke("train", "gpt2-d12-swiglu", *SETTINGS, "--name", "first", "--resume")
    assert again.exit_code == 2 and "trained on other data" in again.output
    for words, said in (
        (["train"], "there are gpt2-d12"), (["train", "gpt2-d21"], "did you mean gpt2-d12?"),
        (["train", "gpt2-d12", "--resume"], "--name"),
        (["sample", "nowhere"], "nowhere is no run"), (["export", "nowhere", "out2"], "nowhere is no run"),
    ):
        result = invoke(*words)
        assert result.exit_code == 2 and said in result.output and len(result.output.strip().splitlines()) == 1, result.output


def test_bytes_are_the_same_tokens_in_a_tokenizer_file():
    text = "naïve\n\tcafé 日本 \x00\x7f"
    ids = as_tokenizers(ByteTokenizer()).encode(text).ids
    assert ids == ByteTokenizer().encode(text).tolist() and as_tokenizers(ByteTokenizer()).decode(ids) == text
    assert as_tokenizers(ByteTokenizer()).token_to_id("<|endoftext|>") == ByteTokenizer.eos


def test_averaged_weights_are_what_is_sampled_and_exported(shards, tmp_path):  # noqa: F811
    quiet(small(shards, train__ema=0.5, train__steps=4), tmp_path / "run")
    quiet(small(shards, train__steps=4), tmp_path / "plain")
    averaged, plain = (load_run(tmp_path / name).trained.model for name in ("run", "plain"))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain"), "an average changes nothing in training"
    assert not torch.equal(averaged.embed.weight, plain.embed.weight)


def test_a_hugging_face_folder_is_fine_tuned_saved_and_exported(shards, tmp_path):  # noqa: F811
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    flat = {"model.path": str(tmp_path / "model"), "data.path": str(shards), "train.steps": 8, "train.batch_size": 4,
            "train.seq_len": 16, "train.lr": 3e-3, "train.precision": "float32"}
    outcome = quiet(made(flat, "mine"), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert outcome.loss < found[0][1] and abs(found[0][1] - math.log(257)) < 0.5
    assert invoke("export", str(tmp_path / "run"), str(tmp_path / "out")).exit_code == 0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(tuned.lm_head.weight, load_run(tmp_path / "run").trained.model.lm_head.weight)


def test_trackers_get_the_figures_and_one_that_fails_costs_its_curves_alone(tmp_path, monkeypatch, capsys):
    class Writer:
        def __init__(self, folder, purge_step):
            self.seen, self.closed = [], False

        def add_scalar(self, name, value, step):
            self.seen.append((name, value, step))

        def close(self):
            self.closed = True

    planted = types.ModuleType("torch.utils.tensorboard")
    planted.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", planted)
    log = RunLog(tmp_path / "run", True, lambda text: None)
    log.start({"recipe": {}}, True, "")
    log.write(kind="step", step=3, loss=1.5, lr=math.nan)
    assert ("step/loss", 1.5, 3) in log.tensorboard.seen
    log.tensorboard.add_scalar = None
    log.write(kind="step", step=4, loss=1.25)
    assert log.tensorboard is None and "took no more" in capsys.readouterr().err
    assert [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl")] == [1.5, 1.25]
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["lr"] == "nan", "JSON has no such number"


def test_a_resumed_run_goes_on_in_its_own_curves(shards, tmp_path, monkeypatch):  # noqa: F811
    inits: list[dict] = []
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda **_: None, summary={})
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: inits.append(given) or run, run=run))
    for steps in (3, 6):
        quiet(small(shards, run__wandb="offline", train__steps=steps), tmp_path / "one", resume=steps > 3)
    assert inits[0]["id"] == inits[1]["id"] and inits[1]["resume"] == "allow"


def test_a_tracker_that_is_not_installed_is_refused_before_any_step(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        quiet(small(shards, run__wandb="offline"), tmp_path / "run")


def test_the_log_of_another_rank_is_silent(tmp_path):
    log = RunLog(tmp_path / "run", False, lambda text: pytest.fail("it spoke"))
    log.start({}, True, "online")
    log.event(1, "plan", "text")
    assert not (tmp_path / "run").exists()


def test_the_flags_of_a_model_config_map_onto_the_recipe():
    config = ModelConfig(batch_size=4, max_seq_len=64, d_model=96, n_heads=2, use_triton_rmsnorm=True, use_triton_rotary=False)
    found = read("llm-med", settings_of(config), "cpu")
    assert (found.train.batch_size, found.train.seq_len) == (4, 64) and found.model.changes["width"] == 96
    assert dict(found.kernels.force) == {"rms_norm": "triton", "rope": "eager"} and found.kernels.tune is None
    assert read("llm-med", settings_of(ModelConfig(benchmark_kernels=False))).kernels.tune is False


def test_compile_step_asks_the_choices_of_the_mode_that_its_plan_runs_in(shards):  # noqa: F811
    from whet.choices import Choices
    from whet.plan import Plan
    from whet.step_plans import ask_by_plan
    from whet.train.build import built

    model = built(small(shards), "cpu", 257).model
    by_mode = {mode: Choices() for mode in ("eager", "graph", "compile", "compile + graph")}
    model.choices_by_mode = by_mode
    for plan, mode in ((Plan("p", "", "own", graph=True), "graph"), (Plan("p", "", "own", compiled=True), "compile"),
                       (Plan("p", "", "own", compiled=True, graph=True), "compile + graph"), (Plan("p", "", "own"), "eager")):
        ask_by_plan(model, plan)
        assert model.ops is by_mode[mode]


def test_seeds_make_a_run_each(tmp_path):
    words = ["train", "gpt2-d12", "--seeds", "3,5", "--name", "arm", "--runs", str(tmp_path), "--no-page"]
    for setting in ("train.steps=1", "train.batch_size=2", "train.seq_len=16", "model.layers=1", "run.val_batches=0"):
        words += ["--set", setting]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [json.loads((tmp_path / f"arm-seed{n}" / "run.json").read_text())["seed"] for n in (3, 5)] == [3, 5]
    for wrong in ("3,x", "3,3", "-1"):
        done = CliRunner().invoke(app, [*words[:2], "--seeds", wrong])
        assert done.exit_code != 0 and "--seeds takes whole numbers" in done.output + str(done.stderr)


def test_an_op_is_not_forced_in_a_folders_model(shards, tmp_path):  # noqa: F811
    recipe = small(shards, model__path=str(tmp_path), kernels__force={"rms_norm": "triton"})
    with pytest.raises(ValueError, match="kernels.force is for models of whet"):
        quiet(recipe, tmp_path / "run")


@pytest.mark.parametrize("key", ["model.size", "model.name", "model.layers"])
def test_what_sets_a_model_beside_a_folder_is_refused_where_the_user_set_it(key, tmp_path):
    """On the command line or in the file that names the folder; what a base sets is passed over."""
    own, value = tmp_path / "own.toml", {"model.layers": 3}.get(key, "tiny")
    said = f"{key} cannot be set: model.path is a folder"
    with pytest.raises(ValueError, match=said):
        read("gpt2-d12-gqa", {"model.path": "folder", key: value})
    for where in (f"{key[6:]} =", f'[cpu]\n"{key}" ='):
        own.write_text(f'base = "gpt2-d12"\n[model]\npath = "folder"\n{where} {value!r}\n')
        with pytest.raises(ValueError, match=said):
            read(str(own))
    own.write_text('base = "gpt2-d12-gqa"\n[model]\npath = "folder"\n')
    assert read(str(own)).model.path == read("gpt2-d12-gqa", {"model.path": "folder"}, "cpu").model.path == "folder"


def test_grouped_and_single_keys_are_two_models_also_on_a_cpu():
    found = [config_of(read(f"gpt2-d12{kind}", None, "cpu"), 257)[1] for kind in ("", "-gqa", "-mqa")]
    assert [c.kv_heads for c in found] == [found[0].heads, found[0].heads // 2, 1]


@pytest.mark.parametrize("text", ["", "the cat ", "the cat sat on the mat. " * 4])
def test_a_sample_of_a_folders_model_goes_on_past_its_positions(text, shards, tmp_path, caplog):  # noqa: F811
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=257, n_positions=24, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    flat = {"model.path": str(tmp_path / "model"), "data.path": str(shards), "train.steps": 1, "train.batch_size": 2,
            "train.seq_len": 16, "train.precision": "float32"}
    quiet(made(flat, "mine"), tmp_path / "run")
    run = load_run(tmp_path / "run")
    seen: list[int] = []
    run.trained.model.register_forward_pre_hook(
        lambda m, args, given: seen.append(int(given["position_ids"].max()) + 1), with_kwargs=True)
    run.trained.model.generation_config.eos_token_id = None
    ids = by_folders_model(run.trained.model, torch.tensor([[*text.encode()] or [256]]), 100, -1, dict(do_sample=False))
    assert ids.shape[1] == max(1, len(text)) + 100 and max(seen) <= 24
    assert not [r for r in caplog.records if "maximum length" in r.getMessage()]
