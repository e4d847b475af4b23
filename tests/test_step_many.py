"""whet step of several targets: a row each in one table and one record, what fails costs its row; and the models it is for."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_cli import error_lines, invoke, shown_help
from test_readme import record, root, write  # noqa: F401
from test_step_rivals import LLAMA

import whet
from whet import step_rivals
from whet.commands import _steps
from whet.commands._folder import FolderModel, FolderOptions, batch_of, class_of, config_of, folder_model, label_of
from whet.race import TIE
from whet.report import readme, step_tables
from whet.step_rivals import AS_IT_IS, LIGER, OPTIMIZED, SECONDS

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
SMALL = sorted((ROOT / "examples/models/small").iterdir())
PLAIN = ROOT / "examples/plain_models.py"
SHRUNK = {
    64: ("hidden_size", "n_embd", "d_model"),
    96: ("vocab_size", "intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    1: ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
    4: ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    2: ("num_key_value_heads",), 16: ("head_dim", "d_kv"),
    32: ("image_size",), 8: ("num_mel_bins",), 20: ("max_source_positions",),
}
TWO = ("--only", "as it is,whet.optimize")


def timing(ms: float) -> dict:
    return dict(ms=ms, low=0.99 * ms, high=1.01 * ms, samples=30, host_us=None, peak_mib=None)


def rows(before: float = 3.0, after: float = 2.0) -> list[dict]:
    return [
        dict(way=AS_IT_IS, ready_s=1.0, notes=[], memory_mib=2048, again_s=None, timing=timing(before), speedup=1.0),
        dict(way=OPTIMIZED, ready_s=41.0, notes=[], memory_mib=1024, again_s=3.0, timing=timing(after), speedup=before / after),
    ]


def model(name: str, *times: float) -> dict:
    return dict(target=name, config={}, batch=[4, 1024], dtype="bfloat16", weights="random", max_memory=None, ways=rows(*times))


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Races that answer at once, and two folders. Returns what was raced: model, batch, options, ways."""
    asked = []

    def raced_steps(base, batch, options, progress, ways):
        progress("timing", 0, 1)
        asked.append((base, batch, options, ways))
        return rows()

    monkeypatch.setattr(_steps, "raced_steps", raced_steps)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "other"):
        transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path / name)
    return asked


def kept(folder: Path) -> tuple[str, dict]:
    path, = (folder / "records").iterdir()
    return path.stem.removeprefix("cpu-"), json.loads(path.read_text())


def test_several_targets_are_rows_of_one_table_and_one_record(planted, tmp_path):
    said = invoke("step", "tiny", f"{PLAIN}:nano_gpt", "other", "--batch", "3", "--tokens", "100", *TWO)
    assert said.exit_code == 0, said.output
    name, made = kept(tmp_path)
    assert name == "steps-3-models" and list(made["measured"]) == ["models"]
    models = made["measured"]["models"]
    assert [m["target"] for m in models] == ["tiny", "plain_models.py:nano_gpt", "other"]
    assert [list(m) for m in models] == 3 * [["target", "config", "batch", "dtype", "weights", "max_memory", "ways"]]
    assert [m["batch"] for m in models][::2] == 2 * [[3, 64]], "of several, tokens as far as the model has positions"
    assert made["command"] == f"whet step tiny {PLAIN}:nano_gpt other --batch 3 --tokens 100 --only 'as it is,whet.optimize'"
    assert len({id(options.lock) for _, _, options, _ in planted}) == 1, "they share the lock"
    assert {ways for *_, ways in planted} == {(AS_IT_IS, OPTIMIZED)} and {o.seconds for _, _, o, _ in planted} == {SECONDS}
    assert all(m["target"] in said.output for m in models) and "3 x 64" in said.output and "1.50x (1.4" in said.output
    assert "whet.optimize is slower than the model as it is in 0 of 3" in said.output and "failed" not in said.output


