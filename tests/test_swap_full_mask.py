"""The full mask that is not built: never where one is needed, though Transformers may not look at the batch."""

import contextlib
import copy

import pytest
import torch
from swapping import FAMILIES, all_ones, batch, built, masks_seen, padded, state
from test_swap_use import agree, trained
from torch import nn

from whet.choices import Choices
from whet.swap import Met
from whet.swap._replace import Replaced, as_call, recognise
from whet.swap.attention import NAME
from whet.swap.full_mask import find, makes_masks

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
ENCODERS = ["ViT", "Bert", "ModernBert"]
EMBEDDED = torch.zeros(2, 24, 8)


def data_of(name: str) -> dict:
    return {k: v.contiguous() for k, v in FAMILIES[name].batch().items()}


def as_in_5_17(padding_mask, kv_length, local_attention_size=None) -> bool:
    """Transformers' _ignore_bidirectional_mask_sdpa before it was mended: no mask is spared while something is traced."""
    if masking.is_tracing(padding_mask) or (local_attention_size is not None and kv_length >= local_attention_size):
        return False
    return padding_mask is None or bool(padding_mask.all())


@pytest.fixture
def seen(monkeypatch) -> list:
    """The masks that SDPA is called with, under Transformers 5.17's rule."""
    monkeypatch.setattr(masking, "_ignore_bidirectional_mask_sdpa", as_in_5_17)
    return masks_seen(monkeypatch)


@contextlib.contextmanager
def captured(seen: list):
    """Transformers may not look at the batch, as where a CUDA graph is captured."""
    seen.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masking, "is_tracing", lambda tensor=None: True)
        yield


def spared(model: nn.Module, data: dict, only: tuple[str, ...] = ("full_mask",)) -> Replaced:
    found = recognise(model, as_call(data), Choices(), only=only)
    assert "full_mask" in {s.kind for s, _ in found.sites}, found.left
    found.ask(Choices())
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_no_mask_is_built_and_losses_and_gradients_are_the_same_bits(name, seen):
    model, data = built(name, torch.float32), data_of(name)
    expected, before = trained(model, data), state(model)
    with captured(seen):
        trained(model, data)
    assert seen and not any(m is None for m in seen), "the fault, without whet"
    found = spared(model, data)
    assert state(model) != before
    agree(trained(model, data), expected, exactly=True)
    with captured(seen):
        agree(trained(model, data), expected, exactly=True)
    assert seen and seen.count(None) == len(seen)
    found.restore()
    assert state(model) == before and NAME not in str(before)
    agree(trained(model, data), expected, exactly=True)
    model.gradient_checkpointing_enable()
    spared(model, data)
    with captured(seen):
        agree(trained(model, data), expected, exactly=True)
    assert seen and seen.count(None) == len(seen)


@pytest.mark.parametrize("only", [("full_mask",), ("full_mask", "attention")], ids=["sdpa", "replaced"])
@pytest.mark.parametrize("name", ENCODERS)
def test_torch_compile_traces_in_one_graph_without_a_mask(name, only, seen):
    plain, data = built(name, torch.float32), data_of(name)
    model, expected = copy.deepcopy(plain), trained(plain, data)
    spared(model, data, only)
    torch._dynamo.reset()
    seen.clear()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    try:
        agree(trained_by(traced, model, data), expected, exactly=True)
        assert seen and seen.count(None) == len(seen)
        if name != "ViT":
            agree(trained_by(traced, model, padded()), trained(plain, padded()), exactly=True)
            agree(trained_by(traced, model, data), expected, exactly=True)
            longer = batch(length=40)
            agree(trained_by(traced, model, longer), trained(plain, longer), exactly=True)
    finally:
        torch._dynamo.reset()


def trained_by(traced: nn.Module, model: nn.Module, data: dict) -> tuple:
    """Loss and gradients of one step of a compiled model, by the plain one's names."""
    model.zero_grad()
    loss = traced(**data).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def logits(model: nn.Module, data: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**data).logits


@pytest.mark.parametrize("make", [padded, all_ones])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_a_batch_with_a_mask_has_it_built(name, make, seen):
    plain = built(name, torch.float32)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(5 if p.dim() > 1 else 1)  # as it is made, it hardly attends
    model, data = copy.deepcopy(plain), make()
    spared(model, batch())
    expected = trained(plain, data)
    if make is padded:
        assert (logits(plain, data) - logits(plain, data | {"attention_mask": None})).abs().max() > 1e-3, "the mask matters"
    with captured(seen):
        agree(trained(model, data), expected)
        torch.testing.assert_close(logits(model, data), logits(plain, data))
    assert not any(m is None for m in seen)
    agree(trained(model, data), expected, exactly=True)
    assert not recognise(plain, as_call(data), Choices(), only=("full_mask",)).sites, "there is nothing to spare"


