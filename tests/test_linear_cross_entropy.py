"""linear_cross_entropy over several chunks: the same loss and gradients, and never all logits at once."""

import sys

import pytest
import torch
from conftest import DEVICE
from odd_sizes import Watched

import whet.ops
from whet.alignment import PAD, padded_size
from whet.op import DTYPES, discover
from whet.verify import verify

OP = discover()["linear_cross_entropy"]
MODULE, CHUNKS = (sys.modules[f"whet.ops.{name}"] for name in ("linear_cross_entropy", "_loss_chunks"))
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
    monkeypatch.setattr(CHUNKS, "ACCUMULATOR_BYTES", 1 << 30 if sums == "fp32" else 0)
    verdict = verify(OP, OP.impls["triton"], OP.inputs(dtype=DTYPES[dtype], device=DEVICE, **case))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("M", [0, 1, 127, 128, 129, 1000, 8192, 32768])
@pytest.mark.parametrize("row_bytes, w_bytes", [(100608, 77266944), (303872, 311164928), (2 << 30, 1 << 20), (16, 16)])
def test_chunks_cover_every_row_once_within_memory(M, row_bytes, w_bytes):
    cuts = MODULE.chunks(M, row_bytes, w_bytes)
    assert [row for cut in cuts for row in range(cut.start, cut.stop)] == list(range(M))
    room = max(CHUNKS.CHUNK_BYTES, w_bytes, min(M * row_bytes // 8, CHUNKS.MANY_BYTES))
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


ODD = [
    dict(M=9, D=16, V=1), dict(M=9, D=16, V=1, bias=True, reduction="none"), dict(M=9, D=16, V=17, label_smoothing=0.1),
    dict(M=9, D=16, V=17, bias=True, softcap=5.0, ignore_index=3), dict(M=9, D=16, V=50, bias=True, num_items="number"),
    dict(M=9, D=16, V=50, reduction="none", w_layout="transposed"), dict(M=9, D=16, V=63, bias=True, reduction="sum"),
    dict(M=9, D=16, V=63, ignored="all"), dict(M=9, D=16, V=65, bias=True, label_smoothing=0.1, reduction="none"),
    dict(M=9, D=16, V=65, softcap=5.0, num_items="tensor", layout="sliced"), dict(M=0, D=16, V=65, bias=True),
    dict(M=0, D=16, V=65, reduction="none"), dict(M=9, D=7, V=65, bias=True),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", ODD, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_a_padded_vocabulary_meets_the_budget(case, dtype, monkeypatch):
    monkeypatch.setattr(MODULE, "chunks", fours)
    verdict = verify(OP, OP.impls["triton"], OP.inputs(dtype=DTYPES[dtype], device=DEVICE, **case))
    assert verdict.ok, verdict.why


def walked(args, reduction):
    """One forward and backward by the launchers; (the products, dw as kept for the backward or as returned)."""
    x, w, target = (args[k] for k in ("x", "w", "target"))
    b = x.new_empty(0) if args["b"] is None else args["b"]
    need = True, True, bool(b.numel())
    with Watched() as seen:
        if reduction == "mean":
            dw = MODULE.forward(x, w, target, -100, "mean", 0.0, 0.0, None, b, *need)[2]
        else:
            loss, stats = MODULE.rows_forward(x, w, target, -100, 0.0, 0.0, b, *need)
            dw = MODULE.rows_backward(torch.ones_like(loss), x, w, target, b, stats, -100, 0.0, 0.0, *need)[1]
    return seen, dw


@pytest.mark.parametrize("reduction, again", [("mean", 0), ("none", 1)])  # "none" makes the logits a second time
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("V", [1, 101, 50257])
def test_an_odd_vocabulary_leaves_no_product_an_odd_size(V, dtype, bias, reduction, again, monkeypatch):
    M, D, P = 16, 64, padded_size(V)
    monkeypatch.setattr(CHUNKS, "ACCUMULATOR_BYTES", 0)  # in float32 a CPU sums by copies, which have strides of their own
    args = OP.inputs(dtype=DTYPES[dtype], device=DEVICE, M=M, D=D, V=V, bias=bias)
    seen, dw = walked(args, reduction)
    assert P % PAD == 0 and seen.sizes == [(M, D, P)] * (1 + again) + [(M, P, D), (P, M, D)]
    assert not seen.misaligned(DTYPES[dtype]), seen.rows
    assert dw.shape == (V, D) and dw.is_contiguous() and dw.untyped_storage().nbytes() == P * D * dw.itemsize


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("D, V, dtype", [
    (64, 64, "bfloat16"), (64, 1000, "bfloat16"), (64, 100, "float32"), (7, 101, "float32"),
])
def test_an_aligned_vocabulary_or_an_odd_inner_size_copies_no_weight(D, V, dtype, reduction, monkeypatch):
    monkeypatch.setattr(CHUNKS, "ACCUMULATOR_BYTES", 0)
    args = OP.inputs(dtype=DTYPES[dtype], device=DEVICE, M=16, D=D, V=V)
    seen, dw = walked(args, reduction)
    assert seen.sizes[0] == (16, D, V) and seen.sizes[-2:] == [(16, V, D), (V, 16, D)]
    assert all(w == args["w"].data_ptr() for _, w in seen.places[:-1])
    assert dw.untyped_storage().nbytes() == V * D * dw.itemsize


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_padded_vocabulary_is_the_same_op_under_compile(reduction):
    args = OP.inputs(dtype=torch.float32, device=DEVICE, M=9, D=16, V=101, bias=True)
    args = {k: v.requires_grad_(k in OP.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}

    def step(x, w, b):
        return whet.ops.linear_cross_entropy(x, w, args["target"], reduction=reduction, b=b, impl="triton").sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="inductor" if DEVICE == "cuda" else "aot_eager", fullgraph=True)
    leaves = [args[k] for k in OP.grads]
    plain, traced = ((y, *torch.autograd.grad(y, leaves)) for y in (step(*leaves), compiled(*leaves)))
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    given, rest = (*leaves[:2], args["target"], -100), (leaves[2], True, True, True)
    if reduction == "mean":
        torch.library.opcheck(MODULE.FUSED.op, (*given, "mean", 0.0, 0.0, None, *rest))
    else:
        torch.library.opcheck(MODULE.ROWS.op, (*given, 0.0, 0.0, *rest))
