"""The doctor and the profile on models under torch.compile(fullgraph=True): timed and profiled compiled, watched op by op."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from whet import ops
from whet.commands import app
from whet.diagnose import summary
from whet.diagnose.doctor import diagnose
from whet.diagnose.profile import profiled
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import watch


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.up(x)) * 2.0


class Two(nn.Module):
    def __init__(self, then=None):
        super().__init__()
        self.first, self.second, self.then = Layer(), Layer(), then or torch.relu

    def forward(self, x):
        return self.then(self.second(self.first(x))).square().mean()


def whole() -> nn.Module:
    return torch.compile(Two(), fullgraph=True)  # type: ignore[return-value]


def one_module() -> nn.Module:
    model = Two()
    model.first.compile(fullgraph=True)
    return model


def one_function() -> nn.Module:
    return Two(torch.compile(lambda x: (x * 2).sigmoid(), fullgraph=True))


def op_of_whets() -> nn.Module:
    return Two(lambda x: ops.rms_norm(x, torch.ones(8), impl="compile"))


COMPILED = {  # how -> (module and op of one that is compiled, of one that is not, the module that its graph runs in)
    whole: (("_orig_mod.first", "aten::tanh"), None, ""),
    one_module: (("first", "aten::tanh"), ("second", "aten::tanh"), "first"),
    one_function: (("", "aten::sigmoid"), ("first", "aten::tanh"), ""),
    op_of_whets: (("", "aten::rsqrt"), ("first", "aten::tanh"), ""),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def target(model: nn.Module) -> Target:
    torch.manual_seed(0)
    return target_of("two", (model, torch.randn(4, 8)))


@pytest.mark.parametrize("made", COMPILED, ids=lambda f: f.__name__)
def test_a_step_with_a_whole_compiled_graph_is_watched_and_profiled(made):
    inside, outside, where = COMPILED[made]
    given = target(made())
    found = diagnose(given, seconds=0.01)
    assert not found.failed, found.failed
    assert not [f.cause for f in found.findings if f.wrong]
    flags = {(e.module, e.op): e.compiled for e in found.run.watched.events if e.phase == "forward"}
    assert flags[inside] and (outside is None or not flags[outside])
    graphs = [k for k in found.run.profile.kernels if k.name == "torch.compile graph"]
    assert {k.module for k in graphs} == {where} and {k.phase for k in graphs} == {"forward", "backward"}
    assert any("torch.compile regions" in note for note in found.as_dict()["notes"])


def test_a_compiled_forwards_backward_is_known_as_compiled():
    events = watch(target(one_function())).events
    flags = {e.op: e.compiled for e in events if e.phase == "backward"}
    assert flags["aten::sigmoid_backward"] and not flags["aten::tanh_backward"]


def test_what_is_profiled_is_the_compiled_graph_and_its_ops_have_no_time_of_their_own():
    profile = profiled(target(whole()), seconds=0.01)
    assert "aten::tanh" not in {k.name for k in profile.kernels}


def test_a_step_without_torch_compile_has_no_compiled_op_and_no_note():
    found = diagnose(target(Two()), seconds=0.01, only=("initial_loss",))
    assert not any(e.compiled for e in found.run.watched.events) and not summary.notes(found.run)


@pytest.mark.parametrize("command", ["doctor", "profile"])
def test_commands_take_a_model_under_fullgraph(command, tmp_path):
    made = "torch.compile(torch.nn.Linear(4, 4), fullgraph=True), torch.ones(2, 4)"
    body = f"import torch\ndef f():\n    return {made}\n"
    (tmp_path / "t.py").write_text(body)
    given = [command, f"{tmp_path}/t.py:f", "--seconds", "0.01", "--records", str(tmp_path)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0 and "no compiled frames" not in done.output, done.output