def test_one_target_has_the_record_and_the_table_that_it_had(planted, tmp_path):
    said = invoke("step", "tiny", "--batch", "2", "--tokens", "16")
    assert said.exit_code == 0 and "tiny: a training step of 2 x 16, float32" in said.output
    name, made = kept(tmp_path)
    assert name == "step-tiny-2x16" and made["command"] == "whet step tiny --batch 2 --tokens 16 --dtype float32"
    config = json.loads(Path("tiny/config.json").read_text())
    weights = "random: the folder has no model.safetensors"
    assert made["measured"] == dict(target="tiny", config=config, batch=[2, 16], dtype="float32", weights=weights,
                                    max_memory=None, ways=rows())
    refused = invoke("step", "tiny", "--tokens", "100")
    assert refused.exit_code == 2 and "--tokens 100 is more than the model's 64 positions" in refused.stderr


def test_one_that_fails_costs_its_row_and_the_exit_code(planted, tmp_path, monkeypatch):
    real = _steps.raced_steps
    monkeypatch.setattr(_steps, "raced_steps", lambda *args: 1 / 0 if args[1]["input_ids"].shape[0] == 2 else real(*args))
    (tmp_path / "mine.py").write_text("def broken():\n    raise KeyError('planted')\n")
    said = invoke("step", "nowhere", "mine.py:broken", "tiny", f"{PLAIN}", "--batch", "3", "--json", *TWO)
    assert said.exit_code == 1, said.output
    nowhere, broken, tiny, script = json.loads(said.stdout)["measured"]["models"]
    assert nowhere["target"] == "nowhere" and "no such folder" in nowhere["why"] and "ways" not in nowhere
    assert "KeyError" in broken["why"] and "script; name a function" in script["why"] and tiny["ways"] and "why" not in tiny
    said = invoke("step", "tiny", "other", "--batch", "2", *TWO)
    assert said.exit_code == 1 and "2 failed" in said.output and "division by zero" in said.output
    measured = json.loads((next(tmp_path.glob("records/*2-models.json"))).read_text())["measured"]["models"]
    assert [m["batch"] for m in measured] == [[2, 64], [2, 64]], "what was known before it failed is kept"


def test_a_way_of_whets_that_does_not_run_is_a_failure_and_a_rivals_is_none():
    rival = model("a") | dict(ways=[*rows(), dict(way=LIGER, why="not installed")])
    ours = model("b") | dict(ways=[rows()[0], dict(way=OPTIMIZED, why="ValueError: planted")])
    assert step_tables.failure(rival) == "" and step_tables.failure(ours) == "whet.optimize: ValueError: planted"
    assert step_tables.slower_line([rival, ours]) == "whet.optimize is slower than the model as it is in 0 of 1; 1 failed"


def test_between_targets_what_was_compiled_and_held_is_let_go(planted, monkeypatch):
    let_go = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: let_go.append("graphs"))
    monkeypatch.setattr(_steps, "free_memory", lambda: let_go.append("memory"))
    assert invoke("step", "tiny", "other").exit_code == 0 and let_go == ["graphs", "memory"] * 2


def test_progress_names_the_model_and_how_many_there_are(planted):
    said: list[str] = []
    run = _steps.StepRun(FolderOptions(True), step_rivals.StepOptions(whet.lock.Lock(), 0.1), (AS_IT_IS,))
    list(_steps.raced_models(["tiny", "nowhere"], run, lambda text, done, total: said.append(text)))
    assert said == ["tiny, model 1 of 2: building the model", "tiny, model 1 of 2: timing",
                    "nowhere, model 2 of 2: building the model"]


