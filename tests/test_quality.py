"""Nearness to float32: the numbers by hand, every token once, paired verdicts, and mutants that must be told as worse."""

import json
import math
from dataclasses import replace

import pytest
import torch

from whet.decode.bench import quality
from whet.decode.bench.quality import Scores, cached, compare_quants, float32_reference, not_worse, plain, score, text_sample
from whet.decode.load import HF_NAMES, places
from whet.decode.quantize import quantize
from whet.models.qwen3 import SIZES, Qwen3, random_weights

SMALL = replace(SIZES["tiny"], vocab=128, hidden=128, heads=2, kv_heads=1, ffn=256, max_positions=256, tied=False)


def model(dtype=torch.bfloat16, **fields) -> Qwen3:
    """Random weights, larger than a fresh model's: predictions have peaks, and attention matters."""
    m = random_weights(replace(SMALL, **fields), variant="plain", dtype=dtype)
    with torch.no_grad():
        m.head.data *= 10
        for layer in m.layers:
            layer.qkv.data *= 6
            layer.o.data *= 6
    return m.requires_grad_(False)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.tensor([ord(ch) % SMALL.vocab for ch in text_sample(1201)])


@pytest.fixture(scope="module")
def scored(text) -> dict[str, Scores]:
    torch.manual_seed(0)
    m = model()
    small = quantized_copy(m, "int4")
    candidates = {
        "plain": plain(m), "step": cached(m, chunk=8), "extend": cached(m, chunk=7, fused=False),
        "theta": plain(mutant(m, theta=1e4)), "eps": plain(mutant(m, eps=0.05)), "int4": plain(small),
        "late": lambda t: m(torch.cat([t[:, :1], t[:, :-1]], dim=1)),
        "NaN": lambda t: m(t).index_fill(1, torch.tensor([3]), math.nan),
        "rare flip": lambda t: flipped(m(t), every=50),
        "a little noisy": lambda t: m(t) + 0.01 * torch.randn(SMALL.vocab),
    }
    return score(candidates, plain(float32_reference(m)), text, window=128, batch=4)


def mutant(m: Qwen3, **fields) -> Qwen3:
    other = Qwen3(replace(m.c, **fields), "plain", dtype=torch.bfloat16)
    other.load_state_dict(m.state_dict())
    return other


def quantized_copy(m: Qwen3, quant: str) -> Qwen3:
    other = mutant(m)
    quantize(other, quant)
    return other


def flipped(logits: torch.Tensor, every: int) -> torch.Tensor:
    """The two largest change places at every so many tokens."""
    values, at = logits[:, ::every].topk(2, dim=-1)
    changed = logits.clone()
    changed[:, ::every] = logits[:, ::every].scatter(-1, at, values.flip(-1))
    return changed


def test_numbers_are_those_of_the_formulas(monkeypatch):
    wide, ours, tokens = torch.randn(5, 7), torch.randn(5, 7), torch.tensor([3, 1, 6, 0, 2, 2])
    monkeypatch.setattr(quality, "ROW_BLOCK", 14)
    s = score({"x": lambda t: ours[None]}, lambda t: wide[None], tokens)["x"]
    for i in range(5):
        p, q = wide[i].double().softmax(0), ours[i].double().softmax(0)
        by_hand = sum(p[v] * (p[v] / q[v]).log() for v in range(7))
        first, second = wide[i].sort(descending=True).values[:2]
        assert torch.isclose(s.kl[i], by_hand) and torch.isclose(s.nll[i], -q[tokens[i + 1]].log())
        assert torch.isclose(s.reference_nll[i], -p[tokens[i + 1]].log())
        assert s.margin[i] == (first.double() - second.double()) and s.agrees[i] == (p.argmax() == q.argmax())
        assert s.error[i] == max((ours[i].double() - wide[i].double()).abs())
    told = s.as_dict()
    assert told["tokens"] == 5 and math.isclose(told["perplexity"], math.exp(s.nll.mean()))
    assert math.isclose(told["kl_error"], s.kl.std().item() / 5**0.5)
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("window, batch", [(512, 1), (40, 1), (40, 3), (7, 4), (1, 100), (200, 2)])
def test_every_token_but_the_first_is_predicted_once(window, batch):
    """A candidate that looks at one token only gives the same in any windows; no call is given more than it should be."""
    table, wide, tokens = torch.randn(11, 11), torch.randn(11, 11), torch.randint(11, (201,))
    asked = []

    def looks_back_once(t):
        asked.append(t.numel())
        return table[t]

    s = score({"x": looks_back_once}, lambda t: wide[t], tokens, window=window, batch=batch)["x"]
    expected = torch.nn.functional.cross_entropy(table.double()[tokens[:-1]], tokens[1:], reduction="none")
    assert torch.equal(s.tokens, tokens[1:]) and (s.nll - expected).abs().max() < 100 * torch.finfo(torch.float64).eps
    assert sum(asked) == 200 and max(asked) <= window * batch


