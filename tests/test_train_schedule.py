"""Learning-rate schedules: where they begin, turn and end, and what they refuse."""

import math

import pytest
import torch

from whet.train.schedule import KINDS, Schedule, factor_at, lr_at, set_lr


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_by_equal_parts_and_ends_at_lr(kind):
    s = Schedule(kind, lr=1.0, warmup=3, steps=20)
    assert [lr_at(s, i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind, end", [("cosine", 0.25), ("linear", 0.25), ("wsd", 0.25), ("constant", 1.0)])
def test_rate_reaches_its_end_at_steps_and_stays(kind, end):
    s = Schedule(kind, lr=2.0, warmup=5, steps=50, final=0.25)
    assert lr_at(s, 50) == lr_at(s, 51) == lr_at(s, 5000) == 2.0 * end


@pytest.mark.parametrize("kind", KINDS)
def test_rate_never_rises_after_the_warm_up(kind):
    s = Schedule(kind, lr=3e-4, warmup=7, steps=60)
    rates = [lr_at(s, i) for i in range(7, 70)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 3e-4


def test_cosine_is_half_way_down_at_half_of_the_steps():
    s = Schedule("cosine", lr=1.0, steps=100, final=0.0)
    assert math.isclose(lr_at(s, 50), 0.5) and lr_at(s, 25) > 0.75 and lr_at(s, 75) < 0.25


def test_linear_is_linear():
    s = Schedule("linear", lr=1.0, steps=8, final=0.5)
    assert [lr_at(s, i) for i in range(9)] == [1 - i / 16 for i in range(9)]


def test_wsd_is_stable_until_its_decay():
    s = Schedule("wsd", lr=1.0, warmup=4, steps=40, final=0.0, decay=0.2)
    assert s.decay_steps == 8
    assert all(lr_at(s, i) == 1.0 for i in range(4, 33))
    assert [lr_at(s, 32 + i) for i in range(9)] == [1 - i / 8 for i in range(9)]


def test_each_group_is_scaled_from_its_own_base_lr():
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    rate = torch.tensor(0.0)
    groups = [{"params": params[:1], "base_lr": 0.5}, {"params": params[1:2], "base_lr": 0.25}, {"params": params[2:]}]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    optimizer.param_groups[1]["lr"] = rate
    s = Schedule("linear", lr=1.0, steps=4, final=0.0)
    assert set_lr(optimizer, s, 2) == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is rate and rate.item() == 0.125
    assert optimizer.param_groups[2]["lr"] == 0.5


@pytest.mark.parametrize("fields, words", [
    (dict(kind="step"), "kind must be one of cosine, wsd, linear, constant, got 'step'"),
    (dict(lr=0.0), "lr must be a number above 0, got 0.0"),
    (dict(lr=math.nan), "lr must be a number above 0, got nan"),
    (dict(lr="1e-3"), "lr must be a number above 0, got '1e-3'"),
    (dict(steps=0), "steps must be a whole number of at least 1, got 0"),
    (dict(steps=10.0), "steps must be a whole number of at least 1, got 10.0"),
    (dict(steps=True), "steps must be a whole number of at least 1, got True"),
    (dict(warmup=-1), "warmup must be a whole number from 0 to below steps=1000, got -1"),
    (dict(warmup=1000), "warmup must be a whole number from 0 to below steps=1000, got 1000"),
    (dict(final=1.5), "final must be a fraction of lr from 0 to 1, got 1.5"),
    (dict(decay=0.0), "decay must be a fraction of steps above 0 and up to 1, got 0.0"),
    (dict(kind="wsd", warmup=900), "warmup=900 and a decay over 200 steps do not fit into steps=1000; lower warmup or decay"),
])
def test_refusal_names_the_field_what_it_must_be_and_what_it_was(fields, words):
    with pytest.raises(ValueError) as e:
        Schedule(**fields)
    assert str(e.value) == f"schedule: {words}"


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_a_step_that_is_none_is_refused(step):
    with pytest.raises(ValueError, match="^schedule: step must be a whole number of at least 0"):
        factor_at(Schedule(), step)
