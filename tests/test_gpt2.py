"""gpt2: its variants are one function, padding takes no probability, and Transformers computes the same from its weights."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from exported import loaded, same_in_float64, transformers_logits

from whet import models
from whet.choices import Choices, Recorder
from whet.models import Recipe
from whet.models.gpt2 import (
    GPT2,
    MODEL,
    SIZES,
    VARIANTS,
    GPT2Config,
    adapt,
    batch,
    canonical,
    from_hf,
    home,
    to_hf,
)
from whet.subjects import oracle
from whet.verify import judge
from whet.workload import Workload, in_precision

SMALL = GPT2Config(vocab=97, width=64, layers=2, heads=4, kv_heads=4, mlp_ratio=2.0, max_positions=32)  # padded to 128 rows
RECIPE = Recipe(batch=2, seq_len=16)
LIKE_GPT2: dict = dict(positions="learned", norm="layer", qk_norm=False, bias=True, activation="gelu_tanh")
VARIETIES = {
    "d12": dict(),
    "gqa-relu2": dict(kv_heads=2, activation="relu2"),
    "mqa-silu-learned-untied": dict(kv_heads=1, activation="silu", positions="learned", tied=False),
    "hybrid": dict(pattern="SL", window=5, qk_norm=False),
    "swiglu-mtp": dict(activation="swiglu", mtp=2, vocab=96),
    "swiglu-bias-softcap": dict(activation="swiglu", bias=True, norm="layer", softcap=3.0),
    "gpt2": LIKE_GPT2,
}
variants = pytest.mark.parametrize("variant", VARIANTS)
varieties = pytest.mark.parametrize("c", [pytest.param(replace(SMALL, **v), id=name) for name, v in VARIETIES.items()])
pytestmark = pytest.mark.usefixtures("one_thread")


def weights(c: GPT2Config, seed: int = 5) -> dict[str, torch.Tensor]:
    """Of the plain variant, all away from their start: where a norm is 1 or a bias 0, a wrong gradient could hide."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name, t):
        if t.dim() == 2:
            return torch.randn(t.shape, generator=generator) * (0.02 if name == "embed.weight" else t.shape[1] ** -0.5)
        return torch.rand(t.shape, generator=generator) + (0.5 if name.endswith("weight") else -0.5)

    return {n: drawn(n, p) for n, p in GPT2(c, "plain").named_parameters()}


def built(c: GPT2Config, variant: str, plain: dict, device: str = "cpu", ops: Choices | None = None) -> GPT2:
    model = GPT2(c, variant, ops)
    model.load(plain)
    return model.to(device)


def evidence(model: GPT2, device: str) -> dict[str, torch.Tensor]:
    found = Workload(model, (), batch(model.c, RECIPE, device)).evidence()
    grads = canonical(model.c, {n.removeprefix("grad "): t for n, t in found.items() if n.startswith("grad ")})
    return {n: t for n, t in found.items() if not n.startswith("grad ")} | {f"grad {n}": t for n, t in grads.items()}


@varieties
@pytest.mark.parametrize("variant, impl", [("plain", "eager"), ("stock", None), ("tuned", None), ("tuned", "triton")])
def test_variants_are_one_function_with_one_set_of_gradients(c, variant, impl, device):
    plain = weights(c)
    truth = oracle(MODEL, c, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(c, "plain", plain, device), device)
    actual = evidence(built(c, variant, plain, device, Choices(default=impl)), device)
    assert set(actual) == set(truth) == set(eager) and all(t.dtype == torch.float64 for t in truth.values())
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why
    assert all(g.any() and torch.isfinite(g).all() for g in actual.values())


@pytest.mark.parametrize("broken", ["norm", "window", "off"])
def test_the_comparison_sees_what_is_wrong(broken, device):
    c = replace(SMALL, pattern="SL", window=5)
    plain = weights(c)
    truth = oracle(MODEL, c, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(c, "plain", plain, device), device)
    model = built(c, "tuned", plain, device)
    with torch.no_grad():
        if broken == "norm":
            model.blocks[1].norm2.weight *= 1.001
        elif broken == "window":
            model.blocks[0].window = 6
        else:
            model.off.zero_()
    assert not judge(evidence(model, device), eager, truth).ok


@variants
@varieties
def test_the_loss_is_the_plain_formula_over_the_logical_vocabulary(c, variant):
    c = replace(c, mtp=0)
    model = built(c, variant, weights(c)).double()
    data = batch(c, RECIPE, "cpu")
    logits = model.logits(data["tokens"])
    assert logits.shape == (RECIPE.batch, RECIPE.seq_len, c.vocab)
    expected = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
    same_in_float64(model(**data).detach(), expected, c)