def test_model_against_itself_is_perfect(text):
    m = float32_reference(model())
    s = score({"same": plain(m)}, plain(m), text[:300], window=100)["same"]
    assert not s.kl.any() and not s.error.any() and s.top1(s.error) == 1
    assert not_worse(s, s).ok


def test_float32_reference_has_the_weights_and_keeps_the_tie():
    for tied in (True, False):
        m = model(tied=tied)
        wide = float32_reference(m)
        assert (wide.head.data is wide.embed) == tied and wide.variant == "plain"
        for name, t in wide.state_dict().items():
            assert t.dtype == torch.float32 and torch.equal(t.bfloat16(), m.state_dict()[name])
    with pytest.raises(ValueError, match=r"^float32_reference: layers.0.qkv is int8, expected weights that are not quantised"):
        float32_reference(quantized_copy(m, "int8"))


def test_cached_paths_are_as_near_as_the_plain_one(scored):
    for a, b in (("plain", "extend"), ("extend", "plain"), ("step", "plain")):
        verdict = not_worse(scored[a], scored[b])
        assert verdict.ok and not verdict.why and verdict.top1 == 1, verdict
        assert verdict.tokens == 1200 and verdict.decided > 600
    assert (scored["plain"].error > 0).all(), "bfloat16 without error: the reference is not float32"


MUTANTS = {
    "theta": "KL", "eps": "KL", "late": "KL", "int4": "KL", "NaN": "KL nan", "rare flip": "top-1 differs",
    "a little noisy": "KL",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_told_as_worse(scored, name):
    verdict = not_worse(scored[name], scored["plain"])
    assert not verdict.ok and MUTANTS[name] in verdict.why
    assert name == "NaN" or json.loads(json.dumps(verdict.as_dict()))["ok"] is False


def test_ours_is_not_worse_than_transformers_in_bfloat16(text):
    """And a wrong theta is, also where Transformers sets the noise: the proof that a fused path has to pass."""
    transformers = pytest.importorskip("transformers", reason="compares with Transformers, which is not installed")
    m, c = model(), SMALL
    config = transformers.Qwen3Config(
        vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        intermediate_size=c.ffn, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.eps,
        max_position_embeddings=c.max_positions, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=c.theta),
    )
    hf = transformers.Qwen3ForCausalLM(config).bfloat16().eval()
    hf.load_state_dict(places(m, HF_NAMES))
    candidates = dict(ours=cached(m, chunk=8), wrong=plain(mutant(m, theta=1e4)), theirs=lambda t: hf(t).logits)
    found = score(candidates, plain(float32_reference(m)), text[:600], window=64, batch=5)
    assert not_worse(found["ours"], found["theirs"]).ok, not_worse(found["ours"], found["theirs"]).why
    verdict = not_worse(found["wrong"], found["theirs"])
    assert not verdict.ok and verdict.kl.worse and verdict.nll.worse and verdict.top1 < 1


