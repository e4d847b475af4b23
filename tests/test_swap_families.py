"""Whole models: each kind replaced as often as expected, right together, the state dict as it was, and put back to the bit."""

from collections import Counter

import pytest
import torch
from swapping import FAMILIES, GPT, NO_SWIGLU, CausalSelfAttention, Encoder, Mixed, SlowAttention, batch, biased, built, state
from torch import nn
from torch.utils._pytree import tree_leaves

from whet.choices import Choices, Recorder
from whet.swap._optimize import together
from whet.swap._proof import cast, floating, prove
from whet.swap._replace import as_call, recognise
from whet.swap.attention import asks_interface


def outputs(model: nn.Module, call) -> list:
    torch.manual_seed(3)
    return tree_leaves(floating(model(*call.args, **call.kwargs)))


def held(model: nn.Module, data, counts: dict, left: dict, **options) -> None:
    """What every family is asked."""
    call = as_call(data)
    expected = outputs(model, call)  # first: a forward of Transformers' may set its config's problem_type
    before, weights = state(model), {k: v.clone() for k, v in model.state_dict().items()}
    found = recognise(model, call, Choices(), **options)
    sites = [s for s, _ in found.sites]
    counted = Counter(s.kind for s in sites if s.kind != "biased_linear")
    assert counted == counts, [(x.kind, x.path, x.why) for x in found.left]
    with_bias = [s.path for s in sites + found.covered if s.kind == "biased_linear"]
    assert sorted(with_bias) == sorted(biased(model)), "each linear layer with a bias, once"
    reasons = {"gated_mlp": NO_SWIGLU} | {kind: (why,) if isinstance(why, str) else why for kind, why in left.items()}
    # Which linears of an attention have the sizes of an MLP's, and whether T5's goes by the interface, is the version's.
    free = {"gated_mlp"} | (set() if any(asks_interface(m) for m in model.modules()) else {"attention"})
    assert {x.kind for x in found.left} - free == set(left) - free, found.left
    assert all(any(why in x.why for why in reasons[x.kind]) for x in found.left), found.left
    assert state(model) == before, "recognising changes nothing"
    verdict = prove(together(found, call), call, Choices())
    assert verdict.ok, verdict.why
    assert verdict.share > 0, "something was compared"
    found.ask(Choices())
    assert state(model) != before
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    sum(t.sum() for t in outputs(model, call) if t.requires_grad).backward()
    found.restore()
    assert state(model) == before and all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    again = outputs(model, call)
    assert len(again) == len(expected) and all(torch.equal(a, b) for a, b in zip(again, expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_replaced_as_expected_right_as_a_whole_and_restored_exactly(name):
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    held(built(name), cast(family.batch(), torch.bfloat16), family.counts, family.left)


def tokens() -> tuple:
    ids = batch()["input_ids"]
    return ids, ids.roll(-1, 1).masked_fill(ids % 7 == 0, -1)


PLAIN_MODELS = {
    "GPT": (
        GPT, tokens, dict(norms=3, residual_norm=2, activations=2, sdpa_calls=2),
        dict(plain_loss="the model's logits are kept"), {}),
    "GPT without logits": (
        GPT, tokens, dict(norms=3, residual_norm=2, activations=2, sdpa_calls=2, plain_loss=1), {}, dict(keep_logits=False)),
    "GPT, slow": (
        lambda: GPT(attention=SlowAttention), tokens, dict(norms=3, residual_norm=2, activations=2, own_attention=2),
        dict(plain_loss="the model's logits are kept"), {}),
    "hand-written": (
        Mixed, lambda: torch.randn(2, 24, 64), dict(norms=1, residual_norm=1, gated_mlp=1, sdpa_calls=1),
        dict(gated_mlp="computes no SwiGLU"), {}),
    "TransformerEncoder": (
        lambda: Encoder(False), lambda: torch.randn(2, 24, 64), dict(residual_norm=2), dict(sdpa_calls="inside torch"), {}),
    "TransformerEncoder, norm first": (
        lambda: Encoder(True), lambda: torch.randn(2, 24, 64), dict(norms=2, residual_norm=2),
        dict(sdpa_calls="inside torch"), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_plain_model_is_replaced_as_expected_right_as_a_whole_and_restored_exactly(name, dtype):
    make, data, counts, left, options = PLAIN_MODELS[name]
    torch.manual_seed(0)
    held(make().to(dtype).train(), cast(data(), dtype), counts, left, **options)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_keeps_its_fast_path_in_inference(norm_first):
    torch.manual_seed(0)
    model, x = Encoder(norm_first).eval(), torch.randn(2, 24, 64)
    with torch.inference_mode():
        plain = model(x)
    found = recognise(model, as_call(x), Choices())
    assert Counter(s.kind for s, _ in found.sites) == dict(norms=4)
    found.ask(Choices())
    with torch.inference_mode():
        assert torch.equal(model(x), plain)
    torch.testing.assert_close(model(x), plain)


def attention(**options) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(CausalSelfAttention(**options)), torch.randn(2, 24, 64)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_own_call_of_sdpa_compiles_in_one_graph(impl):
    model, x = attention()
    found = recognise(model, as_call(x), Choices(), only=("sdpa_calls",))
    assert [s.kind for s, _ in found.sites] == ["sdpa_calls"]
    plain = model(x)
    found.ask(Choices(default=impl))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain)
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_own_call_of_sdpa_with_dropout_is_left_in_training_and_dropout_later_goes_to_torch():
    model, x = attention(dropout=0.5)
    found = recognise(model.train(), as_call(x), Choices(), only=("sdpa_calls",))
    assert not found.sites and "dropout" in found.left[0].why
    found = recognise(model.eval(), as_call(x), Choices())
    assert len(found.sites) == 1
    found.ask(Choices())
    torch.manual_seed(1)
    served = model.train()(x)
    found.restore()
    torch.manual_seed(1)
    assert torch.equal(model(x), served)


def test_only_the_named_function_of_torch_is_another_and_only_for_this_module():
    model, x = attention()
    real = torch.nn.functional.scaled_dot_product_attention
    found = recognise(model, as_call(x), Choices())
    found.ask(Choices())
    seen = model[0].forward.__func__.__globals__["torch"]
    assert seen.nn.functional.scaled_dot_product_attention is not real and seen.nn.functional.relu is torch.nn.functional.relu
    assert torch.nn.functional.scaled_dot_product_attention is real
    assert CausalSelfAttention.forward.__globals__["torch"] is torch


def slow(**options) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(SlowAttention(**options)), torch.randn(2, 24, 64)


def asked_in(found, model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a replaced model asks an op for this input, its result being the plain model's either way."""
    recorder = Recorder()
    found.restore()
    torch.manual_seed(1)
    plain = model(x)
    found.ask(recorder)
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), plain)
    return bool(recorder.calls)


def test_written_out_attention_is_served_up_to_the_length_that_was_proved():
    model, x = slow()
    found = recognise(model, as_call(x), Choices(), only=("own_attention",))
    assert [s.words for s, _ in found.sites] == ["causal self-attention of 4 heads, to 160 tokens"]
    assert asked_in(found, model, torch.randn(1, 160, 64)) and asked_in(found, model.eval(), x)
    model[0].attn_dropout.p = 0.5
    assert not asked_in(found, model.train(), x)


def test_a_window_longer_than_the_batch_is_seen():
    model, x = slow(window=60)
    found = recognise(model, as_call(x), Choices(), only=("own_attention",))
    assert [s.words for s, _ in found.sites] == ["causal self-attention of 4 heads, to 24 tokens"]
    assert asked_in(found, model, x) and not asked_in(found, model, torch.randn(1, 100, 64))
    model, x = slow(window=8)
    assert "computes another function" in recognise(model, as_call(x), Choices()).left[0].why


def test_written_out_attention_with_dropout_is_left_in_training_and_takes_its_own_way_there_later():
    model, x = slow(dropout=0.5)
    found = recognise(model.train(), as_call(x), Choices(), only=("own_attention",))
    assert not found.sites and "drops out" in found.left[0].why
    found = recognise(model.eval(), as_call(x), Choices())
    assert asked_in(found, model, x)
    assert not asked_in(found, model.train(), x)
    model.eval()[0].attn_dropout.train()
    assert not asked_in(found, model, x)


def test_written_out_attention_with_an_output_of_zeros_is_known_all_the_same():
    model, x = slow()
    nn.init.zeros_(model[0].c_proj.weight)
    nn.init.zeros_(model[0].c_proj.bias)
    assert [s.words[:6] for s, _ in recognise(model, as_call(x), Choices(), only=("own_attention",)).sites] == ["causal"]


def test_written_out_attention_keeps_its_own_way_while_it_is_compiled():
    model, x = slow()
    plain = model(x)
    found = recognise(model, as_call(x), Choices())
    recorder = Recorder()
    found.ask(recorder)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), plain)
    assert not recorder.calls


