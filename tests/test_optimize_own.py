"""`whet optimize file.py:function`: a model that nobody wrote for whet, verified and timed under the plans that apply to it."""

import json

import pytest
import torch
from conftest import without
from typer.testing import CliRunner

import whet.plans
import whet.subjects
from whet.choices import Choices, Recorder
from whet.commands import app
from whet.diagnose.target import CannotRun, target_of
from whet.lock import Lock
from whet.plans import BEFORE, Trial, best_plan
from whet.subjects import Given, subject_of

FILE = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(drop), nn.Linear(16, 4)

    def forward(self, x, y=None):
        h = self.down(self.drop(F.gelu(self.norm(self.up(x)))))
        return h if y is None else F.cross_entropy(h, y)


def given(**options):
    torch.manual_seed(0)
    return Net(**options), (torch.randn(6, 8), torch.randint(4, (6,)))


def trained():
    model, batch = given()
    return model, batch, torch.optim.AdamW(model.parameters(), lr=0.1)


def forward():
    model, (x, y) = given()
    return model.eval(), x


def dropped():
    return given(drop=0.5)


def drawing():
    model, batch = given()
    model.down.register_forward_hook(lambda m, args, out: out + torch.rand_like(out))
    return model, batch


def single():
    return given()[0].double().half().float().bfloat16(), (torch.randn(6, 8).bfloat16(), torch.randint(4, (6,)))


def stepping():
    model, batch = given()
    return dict(model=model, batch=batch, step=lambda: model(*batch))


def raising():
    raise OSError("no data here")


