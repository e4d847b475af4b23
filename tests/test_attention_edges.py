"""The edges of attention's backward: a NaN goes no further than in the formula, and over one key there is no gradient."""

import pytest
import torch
from conftest import case_id

import whet.ops
from whet.op import DTYPES, discover
from whet.ops.attention.common import NOWHERE, lone_places
from whet.ops.attention.meaning import seen, span
from whet.verify import evaluate, judge, verify, widen

OP = discover()["attention"]
NAN = float("nan")
SPANS = [dict(causal="top-left"), dict(causal="bottom-right"), dict(causal="top-left", window=9), dict(window=9)]
KERNELS = [("triton", "float32"), ("triton", "bfloat16"), ("triton_fused_bwd", "float32"), ("triton_fp8", "bfloat16")]
TILES, ONE_TILE = dict(B=1, H=1, KV=1, Lq=70, Lk=70, D=16), dict(B=1, H=1, KV=1, Lq=40, Lk=50, D=16)


def named(value) -> str:
    return case_id(value) if isinstance(value, dict) else value


def results(args: dict, impl: str) -> dict:
    return evaluate(OP, lambda **given: whet.ops.attention(**given, impl=impl), args, grad=True)


def nan_rows(t: torch.Tensor) -> torch.Tensor:
    """Rows that hold nothing but NaN."""
    return t.isnan().all(-1)


def held_to_the_formula(args: dict, impl: str) -> None:
    """Where the formula gives a number so does the kernel, and no row is wholly NaN that is not so in the formula."""
    formula, found = evaluate(OP, OP.reference, args, grad=True), results(args, impl)
    for name, t in formula.items():
        assert not (found[name].isnan() & ~t.isnan()).any(), f"{name}: {int((found[name].isnan() & ~t.isnan()).sum())} too many"
        assert not (nan_rows(found[name]) & ~nan_rows(t)).any(), name


@pytest.mark.parametrize("span", [SPANS[0], SPANS[2]], ids=case_id)
@pytest.mark.parametrize(
    "sizes, impl, dtype", [*((TILES, *kernel) for kernel in KERNELS), (ONE_TILE, "triton", "bfloat16")], ids=named
)
def test_a_nan_in_one_query_makes_no_row_of_a_gradient_nan_that_the_formula_does_not(span, sizes, impl, dtype, device):
    precision = "fp8" if impl == "triton_fp8" else None
    args = OP.inputs(DTYPES[dtype], device, **sizes, **span, precision=precision)
    args["q"][0, 0, 30, 3] = NAN
    held_to_the_formula(args, impl)


@pytest.mark.parametrize("impl, name", [("triton", "k"), ("triton", "v"), ("triton_fused_bwd", "v")])
def test_a_nan_in_a_key_or_a_value_goes_no_further_than_in_the_formula(impl, name, device):
    args = OP.inputs(torch.bfloat16, device, **TILES, causal="top-left")
    args[name][0, 0, 30, 3] = NAN
    held_to_the_formula(args, impl)


def test_the_formula_itself_takes_a_nan_to_keys_that_its_query_does_not_see(device):
    """0 * NaN, in the products: a column of dk, and all of dv. What is held against kernels is that and no more."""
    args = OP.inputs(torch.float64, device, **TILES, causal="top-left")
    args["q"][0, 0, 30, 3] = NAN
    found = evaluate(OP, OP.reference, args, grad=True)
    assert nan_rows(found["grad k"]).sum() == 31 and found["grad k"][0, 0, 31:, 3].isnan().all()
    assert found["grad v"].isnan().all()


LONE = [
    dict(TILES, Lq=1, causal="top-left"), dict(TILES, Lq=1, Lk=40, causal="top-left", window=5), dict(TILES, Lq=74, window=5),
    dict(TILES, Lq=80, causal="bottom-right"),
]