@pytest.mark.parametrize("changed", [dict(), dict(tied=False), dict(softcap=3.0)], ids=["tied", "untied", "softcap"])
@pytest.mark.parametrize("impl", [None, "triton"])
def test_padded_rows_get_no_gradient_and_stay_zero(changed, impl, device):
    c = replace(SMALL, layers=1, **changed)
    model = GPT2(c, "tuned", Choices(default=impl)).to(device)
    head = model.embed.weight if c.tied else model.head.weight
    assert head.shape == (128, 64) and not head[97:].any() and head[:97].any(1).all()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(**batch(c, RECIPE, device)).backward()
    assert head.grad is not None and not head.grad[97:].any() and head.grad[:97].any(1).all()
    optimizer.step()
    assert not head[97:].any() and head[:97].any(1).all()


@variants
@varieties
def test_adapt_and_canonical_are_inverse_and_show_the_logical_vocabulary(c, variant):
    plain = weights(c)
    own = adapt(c, variant, plain)
    assert {n: t.shape for n, t in own.items()} == {n: p.shape for n, p in GPT2(c, variant).named_parameters()}
    assert own["embed.weight"].shape[0] == (c.vocab if variant == "plain" else 128)
    back = canonical(c, own)
    assert set(back) == set(plain) and all(torch.equal(back[n], t) for n, t in plain.items())


@varieties
def test_every_variant_starts_from_the_same_weights(c):
    first, *others = (canonical(c, dict(GPT2(c, v, seed=3).named_parameters())) for v in VARIANTS)
    for other in others:
        assert set(other) == set(first) and all(torch.equal(other[n], first[n]) for n in first)
    other = canonical(c, dict(GPT2(c, seed=4).named_parameters()))
    assert not any(torch.equal(other[n], t) for n, t in first.items() if t.dim() == 2)


def test_weights_start_small_and_smaller_where_they_enter_the_residual_stream():
    c = replace(SMALL, vocab=257, width=256, layers=8, bias=True, norm="layer")
    for name, t in GPT2(c, "plain").named_parameters():
        if t.dim() == 2:
            std = 0.02 / 4 if name.endswith((".o.weight", ".down.weight")) else 0.02
            assert abs(t.std().item() / std - 1) < 5 / math.sqrt(2 * t.numel()), name  # five standard errors
        else:
            assert torch.equal(t, torch.full_like(t, float(name.endswith("weight")))), name


@variants
def test_initial_loss_is_that_of_a_guess(variant, device):
    for c in (SMALL, replace(SMALL, vocab=1000, kv_heads=1)):
        with torch.no_grad():
            loss = GPT2(c, variant).to(device)(**batch(c, RECIPE, device)).item()
        assert abs(loss - math.log(c.vocab)) < 0.3


@variants
@torch.no_grad()
def test_a_token_sees_its_window_and_nothing_later(variant, device):
    c = replace(SMALL, layers=1, pattern="S", window=4)
    model = GPT2(c, variant).to(device)
    tokens = batch(c, RECIPE, device)["tokens"]
    before = model.logits(tokens)
    tokens[:, 6] = (tokens[:, 6] + 1) % c.vocab
    changed = (model.logits(tokens) != before).any(-1).any(0).nonzero().flatten()
    assert changed.tolist() == [6, 7, 8, 9], "a window of four counts the token itself"


def test_the_pattern_is_cycled_over_the_layers():
    assert replace(SMALL, layers=6, pattern="SSL", window=9).windows == [9, 9, None, 9, 9, None]
    assert SIZES["d12-hybrid"].windows == [256, 256, 256, None] * 3 and not any(SIZES["d12"].windows)


def test_tokens_further_ahead_add_their_losses_in_training_alone():
    c = replace(SMALL, mtp=2, mtp_weight=0.5)
    model, data = built(c, "plain", weights(c)).double(), batch(c, RECIPE, "cpu")
    y, labels = model.hidden(data["tokens"]), data["labels"]
    expected = F.cross_entropy(F.linear(y, model.embed.weight).flatten(0, 1), labels.flatten())
    assert torch.equal(model.eval()(**data), expected)
    for i, ahead in enumerate(model.mtp, 1):  # the token at t predicts the one at t + 1 + i
        z = F.linear(ahead(y, model.ops), model.embed.weight)[:, :-i]
        expected = expected + 0.5 / 2 * F.cross_entropy(z.flatten(0, 1), labels[:, i:].flatten())
    same_in_float64(model.train()(**data), expected, c)
    with pytest.raises(ValueError, match="gpt2: mtp must be less than the 2 tokens of a row, got 2"):
        model(data["tokens"][:, :2], labels[:, :2])


