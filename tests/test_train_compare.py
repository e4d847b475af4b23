"""Run folders read back, held against one another, and shown: figures by hand on small runs, refusals, pages that are whole."""

import html
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from test_cli import error_lines, example, invoke
from test_page import Page

from whet.report.compare_tables import headline, measures_table
from whet.report.run_pages import compare_page, run_page
from whet.train.compare import common_point, compare, group, interpolate, reached
from whet.train.runs import read_run, write_page
from whet.train.welch import t_quantile, t_tails, welch

NASTY = "mlp<script>&\"'"
VALS = ((10, 4.0), (20, 3.0), (30, 2.5))
DEFAULTS = {"seed": 1, "lr": 0.1, "step_s": 1.0, "gpu": "H200", "data": "f" * 64, "sequences": 8, "steps": 30, "per": 100}


def step_line(step: int, per: int, step_s: float, **more) -> dict:
    made = {"kind": "step", "step": step, "tokens": step * per, "loss": 5.0 - step / 30, "lr": 0.1, "grad_norm": 1.0}
    made |= {"ms": 1e3 * step_s, "tok_s": per / step_s, "mfu": None, "memory_mib": 100 + step, "time_s": step * step_s}
    return made | more


def facts(o: dict, **more) -> dict:
    recipe = {
        "name": "tiny", "model": {"name": "gpt2", "changes": {}}, "train": {"seed": o["seed"], "lr": o["lr"], "seq_len": 16},
        "run": {"val_batches": 2}, "data": {"val": 0.01},
    }
    machine = {"name": o["gpu"], "device": "cuda", "torch": "2.11"}
    return {
        "format": 1, "recipe": recipe, "machine": machine, "commit": "abc", "seed": o["seed"], "world": 1, "parameters": 1234,
        "data": {"fingerprint": o["data"], "tokens": 10**6, "source": "text"}, "choices": {"rope B=2 float32": "triton"},
    } | more


def write_run(folder: Path, vals=VALS, tail: str = "", **options) -> str:
    """A run folder: a step is logged each step, evaluations as given."""
    o = DEFAULTS | options
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts(o)))
    lines = [step_line(s, o["per"], o["step_s"]) for s in range(1, o["steps"] + 1)]
    for step, loss in vals:
        val = {"kind": "val", "step": step, "tokens": step * o["per"], "loss": loss, "time_s": step * o["step_s"]}
        lines.append(val | {"sequences": o["sequences"]})
    lines.sort(key=lambda line: line["step"])
    lines.append({"kind": "event", "step": 20, "what": "checkpoint", "text": "checkpoint step-00000020"})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return str(folder)


def measure(found: dict, key: str) -> dict:
    return next(m for m in found["measures"] if m["key"] == key)


def means(found: dict, key: str) -> list:
    return [arm["mean"] for arm in measure(found, key)["arms"]]


@pytest.fixture
def pair(tmp_path):
    """a: 100 tokens and 1 s a step; b: 50 tokens and 2 s a step, evaluated up to step 25."""
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", ((5, 5.0), (15, 3.0), (25, 2.0)), lr=0.2, step_s=2.0, per=50, steps=25)
    return compare(group([a, b]))


def test_losses_are_taken_at_the_largest_point_that_both_have(pair):
    steps, tokens, time = (measure(pair, f"loss at equal {axis}") for axis in ("steps", "tokens", "training time"))
    assert (steps["at"], tokens["at"], time["at"]) == (25, 1250, 30)
    assert means(pair, "loss at equal steps") == [2.75, 2.0]  # a: half way from 3.0 to 2.5
    assert means(pair, "loss at equal tokens") == [3.75, 2.0]  # a: a quarter from 4.0 at 1,000 to 3.0 at 2,000
    assert means(pair, "loss at equal training time") == [2.5, 3.0]  # b: at its step 15
    assert "interpolated linearly" in pair["notes"][0]


def test_the_default_target_is_the_worst_final_loss_and_when_it_is_reached(pair):
    assert pair["target"] == {"loss": 2.5, "of": "a"}
    assert means(pair, "time to target") == [30.0, 40.0] and means(pair, "tokens to target") == [3000.0, 1000.0]
    (against,) = measure(pair, "tokens to target")["versus"]
    assert against["difference"] == -2000 and against["ratio"] == 1 / 3 and against["winner"] is None
    assert "only one seed of a and b" in against["why"]
    assert "1.33 times the training time of a; whether this is significant cannot be known" in headline(pair)


