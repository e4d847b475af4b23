"""Attention's Gluon forward: who gets it, that it is compiled ahead of time, and on a GPU that it is right at its edges."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import case_id
from test_registered import assert_same_bits

import whet.ops
from whet.aot import pretended
from whet.op import DTYPES, discover
from whet.ops.attention.common import Tile
from whet.ops.attention.launch import FUSED_GLUON, HOPPER, fused_tiles, table, tiles, tiles_of
from whet.verify import evaluate, judge, verify, widen

OP = discover()["attention"]
inputs, reference = OP.inputs, OP.reference
GLUON = HOPPER[128][0]
SIZES = pytest.mark.parametrize("D", [128, 96])
CASES = [
    dict(B=2, H=4, KV=4, Lq=1037, Lk=519), dict(B=3, H=6, KV=2, Lq=515, Lk=1031, causal="top-left"),
    dict(B=2, H=4, KV=1, Lq=515, Lk=1031, causal="bottom-right"), dict(B=2, H=4, KV=4, Lq=600, Lk=300, causal="bottom-right"),
    dict(B=1, H=8, KV=1, Lq=2049, Lk=2049, causal="top-left", window=333), dict(B=2, H=3, KV=3, Lq=700, Lk=700, window=100),
    dict(B=2, H=4, KV=2, Lq=1000, Lk=300, causal="top-left", window=17), dict(B=1, H=2, KV=2, Lq=900, Lk=200, window=9),
    dict(B=2, H=4, KV=2, Lq=400, Lk=1000, causal="bottom-right", window=130, scale=0.3),
    dict(B=5, H=4, KV=2, Lq=1, Lk=1000), dict(B=1, H=4, KV=4, Lq=1, Lk=77, causal="bottom-right"),
    dict(B=1, H=2, KV=2, Lq=1000, Lk=2), dict(B=1, H=2, KV=2, Lq=64, Lk=128),
    dict(B=1, H=1, KV=1, Lq=129, Lk=129, causal="top-left"),
]
TURNS = [  # a program for each SM takes several items; the third is one item more than an H200 has SMs
    dict(B=4, H=32, KV=8, Lq=1024, Lk=1024, causal="top-left"), dict(B=3, H=16, KV=16, Lq=700, Lk=900),
    dict(B=1, H=1, KV=1, Lq=17000, Lk=150), dict(B=1, H=7, KV=7, Lq=6000, Lk=6000, causal="top-left"),
    dict(B=2, H=32, KV=4, Lq=1500, Lk=1200, causal="bottom-right", window=256),
]


def kernel(**args):
    return whet.ops.attention(**args, impl="triton")


def judged(case, dtype, device):
    args = inputs(DTYPES[dtype], device, **case, return_lse=True)
    return verify(OP, replace(OP.impls["triton"], run=kernel), args, grad=False)


@pytest.mark.parametrize("target, D, dtype, gluon", [
    ("sm_90", 128, "bfloat16", True), ("sm_90", 65, "float16", True), ("sm_90", 128, "float32", False),
    ("sm_90", 64, "bfloat16", False), ("sm_90", 129, "bfloat16", False), ("sm_80", 128, "bfloat16", False),
    ("sm_100", 128, "bfloat16", False), ("gfx942", 128, "bfloat16", False),
])
def test_the_gluon_forward_is_hoppers_at_a_padded_head_size_of_128_asked_for_or_not(target, D, dtype, gluon):
    q = inputs(DTYPES[dtype], "meta", 1, 1, 1, 8, 8, D)["q"]
    with pretended(target):
        assert {tiles_of(q, tile)[0].gluon for tile in ("", GLUON)} == {gluon}
        assert tiles_of(q, "64x64w4s3/64x64w4s2/64x64w4s2")[0] == Tile.read("64x64w4s3")


def test_newer_gpus_take_plain_tiles_alone():
    q = inputs(torch.bfloat16, "meta", 1, 1, 1, 8, 8, 128)["q"]
    with pretended("sm_100"):
        assert table(q) == (
            "64x64w4s3/64x64w4s2/64x128w8s2", "64x64w4s2/64x32w4s2/32x64w4s2", "64x64w4s3/64x64w4s2/32x64w4s2"
        )


def test_the_gluon_forward_is_compiled_ahead_for_hopper_alone_with_every_span(compiled_rows):
    mine = [r for r in compiled_rows if r["kernel"] == "_forward_hopper_kernel"]
    assert {r["target"] for r in mine} == {"sm_90"} and not any(r["problem"] for r in mine)
    spans = {("HAS_LEFT=True" in r["config"], "HAS_RIGHT=True" in r["config"]) for r in mine}
    assert spans == {(False, False), (False, True), (True, True)}


def test_a_window_is_tuned_with_smaller_tiles_beside_the_others():
    q = inputs(torch.bfloat16, "meta", 1, 1, 1, 128, 128, 64)["q"]
    with pretended("sm_90"):
        more = [tile for tile in tiles(q, q, q, causal="top-left", window=32) if tile not in tiles(q, q, q, causal="top-left")]
        assert [tiles_of(q, tile)[0].N for tile in more] == [64, 64]
    with pretended("sm_100"):
        assert not any("g" in tile for tile in tiles(q, q, q, causal="top-left", window=32))


def test_the_backward_of_five_products_in_gluon_is_offered_on_hopper_where_it_serves():
    for target, D, dtype, offered in (
        ("sm_90", 64, "bfloat16", True), ("sm_90", 128, "float16", True), ("sm_90", 129, "bfloat16", False),
        ("sm_90", 64, "float32", False), ("sm_80", 64, "bfloat16", False), ("sm_100", 64, "bfloat16", False),
    ):
        with pretended(target):
            args = inputs(DTYPES[dtype], "meta", 1, 2, 2, 300, 300, D)
            assert fused_tiles(**args) == ((FUSED_GLUON,) if offered else ()), (target, D, dtype)
            assert fused_tiles(**inputs(DTYPES[dtype], "meta", 1, 2, 2, 300, 64, 64)) == (), "one tile of keys"


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 40])
@pytest.mark.parametrize("case", [*CASES[:9], *CASES[12:], TURNS[0], TURNS[1], TURNS[4]], ids=case_id)
def test_the_backward_of_five_products_in_gluon_is_right_and_has_the_same_bits_in_five_runs(case, D, device):
    def run(**args):
        return whet.ops.attention(**args, impl=f"triton_fused_bwd@{FUSED_GLUON}")

    args = inputs(torch.bfloat16, device, **case, D=D)
    verdict = verify(OP, replace(OP.impls["triton_fused_bwd"], run=run), args)
    assert verdict.ok, verdict.why
    first = evaluate(OP, run, args, grad=True)
    for _ in range(4):
        assert_same_bits(first, evaluate(OP, run, args, grad=True))


@pytest.mark.gpu
@SIZES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_values_and_logarithm_are_right_at_the_edges(case, dtype, D, device):
    verdict = judged(case | dict(D=D), dtype, device)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@SIZES
@pytest.mark.parametrize("case", TURNS, ids=case_id)
def test_programs_that_take_several_turns_are_right(case, D, device):
    verdict = judged(case | dict(D=D), "bfloat16", device)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "sliced", "expanded", "transposed"])
@pytest.mark.parametrize("D", [128, 96, 100, 65])
def test_any_strides_and_head_sizes_are_right(D, layout, device):
    verdict = judged(dict(B=2, H=4, KV=2, Lq=333, Lk=333, D=D, causal="top-left", layout=layout), "bfloat16", device)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@SIZES
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4], TURNS[0], TURNS[1], TURNS[4]], ids=case_id)
def test_five_runs_give_the_same_bits(case, D, device):
    args = inputs(torch.bfloat16, device, **case, D=D, return_lse=True)
    first = evaluate(OP, kernel, args, grad=False)
    for _ in range(4):
        assert_same_bits(first, evaluate(OP, kernel, args, grad=False))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(), dict(causal="bottom-right", window=150)], ids=["full", "window"])
def test_a_row_with_a_nan_gives_nan_for_its_logarithm_too_and_no_other(options, device):
    args = inputs(torch.bfloat16, device, 1, 2, 2, 300, 400, 128, **options, return_lse=True)
    args["q"][0, 0, 203, 2] = float("nan")
    o, lse = kernel(**args)
    assert o[0, 0, 203].isnan().all() and o.isnan().sum() == 128 and lse[0, 0, 203].isnan() and lse.isnan().sum() == 1


@pytest.mark.gpu
def test_queries_that_see_no_key_give_zero_and_minus_infinity(device):
    o, lse = kernel(**inputs(torch.bfloat16, device, 2, 4, 2, 600, 300, 128, causal="bottom-right", return_lse=True))
    assert not o[:, :, :300].any() and (lse[:, :, :300] == -math.inf).all() and lse[:, :, 300:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(4200, 130), (130, 4200)], ids=["queries", "keys"])
def test_tensors_past_two_to_the_31_elements_are_right_in_their_last_batches(lengths, device):
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 30:
        pytest.skip(f"needs 30 GiB of GPU memory, {free} are free")
    args = inputs(torch.bfloat16, device, B=520, H=8, KV=8, Lq=lengths[0], Lk=lengths[1], D=128, return_lse=True)
    assert max(args[n].numel() for n in "qk") > 2**31
    last = {k: v[-2:] if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    actual = {name: t[-2:] for name, t in evaluate(OP, kernel, args, grad=False).items()}
    eager = evaluate(OP, reference, last, grad=False)
    verdict = judge(actual, eager, evaluate(OP, reference, {k: widen(v) for k, v in last.items()}, grad=False))
    torch.cuda.empty_cache()
    assert verdict.ok, verdict.why
