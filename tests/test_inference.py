"""Ops for inference: no gradients, a row's bits whatever is beside it, caches changed in place, mutants rejected."""

import inspect
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch
from conftest import assert_same_bits, case_id, every_kernel, every_op, first_case, trained
from test_registered import kernel_of, summed_exactly
from torch._subclasses.fake_tensor import FakeTensorMode

from whet import machine
from whet.commands._shapes import calls_of_shapes
from whet.op import DTYPES, Call, Impl, as_tuple, discover, lay, tensors
from whet.ops._gemv import EXACT, FEW, batch_invariant, few
from whet.ops._pdl import pdl, pdl_options
from whet.verify import evaluate, own, verify, verify_case
from whet.worker import answer_measure, answer_verify

OPS = discover()
KERNELS = every_kernel(lambda op: not trained(op))
EVERY_KERNEL = pytest.mark.parametrize("op, impl", KERNELS)
PRODUCTS = pytest.mark.parametrize("op", every_op(lambda op: not trained(op) and "scale" in op.signature.parameters))
QUANTS = pytest.mark.parametrize("quant", [None, "int8", "int4", "fp8"])
ATTENTION = OPS["cached_attention"]
SPAN = sys.modules["whet.ops.cached_attention"].SPAN


def floats(args: dict) -> list[str]:
    return [k for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]


