"""What optimize() may be handed: each is worked on, or refused in one line, and no model is left half changed."""

import pytest
import torch
from swapping import GPT, batch, built, state
from torch import nn

from whet.swap._given import elsewhere
from whet.swap._optimize import optimize, restore
from whet.workload import Workload

pytest.importorskip("transformers")


class Twice(nn.Module):
    """One norm under two names, called three times."""

    def __init__(self):
        super().__init__()
        self.first, self.linear = nn.RMSNorm(16), nn.Linear(16, 16)
        self.second = self.first

    def forward(self, x):
        return self.first(self.linear(self.second(self.linear(self.first(x))))).square().mean()


def refused(model: nn.Module, data, why: str, **options) -> str:
    before = state(model)
    with pytest.raises(ValueError, match=why) as caught:
        optimize(model, data, **options)
    assert state(model) == before and "whet" not in vars(model) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("data", "why"), [
    ({}, "batch is empty"), ((), "batch is empty"), (None, "got NoneType"), (3, "got int"),
    ({"tokens": torch.ones(2, 4)}, "the model's forward fails on this batch: .*unexpected keyword argument 'tokens'"),
    (torch.full((1, 4), 96), "the model's forward fails on this batch: IndexError: index out of range"),
    (torch.ones(1, 4, dtype=torch.long, device="meta"), "the batch has a tensor on the meta device"),
])
def test_a_batch_that_the_model_does_not_take_is_refused_in_its_own_words(data, why):
    refused(GPT(), data, why)


def test_where_batch_and_model_are_is_said_of_a_forward_that_fails():
    assert elsewhere(Workload(GPT(), (torch.ones(1, device="meta"),))) == ", part of which is on meta and the model on cpu"
    assert elsewhere(Workload(GPT(), (torch.ones(1),))) == ""


def test_a_refused_batch_leaves_an_optimised_model_optimised(swapped_at_once):
    model = optimize(built("Llama", torch.float32), batch())
    report, before = model.whet, state(model)
    with pytest.raises(ValueError, match="batch is empty"):
        optimize(model, {})
    assert model.whet is report and state(model) == before


def test_what_wraps_or_changed_a_model_is_named_and_what_to_give_instead(one_process):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), torch.randn(3, 8)
    refused(nn.parallel.DistributedDataParallel(model), x, "is wrapped: give model.module")
    refused(nn.DataParallel(model), x, "is wrapped: give model.module")
    refused(torch.compile(model, backend="eager"), x, "is compiled: give model._orig_mod")
    with pytest.raises(ValueError, match="is TorchScript"):
        optimize(torch.jit.trace(model, x), x)
    refused(model.to("meta"), x, "parameter 0.weight is on the meta device")


def test_a_model_made_under_inference_mode_is_refused_and_a_call_under_it_is_not(swapped_at_once):
    with torch.inference_mode():
        refused(nn.Linear(8, 8), torch.randn(3, 8), "parameter weight was made under torch.inference_mode")
    for around in (torch.inference_mode(), torch.no_grad()):
        model = built("Llama", torch.float32)
        with around:
            data = {k: v.clone() for k, v in batch().items()}
            optimize(model, data)
            assert len(model.whet.kept) == 7 and model.whet.mode == "train" and model.eval()(**data).logits is not None
        model.train()(**batch()).loss.backward()


def test_a_frozen_model_is_for_inference(swapped_at_once):
    model = built("Llama", torch.float32).requires_grad_(False)
    refused(model, batch(), "every parameter is frozen; use mode='infer'", mode="train")
    assert optimize(model, batch()).whet.mode == "infer" and model(**batch()).logits is not None
    refused(nn.Linear(4, 4), torch.ones(2, 4), "the model returned no loss", mode="train")


def test_inside_a_backward_it_is_refused_and_between_forward_and_backward_it_disturbs_nothing(swapped_at_once):
    model, data, said = built("GPT2", torch.float32), batch(), []
    model(**data).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss = model(**data).loss
    optimize(model, data)
    loss.backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters())
    restore(model)
    loss = model(**data).loss
    loss.register_hook(lambda grad: said.append(refused(model, data, "called inside a backward")))
    loss.backward()
    assert len(said) == 1


def test_an_optimizer_inside_the_backward_does_not_step_while_it_is_chosen(swapped_at_once):
    model, data, steps = built("Llama", torch.float32), batch(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p))
    optimize(model, data)
    assert not steps
    model(**data).loss.backward()
    assert len(steps) == len(list(model.parameters()))


def test_a_module_with_two_names_and_three_calls_is_replaced_once(swapped_at_once):
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(5, 16)
    model(x).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    before = state(model)
    optimize(model, x)
    assert [len(g.sites) for g in model.whet.kept] == [1] and model.second is model.first
    model(x).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n])
    assert state(restore(model)) == before


def test_hooks_see_the_same_values_with_parts_replaced(swapped_at_once):
    model, data, seen = built("Llama", torch.float32), batch(), []
    layer = model.model.layers[0]
    for part in (layer.input_layernorm, layer.mlp, layer.mlp.down_proj, layer.self_attn.o_proj, model.lm_head):
        part.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
        part.register_full_backward_hook(lambda m, gin, gout: seen.append(gin[0]))
        part.register_full_backward_pre_hook(lambda m, gout: seen.append(gout[0]))
    model(**data).loss.backward()
    expected = list(seen)
    optimize(model, data, keep_logits=True)
    seen.clear()
    model(**data).loss.backward()
    assert len(seen) == len(expected) == 15
    for one, other in zip(seen, expected):
        torch.testing.assert_close(one, other)
