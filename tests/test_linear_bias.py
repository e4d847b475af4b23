"""linear_bias: products to the bit as PyTorch's, the bias's gradient at any size and stride, and only what is asked for."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from odd_sizes import Watched

import whet.ops
from whet.op import DTYPES, discover, lay

OP = discover()["linear_bias"]
MODULE = sys.modules["whet.ops.linear_bias"]


def leaves(dtype=torch.float32, shape=(3, 7, 24), N=40, by_column=False, asked="xwb") -> list[torch.Tensor]:
    torch.manual_seed(0)
    w = torch.randn(shape[-1], N).t() if by_column else torch.randn(N, shape[-1])
    made = (torch.randn(*shape), w, torch.randn(N))
    return [t.to(DEVICE, dtype).requires_grad_(name in asked) for t, name in zip(made, "xwb")]


def stepped(function, args, dy=None):
    """(y, gradients by name) of one step."""
    y = function(*args)
    y.backward(torch.ones_like(y).cumsum(0) if dy is None else dy)
    return y.detach(), {name: t.grad for name, t in zip("xwb", args)}


def ours(x, w, b):
    return whet.ops.linear_bias(x, w, b, impl="triton")


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float64"])
@pytest.mark.parametrize("M, N", [(1, 7), (33, 768), (300, 1000), (70, 2304), (65, 3072), (2500, 16), (0, 24)])
def test_the_bias_gradient_is_the_sum_in_float32_rounded_once_and_the_same_every_time(M, N, dtype):
    torch.manual_seed(0)
    dy = torch.randn(M, N, device=DEVICE).to(DTYPES[dtype])
    for layout in ("contiguous", "sliced", "expanded"):
        given = lay(dy, layout)
        got, want = MODULE.row_sum(given), given.double().sum(0)
        bound = 1e-5 * given.double().abs().sum(0) + torch.finfo(got.dtype).eps * want.abs()
        assert got.dtype == dy.dtype and bool(((got.double() - want).abs() <= bound).all())
        assert torch.equal(got, MODULE.row_sum(given))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 24), (21, 24)])
def test_values_and_products_have_the_bits_and_the_layout_of_pytorchs(shape, by_column):
    for dtype in (torch.float32, torch.bfloat16):
        want, got = (stepped(f, leaves(dtype, shape, by_column=by_column)) for f in (F.linear, ours))
        assert torch.equal(got[0], want[0])
        for name in "xw":
            assert torch.equal(got[1][name], want[1][name]) and got[1][name].stride() == want[1][name].stride(), name
        torch.testing.assert_close(got[1]["b"], want[1]["b"])


def test_a_single_row_without_a_batch():
    want, got = (stepped(f, leaves(shape=(24,))) for f in (F.linear, ours))
    torch.testing.assert_close(got, want)


def test_the_gradient_of_a_transposed_weight_is_made_in_its_own_layout():
    x, w, b = leaves(by_column=True)
    dw = torch.autograd.grad(ours(x, w, b).sum(), w)[0]
    assert dw.stride() == w.stride() and w.stride(0) == 1, "as a Conv1D's weight: no copy where it is accumulated"


@pytest.mark.parametrize("asked", ["b", "xb", "wb", "xw", "x", "w", "xwb"])
def test_products_that_are_not_asked_for_are_not_made_and_their_tensors_not_kept(asked):
    want = stepped(F.linear, leaves(asked=asked))
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = ours(*(args := leaves(asked=asked)))
    assert kept == [shape for name, shape in (("w", (3, 7, 24)), ("x", (40, 24))) if name in asked], "x for dw, w for dx"
    with Watched() as seen:
        y.backward(torch.ones_like(y).cumsum(0))
    assert len(seen.rows) == len(set(asked) & set("xw"))
    for name, t in zip("xwb", args):
        assert (t.grad is None) == (name not in asked)
        torch.testing.assert_close(t.grad, want[1][name])


def test_an_expanded_and_a_transposed_upstream_gradient():
    for dy in (torch.randn(3, 7, 1, device=DEVICE).expand(3, 7, 40), torch.randn(40, 7, 3, device=DEVICE).permute(2, 1, 0)):
        want, got = (stepped(f, leaves(), dy) for f in (F.linear, ours))
        for name in "xwb":
            torch.testing.assert_close(got[1][name], want[1][name])


@pytest.mark.parametrize("N, M", [(768, 25216), (2304, 25216), (3072, 25216), (768, 300), (7, 100000), (200000, 4096)])
def test_parts_of_the_rows_fill_the_gpu_and_leave_little_to_add_up(N, M, monkeypatch):
    launched: list[tuple] = []

    class Noted:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, options))

    monkeypatch.setattr(MODULE, "launcher", lambda kernel: Noted())
    monkeypatch.setattr(MODULE, "column_sum", lambda partial, out: partial)
    monkeypatch.setattr("whet.machine.sm_count", lambda: 132)
    partial = MODULE.row_sum(torch.empty(M, N, dtype=torch.bfloat16, device="meta"))
    ((across, parts), how), = launched
    rows = how["BLOCK_M"] * how["LOADS"]
    assert across * how["BLOCK_N"] >= N and partial.shape == (parts, N) and parts <= -(-M // rows)
    assert across * parts <= max(132 * MODULE.PER_SM, across) and 16 * parts <= max(16, M)
    if (N, M) in ((768, 25216), (2304, 25216), (3072, 25216)):
        assert across * parts >= 132 * 8, "enough loads in flight"


def test_refusals_name_the_argument():
    x, w, b = leaves()
    for args, reason in (
        ((x, w[:, :5], b), r"w must have shape \(N, 24\)"), ((x, w, b[:5]), r"b must have shape \(40,\)"),
        ((x, w.double(), b), "w must have x's dtype"), ((x, w, b.double()), "b must have x's dtype"),
        (tuple(t.double() for t in (x, w, b)), "x must be float32, float16 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=reason):
            ours(*args)
    for M, K, N in ((1 << 20, 2048, 8), (1 << 20, 8, 2048)):
        args = OP.inputs(dtype=torch.bfloat16, device="meta", M=M, K=K, N=N)
        assert OP.impls["triton"].refuses(**args) == "x and y must have less than 2^31 elements, got 2,147,483,648"


def test_vmap_around_it_has_the_gradients_of_a_loop():
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 5, 16), torch.randn(24, 16, requires_grad=True), torch.randn(24, requires_grad=True)
    want = torch.autograd.grad(F.linear(x, w, b).square().sum(), [w, b])
    got = torch.autograd.grad(torch.vmap(lambda one: whet.ops.linear_bias(one, w, b, impl="triton"))(x).square().sum(), [w, b])
    for a, e in zip(got, want):
        torch.testing.assert_close(a, e)
