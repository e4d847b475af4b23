"""The verifier must reject wrong kernels. Each mutant is a bug someone has shipped."""

import dataclasses
import signal
import sys
import time

import pytest
import torch
from conftest import every_op, first_case, ragged_case, trained

from whet import graphs
from whet.op import DTYPES, Call, Cost, Impl, Op, as_tuple, discover
from whet.prove import Proof, prove
from whet.verify import Use, evaluate, evidence, poisoned_empty, verify, verify_case
from whet.whole import verify_whole

NORMS = [pytest.param(op, id=op.name) for name, op in discover().items() if name.endswith(("rms_norm", "layer_norm"))]
CASE = dict(M=7, N=100)
DTYPE_NAMES = ("float32", "float16", "bfloat16")


class Scaled(torch.autograd.Function):
    """y as it is, its gradient times `factor`."""

    @staticmethod
    def forward(ctx, y, factor):
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


class CoarseUpstream(torch.autograd.Function):
    """y as it is, whose upstream gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.bfloat16().to(dy.dtype)


def first(change):
    """A mutant of the first output alone."""
    return lambda outs, args: (change(outs[0]), *outs[1:])


def one_element(y):
    off = torch.zeros_like(y)
    off[0, 0] = 1
    return y + off


def one_element_nan(y):
    off = torch.zeros_like(y)
    off[-1, -1] = float("nan")
    return y + off


def last_row_unwritten(y):
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out


def stale_row(y):
    """A kernel that forgets to advance its pointer writes the first row twice."""
    return torch.cat([y[:1], y[:1], y[2:]])


def input_changed(outs, args):
    args["x"].data.mul_(1.5)  # behind autograd's back, as a kernel writes
    return outs


MUTANTS = {
    "scaled by two": first(lambda y: y * 2),
    "scaled by 1.05": first(lambda y: y * 1.05),
    "one element off": first(one_element),
    "one element NaN": first(one_element_nan),
    "all infinite": first(lambda y: y / 0),
    "last row unwritten": first(last_row_unwritten),
    "a row written twice": first(stale_row),
    "all zero": first(lambda y: y * 0),
    "gradient cut": first(lambda y: y.detach()),
    "gradient scaled by 1.05": first(lambda y: Scaled.apply(y, 1.05)),
    "gradient scaled by two": first(lambda y: Scaled.apply(y, 2.0)),
    "gradient zero": first(lambda y: Scaled.apply(y, 0.0)),
    "wrong output dtype": first(lambda y: y.to(torch.float64)),
    "wrong output shape": first(lambda y: y[:, :-1]),
    "a result too many": lambda outs, args: (*outs, outs[0]),
    "input changed in place": input_changed,
}


def changed(op, change) -> Impl:
    """The reference with its outputs changed; as an impl that is no part of torch, so its buffers are poisoned."""

    def run(**args):
        outs = change(as_tuple(op.reference(**args)), args)
        return outs if len(outs) > 1 else outs[0]

    return Impl(run, needs="triton")


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("op", NORMS)
def test_verifier_rejects(op, mutant, dtype, device):
    verdict = verify(op, changed(op, MUTANTS[mutant]), op.inputs(dtype=DTYPES[dtype], device=device, **CASE))
    assert not verdict.ok and verdict.why


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("part", ["values", "gradients"])
@pytest.mark.parametrize("op", NORMS)
def test_one_percent_off_is_rejected_where_the_dtype_can_tell(op, part, dtype, device):
    """Not in bf16: there one percent is little more than one rounding step (0.8 %), which the budget must allow."""
    by = first(lambda y: y * 1.01 if part == "values" else Scaled.apply(y, 1.01))
    assert not verify(op, changed(op, by), op.inputs(dtype=DTYPES[dtype], device=device, **CASE)).ok


@pytest.mark.parametrize("op", [p for p in NORMS if p.id.startswith("add_")])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_verifier_rejects_a_stale_residual(op, dtype, device):
    """The second output left as its input came, or zero."""
    args = op.inputs(dtype=DTYPES[dtype], device=device, **CASE)
    stale = {
        "zero": lambda outs, a: (outs[0], outs[1] * 0),
        "an input returned": lambda outs, a: (outs[0], a["x"] * 1),
        "not differentiable": lambda outs, a: (outs[0], outs[1].detach()),
    }
    for name, change in stale.items():
        assert not verify(op, changed(op, change), args).ok, name


def square_linear() -> Op:
    """x @ w.T with a square w, where a transposed weight has the right shape and the wrong meaning."""

    def reference(x, w):
        """y = x @ w.T."""
        return x @ w.T

    def inputs(dtype, device, M, N):
        return dict(x=torch.randn(M, N, dtype=dtype, device=device), w=torch.randn(N, N, dtype=dtype, device=device))

    return Op(
        name="square_linear", reference=reference, inputs=inputs, case_of=lambda x, w: dict(M=x.shape[0], N=x.shape[1]),
        check=lambda x, w: None, cases=(dict(M=5, N=24),), shapes={}, cost=lambda x, w: Cost(0, 0), grads=("x", "w"), impls={},
    )


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_verifier_rejects_a_transposed_weight_and_a_transposed_gradient(dtype, device):
    class TransposedGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy @ w, x.T @ dy

    op = square_linear()
    args = op.inputs(dtype=DTYPES[dtype], device=device, M=5, N=24)
    assert verify(op, op.impls["eager"], args).ok
    assert not verify(op, Impl(lambda x, w: x @ w), args).ok
    verdict = verify(op, Impl(lambda x, w: TransposedGrad.apply(x, w)), args)
    assert not verdict.ok and "grad w" in verdict.why


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("op", every_op())
def test_verifier_accepts_the_reference_itself(op, dtype, device):
    verdict = verify_case(op, "eager", ragged_case(op), dtype, device)
    assert verdict.ok and verdict.share <= 1, verdict.why


@pytest.mark.parametrize("op", every_op(trained))
def test_verifier_rejects_every_op_with_one_gradient_doubled(op, device):
    """Each differentiable argument in turn: its gradient is judged on its own."""
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    for name in (k for k in op.grads if args[k] is not None):
        def doubled(name=name, **a):
            return op.reference(**a | {name: Scaled.apply(a[name], 2.0)})

        verdict = verify(op, Impl(doubled), args)
        assert not verdict.ok and f"grad {name}" in verdict.why, f"{name}: {verdict}"


@pytest.mark.parametrize("op", NORMS)
def test_budget_follows_the_dtype(op, device):
    """What bf16 may do, fp32 may not."""

    rounded = changed(op, lambda outs, args: tuple(o.bfloat16().to(o.dtype) for o in outs))
    assert verify(op, rounded, op.inputs(dtype=torch.bfloat16, device=device, **CASE)).ok
    assert not verify(op, rounded, op.inputs(dtype=torch.float32, device=device, **CASE)).ok


@pytest.mark.parametrize("op", every_op(trained))
def test_verifier_rejects_upstream_gradients_in_bfloat16_where_results_are_float32(op, device):
    """All digits of each are looked at. What is bfloat16 itself has no more of them."""
    rounded = changed(op, lambda outs, args: tuple(CoarseUpstream.apply(o) if o.requires_grad else o for o in outs))
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    verdict = verify(op, rounded, args)
    assert not verdict.ok and "grad" in verdict.why
    if op.pieces is not None:
        assert not verify_whole(op, rounded, args, True).ok and verify_whole(op, op.impls["eager"], args, True).ok
    args = op.inputs(dtype=torch.bfloat16, device=device, **first_case(op))
    assert any(o.dtype == torch.float32 for o in as_tuple(op.reference(**args))) or verify(op, rounded, args).ok


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_oracle_and_every_layout_get_the_same_upstream_gradient_with_all_digits(dtype, device):
    op = discover()["gelu"]
    same = dataclasses.replace(op, reference=lambda x, approximate="none": x * 1)  # its gradient is what comes in
    args = op.inputs(dtype=DTYPES[dtype], device=device, M=64, N=100)
    given = evaluate(same, same.reference, args, True)["grad x"]
    assert (given != given.bfloat16()).any() == (dtype != "bfloat16")
    for layout in ("contiguous", "sliced", "transposed", "unlike"):
        found = evidence(same, args, Use(layout=layout))
        assert torch.equal(found.oracle["grad x"], given.double()) and torch.equal(found.eager["grad x"], given)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_what_is_wrong_under_autocast_alone_is_stopped_by_the_proof(dtype, device):
    """The weights of a model in mixed precision are float32 there: outside autocast this loses nothing."""
    def run(x, w, b):
        return torch.nn.functional.linear(x, w, b * 0 if torch.is_autocast_enabled(x.device.type) else b)

    op, call = discover()["linear_bias"], Call("linear_bias", dict(M=16, K=24, N=32), dtype, True)
    assert prove(op, "torch", call, device).ok
    verdict = prove(dataclasses.replace(op, impls={"torch": Impl(run)}), "torch", call, device)
    assert not verdict.ok and verdict.rule == "autocast" and "output 0" in verdict.why


@pytest.mark.parametrize("op", every_op(trained))
def test_weights_in_float32_under_autocast_are_proved_where_an_op_takes_them_so(op, device):
    asks = {"activated_linear", "attention", "attention_spans", "gated_linear", "grouped_mlp", "linear", "linear_bias"}
    args = op.inputs(dtype=torch.bfloat16, device=device, **first_case(op))
    verdict = Proof(op, "eager", op.call(args), device).autocast()
    assert (verdict is not None) == (op.name in asks | {"linear_cross_entropy", "mlp"}) and (verdict is None or verdict.ok)


@pytest.mark.parametrize("op", NORMS)
def test_gradient_is_not_judged_when_it_is_not_asked_for(op, device):
    args = op.inputs(dtype=torch.float32, device=device, **CASE)
    assert verify(op, changed(op, MUTANTS["gradient cut"]), args, grad=False).ok
    assert not verify(op, changed(op, MUTANTS["scaled by two"]), args, grad=False).ok


def test_a_case_an_impl_refuses_is_not_ok_and_says_why(device):
    op = discover()["rms_norm"]
    verdict = verify_case(op, "triton", dict(M=2, N=32768), "float32", device)
    most = sys.modules["whet.ops._rows"].MAX_N
    assert not verdict.ok and verdict.why.startswith(f"refused: x.shape[-1] must be at most {most}")


def test_fresh_buffers_are_poisoned_inside_the_block_only():
    with poisoned_empty():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
        assert torch.ones(3).new_empty(2, dtype=torch.int32).eq(torch.iinfo(torch.int32).min).all()
    assert not isinstance(torch.empty, type(lambda: 0)), "torch.empty is torch's own again"


def test_a_crash_inside_the_poisoned_block_restores_torch():
    before = torch.empty
    with pytest.raises(KeyError), poisoned_empty():
        raise KeyError
    assert torch.empty is before


def test_evaluate_leaves_no_gradient_on_the_arguments(device):
    op = discover()["rms_norm"]
    args = op.inputs(dtype=torch.float32, device=device, **CASE)
    evaluate(op, op.reference, args, grad=True)
    assert not args["x"].requires_grad and args["x"].grad is None


def test_a_kernel_that_reads_between_sliced_rows_meets_nan_not_whatever_memory_held():
    from whet.op import lay

    rows = lay(torch.zeros(3, 5), "sliced")
    assert torch.equal(rows, torch.zeros(3, 5)) and rows._base is not None and rows._base[:, 5:].isnan().all()
    assert lay(torch.ones(2, 3, dtype=torch.int32), "sliced").sum() == 6


def test_a_candidate_has_a_limit_of_waiting_and_the_formula_has_none(monkeypatch):
    """Float64 may take long on a GPU that has little of it: that is nobody's hanging kernel."""
    def alarm(*_):
        raise TimeoutError

    op = discover()["rms_norm"]
    args = op.inputs(dtype=torch.float32, device="cpu", **CASE)
    monkeypatch.setattr(graphs, "hang_s", 0.02)
    monkeypatch.setattr(graphs, "synchronize", lambda: time.sleep(0.1))
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        assert evidence(op, args, Use(False)).oracle
        with pytest.raises(TimeoutError):
            evaluate(op, op.reference, args, grad=False)
    finally:
        signal.signal(signal.SIGALRM, before)
