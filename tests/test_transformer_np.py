"""transformer-np: its variants are one function, targets see the context alone, and the padding inside its MLPs stays zero."""

import collections
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from whet.choices import Choices
from whet.models import _chunked, recipe_of, transformer_np
from whet.models.transformer_np import (
    DOWN,
    MODEL,
    UP,
    VARIANTS,
    TransformerNP,
    TransformerNPConfig,
    adapt,
    batch,
    canonical,
)
from whet.subjects import oracle, subject_of
from whet.train.optim import make
from whet.verify import judge

SMALL = TransformerNPConfig(width=32, layers=2, heads=2, ffn=21, components=3)  # 21 is padded to 64
RECIPE = replace(MODEL.recipes["tiny"], batch=2)
variants = pytest.mark.parametrize("variant", VARIANTS)

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(c: TransformerNPConfig) -> dict[str, torch.Tensor]:
    """Of the plain variant; norms away from 1, where a wrong gradient through the weight cannot hide."""
    named = {n: p.detach().clone() for n, p in TransformerNP(c, "plain").named_parameters()}
    generator = torch.Generator().manual_seed(5)
    return {n: t if t.dim() > 1 else torch.rand(t.shape, generator=generator) + 0.5 for n, t in named.items()}


def built(c: TransformerNPConfig, variant: str, plain: dict, device: str, ops: Choices | None = None) -> TransformerNP:
    model = TransformerNP(c, variant, ops)
    model.load(plain)
    return model.to(device)


