"""linear: float32 products of pairs of halves are as near as float32's own, whatever the magnitudes, and keep no more."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

import whet.ops
from whet import machine
from whet.op import discover
from whet.ops import _halves, _loss_products, _products
from whet.roof import Ceilings
from whet.verify import verify

OP = discover()["linear"]


def ours(x, w):
    return whet.ops.linear(x, w, impl="triton")


def stepped(function, x, w, dy):
    """y, dx and dw of one step, in float64."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = function(x, w)
    y.backward(dy.to(y.dtype))
    return y.detach().double(), x.grad.double(), w.grad.double()


def made(M=70, K=200, N=96, seed=0):
    torch.manual_seed(seed)
    return torch.randn(M, K, device=DEVICE), torch.randn(N, K, device=DEVICE) / math.sqrt(K), torch.randn(M, N, device=DEVICE)


def assert_near(x, w, dy, unit=2e-7):
    """Every element is within a few rounding steps of the sum of its products' magnitudes, as a float32 sum is."""
    got, want = stepped(ours, x, w, dy), stepped(F.linear, x.double(), w.double(), dy.double())
    a, b, d = (t.double().abs() for t in (x, w, dy))
    for name, g, o, size in zip(("y", "dx", "dw"), got, want, (a @ b.t(), d @ b, d.t() @ a)):
        assert ((g - o).abs() <= unit * math.sqrt(16 + len(x)) * size + 1e-37).all(), name


@pytest.mark.parametrize("M, K, N", [(70, 200, 96), (1, 1, 1), (129, 65, 127), (33, 8200, 17), (300, 16, 520)])
def test_every_element_is_as_near_as_a_float32_sum_of_its_products(M, K, N):
    assert_near(*made(M, K, N))


def test_it_is_nearer_than_tf32_by_a_thousand_times():
    x, w, dy = made(64, 512, 64)

    def rounded(t):  # as TF32 keeps it: 10 bits of fraction
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    want = x.double() @ w.double().t()
    error, tf32 = ((y.double() - want).square().mean().sqrt() for y in (ours(x, w), rounded(x) @ rounded(w).t()))
    assert error < tf32 / 1000


@pytest.mark.parametrize("x_by, w_by, dy_by", [
    (1e-30, 1.0, 1.0), (1e30, 1e-30, 1e-12), (1e-20, 1e-15, 1e20), (1.0, 1e25, 1e-30), (2.0**-120, 1.0, 1.0),
    (2.0**120, 2.0**-100, 1.0), (2.0**124, 2.0**-100, 2.0**-20), (2.0**-100, 2.0**124, 2.0**-20),
])
def test_magnitudes_of_whole_tensors_do_not_matter(x_by, w_by, dy_by):
    x, w, dy = made()
    assert_near(x * x_by, w * w_by, dy * dy_by)


@pytest.mark.parametrize("which", range(3))
def test_rows_and_columns_of_any_magnitude_keep_their_own_accuracy(which):
    """As fused projections have them: gradients of queries lie far below those of values, some tokens' below others'."""
    given = list(made())
    t = given[which]
    by = torch.logspace(-12, 12, len(t), base=2.0, device=DEVICE)[torch.randperm(len(t), device=DEVICE)]
    given[which] = t * by[:, None] * torch.logspace(-4, 4, t.shape[1], base=2.0, device=DEVICE)
    assert_near(*given)


@pytest.mark.parametrize("least", [0, -17, -24])
def test_values_of_one_row_keep_their_digits_down_to_2_to_the_minus_17_of_its_largest_and_lose_one_a_power_below(least):
    """Columns of x that w weighs the other way: each counts alike in y, and in float32 none would lose a digit."""
    x, w, dy = made()
    by = torch.linspace(0, least, x.shape[1], device=DEVICE).round().exp2()
    x, w = x.sign() * (1 + torch.rand_like(x)) * by, w / by
    (y, _, dw), (want, _, want_dw) = stepped(ours, x, w, dy), stepped(F.linear, x.double(), w.double(), dy.double())
    unit = 2.0**-21 if least >= -17 else 2.0 ** (-39 - least)
    size, size_dw = x.double().abs() @ w.double().abs().t(), dy.double().abs().t() @ x.double().abs()
    assert ((y - want).abs() <= unit * size).all() and ((dw - want_dw).abs() <= unit * size_dw).all()


