"""The proof of a candidate must stop what one run of ordinary values lets through, and must let right kernels pass."""

import dataclasses
import json
import sys

import pytest
import torch
from conftest import every_op, without
from test_verify import CoarseUpstream

from whet import interpret, judge, parts, proofs, prove, values, whole
from whet.lock import Lock
from whet.op import DTYPES, Call, Impl, as_tuple, discover
from whet.prove import neighbours, wrong_now
from whet.source import files_of, fingerprint, module_of
from whet.tune import tune
from whet.verify import Evidence, Use, Violation, evaluate, evidence, verify

CALL = Call("rms_norm", dict(M=32, N=256), "bfloat16", True)


def without_dtype(run):
    return lambda out_dtype=None, **args: run(**args)


def offered(run, call: Call = CALL, impl: str = "torch", **facts) -> judge.Verdict:
    """The verdict on a function in place of an op's impl."""
    op = discover()[call.op]
    changed = dataclasses.replace(op, impls={impl: Impl(without_dtype(run), **facts)})
    return prove.prove(changed, impl, call, "cpu")


def rms_norm(x, w, eps=1e-6, scale=1.0, n=0):
    h = x.float()
    return (h * torch.rsqrt(h.square().sum(-1, keepdim=True) / (x.shape[-1] + n) + eps) * w.float() * scale).to(x.dtype)


def test_the_reference_in_another_order_is_right():
    assert offered(lambda x, w, eps=1e-6: rms_norm(x, w, eps)).ok


class Backward(torch.autograd.Function):
    """rms_norm with a gradient of the test's own."""

    @staticmethod
    def forward(ctx, x, w, eps, change):
        ctx.save_for_backward(x, w)
        ctx.eps, ctx.change = eps, change
        return rms_norm(x, w, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            dx, dw = torch.autograd.grad(rms_norm(x, w, ctx.eps), (x, w), dy)
        return (*ctx.change(dx, dw, dy, x, w, ctx.needs_input_grad), None, None)


def with_gradient(change):
    return lambda x, w, eps=1e-6: Backward.apply(x, w, eps, change)


def without_its_mean(dx, dw, dy, x, w, needs):
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return (dy.float() * w.float() * rstd).to(x.dtype), dw


def overwrites_upstream(dx, dw, dy, x, w, needs):
    dy.mul_(2)
    return dx, dw


def wrong_strides(dx, dw, dy, x, w, needs):
    return (dx, dw) if dy.is_contiguous() else (dx, dw * 1.5)


def last_row_missing(dx, dw, dy, x, w, needs):
    return dx, dw - (dy[-1] * rms_norm(x, w)[-1] / w).to(dw.dtype)


def stale(memory={}):  # noqa: B006 (what is remembered between calls is the fault)
    def run(x, w, eps=1e-6):
        key = x.data_ptr()
        if key not in memory:
            memory[key] = rms_norm(x, w, eps).detach()
        return rms_norm(x, w, eps) * 0 + memory[key]

    return run


BUFFERS: dict = {}


def shared(x, w, eps):
    """Results in a buffer that the next call of the size overwrites."""
    y = rms_norm(x, w, eps)
    out = BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(y.detach()))
    out.copy_(y.detach())
    return Same.apply(y, out)


