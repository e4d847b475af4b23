"""Text from gpt2 and tiny-llama: over a cache of keys and values the logits are those of the whole context."""

import math
from dataclasses import replace

import pytest
import test_gpt2
import test_models
import torch
from exported import same_in_float64

from whet import models
from whet.models._sampling import LayerCache, generate, new_cache

LLAMA = replace(test_models.SMALL, max_positions=32)
GPT2S = test_gpt2.VARIETIES | {
    "learned-qk-norm": dict(positions="learned", qk_norm=True, kv_heads=2),
    "hybrid-one-token": dict(pattern="SL", window=1, softcap=3.0),
}
CASES = [pytest.param("gpt2", replace(test_gpt2.SMALL, **v), variant, id=f"gpt2-{name}-{variant}")
         for name, v in GPT2S.items() for variant in test_gpt2.VARIANTS]
CASES += [pytest.param("tiny-llama", LLAMA, variant, id=f"tiny-llama-{variant}") for variant in test_models.VARIANTS]
cases = pytest.mark.parametrize("name, c, variant", CASES)
pytestmark = pytest.mark.usefixtures("one_thread")


def built(name: str, c, variant: str):
    if name == "gpt2":
        return test_gpt2.built(c, variant, test_gpt2.weights(c))
    drawn = {n: t * 12 if t.dim() == 2 else t for n, t in test_models.weights(c).items()}  # so that earlier tokens matter
    return test_models.built(c, variant, drawn, "cpu")


def some_tokens(c, rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(c.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def in_parts(model, tokens: torch.Tensor, lengths: list[int], cache: list[LayerCache]) -> torch.Tensor:
    return torch.cat([model.logits(part, cache=cache) for part in tokens.split(lengths, 1)], 1)


@cases
def test_logits_over_a_cache_are_those_of_the_whole_context(name, c, variant):
    model, tokens = built(name, c, variant).double(), some_tokens(c)
    whole, cache = model.logits(tokens), new_cache(c.layers, 24)
    assert not torch.equal(whole[:, -1], model.logits(tokens[:, 1:])[:, -1]), "the first token must matter"
    same_in_float64(in_parts(model, tokens, [7, 1, 1, 6, 1, 2, *[1] * 6], cache), whole, c)
    assert all(layer.length == 24 for layer in cache)


@pytest.mark.parametrize("broken", ["position", "keys", "window"])
@pytest.mark.parametrize("name", ["gpt2", "tiny-llama"])
def test_the_comparison_sees_a_cache_that_is_wrong(name, broken):
    c = replace(test_gpt2.SMALL, pattern="SL", window=5) if name == "gpt2" else LLAMA
    model, tokens = built(name, c, models.discover()[name].tuned).double(), some_tokens(c)
    whole, cache = model.logits(tokens), new_cache(c.layers, 32)
    in_parts(model, tokens[:, :20], [20], cache)
    for layer in cache:
        if broken == "position":
            layer.length -= 1
        elif broken == "keys":
            layer.keys[:, :, 18] += 1e-6
        else:
            layer.attend = lambda q, k, v, window, ops, layer=layer: LayerCache.attend(layer, q, k, v, 4, ops)
    with pytest.raises(AssertionError):
        same_in_float64(model.logits(tokens[:, 20:], cache=cache), whole[:, 20:], c)


@cases
def test_generation_is_greedy_at_temperature_0_and_slides_past_the_last_position(name, c, variant):
    model, start = built(name, c, variant), some_tokens(c, length=16)
    greedy = generate(model, start, 20, temperature=0)
    assert greedy.shape == (2, 36) and torch.equal(greedy[:, :16], start) and greedy.max() < c.vocab
    for t in range(16, 36):
        assert torch.equal(model.logits(greedy[:, max(0, t - 32) : t])[:, -1].argmax(-1), greedy[:, t])


@pytest.mark.parametrize("name", ["gpt2", "tiny-llama"])
def test_a_new_token_runs_as_one_row_until_the_context_slides(name, monkeypatch):
    c = test_gpt2.SMALL if name == "gpt2" else LLAMA
    model, rows = built(name, c, models.discover()[name].tuned), []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda tokens, *rest: rows.append(tokens.shape[1]) or logits(tokens, *rest))
    generate(model, some_tokens(c, length=30), 5)
    assert rows == [30, 1, 1, 32, 32]
    rows.clear()
    generate(model, some_tokens(c, length=40), 2)
    assert rows == [32, 32]


@pytest.mark.parametrize("name", ["gpt2", "tiny-llama"])
def test_a_draw_is_the_seed_s_and_among_the_likeliest(name):
    c = replace(test_gpt2.SMALL, softcap=30.0) if name == "gpt2" else LLAMA
    model, start = built(name, c, models.discover()[name].tuned), some_tokens(c, length=16)
    assert torch.equal(generate(model, start, 20, temperature=2.0, top_k=1), generate(model, start, 20, temperature=0))
    drawn, again, other = (generate(model, start, 20, 3.0, 5, seed) for seed in (1, 1, 2))
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    for t in range(16, 36):
        likeliest = model.logits(drawn[:, max(0, t - 32) : t])[:, -1].topk(5).indices
        assert (likeliest == drawn[:, t : t + 1]).any(1).all()
    assert torch.equal(generate(model, start, 0), start)


def test_what_cannot_be_asked_for_is_refused_by_name():
    model = built("gpt2", test_gpt2.SMALL, "tuned")
    for changed in (dict(max_new_tokens=-1), dict(temperature=-0.5), dict(temperature=math.nan), dict(top_k=0)):
        (name,) = changed
        with pytest.raises(ValueError, match=f"generate: {name} must be at least"):
            generate(model, torch.zeros(1, 1, dtype=torch.int64), **dict(max_new_tokens=1) | changed)
    with pytest.raises(ValueError, match=r"at most 32 a row \(max_positions\), got 33"):
        in_parts(model, some_tokens(test_gpt2.SMALL, length=33), [32, 1], new_cache(2, 40))


def test_what_a_model_says_it_offers_it_has():
    offering = {m.name for m in models.discover().values() if m.samples}
    assert offering == {"gpt2", "tiny-llama"} == {m.name for m in models.discover().values() if m.to_hf}