@pytest.mark.parametrize("columns", [True, False])
def test_a_peak_may_be_the_last_of_a_long_row_or_column(columns, monkeypatch):
    monkeypatch.setattr(machine, "sm_count", lambda: 1)  # few programs, each of several turns
    t, ones = torch.ones((600, 3) if columns else (3, 8300), device=DEVICE), torch.ones(600, device=DEVICE)
    t[-1, -1] = -1e9
    halves = _halves.split_columns(t, ones) if columns else _halves.split_rows(t)
    assert halves.scale.tolist() == [1.0, 1.0, 2.0**29]
    hi, lo = halves.values.double()
    scale = halves.scale.double()[None, :] if columns else halves.scale.double()[:, None]
    back = (hi + lo)[:, : t.shape[1]] * scale * 2.0**-14
    assert ((back - t).abs() <= 2.0**-22 * t.abs() + 2.0**-39 * scale).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_in_w_or_the_upstream_gradient_stays_where_it_is_summed(value):
    x, w, dy = made()
    w[5, 9], dy[4, 7] = 0.0, 0.0
    clean = stepped(ours, x, w, dy)
    bad_w, bad_dy = w.clone(), dy.clone()
    bad_w[5, 9], bad_dy[4, 7] = value, value
    y, dx, _ = stepped(ours, x, bad_w, dy)
    assert bad_parts(y, clean[0]) == (set(range(70)), {5}) and bad_parts(dx, clean[1]) == (set(range(70)), {9})
    _, dx, dw = stepped(ours, x, w, bad_dy)
    assert bad_parts(dx, clean[1]) == ({4}, set(range(200))) and bad_parts(dw, clean[2]) == ({7}, set(range(200)))


def bad_parts(got, clean):
    """Rows and columns with other bits than a clean run's; each of these elements must be no number."""
    other = got != clean
    assert torch.equal(other, ~torch.isfinite(got))
    return tuple({*other.any(axis).nonzero().flatten().tolist()} for axis in (1, 0))


def test_zero_rows_and_columns_give_zeros():
    x, w, dy = made()
    x[3], w[5], dy[:, 7] = 0.0, 0.0, 0.0
    y, dx, dw = stepped(ours, x, w, dy)
    assert not y[3].any() and not y[:, 5].any() and not dw[7].any()
    assert torch.isfinite(y).all() and torch.isfinite(dx).all() and torch.isfinite(dw).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row_and_its_column_of_the_gradient(value):
    x, w, dy = made()
    x[4, 9] = 0.0
    clean = stepped(ours, x, w, dy)
    x[4, 9] = value
    y, dx, dw = stepped(ours, x, w, dy)
    rows, columns = torch.arange(len(x), device=DEVICE) != 4, torch.arange(x.shape[1], device=DEVICE) != 9
    assert torch.equal(y[rows], clean[0][rows]) and torch.equal(dx, clean[1])
    assert torch.equal(dw[:, columns], clean[2][:, columns])
    assert not torch.isfinite(y[4]).any() and not torch.isfinite(dw[:, 9]).any(), "it must be seen"


def test_the_largest_values_of_float32_and_the_least():
    info = torch.finfo(torch.float32)
    x = torch.tensor([[info.max, 0.0, info.max / 3], [1e-38, -1e-38, 1e-45]], device=DEVICE)
    w = torch.tensor([[0.5, 1.0, 0.25], [1.0, 1.0, 0.0]], device=DEVICE)
    want = x.double() @ w.double().t()
    assert ((ours(x, w).double() - want).abs() <= 4 * info.eps * (want.abs() + info.smallest_normal)).all()


@pytest.mark.parametrize("asked", ["x", "w", "xw"])
def test_only_what_is_asked_for_is_made_and_kept(asked):
    x, w, dy = made()
    want = dict(zip("xw", stepped(F.linear, x, w, dy)[1:]))
    args = [t.requires_grad_(name in asked) for t, name in zip((x, w), "xw")]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ours(*args)
    y.backward(dy)
    for name, t in zip("xw", args):
        assert (t.grad is None) == (name not in asked)
        if t.grad is not None:
            torch.testing.assert_close(t.grad, want[name].float())
    given = {t.untyped_storage().data_ptr(): name for name, t in (("x", x), ("w", w))}
    assert sorted(given[t.untyped_storage().data_ptr()] for t in kept) == sorted({"x": "w", "w": "x"}[name] for name in asked)


