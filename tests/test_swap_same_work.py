"""A group whose calls are served by what its modules call themselves is left without a race, and the lock keeps that."""

import pytest
import torch
from swapping import OwnRMSNorm
from torch import nn

from whet.choices import Choices
from whet.lock import Lock
from whet.swap import _groups
from whet.swap._groups import _time_group, grouped, same_work
from whet.swap._optimize import optimize
from whet.swap._replace import as_call, met_in, recognise
from whet.workload import Workload


class Mixed(nn.Module):
    """Norms that are PyTorch's own, and one that is written out."""

    def __init__(self):
        super().__init__()
        self.norms, self.last = nn.ModuleList(nn.LayerNorm(96) for _ in range(3)), OwnRMSNorm(96)
        self.up, self.act = nn.Linear(96, 96), nn.GELU()

    def forward(self, x):
        for norm in self.norms:
            x = norm(x) * 2
        return self.last(self.act(self.up(x))).square().mean()


@pytest.fixture
def raced(monkeypatch):
    """Words of what was raced."""
    seen, real = [], _groups.race
    monkeypatch.setattr(_groups, "race", lambda runs, **options: seen.append(list(runs)) or real(runs, **options))
    return seen


def timed(ops: Choices) -> dict[str, _groups.SiteGroup]:
    model, call = Mixed(), as_call(torch.randn(1100, 96))
    found = recognise(model, call, Choices(), only=("norms", "activations", "biased_linear"))
    work, met = Workload(model, call.args, {}, "train"), met_in(model, call)
    groups = grouped(found.sites)
    for group in groups:
        _time_group(group, work, met, ops, 0.001)
    return {group.words: group for group in groups}


def test_what_a_module_calls_itself_is_not_raced_against_itself(raced):
    found = timed(Choices())
    same = {words for words, group in found.items() if group.same}
    assert same == {"LayerNorm of 96, eps 1e-05", "GELU", "linear of 96 to 96 with a bias"} and len(found) == 4
    assert len(raced) == 1 and found["RMSNorm of 96, eps 1e-06"].before_ms
    for words in same:
        group = found[words]
        assert not group.replaced and group.before_ms is None and group.why == "it already makes the chosen PyTorch calls"
        assert set(group.impls.values()) == {"torch"}


def test_another_candidate_is_raced(raced):
    found = timed(Choices({}, default="eager"))
    assert not found["LayerNorm of 96, eps 1e-05"].same and found["LayerNorm of 96, eps 1e-05"].before_ms
    assert found["linear of 96 to 96 with a bias"].same, "its reference is the same call"


def test_the_same_operators_on_other_sizes_are_other_work():
    x = torch.randn(8, 6)
    assert same_work(lambda: (x + 1) * 2, lambda: (x + 1) * 2) and not same_work(lambda: x + 1, lambda: x[1:] + 1)
    assert not same_work(lambda: x + 1, lambda: x.t() + 1) and not same_work(lambda: x + 1, lambda: (x + 1) * 2)

    def fails():
        raise RuntimeError("it cannot be looked at")

    assert not same_work(fails, fails)


def test_the_lock_keeps_that_there_was_nothing_to_time(raced, tmp_path):
    lock, model, x = tmp_path / "whet.lock", Mixed(), torch.randn(1100, 96)
    report = optimize(model, x, lock=Lock.read(lock), seconds=0.001).whet
    left = {g.words for g in report.groups if g.same}
    assert "GELU" in left and not any(g.replaced for g in report.groups if g.same)
    assert "it already makes" in str(report)
    raced.clear()
    again = optimize(model, x, lock=str(lock), seconds=0.001).whet
    assert not raced and {g.words for g in again.groups if g.decided} >= left, again.lock_lines
