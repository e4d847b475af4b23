"""Choices are written where the user's tracker is, and a Trainer's run is optimised without another draw of its data."""

import random
import sys
import types

import pytest
import torch
from torch import nn

import whet
from whet.callback import first_batch
from whet.swap import _optimize
from whet.trackers import log_choices

transformers = pytest.importorskip("transformers")


class Writer:
    """A TensorBoard SummaryWriter, as far as it is used."""

    def __init__(self):
        self.texts, self.scalars = {}, {}

    def add_text(self, tag, text):
        self.texts[tag] = text

    def add_scalar(self, tag, value):
        self.scalars[tag] = value


def wandb_with(run) -> types.ModuleType:
    module = types.ModuleType("wandb")
    module.run = run
    return module


def test_choices_go_to_the_writer_that_was_given(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb_with(types.SimpleNamespace(summary={})))
    writer = Writer()
    assert log_choices("compile_step", "torch.compile", {"speedup": 1.5}, writer) == "log_to"
    assert writer.texts == {"whet/compile_step": "torch.compile"} and writer.scalars == {"whet/compile_step/speedup": 1.5}
    assert not capsys.readouterr().out and not sys.modules["wandb"].run.summary


def test_choices_go_to_the_active_wandb_run_else_to_stdout(capsys, monkeypatch):
    run = types.SimpleNamespace(summary={})
    monkeypatch.setitem(sys.modules, "wandb", wandb_with(run))
    assert log_choices("optimize", "5 norms", {"speedup": 1.5}) == "wandb"
    assert run.summary == {"whet/optimize": "5 norms", "whet/optimize/speedup": 1.5} and not capsys.readouterr().out
    for absent in (wandb_with(None), None):
        monkeypatch.setitem(sys.modules, "wandb", absent)
        assert log_choices("optimize", "5 norms") == "stdout" and capsys.readouterr().out == "whet optimize: 5 norms\n"


def test_a_tracker_that_fails_costs_its_entry_and_the_line_is_printed(capsys):
    assert log_choices("optimize", "5 norms", None, object()) == "stdout"
    assert capsys.readouterr().out.startswith("whet optimize: 5 norms (not logged: AttributeError")


class Rows:
    """A data set whose rows and collation draw random numbers."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return {"x": torch.full((4,), float(i)) + torch.rand(()) + random.random()}


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": self.inner(x).square().mean()}


def collate(rows):
    return {"x": torch.stack([r["x"] for r in rows])}


ARGS = types.SimpleNamespace(train_batch_size=2)


def begun(callback, model, loader):
    callback.on_train_begin(ARGS, None, None, model=model, train_dataloader=loader)


def test_the_callback_optimises_on_the_first_batch_logs_and_restores_and_draws_nothing(monkeypatch):
    seen, model, writer = {}, Tiny(), Writer()

    def optimize(model, batch, **options):
        seen.update(batch=batch, options=options)
        model.__dict__["whet"] = _optimize.Optimized(model, _optimize.Replaced(model), before_ms=2.0, after_ms=1.0)

    monkeypatch.setattr(_optimize, "optimize", optimize)
    callback = whet.TrainerCallback(restore=True, log_to=writer, seconds=0.1)
    assert isinstance(callback, transformers.TrainerCallback)
    states = random.getstate(), torch.get_rng_state()
    begun(callback, model, torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True, collate_fn=collate))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert seen["batch"]["x"].shape == (2, 4) and seen["options"] == {"mode": "train", "seconds": 0.1}
    assert "training step: 2.000 ms before, 1.000 ms after, 2.00x" in writer.texts["whet/optimize"]
    assert writer.scalars == {"whet/optimize/before_ms": 2.0, "whet/optimize/after_ms": 1.0}
    callback.on_train_end(ARGS, None, None, model=model)
    assert not hasattr(model, "whet")


def test_the_callback_runs_optimize_itself_and_a_failure_leaves_the_model_to_train(capsys):
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, collate_fn=collate)
    model = Tiny()
    begun(whet.TrainerCallback(seconds=0.001), model, loader)
    assert "nothing was replaced" in capsys.readouterr().out and model.whet.note == "nothing was replaced"
    begun(whet.TrainerCallback(mode="fast"), Tiny(), loader)
    assert "the model is left as it is: ValueError: optimize: mode must be one of" in capsys.readouterr().out


def test_a_loader_without_rows_is_iterated_once_and_closed():
    class Stream:
        ended = 0

        def __iter__(self):
            yield {"x": torch.ones(2, 4)}
            raise AssertionError("only the first batch is wanted")

        def end(self):
            self.ended += 1

    loader = Stream()
    assert first_batch(loader, 2)["x"].shape == (2, 4) and loader.ended == 1


def test_without_transformers_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setattr("whet.callback.Base", object)
    with pytest.raises(ImportError, match="TrainerCallback needs transformers: pip install transformers"):
        whet.TrainerCallback()