def nothing():
    return 3, 4
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path / "net.py"


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile gives back what it was given."""
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)


def named(result: dict) -> dict[str, dict]:
    return {p["name"]: p for p in result["plans"]}


def test_a_users_function_is_verified_and_timed_as_it_is_and_compiled(file):
    result = best_plan(f"{file}:trained", Lock(), seconds=0.02)
    assert set(named(result)) == {BEFORE, "torch.compile"} and result["kind"] == "train"
    assert all(p["ok"] and p["ms"] > 0 for p in result["plans"]), result["plans"]
    assert 0 < named(result)["torch.compile"]["share"] <= 1 and result["calls"] == result["entries"] == []
    assert result["target"] == "net.py:trained float32" and "244 parameters" in result["config"]


def test_the_command_prints_the_plans_keeps_a_record_and_writes_nothing_else(file, uncompiled, monkeypatch):
    monkeypatch.chdir(file.parent)
    done = CliRunner().invoke(app, ["optimize", "net.py:trained", "--seconds", "0.02"])
    assert done.exit_code == 0, done.output
    assert "plans for net.py:trained float32: one training step" in done.output and "every gradient verified" in done.output
    (record,) = (file.parent / "records").iterdir()
    assert json.loads(record.read_text())["command"].startswith("whet optimize net.py:trained")
    assert {p.name for p in file.parent.iterdir()} <= {"net.py", "records", "__pycache__"} and file.read_text() == FILE


def test_without_a_loss_the_forward_is_verified_and_timed(file, uncompiled, tmp_path):
    done = CliRunner().invoke(app, ["optimize", f"{file}:forward", "--seconds", "0.02", "--records", str(tmp_path)])
    assert done.exit_code == 0 and ": one forward" in done.output and "every output verified" in done.output, done.output
    assert "returned no loss" in done.output
    assert set(Given(subject_of(f"{file}:forward").target).truth()) == {"output 0"}


@pytest.mark.parametrize("function, words", [
    ("trainde", "has no function 'trainde'; there are given, trained, forward, "),
    ("raising", r"raised OSError: no data here \(at net.py:\d+\)"),
    ("nothing", "the model must be an nn.Module, got int"),
    ("stepping", "a step of your own cannot run on copies of the model; return model and batch"),
    ("drawing", "a step draws random numbers, so no plan can be verified; set its dropout to 0"),
    ("", "optimize runs no script; name a function"),
])
def test_what_cannot_be_run_is_one_line_and_exit_code_two(file, function, words, tmp_path):
    asked = f"{file}:{function}" if function else str(file)
    done = CliRunner().invoke(app, ["optimize", asked, "--records", str(tmp_path / "records")])
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(CannotRun, match=words):
        subject_of(asked)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CannotRun, match="nowhere.py does not exist"):
        subject_of(f"{tmp_path}/nowhere.py:f")


def test_what_was_given_is_left_as_it_is(file, uncompiled):
    subject = subject_of(f"{file}:trained")
    before = {k: v.clone() for k, v in subject.target.model.state_dict().items()}
    trial = Trial(subject, "float32", 0.02)
    for plan in subject.plans():
        trial.run(plan)
    trial.heat()
    assert all(torch.equal(v, before[k]) for k, v in subject.target.model.state_dict().items())
    assert not subject.target.optimizer.state and all(p.grad is None for p in subject.target.model.parameters())


def test_dropout_is_off_and_that_is_said(file):
    assert "dropout is off" in subject_of(f"{file}:dropped").notes[0] and not subject_of(f"{file}:trained").notes


@pytest.mark.parametrize("wrong", [lambda out: out * 1.001, lambda out: out.detach() + 0 * out, lambda out: out * float("nan")])
def test_a_compiler_that_computes_something_else_is_caught(wrong, file, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **_: lambda *args: wrong(run(*args)))
    result = best_plan(f"{file}:trained", Lock(), seconds=0.02)
    assert not named(result)["torch.compile"]["ok"] and named(result)["torch.compile"]["why"] and result["chosen"] == BEFORE


def test_a_compiler_that_raises_costs_its_candidacy_only(file, monkeypatch):
    def compiled(run, **_):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", compiled)
    result = best_plan(f"{file}:trained", Lock(), seconds=0.02)
    assert named(result)["torch.compile"]["why"] == "RuntimeError: no C++ compiler" and result["chosen"] == BEFORE


def test_the_rounding_inside_a_model_of_16_bits_is_known(file):
    assert subject_of(f"{file}:trained").rounding("float32") is None
    assert subject_of(f"{file}:single").rounding("float32") == torch.finfo(torch.bfloat16).eps
    subject = subject_of(f"{file}:trained")
    subject.target.around = lambda: torch.autocast("cpu", torch.bfloat16)
    assert subject.rounding("float32") == torch.finfo(torch.bfloat16).eps, "an autocast inside is found"


class Asking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ops, self.weight = Choices(), torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.ops.rms_norm(x, self.weight).square().mean()


def test_plans_with_choices_are_there_where_the_model_asks_a_choices(uncompiled, monkeypatch, tmp_path):
    subject = Given(target_of("asking", (Asking(), torch.randn(4, 32))))
    assert [p.name for p in subject.plans()] == ["eager + choices", "torch.compile", "torch.compile + choices"]
    monkeypatch.setattr(whet.plans, "subject_of", lambda target: subject)
    with without("compile", "liger"):
        result = best_plan("asking", Lock.read(tmp_path / "whet.lock"), seconds=0.02)
    assert {e["call"]["op"] for e in result["entries"]} == {"rms_norm"} and all(p["ok"] for p in result["plans"])
    assert not Lock.read(tmp_path / "whet.lock").plans, "what a function returned is not found again by its name"


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.norm(x)).square().mean()


@pytest.mark.parametrize("train", [True, False])
def test_what_is_proved_of_a_users_model_is_swapped_in_copies_of_it(train, uncompiled, device):
    model = Normed().to(device).requires_grad_(train)
    subject = Given(target_of("normed", (model, torch.randn(4, 32, device=device))))
    assert [p.name for p in subject.plans() if p.variant == "swapped"] == ["eager + swapped", "torch.compile + swapped"]
    assert [(c.op, c.grad, n) for c, n in subject.calls("float32")] == [("layer_norm", train, 1)]
    trial, asked = Trial(subject, "float32", 0.02), Recorder()
    trial.choices = dict.fromkeys(("eager", "graph", "compile"), asked)
    trial.graphs = False
    for plan in subject.plans():
        trial.run(plan)
    assert all(r.ok for r in trial.results.values()), [r.why for r in trial.results.values()]
    assert {call.op for call, _ in asked.calls.values()} == {"layer_norm"}, "the replacement is what ran"
    assert "forward" not in vars(model.norm) and "norms" in subject.notes[-1]


def test_a_model_whose_parts_cannot_be_looked_at_runs_as_it_is(uncompiled, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("upstream drifted")

    monkeypatch.setattr(whet.subjects, "recognise", broken)
    subject = Given(target_of("normed", (Normed(), torch.randn(4, 32))))
    assert [p.name for p in subject.plans() if not p.graph] == ["torch.compile"] and not subject.calls("float32")
    assert subject.notes[-1] == "no part of the model was replaced: RuntimeError: upstream drifted"


def test_on_a_gpu_the_step_is_captured_as_it_is_and_compiled(file, uncompiled, monkeypatch):
    monkeypatch.setattr("whet.workload.Graph", lambda run: run)
    subject = subject_of(f"{file}:trained")
    trial = Trial(subject, "float32", 0.02)
    trial.graphs, subject.device = True, "cuda"
    todo = subject.plans()
    subject.device = "cpu"
    for plan in todo:
        trial.run(plan)
    assert list(trial.results) == ["CUDA graph", "torch.compile", "torch.compile + CUDA graph"]
    assert all(r.ok for r in trial.results.values()), [r.why for r in trial.results.values()]


def test_a_forward_that_is_not_the_copys_own_is_refused():
    model = torch.nn.Linear(3, 3)
    model.forward = lambda x: torch.nn.functional.linear(x, model.weight).square().mean()
    with pytest.raises(CannotRun, match="no gradient reaches a parameter of a copy"):
        Given(target_of("closure", (model, torch.ones(2, 3))))
