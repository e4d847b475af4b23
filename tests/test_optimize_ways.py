"""optimize() in two ways, launched by the host and as CUDA graphs: which is used, what each replaces, what the lock keeps."""

import dataclasses

import pytest
import torch
from swapping import OwnMLP, OwnRMSNorm, batch, built, state
from test_optimize_lock import data, stack
from torch import nn

from whet.choices import Choices
from whet.judge import Verdict
from whet.lock import Lock
from whet.measure import Race
from whet.race import race_outcome, timing
from whet.step_plans import as_graph, before_optimize
from whet.swap import _kept, _optimize, _proof, _replace
from whet.swap._groups import BEFORE
from whet.swap._optimize import best_of, optimize, restore, slower_in
from whet.swap._preview import preview
from whet.tune import Tuned

EAGER, GRAPH = "eager", "graph"


@dataclasses.dataclass
class Faked:
    """What is timed is made up: which kinds each way replaces, and each way's times of the whole."""

    left: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # {mode: kinds that are slower there}
    ms: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {EAGER: [4.0], GRAPH: [3.0]})  # by batch, before 5
    wrong: tuple[str, ...] = ()  # modes in which all together is wrong
    proved: list[str] = dataclasses.field(default_factory=list)
    timed: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (kind or "whole", mode)
    choices: dict[str, Choices] = dataclasses.field(default_factory=lambda: {EAGER: Choices(), GRAPH: Choices()})

    def time_group(self, group, work, met, ops, seconds, mode):
        assert ops is self.choices[mode]
        self.timed.append((group.kind, mode))
        group.replaced = group.kind not in self.left.get(mode, ())
        group.before_ms, group.after_ms, group.why = 2.0, 1.0 if group.replaced else 3.0, f"timed {mode}"
        group.use(group.sites[0][0].form, {"swiglu": "eager"} if "SwiGLU" in group.words else {})

    def race_whole(self, report, ways, work, call, seconds):
        self.timed.append(("whole", ""))
        nth = [kind for kind, _ in self.timed].count("whole") - 1
        ms = {way.mode: self.ms[way.mode][nth % len(self.ms[way.mode])] for way in ways}
        slower = [mode for mode, t in ms.items() if t > 5.0]
        return {"batch": _replace.size_of(call), "before_ms": 5.0, "ms": ms, "slower_in": slower}

    def run(self, lock=None, model=None, given=None, **options):
        self.proved, self.timed = [], []
        return optimize(stack() if model is None else model, data() if given is None else given, lock=lock or Lock(),
                        seconds=0.001, **options)


@pytest.fixture
def fake(monkeypatch):
    made = Faked()

    def proving(module):
        real = module.prove

        def prove(site, call, ops):
            made.proved.append(site.path)
            mode = next((m for m, c in made.choices.items() if c is ops), "")
            return Verdict(False, why="planted") if not site.path and mode in made.wrong else real(site, call, ops)

        monkeypatch.setattr(module, "prove", prove)

    for module in (_proof, _kept, _optimize):
        proving(module)
    monkeypatch.setattr(_optimize, "modes_here", lambda: (EAGER, GRAPH))
    monkeypatch.setattr("whet.swap._preview.modes_here", lambda: (EAGER, GRAPH))
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned(made.choices, {}))
    monkeypatch.setattr(Choices, "pick", lambda self, op, call: "eager")
    monkeypatch.setattr(_optimize, "_time_group", made.time_group)
    monkeypatch.setattr(_optimize, "_race_whole", made.race_whole)
    return made


def kinds(sites) -> dict[str, int]:
    found = [s.kind for s, _ in sites]
    return {kind: found.count(kind) for kind in dict.fromkeys(found)}


@pytest.mark.parametrize(("ms", "mode"), [([4.0, 3.0], GRAPH), ([3.0, 4.0], EAGER)])
def test_the_faster_way_is_used(fake, ms, mode):
    fake.ms = {EAGER: ms[:1], GRAPH: ms[1:]}
    report = fake.run().whet
    assert report.way == mode and report.choices is fake.choices[mode] and report.groups is report.ways[mode].groups
    assert (report.before_ms, report.after_ms) == (5.0, 3.0) and report.to_record()["way"] == mode
    assert kinds(report.replaced.sites) == dict(gated_mlp=4, norms=4) and len(report.kept) == 2


def test_a_way_that_is_slower_at_one_batch_is_not_used_however_fast_at_others(fake):
    batches = [(data(6),), (data(4),)]
    fake.ms = {EAGER: [4.9, 4.9], GRAPH: [1.0, 5.5]}
    report = fake.run(given=batches).whet
    assert report.way == EAGER and [b["after_ms"] for b in report.batches] == [4.9, 4.9] and not report.note
    assert not any(b["slower"] for b in report.batches)
    fake.ms = {EAGER: [5.6, 4.9], GRAPH: [1.0, 5.5]}
    model = stack()
    before = state(model)
    report = fake.run(model=model, given=batches).whet
    assert not report.replaced.sites and not report.kept and "not faster at 4 x 32" in report.note
    assert "CUDA graph of the step, by whet.compile_step, may have 8 modules replaced" in report.note
    with report.in_mode(GRAPH):
        assert len([p for p, m in model.named_modules() if "forward" in m.__dict__]) == 8, "what the host is too slow for"
    assert state(model) == before | {"": state(model)[""]}
    assert state(restore(model)) == before


