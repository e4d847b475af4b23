"""Gradients added up by graphs where batches reach different parameters, captures fail, or something changes in between."""

import copy

import pytest
import torch
from test_compile_step import CLIP, GRAPH, adam, choosing, sgd
from torch import nn

import whet
from whet import step as step_module
from whet import step_plans


class Held:
    """A graph's ways on a CPU: gradients are the tensors that p.grad was when it was captured; a replay sets nothing else."""

    fails = False

    def __init__(self, run, warm_up: int = 3, beside=None):
        self.run, self.work = run, run.__self__
        for _ in range(warm_up):
            run()
        if Held.fails:
            raise RuntimeError("out of memory")
        self.params = list(self.work.model.parameters())
        self.facts = [(p.grad, p.requires_grad) for p in self.params]
        run()
        self.after, self.lr = [p.grad for p in self.params], [g["lr"] for g in self.work.optimizer.param_groups]

    def __call__(self):
        groups = self.work.optimizer.param_groups
        host, rates = [(p.grad, p.requires_grad) for p in self.params], [g["lr"] for g in groups]
        self.put(self.facts, self.lr)
        out = self.run()
        for p, grad in zip(self.params, self.after):
            if grad is not None and p.grad is not grad:
                grad.copy_(p.grad)
        self.put(host, rates)
        return out

    def put(self, facts: list, rates: list) -> None:
        for group, lr in zip(self.work.optimizer.param_groups, rates):
            group["lr"] = lr
        for p, (grad, trained) in zip(self.params, facts):
            p.requires_grad_(trained)
            p.grad = grad


class TwoHeads(nn.Module):
    """A trunk, and a head for each task: which one a backward reaches is said by what the batch holds."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x=None, z=None):
        return self.a(self.trunk(x)).square().mean() if z is None else self.b(self.trunk(z)).square().mean()


def task(key: str, seed: int, rows: int = 3) -> dict:
    return {key: torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(step_plans, "Graph", Held)
    choosing(monkeypatch, GRAPH)
    yield
    Held.fails = False


def captured(monkeypatch) -> None:
    for module in (step_plans, step_module):
        monkeypatch.setattr(module, "outside_because", lambda optimizer: "")


def assert_as_the_plain_loop(windows: list[list[dict]], make, meanwhile=lambda at, models, optimizers: None):
    """meanwhile: called with (window, batch) before each batch, the two models and their optimizers."""
    torch.manual_seed(0)
    model = TwoHeads()
    twin = copy.deepcopy(model)
    optimizers = make(model), make(twin)
    step = whet.compile_step(model, optimizers[0], clip=CLIP)
    for w, parts in enumerate(windows):
        optimizers[1].zero_grad()
        for i, batch in enumerate(parts):
            meanwhile((w, i), (model, twin), optimizers)
            twin(**batch).backward()
            step(batch, update=i == len(parts) - 1)
        nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
        optimizers[1].step()
        for (name, p), q in zip(model.named_parameters(), twin.named_parameters()):
            torch.testing.assert_close(p, q[1], msg=lambda text, at=(w, name): f"window {at[0]}, {at[1]}: {text}")
    return step


A, B = (lambda seed, rows=3: task("x", seed, rows)), (lambda seed: task("z", seed))
APART = [[A(1), A(2)], [A(3), A(4)], [B(1), B(2)], [B(3), B(4)], [A(5), A(6)], [B(5), B(6)]]
MIXED = [[A(1), B(2)], [A(3), B(4)], [A(1), B(2)], [B(3), A(4)]]


@pytest.mark.parametrize("windows", [APART, MIXED], ids=["apart", "in one update"])
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("inside", [True, False], ids=["captured", "outside"])
def test_batches_that_reach_different_parameters(windows, make, inside, held, monkeypatch):
    if inside:
        captured(monkeypatch)
    step = assert_as_the_plain_loop(windows, make)
    assert any(s.adding is not None for s in step.served.values())
    assert "reaches other parameters" in str(step.report)


def test_a_capture_that_fails_in_the_middle_of_an_update_leaves_its_gradients(held, monkeypatch):
    captured(monkeypatch)

    def meanwhile(at, models, optimizers):
        Held.fails = at == (1, 1)

    assert_as_the_plain_loop([[A(1), A(2)], [A(3), A(4, 5)], [A(5), A(6)]], adam, meanwhile)


def freeze(models, optimizers):
    for model in models:
        model.trunk.weight.requires_grad_(False)
        model.trunk.weight.grad = None


def reload(models, optimizers):
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 1e-3


@pytest.mark.parametrize("change", [freeze, reload])
def test_no_graph_outlives_what_it_has_fixed(change, held, monkeypatch):
    captured(monkeypatch)

    def meanwhile(at, models, optimizers):
        if at == (2, 0):
            change(models, optimizers)

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    step = assert_as_the_plain_loop([[A(1)], [A(2)], [A(3), A(4)], [A(5)]], make, meanwhile)
    assert "changed after the capture" in str(step.report)
