"""whet.compile_step by CUDA graphs: the same losses and weights as the plain loop's."""

import copy
from dataclasses import replace

import pytest
import torch
from swapping import FAMILIES, built, masks_seen
from test_compile_step import CLIP, GRAPH, Small, adam, assert_same_steps, batches, choosing, evidence, on
from torch import nn

import whet
from whet.choices import Choices
from whet.graphs import Graph
from whet.judge import judge
from whet.step_plans import LoopWork, choose
from whet.swap._proof import cast
from whet.swap._replace import as_call, recognise


def as_in_5_17(padding_mask, kv_length, local_attention_size=None) -> bool:
    """Transformers' _ignore_bidirectional_mask_sdpa before it was mended, for a batch without padding or windows."""
    return padding_mask is None and not torch.cuda.is_current_stream_capturing()


def gpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    return adam(model, capturable=True)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [gpu_adam, adam], ids=["capturable", "optimizer-outside"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_five_steps_by_a_cuda_graph_are_the_plain_loops_on_a_gpu(make, compiled, monkeypatch):
    choosing(monkeypatch, replace(GRAPH, compiled=compiled))
    step = assert_same_steps(make, batches(5), device="cuda")
    (served,) = step.served.values()
    assert served.graph is not None, served.why
    assert bool(served.graph.outside) == (make is adam)


@pytest.mark.gpu
def test_cuda_graphs_of_several_shapes_take_turns_on_a_gpu(monkeypatch):
    choosing(monkeypatch, GRAPH)
    data = [*batches(2), *batches(2, rows=4), *batches(2), *batches(1, rows=4)]
    step = assert_same_steps(gpu_adam, data, device="cuda")
    assert len(step.served) == 2 and all(s.graph is not None for s in step.served.values()), str(step.report)


@pytest.mark.gpu
def test_a_cuda_graph_follows_a_learning_rate_schedule_on_a_gpu(monkeypatch):
    choosing(monkeypatch, GRAPH)
    step = assert_same_steps(gpu_adam, batches(6), decay=0.5, device="cuda")
    assert all(s.graph is not None for s in step.served.values()), str(step.report)


def added_up(model: nn.Module, update, data: list[list[dict]]) -> dict:
    """Losses and weights of a loop whose every update adds up the gradients of several batches."""
    losses = [update(batch, i == 0, i == len(parts) - 1) for parts in data for i, batch in enumerate(parts)]
    return evidence(model, losses)


def plain_update(model: nn.Module, optimizer: torch.optim.Optimizer):
    def update(batch: dict, first: bool, last: bool) -> torch.Tensor:
        if first:
            optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return loss.detach()

    return update


@pytest.mark.gpu
@pytest.mark.parametrize("make", [gpu_adam, adam], ids=["capturable", "optimizer-outside"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_added_up_by_cuda_graphs_on_a_gpu(make, compiled, monkeypatch):
    choosing(monkeypatch, replace(GRAPH, compiled=compiled))
    mixed = [*batches(2, rows=4), *batches(1), *batches(1, rows=4)]
    data = [batches(2), batches(3), batches(1), mixed, batches(1), [*batches(1), *batches(1, rows=4)]]
    torch.manual_seed(0)
    model = Small().cuda()
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    truth = added_up(wide, plain_update(wide, make(wide)), [on("cuda", parts, torch.float64) for parts in data])
    data = [on("cuda", parts) for parts in data]
    eager = added_up(twin, plain_update(twin, make(twin)), data)
    step = whet.compile_step(model, make(model), clip=CLIP)
    actual = added_up(model, lambda batch, first, last: step(batch, update=last), data)
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why
    assert all(s.adding is not None for s in step.served.values()), str(step.report)


@pytest.mark.gpu
def test_every_plan_of_a_step_is_verified_on_a_gpu():
    model = Small().cuda()
    (batch,) = on("cuda", batches(1))
    found = choose(LoopWork(model, (), batch, optimizer=gpu_adam(model), clip=CLIP), seconds=0.01)
    assert "is out" not in found.why and "could be tried" not in found.why, found.why


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ViT", "Bert"])
def test_an_encoders_step_is_captured_without_a_mask_on_a_gpu(name, monkeypatch):
    pytest.importorskip("transformers")
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", as_in_5_17)
    masks = masks_seen(monkeypatch)
    model = built(name).cuda()
    data = {k: v.cuda() for k, v in cast(FAMILIES[name].batch(), torch.bfloat16).items()}

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(**data).loss
        loss.backward()
        return loss

    expected = step().item()
    found = recognise(model, as_call(data), Choices(), only=("full_mask",))
    found.ask(Choices())
    graph = Graph(step)
    assert masks and masks.count(None) == len(masks)
    assert graph().item() == pytest.approx(expected, rel=1e-2)
    found.restore()
    masks.clear()
    Graph(step, warm_up=0)
    assert not any(m is None for m in masks), "what Transformers 5.17 does"
