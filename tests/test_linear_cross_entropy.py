"""linear_cross_entropy over several chunks: the same loss and gradients, and never all logits at once."""

import sys

import pytest
import torch
from conftest import DEVICE
from odd_sizes import Watched

import whet.ops
from whet.op import DTYPES, discover
from whet.verify import verify

OP = discover()["linear_cross_entropy"]
MODULE = sys.modules["whet.ops.linear_cross_entropy"]
CASES = [
    dict(M=19, D=16, V=100), dict(M=19, D=16, V=100, reduction="sum"), dict(M=19, D=16, V=100, reduction="none"),
    dict(M=19, D=16, V=37, label_smoothing=0.1, softcap=5.0), dict(M=19, D=16, V=100, num_items="tensor", layout="sliced"),
    dict(M=19, D=16, V=100, ignored="all", reduction="sum"),
]


def fours(M, row_bytes, w_bytes):
    return [slice(start, min(start + 4, M)) for start in range(0, M, 4)]


@pytest.mark.parametrize("sums", ["fp32", "storage"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_many_chunks_meet_the_budget_of_one(case, dtype, sums, monkeypatch):
    monkeypatch.setattr(MODULE, "chunks", fours)
    monkeypatch.setattr(MODULE, "ACCUMULATOR_BYTES", 1 << 30 if sums == "fp32" else 0)
    verdict = verify(OP, OP.impls["triton"], OP.inputs(dtype=DTYPES[dtype], device=DEVICE, **case))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("M", [0, 1, 127, 128, 129, 1000, 8192])
@pytest.mark.parametrize("row_bytes, w_bytes", [(100608, 77266944), (303872, 311164928), (2 << 30, 1 << 20), (16, 16)])
def test_chunks_cover_every_row_once_within_memory(M, row_bytes, w_bytes):
    cuts = MODULE.chunks(M, row_bytes, w_bytes)
    assert [row for cut in cuts for row in range(cut.start, cut.stop)] == list(range(M))
    room = max(MODULE.CHUNK_BYTES, w_bytes)
    assert all((cut.stop - cut.start) * row_bytes <= room or cut.stop - cut.start == 1 for cut in cuts)
    if len(cuts) > 1 and room // row_bytes >= 128:
        assert all((cut.stop - cut.start) % 128 == 0 for cut in cuts[:-1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_buffer_is_as_large_as_the_logits(reduction, monkeypatch):
    M, D, V = 64, 8, 64
    monkeypatch.setattr(MODULE, "chunks", fours)
    sizes, empty = [], torch.empty

    def watched(*args, **kwargs):
        made = empty(*args, **kwargs)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    x, w = torch.randn(M, D, device=DEVICE, requires_grad=True), torch.randn(V, D, device=DEVICE, requires_grad=True)
    target = torch.randint(V, (M,), device=DEVICE)
    whet.ops.linear_cross_entropy(x, w, target, reduction=reduction, impl="triton").sum().backward()
    assert sizes and max(sizes) < M * V / 4


def test_a_frozen_weight_costs_no_gradient_of_it():
    x, w = torch.randn(5, 8, device=DEVICE, requires_grad=True), torch.randn(16, 8, device=DEVICE)
    whet.ops.linear_cross_entropy(x, w, torch.arange(5, device=DEVICE), impl="triton").backward()
    assert x.grad.any() and w.grad is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # float16 is summed in float32, which a CPU does by copies
def test_an_odd_vocabulary_has_aligned_rows_in_all_three_products(dtype, bias, monkeypatch):
    args = OP.inputs(dtype=DTYPES[dtype], device=DEVICE, M=40, D=64, V=101, bias=bias)
    monkeypatch.setattr(MODULE, "ACCUMULATOR_BYTES", 0)
    b = args["b"] if bias else args["x"].new_empty(0)
    walk = MODULE.Walk(args["x"], args["w"], b, args["target"], True, True, bias)
    with Watched() as seen:
        for cut, z in walk:
            walk.add(cut, z)
    assert len(seen.rows) == 3 and not seen.misaligned(DTYPES[dtype]), seen.rows
