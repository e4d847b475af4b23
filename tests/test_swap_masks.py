"""Masks as spans of keys: padded and packed batches of Transformers' models, and what is no run of keys left to SDPA."""

import copy

import pytest
import torch
from swapping import all_ones, batch, built, left_padded, packed, padded, with_gaps
from torch import nn

from whet.choices import Choices, Recorder
from whet.ops.attention_spans.meaning import seen, spans_of
from whet.swap import Met, _masks
from whet.swap._masks import readable, spans_in
from whet.swap._proof import prove
from whet.swap._replace import LENGTH, as_call, cut, met_in, recognise, uncached

BATCHES = dict(padded=padded, left_padded=left_padded, packed=packed)


def attention_of(model: nn.Module, data: dict, ops: Choices | None = None):
    return recognise(model, as_call(data), ops or Choices(), only=("attention",))


def asked(model: nn.Module, data: dict) -> set[str]:
    """The ops that an optimised model's attention asks for on a batch."""
    recorder, found = Recorder(), attention_of(model, data)
    found.ask(recorder)
    model(**data, use_cache=False)  # with a cache Transformers takes packed documents for one
    found.restore()
    return {call.op for call, _ in recorder.calls.values()}


@pytest.mark.parametrize("kind", ["padded", "packed", "window"])
def test_spans_are_read_off_the_mask_they_make_and_kept_on_it(kind, device, monkeypatch):
    first, last = spans_of(kind, 3, 20, 20, device)
    mask = seen(first, last, 20)
    found = spans_in(mask)
    assert found is not None and torch.equal(seen(*found, 20), mask)
    monkeypatch.setattr(_masks, "_found", None)
    assert spans_in(mask) is found, "looked at once"


def test_a_mask_changed_in_place_is_read_again_and_gaps_are_no_span(device, monkeypatch):
    mask = torch.ones(2, 1, 9, 12, dtype=torch.bool, device=device)
    assert spans_in(mask) is not None
    mask[1, 0, 4, 5] = False
    assert spans_in(mask) is None
    mask[1, 0, 4, 6:] = False
    monkeypatch.setattr(_masks, "AT_ONCE", 50)  # in several parts
    first, last = spans_in(mask)
    assert (first[1, 4], last[1, 4]) == (0, 5) and torch.equal(seen(first, last, 12), mask)
    mask[0, 0, 3] = False
    assert torch.equal(seen(*spans_in(mask), 12), mask), "a query that sees nothing"


def test_what_may_change_unseen_is_not_read(device):
    mask = torch.ones(2, 1, 9, 12, dtype=torch.bool, device=device)
    assert readable(mask)
    with torch.inference_mode():
        assert not readable(mask.clone())
    traced = []
    torch.compile(lambda m: traced.append(readable(m)) or m.sum(), backend="eager")(mask)
    assert traced == [False]
    for other in (None, mask.float(), mask[:, 0], mask.expand(2, 4, 9, 12), mask.to("meta"), nn.Parameter(torch.ones(1))):
        assert not readable(other)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_the_kernel_is_right_in_a_whole_model_under_every_mask(name, kind):
    pytest.importorskip("transformers")
    model, data = built(name), BATCHES[kind]()
    found = attention_of(model, data, Choices(default="triton"))
    assert len(found.sites) == 2 and not found.left, found.left
    assert all(s.words == "scaled dot-product attention under a mask" and v.share > 0 for s, v in found.sites)
    assert asked(model, data) == {"attention_spans"}


def test_a_mask_of_ones_is_no_mask():
    pytest.importorskip("transformers")
    assert asked(built("Llama"), all_ones()) == {"attention"}