def test_verdict_says_what_it_could_have_seen():
    """A tenth more KL is seen over many tokens, and not over few; with few, the least that would be seen is larger."""
    def made(name, n, kl):
        flat = torch.ones(n, dtype=torch.float64)
        return Scores(name, torch.arange(n), flat, flat, kl, flat, 9 * flat, flat > 0)

    for n, ok in ((50, True), (20000, False)):
        theirs = torch.rand(n, dtype=torch.float64)
        ours = 1.1 * torch.rand(n, dtype=torch.float64)
        verdict = not_worse(made("ours", n, ours), made("theirs", n, theirs))
        assert verdict.ok is ok and (verdict.kl.seen_from > 0.05) is ok
        assert math.isclose(verdict.kl.standard_error, (ours - theirs).std().item() / n**0.5)


def test_top1_counts_only_where_the_margin_exceeds_the_noise():
    one = torch.ones(4, dtype=torch.float64)
    margin, agrees = torch.tensor([3.0, 1.0, 5.0, 2.0]), torch.tensor([True, False, False, True])
    s = Scores("x", torch.arange(4), one, one, one, one, margin, agrees)
    assert s.top1(one) == 0.5 and s.decided(one).tolist() == [True, False, True, False]  # 2 is not above twice 1
    assert s.top1(10 * one) is None and s.as_dict(10 * one)["decided"] == 0


def test_quants_are_ranked_by_their_bits(text):
    found = compare_quants(model, text[:400], window=128, batch=3)
    assert list(found) == ["bfloat16", "int8", "int4", "fp8"]
    kl = {name: s.as_dict(found["bfloat16"].error)["kl"] for name, s in found.items()}
    assert 0 < kl["int8"] < kl["fp8"] < kl["int4"]
    assert not_worse(found["bfloat16"], found["int4"]).ok and not not_worse(found["int4"], found["bfloat16"]).ok


def test_quants_run_by_the_path_that_is_asked_for(text):
    asked = []

    def run(m):
        asked.append(m.head.scale is not None)
        return cached(m, chunk=64, fused=False)

    assert list(compare_quants(model, text[:65], quants=["int8"], run=run)) == ["bfloat16", "int8"]
    assert asked == [False, True]


def test_reference_is_computed_without_tf32(text):
    seen = []
    torch.set_float32_matmul_precision("high")
    try:
        look = torch.get_float32_matmul_precision
        score({"x": lambda t: seen.append(look()) or t[..., None] * torch.ones(9)},
              lambda t: seen.append(look()) or t[..., None] * torch.ones(9), text[:9] % 9)
        assert seen == ["highest", "high"] and look() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_text_is_real_long_enough_and_always_the_same():
    text = text_sample(20000)
    assert len(text) == 20000 and text == text_sample(20000) and text.startswith(text_sample(37))
    assert sum(ch.isalpha() or ch.isspace() for ch in text) > 16000 and " the " in text
    assert len(text_sample(300000)) == 300000
    with pytest.raises(ValueError, match=r"^text_sample: n_chars must be at most \d+, which is all there is, got 1000000000$"):
        text_sample(10**9)
    with pytest.raises(ValueError, match="^text_sample: n_chars must be at least 1, got 0$"):
        text_sample(0)


def test_refusals_name_what_is_wrong(text, scored):
    m = model()
    with pytest.raises(ValueError, match=r"^score: tokens must be one row of at least 2, got shape \(1,\)$"):
        score({}, plain(m), [5])
    with pytest.raises(ValueError, match=r"^score: short must give logits \(1, 9, 128\), got \(1, 8, 128\)$"):
        score({"short": lambda t: m(t)[:, 1:]}, plain(m), text[:10])
    with pytest.raises(ValueError, match="^score: window and batch must be at least 1, got 0 and 1$"):
        score({}, plain(m), text, window=0)
    with pytest.raises(ValueError, match="^cached: chunk must be at least 1 token, got 0$"):
        cached(m, chunk=0, fused=False)
    other = score({"other": plain(m)}, plain(m), text[:50])["other"]
    with pytest.raises(ValueError, match="^not_worse: other and plain must be scored on one text .*, got 49 and 1200 tokens$"):
        not_worse(other, scored["plain"])
