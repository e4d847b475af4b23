"""whet optimize of a Hugging Face folder: found and proved, refused in one line, shown, and kept as a record."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import error_lines, invoke
from test_page import Page

from whet.choices import Choices, Recorder
from whet.commands import _folder, _memory
from whet.commands._folder import FolderOptions, is_folder
from whet.report import readme, swap_tables
from whet.report.page import page
from whet.swap import _optimize
from whet.swap._preview import preview
from whet.swap._replace import as_call, recognise
from whet.tune import Tuned

transformers = pytest.importorskip("transformers")

LLAMA = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=24, bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Llama with its weights, and a GPT-2 that has only its config."""
    root = tmp_path_factory.mktemp("folders")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(root / "path/to/model_folder")
    config = transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(root / "gpt2")
    return root


@pytest.fixture
def folders(saved, tmp_path, monkeypatch):
    """The working directory, with the folders in it."""
    for name in ("path", "gpt2"):
        (tmp_path / name).symlink_to(saved / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tuned(monkeypatch):
    """Every call gets its stock impl at once."""
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))


def test_the_example_of_the_help_finds_and_proves_and_says_what_it_took(folders):
    text = re.sub(r"\s+", " ", invoke("optimize", "--help").output)
    example = re.search(r"Example: whet (optimize path\S+ --dry-run)", text)
    assert example, text
    result = invoke(*shlex.split(example[1]), "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    shown = result.stdout
    assert "LlamaForCausalLM" in shown and "weights loaded from the folder" in shown
    for word in ("norms", "gated_mlp", "rotary", "attention", "lm_head", "can be replaced", "nothing was timed"):
        assert word in shown
    if not torch.cuda.is_available():
        assert "a training step of 2 x 64 random tokens (small, since there is no GPU here)" in shown
    (path,) = Path("records").iterdir()
    made = json.loads(path.read_text())
    assert path.stem.removeprefix("cpu-") == "optimize-model-folder-dry-run" and made["measured"]["dry_run"]
    assert all(g["before_ms"] is None and not g["replaced"] and g["share"] <= 1 for g in made["measured"]["groups"])
    assert not Path("whet.lock").exists()
    seen = Page(Path("page.html").read_text())
    count = sum(g["modules"] for g in made["measured"]["groups"])
    assert seen.sections == ["swapped", "undone"] and f"{count} modules can be replaced; nothing was timed." in seen.text


def test_a_folder_is_optimised_shown_and_kept_as_a_record_that_feeds_no_table_of_plans(folders, tuned, monkeypatch):
    result = invoke("optimize", "path/to/model_folder", "--seconds", "0.001", "--tokens", "16", "--batch", "3", "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    m = made["measured"]
    assert made["command"].startswith("whet optimize path/to/model_folder --train --batch 3 --tokens 16 --dtype float32")
    assert m["target"] == "model_folder" and m["kind"] == "train" and m["weights"] == "loaded from the folder"
    timed = [g for g in m["groups"] if g["kind"] != "causal_mask"]  # which is timed with the whole alone
    assert all(g["before_ms"] > 0 and g["impls"] and g["modules"] == len(g["paths"]) for g in timed)
    assert {g["kind"]: g["impls"] for g in m["groups"]}["gated_mlp"].keys() == {"swiglu"}
    (path,) = Path("records").iterdir()
    assert path.stem.removeprefix("cpu-") == "optimize-model-folder" and json.loads(path.read_text()) == made
    (folders / "records" / "optimize-a.json").write_text(json.dumps(made | {"machine": made["machine"] | {"device": "cuda"}}))
    assert "Not measured yet" in readme.TABLES["plans"](folders)


def test_random_weights_are_said_and_infer_is_a_forward_without_labels(folders, tuned):
    result = invoke("optimize", "./gpt2", "--infer", "--seconds", "0.001", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    assert "GPT2LMHeadModel" in result.stdout and "in bfloat16; weights random" in result.stdout
    assert re.search(r"a forward pass of [24] x 16 random tokens", result.stdout), "24 positions: a power of two of them"
    (path,) = Path("records").iterdir()
    assert path.stem.removeprefix("cpu-") == "optimize-gpt2-infer"
    assert json.loads(path.read_text())["measured"]["kind"] == "forward"


def broken(name: str, text: str) -> str:
    Path(name).mkdir()
    Path(name, "config.json").write_text(text)
    return name


WRONG = {
    "missing": ("there/is/none", "there/is/none: no such folder"),
    "no-config": ("path", "path has no config.json: it is no Hugging Face folder"),
    "a-file": ("./path/to/model_folder/config.json", "it is a file; name its folder"),
    "no-json": ("no-json", "Transformers cannot read it"),
    "model-type": ("model-type", "model type `nope`"),
    "architecture": ("architecture", "has no architecture LlamaForNothing"),
    "tokens": ("gpt2 --tokens 99", "--tokens 99 is more than the model's 24 positions"),
    "dtype": ("gpt2 --dtype int8", "--dtype must be auto or one of bfloat16, float32, got 'int8'"),
    "no-loss": ("no-loss --train", "LlamaModel has no loss by labels that could be made up; use --infer"),
    "precision": ("gpt2 --precision tf32", "--precision is for plans; use --dtype"),
    "allow": ("gpt2 --allow bf8", "allow must be of tf32, got 'bf8'"),
    "allow-fp8": ("gpt2 --allow tf32,fp8", "allow='fp8' is not offered: a part is replaced only where it computes what"),
    "max-memory": ("gpt2 --max-memory 40", "max_memory must be bytes above 0 or a size such as '40GiB'"),
    "plans": ("gpt2 --infer --plans", "--plans needs a training step that is run, not --infer"),
    "max-memory-of-plans": ("tiny-llama:tiny --max-memory 40", "max_memory must be bytes above 0 or a size such as '40GiB'"),
    "not-a-folder": ("tiny-llama:tiny --dry-run", "--dry-run is for a Hugging Face folder"),
}


@pytest.mark.parametrize("command, reason", WRONG.values(), ids=WRONG)
def test_what_cannot_be_optimised_is_one_line_and_exit_code_2(command, reason, folders):
    broken("no-json", "{")
    broken("model-type", '{"model_type": "nope"}')
    broken("architecture", json.dumps({"model_type": "llama", "architectures": ["LlamaForNothing"]}))
    broken("no-loss", json.dumps({"model_type": "llama", "architectures": ["LlamaModel"]} | LLAMA))
    result = invoke("optimize", *command.split())
    assert result.exit_code == 2 and result.stdout == "" and len(error_lines(result)) == 1, result.stderr
    assert error_lines(result)[0].startswith("whet: optimize: ") and reason in error_lines(result)[0]


def test_without_transformers_it_says_so_in_one_line(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("optimize", "gpt2", "--dry-run")
    assert result.exit_code == 2 and "needs Transformers, which is not installed" in error_lines(result)[0]


def test_what_does_not_fit_is_refused_before_it_is_built(folders, monkeypatch):
    monkeypatch.setattr(_memory, "free_bytes", lambda device: 100)
    monkeypatch.setattr(_folder, "loaded", lambda *args: pytest.fail("it was built"))
    result = invoke("optimize", "gpt2")
    assert result.exit_code == 2 and "weights, and proofs in float64, take at least" in error_lines(result)[0]


def test_a_folder_is_known_by_its_config_and_other_targets_stay_what_they_were(folders):
    assert is_folder("gpt2") and is_folder("path/to/model_folder") and is_folder("./nothing") and is_folder("path")
    assert not any(map(is_folder, ("tiny-llama:tiny", "tiny-llama", "gpt-9", "file.py:build", "a/file.py:build")))
    Path("tiny-llama").mkdir()
    assert not is_folder("tiny-llama"), "a built-in name is no folder without a config"
    assert FolderOptions(True, 4, None, "auto", True).given() == ["--train", "--dry-run", "--batch"]


@pytest.mark.parametrize("name, labels", {
    "LlamaForCausalLM": "tokens", "BertForMaskedLM": "tokens", "BertForTokenClassification": "token classes",
    "LlamaForSequenceClassification": "classes", "LlamaModel": "", "BertForQuestionAnswering": "",
}.items())
def test_labels_are_made_up_for_the_classes_that_have_a_loss_by_them(name, labels):
    assert _folder.label_of(getattr(transformers, name)) == labels


def test_preview_leaves_the_model_as_it_was_and_the_report_is_plain_data():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
    report = preview(model, torch.randn(3, 8), mode="infer")
    assert "forward" not in vars(model[1]) and not hasattr(model, "whet") and repr(report) == "Optimized(0 modules replaced)"
    made = report.to_record()
    assert json.loads(json.dumps(made)) == made and made["kind"] == "forward" and made["groups"][0]["paths"] == ["1"]
    assert "LayerNorm of 8" in str(report) and "can be replaced" in str(report)


GROUP = dict(kind="norms", what="RMSNorm of 64", modules=5, paths=["a", "b"], impls={"rms_norm": "triton"}, share=0.25,
             before_ms=0.4, after_ms=0.1, speedup=4.0, why="fastest of the verified", replaced=True)
RECORD = dict(
    kind="train", dry_run=False, before_ms=10.0, after_ms=8.0, speedup=1.25, note="", seconds=1.0, entries=[], target="mine",
    groups=[GROUP, GROUP | dict(kind="rotary", what="<b>rotary", after_ms=0.8, speedup=0.5, replaced=False)],
    left=[dict(kind="lm_head", path="", why="its head has a bias"), *(dict(kind="norms", path=p, why="odd") for p in "ab")],
)


def test_the_report_shows_groups_what_was_left_and_the_whole_step(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = re.sub(r"[ │]+", " ", swap_tables.text(RECORD))
    assert " norms RMSNorm of 64 5 rms_norm: triton 0.25 0.4000 0.1000 4.00x replaced " in text
    assert "0.8000 0.50x left: it is faster as it was " in text
    assert " lm_head the model its head has a bias " in text and " norms a and 1 more odd " in text
    assert text.endswith("training step: 10.000 ms before, 8.000 ms after, 1.25x")


def test_the_page_has_a_bar_before_and_after_of_each_group_and_names_are_text():
    made = Page(page({"command": "whet optimize mine", "measured": RECORD}))
    assert made.sections == ["swapped"] and "5 modules replaced. Training step: 10.000 ms before" in made.text
    bars = [a["style"] for a in made.all("span") if a.get("style")]
    assert bars == ["width:50.0%", "width:12.5%", "width:50.0%", "width:100.0%"] and "<b>rotary" in made.text


def test_a_model_with_everything_replaced_can_be_compiled_and_still_asks_whet():
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), torch.randint(0, 96, (2, 16))
    plain, asked = model(input_ids=ids, labels=ids).loss, Recorder()
    found = recognise(model, as_call(dict(input_ids=ids, labels=ids)), Choices())
    found.ask(asked)
    loss = torch.compile(model, backend="eager", dynamic=False)(input_ids=ids, labels=ids).loss
    assert {call.op for call, _ in asked.calls.values()} >= {"rope", "rms_norm", "swiglu", "attention", "linear_cross_entropy"}
    torch.testing.assert_close(loss, plain)
    found.restore()
    torch._dynamo.reset()


def test_a_dry_run_shows_the_times_of_a_run_before_it(folders, tuned, monkeypatch):
    def timed(group, *rest):
        group.before_ms, group.after_ms, group.why, group.replaced = 2.0, 1.0, "planted", group.kind != "norms"
        group.use(group.sites[0][0].form, {})

    monkeypatch.setattr(_optimize, "_time_group", timed)
    command = ("optimize", "path/to/model_folder", "--tokens", "16", "--seconds", "0.001")
    assert invoke(*command).exit_code == 0 and Path("whet.lock").exists()
    result = invoke(*command, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    m = json.loads(result.stdout)["measured"]
    groups = [g for g in m["groups"] if g["kind"] != "causal_mask"]  # which is timed with the whole alone
    assert all(g["before_ms"] == 2.0 and g["decided"] and g["would_be"] == (g["kind"] != "norms") for g in groups)
    assert m["before_ms"] and f"times of {len(groups)} of {len(groups)} groups are the lock's" in m["note"]
    shown = " ".join(swap_tables.text(m).split())
    assert "would be" in shown and "nothing was replaced" in shown
    assert "nothing was timed" in invoke(*command, "--dry-run", "--lock", "other.lock").stdout


def test_plans_of_the_step_are_in_the_record_the_table_and_the_page(folders, tuned, monkeypatch):
    from whet import step_plans
    from whet.plan import Plan

    tried = ({"name": "as it is", "ok": True, "why": "", "ms": 4.0},
             {"name": "torch.compile", "ok": True, "why": "", "ms": 2.0, "before_ms": 4.0, "speedup": 2.0},
             {"name": "CUDA graph", "ok": False, "why": "planted"})
    seen = []
    monkeypatch.setattr(step_plans, "choose", lambda work, seconds: seen.append(work) or step_plans.ChosenStep(
        Plan("torch.compile", "", "own"), "faster", {}, tried))
    command = ("optimize", "path/to/model_folder", "--tokens", "16", "--seconds", "0.001")
    result = invoke(*command, "--plans", "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    (path,) = Path("records").iterdir()
    made = json.loads(path.read_text())
    assert made["measured"]["step_plans"]["chosen"] == "torch.compile" and "--plans" in made["command"]
    assert type(seen[0].optimizer) is torch.optim.AdamW and "by plan of compile_step" in result.stdout
    text = Page(Path("page.html").read_text()).text
    assert "The step with its optimizer, by plan." in text and "chosen" in text
    assert invoke(*command, "--no-plans").exit_code == 0 and len(seen) == 1


def test_every_plan_that_was_tried_is_data_after_the_step_as_it_is():
    from whet.plan import BEFORE, Plan
    from whet.plans import PlanResult
    from whet.step_plans import with_first

    tried = [PlanResult(Plan("torch.compile", "", "own"), ok=True, before_ms=4.0, speedup=2.0),
             PlanResult(Plan("CUDA graph", "", "own"), why="planted"), PlanResult(Plan(BEFORE, "", "own"), ok=True)]
    made = list(with_first(SimpleNamespace(results={r.name: r for r in tried})))
    assert [p["name"] for p in made] == ["as it is", "torch.compile", "CUDA graph"]
    assert made[0]["ms"] == 4.0 and made[2]["why"] == "planted" and json.dumps(made)