class Counting(GPT):
    """Looks at its logits between head and loss, now and then."""

    look = False

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.ln_f(self.wte(idx)))
        right = (logits.argmax(-1) == targets).sum() if self.look else None
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)
        return logits, loss, right


def test_a_forward_that_looks_at_its_logits_gets_them():
    torch.manual_seed(0)
    model, data = Counting().train(), tokens()
    found = recognise(model, as_call(data), Choices(), keep_logits=False, only=("plain_loss",))
    assert len(found.sites) == 1
    plain = model(*data)[1]
    found.ask(Choices())
    logits, loss, _ = model(*data)
    assert logits is None
    torch.testing.assert_close(loss, plain)
    model.look = True
    logits, loss, right = model(*data)
    assert logits is not None and right is not None and torch.equal(loss, plain)
    found.restore()
    found = recognise(model, as_call(data), Choices(), keep_logits=False, only=("plain_loss",))
    assert not found.sites and "does more with the logits" in found.left[0].why


def test_a_plain_models_logits_are_there_in_eval_mode_and_without_targets():
    torch.manual_seed(0)
    model, data = GPT().train(), tokens()
    found = recognise(model, as_call(data), Choices(), keep_logits=False)
    found.ask(Choices())
    assert model(*data)[0] is None and model(data[0])[0].shape == (2, 1, 96)
    assert model.eval()(*data)[0].shape == (2, 24, 96)


def test_logits_of_a_hugging_face_model_are_kept_where_that_is_asked():
    pytest.importorskip("transformers")
    found = recognise(built("Llama"), as_call(batch()), Choices(), only=("lm_head",), keep_logits=True)
    assert not found.sites and "logits are kept" in found.left[0].why
