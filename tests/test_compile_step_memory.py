"""whet.compile_step where memory does not hold a step in float64, which every plan is compared to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_compile_step import adam
from torch import nn

from whet import step_plans
from whet.diagnose.target import Target


@pytest.mark.parametrize("fits", ["float64", "with its blocks checkpointed", "no float64 at all"])
def test_where_memory_does_not_hold_a_step_in_float64_its_blocks_are_checkpointed(monkeypatch, fits):
    class Block(nn.Linear):
        def forward(self, x):
            short = x.dtype == torch.float64 and torch.is_grad_enabled()
            if short and (fits == "no float64 at all" or (fits != "float64" and not hasattr(self, "_whet_unsaved"))):
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")
            return x + super().forward(x).tanh()

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(12, 12) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    checkpointed, real = [], step_plans.checkpointed
    monkeypatch.setattr(step_plans, "checkpointed", lambda work: checkpointed.append(work) or real(work))
    model, x = Deep().train(), torch.randn(6, 12)
    subject = step_plans.Loop(Target(model, (x,), {}, optimizer=adam(model), name="deep"))
    found = subject.truth()
    exact, loss = copy.deepcopy(model), torch.tensor(0.0)
    for block in exact.double().blocks:
        block.forward = lambda x, block=block: x + F.linear(x, block.weight, block.bias).tanh()
    loss = exact(x.double())
    loss.backward()
    in_float64 = fits != "no float64 at all"
    assert len(found) == 7 and bool(checkpointed) == (fits != "float64") and bool(subject.notes) != in_float64
    assert all((t.dtype == torch.float64) == in_float64 for t in found.values())
    if in_float64:
        wanted = {"output loss": loss.detach()} | {f"grad {n}": p.grad for n, p in exact.named_parameters()}
        assert all(torch.equal(found[n], t) for n, t in wanted.items())
    assert not any("_whet_unsaved" in vars(block) for block in model.blocks)