@pytest.mark.parametrize("later", [batch, with_gaps])
def test_what_the_proof_did_not_come_to_gets_the_models_own_way(later):
    pytest.importorskip("transformers")
    model, data = built("Llama", torch.float32), later()
    expected = model(**data).logits
    found, recorder = attention_of(model, padded()), Recorder()
    found.ask(recorder)
    assert torch.equal(model(**data).logits, expected) and not recorder.calls
    model(**padded())
    assert {call.op for call, _ in recorder.calls.values()} == {"attention_spans"}


def test_the_mask_is_read_once_for_all_layers_with_checkpointing_too(monkeypatch):
    pytest.importorskip("transformers")
    model, data, counted = built("Qwen3", torch.float32), padded(), []
    model(**data).loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    attention_of(model, data).ask(Choices())
    model.gradient_checkpointing_enable()
    real = _masks._found
    monkeypatch.setattr(_masks, "_found", lambda mask: counted.append(mask.shape) or real(mask))
    model(**data).loss.backward()
    assert len(counted) == 1
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n])


def test_compiled_afterwards_and_generating_it_gives_what_it_gave():
    pytest.importorskip("transformers")
    model, data = built("Llama", torch.float32).eval(), left_padded()
    prompt = dict(input_ids=data["input_ids"], attention_mask=data["attention_mask"])
    words = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=95)
    logits, tokens = model(**prompt).logits, model.generate(**prompt, **words)
    attention_of(model, prompt).ask(Choices())
    assert torch.equal(model.generate(**prompt, **words), tokens)
    torch._dynamo.reset()
    compiled = torch.compile(copy.copy(model), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**prompt).logits, logits)


def long_batch(edge: str) -> dict:
    """Six rows of 300 tokens: the fifth with padding or a second document, far from where a batch is cut."""
    ids = torch.arange(1800).reshape(6, 300) % 96
    mask, positions = torch.ones_like(ids), torch.arange(300).repeat(6, 1)
    mask[4, 200:] = edge != "right"
    mask[4, :100] = edge != "left"
    positions[4, 150:] -= 150
    return dict(input_ids=ids, labels=ids) | (dict(position_ids=positions) if edge == "packed" else dict(attention_mask=mask))


@pytest.mark.parametrize("edge", ["right", "left", "packed"])
def test_the_part_that_the_proof_runs_on_has_the_padding_or_the_documents_in_it(edge):
    data = long_batch(edge)
    part = cut(as_call(data)).kwargs
    assert all(t.shape == (2, LENGTH) for t in part.values())
    assert torch.equal(part["input_ids"], part["labels"])
    where = (data["input_ids"][4, :, None] == part["input_ids"][1, None]).any(), part["input_ids"][0, 0]
    assert where[0] and part["input_ids"][0, 0] == {"right": 176, "left": 76, "packed": 126}[edge] % 96
    if edge == "packed":
        assert (part["position_ids"].diff(dim=1) != 1).sum(1).tolist() == [0, 1]
    else:
        assert part["attention_mask"].sum(1).tolist() == [LENGTH, LENGTH // 2]


def test_a_batch_without_padding_is_cut_at_its_start():
    data = long_batch("none")
    part = cut(as_call(data)).kwargs
    assert all(torch.equal(part[k], data[k][:2, :LENGTH]) for k in data)
    assert all(part[k].view(-1).shape == (2 * LENGTH,) for k in data), "as a loss may view its labels"
    assert cut(Met((torch.randn(5, 60, 8),), {})).args[0].shape == (2, 60, 8)


def test_long_padding_is_proved_under_its_mask():
    pytest.importorskip("transformers")
    model, data = built("Llama", torch.float32), long_batch("right")
    found = attention_of(model, data)
    assert len(found.sites) == 2 and all("under a mask" in s.words for s, _ in found.sites), found.left
    site, small = found.sites[0][0], cut(as_call(data))
    with uncached(model):
        met = met_in(model, small, {site.path})
    assert met[site.path].kwargs["attention_mask"].shape == (2, 1, LENGTH, LENGTH)
    assert prove(site, met[site.path], Choices()).ok