@pytest.mark.parametrize("name", ["nano_gpt", "encoder", "hand_written"])
def test_what_a_function_returns_is_taken_alone_and_trains(name, planted, tmp_path):
    said = invoke("step", f"{PLAIN}:{name}")
    assert said.exit_code == 0, said.output
    (base, batch, _, _), = planted
    step_rivals.plain_step(base, batch)[0]()
    assert all(p.grad is not None for p in base.parameters())
    kept_as, made = kept(tmp_path)
    sizes = made["measured"]["batch"]
    assert kept_as == f"step-plain-models-py-{name.replace('_', '-')}-{sizes[0]}x{sizes[1]}"
    assert made["command"] == f"whet step {PLAIN}:{name}" and re.search(r"\w+, [\d,]+ parameters", made["measured"]["config"])


@pytest.mark.parametrize("text, options, why", [
    ("return model, torch.ones(2, 3)", [], "a dict of what the forward takes by name"),
    ("return dict(model=model, step=lambda: None)", [], "a dict of what the forward takes by name"),
    ("return model, dict(input=torch.ones(2, 3))", ["--batch", "2"], "--batch is for a Hugging Face folder, and no target is"),
    ("return model, dict(input=torch.ones(2, 3))", [], "returned no loss to train on"),
])
def test_a_function_that_cannot_be_raced_is_one_line(text, options, why, planted, tmp_path):
    head = "import torch\n\nclass Mean(torch.nn.Linear):\n    def forward(self, input):\n        return super().forward(input)"
    loss = ".mean()" * ("no loss" not in why)
    (tmp_path / "mine.py").write_text(f"{head}{loss}\n\ndef given():\n    model = Mean(3, 3)\n    {text}\n")
    said = invoke("step", "mine.py:given", *options)
    assert said.exit_code == 2 and len(error_lines(said)) == 1 and why in said.stderr and not planted, said.stderr


def test_the_default_of_seconds_is_that_of_optimize():
    assert inspect.signature(whet.optimize).parameters["seconds"].default == SECONDS
    assert f"(default {SECONDS}, as whet.optimize's)" in shown_help("step")
    assert (step_tables.BEFORE, step_tables.AFTER) == (AS_IT_IS, OPTIMIZED)


def test_slower_is_slower_by_more_than_a_tie():
    tied, slower = model("a", 1.0, 1 + TIE / 2), model("b", 1.0, 1 + 2 * TIE)
    assert step_tables.slower_line([tied, slower]).endswith("in 1 of 2")
    assert step_tables.slower_line([model("a") | dict(ways=rows()[:1])]) == ""


def test_the_table_has_a_column_for_each_way_and_a_dash_for_what_is_missing():
    console = Console(width=220, record=True)
    step_tables.show_models(console, [model("a", 3.0, 2.0), dict(target="b", why="ValueError: planted")])
    shown = console.export_text()
    for words in (AS_IT_IS, OPTIMIZED, "4 x 1,024", "3.000", "2.000", "1.50x", "2.0", "1.0", "41", "ValueError: planted",
                  "1 failed", "GiB", "ready in s", "again with the lock"):
        assert words in shown


def test_the_record_feeds_a_table_of_its_own_and_not_that_of_ways(root):  # noqa: F811
    assert "there is no `records/steps-*.json`" in step_tables.families(root)
    write(root, "steps-2-models.json", record({"models": [model("llama", 3.0, 2.0), model("gpt2", 3.0, 2.0)]}))
    newer = [model("gpt2", 4.0, 5.0), dict(target="t5", why="ValueError: planted")]
    write(root, "steps-3-models.json", record({"models": newer}, at="2031-01-01T00:00:00+00:00"))
    made = readme.TABLES["families"](root)
    assert re.search(r"^\| llama \| 4 x 1,024 \| 3.000 \| 2.000 \| 1.50x \(", made, re.M), made
    assert re.search(r"^\| gpt2 \| 4 x 1,024 \| 4.000 \| 5.000 \| 0.80x", made, re.M) and made.count("| gpt2 ") == 1
    assert "in 1 of 2; 1 failed." in made and "| ValueError: planted |" in made
    assert f"`records/steps-3-models.json` (commit `{'a' * 12}`, 2031" in made and "Test GPU, torch 2.0, triton 3.0" in made
    assert "there is no `records/step-*.json`" in readme.TABLES["ways"](root)


