"""Recognisers on models that nobody wrote for whet: replaced where it is proved, put back exactly, or left with a reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from swapping import batch, built, state
from torch import nn

from whet.choices import Choices
from whet.swap import Edit, Left, Site, _optimize, _replace
from whet.swap._optimize import optimize, restore
from whet.swap._proof import Float64Everywhere, prove
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


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)), with dropout in between and a down in a dtype of its own, as T5 has them."""

    def __init__(self, act, p: float = 0.0, wide_down: bool = False):
        super().__init__()
        self.a, self.b = nn.Linear(16, 48, dtype=torch.bfloat16), nn.Linear(16, 48, dtype=torch.bfloat16)
        self.c = nn.Linear(48, 16, dtype=torch.float32 if wide_down else torch.bfloat16)
        self.act, self.p = act, p

    def forward(self, x):
        h = F.dropout(self.act(self.b(x)) * self.a(x), self.p, self.training)
        return self.c(h.to(self.c.weight.dtype))


@pytest.mark.parametrize(("act", "options", "words"), [
    (F.silu, {}, "SwiGLU between b, a, c"), (F.gelu, {}, "GEGLU between b, a, c"),
    (nn.GELU(approximate="tanh"), {}, "GEGLU by tanh between b, a, c"), (F.relu, {}, "computes no SwiGLU and no GEGLU"),
    (nn.SiLU(), {"p": 0.1}, "another function in training, as with dropout"),
    (F.gelu, {"wide_down": True}, "its linears have different dtypes: torch.bfloat16, torch.float32"),
])
def test_a_gated_mlp_is_known_by_its_activation_and_left_where_it_drops_or_casts_in_between(act, options, words):
    torch.manual_seed(0)
    model = nn.Sequential(Gated(act, **options)).train()
    found = recognise(model, as_call(torch.randn(5, 16, dtype=torch.bfloat16)), Choices(), only=("gated_mlp",))
    said = [s.words for s, _ in found.sites] + [x.why for x in found.left]
    assert len(said) == 1 and words in said[0] and len(found.sites) == words.count("between b, a, c")


def test_a_gated_mlp_whose_down_starts_at_zero_is_known_all_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Gated(F.gelu).float())
    nn.init.zeros_(model[1].c.weight)
    nn.init.zeros_(model[1].c.bias)
    found = recognise(model, as_call(torch.randn(5, 16)), Choices(), only=("gated_mlp",))
    assert [s.words for s, _ in found.sites] == ["GEGLU between b, a, c"] and not model[1].c.weight.any()


@pytest.mark.parametrize(("rate", "training", "replaced"), [(0.0, True, 4), (0.1, False, 4), (0.1, True, 0)])
def test_t5_has_its_gated_mlps_replaced_where_nothing_is_dropped(rate, training, replaced):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=160, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        dropout_rate=rate, decoder_start_token_id=0, pad_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).train(training)
    found = recognise(model, as_call(batch()), Choices(), only=("gated_mlp",))
    assert [s.words for s, _ in found.sites] == ["GEGLU by tanh between wi_0, wi_1, wo"] * replaced
    assert len(found.left) == 4 - replaced and all("dropout" in x.why for x in found.left)
    together = Site("", model, lambda m, ops: _optimize.edits_of(found, m, ops), "all", compares=("['loss']",))
    verdict = prove(together, as_call(batch()), Choices())
    assert verdict.ok == bool(replaced), verdict.why


def test_a_gated_mlp_replaced_in_eval_mode_drops_as_its_own_forward_does_once_it_is_trained():
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(F.gelu, p=0.5)).eval(), torch.randn(5, 16, dtype=torch.bfloat16)
    found = recognise(model, as_call(x), Choices(), only=("gated_mlp",))
    assert len(found.sites) == 1
    found.ask(Choices())
    model.train()
    torch.manual_seed(1)
    got = model(x)
    found.restore()
    torch.manual_seed(1)
    assert torch.equal(got, model(x))


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


def test_a_gelu_is_found_beside_modules_that_take_no_tensor_of_one_dimension():
    model = nn.Sequential(nn.GELU(), nn.Unflatten(1, (2, 8)), nn.Softmax2d(), nn.Flatten())
    found = recognise(model, as_call(torch.randn(4, 16, 3)), Choices(), only=("activations",))
    assert [site.path for site, _ in found.sites] == ["0"] and not found.left


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
