"""grouped_mlp: one product over all groups in each direction, only what is asked for is kept and computed, padding unseen."""

import pytest
import torch
from conftest import DEVICE, assert_same_bits
from odd_sizes import Watched

import whet.ops
from whet.op import DTYPES, discover, tensors
from whet.ops import _grouped
from whet.verify import evaluate, verify

OP = discover()["grouped_mlp"]
CASE = dict(M=70, D=16, H=75, K=3, O=3)  # 75 columns are stored as 80


def made(dtype="float32", asked="x up down", **sizes) -> dict:
    args = OP.inputs(dtype=DTYPES[dtype], device=DEVICE, **CASE | sizes)
    return {k: t.detach().requires_grad_(k in asked.split()) for k, t in args.items()}


def kept_by(function, args) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of a call, parameters and x apart."""
    kept: list[torch.Tensor] = []
    given = {t.untyped_storage().data_ptr() for t in tensors(args)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(**args)
    own = {t.untyped_storage().data_ptr(): t for t in kept if t.untyped_storage().data_ptr() not in given}
    return [tuple(t.shape) for t in own.values()]


def test_the_kernel_keeps_the_pre_activations_alone_and_stock_calls_the_hidden_values_too():
    args = made(H=80)
    ours, stock = (kept_by(OP.impls[name].run, args) for name in ("triton", "torch"))
    assert ours == [(70, 3, 80)]
    assert sorted(torch.Size(s).numel() for s in stock)[-2:] == [70 * 3 * 80] * 2


def test_no_gradient_is_k_times_as_large_as_x():
    """Products of the backward: dx over all groups at once, and dup of all groups."""
    args = made(D=40, O=1)
    y = OP.impls["triton"].run(**args)
    with Watched() as watched:
        y.sum().backward()
    assert watched.sizes == [(70, 3 * 80, 40), (3 * 80, 70, 40)]


@pytest.mark.parametrize("asked", ["x", "up", "down", "x down", "up down"])
def test_a_gradient_that_is_asked_for_has_the_bits_it_has_beside_the_others(asked):
    torch.manual_seed(0)
    every = made()
    some = {k: t.detach().clone().requires_grad_(k in asked.split()) for k, t in every.items()}
    for args in (every, some):
        OP.impls["triton"].run(**args).square().sum().backward()
    assert_same_bits({k: some[k].grad for k in asked.split()}, {k: every[k].grad for k in asked.split()})
    assert all(t.grad is None for k, t in some.items() if k not in asked.split())


@pytest.mark.parametrize("H", [63, 64, 65, 72, 75, 80, 100, 1365])
def test_any_number_of_columns_is_right_padded_or_not(H):
    args = OP.inputs(dtype=torch.bfloat16, device=DEVICE, M=40, D=8, H=H, K=2, O=3)
    verdict = verify(OP, OP.impls["triton"], args)
    assert verdict.ok, verdict.why


def test_padding_is_not_seen_by_an_infinite_row():
    """A row of zeros times inf is NaN: of the padding, it must reach no result."""
    args = OP.inputs(dtype=torch.float32, device=DEVICE, **CASE)
    args = {k: t.abs() for k, t in args.items()}
    args["x"][5] = torch.inf
    y = OP.impls["triton"].run(**args)
    assert torch.equal(y[5], torch.full_like(y[5], torch.inf)) and y[:5].isfinite().all() and y[6:].isfinite().all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 0, 3)])
def test_x_may_have_any_number_of_dimensions(shape):
    args = made()
    args["x"] = torch.randn(*shape, 16, device=DEVICE).requires_grad_()
    expected, actual = (evaluate(OP, OP.impls[name].run, args, grad=True) for name in ("eager", "triton"))
    assert actual["output 0"].shape == (*shape, 3, 3)
    assert {k: t.shape for k, t in actual.items()} == {k: t.shape for k, t in expected.items()}


def test_the_sum_over_rows_has_the_same_bits_each_time_and_few_parts(monkeypatch):
    args = made("bfloat16", M=300)
    runs = [evaluate(OP, OP.impls["triton"].run, args, grad=True) for _ in range(2)]
    assert_same_bits(*runs)
    seen = []
    monkeypatch.setattr(_grouped, "column_sum", lambda partial, out: seen.append(partial.shape) or out.copy_(partial.sum(0)))
    monkeypatch.setattr(_grouped, "programs", lambda blocks, per_sm: min(blocks, 24))
    verdict = verify(OP, OP.impls["triton"], {k: t.detach() for k, t in args.items()})
    assert verdict.ok, verdict.why
    assert set(seen) == {(4, 3 * 3 * 80)}  # of 6 blocks of columns, 24 programs; 10 blocks of rows in parts of 3


def test_refusals_name_the_argument_and_the_limit():
    with pytest.raises(ValueError, match=r"^grouped_mlp\[triton\]: down must have at most 16 rows in a group, got 17"):
        whet.ops.grouped_mlp(**made(O=17), impl="triton")
    with pytest.raises(ValueError, match=r"^grouped_mlp\[grouped_mm\]: x must be bfloat16, got torch.float32"):
        whet.ops.grouped_mlp(**made(), impl="grouped_mm")
    with pytest.raises(ValueError, match=r"^grouped_mlp\[grouped_mm\]: up must have a multiple of 8 rows in a group, got 75"):
        whet.ops.grouped_mlp(**made("bfloat16"), impl="grouped_mm")
    with pytest.raises(ValueError, match=r"^grouped_mlp\[auto\]: down must have shape \(3, O, 75\) to match up, got \(2"):
        whet.ops.grouped_mlp(**made() | dict(down=made()["down"][:2]))
