"""The doctor on what users bring: scripts whose loss is outside the model, autocast, scalers, models that raise."""

import json
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from whet.commands import app
from whet.diagnose.doctor import diagnose, open_target
from whet.diagnose.modules import tensors_in
from whet.diagnose.profile import profiled
from whet.diagnose.script import run_script
from whet.diagnose.summary import folded
from whet.diagnose.target import CannotRun, target_of
from whet.diagnose.watch import watch
from whet.figures import error_line
from whet.workload import find_loss

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.randn(8, 8), torch.randint(4, (8,))
loss_of = nn.CrossEntropyLoss()
"""
USUAL = HEAD + """
with torch.no_grad():
    model.eval()(x[:2])
model.train()
for _ in range(2):
    loss = loss_of(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
"""


def script(tmp_path, body: str):
    (tmp_path / "train.py").write_text(body)
    return tmp_path / "train.py"


def test_a_script_whose_loss_is_outside_the_model_is_trained_again_with_that_losss_gradient(tmp_path):
    target = run_script(script(tmp_path, USUAL))
    assert target.kind == "train" and "outside the model" in target.notes[0] and target.optimizer is not None
    assert target.model.training and target.args[0].shape == (8, 8), "as in training, not as in the evaluations around it"
    seen = watch(target)
    assert set(seen.grads.values()) == {"ok"} and seen.loss == pytest.approx(target.script.losses[0])
    assert {e.phase for e in seen.events} == {"forward", "backward", "optimizer"}
    assert not diagnose(target, seconds=0.01, only=("severed_gradients", "initial_loss")).failed


def test_the_gradient_handed_in_is_the_scripts_own(tmp_path):
    body = "import torch\nmodel = torch.nn.Linear(3, 2)\nmodel(torch.ones(1, 3)).mul(3).sum().backward()\n"
    target = run_script(script(tmp_path, body))
    assert torch.equal(target.model.weight.grad, torch.full((2, 3), 3.0))
    target.step()
    assert torch.equal(target.model.weight.grad, torch.full((2, 3), 3.0))


def test_a_scripts_autocast_is_kept_and_its_scaler_taken_off_the_loss(tmp_path):
    body = HEAD + """
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", torch.bfloat16):
    loss = loss_of(model(x), y)
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
    scale = torch.amp.GradScaler.scale
    target = run_script(script(tmp_path, body))
    assert target.script.losses[0] < 10 and target.forward().dtype == torch.bfloat16
    assert torch.amp.GradScaler.scale is scale


def test_of_two_trained_models_the_largest_with_its_own_optimizer_is_looked_at(tmp_path):
    body = """
import torch
from torch import nn
small, large = nn.Linear(4, 8), nn.Linear(8, 64)
first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (small, large))
large(small(torch.ones(2, 4))).mean().backward()
first.step(), second.step()
"""
    target = run_script(script(tmp_path, body))
    assert target.model.out_features == 64 and "trains 2 models" in target.notes[0]
    assert target.optimizer.param_groups[0]["params"][0] is target.model.weight


def test_a_script_that_changes_folder_grad_mode_and_prints_from_a_child_leaves_none_of_it(tmp_path, monkeypatch, capfd):
    script(tmp_path, HEAD + "import os\nos.chdir('/')\nos.system('echo child')\nmodel(x)\ntorch.set_grad_enabled(False)\n")
    monkeypatch.chdir(tmp_path)
    assert open_target("train.py").kind == "forward"
    assert torch.is_grad_enabled() and tmp_path.samefile(".") and "child" not in capfd.readouterr().out


@pytest.mark.parametrize("body, words", [
    ("raise ValueError('one\\ntwo')", r"ValueError: one \(at train.py:1\)$"),
    ("import sys; sys.exit('no data')", "SystemExit: no data$"),
    ("from argparse import *\np = ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()", "--data"),
    ("def f(:", "SyntaxError"),
])
def test_a_script_that_fails_says_why_in_one_line_and_all_is_put_back(tmp_path, body, words):
    was = nn.Module.__call__, torch.Tensor.backward, time.perf_counter
    with pytest.raises(CannotRun, match=words):
        run_script(script(tmp_path, body))
    assert was == (nn.Module.__call__, torch.Tensor.backward, time.perf_counter)


def test_what_is_asked_of_a_script_must_fit_it(tmp_path):
    path = str(script(tmp_path, HEAD + "model(x)\n"))
    with pytest.raises(CannotRun, match="trains no model"):
        open_target(path, "train")
    with pytest.raises(CannotRun, match="not for a script"):
        open_target(path, "decode")


class Model(nn.Module):
    def __init__(self, loss=lambda x: x.mean()):
        super().__init__()
        self.line, self.norm, self.drop, self.loss = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), loss

    def forward(self, x):
        return self.loss(self.drop(self.norm(self.line(x))).square())


def test_a_diagnosis_leaves_buffers_modes_and_random_numbers_as_they_were():
    model, batch = Model(), torch.randn(8, 8)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    diagnose(target_of("m", (model, batch)), seconds=0.01, only=("severed_gradients",))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training