@pytest.mark.parametrize("case, impl, dtype", [
    *((case, *kernel) for case in LONE[:2] for kernel in KERNELS),
    *((case, *kernel) for case in LONE[2:] for kernel in KERNELS[1:3]),
], ids=named)
def test_a_query_that_sees_one_key_has_no_gradient_and_gives_that_key_none(case, impl, dtype, device):
    precision = "fp8" if impl == "triton_fp8" else None
    args = OP.inputs(DTYPES[dtype], device, **case, precision=precision)
    found = results(args, impl)
    sees = seen(*span(args["causal"], args["window"], case["Lq"], case["Lk"]), case["Lq"], case["Lk"], device).sum(-1)
    assert (sees == 1).any() and not found["grad q"][:, :, sees <= 1].any()
    if case["Lq"] == 1:
        assert not found["grad k"].any() and found["grad v"].any()
    elif not precision:
        oracle = evaluate(OP, OP.reference, {k: widen(v) for k, v in args.items()}, grad=True)
        verdict = judge(found, evaluate(OP, OP.reference, args, grad=True), oracle)
        assert verdict.ok, verdict.why


@pytest.mark.parametrize("impl, dtype", KERNELS[:3])
def test_with_a_gradient_of_the_logarithm_one_key_has_its_own(impl, dtype, device):
    args = OP.inputs(DTYPES[dtype], device, **dict(TILES, Lq=1), causal="top-left", return_lse=True)
    verdict = verify(OP, OP.impls[impl], args)
    assert verdict.ok and results(args, impl)["grad k"].any(), verdict.why


@pytest.mark.parametrize("impl", ["triton", "triton_fused_bwd"])
def test_of_the_logarithm_alone_values_have_no_gradient(impl, device):
    args = OP.inputs(torch.float32, device, **dict(TILES, Lq=3), return_lse=True)
    for run in (OP.reference, lambda **given: whet.ops.attention(**given, impl=impl)):
        found = evaluate(OP, lambda run=run, **given: run(**given)[1], args, grad=True)
        assert found["grad v"] is None and found["grad q"].any() and found["grad k"].any()


def test_lone_places_are_those_where_one_key_is_seen():
    """For every span that kernels take: two keys or more, a window of two or more."""
    for causal in (None, "top-left", "bottom-right"):
        for window in (None, 2, 3, 7):
            for Lq, Lk in ((1, 5), (5, 5), (5, 2), (2, 5), (9, 4)):
                offset, left, right = span(causal, window, Lq, Lk)
                one = seen(offset, left, right, Lq, Lk, "cpu").sum(-1) == 1
                places = lone_places(-1 if left is None else left, -1 if right is None else right, Lk, None)
                assert [i + offset in places for i in range(Lq)] == one.tolist(), (causal, window, Lq, Lk)
    assert lone_places(3, 0, 9, torch.zeros(1)) == lone_places(-1, -1, 9, None) == (NOWHERE.value,) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("impl", ["triton", "triton_fused_bwd"])
@pytest.mark.parametrize("span", SPANS, ids=case_id)
def test_a_nan_in_one_query_of_compiled_tiles_makes_no_more_rows_nan_than_the_formula(span, impl, D, device):
    """B and H are such that no queries are split, and Hopper runs its Gluon kernels at a head size of 128."""
    args = OP.inputs(torch.bfloat16, device, B=8, H=16, KV=8, Lq=700, Lk=750, D=D, **span)
    args["q"][0, 0, 300, 3] = NAN
    held_to_the_formula(args, impl)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("impl", ["triton", "triton_fused_bwd"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("Lq", [1, 700])
def test_one_key_has_no_gradient_in_compiled_tiles(Lq, window, impl, D, device):
    args = OP.inputs(torch.bfloat16, device, B=8, H=16, KV=8, Lq=Lq, Lk=750, D=D, causal="top-left", window=window)
    found = results(args, impl)
    assert not found["grad q"][:, :, 0].any() and found["grad v"].any()
    assert (Lq == 1) == (not found["grad k"].any()) and verify(OP, OP.impls[impl], args).ok
