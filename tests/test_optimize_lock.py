"""A second optimize() of the same model: the lock's decisions, one proof of each group, and what makes an entry not count."""

import pytest
import torch
from lock_entries import HERE
from swapping import GPT, OwnMLP, OwnRMSNorm
from torch import nn

from whet.choices import Choices
from whet.judge import Verdict
from whet.lock import Lock
from whet.lock_faults import FAULTS
from whet.swap import _kept, _optimize, _proof, _replace
from whet.swap._optimize import optimize, restore
from whet.swap._replace import as_calls
from whet.tune import Tuned, save_swaps


class Layer(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.norm, self.mlp = OwnRMSNorm(dim), OwnMLP(dim, 80)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Stack(layers)


def data(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def counted(monkeypatch):
    """What is proved, by path, and how many races are run. Replacements count as faster."""
    seen = {"proved": [], "raced": 0}

    def proving(module):
        real = module.prove

        def prove(site, call, ops):
            seen["proved"].append(site.path)
            return real(site, call, ops)

        monkeypatch.setattr(module, "prove", prove)

    def timed(group, *rest):
        seen["raced"] += 1
        group.before_ms, group.after_ms, group.why = 2.0, 1.0, "the fastest"
        group.use(group.sites[0][0].form, {"swiglu": "eager"} if "SwiGLU" in group.words else {"rms_norm": "torch"})

    def whole(report, ways, work, call, seconds):
        seen["raced"] += 1
        slower = ["eager"] if seen.get("slower") == len(call.args[0]) else []
        return {"batch": _replace.size_of(call), "before_ms": 5.0, "ms": {"eager": 4.0}, "slower_in": slower}

    for module in (_proof, _kept, _optimize):
        proving(module)
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    monkeypatch.setattr(Choices, "pick", lambda self, op, call: {"swiglu": "eager"}.get(op.name, "torch"))
    monkeypatch.setattr(_optimize, "_time_group", timed)
    monkeypatch.setattr(_optimize, "_race_whole", whole)
    return seen


def again(counted, lock, model=None, **options):
    counted["proved"], counted["raced"] = [], 0
    return optimize(model or stack(), options.pop("batch", data()), lock=lock, seconds=0.001, **options).whet


def test_the_second_time_one_of_each_group_is_proved_and_nothing_is_timed(counted, tmp_path):
    path = tmp_path / "whet.lock"
    first = again(counted, Lock.read(path))
    assert len(counted["proved"]) == 13 and counted["raced"] == 3 and not first.lock_lines
    second = again(counted, Lock.read(path))
    assert counted["raced"] == 0 and counted["proved"] == ["layers.0.mlp", "layers.0.norm", ""]
    assert (second.before_ms, second.after_ms) == (5.0, 4.0) and len(second.replaced.sites) == 8
    assert "nothing was timed" in second.lock_lines[0] and "2 proofs" in second.lock_lines[0]
    assert all(g.decided for g in second.groups) and "groups are the lock's, of 2" in " ".join(str(second).split())


@pytest.mark.parametrize("change", ["rows", "train", "layer", "precision"])
def test_what_a_decision_rests_on_is_part_of_its_key(counted, tmp_path, change):
    lock = Lock.read(tmp_path / "whet.lock")
    again(counted, lock)
    model, options = stack(), {}
    if change == "rows":
        options["batch"] = data(7)
    if change == "train":
        options["mode"] = "infer"
    if change == "layer":  # the class of its modules, with another number in it
        for layer in model.layers:
            layer.norm.eps = 1e-3
            layer.mlp.other = 1.5
    if change == "precision":
        torch.set_float32_matmul_precision("high")
    try:
        again(counted, lock, model, **options)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert counted["raced"] == 3 and len(counted["proved"]) == 13


def test_one_module_unlike_the_others_is_proved_by_itself(counted, tmp_path):
    def made():
        model = stack()
        model.layers[2].mlp.other = 1.5
        return model

    lock = Lock.read(tmp_path / "whet.lock")
    again(counted, lock, made())
    again(counted, lock, made())
    assert counted["raced"] == 0 and sorted(counted["proved"]) == ["", "layers.0.mlp", "layers.0.norm", "layers.2.mlp"]


def test_an_entry_that_does_not_hold_on_this_model_is_ignored_with_the_reason(counted, tmp_path, monkeypatch):
    lock, model = Lock.read(tmp_path / "whet.lock"), stack()
    again(counted, lock)
    real = _kept.prove
    monkeypatch.setattr(_kept, "prove", lambda site, *rest: Verdict(False, why="planted") if "norm" in site.path
                        else real(site, *rest))
    report = again(counted, lock, model)
    assert counted["proved"].count("layers.3.norm") == 1 and "layers.3.mlp" not in counted["proved"]
    assert counted["raced"] == 2 and any("ignored: of layers.0.norm it does not hold: planted" in x for x in report.lock_lines)


@pytest.mark.parametrize("how", ["source", "served", "together"])
def test_a_stale_entry_is_ignored_and_all_is_decided_anew(counted, tmp_path, monkeypatch, how):
    lock = Lock.read(tmp_path / "whet.lock")
    again(counted, lock)
    norm = next(k for k in lock.swaps if k.startswith("norms"))
    if how == "source":
        lock.swaps[norm]["sources"]["rms_norm"] = "0123"
        why = "rms_norm/torch was edited since"
    if how == "served":
        monkeypatch.setattr(Choices, "pick", lambda self, op, call: "eager")
        why = "it was timed with rms_norm/torch, which is not what serves it now"
    if how == "together":
        real, once = _optimize.prove, []
        monkeypatch.setattr(_optimize, "prove", lambda *a: real(*a) if once else once.append(1) or Verdict(False, why="x"))
        why = "together they are wrong: x"
    report = again(counted, lock)
    assert any(why in line for line in report.lock_lines) and len(report.replaced.sites) == 8
    assert counted["proved"].count("layers.3.norm") == 1 and counted["raced"] >= 2


def test_a_group_of_which_a_module_fails_is_never_kept(counted, tmp_path, monkeypatch):
    lock, real = Lock.read(tmp_path / "whet.lock"), _proof.prove
    monkeypatch.setattr(_proof, "prove", lambda site, *rest: Verdict(False, why="planted")
                        if site.path == "layers.1.norm" else real(site, *rest))
    for _ in range(2):
        report = again(counted, lock)
        assert "layers.3.norm" in counted["proved"] and len(report.replaced.sites) == 7


@pytest.mark.parametrize(("change", "why"), [
    ({"date": None}, "its date is of type NoneType"), ({"before_ms": -1.0}, "its times are"), ({"impls": {"a": 1}}, "no names"),
])
def test_a_damaged_entry_is_dropped_alone(counted, tmp_path, change, why):
    path = tmp_path / "whet.lock"
    lock = Lock.read(path)
    again(counted, lock)
    key = next(iter(lock.swaps))
    entry = lock.swaps[key]
    assert not FAULTS["swaps"](key, entry) and why in FAULTS["swaps"](key, entry | change)
    assert FAULTS["swaps"](key, {k: v for k, v in entry.items() if k != "why"}) == "it is incomplete"
    save_swaps(lock, {key: entry | change})
    assert key not in Lock.read(path).swaps and len(Lock.read(path).swaps) == len(lock.swaps) - 1
    assert HERE in lock.data["machines"]


def test_a_left_group_stays_left_by_the_lock_and_is_not_proved(counted, tmp_path, monkeypatch):
    def slower(group, *rest):
        group.before_ms, group.after_ms, group.why, group.replaced = 1.0, 2.0, "planted", "SwiGLU" in group.words
        group.use(group.sites[0][0].form, {})

    monkeypatch.setattr(_optimize, "_time_group", slower)
    lock = Lock.read(tmp_path / "whet.lock")
    again(counted, lock)
    report = again(counted, lock)
    assert counted["proved"] == ["layers.0.mlp", ""] and len(report.replaced.sites) == 4
    assert sum("planted" in x.why for x in report.replaced.left) == 4


def test_a_list_of_dicts_or_of_tuples_is_several_batches_and_the_largest_comes_first():
    a, b = torch.ones(2, 4), torch.ones(3, 4)
    assert [len(c.args) for c in as_calls([a, b])] == [2] and [len(c.args) for c in as_calls(((a,), (b,)))] == [2]
    assert [c.kwargs["x"].shape[0] for c in as_calls([{"x": a}, {"x": b}])] == [3, 2]
    assert [c.args[0].shape[0] for c in as_calls([(a,), (b,)])] == [3, 2]


def test_several_batches_are_each_timed_and_one_that_is_slower_keeps_the_model_as_it_was(counted, tmp_path):
    lock, batches = Lock.read(tmp_path / "whet.lock"), [(data(2),), (data(6),), (data(4),)]
    report = again(counted, lock, batch=batches)
    assert [b["batch"] for b in report.batches] == ["6 x 32", "4 x 32", "2 x 32"] and counted["raced"] == 5
    assert "at 4 x 32: 5" in str(report) and again(counted, lock, batch=batches).replaced.sites and counted["raced"] == 0
    counted["slower"] = 4
    model = stack()
    report = again(counted, Lock(), model, batch=batches)
    assert report.note == "nothing was replaced: all together it is not faster at 4 x 32" and not report.replaced.sites
    restore(model)


def test_calls_of_every_batch_are_tuned(monkeypatch):
    asked = []
    made = Tuned({"eager": Choices()}, {})
    monkeypatch.setattr(_optimize, "tune", lambda calls, *rest, **options: asked.extend(calls) or made)
    model, ids, few = GPT(), torch.randint(0, 96, (4, 24)), torch.randint(0, 96, (2, 8))
    optimize(model, [dict(idx=few, targets=few), dict(idx=ids, targets=ids)], lock=Lock(), seconds=0.001)
    rows = {call.case["M"] for call, _ in asked if call.op == "layer_norm"}
    assert rows == {96, 16}