def folders(paths):
    return pytest.mark.parametrize("folder", [pytest.param(p, id=p.name) for p in paths])


def test_there_is_a_small_model_of_every_family():
    assert " ".join(p.name for p in SMALL) == (
        "bert gemma2 gemma3 gpt-neox gpt2 llama mistral modernbert olmo2 phi3 qwen2 qwen3 t5 vit whisper")


@folders(SMALL)
def test_a_small_model_is_as_large_as_the_others_and_has_no_dropout(folder):
    config = config_of(folder)
    cls = class_of(folder, config)
    with torch.device("meta"):
        built = cls._from_config(config, dtype=config.dtype)
    assert cls.__name__ == config.architectures[0] and config.dtype == torch.bfloat16
    assert config.hidden_size == 1024 and config.num_attention_heads == 16 and config.num_hidden_layers == 4
    count = sum(p.numel() for p in built.parameters())
    assert 50e6 < count < 160e6
    assert not [n for n, v in config.to_dict().items() if "drop" in n and v and not n.startswith(("classifier", "summary"))]
    assert not [m for m in built.modules() if isinstance(m, torch.nn.Dropout) and m.p]
    batch = batch_of(built, label_of(cls), True, 2, 32, "meta")
    shapes = {name: tuple(t.shape) for name, t in batch.items()}
    first = dict(vit=("pixel_values", (2, 3, 224, 224)), whisper=("input_features", (2, 80, 3000)))
    assert next(iter(shapes.items())) == first.get(folder.name, ("input_ids", (2, 32)))
    assert shapes["labels"] == ((2,) if folder.name == "vit" else (2, 32))


def shrunk(folder: Path, to: Path) -> FolderModel:
    """The model of a folder with fewer and smaller layers."""
    config = json.loads((folder / "config.json").read_text())
    to.mkdir()
    config |= {name: value for value, names in SHRUNK.items() for name in names if name in config}
    config |= {"layer_types": config["layer_types"][:1]} if "layer_types" in config else {}
    (to / "config.json").write_text(json.dumps(config))
    return folder_model(to, FolderOptions(True, 2, 1024, "float32", shorten=True))


@folders(SMALL)
def test_a_small_models_class_takes_the_batch_that_is_made_for_it(folder, tmp_path):
    taken = shrunk(folder, tmp_path / folder.name)
    assert taken.shape == dict(vit=[2], whisper=[2, 448]).get(folder.name, [2, 1024])
    assert taken.model(**taken.batch).loss.requires_grad
    words = dict(vit="2 random images", whisper="2 random sounds with 448 tokens")
    assert taken.size == words.get(folder.name, "2 x 1,024 random tokens")


def test_sound_is_refused_beyond_its_positions_where_it_is_alone_and_heard_without_labels():
    folder = next(p for p in SMALL if p.name == "whisper")
    with pytest.raises(ValueError, match="--tokens 1024 is more than the model's 448 positions"):
        folder_model(folder, FolderOptions(True, 1, 1024))
    config = config_of(folder)
    with torch.device("meta"):
        built = class_of(folder, config)._from_config(config, dtype=torch.float32)
    batch = batch_of(built, "tokens", False, 1, 8, "meta")
    assert list(batch) == ["input_features", "decoder_input_ids"] and batch["input_features"].dtype == torch.float32


def test_each_model_is_in_the_record_as_it_is_done(planted, monkeypatch, tmp_path):
    def stopped(targets, run, progress):
        yield model("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(_steps, "raced_models", stopped)
    result = invoke("step", "tiny", "other", "--records", str(tmp_path))
    assert result.exit_code == 130 and "1 of 2 models are in the record" in result.output
    (path,) = tmp_path.glob("*steps-2-models.json")
    assert [m["target"] for m in json.loads(path.read_text())["measured"]["models"]] == ["a"]
