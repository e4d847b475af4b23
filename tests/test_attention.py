"""What attention promises beyond every op's tests: spans, queries without keys, the logarithm, E4M3, and torch's refusals."""

import itertools
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import case_id
from test_registered import Watch
from torch._subclasses.fake_tensor import FakeTensorMode

import whet.ops
from whet.op import DTYPES, discover
from whet.ops.attention import stock
from whet.ops.attention.common import ALIGN, ready
from whet.ops.attention.meaning import LAYOUTS, PROVABLE, ROWS, _blocks, any_blind, pairs, rounded, seen, span
from whet.verify import evaluate, judge, verify

OP = discover()["attention"]
inputs, reference, case_of, cost, proof = OP.inputs, OP.reference, OP.case_of, OP.cost, OP.proof
SDPA = {"sdpa_flash": "flash", "sdpa_efficient": "efficient", "sdpa_cudnn": "cudnn"}
SPANS = list(itertools.product(
    (None, False, "top-left", "bottom-right"), (None, 1, 3, 100), ((5, 5), (3, 9), (9, 3), (1, 7), (7, 1), (4, 0), (0, 4))
))


def make(dtype=torch.float64, device="cpu", B=1, H=2, KV=2, Lq=5, Lk=7, D=16, **options):
    return inputs(dtype, device, B, H, KV, Lq, Lk, D, **options)


def may_see(i, j, causal, window, Lq, Lk):
    """The definition, pair by pair."""
    at = i + Lk - Lq if causal == "bottom-right" else i
    if causal:
        return j <= at and (window is None or j > at - window)
    return window is None or abs(j - at) < window


def brute_mask(causal, window, Lq, Lk):
    rows = [[may_see(i, j, causal, window, Lq, Lk) for j in range(Lk)] for i in range(Lq)]
    return torch.tensor(rows, dtype=torch.bool).view(Lq, Lk)


def test_causal_true_on_unequal_lengths_names_both_alignments():
    with pytest.raises(ValueError, match=r"^attention\[eager\]: causal must be 'top-left' .* or 'bottom-right' .* got True"):
        whet.ops.attention(**make(causal=True), impl="eager")


def test_causal_true_on_equal_lengths_is_top_left_and_false_is_none():
    args = make(Lq=6, Lk=6)
    for short, meant in ((True, "top-left"), (False, None)):
        said, full = (whet.ops.attention(**args | dict(causal=c), impl="eager") for c in (short, meant))
        assert torch.equal(said, full)
        assert case_of(**args | dict(causal=short)) == case_of(**args | dict(causal=meant))


@pytest.mark.parametrize("name, value", [
    ("causal", "left"), ("causal", 1), ("window", 0), ("window", 2.5), ("window", True), ("scale", "half"),
    ("return_lse", None), ("precision", "fp4"),
])
def test_an_option_out_of_range_is_named_with_what_was_given(name, value):
    with pytest.raises(ValueError, match=rf"^attention\[eager\]: {name} must be .*got {re.escape(repr(value))}"):
        whet.ops.attention(**make() | {name: value}, impl="eager")


@pytest.mark.parametrize("change, words", [
    (dict(q=torch.zeros(5, 16)), r"q must have four dimensions .*got \(5, 16\)"),
    (dict(v=torch.zeros(1, 2, 6, 16)), r"v must have k's shape \(1, 2, 7, 16\), got \(1, 2, 6, 16\)"),
    (dict(k=torch.zeros(1, 3, 7, 16), v=torch.zeros(1, 3, 7, 16)), r"heads that divides q's 2, got 3"),
    (dict(k=torch.zeros(1, 2, 7, 16).half()), r"k must have q's dtype torch.float32 outside autocast, got torch.float16"),
])
def test_tensors_that_do_not_fit_are_named_with_both_sizes(change, words):
    with pytest.raises(ValueError, match=words):
        whet.ops.attention(**make(torch.float32) | change)


@pytest.mark.parametrize("causal, window, lengths", SPANS)
def test_span_says_the_definition(causal, window, lengths):
    see = brute_mask(causal, window, *lengths)
    where = span(causal, window, *lengths)
    assert torch.equal(seen(*where, *lengths, "cpu"), see)
    assert pairs(*where, *lengths) == see.sum()
    assert any_blind(*where, *lengths) == bool((~see.any(-1)).any())
    args = make(device="meta", B=2, H=4, Lq=lengths[0], Lk=lengths[1], causal=causal, window=window)
    assert cost(**args).flops == 4 * 2 * 4 * 16 * see.sum() and cost(**args).bwd_flops == 10 * 2 * 4 * 16 * see.sum()