def test_the_made_up_language_is_learned(device):
    c, recipe = replace(SMALL, kv_heads=2, activation="relu2"), Recipe(batch=16, seq_len=16)
    model = GPT2(c).to(device)
    work = Workload(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(60):
        work.kwargs = batch(c, recipe, device, step)
        losses.append(work.step().item())
    assert losses[-1] < losses[0] - 0.8


def test_under_autocast_the_weights_of_the_qk_norm_are_as_the_queries(device):
    """Of another dtype the stock norm refuses them, and a formula of many kernels would serve instead."""
    ops = Recorder()
    model = GPT2(SMALL, "stock", ops).to(device)
    with in_precision("bfloat16", device):
        model(**batch(SMALL, RECIPE, device))
    (call,) = [call for call, _ in ops.calls.values() if call.op == "qk_norm_rope"]
    assert call.dtype == "bfloat16" and "w_dtype" not in call.case


def test_a_narrow_residual_halves_the_bytes_of_the_norms_under_autocast_and_is_nothing_without(device):
    found, losses = {}, {}
    for narrow in (False, True):
        ops = Recorder()
        model = GPT2(replace(SMALL, narrow_residual=narrow), "stock", ops).to(device)
        losses[narrow] = model(**batch(SMALL, RECIPE, device))
        ops.calls.clear()
        with in_precision("bfloat16", device):
            model(**batch(SMALL, RECIPE, device))
        found[narrow] = [call.case.get("res_dtype") for call, _ in ops.calls.values() if call.op == "add_rms_norm"]
    assert found == {False: ["float32"], True: [None]} and torch.equal(losses[False], losses[True])


def test_the_forward_is_one_graph():
    torch._dynamo.reset()
    model, data = GPT2(replace(SMALL, pattern="SL", window=5, mtp=1)), batch(SMALL, RECIPE, "cpu")
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(**data), model(**data))


def test_sizes_are_what_they_are_named_after(monkeypatch):
    monkeypatch.setattr(GPT2, "init_weights", lambda self, seed: None)
    with torch.device("meta"):
        count = {size: sum(p.numel() for p in GPT2(c, "plain").parameters()) for size, c in SIZES.items()}
    layer, embedding = 12 * 768 * 768 + 2 * 768, 50257 * 768
    assert count["hf"] == 124_439_808, "as OpenAI's"
    assert count["d12"] == count["d12-hybrid"] == 12 * layer + embedding + 768 == count["d12-swiglu"]
    assert count["d12"] - count["d12-gqa"] == 12 * 2 * 768 * 512 and count["d12"] - count["d12-mqa"] == 12 * 2 * 768 * 704
    assert count["d12-gqa"] - count["d12-fast"] == 12 * 2 * 768 * 768
    assert (SIZES["llm-med"].head_dim, SIZES["llm-med"].hidden) == (48, 1536) and count["tiny"] < 1e6
    assert models.find("gpt2") == (MODEL, "d12") and set(MODEL.recipes) == set(SIZES)
    assert all(MODEL.recipes[size].seq_len <= c.max_positions for size, c in SIZES.items())


BAD = {
    "vocab must be a whole number from 1 on, got 0": dict(vocab=0),
    "layers must be a whole number from 1 on, got 2.0": dict(layers=2.0),
    "heads must be a whole number from 1 on, got True": dict(heads=True),
    "heads must be a divisor of width 64 / 2, got 5": dict(heads=5),
    "heads must be a divisor of width 64 / 2, got 64": dict(heads=64, kv_heads=64),
    "kv_heads must be a divisor of heads 4, got 3": dict(kv_heads=3),
    "window must be a whole number from 1 on, got 0": dict(window=0),
    "mlp_ratio must be a number above 0, got nan": dict(mlp_ratio=math.nan),
    "mtp must be a whole number from 0 on, got -1": dict(mtp=-1),
    "mtp_weight must be a number above 0, got 0": dict(mtp_weight=0),
    "theta must be a number above 0, got inf": dict(theta=math.inf),
    "eps must be a number above 0, got '1e-6'": dict(eps="1e-6"),
    "softcap must be None or a number above 0, got 0": dict(softcap=0),
    "tied must be true or false, got 1": dict(tied=1),
    "activation must be one of gelu, gelu_tanh, relu2, silu, swiglu, got 'tanh'": dict(activation="tanh"),
    "positions must be 'rope' or 'learned', got 'alibi'": dict(positions="alibi"),
    "norm must be 'rms' or 'layer', got None": dict(norm=None),
    "pattern must be letters S and L, such as SSSL, got 'SXL'": dict(pattern="SXL"),
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(said):
    with pytest.raises(ValueError) as e:
        replace(SMALL, **BAD[said])
    assert str(e.value) == f"gpt2: {said}"


def test_what_does_not_fit_is_refused_by_name():
    model, plain = GPT2(SMALL), weights(SMALL)
    with pytest.raises(ValueError, match="variant must be one of plain, stock, tuned, got 'v3'"):
        GPT2(SMALL, "v3")
    with pytest.raises(ValueError, match=r"at most 32 a row \(max_positions\), got 33"):
        model.logits(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"parameter embed.weight: expected \(97, 64\), got \(128, 64\)"):
        model.load(plain | {"embed.weight": torch.zeros(128, 64)})
    with pytest.raises(ValueError, match=r"parameter head.weight: expected none, got \(97, 64\)"):
        model.load(plain | {"head.weight": plain["embed.weight"]})


HOMES: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", LIKE_GPT2),
    "gpt2-untied-no-bias-relu2": ("GPT2", LIKE_GPT2 | dict(tied=False, bias=False, activation="relu2")),
    "llama": ("Llama", dict(activation="swiglu", qk_norm=False, kv_heads=2, theta=500.0)),
    "llama-bias": ("Llama", dict(activation="swiglu", qk_norm=False, bias=True, tied=False)),
    "qwen3-hybrid": ("Qwen3", dict(activation="swiglu", pattern="SL", window=5, kv_heads=2, mtp=1)),
    "d12": ("Apertus", dict()),
    "d12-fast": ("Apertus", dict(kv_heads=2, mlp_ratio=3.0, activation="relu2")),
    "llm-med": ("Arcee", dict(activation="silu", qk_norm=False)),
}


