"""whet.compile_step by CUDA graphs: the same losses and weights as the plain loop's."""

from dataclasses import replace

import pytest
import torch
from test_compile_step import CLIP, GRAPH, Small, adam, assert_same_steps, batches, choosing, on
from torch import nn

from whet.step_plans import LoopWork, choose


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


@pytest.mark.gpu
def test_every_plan_of_a_step_is_verified_on_a_gpu():
    model = Small().cuda()
    (batch,) = on("cuda", batches(1))
    found = choose(LoopWork(model, (), batch, optimizer=gpu_adam(model), clip=CLIP), seconds=0.01)
    assert "is out" not in found.why and "could be tried" not in found.why, found.why