class Same(torch.autograd.Function):
    """The second argument's memory with the first one's gradient."""

    @staticmethod
    def forward(ctx, y, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class TwoBuffers:
    """Results that take turns in two buffers."""

    def __init__(self):
        self.buffers, self.turn = {}, 0

    def __call__(self, x, w, eps=1e-6):
        y = rms_norm(x, w, eps)
        self.turn += 1
        out = self.buffers.setdefault((x.shape, x.dtype, self.turn % 2), torch.empty_like(y.detach()))
        out.copy_(y.detach())
        return Same.apply(y, out)


def seeding(x, w, eps=1e-6):
    torch.manual_seed(0)
    return rms_norm(x, w, eps)


WRONG = {
    "a NaN counts as zero": lambda x, w, eps=1e-6: torch.where(x == x, rms_norm(x, w, eps).nan_to_num(), 0.0),
    "results take turns in two buffers": TwoBuffers(),
    "random numbers begin again": seeding,
    "values 1% too large": lambda x, w, eps=1e-6: rms_norm(x, w, eps, scale=1.01),
    "values 0.2% too large": lambda x, w, eps=1e-6: rms_norm(x, w, eps, scale=1.002),
    "eps dropped": lambda x, w, eps=1e-6: rms_norm(x, w, 0.0),
    "eps a thousand times too large": lambda x, w, eps=1e-6: rms_norm(x, w, 1e3 * eps),
    "variance over N - 1": lambda x, w, eps=1e-6: rms_norm(x, w, eps, n=-1),
    "eps fixed": lambda x, w, eps=1e-6: rms_norm(x, w, 1e-6),
    "weights taken for positive": lambda x, w, eps=1e-6: rms_norm(x, w.abs(), eps),
    "wrong where M is ragged": lambda x, w, eps=1e-6: rms_norm(x, w, eps, scale=1.0 if x.shape[0] % 2 == 0 else 1.5),
    "a gradient without a term": with_gradient(without_its_mean),
    "an upstream gradient overwritten": with_gradient(overwrites_upstream),
    "dw wrong where x is frozen": with_gradient(lambda dx, dw, dy, x, w, needs: (dx, dw if needs[0] else dw * 2)),
    "dx wrong where w is frozen": with_gradient(lambda dx, dw, dy, x, w, needs: (dx if needs[1] else dx * 2, dw)),
    "strides of the upstream gradient assumed": with_gradient(wrong_strides),
    "an upstream gradient rounded to bfloat16": lambda x, w, eps=1e-6: CoarseUpstream.apply(rms_norm(x, w, eps)),
    "dw without the last row": with_gradient(last_row_missing),
    "NaN in one row reaches all": lambda x, w, eps=1e-6: rms_norm(x, w, eps) + 0 * x.sum(),
    "inputs remembered by their address": stale(),
    "results in a buffer that the next call overwrites": lambda x, w, eps=1e-6: shared(x, w, eps),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_proof_in_bfloat16_stops(fault):
    verdict = offered(WRONG[fault])
    assert not verdict.ok and verdict.rule and verdict.why


def bf16_alone(**_):
    return "takes bfloat16 alone" if _["x"].dtype != torch.bfloat16 else None


@pytest.mark.parametrize("scale", [1.01, 1.003])
def test_a_scale_shows_in_bfloat16_alone_since_rounding_averages_out(scale):
    """No float32 twin is there to see it: the slope over all values does, at half a percent of a rounding step."""
    call = dataclasses.replace(CALL, case=dict(M=128, N=1024))
    verdict = offered(lambda x, w, eps=1e-6: rms_norm(x, w, eps, scale=scale), call, refuses=bf16_alone)
    assert not verdict.ok and verdict.rule == "values"


def test_one_wrong_column_shows_along_its_axis():
    def run(x, w, eps=1e-6):
        y = rms_norm(x, w, eps)
        return torch.cat([y[:, :-1], y[:, -1:] * 1.012], 1)

    call = dataclasses.replace(CALL, case=dict(M=512, N=256))
    verdict = offered(run, call, refuses=bf16_alone)
    assert not verdict.ok and "axis 1" in verdict.why


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slopes_pass_results_that_were_rounded_twice(dtype):
    """A right kernel may round in between, as stock calls do."""
    def run(x, w, eps=1e-6):
        return rms_norm(x, torch.ones_like(w), eps) * w

    assert offered(run, dataclasses.replace(CALL, case=dict(M=128, N=512), dtype=dtype)).ok


def test_gradients_are_demanded_of_the_oracle():
    op = discover()["rms_norm"]
    cut = dataclasses.replace(op, reference=lambda x, w, eps=1e-6, out_dtype=None: op.reference(x, w, eps).detach())
    with pytest.raises(Violation):
        evidence(cut, op.inputs(dtype=torch.float32, device="cpu", M=4, N=32), Use())


def test_gradients_are_taken_whatever_grad_mode_was_left():
    op = discover()["rms_norm"]
    args = op.inputs(dtype=torch.float32, device="cpu", M=4, N=32)
    with torch.no_grad():
        found = evaluate(op, op.reference, args, grad=True)
    assert found["grad x"] is not None


def test_what_is_no_tensor_is_named():
    op = discover()["rms_norm"]
    verdict = verify(op, Impl(lambda **_: [1.0]), op.inputs(dtype=torch.float32, device="cpu", M=4, N=32))
    assert not verdict.ok and "float" in verdict.why


def test_wrong_on_a_later_call_is_seen_after_timing(monkeypatch):
    op, calls = discover()["rms_norm"], [0]

    def run(x, w, eps=1e-6):
        calls[0] += 1
        return rms_norm(x, w, eps, scale=1.0 if calls[0] < 50 else 2.0)

    changed = dataclasses.replace(op, impls={"torch": Impl(without_dtype(run))})
    assert wrong_now(changed, ["torch"], CALL, "cpu") == {}
    calls[0] = 100
    assert "torch" in wrong_now(changed, ["torch"], CALL, "cpu")


@pytest.mark.parametrize("op", every_op())
def test_every_op_names_hostile_values_of_its_own_shapes_and_layouts(op):
    case = next(c for c in op.cases if all(v != 0 for v in c.values()))
    args = op.inputs(dtype=torch.float32, device="cpu", **case)
    assert len(op.hostile) >= 6
    for name, family in op.hostile.items():
        new = family(args)
        for k, t in (new or {}).items():
            if isinstance(t, torch.Tensor) and k not in ("cos", "sin"):
                assert t.shape == args[k].shape and t.dtype == args[k].dtype and t.stride() == args[k].stride(), (name, k)
        assert new is None or op.check(**new) is None, name


def test_families_keep_within_what_a_dtype_holds():
    op = discover()["swiglu"]
    args = op.inputs(dtype=torch.float16, device="cpu", M=64, N=64)
    for name in set(op.hostile) - set(values.POISONED):
        assert all(torch.isfinite(t).all() for t in op.hostile[name](args).values()), name


def test_neighbours_are_sizes_that_share_the_bucket():
    op = discover()["rms_norm"]
    assert [c["M"] for _, c in neighbours(op, dict(M=64, N=8))] == [63, 33]
    assert neighbours(op, dict(M=1, N=8)) == []


@pytest.mark.parametrize("name, case", [
    ("rms_norm", dict(M=100, N=64)), ("layer_norm", dict(M=100, N=64)), ("add_rms_norm", dict(M=100, N=64)),
    ("add_layer_norm", dict(M=100, N=64)), ("add_layer_norm", dict(M=100, N=64, bias=False)),
    ("swiglu", dict(M=100, N=64)), ("gelu", dict(M=100, N=64)), ("cross_entropy", dict(M=100, V=64, ignored="none")),
    ("cross_entropy", dict(M=100, V=64, ignored="none", reduction="none")),
    ("linear_bias", dict(M=100, K=16, N=64)), ("linear_cross_entropy", dict(M=100, D=16, V=64, ignored="none")),
    ("linear_cross_entropy", dict(M=100, D=16, V=64, ignored="none", bias=True)),
    ("geglu", dict(M=100, N=64)), ("geglu", dict(M=100, N=64, packed=True, approximate="tanh")),
    ("attention", dict(B=2, H=4, KV=2, Lq=200, Lk=300, D=16)),
    ("attention", dict(B=1, H=2, KV=2, Lq=300, Lk=300, D=16, causal="top-left")),
    ("attention", dict(B=1, H=2, KV=1, Lq=200, Lk=300, D=16, causal="bottom-right", window=50, return_lse=True)),
])
def test_a_call_too_large_for_its_oracle_is_proved_by_parts(name, case, monkeypatch):
    monkeypatch.setattr(parts, "PART", 2000)
    monkeypatch.setattr(sys.modules["whet.ops.attention.pieces"], "SCORES", 30000)
    op = discover()[name]
    args = op.inputs(dtype=torch.float32, device="cpu", **case)
    assert whole.verify_whole(op, op.impls["eager"], args, True).ok
    for broken in ("output 0", *(f"grad {g}" for g in op.grads if args[g] is not None)):
        assert not whole.verify_whole(op, Impl(last_row_doubled(op, broken)), args, True).ok, broken


def last_row_doubled(op, broken: str):
    """The reference with the last row of one result twice as large."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, forward):
            ctx.forward = forward
            return double(t) if forward else t.clone()

        @staticmethod
        def backward(ctx, g):
            return g if ctx.forward else double(g), None

    def double(t):
        t = t.clone()
        last = t[..., -1, :] if t.dim() > 1 else t[-1:] if t.dim() else t[None]
        last.mul_(2)
        return t

    def run(**args):
        args = {k: Double.apply(v, False) if f"grad {k}" == broken and v is not None else v for k, v in args.items()}
        first, *others = as_tuple(op.reference(**args))
        outs = (Double.apply(first, True) if broken == "output 0" else first, *others)
        return outs if others else outs[0]

    return run


def test_the_interpreter_rounds_to_nearest_and_ties_to_even():
    x = torch.cat([torch.randn(4096), torch.tensor([1.00390625, 1.01171875, float("inf"), -0.0, 3.4e38])])
    bits = interpret.nearest_bfloat16(x.view(torch.int32).numpy().view("uint32"))
    assert torch.equal(torch.from_numpy(bits.view("int16")).view(torch.bfloat16), x.bfloat16())
    nan = interpret.nearest_bfloat16(torch.tensor([float("nan")]).view(torch.int32).numpy().view("uint32"))
    assert torch.from_numpy(nan.view("int16")).view(torch.bfloat16).isnan().all()


def test_a_fingerprint_follows_the_files_that_a_kernel_uses():
    ops = discover()
    names = {p.name for p in files_of(module_of(ops["attention"].impls["triton"].run))}
    assert {"backward.py", "forward.py", "meaning.py"} <= names and "rope.py" not in names
    assert fingerprint(ops["rms_norm"], "triton") != fingerprint(ops["swiglu"], "triton")


def test_an_edited_kernel_is_proved_and_timed_again_and_an_unedited_one_is_not(monkeypatch, tmp_path):
    """As after an edit: the torch impl's proof is of another source than the one that is here."""
    op, asked = discover()["rms_norm"], []

    def answers(worker, limit_s, what, call, **request):
        asked.append(request.get("impl", what))
        timings = {n: dict(ms=1.0, low=1.0, high=1.0, samples=20) for n in request.get("impls", ())}
        return {"ok": True, "share": 0.1, "why": ""} if what == "verify" else {"timings": timings}

    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)
    monkeypatch.setattr("whet.worker.Worker.ask", answers)
    with without(*(set(op.impls) - {"eager", "torch"})):
        tune([(CALL, 1)], Lock(tmp_path / "whet.lock"), modes=("eager",))
        assert sorted(asked) == ["eager", "measure", "torch"]
        lock = Lock.read(tmp_path / "whet.lock")
        assert lock.table() and tune([(CALL, 1)], lock, modes=("eager",)) and len(asked) == 3, "nothing was edited"
        after = {"torch": "edited", "eager": fingerprint(op, "eager")}
        for user in ("whet.tune", "whet.lock"):
            monkeypatch.setattr(f"{user}.fingerprint", lambda op, name: after[name])
        assert (not lock.table()) == (lock.calls[f"{CALL.key} @ eager"]["chosen"] == "torch")
        tune([(CALL, 1)], lock, modes=("eager",))
    assert sorted(asked[3:]) == ["measure", "torch"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stand_for_no_gradient(dtype):
    t = torch.zeros(3, dtype=DTYPES[dtype])
    assert judge.compare("grad k", t, None, None, 3.0).ok and not judge.compare("grad k", t + 1, None, None, 3.0).ok


def test_a_fault_among_like_values_of_an_argument_is_seen_where_it_drowns_elsewhere():
    """Values between -1 and -0.9 one and a half per cent too large: nothing along an axis, nothing over all."""
    torch.manual_seed(0)
    x = torch.randn(512, 1024, dtype=torch.float64)
    truth = x.sigmoid()
    right = truth.bfloat16()
    wrong = torch.where((x < -0.9) & (x > -1), truth * 1.015, truth).bfloat16()
    told = {"y": right}, {"y": truth}
    assert judge.judge({"y": right}, *told, beside={"x": x}).ok
    found = judge.judge({"y": wrong}, *told, beside={"x": x})
    assert not found.ok and "where x is from -" in found.why
    assert judge.judge({"y": wrong}, *told, beside={}).ok


def test_whet_prove_tells_each_candidate_and_keeps_what_was_proved_when_it_is_stopped(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from whet.commands import app

    told = CliRunner().invoke(app, ["prove", "rms_norm", "--cases", "--impl", "torch", "--records", str(tmp_path), "--json"])
    rows = json.loads(told.stdout)["measured"]["rows"]
    assert told.exit_code == 0 and len(rows) == len(discover()["rms_norm"].cases)
    assert {row["outcome"] for row in rows} <= {"right", "refused"}

    def cut(*_, **__):
        raise proofs.Stopped(rows[:2])

    monkeypatch.setattr(proofs, "prove_all", cut)
    told = CliRunner().invoke(app, ["prove", "rms_norm", "--without", "compile", "--records", str(tmp_path), "--json"])
    assert told.exit_code == 130 and json.loads(told.stdout)["measured"]["rows"] == rows[:2]


def test_on_a_gpu_the_oracles_results_are_kept_up_to_so_many_bytes(monkeypatch):
    proof = prove.Proof(discover()["rms_norm"], "torch", CALL, "cuda")
    made = Evidence({"output 0": torch.ones(4, 8)}, {"output 0": torch.ones(4, 8)})
    monkeypatch.setattr(prove, "KEPT_BYTES", 2 * prove.held_bytes(made))
    kept: dict = {}
    monkeypatch.setattr(prove, "_kept", kept)
    kept["first"] = made
    assert proof.keeps({}, made)
    kept["second"] = made
    assert not proof.keeps({}, made)
    prove.forget_evidence()
    assert not kept