def test_a_target_that_is_never_reached_is_said_to_be(tmp_path):
    arms = group([write_run(tmp_path / "a"), write_run(tmp_path / "b", ((10, 4.5), (30, 3.5)), lr=0.2)])
    found = compare(arms, target=3.0)
    assert means(found, "time to target") == [20.0, None]
    rows = [row for row in measures_table(found).rows if row[0].startswith("time to")]
    assert [row[2] for row in rows] == ["20 s", "never"] and "no figure for every seed of b" in rows[1][-1]


def test_interpolation_and_reaching_by_hand():
    curve = [(0.0, 4.0), (10.0, 2.0), (20.0, 3.0), (30.0, 1.0)]
    assert [interpolate(curve, x) for x in (0, 5, 10, 25, 30)] == [4.0, 3.0, 2.0, 2.0, 1.0]
    assert interpolate(curve, -1) is None and interpolate(curve, 31) is None and interpolate([], 1) is None
    assert [reached(curve, loss) for loss in (4.0, 3.0, 2.0, 1.5, 0.5)] == [0.0, 5.0, 10.0, 27.5, None]
    assert common_point([[(1, 1), (5, 1)], [(2, 1), (9, 1)]]) == 5
    assert common_point([[(1, 1), (2, 1)], [(3, 1)]]) is None and common_point([[], [(3, 1)]]) is None


def test_speeds_leave_out_the_first_steps_and_those_after_a_resume(tmp_path):
    folder = Path(write_run(tmp_path / "a", steps=40))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines.append({"kind": "event", "step": 20, "what": "resume", "text": "resumed from step-00000020"})
    lines += [step_line(s, 100, 9.0 if s <= 30 else 1.0) for s in range(21, 41)]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(folder)
    assert [line.step for line in run.steps] == list(range(1, 41)), "the steps that were taken back are gone"
    assert [line.step for line in run.warm()] == [*range(11, 21), *range(31, 41)]
    assert run.median("ms") == 1000.0 and run.median("mfu") is None and run.memory_mib == 140


def test_a_log_that_goes_back_without_saying_so_counts_from_there(tmp_path):
    again = [step_line(15, 100, 1.0, loss=9.0), {"kind": "val", "step": 20, "tokens": 2000, "loss": 7.0, "time_s": 20.0}]
    run = read_run(write_run(tmp_path / "a", tail="".join(json.dumps(line) + "\n" for line in again)))
    assert [line.step for line in run.steps] == list(range(1, 16)) and run.steps[-1].loss == 9.0
    assert [(v.step, v.loss) for v in run.vals] == [(10, 4.0), (20, 7.0)]


def test_a_run_that_resumed_and_has_not_logged_since_ends_at_its_checkpoint(tmp_path):
    event = {"kind": "event", "step": 15, "what": "resume", "text": "resumed from step-00000015"}
    run = read_run(write_run(tmp_path / "a", tail=json.dumps(event) + "\n"))
    assert run.steps[-1].step == 15 and [v.step for v in run.vals] == [10]


@pytest.mark.parametrize("tail", ['{"kind": "val", "st', '{"kind": "step", "step": 31', "\x00\x00", '{"kind": "step"}'])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    run = read_run(write_run(tmp_path / "a", tail=tail))
    assert len(run.steps) == 30 and len(run.vals) == 3 and run.damaged == 0
    torn = tmp_path / "a" / "log.jsonl"
    torn.write_bytes(torn.read_bytes() + "é".encode()[:1])
    assert len(read_run(tmp_path / "a").steps) == 30


def test_damaged_lines_inside_the_log_are_counted_and_said(tmp_path):
    a = write_run(tmp_path / "a", tail='{"torn\n' + json.dumps(step_line(31, 100, 1.0)) + "\n")
    assert read_run(a).damaged == 1 and read_run(a).steps[-1].step == 31
    assert any("cannot be read, left out: 1" in line for line in compare(group([a]))["notes"])


def test_losses_that_are_not_finite_are_a_divergence_and_no_figure(tmp_path):
    tail = json.dumps(step_line(31, 100, 1.0, loss="nan")) + "\n"
    b = write_run(tmp_path / "b", lr=0.2, tail=tail)
    found = compare(group([write_run(tmp_path / "a"), b]))
    assert found["withheld"]["loss"] == ["b diverged: its loss is not finite at step 31"]
    assert not measure(found, "loss at equal steps")["versus"] and measure(found, "tokens/s")["versus"]
    assert "NaN" not in json.dumps(found)


