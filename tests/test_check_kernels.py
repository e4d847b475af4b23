"""misaligned_gemm, attention_materialised, logits_fp32: what they name, what is too small to say, what only looks alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.choices import current
from whet.diagnose.checks import attention_materialised, logits_fp32, misaligned_gemm
from whet.diagnose.checks.attention_materialised import CHECK as ATTENTION
from whet.diagnose.checks.attention_materialised import attentions, is_masked, measured, plain
from whet.diagnose.checks.logits_fp32 import CHECK as LOGITS
from whet.diagnose.checks.misaligned_gemm import CHECK as MISALIGNED
from whet.diagnose.checks.misaligned_gemm import product, random_like, timed
from whet.diagnose.run import Run
from whet.diagnose.target import target_of
from whet.diagnose.watch import Seen


def found_by(check, model, *batch):
    run = Run(target_of("example", (model, batch)), seconds=0.01)
    return list(check.find(run))


class Mlp(nn.Module):
    def __init__(self, width=64, inner=256, layers=2, autocast=False):
        super().__init__()
        self.autocast = autocast
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(up=nn.Linear(width, inner), down=nn.Linear(inner, width))) for _ in range(layers)
        )

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            for layer in self.layers:
                x = x + layer["down"](F.relu(layer["up"](x)))
        return x.float().square().mean()


def test_a_misaligned_weight_is_named_with_its_size_in_every_layer():
    finding, = found_by(MISALIGNED, Mlp(inner=250).bfloat16(), torch.randn(128, 64, dtype=torch.bfloat16))
    assert all(part in finding.cause for part in ("layers.*.up.weight", "layers.*.down.weight", "250 bfloat16"))
    assert "250 to 256" in finding.fix and finding.cost_ms is None and not finding.measured and finding.apply is None
    assert any("11 " in text and "100%" in text for text in finding.evidence), finding.evidence


def test_a_weight_that_autocast_casts_keeps_its_name():
    finding, = found_by(MISALIGNED, Mlp(inner=250, autocast=True), torch.randn(128, 64))
    assert "layers.*.up.weight" in finding.cause and "layers.*.down.weight" in finding.cause


@pytest.mark.parametrize("model, dtype, rows", [
    (Mlp(inner=256), torch.bfloat16, 128), (Mlp(inner=248), torch.bfloat16, 127), (Mlp(inner=250), torch.float32, 128),
    (Mlp(inner=60), torch.bfloat16, 128), (Mlp(inner=250), torch.bfloat16, 8),
], ids=["whole", "odd batch", "float32", "small", "few rows"])
def test_aligned_float32_and_small_products_are_left_alone(model, dtype, rows):
    assert not found_by(MISALIGNED, model.to(dtype), torch.randn(rows, 64, dtype=dtype))


def test_rows_padded_in_memory_are_aligned():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(256, 64, dtype=torch.bfloat16))

        def forward(self, x):
            return (x @ self.w.t())[:, :250].square().mean()

    assert not found_by(MISALIGNED, Sliced(), torch.randn(128, 64, dtype=torch.bfloat16))


def test_a_product_is_timed_in_its_own_layout_and_padded():
    t = Seen((64, 250), torch.bfloat16, (1, 64), "cpu", 0)
    assert random_like(t, {}).stride() == (1, 64) and random_like(t, {250: 256}).shape == (64, 256)
    model = Mlp(inner=250, layers=1).bfloat16()
    run = Run(target_of("example", (model, torch.randn(128, 64, dtype=torch.bfloat16))))
    products = [p for p in map(product, run.watched.events) if p is not None and p.bad]
    now, padded = timed(products, {250: 256}, "eager")
    assert len(products) == 5 and now > 0 and padded > 0


def on_a_gpu(monkeypatch, module, times: tuple[float, float], step_ms: float):
    """A CPU's run taken for a GPU's, with these figures for what would be timed there."""
    monkeypatch.setattr(Run, "gpu", True)
    monkeypatch.setattr(Run, "step_ms", step_ms)
    monkeypatch.setattr(module, "timed" if hasattr(module, "timed") else "measured", lambda *_: times)


def test_on_a_gpu_padding_must_give_back_a_hundredth_of_the_step(monkeypatch):
    model, x = Mlp(inner=250).bfloat16(), torch.randn(128, 64, dtype=torch.bfloat16)
    on_a_gpu(monkeypatch, misaligned_gemm, (3.0, 1.0), 100.0)
    finding, = found_by(MISALIGNED, model, x)
    assert finding.measured and finding.cost_ms == finding.gain_ms == 2.0 and "on a GPU" not in finding.cause
    on_a_gpu(monkeypatch, misaligned_gemm, (3.0, 2.5), 100.0)
    assert not found_by(MISALIGNED, model, x)


class Attend(nn.Module):
    """One projection, and what a test does with queries, keys and values of two heads."""

    def __init__(self, attend, width=32):
        super().__init__()
        self.attend, self.width, self.qkv = attend, width, nn.Linear(64, 6 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, self.width).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).square().mean()


def by_einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(scores.softmax(-1), 0.1), v)


def biased(q, k, v):
    bias = torch.zeros(q.shape[2], q.shape[2])
    return F.softmax(q @ k.mT + bias, dim=3) @ v


@pytest.mark.parametrize("attend", [by_einsum, biased])
def test_every_way_to_write_attention_is_found(attend):
    finding, = found_by(ATTENTION, Attend(attend), torch.randn(2, 160, 64))
    assert "2 x 2 x 160 x 160" in finding.cause and finding.cost_ms > 0 and not finding.measured
    assert finding.line.startswith("test_check_kernels.py:")
    assert any("for the backward" in text for text in finding.evidence)
    assert "scaled_dot_product_attention" in finding.fix


def test_torchs_module_is_advised_to_return_no_weights():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x, need=True):
            return self.attention(x, x, x, need_weights=need)[0].square().mean()

    finding, = found_by(ATTENTION, Layer(), torch.randn(2, 160, 64))
    assert finding.module == "attention" and "need_weights=False" in finding.fix
    assert not found_by(ATTENTION, Layer(), torch.randn(2, 160, 64), False)


def short(q, k, v):
    return plain(q[:, :, :64], k[:, :, :64], v[:, :, :64], None)


def with_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def gated(q, k, v):
    return (q * k).softmax(-1) * v


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@pytest.mark.parametrize("attend", [short, with_dropout, gated, linear_attention])
def test_small_fused_and_other_softmaxes_are_left_alone(attend):
    assert not found_by(ATTENTION, Attend(attend), torch.randn(2, 160, 64))


def test_on_a_gpu_attention_must_cost_a_hundredth_of_the_step(monkeypatch):
    model, x = Attend(biased), torch.randn(2, 64, 64)
    assert not found_by(ATTENTION, model, x)
    on_a_gpu(monkeypatch, attention_materialised, (3.0, 1.0), 100.0)
    finding, = found_by(ATTENTION, model, x)
    assert finding.measured and finding.cost_ms == finding.gain_ms == 2.0
    fallback, = found_by(ATTENTION, Attend(with_dropout), x)
    assert "falls back" in fallback.cause and "half precision" in fallback.fix
    on_a_gpu(monkeypatch, attention_materialised, (3.0, 2.5), 100.0)
    assert not found_by(ATTENTION, model, x)


@pytest.mark.parametrize("train", [True, False])
def test_an_attention_is_timed_at_its_own_size(train):
    run = Run(target_of("example", (Attend(biased), torch.randn(2, 32, 64))))
    found, = attentions(run.watched.events)
    assert is_masked(found, run.watched.events)
    assert min(measured(found, True, train)) > 0


def test_layers_of_one_module_are_counted_once_each():
    """Three attentions in one forward, without modules of their own: each has its own forward ops and its own backward's."""
    def thrice(q, k, v):
        for _ in range(3):
            v = plain(q, k, v, None)
        return v

    once, = found_by(ATTENTION, Attend(lambda q, k, v: plain(q, k, v, None)), torch.randn(2, 160, 64))
    three, = found_by(ATTENTION, Attend(thrice), torch.randn(2, 160, 64))
    assert "3 times" in three.evidence[0]
    assert once.evidence[1] == three.evidence[1]