@pytest.mark.parametrize("name", HOMES)
def test_transformers_loads_what_is_exported_and_computes_the_same(name, tmp_path):
    family, changed = HOMES[name]
    c = replace(SMALL, **changed)
    ours, tokens = built(c, "tuned", weights(c)), torch.randint(c.vocab, (2, 24))
    config, state = to_hf(c, dict(ours.named_parameters()))
    assert home(c) == family and config["architectures"][0].startswith(family)
    theirs = loaded(tmp_path, config, state)
    ours.double()
    same_in_float64(ours.logits(tokens), transformers_logits(theirs, ours, tokens), c)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_transformers_gpt2_load_and_give_the_same_logits(tied):
    transformers = pytest.importorskip("transformers")
    c, tokens = replace(SMALL, **LIKE_GPT2, tied=tied, eps=1e-5), torch.randint(SMALL.vocab, (2, 24))
    config = transformers.GPT2Config(
        vocab_size=c.vocab, n_positions=c.max_positions, n_embd=c.width, n_layer=c.layers, n_head=c.heads, n_inner=c.hidden,
        tie_word_embeddings=tied,
    )
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape) * p.shape[0] ** -0.5 if p.dim() == 2 else torch.rand(p.shape) + 0.5)
    state = theirs.state_dict()
    plain = from_hf(state, c)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(c.layers)}  # as in OpenAI's checkpoint
    bare = from_hf({n.removeprefix("transformer."): t for n, t in state.items()} | masks, c)
    assert set(bare) == set(plain) and all(torch.equal(bare[n], t) for n, t in plain.items())
    for variant in VARIANTS:
        ours = built(c, variant, plain).double()
        same_in_float64(ours.logits(tokens), transformers_logits(theirs, ours, tokens), c)
    again = from_hf(to_hf(c, dict(built(c, "stock", plain).named_parameters()))[1], c)
    assert set(again) == set(plain) and all(torch.equal(again[n], t) for n, t in plain.items())


HOMELESS = {
    "norm 'layer' has no counterpart in Apertus": dict(norm="layer"),
    "bias True has no counterpart in Apertus": dict(bias=True),
    "pattern 'SL' has no counterpart in Arcee": dict(pattern="SL", qk_norm=False),
    "softcap 15.0 has no counterpart in Qwen3": dict(softcap=15.0, activation="swiglu"),
    "norm 'rms' has no counterpart in GPT2": dict(positions="learned"),
    "qk_norm True has no counterpart in GPT2": LIKE_GPT2 | dict(qk_norm=True),
    "activation 'swiglu' has no counterpart in GPT2": LIKE_GPT2 | dict(activation="swiglu"),
    "kv_heads 2 has no counterpart in GPT2": LIKE_GPT2 | dict(kv_heads=2),
}


@pytest.mark.parametrize("said", HOMELESS)
def test_what_transformers_cannot_hold_is_refused_by_the_name_of_the_field(said):
    c = replace(SMALL, **HOMELESS[said])
    with pytest.raises(ValueError, match=f"gpt2: {said}"):
        to_hf(c, weights(c))


def test_weights_of_gpt2_want_its_configuration():
    with pytest.raises(ValueError, match="need positions 'learned' and bias, got 'rope' and False"):
        from_hf({}, SMALL)
