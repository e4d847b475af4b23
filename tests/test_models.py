"""tiny-llama: its variants are one function, every gradient is alive, it learns, and it says what it was given wrongly."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from exported import loaded, same_in_float64, transformers_logits

from whet import models
from whet.choices import Choices
from whet.models import Recipe
from whet.models.tiny_llama import (
    MODEL,
    VARIANTS,
    TinyLlama,
    TinyLlamaBlock,
    TinyLlamaConfig,
    adapt,
    batch,
    canonical,
    main,
    to_hf,
    train,
)
from whet.subjects import oracle
from whet.verify import judge

SMALL = TinyLlamaConfig(hidden=64, layers=2, heads=4, kv_heads=2, vocab=97)
RECIPE = Recipe(batch=2, seq_len=16)
ONE_HEAD_EACH = replace(SMALL, kv_heads=4)  # no grouping
variants = pytest.mark.parametrize("variant", VARIANTS)


pytestmark = pytest.mark.usefixtures("one_thread")


def weights(c: TinyLlamaConfig) -> dict[str, torch.Tensor]:
    """Of the plain variant; norms away from 1, where a wrong gradient through the weight cannot hide."""
    named = {n: p.detach().clone() for n, p in TinyLlama(c, "v1").named_parameters()}
    generator = torch.Generator().manual_seed(5)
    return {n: t if t.dim() == 2 else torch.rand(t.shape, generator=generator) + 0.5 for n, t in named.items()}


def built(c: TinyLlamaConfig, variant: str, plain: dict, device: str, ops: Choices | None = None) -> TinyLlama:
    model = TinyLlama(c, variant, ops)
    named = dict(model.named_parameters())
    own = adapt(c, variant, plain)
    assert set(own) == set(named)
    with torch.no_grad():
        for name, value in own.items():
            named[name].copy_(value)
    return model.to(device)


def evidence(model: TinyLlama, device: str) -> dict[str, torch.Tensor]:
    loss = model(**batch(model.c, RECIPE, device))
    loss.backward()
    grads = canonical(model.c, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return {"output loss": loss.detach()} | {f"grad {n}": g for n, g in grads.items()}


@pytest.mark.parametrize("c", [pytest.param(SMALL, id="grouped"), pytest.param(ONE_HEAD_EACH, id="ungrouped")])
@pytest.mark.parametrize("variant, impl", [("v1", "eager"), ("v2", None), ("v3", "eager"), ("v3", None), ("v3", "triton")])
def test_variants_are_one_function_with_one_set_of_gradients(c, variant, impl, device):
    plain = weights(c)
    truth = oracle(MODEL, c, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(c, "v1", plain, device), device)
    actual = evidence(built(c, variant, plain, device, Choices(default=impl)), device)
    assert set(actual) == set(truth) == set(eager)
    assert all(t.dtype == torch.float64 for t in truth.values())
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why


def test_the_comparison_would_see_a_single_scaled_norm(device):
    plain = weights(SMALL)
    truth = oracle(MODEL, SMALL, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(SMALL, "v1", plain, device), device)
    off = evidence(built(SMALL, "v3", plain | {"blocks.1.norm2": plain["blocks.1.norm2"] * 1.001}, device), device)
    assert not judge(off, eager, truth).ok


@variants
def test_adapt_and_canonical_are_inverse(variant):
    plain = weights(SMALL)
    own = adapt(SMALL, variant, plain)
    assert set(own) == {n for n, _ in TinyLlama(SMALL, variant).named_parameters()}
    back = canonical(SMALL, own)
    assert set(back) == set(plain)
    assert all(torch.equal(back[n], t) for n, t in plain.items())


def test_every_variant_starts_from_the_same_weights():
    first, *others = (canonical(SMALL, dict(TinyLlama(SMALL, v).named_parameters())) for v in VARIANTS)
    for other in others:
        assert set(other) == set(first) and all(torch.equal(other[n], first[n]) for n in first)


@variants
def test_initial_loss_is_that_of_a_guess(variant, device):
    for c, recipe in ((SMALL, RECIPE), (TinyLlamaConfig(layers=2), Recipe(batch=2, seq_len=32))):
        with torch.no_grad():
            loss = TinyLlama(c, variant).to(device)(**batch(c, recipe, device)).item()
        assert abs(loss - math.log(c.vocab)) < 0.3


def test_labels_are_the_tokens_shifted_exactly_once():
    data = batch(SMALL, RECIPE, "cpu")
    assert data["tokens"].shape == data["labels"].shape == (RECIPE.batch, RECIPE.seq_len)
    assert torch.equal(data["labels"][:, :-1], data["tokens"][:, 1:])
    assert data["tokens"].min() >= 0 and data["labels"].max() < SMALL.vocab
    assert torch.equal(data["tokens"], batch(SMALL, RECIPE, "cpu")["tokens"]), "the same step must give the same batch"
    assert not torch.equal(data["tokens"], batch(SMALL, RECIPE, "cpu", step=1)["tokens"])


def test_the_future_is_masked(device):
    """A later token changes no earlier position: the loss over the first half depends on the first half alone."""
    for variant in VARIANTS:
        model = TinyLlama(SMALL, variant).to(device)
        data = batch(SMALL, RECIPE, device)
        half = RECIPE.seq_len // 2
        data["labels"][:, half:] = -100
        loss = model(**data)
        data["tokens"][:, half:] = (data["tokens"][:, half:] + 1) % SMALL.vocab
        assert torch.equal(model(**data), loss), variant


@variants
def test_every_parameter_has_a_gradient(variant, device):
    model = TinyLlama(SMALL, variant).to(device)
    model(**batch(SMALL, RECIPE, device)).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or not torch.isfinite(p.grad).all()]
    assert not dead


@pytest.mark.parametrize("variant", ["v1", "v3"])
def test_the_made_up_language_is_learned(variant, device):
    recipe = replace(RECIPE, batch=16, lr=1e-2)
    first = train(SMALL, recipe, variant, 1, device)["loss"]
    last = train(SMALL, recipe, variant, 60, device)["loss"]
    assert first > math.log(SMALL.vocab) - 0.3
    assert last < first - 0.8


@pytest.mark.parametrize(
    "method, cut, name",
    [
        ("attend", lambda y, *rest: (y.detach(), *rest), "blocks.0.norm1"),
        ("mlp", lambda y, *rest: (y * 0, *rest), "blocks.0.norm2"),
    ],
    ids=["detached", "zero"],
)
def test_training_stops_with_the_name_of_a_parameter_without_gradient(method, cut, name, monkeypatch, device):
    original = getattr(TinyLlamaBlock, method)
    monkeypatch.setattr(TinyLlamaBlock, method, lambda self, *args: original(self, *cut(*args)))
    with pytest.raises(RuntimeError, match=rf"tiny-llama\[v2\]: no gradient reaches .*{name}.* in all"):
        train(SMALL, RECIPE, "v2", 2, device)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: models.find("gpt-9"), "unknown model 'gpt-9'; there are .*tiny-llama"),
        (lambda: models.find("tiny-llama:huge"), "tiny-llama has no size 'huge'; there are small, tiny, medium, large"),
        (lambda: TinyLlama(SMALL, "v4"), "variant must be one of v1, v2, v3, got 'v4'"),
        (lambda: TinyLlama(replace(SMALL, heads=5)), "hidden 64 must split into 5 heads"),
        (lambda: TinyLlama(replace(SMALL, heads=0)), "hidden 64 must split into 0 heads"),
        (lambda: TinyLlama(replace(SMALL, kv_heads=3)), "into 3 groups"),
        (lambda: train(SMALL, RECIPE, "v1", 0, "cpu"), "steps must be at least 1, got 0"),
        (lambda: train(SMALL, replace(RECIPE, batch=0), "v1", 1, "cpu"), "batch must be at least 1, got 0"),
    ],
    ids=["model", "size", "variant", "heads", "no-heads", "groups", "steps", "batch"],
)
def test_errors_name_the_argument_and_the_choices(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_sizes_are_found_by_name_and_the_first_is_the_default():
    assert models.find("tiny-llama") == (MODEL, "small") == models.find("tiny-llama:small")
    c = MODEL.sizes["tiny"]
    assert (c.hidden, c.layers, c.heads, c.kv_heads, c.vocab) == (256, 4, 8, 4, 1000)


def test_the_script_prints_every_summary_line():
    options = "--batch-size 2 --seq-len 16 --num-steps 2 --hidden-dim 64 --num-layers 1 --num-heads 2"
    done = subprocess.run([sys.executable, "-m", "whet.models.tiny_llama", *options.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert abs(float(said["Final loss"]) - math.log(1000)) < 0.3
    speed, unit = said["Average training speed"].split()
    assert float(speed) > 0 and unit == "samples/sec"
    for part in ("batch", "forward", "backward", "optimizer"):
        value, unit = said[f"Average {part} time"].split()
        assert float(value) > 0 and unit == "ms"
    assert said["Peak memory usage"] == "not measured on a CPU" or said["Peak memory usage"].endswith(" MB")


@pytest.mark.parametrize(
    "option, said", [("--num-steps=0", "steps must be at least 1"), ("--num-heads=5", "5 heads"), ("--variant=v9", "v1")]
)
def test_the_script_says_in_one_line_what_is_wrong(option, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tiny_llama", option])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@variants
@pytest.mark.parametrize("c", [pytest.param(SMALL, id="grouped"), pytest.param(ONE_HEAD_EACH, id="ungrouped")])
def test_transformers_loads_what_is_exported_and_computes_the_same(c, variant, tmp_path):
    c = replace(c, theta=500.0, eps=1e-4, ffn_mult=3, max_positions=32)
    ours, tokens = built(c, variant, weights(c), "cpu"), torch.randint(c.vocab, (2, 24))
    theirs = loaded(tmp_path, *to_hf(c, dict(ours.named_parameters())))
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.config.rope_parameters["rope_theta"] == 500.0
    ours.double()
    same_in_float64(ours.logits(tokens), transformers_logits(theirs, ours, tokens), c)


@variants
def test_the_loss_is_the_cross_entropy_of_the_logits(variant):
    c = replace(SMALL, max_positions=32)
    model, data = built(c, variant, weights(c), "cpu").double(), batch(c, RECIPE, "cpu")
    logits = model.logits(data["tokens"])
    same_in_float64(model(**data).detach(), torch.nn.functional.cross_entropy(logits.mT, data["labels"]), c)


def test_a_target_may_say_its_batch():
    from whet.models import recipe_of
    from whet.subjects import subject_of

    assert (recipe_of("tiny-llama:tiny@2x16").batch, recipe_of("tiny-llama:tiny@2x16").seq_len) == (2, 16)
    subject = subject_of("tiny-llama:tiny@2x16")
    assert subject.name == "tiny-llama:tiny@2x16" and subject.samples == 2 and "batch=2" in subject.config
    for bad in ("tiny-llama:tiny@", "tiny-llama:tiny@4", "tiny-llama:tiny@0x4", "tiny-llama:tiny@4xx"):
        with pytest.raises(ValueError, match="rows and the tokens of a batch"):
            recipe_of(bad)


def test_the_oracle_of_a_batch_in_parts_is_that_of_the_whole(device):
    plain = {n: t.to(device) for n, t in weights(SMALL).items()}
    whole, parts = (oracle(MODEL, SMALL, RECIPE, plain, device, rows) for rows in (None, 1))
    assert RECIPE.batch > 1 and set(whole) == set(parts)
    for name, t in whole.items():
        torch.testing.assert_close(parts[name], t)