class Once(nn.Module):
    """Its second backward fails."""

    def __init__(self):
        super().__init__()
        self.line, self.kept = nn.Linear(4, 4), None

    def forward(self, x):
        self.kept = self.line(x) if self.kept is None or not self.kept.requires_grad else self.kept
        return self.kept.square().mean()


BAD = """
import torch
from torch import nn
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g): raise RuntimeError('one\\ntwo')
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
    def forward(self, x): return Fails.apply(self.line(x)).mean()
def f(): return Model(), torch.ones(2, 4)
"""


@pytest.mark.parametrize("command", ["doctor", "profile"])
def test_a_backward_that_raises_is_one_line_and_exit_code_two(tmp_path, command):
    done = CliRunner().invoke(app, [command, f"{script(tmp_path, BAD)}:f", "--records", str(tmp_path)])
    assert done.exit_code == 2 and "RuntimeError: one" in done.output and "two" not in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_step_that_cannot_be_run_again_is_no_clean_bill():
    found = diagnose(target_of("once", (Once(), torch.ones(2, 4))), seconds=0.01, only=("initial_loss",))
    assert found.blind and found.as_dict()["blind"] and "profiling a step" in found.failed


def test_a_loss_that_is_not_a_number_is_valid_json():
    target = target_of("nan", (Model(lambda x: x.mean() * float("nan")), torch.randn(8, 8)))
    made = diagnose(target, seconds=0.01, only=("severed_gradients",)).as_dict()
    assert json.loads(json.dumps(made, allow_nan=False))["loss"] is None and made["findings"]


def test_on_a_cpu_no_share_of_a_step_is_above_the_whole():
    target = target_of("small", (nn.Linear(4, 4), torch.ones(2, 4)))
    p = profiled(target, seconds=0.01)
    assert p.busy_us <= p.step.ms * 1e3 * 1.0001 and p.busy_us + p.idle_us == pytest.approx(p.step.ms * 1e3)


def test_a_trace_that_cannot_be_written_is_reported(tmp_path):
    made = "def f(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    where = f"{script(tmp_path, 'import torch' + chr(10) + made)}:f"
    args = ["profile", where, "--seconds", "0.01", "--records", str(tmp_path), "--trace", "/nowhere/t.json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and "--trace: /nowhere/t.json cannot be written" in done.output


@dataclass
class Out:
    logits: torch.Tensor
    loss: torch.Tensor


def test_outputs_of_every_shape_are_looked_into():
    out = Out(torch.ones(2), torch.tensor(1.0))
    assert len(list(tensors_in([{"a": out}, (out,)]))) == 4 and not list(tensors_in(Out))
    assert find_loss((torch.ones(2), torch.tensor(1.0))) == 1.0 and find_loss((torch.ones(2), None)) is None


def test_a_loader_is_a_batch_too_and_sparse_gradients_are_read():
    data = torch.utils.data.DataLoader([(torch.ones(4), torch.ones(1)) for _ in range(4)], batch_size=2)
    for given in ((nn.Bilinear(4, 1, 1), data), dict(model=nn.Bilinear(4, 1, 1), loader=data)):
        target = target_of("l", given)
        assert target.args[0].shape == (2, 4) and target.loader is data
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    model.forward = lambda i: model[0](i).mean()
    assert watch(target_of("s", (model, torch.tensor([1, 2])))).grads == {"0.weight": "ok"}


def test_a_long_error_is_cut():
    assert len(error_line(ValueError("x" * 1000))) < 300 and error_line(AssertionError()) == "AssertionError"


def test_layers_are_listed_as_one_only_where_they_are_of_one_class():
    block = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    paths = set(folded(nn.ModuleDict({"blocks": block})).values())
    assert paths == {"", "blocks", "blocks.*", "blocks.*.0", "blocks.*.1"}


LOUD = HEAD.replace("nn.Linear(16, 4))", "nn.Linear(16, 4))\nnn.init.normal_(model[3].weight, std=30.0)") + """
loss = loss_of(model(x), y)
loss.backward()
"""


@pytest.mark.parametrize("body, flagged", [(LOUD, True), (USUAL, False), (LOUD.replace("CrossEntropyLoss()", "CrossEntropyLoss("
                         "reduction='sum')"), False)], ids=["loud", "usual", "sum"])
def test_a_first_loss_outside_the_model_is_judged_too(tmp_path, body, flagged):
    (tmp_path / "s.py").write_text(body)
    found = diagnose(run_script(tmp_path / "s.py"), seconds=0.01, only=("initial_loss",)).findings
    assert bool(found) == flagged and all("ln(4) = 1.4" in f.cause and "3.weight" in f.cause for f in found)


def test_a_loss_that_is_a_sum_is_not_measured_by_the_logarithm():
    class Summed(nn.Linear):
        def forward(self, x, y):
            return nn.functional.cross_entropy(super().forward(x), y, reduction="sum")

    target = target_of("summed", (Summed(8, 4), (torch.randn(64, 8), torch.randint(4, (64,)))))
    assert not diagnose(target, seconds=0.01, only=("initial_loss",)).findings