def evidence(model: TransformerNP, device: str) -> dict[str, torch.Tensor]:
    loss = model(**batch(model.c, RECIPE, device))
    loss.backward()
    grads = canonical(model.c, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return {"output loss": loss.detach()} | {f"grad {n}": g for n, g in grads.items()}


@pytest.mark.parametrize("variant, impl", [
    ("plain", "eager"), ("stock", None), ("tuned", "eager"), ("tuned", None), ("tuned", "triton"),
])
def test_variants_are_one_function_with_one_set_of_gradients(variant, impl, device):
    plain = weights(SMALL)
    truth = oracle(MODEL, SMALL, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(SMALL, "plain", plain, device), device)
    actual = evidence(built(SMALL, variant, plain, device, Choices(default=impl)), device)
    assert set(actual) == set(truth) == set(eager)
    assert all(t.dtype == torch.float64 for t in truth.values())
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why


def test_variants_agree_in_float64(device):
    plain = weights(SMALL)
    first, *others = (evidence(built(SMALL, v, plain, device).double(), device) for v in VARIANTS)
    for other in others:
        assert set(other) == set(first)
        for name, t in first.items():
            torch.testing.assert_close(other[name], t)


@pytest.mark.parametrize("context", [5, 33], ids=["few", "most"])
def test_variants_agree_where_few_points_are_context_and_where_most_are(context, device, monkeypatch):
    """Of few, k and v are projected apart from q; the last layer computes the targets alone."""
    monkeypatch.setitem(globals(), "RECIPE", replace(RECIPE, context=context))
    plain, rows = weights(SMALL), []
    first = evidence(built(SMALL, "plain", plain, device).double(), device)
    model = built(SMALL, "tuned", plain, device).double()
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    found = evidence(model, device)
    assert rows == [RECIPE.seq_len, RECIPE.seq_len - context]
    for name, t in first.items():
        torch.testing.assert_close(found[name], t)


@pytest.mark.parametrize("rows_at_once", [1, 7, 40], ids="{} rows".format)
def test_in_chunks_of_rows_the_heads_have_the_loss_and_the_gradients_of_all_at_once(rows_at_once, device, monkeypatch):
    plain = weights(SMALL)
    data = batch(SMALL, RECIPE, device)
    whole, chunked = (built(SMALL, "tuned", plain, device).double() for _ in range(2))
    data = {name: t.double() for name, t in data.items()}
    (3 * whole(**data)).backward()
    monkeypatch.setattr(_chunked, "CHUNK_BYTES", rows_at_once * SMALL.components * 64 * 8)
    seen = []
    chunked.heads.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    (3 * chunked(**data)).backward()
    count, rows = -(-data["targets"].numel() // rows_at_once), data["targets"].numel()
    assert sum(seen) == (rows if count > 2 else RECIPE.batch) and max(seen) <= rows_at_once
    for (name, p), other in zip(whole.named_parameters(), chunked.parameters()):
        torch.testing.assert_close(other.grad, p.grad, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(chunked(**data), whole(**data))


def test_chunks_leave_out_what_is_frozen_and_refuse_a_second_derivative(device, monkeypatch):
    monkeypatch.setattr(_chunked, "CHUNK_BYTES", 1)
    model, data = built(SMALL, "tuned", weights(SMALL), device), batch(SMALL, RECIPE, device)
    model.heads.up.requires_grad_(False)
    with pytest.raises(RuntimeError, match="a mean in chunks has no second derivative"):
        torch.autograd.grad(model(**data), [model.heads.down], create_graph=True)
    model(**data).backward()
    assert model.heads.up.grad is None and model.heads.down.grad.any() and model.embed.weight.grad.any()


def test_the_oracle_attends_in_blocks_where_scores_are_many(device, monkeypatch):
    plain = weights(SMALL)
    whole = evidence(built(SMALL, "plain", plain, device).double(), device)
    monkeypatch.setattr(transformer_np, "ORACLE_SCORES", RECIPE.batch * SMALL.heads * RECIPE.context * 7)  # 7 of 40 queries
    blocks, materialised = [], transformer_np.attention
    monkeypatch.setattr(transformer_np, "attention", lambda q, k, v: blocks.append(q.shape[2]) or materialised(q, k, v))
    found = evidence(built(SMALL, "plain", plain, device).double(), device)
    assert sorted(blocks) == sorted([7, 7, 7, 7, 7, 5] * SMALL.layers * 2), "once forward, once more in the backward"
    for name, t in whole.items():
        torch.testing.assert_close(found[name], t)
    evidence(built(SMALL, "plain", plain, device), device)
    assert len(blocks) == 12 * SMALL.layers + SMALL.layers, "in float32 it is whole"


def test_the_comparison_would_see_a_single_scaled_norm(device):
    plain = weights(SMALL)
    truth = oracle(MODEL, SMALL, RECIPE, {n: t.to(device) for n, t in plain.items()}, device)
    eager = evidence(built(SMALL, "plain", plain, device), device)
    off = evidence(built(SMALL, "tuned", plain | {"blocks.1.norm2": plain["blocks.1.norm2"] * 1.001}, device), device)
    assert not judge(off, eager, truth).ok


@variants
def test_adapt_and_canonical_are_inverse_and_every_variant_starts_alike(variant):
    plain = weights(SMALL)
    own = adapt(SMALL, variant, plain)
    model = TransformerNP(SMALL, variant)
    assert {n: t.shape for n, t in own.items()} == {n: p.shape for n, p in model.named_parameters()}
    back = canonical(SMALL, own)
    assert set(back) == set(plain) and all(torch.equal(back[n], t) for n, t in plain.items())
    first = dict(TransformerNP(SMALL, "plain").named_parameters())
    drawn = canonical(SMALL, dict(model.named_parameters()))
    assert set(drawn) == set(first) and all(torch.equal(drawn[n], t) for n, t in first.items())


@variants
def test_a_file_with_the_logical_widths_loads_into_every_variant(variant, tmp_path):
    trained = TransformerNP(SMALL, "tuned", seed=7)
    named = {n: t.detach().contiguous() for n, t in canonical(SMALL, dict(trained.named_parameters())).items()}
    assert named["blocks.0.mlp.up.weight"].shape == (21, 32) and named["heads.down"].shape == (3, 3, 21)
    save_file(named, tmp_path / "model.safetensors")
    model = TransformerNP(SMALL, variant)
    model.load(load_file(tmp_path / "model.safetensors"))
    data = batch(SMALL, RECIPE, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(**data), trained(**data))
    with pytest.raises(ValueError, match=r"parameter blocks.0.mlp.up.weight: expected \(21, 32\), got \(64, 32\)"):
        model.load(dict(named, **{"blocks.0.mlp.up.weight": torch.zeros(64, 32)}))


def padding(c: TransformerNPConfig, named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    rows = [t[..., c.ffn :, :] for n, t in named.items() if n.endswith(UP)]
    return rows + [t[..., c.ffn :] for n, t in named.items() if n.endswith(DOWN)]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("impl", [None, "eager"])
def test_the_padding_gets_no_gradient_and_no_optimizer_moves_it(kind, impl, device):
    model = TransformerNP(SMALL, "tuned", Choices(default=impl)).to(device)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = make(model, kind=kind, lr=1e-2, weight_decay=0.1)
    for step in range(8):
        model(**batch(SMALL, RECIPE, device, step)).backward()
        grads = padding(SMALL, {n: p.grad for n, p in model.named_parameters()})
        assert all(not g.any() and g.numel() for g in grads)
        optimizer.step()
        optimizer.zero_grad()
    named = {n: p.detach() for n, p in model.named_parameters()}
    assert len(padding(SMALL, named)) == 2 * (SMALL.layers + 1)
    assert all(not t.any() for t in padding(SMALL, named))
    assert all(not torch.equal(t, before[n]) for n, t in named.items())


@pytest.mark.parametrize("wrong", ["blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "heads.up", "heads.down"])
def test_the_padding_test_would_see_a_width_that_is_not_zero(wrong):
    """With one side filled the other gets a gradient: what is tested is that both are zero."""
    model = TransformerNP(SMALL, "tuned", Choices())
    with torch.no_grad():
        padding(SMALL, {wrong: dict(model.named_parameters())[wrong]})[0].fill_(0.1)
    model(**batch(SMALL, RECIPE, "cpu")).backward()
    assert any(g.any() for g in padding(SMALL, {n: p.grad for n, p in model.named_parameters()}))


@variants
def test_targets_see_the_context_and_not_each_other(variant, device):
    model, data = TransformerNP(SMALL, variant).to(device), batch(SMALL, RECIPE, device)
    m = RECIPE.context
    mean, sd = model.predict(data["features"], m)
    other = data["features"].clone()
    other[:, m:-1, 0] += 0.5
    moved, _ = model.predict(other, m)
    torch.testing.assert_close(moved[:, -1], mean[:, -1])
    assert not torch.equal(moved[:, 0], mean[:, 0]) and (sd > 0).all()
    other = data["features"].clone()
    other[:, 0, 1] += 0.5
    assert (model.predict(other, m)[0] != mean).all()
    swapped = data["features"].clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    torch.testing.assert_close(model.predict(swapped, m)[0], mean)  # the context has no order


def test_the_mean_and_the_deviation_are_those_of_the_mixture():
    model, data = TransformerNP(SMALL, "plain").double(), batch(SMALL, RECIPE, "cpu")
    logit, mu, log_sigma = model.mixture(data["features"], RECIPE.context).detach().unbind(-1)
    dist = torch.distributions
    mixed = dist.MixtureSameFamily(dist.Categorical(logits=logit), dist.Normal(mu, log_sigma.exp()))
    mean, sd = model.predict(data["features"], RECIPE.context)
    torch.testing.assert_close(mean, mixed.mean)
    torch.testing.assert_close(sd, mixed.stddev)
    torch.testing.assert_close(model(**data).detach(), -mixed.log_prob(data["targets"].double()).mean())


@variants
def test_every_parameter_has_a_gradient_and_the_first_loss_is_near_that_of_a_guess(variant, device):
    model = TransformerNP(MODEL.sizes["tiny"], variant).to(device)
    loss = model(**batch(model.c, MODEL.recipes["tiny"], device))
    loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or not torch.isfinite(p.grad).all()]
    assert not dead
    assert abs(loss.item() - 0.5 * math.log(2 * math.pi)) < 1


def test_under_autocast_the_points_are_not_rounded(device):
    """Two points nearer to each other than bfloat16 can tell apart have two embeddings."""
    model, points = TransformerNP(SMALL, "tuned").to(device), torch.tensor([[[1.0, 0, 0], [1.001, 0, 0]]], device=device)
    assert points[0, 0, 0].bfloat16() == points[0, 1, 0].bfloat16()
    with torch.autocast(device, torch.bfloat16):
        first, second = model.embedded(points)[0]
    assert first.dtype == torch.float32 and not torch.equal(first, second)


def test_the_full_size_is_as_published():
    c = MODEL.sizes["small"]
    assert (c.layers, c.heads, c.head_dim, c.width, c.ffn, c.components) == (12, 8, 64, 512, 1365, 10)
    assert all(MODEL.sizes[size] == c for size in MODEL.sizes if size != "tiny")
    sizes = {size: (r.context, r.seq_len - r.context, r.batch) for size, r in MODEL.recipes.items()}
    assert sizes["small"] == (64, 500, 32) and sizes["small-b256"] == (64, 500, 256)
    assert sizes["mid"] == (10_000, 1_000, 1) and sizes["mid-b8"] == (10_000, 1_000, 8)
    assert sizes["large"] == (200_000, 5_000, 1)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in TransformerNP(c, "plain", Choices()).named_parameters()}
    assert shapes["embed.weight"] == (512, 3) and shapes["blocks.11.mlp.up.weight"] == (1365, 512)
    assert shapes["heads.up"] == (10, 1365, 512) and shapes["heads.down"] == (10, 3, 1365)
    assert not [n for n in shapes if n.endswith("bias")]


def test_a_target_may_say_its_batch_and_the_points_of_a_task():
    r = recipe_of("transformer-np:small@8x564")
    assert (r.batch, r.seq_len, r.context) == (8, 564, 64)
    assert subject_of("transformer-np:tiny@2x40").samples == 2
    with pytest.raises(ValueError, match="a task needs more points than its 64 of context, got 64"):
        recipe_of("transformer-np:small@8x64")


@pytest.mark.parametrize("make_it, said", [
    (lambda: TransformerNP(SMALL, "v4"), "variant must be one of plain, stock, tuned, got 'v4'"),
    (lambda: replace(SMALL, heads=5), "heads must be a divisor of width 32, got 5"),
    (lambda: replace(SMALL, ffn=0), "ffn must be a whole number from 1 on, got 0"),
    (lambda: replace(SMALL, eps=0), "eps must be a number above 0, got 0"),
    (lambda: TransformerNP(SMALL)(torch.zeros(1, 4, 3), torch.zeros(1, 4)), r"got \(1, 4, 3\) and \(1, 4\)"),
    (lambda: TransformerNP(SMALL)(torch.zeros(1, 4, 2), torch.zeros(1, 2)), r"expected features \(B, M \+ N, 3\)"),
])
def test_errors_name_the_argument_and_what_it_may_be(make_it, said):
    with pytest.raises(ValueError, match=said):
        make_it()


def test_the_calls_of_a_forward_are_recorded():
    counted = collections.Counter[str]()
    for call, n in subject_of("transformer-np:tiny").calls("float32"):
        counted[call.op] += n
    assert counted == dict(rms_norm=1, add_rms_norm=4, attention=2, linear=6, mlp=2, grouped_mlp=1, gmm_log_prob=1)


def test_targets_that_ask_for_a_gradient_get_it_also_of_many_rows(device, monkeypatch):
    model, data = built(SMALL, "tuned", weights(SMALL), device), batch(SMALL, RECIPE, device)
    aims = data["targets"].requires_grad_()
    (expected,) = torch.autograd.grad(model(**data), aims)
    monkeypatch.setattr(_chunked, "CHUNK_BYTES", 1)
    torch.testing.assert_close(torch.autograd.grad(model(**data), aims)[0], expected)