@EVERY_KERNEL
def test_an_input_that_asks_for_gradients_is_refused_while_they_are_recorded(op, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    tables = {"cos", "sin"}  # never trained
    for name in [k for k in floats(args) if k not in tables]:
        asking = args | {name: args[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=rf"{op.name}\[{impl}\]: is for inference and keeps no gradients: .*no_grad"):
            kernel_of(op, impl)(**asking)
        with torch.no_grad():
            assert op.impls[impl].refuses(**asking) is None


@pytest.mark.parametrize(
    "op, impl, case", [pytest.param(*k.values, c, id=f"{k.id}-{case_id(c)}") for k in KERNELS for c in k.values[0].cases]
)
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_results(op, impl, case, device):
    args = op.inputs(dtype=torch.bfloat16, device=device, **case)
    expected = as_tuple(op.reference(**{k: own(v) if k in op.mutates else v for k, v in args.items()}))
    with FakeTensorMode() as mode:
        faked = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        outs = as_tuple(kernel_of(op, impl)(**faked))
    assert [(o.shape, o.dtype, o.device) for o in outs] == [(e.shape, e.dtype, e.device) for e in expected]


def sizes(op) -> dict:
    return {"K": 192, "F" if op.name == "norm_swiglu" else "N": 6}


@pytest.mark.parametrize("quant", [None, "int4"])
@PRODUCTS
def test_a_row_has_the_same_bits_alone_and_among_others(op, quant, device):
    """Up to eight where that is asked for, a few in any case."""
    args = op.inputs(dtype=torch.bfloat16, device=device, M=8, quant=quant, **sizes(op))

    def rows(where: slice) -> list[torch.Tensor]:
        return list(as_tuple(op.impls["triton"].run(**args | {k: args[k][where] for k in ("x", "res") if k in args})))

    with batch_invariant():
        whole = rows(slice(0, 8))
    for where in (slice(5, 6), slice(2, 5)):
        assert all(torch.equal(part, every[where]) for part, every in zip(rows(where), whole)), where


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(device):
    args = ATTENTION.inputs(dtype=torch.bfloat16, device=device, B=2, H=2, KV=1, D=16, S=SPAN + 44, T=2)
    whole = evaluate(ATTENTION, kernel_of(ATTENTION), args, False)
    batched = ("qkv", "k_cache", "v_cache", "positions")
    for b in range(2):
        alone = evaluate(ATTENTION, kernel_of(ATTENTION), args | {k: args[k][b : b + 1] for k in batched}, False)
        assert_same_bits(alone, {k: v[b : b + 1] for k, v in whole.items()})


@pytest.mark.parametrize("window", [0, 5])
def test_eight_tokens_at_once_have_the_bits_of_one_after_another_across_a_span(window, device):
    case = dict(B=1, H=1, KV=1, D=16, S=SPAN + 8, T=8, at=SPAN - 4, window=window)
    args = ATTENTION.inputs(dtype=torch.bfloat16, device=device, **case)
    at_once = evaluate(ATTENTION, kernel_of(ATTENTION), args, False)

    def one_by_one(qkv, positions, **rest):
        rows = [kernel_of(ATTENTION)(qkv=qkv[:, t : t + 1], positions=positions + t, **rest) for t in range(8)]
        return torch.cat(rows, dim=1)

    assert_same_bits(evaluate(ATTENTION, one_by_one, args, False), at_once)


def test_what_is_known_of_the_longest_context_does_not_change_the_bits(device):
    """One span stores its rows itself; several are joined."""
    args = ATTENTION.inputs(dtype=torch.bfloat16, device=device, B=2, H=2, KV=1, D=16, S=3 * SPAN, at=SPAN - 2)
    one, two, unknown = (evaluate(ATTENTION, kernel_of(ATTENTION), args | dict(context=c), False) for c in (SPAN, SPAN + 1, 0))
    assert_same_bits(one, two)
    assert_same_bits(one, unknown)


@pytest.mark.parametrize("at, T", [(SPAN - 1, 1), (SPAN, 1), (SPAN - 8, 8), (SPAN - 7, 8), (SPAN - 1, 2), (2 * SPAN - 1, 2)])
def test_new_tokens_on_either_side_of_the_border_of_a_span(at, T, device):
    case = dict(B=1, H=1, KV=1, D=16, S=2 * SPAN + 8, T=T, at=at)
    verdict = verify_case(ATTENTION, "triton", case, "float32", device)
    assert verdict.ok, verdict.why


@pytest.fixture
def in_chunks(monkeypatch):
    """Programs' results are looked at eight at a time, so that few make several chunks."""
    monkeypatch.setattr(sys.modules["whet.ops.norm_argmax"], "CHUNK", 8)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("case", [dict(M=1, K=64, N=275), dict(M=9, K=64, N=70)], ids=case_id)
def test_the_largest_is_found_across_chunks(case, device):
    verdict = verify_case(OPS["norm_argmax"], "triton", case, "float32", device)
    assert verdict.ok, verdict.why


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("M", [4, 9])
def test_of_equal_logits_the_first_is_chosen(M, device):
    """Among the rows of one warp, of one program, of another, of another chunk."""
    op = OPS["norm_argmax"]
    N = 140 if M == 4 else 70
    args = summed_exactly(op.inputs(dtype=torch.bfloat16, device=device, M=M, K=64, N=N))
    pairs = [(3, 7), (8, 5), (2, 18), (19, N - 9), (0, N - 1), (40, 41), (42, 43), (44, 45), (46, 47)][:M]
    for x, pair in zip(args["x"], pairs):
        args["w"][list(pair)] = x * args["w"].abs().max()
    with batch_invariant():
        token, value = kernel_of(op)(**args)
    assert token.tolist() == op.reference(**args)[0].tolist() == [min(pair) for pair in pairs]
    scores = sys.modules["whet.ops.norm_argmax"].scores(**args)
    assert all((scores[i, list(pair)] == value[i]).all() for i, pair in enumerate(pairs))


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("M", [1, 9])
def test_a_logit_that_is_not_a_number_is_chosen_so_that_it_is_seen(M, device):
    op = OPS["norm_argmax"]
    args = op.inputs(dtype=torch.bfloat16, device=device, M=M, K=64, N=70)
    args["w"][66] = args["w"][40] = float("nan")
    token, value = kernel_of(op)(**args)
    assert token.tolist() == op.reference(**args)[0].tolist() == [40] * M and value.isnan().all()


@PRODUCTS
def test_fp8_weights_are_refused_by_a_gpu_that_cannot_widen_them(op, monkeypatch):
    known = machine.this_machine()

    def here(capability):
        monkeypatch.setattr(machine, "this_machine", lambda: replace(known, capability=capability))

    def said(quant):
        return op.impls["triton"].refuses(**op.inputs(dtype=torch.bfloat16, device="meta", M=1, quant=quant, **sizes(op)))

    here((8, 0))
    assert said("fp8") == "fp8 weights need compute capability 8.9, got 8.0" and said("int8") is said("int4") is None
    for enough in ((8, 9), (9, 0), None):
        here(enough)
        assert said("fp8") is None


def spread(t: torch.Tensor) -> torch.Tensor:
    return lay(t, "strided")


def long_rows(a: dict) -> dict:
    return {k: a[k].repeat(*(1,) * (a[k].dim() - 1), 200) for k in ("x", "w", "norm")}


REFUSED = {
    "rows that are too long": ("norm_linear", long_rows, "at most 16384"),
    "a norm of another dtype": ("norm_linear", lambda a: dict(norm=a["norm"].half()), "must all be float32"),
    "a norm with gaps": ("norm_linear", lambda a: dict(norm=spread(a["norm"])), "norm must be contiguous"),
    "a residual with gaps": ("linear_add", lambda a: dict(res=spread(a["res"])), "res must be contiguous"),
    "positions with gaps": ("cached_attention", lambda a: dict(positions=spread(a["positions"])), "positions must be"),
    "tables with gaps": ("cached_attention", lambda a: dict(cos=spread(a["cos"]), sin=spread(a["sin"])), "cos and sin must be"),
    "norms with gaps": ("cached_attention", lambda a: dict(q_norm=spread(a["q_norm"])), "q_norm must be contiguous"),
    "a cache shared by the batch": ("cached_attention", lambda a: dict(v_cache=lay(a["v_cache"], "expanded")), "share memory"),
    "a prompt": ("cached_attention", lambda a: dict(qkv=a["qkv"].repeat(1, 5, 1)), "at most 8 new tokens"),
    "caches of another dtype": ("cached_attention", lambda a: {k: a[k].half() for k in ("k_cache", "v_cache")}, "must all be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_take_is_refused_with_the_reason(name, device):
    op, changed, reason = REFUSED[name]
    case = dict(B=3, H=2, KV=1, D=16, S=24, T=2) if op == "cached_attention" else dict(M=2, K=100, N=9)
    args = OPS[op].inputs(dtype=torch.float32, device=device, **case)
    with pytest.raises(ValueError, match=rf"{op}\[triton\]: .*{re.escape(reason)}"):
        kernel_of(OPS[op])(**args | changed(args))


@QUANTS
def test_a_scale_must_be_given_with_quantised_weights_and_with_those_alone(quant, device):
    op = OPS["norm_linear"]
    args = op.inputs(dtype=torch.float32, device=device, M=1, K=128, N=8, quant=quant)
    wrong = args | dict(scale=torch.ones(8, device=device) if quant is None else None)
    with pytest.raises(ValueError, match=r"norm_linear\[eager\]: scale must be (given with|None for)"):
        kernel_of(op, "eager")(**wrong)


ROPE = dict(B=2, T=3, H=4, KV=2, D=16, S=12, start=5)
PLAIN = dict(B=2, H=4, KV=2, D=16, S=40, T=3, at=30)
MUTANTS = [
    ("norm_linear", dict(M=2, K=64, N=9, quant="int8"), "scale ignored", "dense(w, scale, x.dtype)", "w.to(x.dtype)"),
    ("norm_linear", dict(M=2, K=64, N=9), "weights of the norm forgotten", "r(rms_norm(x, norm", "r(rms_norm(x, 1 + 0 * norm"),
    ("norm_linear", dict(M=2, K=64, N=9), "norm by the sum, not the mean", "norm(x, norm, eps)", "norm(x, norm, eps) / 8"),
    ("norm_linear", dict(M=2, K=64, N=9, bias=True), "bias forgotten", ", bias)\n", ")\n"),
    ("norm_swiglu", dict(M=2, K=64, F=9), "gate and up swapped", "gate, up =", "up, gate ="),
    ("norm_swiglu", dict(M=2, K=64, F=9), "silu forgotten", " * torch.sigmoid(gate)", ""),
    ("linear_add", dict(M=2, K=64, N=9), "residual forgotten", "return res + ", "return "),
    ("linear_add", dict(M=2, K=64, N=9), "residual twice", "return res + ", "return res + res + "),
    ("norm_rope", ROPE, "key written one late", " k_cache[:, :, start :", " k_cache[:, :, start + 1 : 1 +"),
    ("norm_rope", ROPE, "value not written", ", v_cache[:, :, start : start + T] = k, v", " = k"),
    ("norm_rope", ROPE, "norms swapped", "rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)",
     "rms_norm(q, k_norm, eps), rms_norm(k, q_norm, eps)"),
    ("norm_rope", ROPE, "turned by the position after", "cos, sin, start)", "cos, sin, start + 1)"),
    ("norm_argmax", dict(M=2, K=64, N=99), "the token after", "return token,", "return token + 1,"),
    ("norm_argmax", dict(M=2, K=64, N=99), "the smallest", ".max(-1)", ".min(-1)"),
    ("norm_argmax", dict(M=2, K=64, N=99), "logits before the norm", "scores(x, norm, w, scale, eps)",
     "F.linear(x, dense(w, scale, x.dtype)).to(torch.promote_types(x.dtype, torch.float32))"),
    ("cached_attention", PLAIN, "key written one late", " k_cache[row, head, at", " k_cache[row, head, 1 + at"),
    ("cached_attention", PLAIN, "value not written", ", v_cache[row, head, at[:, None]] = k, v", " = k"),
    ("cached_attention", PLAIN, "key left as it came", "q, k = rope(", "q, _ = rope("),
    ("cached_attention", PLAIN, "query and key norm forgotten", "t if w is None else rms_norm(t, w, eps)", "t"),
    ("cached_attention", PLAIN, "norms swapped", "((q, q_norm), (k, k_norm))", "((q, k_norm), (k, q_norm))"),
    ("cached_attention", PLAIN, "a key too many", "j <= at[..., None]", "j <= at[..., None] + 1"),
    ("cached_attention", PLAIN, "a key too few", "j <= at[..., None]", "(j < at[..., None]) | (at[..., None] == 0)"),
    ("cached_attention", PLAIN | dict(window=3), "a key too many in the window", "(window or", "(window + 1 or"),
    ("cached_attention", PLAIN, "heads in another order", ".repeat_interleave(q.shape[1] // KV, dim=1)", ".repeat(1, 2, 1, 1)"),
    ("cached_attention", PLAIN, "turned by the position before", "cos, sin, at)", "cos, sin, at - 1)"),
]


def mutant(op, old: str, new: str) -> Impl:
    """The reference with a piece of its text replaced; as an impl that is no part of torch, so its buffers are poisoned."""
    text = inspect.getsource(op.reference)
    assert old in text, f"{op.name}'s reference no longer reads {old!r}"
    scope = dict(op.reference.__globals__)
    exec(text.replace(old, new), scope)
    return Impl(scope["reference"], needs="triton")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op, case, name, old, new", [pytest.param(*m, id=f"{m[0]}-{m[2]}") for m in MUTANTS])
def test_verifier_rejects(op, case, name, old, new, dtype, device):
    args = OPS[op].inputs(dtype=DTYPES[dtype], device=device, **case)
    assert verify(OPS[op], mutant(OPS[op], old, old), args).ok, "unchanged it must pass"
    verdict = verify(OPS[op], mutant(OPS[op], old, new), args)
    assert not verdict.ok and verdict.why


def test_a_cache_that_is_not_changed_in_place_is_told_by_its_name(device):
    def aside(**args):
        return ATTENTION.reference(**args | dict(v_cache=args["v_cache"].clone()))

    verdict = verify(ATTENTION, Impl(aside), ATTENTION.inputs(dtype=torch.float32, device=device, **PLAIN))
    assert not verdict.ok and verdict.why.startswith("changed v_cache")


@EVERY_KERNEL
def test_verifying_leaves_every_argument_as_it_was(op, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    assert verify(op, op.impls[impl], args).ok
    assert all(torch.equal(args[k].nan_to_num(), v.nan_to_num()) for k, v in before.items())
    assert len(before) == len(tensors(args))


@EVERY_KERNEL
def test_the_tuner_verifies_it_and_times_its_forward_even_where_gradients_are_asked_for(op, impl):
    call = Call(op.name, first_case(op), "float32", True)
    assert answer_verify(call, "eager")["ok"]
    measured = answer_measure(call, ["eager"], "eager", seconds=0.002)
    assert measured["timings"]["eager"]["ms"] > 0 and measured["flops"] > 0
    shape = ",".join(f"{k}={v}" for k, v in first_case(op).items())
    assert [c.grad for c, _ in calls_of_shapes([op.name], [shape], "float32", True)] == [False]


def test_a_position_past_the_cache_spoils_nothing_but_its_own_row(device):
    """What lies beside the caches, and the other rows, are left alone."""
    args = ATTENTION.inputs(dtype=torch.float32, device=device, B=2, H=2, KV=2, D=16, S=2 * SPAN)
    args["positions"] = torch.tensor([3, 2 * SPAN], device=device)
    wide = {k: torch.zeros(2, 2, 2 * SPAN + 8, 16, device=device) for k in ("k_cache", "v_cache")}
    for k, v in wide.items():
        v[:, :, : 2 * SPAN] = torch.nan_to_num(args[k])
    before = {k: v.clone() for k, v in wide.items()}
    out = kernel_of(ATTENTION)(**args | {k: v[:, :, : 2 * SPAN] for k, v in wide.items()})
    first = {k: args[k][:1] for k in ("qkv", "positions")} | {k: v[:1, :, : 2 * SPAN].clone() for k, v in before.items()}
    alone = kernel_of(ATTENTION)(**args | first)
    assert torch.equal(out[:1], alone)
    assert all(torch.equal(wide[k][1], before[k][1]) for k in wide)


def test_a_context_of_another_task_does_not_change_how_rows_are_taken():
    """batch_invariant and pdl belong to who entered them."""
    seen = []
    with batch_invariant(), pdl():
        thread = threading.Thread(target=lambda: seen.append((few(), pdl_options())))
        thread.start()
        thread.join()
        assert few() == EXACT
    assert seen == [(FEW, dict(PDL=False))] and few() == FEW