def test_cost_of_the_largest_shape_needs_no_memory():
    args = inputs(torch.bfloat16, "meta", **OP.shapes["large (200k, 5k)"])
    assert cost(**args).flops == 4 * 8 * 64 * 205000 * 200000


def head_by_head(q, k, v, causal, window, scale):
    """(o, lse) of one query of one head at a time, over the keys it sees and no others; None for one that sees none."""
    see = brute_mask(causal, window, q.shape[2], k.shape[2])
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        kv = h // (q.shape[1] // k.shape[1])
        scores = k[b, kv, see[i]] @ q[b, h, i] * scale
        yield (b, h, i), (scores.softmax(0) @ v[b, kv, see[i]], torch.logsumexp(scores, 0)) if len(scores) else None


@pytest.mark.parametrize("causal, window, lengths", [
    (None, None, (5, 7)), ("top-left", None, (5, 7)), ("bottom-right", None, (5, 7)), ("bottom-right", 2, (7, 5)),
    (None, 2, (7, 4)),
])
def test_values_logarithm_and_gradients_are_those_of_one_query_at_a_time(causal, window, lengths):
    args = make(B=2, H=4, KV=2, Lq=lengths[0], Lk=lengths[1], causal=causal, window=window, scale=0.7, return_lse=True)
    leaves = [args[n].requires_grad_() for n in "qkv"]
    o, lse = reference(**args)
    total = torch.zeros((), dtype=torch.float64)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    for (b, h, i), one in head_by_head(*leaves, causal, window, 0.7):
        if one is None:
            assert not o[b, h, i].any() and lse[b, h, i] == -math.inf
            continue
        torch.testing.assert_close((o[b, h, i], lse[b, h, i]), one)
        total = total + (one[0] * do[b, h, i]).sum() + one[1] * dlse[b, h, i]
    expected = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(torch.autograd.grad((o, lse), leaves, (do, dlse)), expected)


def test_the_formula_and_sdpa_mean_the_same():
    args = make(H=4, KV=2, causal="top-left")
    theirs = F.scaled_dot_product_attention(args["q"], args["k"], args["v"], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference(**args), theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths, causal", [((9, 3), "bottom-right"), ((9, 0), None), ((9, 0), "top-left")])
def test_a_query_without_keys_gives_zero_and_no_gradient(lengths, causal, dtype):
    args = make(DTYPES[dtype], Lq=lengths[0], Lk=lengths[1], causal=causal, return_lse=True)
    found = evaluate(OP, reference, args, grad=True)
    blind = slice(0, lengths[0] - lengths[1])
    assert not found["output 0"][:, :, blind].any() and (found["output 1"][:, :, blind] == -math.inf).all()
    assert not found["grad q"][:, :, blind].any()
    assert all(found[f"grad {n}"].isfinite().all() for n in "qkv")


@pytest.mark.parametrize("case", [c for c in OP.cases if c.get("return_lse") or c.get("precision")], ids=case_id)
def test_reference_traces_whole(case):
    torch._dynamo.reset()
    args = inputs(torch.bfloat16, "cpu", **case)
    traced = torch.compile(reference, backend="aot_eager", fullgraph=True, dynamic=False)
    plain, again = evaluate(OP, reference, args, True), evaluate(OP, traced, args, True)
    assert all(torch.equal(plain[k], again[k]) for k in plain)


def test_autocast_gives_its_dtype_whichever_impl_serves():
    args = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {whet.ops.attention(**args, impl=impl).dtype for impl in ("eager", "torch")} == {torch.bfloat16}


GRID = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0.0).unique()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e4])
def test_rounding_is_to_the_nearest_of_e4m3_under_the_smallest_power_of_two_that_fits(dtype, size):
    x = (torch.randn(2, 3, 300, 24) * size).to(DTYPES[dtype])
    x[0, 0, :ROWS] = 0
    near = rounded(x)
    assert near.dtype == x.dtype
    for b, h, start in itertools.product(range(2), range(3), range(0, 300, ROWS)):
        block, got = (t[b, h, start : start + ROWS].double() for t in (x, near))
        amax = block.abs().max().item()
        exponent = math.frexp(amax / 448)[1] if amax else 0  # amax / 448 <= 2^exponent, and maybe 2^(exponent - 1)
        exponent -= bool(amax) and amax <= 448 * 2.0 ** (exponent - 1)
        unit = 2.0**exponent
        assert torch.isin(got / unit, GRID).all()
        assert torch.equal((got - block).abs(), (block[..., None] / unit - GRID).abs().amin(-1) * unit)


