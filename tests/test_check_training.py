"""Checks of how a model is trained and fed: gradients cleared, parameters owned, tensors made where they are used."""

import pytest
import torch
from torch import nn

from whet.diagnose import script
from whet.diagnose.checks import uncleared_gradients, unowned_parameters, uploads
from whet.diagnose.doctor import open_target
from whet.diagnose.modules import Modules
from whet.diagnose.run import Run
from whet.diagnose.target import target_of
from whet.diagnose.watch import OpWatch

HEAD = "import torch\nmodel = torch.nn.Linear(8, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.01)\nx = torch.ones(4, 8)\n"
LOOP = HEAD + "for i in range(6):\n"
BACK = "    model(x).square().mean().backward()\n"
ACCUMULATED = "    if i % 2:\n        opt.step()\n        opt.zero_grad()\n"
TWO = HEAD + (
    "other = torch.nn.Linear(1, 1)\nopt2 = torch.optim.SGD(other.parameters(), lr=0.01)\n"
    "for i in range(4):\n    opt.zero_grad()\n    other(model(x)).mean().backward()\n    opt.step()\n"
    "    opt2.zero_grad()\n    other(model(x).detach()).square().mean().backward()\n    opt2.step()\n"
)
BY_HAND = "    g = torch.autograd.grad(model(x).mean(), list(model.parameters()))\n" + (
    "    for p, d in zip(model.parameters(), g):\n        p.grad = d\n    opt.step()\n"
)


def uncleared(tmp_path, body):
    (tmp_path / "train.py").write_text(body)
    return list(uncleared_gradients.find(Run(open_target(str(tmp_path / "train.py")), seconds=0.01)))


def test_gradients_that_are_never_cleared_are_wrong_and_reported_with_the_line_of_the_step(tmp_path):
    (finding,) = uncleared(tmp_path, f"{LOOP}{BACK}    opt.step()\n")
    assert finding.wrong and finding.line == "train.py:7" and "SGD at train.py:7" in finding.cause
    assert "5 steps" in finding.evidence[0]


@pytest.mark.parametrize("body", [
    f"{LOOP}    opt.zero_grad()\n{BACK}    opt.step()\n", f"{LOOP}    opt.zero_grad(set_to_none=False)\n{BACK}    opt.step()\n",
    f"{LOOP}{BACK}    opt.step()\n    model.zero_grad()\n", f"{LOOP}{BACK}{ACCUMULATED}", TWO,
    f"{LOOP}{BACK}    opt.step()\n    for p in model.parameters():\n        p.grad = None\n",
    f"{HEAD}{BACK.strip()}\nopt.step()\n",
    f"{HEAD}model(x).mean().backward()\nopt.zero_grad()\nfor i in range(3):\n{BY_HAND}",
], ids=["before", "to-zeros", "after", "accumulated", "two-optimizers", "by-hand", "one-step", "autograd.grad"])
def test_gradients_that_are_cleared_in_any_way_are_left_alone(tmp_path, body):
    assert not uncleared(tmp_path, body)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def unowned(pick, prepare=lambda model: None):
    model = Net()
    prepare(model)
    target = target_of("net", (model, torch.randn(4, 8), torch.optim.SGD(pick(model), lr=0.1)))
    return list(unowned_parameters.find(Run(target, seconds=0.01)))


def test_parameters_that_no_optimizer_has_are_named_once_a_kind():
    (finding,) = unowned(lambda m: m.head.parameters())
    assert "layers.*.weight, layers.*.bias" in finding.cause and "head" not in finding.cause and not finding.wrong
    assert "4 of 6 parameters, 84%" in finding.evidence[0]


@pytest.mark.parametrize("pick, prepare", [
    pytest.param(lambda m: m.parameters(), lambda m: None, id="all-owned"),
    pytest.param(lambda m: m.head.parameters(), lambda m: m.layers.requires_grad_(False), id="frozen"),
    pytest.param(lambda m: [nn.Parameter(p.detach().clone()) for p in m.parameters()], lambda m: None, id="copies-of-its-own"),
])
def test_parameters_left_out_by_design_are_left_alone(pick, prepare):
    assert not unowned(pick, prepare)


def test_parameters_of_a_scripts_second_optimizer_are_owned(tmp_path):
    text = (
        "import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))\n"
        "opts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]\n"
        "for _ in range(2):\n    model.zero_grad()\n    model(torch.ones(2, 4)).mean().backward()\n"
        "    [o.step() for o in opts]\n"
    )
    (tmp_path / "train.py").write_text(text)
    assert not list(unowned_parameters.find(Run(open_target(str(tmp_path / "train.py")), seconds=0.01)))


def uploaded(on_cpu: bool) -> list:
    """The events of a forward on the meta device, which stands for a GPU here: copies to it are seen, nothing is computed."""
    model = uploads.UploadsExample(on_cpu).to("meta")
    with torch.no_grad(), (modules := Modules(model))(), OpWatch(modules, {}) as seen:
        model(torch.empty(2, 16, 64, device="meta"))
    return uploads.uploads(seen.events, "meta")


def test_a_mask_built_on_the_cpu_and_copied_in_every_layer_is_named():
    (found,) = uploaded(on_cpu=True)
    finding = uploads.finding(found, cost=None)
    assert all(part in finding.cause for part in ("mask", "bool[16, 16]", "layers.* at ", "4 times"))
    assert any("built at" in line for line in finding.evidence)
    assert len(found.events) == 4 and found.bytes == 4 * 16 * 16


def test_a_mask_built_on_the_device_is_no_copy():
    assert not uploaded(on_cpu=False)


def test_nothing_is_read_on_the_host_while_a_cuda_graph_is_captured(tmp_path, monkeypatch):
    def read(grad):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(script, "capturing", lambda: True)
    monkeypatch.setattr(script, "state_of", read)
    assert not uncleared(tmp_path, f"{LOOP}{BACK}    opt.step()\n")
