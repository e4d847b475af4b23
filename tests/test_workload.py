"""A workload: one step in named phases, at the precision asked for, with its calls and its evidence."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from whet.choices import Choices
from whet.models import Recipe
from whet.models.tiny_llama import TinyLlama, TinyLlamaConfig, batch
from whet.workload import PHASES, PRECISIONS, NoLoss, Workload, find_loss, in_precision, quick_collections

SMALL, RECIPE = TinyLlamaConfig(hidden=32, layers=2, heads=2, kv_heads=1, vocab=31), Recipe(batch=2, seq_len=8)


@pytest.fixture
def work() -> Workload:
    model = TinyLlama(SMALL, "v3", Choices(default="eager"))
    return Workload(model, (), batch(SMALL, RECIPE, "cpu"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_is_forward_backward_and_optimizer_in_this_order_each_inside_its_phase(work):
    seen, before = [], work.model.norm.detach().clone()

    @contextlib.contextmanager
    def phase(name):
        seen.append(name)
        yield
        seen.append(f"/{name}")

    loss = work.step(phase)
    assert seen == [mark for name in PHASES for mark in (name, f"/{name}")]
    assert loss.dim() == 0 and not loss.requires_grad and not torch.equal(before, work.model.norm)


def test_gradients_of_the_step_before_do_not_add_up(work):
    work.optimizer = None
    first, again = work.evidence(), work.evidence()
    assert set(first) == {"output loss"} | {f"grad {name}" for name, _ in work.model.named_parameters()}
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_calls_are_those_of_one_forward_and_the_model_keeps_its_choices(work):
    ops = work.model.ops
    calls = {call.op: count for call, count in work.calls()}
    assert calls["add_rms_norm"] == 2 * SMALL.layers and calls["rope"] == SMALL.layers and work.model.ops is ops


def test_a_forward_alone_makes_no_gradient(work):
    work.kind = "forward"
    assert work.step() is None and not work.gradients()


def test_a_parameter_that_no_gradient_reaches_is_named(work):
    work.model.unused = nn.Parameter(torch.ones(3))
    work.step()
    assert work.without_gradient() == ["unused"]


def test_training_on_what_has_no_loss_says_so():
    with pytest.raises(NoLoss, match="returned no loss"):
        Workload(nn.Linear(3, 3), (torch.ones(2, 3),)).step()
    made = Workload(nn.Linear(3, 3), (torch.ones(2, 3),), loss_with=lambda out: out.sum())
    assert made.step() is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_runs_in_the_models_place_runs_at_the_precision_asked_for(work, precision):
    seen = []

    def run(**batch):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))
        return work.model(**batch)

    work.run, work.precision = run, precision
    work.step()
    assert seen == [(precision == "bfloat16", "high" if precision == "tf32" else "highest")]
    with in_precision("float32", "cpu"):
        assert not torch.is_autocast_enabled("cpu")


def test_a_loss_is_found_in_what_models_return():
    loss = torch.tensor(1.0)
    for out in (loss, {"loss": loss}, (torch.ones(2), loss), type("Out", (), {"loss": loss})()):
        assert find_loss(out) is loss
    assert find_loss(torch.ones(2)) is None and find_loss({"logits": loss}) is None and find_loss(None) is None


def test_within_quick_collections_new_garbage_is_found_and_old_objects_are_as_before():
    class Node:
        pass

    def cycle() -> weakref.ref:
        node = Node()
        node.itself = node
        return weakref.ref(node)

    before = gc.get_freeze_count()
    with quick_collections():
        assert gc.get_freeze_count() > 1000
        gone = cycle()
        gc.collect()
        assert gone() is None
        with quick_collections():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() > 1000, "a block within another ends nothing"
    assert gc.get_freeze_count() == before