@pytest.mark.parametrize("amax, scale", [
    (448.0, 1.0), (448.00003, 2.0), (447.99997, 1.0), (1.75, 2.0**-8), (1.7500001, 2.0**-7), (224.0, 0.5), (0.0, 1.0),
])
def test_the_scale_turns_exactly_at_e4m3s_largest_value(amax, scale):
    x = torch.zeros(1, 1, 2, 16)
    x[..., 0, 0], x[..., 1, 0] = amax, scale * 2.0**-9  # E4M3's smallest value: kept under this scale, lost under the next
    assert rounded(x)[..., 1, 0] == x[..., 1, 0]
    if amax:
        x[..., 1, 0] *= 0.5 - 2**-10
        assert rounded(x)[..., 1, 0] == 0


def test_rounding_passes_the_gradient_and_leaves_float64_alone():
    x = torch.randn(1, 2, 130, 16, requires_grad=True)
    up = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(rounded(x), x, up)[0], up)
    assert rounded(x.double()).equal(x.double())
    assert not rounded(x).equal(x)


def test_rounding_ties_go_to_even():
    x = torch.tensor([448.0, 17.0, 19.0, 2**-9 * 0.5, 2**-9 * 1.5]).view(1, 1, 1, 5)
    assert rounded(x).flatten().tolist() == [448.0, 16.0, 20.0, 0.0, 2**-8]


@pytest.mark.parametrize("impl", ["torch", *SDPA, "flex"])
def test_an_impl_of_one_precision_names_who_serves_fp8(impl):
    assert "precision='fp8' is served by triton_fp8, eager and compile" in OP.impls[impl].refuses(**make(precision="fp8"))


@pytest.mark.parametrize("impl", ["eager", "compile"])
def test_the_formula_refuses_scores_that_fit_nowhere(impl):
    args = inputs(torch.bfloat16, "meta", **OP.shapes["large (200k, 5k)"])
    assert re.search(r"no more than 16 GiB, got 12\d\d\.\d GiB for q \(1, 8, 205000, 64\)", OP.impls[impl].refuses(**args))
    assert OP.impls[impl].refuses(**inputs(torch.bfloat16, "meta", **OP.shapes["Llama GQA causal"])) is None


def test_sdpa_refuses_a_mask_past_its_limit_and_not_a_causal_flag():
    sizes = dict(dtype=torch.bfloat16, device="meta", Lq=2**17, Lk=2**17)
    assert stock.sdpa_refuses(**make(causal="top-left", **sizes)) is None
    assert "no more than 4 GiB" in stock.sdpa_refuses(**make(causal="top-left", window=9, **sizes))


EXTRA = [
    dict(B=3, H=5, KV=5, Lq=1, Lk=10**8, D=64), dict(B=2**20, H=32, KV=8, Lq=128, Lk=128, D=64, causal="bottom-right"),
    dict(B=1, H=32, KV=8, Lq=32768, Lk=32769, D=128, causal="bottom-right", window=20000),
    dict(B=1, H=8, KV=8, Lq=30001, Lk=30000, D=64, causal="top-left"), dict(B=1, H=8, KV=8, Lq=30081, Lk=30052, D=64),
    dict(B=1, H=8, KV=8, Lq=30052, Lk=30081, D=64),
]


@pytest.mark.parametrize("case", [*OP.shapes.values(), *EXTRA], ids=case_id)
def test_proof_keeps_what_a_kernel_turns_on(case):
    small = proof(case)
    alike = _blocks(small) == _blocks(case)
    assert small["B"] * small["H"] * small["Lq"] * small["Lk"] <= (5 if alike else 1) * PROVABLE
    assert {**small, "B": 0, "Lq": 0, "Lk": 0, "window": 0} == {**case, "B": 0, "Lq": 0, "Lk": 0, "window": 0}
    assert all(0 < small[n] <= case[n] and small[n] % ROWS == case[n] % ROWS for n in ("Lq", "Lk"))
    assert (small["Lq"] < small["Lk"], small["Lq"] > small["Lk"]) == (case["Lq"] < case["Lk"], case["Lq"] > case["Lk"])
    if "window" in case:
        assert (small["window"] < small["Lk"]) == (case["window"] < case["Lk"])


