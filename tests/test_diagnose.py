"""What the doctor stands on: targets of every kind, a step watched op by op, a profile that adds up, scripts, what-if."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from whet.commands import app
from whet.diagnose import summary, whatif
from whet.diagnose.decode import as_decode
from whet.diagnose.doctor import apply, diagnose, open_target, ordered
from whet.diagnose.profile import Nest
from whet.diagnose.run import Finding, Run
from whet.diagnose.script import run_script
from whet.diagnose.target import CannotRun, Target, target_of
from whet.diagnose.watch import watch
from whet.report import clinic_tables
from whet.report.markdown import by_machine, merged, read
from whet.workload import find_loss

ROOT = Path(__file__).resolve().parents[1]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) * 2.0 + 1.0)


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(16, 5)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def net(optimizer=True) -> Target:
    torch.manual_seed(0)
    model = Net()
    batch = dict(x=torch.randn(8, 16), y=torch.randint(5, (8,)))
    given = (model, batch, torch.optim.AdamW(model.parameters())) if optimizer else (model, batch)
    return target_of("net", given)


@pytest.mark.parametrize("out", [
    torch.tensor(1.0), {"loss": torch.tensor(1.0)}, types.SimpleNamespace(loss=torch.tensor(1.0)),
    (torch.tensor(1.0), torch.ones(3)),
], ids=["scalar", "dict", "attribute", "tuple"])
def test_a_loss_is_found_however_it_is_returned(out):
    assert find_loss(out) == 1.0
    assert find_loss(torch.ones(3)) is None and find_loss({"logits": torch.ones(3)}) is None and find_loss(None) is None


def test_a_model_without_a_loss_is_looked_at_forward_only():
    target = target_of("linear", (nn.Linear(4, 4), torch.ones(2, 4)))
    assert target.kind == "forward" and "no loss" in target.notes[0]
    assert not diagnose(target, seconds=0.01).failed
    with pytest.raises(CannotRun, match="returned no loss to train on"):
        target_of("linear", (nn.Linear(4, 4), torch.ones(2, 4)), "train")


@pytest.mark.parametrize("given, words", [
    (5, "must return model and batch"), ((3, 4), "must be an nn.Module"),
    (dict(model=nn.Linear(2, 2), extra=1), "returned \\['extra'\\]"),
    ((nn.Linear(4, 4), torch.ones(2, 5)), "the forward raised RuntimeError"),
])
def test_what_cannot_be_run_is_one_line(given, words):
    with pytest.raises(CannotRun, match=words):
        target_of("bad", given)


@pytest.mark.parametrize("text, words", [
    ("no-such-model", "unknown model 'no-such-model'.*a target is"), ("nowhere.py:f", "does not exist"),
    ("nowhere.py", "does not exist"),
])
def test_a_target_that_is_not_there_ends_with_exit_code_two(text, words):
    done = CliRunner().invoke(app, ["doctor", text])
    assert done.exit_code == 2 and "whet: " in done.output
    with pytest.raises(CannotRun, match=words):
        open_target(text)


@pytest.mark.parametrize("body, words", [
    ("def f():\n    raise KeyError('x')\n", r"raised KeyError: 'x' \(at t.py:2\)"),
    ("import nothing_like_this\n", "importing it raised ModuleNotFoundError"),
    ("x = 1\n", "has no function 'f'"),
])
def test_a_function_that_fails_is_named(tmp_path, body, words):
    (tmp_path / "t.py").write_text(body)
    with pytest.raises(CannotRun, match=words):
        open_target(f"{tmp_path}/t.py:f")


def test_a_function_is_told_the_device_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "sizes.py").write_text("N = 4\n")
    made = "torch.nn.Linear(sizes.N, 1).to(device), torch.ones(2, 4, device=device)"
    (tmp_path / "t.py").write_text(f"import torch, sizes\ndef f(device):\n    return {made}\n")
    assert open_target(f"{tmp_path}/t.py:f").model.in_features == 4


def test_a_watched_step_names_modules_lines_and_gradients():
    target = net()
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    seen = watch(target)
    mm = [e for e in seen.events if e.flops]
    assert {e.module for e in mm} == {"layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"}
    assert {e.phase for e in seen.events} == {"forward", "backward", "optimizer"}
    tanh = next(e for e in seen.events if e.op == "aten::tanh")
    assert tanh.module == "layers.0" and tanh.line.startswith("test_diagnose.py:") and not tanh.view
    assert next(e for e in seen.events if e.op == "aten::tanh_backward").module == "layers.1", "the backward goes the other way"
    assert set(seen.grads.values()) == {"ok"} and len(seen.grads) == 10
    assert any(t.name == "head.weight" for e in mm for t in e.inputs)
    assert all(torch.equal(v, before[k]) for k, v in target.model.state_dict().items()), "a watched step trains nothing"
    assert not target.optimizer.state_dict()["state"], "nor does the optimizer keep anything of it"
    assert seen.kept["layers.0"] >= 8 * 64 * 4 and seen.loss > 0 and "layers.1.down" in seen.outputs


def test_flops_are_those_of_the_products():
    forward = sum(e.flops for e in watch(net()).events if e.phase == "forward")
    assert forward == 2 * 8 * (4 * 16 * 64 + 16 * 5)


def test_a_profile_adds_up_to_the_step():
    run = Run(net(), seconds=0.05)
    p = run.profile
    assert sum(row.us for row in p.rows.values()) == pytest.approx(p.busy_us)
    if p.busy_us < p.step.ms * 1e3:
        assert p.busy_us + p.idle_us == pytest.approx(p.step.ms * 1e3)
    assert p.under("layers").launches == sum(p.rows[k].launches for k in p.rows if k.startswith("layers"))
    assert p.rows["optimizer"].optimizer_us > 0 and p.rows["head"].backward_us > 0 and p.top(1)[0][1] > 0
    made = summary.overview(run)
    assert {m["path"] for m in made["modules"]} >= {"layers.*.up", "layers.*.down", "head", "optimizer"}
    assert next(m for m in made["modules"] if m["path"] == "layers.*.up")["count"] == 2
    assert json.dumps(made) and "slowest part is" in summary.slowest_part(run)


@pytest.mark.gpu
def test_gpu_module_times_add_up_to_the_step_within_five_percent(device):
    run = Run(open_target("tiny-llama:medium"), seconds=1.0)
    p = run.profile
    assert 0.95 < (p.busy_us + p.idle_us) / (p.step.ms * 1e3) < 1.05
    assert sum(row.us for row in p.rows.values()) == pytest.approx(p.busy_us)


def test_intervals_nest_and_own_what_is_left():
    nest = Nest([(0, 100_000, "a"), (10_000, 30_000, "b"), (15_000, 20_000, "c"), (40_000, 50_000, "b")])
    assert [nest.at(t) for t in (5_000, 12_000, 16_000, 35_000, 45_000, 200_000)] == ["a", "b", "c", "a", "b", ""]
    assert dict(zip("abcd", nest.own())) == {"a": 70.0, "b": 15.0, "c": 5.0, "d": 10.0}


SCRIPT = """
import argparse, time
import torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
steps = parser.parse_args().steps
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(steps):
    begun = time.perf_counter()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print("took", time.perf_counter() - begun)