@pytest.mark.parametrize("mode", [EAGER, GRAPH])
def test_a_graph_has_its_own_also_where_the_host_is_too_slow_for_either_way(fake, mode):
    fake.ms = {EAGER: [5.5 + (mode == GRAPH)], GRAPH: [6.0]}
    model = stack()
    report = fake.run(model=model).whet
    assert report.way == mode and not report.replaced.sites
    with report.in_mode(GRAPH):
        assert len([p for p, m in model.named_modules() if "forward" in m.__dict__]) == 8
    assert not [p for p, m in model.named_modules() if "forward" in m.__dict__]
    fake.wrong = (EAGER, GRAPH)
    report = fake.run(model=model).whet
    with report.in_mode(GRAPH):
        assert not [p for p, m in model.named_modules() if "forward" in m.__dict__], "together they are wrong"


def raced(**times) -> Race:
    times = {BEFORE if n == "before" else n: [t] * 12 for n, t in times.items()}
    return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, BEFORE), "", times)


@pytest.mark.parametrize(("times", "slower"), [
    (dict(before=5.0, eager=4.0, graph=6.0), [GRAPH]), (dict(before=5.0, eager=6.0, graph=4.0), [EAGER]),
    (dict(before=5.0, eager=4.0, graph=3.0), []), (dict(before=5.0, eager=6.0, graph=7.0), [EAGER, GRAPH]),
    (dict(before=5.0, eager=4.99, graph=7.0), [GRAPH]), (dict(before=5.0, eager=4.99, graph=4.98), []),
])
def test_a_way_is_slower_by_its_own_time_over_the_models_before(times, slower):
    """Also where the race was won by the other way."""
    assert slower_in(raced(**times), [EAGER, GRAPH]) == slower


def test_the_best_way_is_the_one_slower_nowhere_with_the_least_time():
    batches = [dict(batch="a", ms=dict(eager=4.0, graph=1.0), slower_in=[]), dict(batch="b", ms=dict(eager=4.0, graph=6.0),
                                                                                    slower_in=["graph"])]
    assert best_of(batches, [EAGER, GRAPH]) == (EAGER, "") and best_of(batches, [GRAPH]) == (GRAPH, "b")
    assert best_of(batches[:1], [EAGER, GRAPH]) == (GRAPH, "")


@pytest.mark.parametrize(("ms", "mib", "best"), [
    (dict(eager=4.0, graph=4.01), dict(eager=900.0, graph=700.0), GRAPH),
    (dict(eager=4.0, graph=4.1), dict(eager=900.0, graph=700.0), EAGER),
    (dict(eager=4.01, graph=4.0), dict(eager=None, graph=None), GRAPH),
])
def test_of_ways_that_tie_the_one_with_the_least_memory_is_best(ms, mib, best):
    assert best_of([dict(batch="a", ms=ms, mib=mib, slower_in=[])], [EAGER, GRAPH]) == (best, "")


def test_each_way_has_groups_of_its_own_and_a_mode_switches_edits_there_and_back(fake):
    fake.left, fake.ms = {EAGER: ("norms",), GRAPH: ("gated_mlp",)}, {EAGER: [3.0], GRAPH: [4.0]}
    model, x = stack(), data()
    before = state(model)
    expected = model(x)
    report = fake.run(model=model).whet
    assert report.way == EAGER and kinds(report.replaced.sites) == dict(gated_mlp=4) and [g.kind for g in report.kept] == [
        "gated_mlp"]
    assert [x.why for x in report.replaced.left].count(next(x.why for x in report.replaced.left)) == 4
    assert len(report.replaced.left) == len({(x.kind, x.path) for x in report.replaced.left}) == 4
    eager = state(model)
    for _ in range(2):
        with report.in_mode(GRAPH):
            changed = [p for p, m in model.named_modules() if "forward" in m.__dict__]
            assert changed == [f"layers.{i}.norm" for i in range(4)]
            torch.testing.assert_close(model(x), expected)
            assert kinds(report.replaced.sites) == dict(gated_mlp=4), "the report is of what was chosen"
        assert [p for p, m in model.named_modules() if "forward" in m.__dict__] == [f"layers.{i}.mlp" for i in range(4)]
        assert {k: list(v) for k, v in state(model).items()} == {k: list(v) for k, v in eager.items()}
    with pytest.raises(KeyError, match="planted"), as_graph(model):
        raise KeyError("planted")
    with before_optimize(model), as_graph(model, graph=False):
        assert not [p for p, m in model.named_modules() if "forward" in m.__dict__]
    torch.testing.assert_close(model(x), expected)
    restore(model)
    assert state(model) == before and torch.equal(model(x), expected)


