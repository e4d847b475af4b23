"""Recognisers on models that nobody wrote for whet: replaced where it is proved, put back exactly, or left with a reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from swapping import batch, built, state
from torch import nn

from whet.choices import Choices
from whet.swap import Edit, Left, _optimize, _replace
from whet.swap._optimize import optimize, restore
from whet.swap._proof import Float64Everywhere
from whet.swap._replace import as_call, recognise
from whet.tune import Tuned

transformers = pytest.importorskip("transformers")


class Odd(nn.Module):
    """Looks like an RMSNorm; its subclass says what it computes."""

    def __init__(self, width: int = 32, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps


class Halved(Odd):
    def forward(self, x):
        return 0.5 * F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class OtherEps(Odd):
    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-3)


class Cut(Odd):
    def forward(self, x):
        return F.rms_norm(x.detach(), x.shape[-1:], self.weight, self.eps)


class Right(Odd):
    def forward(self, x):
        return (x * (x * x).mean(-1, keepdim=True).add(self.eps).rsqrt()) * self.weight


@pytest.mark.parametrize(("norm", "replaced"), [(Halved, 0), (OtherEps, 0), (Cut, 0), (Right, 1)])
def test_a_norm_is_known_by_what_it_computes_gradients_included(norm, replaced):
    model = nn.Sequential(nn.Linear(32, 32), norm(), nn.Linear(32, 4))
    found = recognise(model, as_call(torch.randn(5, 32)), Choices(), only=("norms",))
    assert len(found.sites) == replaced and len(found.left) == 1 - replaced
    assert replaced or found.left[0].path == "1"


class DroppingMLP(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_an_mlp_that_would_drop_out_in_training_is_left_in_evaluation_too(p):
    model = nn.Sequential(nn.Linear(32, 32), DroppingMLP(p)).eval()
    found = recognise(model, as_call(torch.randn(5, 32)), Choices(), only=("gated_mlp",))
    assert len(found.sites) == (p == 0) and (p == 0 or "drops out" in found.left[0].why)


def test_the_oracle_keeps_float64_where_a_module_would_round():
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with Float64Everywhere():
        assert x.float().dtype == x.to(torch.bfloat16).dtype == F.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert torch.equal(x.float(), x)


def test_a_recogniser_that_fails_costs_its_own_candidates_and_the_others_go_on(monkeypatch):
    def broken(model, met):
        raise RuntimeError("upstream drifted")

    real = _replace.discover()
    monkeypatch.setattr(_replace, "discover", lambda: {"broken": broken} | real)
    found = recognise(built("Llama"), as_call(batch()), Choices(), only=("broken", "norms"))
    assert [x.kind for x in found.left] == ["broken"] and "upstream drifted" in found.left[0].why and len(found.sites) == 5


def tuned_at_once(monkeypatch):
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))


@pytest.mark.parametrize("where", ["recognise", "tune", "_time_group", "_whole"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_whatever_is_raised_in_the_middle_leaves_the_model_as_it_was(where, kind, monkeypatch):
    def fail(*args, **options):
        raise kind("planted")

    tuned_at_once(monkeypatch)
    monkeypatch.setattr(_optimize, where, fail)
    model = built("GPT2").eval()
    before, random = state(model), torch.get_rng_state()
    with pytest.raises(kind, match="planted"):
        optimize(model, batch(), seconds=0.001)
    assert state(model) == before and torch.equal(torch.get_rng_state(), random) and not hasattr(model, "whet")
    assert all(p.grad is None for p in model.parameters())


def test_optimize_shows_what_it_did_keeps_modes_and_gradients_and_is_taken_back(monkeypatch):
    tuned_at_once(monkeypatch)
    model = built("Llama", torch.float32).eval()
    before = state(model)
    model(**batch()).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    for _ in range(2):  # the second takes back the first
        assert optimize(model, batch(), seconds=0.001) is model and not model.training
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    shown = str(model.whet)
    assert "norms" in shown and "modules" in shown and len(model.whet.groups) >= 5
    restore(model)
    assert state(model) == before
    restore(model)


def test_a_deep_copy_of_an_optimised_model_computes_with_its_own_weights():
    model, data = built("Qwen3", torch.float32), batch()
    found = recognise(model, as_call(data), Choices())
    found.ask(Choices())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    twin(**data).loss.backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())
    found.restore()
    plain = built("Qwen3", torch.float32)
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(plain(**data).loss, twin(**data).loss)


def test_logits_are_there_in_eval_mode_and_without_labels_and_the_trainers_scale_is_kept():
    model, data = built("Llama", torch.float32), batch()
    plain = model(**data, num_items_in_batch=7).loss
    found = recognise(model, as_call(data), Choices(), only=("lm_head",))
    found.ask(Choices())
    assert model(**data).logits is None and model(input_ids=data["input_ids"]).logits is not None
    torch.testing.assert_close(model(**data, num_items_in_batch=7).loss, plain)
    assert model.eval()(**data).logits is not None
    generated = model.generate(data["input_ids"][:1, :4], max_new_tokens=3, do_sample=False)
    found.restore()
    assert torch.equal(generated, model.generate(data["input_ids"][:1, :4], max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize(("model", "data", "options", "why"), [
    ("no model", batch(), {}, "model must be a torch.nn.Module, got str"),
    (nn.Linear(2, 2, device="meta"), torch.ones(1, 2), {}, "parameter weight is on the meta device"),
    (nn.Linear(2, 2), torch.ones(1, 2), {"mode": "fast"}, "mode must be one of"),
    (nn.Linear(2, 2), torch.ones(1, 2), {"keep_logits": "no"}, "keep_logits must be True, False or None"),
    (nn.Linear(2, 2), None, {}, "batch must be a dict, a tuple or a tensor"),
])
def test_bad_input_is_refused_in_one_line(model, data, options, why):
    with pytest.raises(ValueError, match=why):
        optimize(model, data, **options)


def test_an_edit_is_undone_to_what_was_there_or_was_not():
    module = nn.Identity()
    journal = _replace.Journal()
    journal.make([Edit(module, "a", 1), Edit(module, "a", 2), Edit(module, "training", False)])
    assert module.a == 2 and module.training is False
    journal.undo()
    assert not hasattr(module, "a") and module.training is True and isinstance(Left("", ""), Left)
