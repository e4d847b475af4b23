"""Weights made smaller: the formats to the bit, how far a value may move, what a model keeps, and what a step then reads."""

from dataclasses import replace

import pytest
import torch

from whet.decode import quantize as q
from whet.decode.quantize import QUANTS, bytes_per_token, quantize, quantized
from whet.models.qwen3 import SIZES, Qwen3, random_weights
from whet.ops._weights import check_weight, dense, group_of, quant_of

TINY = SIZES["tiny"]


def matrix(kind: str, N: int = 96, K: int = 512) -> torch.Tensor:
    """Matrices as training leaves them: rows and columns of their own size, heavy tails, a few large columns."""
    w = torch.randn(N, K) * 0.02
    if kind == "rows and columns":
        w *= torch.exp(0.3 * torch.randn(N, 1)) * torch.exp(0.3 * torch.randn(1, K))
    if kind == "heavy tails":
        w = torch.distributions.StudentT(5.0).sample((N, K)) * 0.02
    if kind == "outlier columns":
        w[:, ::97] *= 8
    return w


KINDS = ("normal", "rows and columns", "heavy tails", "outlier columns")


def model(quant: str | None = None, dtype=torch.bfloat16, **fields) -> Qwen3:
    m = random_weights(replace(TINY, **fields), variant="plain", dtype=dtype)
    if quant:
        quantize(m, quant)
    return m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_stored_form_is_the_one_the_ops_take(quant, dtype):
    w, scale = quantized(matrix("normal").to(dtype), quant)
    assert quant_of(w) == quant and check_weight(w, scale, K=512, N=96) is None
    assert scale.dtype == (dtype if quant == "int4" else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_int8_moves_a_value_by_half_a_step(kind, dtype):
    w = matrix(kind).to(dtype)
    data, scale = quantized(w, "int8")
    moved = (dense(data, scale, torch.float64) - w.double()).abs() / scale[:, None].double()
    assert moved.max() <= 0.5 + 127 * torch.finfo(torch.float32).eps
    assert data.abs().amax(1).min() >= 126  # the whole range is used, of every row


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_moves_a_value_by_half_its_last_place(kind):
    w = matrix(kind).bfloat16()
    data, scale = quantized(w, "fp8")
    moved = (dense(data, scale, torch.float64) - w.double()).abs()
    half = torch.maximum(w.double().abs() * 2.0**-4, scale[:, None].double() * 2.0**-10)
    assert (moved <= half * (1 + torch.finfo(torch.float32).eps)).all()
    assert data.float().isfinite().all()


def test_int4_bytes_hold_a_column_and_the_one_half_a_row_on():
    w = matrix("normal", N=5, K=256).bfloat16()
    data, scale = quantized(w, "int4")
    assert group_of(256) == 128
    for n in range(5):
        for k in range(256):
            byte = data[n, k % 128].item()
            nibble = byte & 15 if k < 128 else byte >> 4
            s = scale[n, k // 128].float()
            nearest = (w[n, k].float() / s).round().clamp(-8, 7)
            assert nibble - 8 == nearest


def squared_error(w: torch.Tensor, scale: torch.Tensor) -> float:
    return (q.nibbles(w, scale) * scale - w).double().square().sum().item()


@pytest.mark.parametrize("kind", KINDS)
def test_int4_search_beats_the_largest_value(kind):
    """In plain squared error too. On normal values: the largest over 7 is 1, the largest at -8 by its sign 0.78, this 0.72."""
    groups = matrix(kind).view(96, -1, 128)
    largest = groups.abs().amax(-1, keepdim=True)
    by_sign = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    scales = (q.int4_scale(groups, torch.bfloat16), *(q.divisor(s, torch.bfloat16) for s in (by_sign, largest / 7)))
    searched, signed, plain = (squared_error(groups, s) for s in scales)
    assert searched < signed < plain


def test_int4_search_takes_the_best_of_every_group(monkeypatch):
    groups = matrix("heavy tails").view(96, -1, 128)

    def errors(scale):
        return ((q.nibbles(groups, scale) * scale - groups).square() * groups.abs()).sum(-1)

    best = errors(q.int4_scale(groups, torch.bfloat16))
    for clip in q.CLIPS:
        monkeypatch.setattr(q, "CLIPS", (clip,))
        assert (best <= errors(q.int4_scale(groups, torch.bfloat16))).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_bfloat16_and_float32_mean_the_same_weights(quant):
    """The scale is one that bfloat16 holds: what is left between the two is the rounding of each product."""
    data, scale = quantized(matrix("normal").bfloat16(), quant)
    assert torch.equal(scale.float(), scale.bfloat16().float())
    assert torch.equal(dense(data, scale, torch.bfloat16), dense(data, scale, torch.float32).bfloat16())


@pytest.mark.parametrize("quant", QUANTS)
def test_rows_of_zeros_and_of_tiny_values_stay_finite(quant):
    w = torch.zeros(4, 128)
    w[1], w[2] = 1e-30, -3e-38
    w[3, 5] = 7.0
    back = dense(*quantized(w, quant), torch.float32)
    assert back.isfinite().all() and (back[0] == 0).all() and back[3, 5] == 7
    assert back[3].count_nonzero() == 1 and (back[1] > 0).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_blocks_of_rows_change_nothing_and_bound_the_copy(quant, monkeypatch):
    w, seen = matrix("normal").bfloat16(), []
    encode = getattr(q, f"to_{quant}")
    whole = quantized(w, quant)
    monkeypatch.setattr(q, f"to_{quant}", lambda block, dtype: seen.append(block.numel()) or encode(block, dtype))
    monkeypatch.setitem(q.BLOCK, "cpu", 7 * 512)
    for a, b in zip(quantized(w, quant), whole):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert sum(seen) == w.numel() and max(seen) == 7 * 512


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quant", QUANTS)
def test_model_keeps_embed_and_every_product_is_quantised(quant, tied):
    m, before = model(quant, tied=tied), model(tied=tied)
    assert torch.equal(m.embed, before.embed) and m.embed.dtype == torch.bfloat16
    for (name, w), (_, plain) in zip(q.weights(m), q.weights(before)):
        assert quant_of(w.data) == quant, name
        assert check_weight(w.data, w.scale, K=plain.data.shape[1], N=plain.data.shape[0]) is None, name
    assert len(dict(q.weights(m))) == 4 * TINY.layers + 1


def test_logits_of_more_bits_are_nearer():
    tokens = torch.arange(40)[None] * 7 % TINY.vocab
    exact = model(dtype=torch.float32)(tokens)

    def far(quant):
        return (model(quant, dtype=torch.float32)(tokens) - exact).square().mean().sqrt().item()

    off = {quant: far(quant) for quant in QUANTS}
    assert 0 < off["int8"] < off["fp8"] < off["int4"] < exact.square().mean().sqrt()


def test_refusals_leave_the_model_as_it_was():
    already = "layers.0.qkv is fp8 already, expected weights that are not quantised; load the model again"
    odd = "layers.0.down cannot be packed: the columns must be a multiple of 64, got 480; use int8 or fp8"
    for wrong, quant, message in (
        (model(), "int3", "quantize: quant must be one of int8, int4, fp8, got 'int3'"),
        (model("fp8"), "int8", f"quantize[int8]: {already}"),
        (model(ffn=480), "int4", f"quantize[int4]: {odd}"),
    ):
        before = {k: v.clone() for k, v in wrong.state_dict().items()}
        with pytest.raises(ValueError) as e:
            quantize(wrong, quant)
        assert str(e.value) == message
        assert all(v.dtype == before[k].dtype for k, v in wrong.state_dict().items())


def test_refusal_names_the_weight_that_is_not_finite():
    m = model()
    with torch.no_grad():
        m.layers[1].down.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"^quantize\[int8\]: layers.1.down holds values that are not finite"):
        quantize(m, "int8")
    assert m.layers[0].qkv.scale is None


def test_bytes_per_token_of_the_06b_are_those_of_its_parameters():
    m = Qwen3(SIZES["0.6b"], "plain", device="meta", dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in m.parameters())
    assert bytes_per_token(m, 0) == 2 * (parameters + 1024)  # tied: embed is read as the head, and one row of it more
    assert round(bytes_per_token(m, 0) / 1e9, 3) == 1.192
    assert bytes_per_token(m, 1000) - bytes_per_token(m, 0) == 1000 * 28 * 2 * 8 * 128 * 2


def test_bytes_per_token_count_scales_biases_and_the_window():
    c = replace(TINY, tied=False, qkv_bias=True, o_bias=True, window=100)
    matrices = c.layers * (512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512) + 1024 * 256
    rows = c.layers * (512 + 256 + 1024 + 256) + 1024
    small = 2 * (c.layers * (3 * 256 + 512 + 2 * 64) + 2 * 256)  # norms and biases, the last norm, one row of embed
    packed = matrices // 2 + matrices // 128 * 2
    for quant, held in {None: 2 * matrices, "int8": matrices + 4 * rows, "fp8": matrices + 4 * rows, "int4": packed}.items():
        m = model(quant, tied=False, qkv_bias=True, o_bias=True, window=100)
        assert bytes_per_token(m, 0) == held + small
        assert bytes_per_token(m, 5000) == held + small + 100 * c.layers * 2 * 2 * 64 * 2
    with pytest.raises(ValueError, match="^bytes_per_token: context must be at least 0 tokens, got -1$"):
        bytes_per_token(m, -1)
