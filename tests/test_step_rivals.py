"""whet step: one row for each way of a training step, what cannot run costs its row, and the command around it."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from swapping import batch, built
from test_cli import error_lines, invoke

import whet.ops
from whet import step_rivals
from whet.lock import Lock
from whet.report import step_tables
from whet.step_rivals import (
    AS_IT_IS,
    COMPILED,
    LIGER,
    OPTIMIZED,
    REST,
    STEP,
    WAYS,
    StepOptions,
    ligered,
    part_of,
    patched,
    raced_steps,
)

transformers = pytest.importorskip("transformers")
LLAMA = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, architectures=["LlamaForCausalLM"], dtype="float32")


class Report(str):
    """What an optimised model says of itself."""


@pytest.fixture
def quick(monkeypatch):
    """Nothing is tuned and nothing compiled. Returns what optimize() and compile_step() were given."""
    given = {"optimize": [], "compile_step": []}

    def optimize(model, data, **options):
        given["optimize"].append((model, options["lock"]))
        model.__dict__["whet"] = Report("2 modules\nreplaced")
        return model

    def compile_step(model, optimizer, **options):
        given["compile_step"].append((model, options))

        def step(data):
            optimizer.zero_grad()
            loss = model(**data).loss
            loss.backward()
            optimizer.step()
            return loss

        step.report = "as it is: planted"
        return step

    monkeypatch.setattr(step_rivals, "optimize", optimize)
    monkeypatch.setattr(step_rivals, "compile_step", compile_step)
    monkeypatch.setattr(step_rivals, "compiled_forward", lambda model: model.forward)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    return given


def raced(*ways: str, **options) -> dict[str, dict]:
    model = built("Llama", torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = raced_steps(model, batch(), StepOptions(Lock(), 0.001, **options), lambda *_: None, ways or WAYS)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters()), "each way has a copy"
    return {row["way"]: row for row in rows}


def test_every_way_has_a_row_and_what_cannot_run_costs_only_its_own(quick):
    rows = raced()
    assert list(rows) == list(WAYS) and json.dumps(rows)
    assert "liger" in rows[LIGER]["why"] and "timing" not in rows[LIGER]
    for way in (AS_IT_IS, COMPILED, OPTIMIZED, STEP):
        row = rows[way]
        assert row["timing"]["low"] <= row["timing"]["ms"] <= row["timing"]["high"] and row["timing"]["samples"] >= 3
        assert row["speedup"] == pytest.approx(rows[AS_IT_IS]["timing"]["ms"] / row["timing"]["ms"], rel=1e-3)
        assert row["ready_s"] >= 0 and (row["again_s"] is None) == (way != OPTIMIZED)
        assert (row["memory_mib"] is None) == (not torch.cuda.is_available())
    assert rows[OPTIMIZED]["notes"] == ["2 modules", "replaced"] and rows[STEP]["notes"] == ["as it is: planted"]
    models = [model for model, _ in quick["optimize"]]
    assert models[0] is models[1] and models[2] is quick["compile_step"][0][0], "again for the time it takes; then a copy"


def test_a_way_that_stops_running_costs_its_row_too(quick, monkeypatch):
    real, asked = step_rivals.peak_mib, []

    def peak(run, clear):
        asked.append(run)
        if len(asked) == 2:
            raise torch.cuda.OutOfMemoryError("planted")
        return real(run, clear)

    monkeypatch.setattr(step_rivals, "peak_mib", peak)
    rows = raced(AS_IT_IS, COMPILED, STEP)
    assert "planted" in rows[COMPILED]["why"] and "timing" not in rows[COMPILED] and rows[STEP]["speedup"] > 0


def test_a_profiler_that_fails_costs_its_own_figures_alone(quick, monkeypatch):
    monkeypatch.setattr(step_rivals, "busy_ms", lambda run: 1 / 0)
    row = raced(AS_IT_IS)[AS_IT_IS]
    assert row["timing"]["ms"] > 0 and "busy_ms" not in row and "why" not in row


def kernels() -> list[tuple[str, str]]:
    """(op or module, kernel) of every Triton or Gluon kernel that an op launches, as its file has it."""
    found = []
    for path in Path(whet.ops.__file__).parent.rglob("*.py"):
        text, inside = path.read_text(), path.relative_to(Path(whet.ops.__file__).parent).parts[0]
        found += [(inside, name) for name in re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", text, re.M)]
    return found


def test_whets_kernels_of_attention_are_attention_and_no_other_op_has_one_that_is():
    inside = ("attention", "attention_spans")
    ours = [name for op, name in kernels() if op in inside]
    assert {"_forward_kernel", "_forward_hopper_kernel", "_dq_kernel", "_dkdv_kernel", "_delta_kernel", "_one_tile_kernel",
            "_fused_kernel", "_spans_dq_kernel"} <= set(ours)
    assert {name: part_of(name) for name in ours} == dict.fromkeys(ours, "attention")
    others = [name for op, name in kernels() if op not in inside]
    assert len(others) > 20 and "attention" not in {part_of(name) for name in others}
    assert part_of("triton_poi_fused_add_0") == part_of("_row_sums_kernel") == REST
    assert {part_of(name) for name in ("nvjet_tst_128x256", "_product_kernel", "_product_hopper_kernel")} == {"products"}


def test_without_the_step_as_it_is_nothing_is_compared_and_where_none_runs_there_are_reasons(quick, monkeypatch):
    assert raced(STEP, compiled=False)[STEP]["speedup"] is None
    assert quick["compile_step"][0][1]["compiled"] is False
    monkeypatch.setattr(step_rivals, "plain_step", lambda *_: 1 / 0)
    assert "division by zero" in raced(AS_IT_IS)[AS_IT_IS]["why"]


def rotated(q, k, cos, sin, unsqueeze_dim=1):
    raise AssertionError("Liger's, in another's model")


@pytest.fixture
def liger(monkeypatch):
    """A Liger that, as the real one, sets its rotation for all models and its norm in the one."""
    from transformers.models.llama import modeling_llama

    def apply(model):
        modeling_llama.apply_rotary_pos_emb = rotated
        model.model.norm.forward = lambda x: x

    kinds = {"llama": apply}
    package, inner, patch = (ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers", "monkey_patch"))
    inner._apply_liger_kernel_to_instance, patch.MODEL_TYPE_TO_APPLY_LIGER_FN = apply, kinds
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    return vars(modeling_llama)


def test_what_liger_sets_for_all_models_is_there_only_while_its_own_runs(quick, liger):
    before, model = dict(liger), built("Llama", torch.float32)
    sys.modules["liger_kernel"] = ModuleType("liger_kernel")
    found = ligered(model)
    assert liger == before and [name for _, name, _ in found] == ["apply_rotary_pos_emb"]
    model.config.model_type = "other"
    with pytest.raises(LookupError, match="no kernels for models of type other"):
        ligered(model)
    with pytest.raises(KeyError), patched(found):
        assert liger["apply_rotary_pos_emb"] is rotated
        raise KeyError
    assert liger == before
    rows = raced(AS_IT_IS, LIGER)
    assert "in another's model" in rows[LIGER]["why"] and rows[AS_IT_IS]["timing"] and liger == before


@pytest.fixture
def folder(tmp_path, monkeypatch):
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return "tiny"


def test_the_command_shows_a_table_and_keeps_a_record(quick, folder, tmp_path):
    said = invoke("step", folder, "--batch", "2", "--tokens", "16", "--seconds", "0.001", "--no-compiled")
    assert said.exit_code == 0, said.output
    assert all(way in said.output for way in WAYS) and "again, with what the lock keeps" in said.output
    assert "as it is: planted" in said.output
    kept, = tmp_path.rglob("records/**/*.json")
    made = json.loads(kept.read_text())
    measured = made["measured"]
    assert measured["batch"] == [2, 16] and measured["target"] == "tiny" and measured["weights"] and measured["config"]
    assert [row["way"] for row in measured["ways"]] == list(WAYS) and measured["dtype"] == "float32"
    assert made["command"] == "whet step tiny --batch 2 --tokens 16 --dtype float32 --no-compiled"


def test_images_have_no_tokens_and_a_limit_of_memory_is_in_the_record(quick, tmp_path, monkeypatch):
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                                    image_size=16, patch_size=8, architectures=["ViTForImageClassification"], dtype="float32")
    config.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    said = invoke("step", "vit", "--batch", "3", "--seconds", "0.001", "--only", "as it is", "--max-memory", "2GiB")
    assert said.exit_code == 0, said.output
    assert "a training step of 3, whet within 2GiB, float32" in said.output
    kept, = tmp_path.rglob("records/*.json")
    made = json.loads(kept.read_text())
    assert kept.name == "cpu-step-vit-3-2GiB.json" and made["measured"]["batch"] == [3]
    assert made["command"] == "whet step vit --batch 3 --dtype float32 --max-memory 2GiB"


def test_json_and_some_of_the_ways(quick, folder):
    said = invoke("step", folder, "--tokens", "16", "--seconds", "0.001", "--only", "as it is, whet.optimize", "--json")
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)["measured"]["ways"]
    assert [row["way"] for row in rows] == [AS_IT_IS, OPTIMIZED] and all(row["timing"] for row in rows)


@pytest.mark.parametrize(("args", "why"), [
    (["tiny", "--only", "as it is,other"], "--only knows as it is, liger"), (["nowhere"], "no such folder"),
    (["tiny/config.json"], "it is a file"), (["."], "has no config.json"), (["tiny", "--dtype", "int3"], "int3"),
    (["tiny", "--max-memory", "lots"], "max_memory must be bytes above 0 or a size such as '40GiB'"),
])
def test_bad_input_is_one_line(quick, folder, args, why, tmp_path):
    said = invoke("step", *args)
    assert said.exit_code != 0 and len(error_lines(said)) == 1 and why in said.stderr, said.stderr
    assert not (tmp_path / "records").exists() and not quick["optimize"]


def test_a_table_of_ways_with_what_is_missing(capsys):
    timing = dict(ms=2.0, low=1.9, high=2.1)
    rows = [dict(way=AS_IT_IS, timing=timing, speedup=1.0, memory_mib=2048, ready_s=1.0, again_s=None, kernels=12,
                 busy_ms={"attention": 1.0, "products": 0.5}), dict(way=LIGER, why="not installed")]
    console = Console(width=200, record=True)
    step_tables.show(console, dict(target="tiny", batch=[2, 2048], dtype="float32", ways=rows))
    shown = console.export_text()
    assert "2 x 2,048" in shown and "attention 1.0, products 0.5" in shown and "not installed" in shown and "2.0" in shown


def test_what_a_tracker_would_be_told_is_dropped():
    assert step_rivals.Unlogged().add_text("a", "b") is None and step_rivals.Unlogged().add_scalar("a", 1.0) is None
