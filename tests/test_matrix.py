"""Matrix: every way of a training step is verified and timed against one baseline, and what does not run says why."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from whet import machine, matrix, subjects
from whet.commands import app, bench_transformer_np
from whet.matrix import STAGES, Matrix, MatrixCell, StepWay, points
from whet.measure import Race
from whet.models.transformer_np import RECIPES, SIZES, TransformerNPConfig
from whet.race import race_outcome, timing
from whet.report.matrix_tables import cells_table, stages_table
from whet.subjects import subject_of

SMALL = TransformerNPConfig(width=32, layers=2, heads=2, ffn=21, components=3)
TARGET = "transformer-np:test"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small size, and races of one round in which the baseline takes twice as long."""
    monkeypatch.setitem(SIZES, "test", SMALL)
    monkeypatch.setitem(RECIPES, "test", replace(RECIPES["tiny"], batch=2, context=5, seq_len=12))

    def together(runs, keep, **_):
        for run in runs.values():
            run()
        times = {name: [2.0 if name.startswith("baseline") else 1.0] * 12 for name in runs}
        return Race({n: timing(t) for n, t in times.items()}, race_outcome(times, keep), "", times)

    monkeypatch.setattr(matrix, "race", together)
    monkeypatch.setattr(matrix, "compare", lambda runs, **_: {n: timing([run() is None or 2.0] * 3) for n, run in runs.items()})


@functools.cache
def found() -> dict[tuple, MatrixCell]:
    """All cells but those of torch.compile, which the plans' tests have."""
    made = Matrix(TARGET, "float32")
    made.ways = [way for way in made.ways if not way.compiled]
    return {(c.way, c.checkpointed, c.graph): c for c in made.cells()}


def test_stock_and_custom_ways_are_verified_and_timed_against_the_baseline(device):
    for name in ("SDPA flash", "custom separate", "custom fused"):
        for checkpointed in (False, True):
            cell = found()[name, checkpointed, False]
            assert cell.ok, cell
            assert 0 <= cell.share <= 1 and cell.tokens_per_s == pytest.approx(2 * 12 / cell.ms * 1e3, rel=1e-3)
    assert found()["SDPA flash", False, False].speedup == 1.0 and found()["custom fused", False, False].speedup == 2.0


def test_a_cell_that_cannot_run_says_why(device):
    if device == "cuda":
        pytest.skip("a GPU runs CUDA graphs and cuDNN")
    assert found()["SDPA flash", False, True].why == "a CUDA graph needs a GPU"
    assert "backend" in found()["SDPA cuDNN", False, False].why
    assert all(c.why or c.ok for c in found().values()) and len(found()) == 20


@pytest.mark.gpu
def test_every_way_but_fp8_runs_as_a_cuda_graph_with_the_same_proof(device):
    for name in ("SDPA flash", "SDPA cuDNN", "custom separate", "custom fused"):
        for checkpointed in (False, True):
            made = Matrix(TARGET, "bfloat16")
            list(zip(range(1), made.cells()))
            cell = made.cell(next(way for way in made.ways if way.name == name), checkpointed, True)
            assert cell.ok and cell.peak_mb > 0, cell


def test_stages_add_up_over_the_parts_of_the_model():
    stages = found()["SDPA flash", False, False].stages
    assert set(stages) == {*STAGES, "optimizer", "idle"}
    assert all(stages[name] > 0 for name in ("attention", "MLP", "heads", "norms", "loss", "optimizer")), stages


def test_a_way_that_is_wrong_is_not_timed():
    made = Matrix(TARGET, "float32")
    list(zip(range(1), made.cells()))
    wrong = StepWay("wrong", made.subject.model.tuned)
    choices = wrong.choices()
    choices.gmm_log_prob = lambda z, y, right=choices.gmm_log_prob: 1.01 * right(z, y)
    object.__setattr__(wrong, "choices", lambda: choices)
    cell = made.cell(wrong, False, False)
    assert not cell.ok and cell.why.startswith("wrong: ") and cell.ms is None


def test_out_of_memory_is_a_cells_reason(monkeypatch):
    made = Matrix(TARGET, "float32")

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(made, "_prove", full)
    assert made.cell(made.ways[0], False, False).why.startswith("out of memory at ")


def test_a_shape_with_too_many_scores_for_float64_is_proved_with_fewer_layers(monkeypatch):
    large = subject_of("transformer-np:large")
    small = large.proof()
    assert small.recipe == large.recipe and small.sizes == replace(large.sizes, layers=1) and small.part == "1 of 12 layers"
    assert points(large) == "B1 (200,000, 5,000)" and subject_of(TARGET).proof().recipe == RECIPES["test"]
    monkeypatch.setitem(subjects.ORACLE_SCORES, machine.this_machine().device, 2 * 2 * 12 * 5)  # of one layer
    made = Matrix(TARGET, "float32", only=["custom separate", "SDPA flash"], cells=["plain"])
    cells = list(made.cells())
    assert [(c.way, c.ok, c.proved) for c in cells] == [(w, True, "1 of 2 layers") for w in ("SDPA flash", "custom separate")]


def test_ways_and_cells_that_are_not_known_are_named():
    with pytest.raises(ValueError, match="there is no way 'fast'; there are SDPA flash, SDPA cuDNN, torch.compile"):
        Matrix(TARGET, only=["fast"])
    with pytest.raises(ValueError, match="there is no cell 'graphs'; there are plain, graph, checkpointed"):
        Matrix(TARGET, cells=["graphs"])


def test_tables_have_a_row_for_each_cell_and_for_each_way_that_ran():
    cells = [c.to_record() for c in found().values()]
    shape = {"target": TARGET, "points": "B2 (5, 7)", "precision": "float32", "cells": cells}
    text = cells_table(shape).to_markdown()
    assert text.count("\n| ") >= len(found()) and "a CUDA graph needs a GPU" in text
    assert "custom fused" in stages_table(shape).to_markdown() and stages_table(shape | {"cells": []}) is None


def test_where_there_is_no_terminal_a_line_says_first_what_is_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_transformer_np, "run", interrupted)
    words = ["bench", "transformer-np", "--shapes", "tiny,small", "--cells", "plain", "--records", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    first, stopped = result.stderr.splitlines()
    assert re.match(r"whet: each of \d+ cells of tiny and small is verified in float64, then timed", first)
    assert result.exit_code == 130 and stopped == "whet: stopped; 0 cells are in the record"


def interrupted(*_):
    raise KeyboardInterrupt