@pytest.mark.parametrize("what, reason", [
    ("missing", "there is no folder"), ("empty", "is no run folder, it has no run.json"), ("parent", "there are 1 in it"),
    ("damaged", "is damaged"), ("other", "has no recipe"), ("newer", "has format 2"),
])
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, what, reason):
    folder = tmp_path / "x"
    if what != "missing":
        folder.mkdir()
    if what == "parent":
        write_run(folder / "a")
    contents = {"damaged": "{", "other": "[]", "newer": json.dumps(facts(DEFAULTS, format=2))}
    if what in contents:
        (folder / "run.json").write_text(contents[what])
    with pytest.raises(ValueError, match=reason):
        read_run(folder)
    result = invoke("compare", str(folder))
    assert result.exit_code == 2 and len(error_lines(result)) == 1 and reason in error_lines(result)[0]


def test_runs_that_differ_only_in_the_seed_are_one_arm(tmp_path):
    folders = [write_run(tmp_path / f"base-seed{s}", seed=s) for s in (1, 2)]
    folders += [write_run(tmp_path / f"high-{s}", seed=s, lr=0.2) for s in (1, 2, 3)]
    arms = group(folders)
    assert [(a.name, [r.seed for r in a.runs]) for a in arms] == [("base", [1, 2]), ("high", [1, 2, 3])]
    assert compare(arms)["differences"] == {"train.lr": [[0.1], [0.2]]}
    named = group([], [f"all={','.join(folders)}"])
    assert [(a.name, len(a.runs)) for a in named] == [("all", 5)]
    assert any("differ in more than the seed: train.lr" in line for line in compare(named)["notes"])


def test_only_what_differs_is_listed(tmp_path):
    found = compare(group([write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.2, gpu="A100")]))
    assert list(found["differences"]) == ["train.lr"] and found["other_differences"] == {"machine": [["H200"], ["A100"]]}


@pytest.mark.parametrize("change, losses, times, reason", [
    ({}, True, True, ""),
    ({"data": "e" * 64}, False, True, "different data"),
    ({"sequences": 4}, False, True, "validated differently"),
    ({"gpu": "A100"}, True, False, "different GPUs"),
])
def test_what_would_mean_nothing_is_withheld_and_shown_all_the_same(tmp_path, change, losses, times, reason):
    folders = [write_run(tmp_path / f"a{s}", seed=s) for s in (1, 2)]
    vals = [tuple((step, loss - 1 + s / 100) for step, loss in VALS) for s in (1, 2)]
    folders += [write_run(tmp_path / f"b{s}", vals[s - 1], seed=s, lr=0.2, **change) for s in (1, 2)]
    found = compare(group(folders))
    compared = {m["key"] for m in found["measures"] if m["versus"]}
    both = {"loss at equal training time", "time to target"}
    wanted = {"loss at equal steps", "loss at equal tokens", "tokens to target"} if losses else set()
    assert compared == wanted | (both if losses and times else set()) | ({"tokens/s"} if times else set())
    assert all(sample["mean"] for m in found["measures"] for sample in m["arms"]), "the figures are still there"
    assert ("No winner is called" in headline(found)) == bool(reason) and reason in headline(found)
    winners = {v["winner"] for m in found["measures"] if m["unit"] == "loss" for v in m["versus"]}
    assert winners == ({"b"} if losses else set())


def seeded(tmp_path, a, b) -> dict:
    """The comparison of arms whose runs end at these losses."""
    folders = [
        write_run(tmp_path / f"{name}-{s}", ((10, 4.0), (30, loss)), seed=s, lr=lr)
        for name, lr, losses in (("a", 0.1, a), ("b", 0.2, b)) for s, loss in enumerate(losses)
    ]
    return compare(group(folders))


def test_seeds_give_mean_spread_interval_and_significance(tmp_path):
    found = seeded(tmp_path, (3.00, 3.02, 3.04), (2.90, 2.92, 2.94))
    m = measure(found, "loss at equal steps")
    assert m["arms"][0]["sd"] == pytest.approx(0.02) and m["arms"][1]["mean"] == pytest.approx(2.92)
    (v,) = m["versus"]
    margin = 2.776445 * 0.02 * math.sqrt(2 / 3)  # t of 95% with 4 degrees of freedom, from a printed table
    assert v["difference"] == pytest.approx(-0.1) and v["df"] == pytest.approx(4)
    assert (v["low"], v["high"]) == pytest.approx((-0.1 - margin, -0.1 + margin))
    assert v["significant"] and v["winner"] == "b"
    near = measure(seeded(tmp_path / "near", (3.00, 3.02, 3.04), (2.99, 3.01, 3.05)), "loss at equal steps")["versus"][0]
    assert near["significant"] is False and near["winner"] is None and near["low"] < 0 < near["high"]