@pytest.mark.parametrize("length", [23, 24, 25, 40])
def test_a_window_counts_where_it_is_no_longer_than_the_sequence(length, seen):
    plain = built("ModernBert", torch.float32)
    plain.config.local_attention = 48  # a window of 24 to each side
    assert plain.config.sliding_window == 24
    model, data = copy.deepcopy(plain), batch(length=length)
    spared(model, batch(length=8))
    expected = trained(plain, data)
    with captured(seen):
        agree(trained(model, data), expected)
    assert sorted(m is None for m in seen) == ([True, True] if length < 24 else [False, True])


@pytest.mark.parametrize("option", [
    dict(allow_is_bidirectional_skip=False), dict(and_mask_function=lambda b, h, q, k: k != 3),
    dict(or_mask_function=lambda b, h, q, k: k < 3), dict(attention_mask=padded()["attention_mask"]),
], ids=lambda option: next(iter(option)))
def test_a_mask_that_is_asked_for_otherwise_is_built(option, seen):
    model = built("Bert", torch.float32)
    spared(model, batch())
    given = dict(config=model.config, inputs_embeds=EMBEDDED, attention_mask=None) | option
    with captured(seen):
        made = masking.create_bidirectional_mask(**given)
    theirs = masking.create_bidirectional_mask(**given | {"config": built("Bert", torch.float32).config})
    assert made is not None and torch.equal(made, theirs)


def test_a_window_shorter_than_the_queries_alone_is_built(seen):
    model = built("ModernBert", torch.float32)
    spared(model, batch())
    given = dict(config=model.config, inputs_embeds=torch.zeros(2, 100, 8), encoder_hidden_states=EMBEDDED, attention_mask=None)
    with captured(seen):
        made = masking.create_bidirectional_sliding_window_mask(**given)
        assert made.shape == (2, 1, 100, 24) and not made.all()
        assert masking.create_bidirectional_mask(**given) is None


def test_attention_to_an_encoders_states_of_another_length(seen):
    torch.manual_seed(0)
    options = dict(FAMILIES["Bert"].options, is_decoder=True, add_cross_attention=True)
    plain = transformers.BertLMHeadModel(transformers.BertConfig(**options)).train()
    model, states = copy.deepcopy(plain), torch.randn(2, 9, 64)
    data = batch() | dict(encoder_hidden_states=states, use_cache=False)
    expected = trained(plain, data)
    found = spared(model, data)
    assert [s.path for s, _ in found.sites] == ["bert"]
    with captured(seen):
        agree(trained(model, data), expected)
    assert len(seen) == 4 and seen[1::2] == [None, None], "its own keys are causal, the encoder's all seen"
    part = data | dict(encoder_attention_mask=torch.ones(2, 9).long() * (torch.arange(9) < 5))
    with captured(seen):
        agree(trained(model, part), trained(plain, part))
    assert not recognise(plain, as_call(part), Choices(), only=("full_mask",)).sites
    assert not recognise(plain, as_call(batch() | {"use_cache": False}), Choices(), only=("full_mask",)).sites, "a decoder"


def test_an_encoder_and_a_decoder_of_one_model(seen):
    plain = built("T5", torch.float32)
    model, data = copy.deepcopy(plain), data_of("T5") | {"use_cache": False}
    assert [s.path for s, _ in spared(model, data).sites] == ["encoder", "decoder"]
    expected = trained(plain, data)
    with captured(seen):
        agree(trained(model, data), expected)
    masked = data | dict(attention_mask=padded()["attention_mask"])
    with captured(seen):
        agree(trained(model, masked), trained(plain, masked))
    assert not recognise(plain, as_call(masked), Choices(), only=("full_mask",)).sites


def test_a_decoder_with_attention_in_both_directions(seen):
    plain = built("Llama", torch.float32)
    plain.config.is_causal = False
    model = copy.deepcopy(plain)
    model.config._attn_implementation_internal = NAME
    data = batch() | {"use_cache": False}
    expected = trained(plain, data)
    assert (expected[0] - trained(built("Llama", torch.float32), data)[0]).abs() > 1e-4, "it sees what comes after"
    with captured(seen):
        agree(trained(model, data), expected, exactly=True)


def test_what_is_no_maker_of_masks_or_not_set_to_sdpa_has_no_site():
    model = built("Bert", torch.float32)
    assert makes_masks(model.bert) and not makes_masks(model) and not makes_masks(nn.Linear(2, 2))
    data = as_call(batch())
    assert not list(find(model, {"": data, "bert": data})), "no attention was met"
    met = {"bert": data, "bert.encoder.layer.0.attention.self": Met((EMBEDDED,), {})}
    assert [s.path for s in find(model, met)] == ["bert"]
    assert not list(find(model, met | {"bert": Met((batch()["input_ids"], padded()["attention_mask"]), {})})), "in order"
    model.config._attn_implementation = "eager"
    assert not list(find(model, met))