class Tokens(nn.Module):
    def __init__(self, loss, vocab=4096):
        super().__init__()
        self.loss, self.embed, self.lm_head = loss, nn.Embedding(vocab, 32), nn.Linear(32, vocab, bias=False)

    def forward(self, tokens):
        return self.loss(self.embed(tokens), self.lm_head, tokens)


def widened(h, head, tokens):
    return F.cross_entropy(head(h)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def autocast(h, head, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(head(h).flatten(0, 1), tokens.flatten())


def as_it_is(h, head, tokens):
    return F.cross_entropy(head(h).flatten(0, 1), tokens.flatten())


def chunked(h, head, tokens):
    def part(h, tokens):
        return F.cross_entropy(head(h).float(), tokens, reduction="sum")

    parts = zip(h.flatten(0, 1).split(32), tokens.flatten().split(32))
    return torch.stack([checkpoint(part, a, b, use_reentrant=False) for a, b in parts]).sum() / tokens.numel()


def fused(h, head, tokens):
    return current().linear_cross_entropy(h, head.weight, tokens)


@pytest.mark.parametrize("loss, dtype", [(widened, torch.bfloat16), (autocast, torch.float32)])
def test_half_logits_made_float32_are_found(loss, dtype):
    finding, = found_by(LOGITS, Tokens(loss).to(dtype), torch.randint(4096, (4, 64)))
    assert "lm_head.weight, 256 x 4096" in finding.cause and finding.cost_ms > 0
    assert finding.line.startswith("test_check_kernels.py:") and "lm_head.weight" in finding.fix
    assert any("kept for the backward" in text and not text.startswith("0 MiB") for text in finding.evidence)


@pytest.mark.parametrize("loss, dtype", [
    (as_it_is, torch.float32), (as_it_is, torch.bfloat16), (chunked, torch.bfloat16), (fused, torch.bfloat16),
    (fused, torch.float32),
])
def test_logits_of_the_models_own_dtype_and_chunked_ones_are_left_alone(loss, dtype):
    assert not found_by(LOGITS, Tokens(loss).to(dtype), torch.randint(4096, (4, 64)))


def test_a_few_logits_are_left_alone():
    assert not found_by(LOGITS, Tokens(widened).bfloat16(), torch.randint(4096, (1, 32)))
    assert not found_by(LOGITS, Tokens(widened, 512).bfloat16(), torch.randint(512, (4, 64)))


def test_float32_logits_of_a_float32_model_are_reported_only_where_they_are_huge(monkeypatch):
    model, tokens = Tokens(as_it_is), torch.randint(4096, (4, 64))
    assert not found_by(LOGITS, model, tokens)
    monkeypatch.setattr(logits_fp32, "LEAST_FLOAT_BYTES", 1 << 20)
    finding, = found_by(LOGITS, model, tokens)
    assert "aten::mm in float32" in finding.evidence[0]


@pytest.mark.gpu
def test_a_vocabulary_of_50257_is_measured_on_a_gpu():
    class Head(nn.Module):
        def __init__(self, vocab):
            super().__init__()
            self.lm_head = nn.Linear(768, vocab, bias=False)

        def forward(self, x):
            return self.lm_head(x).square().mean()

    x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    finding, = found_by(MISALIGNED, Head(50257).cuda().bfloat16(), x)
    assert finding.measured and finding.gain_ms > 0 and "lm_head.weight" in finding.cause and "50304" in finding.fix
    assert not found_by(MISALIGNED, Head(50304).cuda().bfloat16(), x)


@pytest.mark.gpu
def test_long_attention_is_measured_on_a_gpu():
    x = torch.randn(4, 2048, 64, device="cuda", dtype=torch.bfloat16)
    finding, = found_by(ATTENTION, Attend(lambda q, k, v: plain(q, k, v, None), 64).cuda().bfloat16(), x)
    assert finding.measured and finding.gain_ms > 0
    assert not found_by(ATTENTION, Attend(F.scaled_dot_product_attention, 64).cuda().bfloat16(), x)
