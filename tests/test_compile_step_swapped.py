"""whet.compile_step of a model that whet.optimize has changed: verified against what it was, compiled with what it has."""

import pytest
import torch
from test_compile_step import AS_IT_IS, Small, adam, batches, choosing
from torch import nn

import whet
from whet import step_plans
from whet.choices import Choices
from whet.step_plans import LoopWork, before_optimize, choose
from whet.swap import _optimize
from whet.swap._replace import as_call, recognise
from whet.torch_ops import own_code


def test_a_model_that_was_optimised_is_verified_against_what_it_was(monkeypatch):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(12) + 0.5), 1e-5

        def forward(self, x):
            return x * (x * x).mean(-1, keepdim=True).add(self.eps).rsqrt() * self.weight

    class Normed(Small):
        def __init__(self):
            super().__init__()
            self.first = Norm()

        def forward(self, x, labels=None):
            return super().forward(self.first(x), labels)

    model, batch = Normed(), batches(1)[0]
    found = recognise(model, as_call(batch), Choices(), only=("norms",))
    assert [s.path for s, _ in found.sites] == ["first"]
    model.__dict__["whet"] = _optimize.Optimized(model, found)
    found.ask(Choices())
    with before_optimize(model):
        assert "forward" not in vars(model.first)
    assert "forward" in vars(model.first)
    monkeypatch.setattr(step_plans.Loop, "plans", lambda self: [])
    chosen = choose(LoopWork(model, (), batch, optimizer=adam(model)), seconds=0.001)
    assert chosen.why == "no other plan passed" and "forward" in vars(model.first) and model.whet.replaced is found


def test_torch_compile_takes_a_model_with_every_part_replaced():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=2)
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(96, (2, 16))
    batch = dict(input_ids=ids, labels=ids)
    want = model(**batch).loss
    found = recognise(model, as_call(batch), Choices())
    assert {s.kind for s, _ in found.sites} >= {"norms", "gated_mlp", "rotary", "attention", "lm_head"}
    found.ask(Choices())
    torch.testing.assert_close(torch.compile(own_code(model.forward), backend="eager", dynamic=False)(**batch).loss, want)


def test_a_model_that_is_restored_or_optimised_again_gets_a_plan_anew(monkeypatch):
    asked = choosing(monkeypatch, AS_IT_IS)
    model = Small()
    model.__dict__["whet"] = _optimize.Optimized(model, _optimize.Replaced(model))
    step = whet.compile_step(model, adam(model))
    for batch in batches(2):
        step(batch)
    whet.restore(model)
    for batch in batches(2):
        step(batch)
    assert len(asked) == 2 and len(step.served) == 2
