"""What float32 by halves is said to allocate inside an op is what its launchers allocate: kernels are not launched here."""

import itertools
import sys

import pytest
import torch

from whet.op import discover
from whet.ops.attention import launch
from whet.ops.mlp import hybrid, recompute
from whet.plan_memory import StorageBytes

discover()
linear, gated, activated, loss = (
    sys.modules[f"whet.ops.{name}"] for name in ("linear", "gated_linear", "activated_linear", "linear_cross_entropy")
)
NEEDS = pytest.mark.parametrize("need", [(True, True), (True, False), (False, True)], ids=["both", "x", "w"])
SIZES = pytest.mark.parametrize("M, K, N", [(8192, 1024, 8192), (2048, 8192, 1024), (1000, 300, 500), (100, 1000, 60000)])


class Unlaunched:
    def __getitem__(self, grid):
        return lambda *args, **options: None


@pytest.fixture(autouse=True)
def by_halves(monkeypatch):
    """As on a GPU made for it, and of memory that nothing writes to."""
    for module in [m for name, m in sys.modules.items() if name.startswith("whet.ops")]:
        if hasattr(module, "launcher"):
            monkeypatch.setattr(module, "launcher", lambda kernel: Unlaunched())
        if hasattr(module, "by_halves"):
            monkeypatch.setattr(module, "by_halves", lambda x: x.dtype == torch.float32)


def check(run, inside, *args):
    """The most that is allocated at a time beside the results; scales and a number a row or column are not counted."""
    with StorageBytes("cpu") as counted:
        for t in args:
            if isinstance(t, torch.Tensor):
                counted.count(t)
        start = counted.now
        results = run(*args)
        measured = counted.peak - counted.now
    assert results is not None and start <= counted.peak
    assert abs(measured - inside(*args)) <= max(0.02 * measured, 1 << 19), f"{measured:,}, said to be {inside(*args):,}"


def made(*shapes):
    return [torch.empty(*shape) for shape in shapes]


def asked(tensor, need):
    return tensor if need else None


@NEEDS
@SIZES
def test_linear(M, K, N, need):
    x, w, dy = made((M, K), (N, K), (M, N))
    check(linear.forward, linear.inside, x, w, *need)
    check(linear.backward, linear.inside_backward, dy, asked(x, need[1]), asked(w, need[0]), *need)


@NEEDS
@SIZES
def test_ends_of_mlps(M, K, N, need):
    x, up, packed, w, dy = made((M, N), (M, N), (M, 2 * N), (K, N), (M, K))
    for op, given in ((gated.FUSED, (x, up)), (gated.PACKED, (packed,)), (activated.FUSED, (x,))):
        check(op.forward, op.inside, *given, w, "gelu", *need)
        check(op.backward, op.bwd_inside, dy, *given, asked(w, need[0]), "gelu", *need)


@pytest.mark.parametrize("asked_for", sorted(itertools.product((False, True), repeat=3))[1:], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_whole_mlps(gated, asked_for):
    (x, up, down, gate, dy), none = made((1024, 96), (2048, 96), (160, 2048), (2048, 96), (1024, 160)), torch.empty(0)
    gate, pre = gate if gated else None, torch.empty(1024, 2048)
    for ours in (hybrid, recompute):
        check(ours.forward, ours.inside, x, up, down, gate, "silu", *asked_for)
    check(recompute.backward, recompute.inside_backward, dy, x, up, down, gate, "silu", *asked_for)
    given = dy, x, up, down, gate, pre, torch.empty(1024, 2048) if gated else none, gated, 96, "silu"
    check(hybrid.backward, hybrid.inside_backward, *given, *asked_for)


@NEEDS
@pytest.mark.parametrize("M, D, V", [(8192, 768, 50304), (4096, 1024, 50257), (300, 64, 5000)])
def test_a_loss_over_chunks(M, D, V, need):
    assert loss.zero_rows(torch.empty(V, D)) == 0, "halves need no padded copy of w"
    (x, w, b, stats, dloss), target = made((M, D), (V, D), (0,), (2, M), (M,)), torch.zeros(M, dtype=torch.long)
    check(loss.forward, loss.FUSED.inside, x, w, target, -100, "mean", 0.0, 0.0, None, b, *need, False)
    check(loss.rows_forward, loss.ROWS.inside, x, w, target, -100, 0.0, 0.0, b, *need, False)
    check(loss.rows_backward, loss.ROWS.bwd_inside, dloss, x, w, target, b, stats, -100, 0.0, 0.0, *need, False)


@pytest.mark.parametrize("D", [64, 36])
def test_attention(D):
    op, rest = launch.IN_HALVES, (1.0, 0, -1, 0)
    q, k, v, do = made((2, 8, 1000, D), (2, 4, 1000, D), (2, 4, 1000, D), (2, 8, 1000, D))
    check(op.forward, op.inside, q, k, v, *rest)
    o, lse, *kept = op.forward(q, k, v, *rest)
    check(op.backward, op.bwd_inside, do, None, *kept, o, lse, *rest)
