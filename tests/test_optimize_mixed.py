"""The way between a host's and a graph's: a graph's candidate stays only where it saves enough of the GPU's time."""

import pytest
import torch
from test_optimize_ways import EAGER, GRAPH, fake, kinds  # noqa: F401

from whet.choices import Choices
from whet.judge import Verdict
from whet.lock import Lock
from whet.swap import Site
from whet.swap._groups import SiteGroup
from whet.swap._ways import MIXED, WORTH, Way, balance, mixed
from whet.tune import Tuned

PROVED = Verdict(True, 0.1, 1.0)


def entry(op: str, mode: str, chosen: str, count: int = 1, **candidates) -> tuple[str, dict]:
    """candidates   {name: its ms as a graph, or the host's microseconds}."""
    fact = "ms" if mode == GRAPH else "host_us"
    made = {name: {"ok": True, fact: value} for name, value in candidates.items()}
    return f"{op} N=64 @ {mode}", {"call": {"op": op}, "mode": mode, "chosen": chosen, "count": count, "candidates": made}


def op_entries(op: str, saved: float, cost: float, count: int = 1) -> dict:
    """What torch is launched with, and what a graph takes of triton: so many ms less on the GPU, so many more of the host."""
    return dict([
        entry(op, EAGER, "torch", count, torch=100.0, triton=100.0 + 1e3 * cost),
        entry(op, GRAPH, "triton", count, torch=1.0, triton=1.0 - saved),
    ])


def site(path: str, kind: str, covers: tuple = ()) -> Site:
    return Site(path, torch.nn.Identity(), lambda m, ops: [], kind, kind=kind, covers=covers)


def group(kind: str, impl: str, replaced: bool = True, covers: tuple = (), op: str = "") -> SiteGroup:
    return SiteGroup(kind, kind, [(site(f"{kind}.0", kind, covers), PROVED)], replaced=replaced, impls={op or kind: impl})


def way(mode: str, groups: list[SiteGroup], **table) -> Way:
    return Way(mode, Choices({f"{op} N=64": impl for op, impl in table.items()}), groups)


def two(replaced: bool = False, covers: tuple = ()) -> dict[str, Way]:
    """The host's way, which leaves both kinds or replaces them by torch, and the graph's, of Triton's kernels."""
    host = [group(op, "torch", replaced, covers) for op in ("gelu", "attention")]
    graph = [group(op, "triton", True, covers) for op in ("gelu", "attention")]
    return {EAGER: way(EAGER, host, gelu="torch", attention="torch"),
            GRAPH: way(GRAPH, graph, gelu="triton", attention="triton")}


def test_the_balance_is_over_all_calls_that_differ_and_whose_times_are_known():
    entries = op_entries("gelu", 0.05, 0.1, count=12) | op_entries("swiglu", 0.2, 0.1)
    assert balance(entries) == {"gelu": pytest.approx((0.6, 1.2)), "swiglu": pytest.approx((0.2, 0.1))}
    same = dict([entry("rope", EAGER, "torch", torch=9.0), entry("rope", GRAPH, "torch", torch=1.0)])
    untimed = dict([entry("rope", EAGER, "torch", torch=9.0), entry("rope", GRAPH, "triton", triton=1.0)])
    alone = dict(list(op_entries("rope", 1, 1).items())[:1])
    assert balance(same) == balance(untimed) == balance(alone) == balance({}) == {}


@pytest.mark.parametrize(("attention", "gelu", "expected"), [
    (0.01, 0.5, {"gelu": "triton"}),  # attention saves too little: it is left as the host's way has it
    (WORTH * 1.01, 0.5, None),  # all is worth it: that is the graph's way
    (0.01, 0.01, None),  # nothing is: that is the host's
])
def test_what_saves_too_little_of_the_gpu_for_its_launches_is_as_the_host_has_it(attention, gelu, expected):
    ways = two()
    found = mixed(ways, op_entries("attention", attention, 1.0) | op_entries("gelu", gelu, 1.0))
    if expected is None:
        assert found is None
        return
    assert found.mode == MIXED and {k: v for g in found.groups if g.replaced for k, v in g.impls.items()} == expected
    assert found.choices.table == {"attention N=64": "torch", "gelu N=64": "triton"}
    assert [g.kind for g in found.groups] == ["gelu", "attention"] and found.groups[0] is ways[GRAPH].groups[0]


def test_a_group_that_covers_others_is_exchanged_only_for_one_that_is_replaced_as_well():
    entries = op_entries("attention", 0.01, 1.0) | op_entries("gelu", 0.5, 1.0)
    assert mixed(two(False, (("rope", "x"),)), entries) is None
    found = mixed(two(True, (("rope", "x"),)), entries)
    assert [g.impls for g in found.groups] == [{"gelu": "triton"}, {"attention": "torch"}]


def test_a_group_that_also_asks_for_an_op_worth_its_launches_keeps_both():
    ways = two()
    ways[GRAPH].groups[1].impls["gelu"] = ways[EAGER].groups[1].impls["gelu"] = "triton"
    assert mixed(ways, op_entries("attention", 0.01, 1.0) | op_entries("gelu", 0.5, 1.0)) is None


def test_an_op_that_no_group_asks_for_makes_no_third_way():
    assert mixed(two(), op_entries("rope", 0.01, 1.0)) is None and mixed(two(), {}) is None


def test_without_a_gpu_there_is_no_way_between():
    assert mixed({EAGER: two()[EAGER]}, op_entries("gelu", 0.5, 1.0)) is None


def test_the_way_between_races_with_the_others_and_the_lock_keeps_it(fake, monkeypatch, tmp_path):  # noqa: F811
    entries = op_entries("rms_norm", 0.5, 1.0) | op_entries("swiglu", 0.01, 1.0)
    monkeypatch.setattr("whet.swap._optimize.tune", lambda *args, **options: Tuned(fake.choices, entries))
    fake.left, fake.ms = {EAGER: ("gated_mlp", "norms")}, {EAGER: [5.0], GRAPH: [4.0], MIXED: [3.0]}
    lock = Lock(tmp_path / "whet.lock")
    report = fake.run(lock).whet
    assert report.way == MIXED and report.after_ms == 3.0 and kinds(report.replaced.sites) == dict(norms=4)
    assert not [key for key in lock.swaps if MIXED in key]
    again = fake.run(Lock.read(lock.path)).whet
    assert again.way == MIXED and not fake.timed and kinds(again.replaced.sites) == dict(norms=4)
    with again.in_mode(GRAPH):
        assert kinds(again.ways[GRAPH].sites) == dict(gated_mlp=4, norms=4)