"""


def test_a_script_is_run_as_it_is_and_watched(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    target = run_script(path, ["--steps", "4"])
    assert isinstance(target.model, nn.Sequential) and target.kind == "train" and target.optimizer is not None
    script = target.script
    assert script.steps == 4 and len(script.losses) == 3 and script.printed.count("took") == 4 and not capsys.readouterr().out
    assert {r.line: r.times for r in script.readings.values()} == {"train.py:11": 4, "train.py:15": 4}
    import time

    assert time.perf_counter.__module__ == "time", "the clocks are put back"


@pytest.mark.parametrize("body, words", [
    ("import sys; sys.exit(3)\n", "exit code 3"),
    ("x = 1\n1/0\n", r"it raised ZeroDivisionError: division by zero \(at s.py:2\)"),
    ("print('hello')\n", "called no nn.Module"),
])
def test_a_script_that_fails_or_has_no_model_is_said_plainly(tmp_path, body, words):
    (tmp_path / "s.py").write_text(body)
    with pytest.raises(CannotRun, match=words):
        run_script(tmp_path / "s.py")


def test_findings_are_ordered_wrong_first_then_by_cost():
    slow = [Finding("a", "a", [], "f", cost_ms=1.0), Finding("b", "b", [], "f", cost_ms=9.0)]
    made = [*slow, Finding("c", "c", [], "f", wrong=True)]
    assert [f.check for f in ordered(made)] == ["c", "b", "a"]
    assert "apply" not in made[0].as_dict() and made[0].as_dict()["applies"] is False


def test_apply_does_what_is_mechanical():
    target, done = net(), []
    diagnosis = diagnose(target, seconds=0.01, only=("initial_loss",))
    diagnosis.findings = [Finding("a", "a", [], "f", apply=done.append), Finding("b", "b", [], "f")]
    assert [f.check for f in apply(diagnosis)] == ["a"] and done == [target]


def test_chains_are_runs_of_ops_that_feed_one_another():
    seen = watch(net(optimizer=False))
    forward = [[whatif.short(e.op) for e in c] for c in whatif.chains(seen.events) if c[0].phase == "forward"]
    assert ["tanh", "mul", "add"] in forward, forward
    chain = next(c for c in whatif.chains(seen.events) if [whatif.short(e.op) for e in c] == ["tanh", "mul", "add"])
    kept = 8 * 64 * 4 * 3  # reads the projection; tanh's result is for its backward, the last is read by the next product
    assert whatif.fused_bytes(chain, seen.events) == kept


def test_a_chain_that_is_one_of_whets_formulas_is_named():
    def of(*ops):
        return whatif.named(whatif.FusableChain("", "forward", ops, 1, 1.0, 0.1, len(ops) - 1))

    assert of("add", "pow", "mean", "add", "rsqrt", "mul", "mul") == "add_rms_norm"
    assert of("pow", "mean", "add", "rsqrt", "mul", "mul") == "rms_norm" and not of("tanh", "mul")


def test_predictions_of_fusing_are_within_thirty_percent_of_what_kernels_gave():
    """Over every record: ops that move memory, at every shape."""
    found = {}
    for group in by_machine(read(ROOT, "bench")):
        found |= {name + str(e["call"]): p for name, e in merged(group) if (p := clinic_tables.predicted(e))}
    assert len(found) >= 20
    wrong = {k: gain / real for k, (_, gain, real) in found.items() if not 0.7 < gain / real < 1.3}
    assert not wrong, wrong


def test_decoding_needs_a_cache_or_a_step():
    with pytest.raises(CannotRun, match="past_key_values"):
        as_decode(net())
    steps = []
    target = as_decode(target_of("mine", dict(model=nn.Linear(2, 2), step=lambda: steps.append(1))))
    target.step()
    assert target.kind == "decode" and steps == [1]


def test_a_decoder_of_transformers_is_told_layer_by_layer():
    pytest.importorskip("transformers")
    target = open_target(f"{ROOT}/examples/transformers_models.py:tiny_qwen3", "decode")
    run = Run(target, seconds=0.05)
    parts = {r["part"]: r["launches"] for r in summary.per_layer(run)}
    assert {"norm", "qkv", "attention", "output projection", "gate and up", "activation", "down", "head"} <= set(parts)
    assert sum(parts.values()) == run.profile.launches


@pytest.mark.parametrize("module, op, part", [
    ("model.layers.3.self_attn.q_proj", "aten::mm", "qkv"), ("model.layers.3.self_attn.q_norm", "aten::pow", "qk norm"),
    ("model.layers.0.input_layernorm", "aten::mul", "norm"), ("model.layers.0.mlp.act_fn", "aten::silu", "activation"),
    ("model.layers.0.self_attn", "aten::_scaled_dot_product_flash_attention", "attention"), ("lm_head", "aten::mm", "head"),
    ("transformer.h.1.mlp.c_proj", "aten::addmm", "down"), ("transformer.h.1.attn.c_proj", "aten::addmm", "output projection"),
    ("model.layers.7", "aten::add", "residual"), ("model.layers.0.self_attn", "aten::cat", "cache"),
])
def test_the_parts_of_a_layer_are_known_by_module_and_op(module, op, part):
    assert summary.role(module, op) == part


def test_doctor_and_profile_tell_and_record(tmp_path):
    (tmp_path / "t.py").write_text(NET)
    where = f"{tmp_path}/t.py:f"
    options = ["--seconds", "0.01", "--records", str(tmp_path / "records")]
    done = CliRunner().invoke(app, ["doctor", where, "--html", str(tmp_path / "page.html"), *options])
    assert done.exit_code in (0, 1), done.output
    assert "The slowest part is" in done.output and "record: " in done.output
    assert "<html" in (tmp_path / "page.html").read_text()
    made = CliRunner().invoke(app, ["profile", where, "--trace", str(tmp_path / "trace.json"), *options])
    assert made.exit_code == 0 and "forward ms" in made.output, made.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kept = [json.loads(p.read_text())["measured"] for p in sorted((tmp_path / "records").glob("*.json"))]
    assert len(kept) == 2 and all(k["sentence"] and k["modules"] for k in kept)


NET = """
import torch
from torch import nn
def f():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model
        def forward(self, x, y):
            return nn.functional.cross_entropy(self.net(x), y)
    return Loss(), dict(x=torch.randn(8, 16), y=torch.randint(5, (8,)))
"""


def test_nothing_is_attached_to_steps_that_are_not_looked_at():
    """After a diagnosis no hook is left on modules, optimizers or torch itself."""
    body = (
        "from whet.diagnose.doctor import diagnose, open_target\n"
        "import torch, torch.nn.modules.module as m\n"
        "from whet.diagnose.target import target_of\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "call, backward = torch.nn.Module.__call__, torch.Tensor.backward\n"
        "diagnose(target_of('n', (net, torch.ones(2, 4))), seconds=0.01)\n"
        "assert not m._global_forward_hooks and not m._global_forward_pre_hooks and not net[0]._forward_hooks\n"
        "assert torch.nn.Module.__call__ is call and torch.Tensor.backward is backward\n"
    )
    subprocess.run([sys.executable, "-c", body], check=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