@pytest.mark.parametrize("H, L", [(32, 8192), (64, 16384)])
def test_proof_of_a_call_that_splits_no_queries_splits_none(H, L):
    case = dict(B=1, H=H, KV=8, Lq=L, Lk=L, D=128, causal="top-left")
    assert _blocks(proof(case)) == _blocks(case) == [False, False] and proof(case)["Lq"] == proof(case)["Lk"] < L


def test_proof_of_a_small_case_is_the_case():
    assert all(proof(case) == case for case in OP.cases)


@pytest.mark.parametrize("impl", [*SDPA, "flex"])
def test_off_the_gpu_a_gpu_backend_says_so(impl):
    assert OP.impls[impl].refuses(**make(torch.bfloat16)).startswith("needs tensors on the GPU")


@pytest.mark.parametrize("impl", ["triton", "triton_fused_bwd"])
def test_a_nan_upstream_of_a_query_that_sees_no_key_goes_nowhere(impl, device):
    args = make(torch.float32, device, Lq=140, Lk=70, D=16, causal="bottom-right", return_lse=True)
    leaves = {n: args[n].requires_grad_() for n in "qkv"}
    o, lse = whet.ops.attention(**(args | leaves), impl=impl)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    clean = torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse), retain_graph=True)
    do[:, :, 3], dlse[:, :, 5] = float("nan"), float("nan")
    assert all(map(torch.equal, clean, torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse))))