@pytest.mark.parametrize("mode", [EAGER, "another"])
def test_a_mode_that_is_in_use_or_unknown_changes_nothing(fake, mode):
    fake.ms = {EAGER: [3.0], GRAPH: [4.0]}
    model = fake.run()
    before = state(model)
    with model.whet.in_mode(mode):
        assert state(model) == before


def test_the_second_time_one_of_each_group_is_proved_and_nothing_is_timed(fake, tmp_path):
    fake.left = {GRAPH: ("norms",)}
    path = tmp_path / "whet.lock"
    first = fake.run(Lock.read(path)).whet
    assert sorted(fake.timed) == sorted([(k, m) for k in ("gated_mlp", "norms") for m in (EAGER, GRAPH)] + [("whole", "")])
    second = fake.run(Lock.read(path)).whet
    assert fake.timed == [] and sorted(fake.proved) == ["", "layers.0.mlp", "layers.0.norm"]
    assert second.way == first.way == GRAPH and second.after_ms == first.after_ms == 3.0
    for mode in (EAGER, GRAPH):
        assert kinds(second.ways[mode].sites) == kinds(first.ways[mode].sites)
    assert "nothing was timed" in second.lock_lines[0]
    shown = preview(stack(), data(), lock=Lock.read(path))
    assert shown.after_ms == 3.0 and [g.decided for g in shown.groups] == [g.decided for g in second.groups]


def test_a_way_that_is_wrong_together_is_dropped_for_the_other_also_by_the_lock(fake, tmp_path):
    fake.wrong, path = (GRAPH,), tmp_path / "whet.lock"
    for nth in range(2):
        model = fake.run(Lock.read(path))
        report = model.whet
        assert report.way == EAGER and report.after_ms == 4.0 and report.ways[GRAPH].wrong == "planted" and not report.note
        assert (fake.timed == []) == bool(nth) and list(report.batches[0]["ms"]) == [EAGER]
        before = state(model)
        with report.in_mode(GRAPH):
            assert state(model) == before
    fake.wrong = (EAGER, GRAPH)
    report = fake.run(Lock.read(path)).whet
    assert "together the replacements are wrong: planted" in report.note and not report.kept and not report.replaced.sites
    assert any("ignored: together they are wrong: planted" in line for line in report.lock_lines)
    assert len(report.replaced.left) == len({(x.kind, x.path) for x in report.replaced.left}) == 8


class Sums(nn.Module):
    """Blocks whose norms of sums residual_norm covers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SumBlock() for _ in range(3))
        self.norm = OwnRMSNorm(32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, :8].square().mean()


class SumBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Linear(32, 32), OwnRMSNorm(32), OwnMLP(32, 80)

    def forward(self, x):
        h = x + self.mix(x)
        return h + self.mlp(self.norm(h))


def sums() -> nn.Module:
    torch.manual_seed(0)
    return Sums()


COVERS = ("residual_norm",)


@pytest.mark.parametrize("left", [{}, {GRAPH: COVERS}, {EAGER: COVERS}, {EAGER: COVERS, GRAPH: COVERS},
                                  {EAGER: (*COVERS, "norms"), GRAPH: COVERS}], ids=["none", GRAPH, EAGER, "both", "all"])
def test_what_is_covered_is_replaced_where_its_cover_is_not_and_decided_once(fake, left, tmp_path):
    fake.left, path = left, tmp_path / "whet.lock"
    model = sums()
    before, expected = state(model), model(data())
    first = fake.run(Lock.read(path), model).whet
    for mode in (EAGER, GRAPH):
        covered = COVERS[0] not in left.get(mode, ())
        wanted = {k: n for k, n in dict(residual_norm=3 * covered, norms=1 if covered else 4, gated_mlp=3).items()
                  if n and k not in left.get(mode, ())}
        assert kinds(first.ways[mode].sites) == wanted, mode
        names = [(g.kind, g.words) for g in first.ways[mode].groups]
        assert len(names) == len(set(names)), "one group of its like"
    assert len(fake.timed) == len(set(fake.timed)), "each group once in each mode"
    torch.testing.assert_close(model(data()), expected)
    with first.in_mode(EAGER):
        torch.testing.assert_close(model(data()), expected)
    assert state(restore(model)) == before
    again = fake.run(Lock.read(path), sums()).whet
    assert fake.timed == [], again.lock_lines
    assert [kinds(again.ways[m].sites) for m in (EAGER, GRAPH)] == [kinds(first.ways[m].sites) for m in (EAGER, GRAPH)]
    parts = [p for p in fake.proved if p]
    assert len(parts) <= 3 and not any("ignored" in line for line in again.lock_lines)


def test_a_family_with_fused_parts_is_not_timed_again(fake, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "whet.lock"
    fake.run(Lock.read(path), built("Qwen3", torch.float32), batch())
    assert fake.timed
    report = fake.run(Lock.read(path), built("Qwen3", torch.float32), batch()).whet
    assert fake.timed == [] and "nothing was timed" in report.lock_lines[0]
    assert len(fake.proved) < 12