@pytest.mark.parametrize("a, b, why", [
    ((3.0,), (2.9, 2.8), "only one seed of a"), ((3.0, 3.0), (2.9, 2.9), "no spread over seeds"),
])
def test_significance_is_unknown_without_seeds_or_spread(tmp_path, a, b, why):
    (v,) = measure(seeded(tmp_path, a, b), "loss at equal steps")["versus"]
    assert v["significant"] is None and v["winner"] is None and why in v["why"] and v["difference"] < 0


def test_more_tokens_a_second_are_better_and_less_time_is(tmp_path):
    folders = [write_run(tmp_path / f"a{s}", seed=s, step_s=1.0 + s / 100) for s in (1, 2)]
    folders += [write_run(tmp_path / f"b{s}", seed=s, lr=0.2, step_s=0.5 + s / 100) for s in (1, 2)]
    found = compare(group(folders))
    assert [measure(found, key)["versus"][0]["winner"] for key in ("tokens/s", "time to target")] == ["b", "b"]
    marked = [row[:2] for row, mark in zip(measures_table(found).rows, measures_table(found).marked) if mark]
    assert ("tokens/s", "b") in marked and ("tokens/s", "a") not in marked


def test_one_seed_twice_is_no_spread_over_seeds(tmp_path):
    folders = [write_run(tmp_path / f"a{i}") for i in (1, 2)] + [write_run(tmp_path / f"b{i}", seed=i, lr=0.2) for i in (1, 2)]
    (v,) = measure(compare(group(folders)), "tokens/s")["versus"]
    assert v["significant"] is None and "a seed occurs twice in a" in v["why"]


def test_welch_gives_the_published_figures():
    """The first two examples of Wikipedia's page on Welch's t-test: t, degrees of freedom, p."""
    a1 = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    a2 = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    b1 = [17.2, 20.9, 22.6, 18.1, 21.7, 21.4, 23.5, 24.2, 14.7, 21.8]
    b2 = [21.5, 22.8, 21.0, 23.0, 21.6, 23.6, 22.5, 20.7, 23.4, 21.8]
    b2 += [20.7, 21.7, 21.5, 22.5, 23.6, 21.5, 22.5, 23.5, 21.5, 21.8]
    for first, second, published in ((a1, a2, (-2.46, 25.0, 0.021)), (b1, b2, (-1.57, 9.9, 0.149))):
        found = welch(second, first)
        assert found and (round(found.t, 2), round(found.df, 1), round(found.p, 3)) == published
    assert welch([1.0], [2.0, 3.0]) is None