def test_upstream_gradients_in_parts_give_the_same(monkeypatch):
    x, w, dy = made(M=300, K=40, N=270)
    whole = stepped(ours, x, w, dy)
    monkeypatch.setattr(_halves, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(machine, "sm_count", lambda: 1)
    assert len(_halves.chunks_of(300, 270, 40)) == len(_halves.chunks_of(270, 300, 40)) == 2
    for a, b in zip(stepped(ours, x, w, dy), whole):
        torch.testing.assert_close(a, b)
    assert len(_halves.chunks_of(8192, 8192, 1024)) == 64 and _halves.chunks_of(0, 5, 5) == [slice(0, 0)]


def test_parts_leave_a_tile_to_each_multiprocessor(monkeypatch):
    monkeypatch.setattr(machine, "sm_count", lambda: 132)
    products = (8192, 8192, 1024), (4096, 50304, 768), (50304, 4096, 768), (100, 10**6, 100), (8192, 1024, 4096)
    for size, length, across in products:
        parts = _halves.chunks_of(size, length, across)
        assert parts[-1].stop == size and all(a.stop == b.start for a, b in zip(parts, parts[1:]))
        assert len(parts) == 1 or parts[0].stop * across >= 128 * 128 * 118
    assert _halves.chunks_of(8192, 8192, 1024)[0] == slice(0, 2048)


def test_refusals_name_the_argument():
    x, w, _ = made()
    with pytest.raises(ValueError, match=r"w must have shape \(N, 200\)"):
        ours(x, w[:, :5])
    with pytest.raises(ValueError, match="must be float32, outside autocast, got torch.bfloat16"):
        ours(x.bfloat16(), w.bfloat16())
    with torch.autocast(x.device.type, dtype=torch.bfloat16), pytest.raises(ValueError, match="outside autocast"):
        ours(x, w)
    args = OP.inputs(dtype=torch.float32, device="meta", M=1 << 20, K=2048, N=8)
    assert OP.impls["triton"].refuses(**args) == "x and y must have less than 2^31 elements, got 2,147,483,648"


def test_the_floor_is_that_of_three_products_of_halves_or_of_float32s_own_where_that_is_faster():
    args = OP.inputs(dtype=torch.float32, device="meta", M=8192, K=4096, N=4096)
    flops = 6 * 8192 * 4096 * 4096
    for rates, rate in ((dict(float32=50.0, float16=660.0), 220e12), (dict(float32=80.0, float16=160.0), 80e12)):
        floor = Ceilings(copy_gbs=1e9, tflops=rates).floor_ms(OP.cost(**args), True, "float32")
        assert floor == pytest.approx(flops / rate * 1e3)


def test_tiles_fill_a_hopper_and_other_gpus_take_what_they_hold(monkeypatch):
    def tile(capability, M, N):
        monkeypatch.setattr(_halves.machine, "this_machine", lambda: type("Here", (), dict(capability=capability))())
        monkeypatch.setattr(machine, "sm_count", lambda: 132)
        return _halves.tile_for(M, N)[:2]

    assert [tile((9, 0), M, N) for M, N in ((8192, 8192), (1024, 1024), (1024, 512), (1024, 4096), (1, 16))] == [
        (128, 128), (128, 64), (64, 64), (128, 128), (64, 64),
    ]
    assert [tile((8, 0), M, N) for M, N in ((8192, 8192), (1024, 1024), (64, 64))] == [(128, 128), (64, 64), (64, 64)]
    assert tile(None, 8192, 8192) == (64, 64)


@pytest.mark.parametrize("name", ["gated_linear", "activated_linear", "linear_cross_entropy"])
def test_other_ops_are_right_by_these_products(name, monkeypatch):
    """As on a GPU made for it, with the launches of the interpreter."""
    made: list[tuple] = []

    def counted(*args, product=_halves.product, **options):
        made.append(args[2:5])
        return product(*args, **options)

    monkeypatch.setattr(_halves, "product", counted)
    for module in (_products, _loss_products, sys.modules[f"whet.ops.{name}"]):
        monkeypatch.setattr(module, "by_halves", lambda x: x.dtype == torch.float32, raising=False)
    op = discover()[name]
    for case in op.cases:
        args = op.inputs(dtype=torch.float32, device=DEVICE, **case)
        if op.impls["triton"].refuses(**args) is None:
            made.clear()
            verdict = verify(op, op.impls["triton"], args)
            assert verdict.ok and (made or not case["M"]), f"{case}: {verdict.why}"


def test_a_loss_in_chunks_adds_up_the_gradient_of_w_by_these_products(monkeypatch):
    monkeypatch.setattr(_products, "by_halves", lambda x: True)
    monkeypatch.setattr(_loss_products, "by_halves", lambda x: True)
    loss = sys.modules["whet.ops.linear_cross_entropy"]
    monkeypatch.setattr(loss, "chunks", lambda M, *_: [slice(i, min(i + 8, M)) for i in range(0, M, 8)])
    op = discover()["linear_cross_entropy"]
    verdict = verify(op, op.impls["triton"], op.inputs(dtype=torch.float32, device=DEVICE, M=20, D=24, V=100, bias=True))
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@pytest.mark.parametrize("M, K, N", [
    (1024, 512, 4096), (1024, 4096, 512), (1000, 1029, 333), (4096, 8192, 1024), (65, 10000, 129),
])
def test_every_tile_is_nearer_than_cublas_without_tf32(M, K, N, monkeypatch):
    x, w, dy = made(M, K, N)
    want = stepped(F.linear, x.double(), w.double(), dy.double())
    theirs = [(g - o).square().mean().sqrt() for g, o in zip(stepped(F.linear, x, w, dy), want)]
    for tile in (*_halves.HOPPER, *_halves.OTHERS):
        if tile.gluon and machine.this_machine().capability[0] != 9:
            continue
        monkeypatch.setattr(_halves, "tile_for", lambda M, N, tile=tile: tile)
        for name, g, o, usual in zip(("y", "dx", "dw"), stepped(ours, x, w, dy), want, theirs):
            assert (g - o).square().mean().sqrt() <= usual, f"{name} by {tile}"
