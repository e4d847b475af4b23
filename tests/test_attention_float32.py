"""attention in float32 by pairs of halves: heads of any magnitude, what is kept, and on a GPU as near as PyTorch's own."""

import pytest
import torch
from conftest import DEVICE

import whet.ops
from whet.op import discover
from whet.ops.attention import halves
from whet.verify import evaluate

OP = discover()["attention"]


def made(**case):
    torch.manual_seed(0)
    args = OP.inputs(dtype=torch.float32, device=DEVICE, **dict(B=2, H=4, KV=2, Lq=70, Lk=70, D=40, causal="top-left") | case)
    return {k: v.detach().requires_grad_(k in "qkv") if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def ours(**args):
    return whet.ops.attention(**args, impl="triton_float32")


def stepped(function, args, do):
    """o and the gradients of q, k and v, in float64."""
    leaves = {k: v.detach().clone().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    o = function(**leaves)
    o.backward(do.to(o.dtype))
    return {"o": o.detach().double()} | {k: leaves[k].grad.double() for k in "qkv"}


def in_float64(args):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def test_each_head_is_as_near_as_eager_whatever_the_others_magnitudes():
    args = made()
    by = torch.tensor([1.0, 2.0**-20, 2.0**12, 2.0**-9], device=DEVICE)[None, :, None, None]
    do = torch.randn(2, 4, 70, 40, device=DEVICE) * by
    args["v"] = (args["v"] * by[:, 1:3]).detach()
    got, eager, want = stepped(ours, args, do), stepped(OP.reference, args, do), stepped(OP.reference, in_float64(args), do)
    for name, o in want.items():
        for h in range(o.shape[1]):
            size = o[:, h].square().mean().sqrt()
            error, usual = ((t[name][:, h] - o[:, h]).square().mean().sqrt() for t in (got, eager))
            assert error <= 3 * (usual + torch.finfo(torch.float32).eps * size), f"{name}, head {h}"


def test_the_gradient_of_a_value_that_every_query_hardly_weighs_is_as_near_as_eagers():
    """Key 5's weights are 2^-30 of the others', also where a tile of queries ends past the last."""
    args = made(causal="top-left") | {k: torch.randn(2, 4, 70, 40, device=DEVICE) for k in "qk"}
    args["v"], do = torch.randn(2, 4, 70, 40, device=DEVICE), torch.randn(2, 4, 70, 40, device=DEVICE)
    args["q"][..., 0], args["k"][:, :, 5] = 4.0, 0.0
    args["k"][:, :, 5, 0] = -30 * 40**0.5 / (4 * 1.4427)
    got, eager, want = (stepped(f, a, do)["v"][:, :, 5] for f, a in (
        (ours, args), (OP.reference, args), (OP.reference, in_float64(args)),
    ))
    error, usual, size = (t.square().mean().sqrt() for t in (got - want, eager - want, want))
    assert error <= 3 * (usual + torch.finfo(torch.float32).eps * size)


@pytest.mark.parametrize("heads, length", [(70000, 33), (1, 1 << 22)])
def test_more_heads_and_more_rows_than_a_grid_has_rows_are_split(monkeypatch, heads, length):
    class Unlaunched:
        def __getitem__(self, grid):
            return lambda *args, **options: grids.append(grid)

    grids: list[tuple] = []
    monkeypatch.setattr(halves, "launcher", lambda kernel: Unlaunched())
    halves.split(torch.empty(heads, 1, length, 16, device="meta"), torch.empty(heads, dtype=torch.int32, device="meta"))
    assert grids and all(max(grid[1:], default=1) < 1 << 16 for grid in grids)


def test_the_peak_of_a_long_head_may_be_in_its_last_row():
    length = halves.ROWS * halves.PARTS + 1
    x, peak = torch.zeros(1, 2, length, 16, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    x[0, 1, -1, 3] = -5.0
    split = halves.split(x, peak)
    assert peak.view(torch.float32).tolist() == [0.0, 5.0]
    assert split[0, 1, -1, 3] == -5.0 / 4.0 * 2**14 and split.count_nonzero() == 1


def test_what_is_kept_is_as_large_as_what_was_given():
    args, kept = made(D=32), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        o = ours(**args)
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    given = sum(args[k].nbytes for k in "qkv")
    assert sum(own.values()) <= given + o.nbytes + 4 * o[..., 0].numel() + 1024, "halves of q, k and v, o and its logarithms"
    assert not {args[k].untyped_storage().data_ptr() for k in "qkv"} & own.keys()


def test_two_runs_have_the_same_bits():
    args, do = made(), torch.randn(2, 4, 70, 40, device=DEVICE)
    first, second = (stepped(ours, args, do) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_refusals_name_the_argument():
    for args, reason in (
        (made() | {k: t.detach().bfloat16() for k, t in made().items() if k in "qkv"}, "must be float32"),
        (made(D=136), "head size must be at most 128, got 136"),
    ):
        with pytest.raises(ValueError, match=reason):
            ours(**args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    dict(B=16, H=8, KV=4, Lq=512, Lk=512, D=128), dict(B=4, H=8, KV=8, Lq=1000, Lk=1000, D=64), dict(D=16, Lq=300, Lk=300),
    dict(B=2, H=8, KV=2, Lq=777, Lk=1024, D=96, causal=None), dict(Lq=600, Lk=600, D=80, window=100),
], ids=["128", "64", "16", "96", "window"])
def test_compiled_it_is_as_near_as_eager(case):
    args = made(**case)
    oracle, eager, got = (
        evaluate(OP, f, given, True)
        for f, given in ((OP.reference, in_float64(args)), (OP.reference, args), (ours, args))
    )
    for name, o in oracle.items():
        error, usual = ((t[name].double() - o).square().mean().sqrt() for t in (got, eager))
        assert error <= 2 * usual, name