@pytest.mark.parametrize("df", [1.0, 2.0, 4.3, 25.0, 400.0])
def test_t_tails_agree_with_the_density_integrated_by_simpsons_rule(df):
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for t in (0.1, 1.0, 2.5, 6.0):
        n = 2000
        ys = [scale * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
        inside = 2 * (t / n / 3) * (ys[0] + ys[-1] + 4 * sum(ys[1:-1:2]) + 2 * sum(ys[2:-1:2]))
        assert 1 - t_tails(t, df) == pytest.approx(inside)


def test_t_quantiles_are_those_of_printed_tables():
    assert [round(t_quantile(0.95, df), 3) for df in (1, 2, 10, 30, 120)] == [12.706, 4.303, 2.228, 2.042, 1.98]
    assert t_tails(t_quantile(0.95, 7.7), 7.7) == pytest.approx(0.05)
    assert t_tails(0.0, 3) == 1.0 and t_tails(1.0, 1) == pytest.approx(0.5)


def test_the_example_compares_and_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = example("compare")
    assert words == shlex.split("compare runs/base runs/muon --html compare.html")
    write_run(Path("runs/base"))
    write_run(Path("runs/muon"), lr=0.2)
    result = invoke(*words)
    assert result.exit_code == 0, result.stderr
    for text in ("train.lr", "val loss at 30 steps", "cannot be known", "only one seed of base and muon", "page: compare.html"):
        assert text in re.sub(r"[\s│]+", " ", result.stdout)
    assert Page(Path("compare.html").read_text()).sections == ["measures", "arms", "differences", "curves", "notes"]
    printed = json.loads(invoke("compare", "--json", "--target", "3", "runs/base", "runs/muon").stdout)
    assert printed == compare(group(["runs/base", "runs/muon"]), 3.0)


@pytest.mark.parametrize("words, reason", [
    ("", "there are no runs"), ("--arm nope a", "--arm takes name=RUN,RUN"), ("a a", "is given twice"),
    ("--arm x=a --arm x=b", "two arms are named 'x'"), ("a --html missing/x.html", "cannot be written"), ("idle a", "no step"),
])
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"))
    write_run(Path("b"), lr=0.2)
    write_run(Path("idle"), (), steps=0, lr=0.3)
    result = invoke("compare", *shlex.split(words))
    assert result.exit_code == 2 and len(error_lines(result)) == 1 and reason in error_lines(result)[0]


def test_one_arm_is_shown_and_said_to_be_alone(tmp_path):
    result = invoke("compare", write_run(tmp_path / "a"))
    assert result.exit_code == 0 and "no other arm to compare it with" in result.stdout and "against a" not in result.stdout


RUN_ALL = ["loss", "speed", "lr", "choices", "plan", "events", "recipe"]


def full_run(tmp_path) -> dict:
    run = read_run(write_run(tmp_path / "full", steps=500)).as_dict()
    run["events"].append({"step": 1, "what": "plan", "text": f"plan: CUDA graph {NASTY}"})
    return run | {"name": NASTY}


def test_the_page_of_a_run_is_written_beside_it(tmp_path):
    path = write_page(write_run(tmp_path / "a"))
    found = Page(path.read_text())
    assert path == tmp_path / "a" / "page.html" and found.sections == [s for s in RUN_ALL if s != "plan"]
    assert "2.5000" in found.text and "rope B=2 float32" in found.text and "checkpoint step-00000020" in found.text


def test_a_run_page_is_whole_safe_and_loads_nothing(tmp_path):
    run = full_run(tmp_path)
    for text in (run_page(run), run_page(run | {"choices": {"table": {"rope": "triton"}, "mode": "graph", "all": [NASTY]}})):
        found = Page(text)
        assert found.sections == RUN_ALL and [a["href"] for a in found.all("a")] == [f"#{name}" for name in RUN_ALL]
        assert "<script" not in text and html.escape("mlp<script>") in text
        assert not re.search(r"https?://|@import|url\(|\ssrc=|javascript:", text)
        ids = [a["id"] for _, a in found.tags if "id" in a]
        assert len(ids) == len(set(ids)) and len(found.all("figure")) == len(found.all("figcaption")) == 3
        levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1 and levels.count(1) == 1 and max(levels) == 2
        assert [a["class"] for a in found.all("svg") if "role" in a] == ["wide", "narrow"] * 3


@pytest.mark.parametrize("key", ["steps", "vals", "events", "choices", "recipe", "machine", "data", "medians", "parameters"])
@pytest.mark.parametrize("gone", ["missing", "None", "odd"])
def test_a_run_page_leaves_out_what_is_not_there(tmp_path, key, gone):
    run = full_run(tmp_path)
    value = run.pop(key)
    if gone != "missing":
        run[key] = None if gone == "None" else type(value)()
    lost = {"steps": ["speed", "lr"], "events": ["plan", "events"], "choices": ["choices"], "recipe": ["recipe"]}
    assert Page(run_page(run)).sections == [s for s in RUN_ALL if s not in lost.get(key, [])]


def test_an_empty_run_is_a_page():
    assert Page(run_page({})).sections == [] and Page(run_page({"choices": "none"})).sections == ["choices"]


def test_a_comparison_page_has_a_colour_for_each_arm_and_is_safe(tmp_path):
    arms = group([], [f"{NASTY}{i}={write_run(tmp_path / str(i), lr=i)}" for i in range(7)])
    text = compare_page(compare(arms), [[r.as_dict() for r in a.runs] for a in arms], f"whet compare {NASTY}")
    found = Page(text)
    assert found.sections == ["measures", "arms", "differences", "curves", "notes"] and "<script" not in text
    looks = {a["class"].removeprefix("curve ").removesuffix(" faint") for a in found.all("path")}
    assert looks == {"arm0", "arm1", "arm2", "arm3", "arm4", "arm0 dashed", "arm1 dashed"}
    assert "by chance" in found.text and found.text.count("cannot be known") > 6


def test_a_run_that_was_not_evaluated_yet_was_not_validated_differently(tmp_path):
    found = compare(group([write_run(tmp_path / "a"), write_run(tmp_path / "b", vals=(), lr=0.2)]))
    assert found["withheld"]["loss"] == ["b has no evaluation"]


@pytest.mark.parametrize("target", ["nan", "inf"])
def test_a_target_that_is_no_loss_is_refused(tmp_path, target):
    result = invoke("compare", write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.2), "--target", target)
    assert result.exit_code == 2 and "--target must be a finite loss" in result.stderr