def test_a_row_with_a_nan_gives_nan_for_its_logarithm_too(device):
    args = make(torch.float32, device, Lq=40, Lk=70, D=16, return_lse=True)
    args["q"][0, 0, 3, 2] = float("nan")
    o, lse = whet.ops.attention(**args, impl="triton")
    assert o[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan() and lse.isnan().sum() == 1


def test_rows_far_apart_are_read_where_they_are(device):
    """The stride of a row times the rows of a tile passes 2^31."""
    far = torch.empty(34 * 2**26, dtype=torch.bfloat16, device=device).as_strided((1, 1, 33, 16), (1, 1, 2**26, 1))
    far.copy_(torch.randn(far.shape, device=device))
    near = far.contiguous()
    assert torch.equal(whet.ops.attention(far, near, near, impl="triton"), whet.ops.attention(near, near, near, impl="triton"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl, D", [("triton", 32), ("triton", 20), ("triton_fused_bwd", 20), ("triton_fp8", 32)])
def test_fakes_promise_the_strides_that_kernels_give(impl, D, layout, device):
    precision = "fp8" if impl == "triton_fp8" else None
    args = make(torch.bfloat16, device, B=2, Lq=40, Lk=70, D=D, layout=layout, precision=precision)
    leaves = {n: args[n].detach().requires_grad_() for n in "qkv"}
    with Watch() as watch:
        o = whet.ops.attention(**(args | leaves), impl=impl)
        torch.autograd.grad(o, list(leaves.values()), torch.randn_like(o))
    assert len(watch.calls) == 2
    for func, call in watch.calls:
        real = func(*call)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = func(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in call))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_a_start_off_its_alignment_is_copied():
    x = torch.randn(2 * 2 * 8 * 16 + 1).bfloat16()[1:].view(2, 2, 8, 16)
    assert x.data_ptr() % ALIGN and ready(x).data_ptr() % ALIGN == 0 and torch.equal(ready(x), x)


def test_under_autocast_inputs_of_two_dtypes_are_one(device):
    q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in "qkv")
    with torch.autocast(device, torch.bfloat16):
        mixed = {impl: whet.ops.attention(q, k, v.bfloat16(), impl=impl) for impl in ("auto", "eager", "triton")}
        same = whet.ops.attention(q, k, v, impl="eager")
    exact = {"output 0": reference(q.double(), k.double(), v.double())}
    assert all(judge({"output 0": o}, {"output 0": same}, exact).ok for o in mixed.values())


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_is_right_and_taken_by_the_formula_alone(scale, device):
    args = make(torch.float32, device, Lq=33, Lk=33, D=16, causal="top-left", scale=scale)
    assert all("scale must be positive" in OP.impls[n].refuses(**args) for n in ("torch", "triton", "triton_fused_bwd"))
    assert torch.equal(whet.ops.attention(**args), reference(**args)) and reference(**args).isfinite().all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be None or a finite number"):
        whet.ops.attention(**make(torch.float32, scale=scale))


@pytest.mark.parametrize("backend", SDPA.values())
def test_the_reason_is_torchs_own_first_words(backend, monkeypatch):
    able = f"can_use_{backend}_attention"

    def declines(params, debug):
        assert debug and params.attn_mask.shape == (5, 7) and not params.is_causal
        warnings.warn("Heads are\n blue. (Triggered internally at /pytorch/aten/x.cpp:9.)", stacklevel=1)
        warnings.warn("And late.", stacklevel=1)
        return False

    args = make(torch.bfloat16)
    asked = (args["q"], args["k"], args["v"], "top-left", 3)
    monkeypatch.setattr(torch.backends.cuda, able, declines)
    assert [stock.torchs_reason(able, *asked) for _ in range(2)] == ["Heads are blue"] * 2
    monkeypatch.setattr(torch.backends.cuda, able, lambda params, debug: False)
    assert stock.torchs_reason(able, *asked) == f"torch.backends.cuda.{able} says no, without a reason"
    monkeypatch.setattr(torch.backends.cuda, able, lambda params, debug: True)
    assert stock.torchs_reason(able, *asked) is None
    assert not torch.is_warn_always_enabled()


@pytest.mark.parametrize("causal, lengths, window, flag", [
    ("top-left", (5, 7), None, True), ("bottom-right", (5, 5), None, True), ("bottom-right", (5, 7), None, None),
    ("top-left", (5, 5), 2, None), (None, (5, 5), 2, None), (None, (5, 7), None, False),
])
def test_sdpa_is_given_its_flag_where_it_means_the_same_and_a_mask_elsewhere(causal, lengths, window, flag):
    args = make(Lq=lengths[0], Lk=lengths[1])
    mask, is_causal = stock.sdpa_options(args["q"], args["k"], causal, window)
    assert (mask is None, is_causal) == (flag is not None, bool(flag))
    assert mask is None or torch.equal(mask, brute_mask(causal, window, *lengths))


def test_flex_forward_is_right_without_a_gpu():
    """Its backward and its logarithm need one; its mask does not."""
    args = make(torch.float32, H=4, KV=2, Lq=70, Lk=40, causal="bottom-right", window=9)
    verdict = verify(OP, OP.impls["flex"], args, grad=False)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("causal, window, lengths", [s for s in SPANS if (s[0] or s[1]) and all(s[2])])
def test_flex_masks_by_the_definition_made_once_per_span_and_sizes(causal, window, lengths):
    from torch.nn.attention.flex_attention import create_mask

    made, again = (stock.block_mask(*span(causal, window, *lengths), *lengths, torch.device("cpu")) for _ in range(2))
    assert made is again
    whole = create_mask(made.mask_mod, None, None, *lengths, device="cpu")[0, 0]
    assert torch.equal(whole, brute_mask(causal, window, *lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", SDPA)
def test_each_backends_refusal_carries_torchs_words(impl, device):
    args = make(torch.float64, device, D=64)
    first, second = (OP.impls[impl].refuses(**args) for _ in range(2))
    assert first == second and re.search(r"dtype", first), first
    assert OP.impls[impl].refuses(**make(torch.bfloat16, device, Lq=128, Lk=128, D=64)) is None


@pytest.mark.gpu
def test_flash_refuses_a_mask_in_torchs_words(device):
    reason = OP.impls["sdpa_flash"].refuses(**make(torch.bfloat16, device, Lq=128, Lk=128, D=64, window=9))
    assert re.search(r"attn_mask", reason), reason


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["torch", *SDPA, "compile", "flex"])
def test_a_stock_impl_is_right_at_every_case_it_takes(impl, device):
    served = []
    for case in OP.cases:
        torch._dynamo.reset()
        args = inputs(torch.bfloat16, device, **case)
        if OP.impls[impl].refuses(**args) is None:
            verdict = verify(OP, OP.impls[impl], args)
            assert verdict.ok, f"{case_id(case)}: {verdict.why}"
            served.append(case)
    assert served, "refuses every case"
