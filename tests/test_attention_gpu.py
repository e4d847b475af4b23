"""Attention kernels at sizes only a GPU runs: the same bits each time, rows of a very long call, offsets past 2^31."""

import pytest
import torch
from test_registered import assert_same_bits

import whet.ops
from whet.op import discover
from whet.verify import evaluate, judge, widen

pytestmark = pytest.mark.gpu

OP = discover()["attention"]
inputs, reference = OP.inputs, OP.reference
TRITON = pytest.mark.parametrize("impl", [n for n, i in OP.impls.items() if i.needs == "triton" and n != "triton_fp8"])
ODD = [
    dict(B=3, H=6, KV=2, Lq=1037, Lk=519, D=64), dict(B=2, H=4, KV=4, Lq=515, Lk=1031, D=80, causal="bottom-right"),
    dict(B=1, H=8, KV=1, Lq=2049, Lk=2049, D=128, causal="top-left", window=333), dict(B=2, H=3, KV=3, Lq=257, Lk=63, D=40),
]
SAMPLED = 64


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    torch.cuda.empty_cache()


def kernel(impl):
    return lambda **args: whet.ops.attention(**args, impl=impl)


def needs_gib(needed):
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < needed:
        pytest.skip(f"needs {needed} GiB of GPU memory, {free} are free")


def taken(impl, args):
    """The arguments, or a skip where the impl refuses them."""
    if reason := OP.impls[impl].refuses(**args):
        pytest.skip(f"refused: {reason}")
    return args


def run(function, args, do):
    """The output, and the gradients of q, k, v under an upstream gradient."""
    leaves = {k: v.detach().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    o = function(**leaves)
    grads = torch.autograd.grad(o, [leaves[n] for n in "qkv"], do)
    return {"output 0": o.detach()} | {f"grad {n}": g for n, g in zip("qkv", grads)}


def judged(actual, args, do):
    """A verdict on results against the reference on these arguments, which must be few enough for the oracle."""
    eager = run(reference, args, do)
    return judge(actual, eager, run(reference, {k: widen(v) for k, v in args.items()}, do.double()))


@TRITON
@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case['Lq']}x{case['Lk']}x{case['D']}")
def test_five_runs_at_odd_sizes_give_the_same_bits(impl, case, device):
    args = inputs(torch.bfloat16, device, **case)
    first = evaluate(OP, kernel(impl), args, grad=True)
    for _ in range(4):
        assert_same_bits(first, evaluate(OP, kernel(impl), args, grad=True))


@TRITON
def test_sampled_queries_of_the_largest_shape_are_right(impl, device):
    """Only they have an upstream gradient, so that the gradients of all keys are those of the reference on them alone."""
    args = taken(impl, inputs(torch.bfloat16, device, **OP.shapes["large (200k, 5k)"]))
    Lq = args["q"].shape[2]
    rows = torch.randperm(Lq, device=device)[: SAMPLED - 2].sort().values
    rows = torch.cat([rows, torch.tensor([0, Lq - 1], device=device)]).unique()
    few = args | dict(q=args["q"][:, :, rows])
    do = torch.zeros_like(args["q"])
    do[:, :, rows] = torch.randn_like(few["q"])

    actual = run(kernel(impl), args, do)
    rest = torch.ones(Lq, dtype=torch.bool, device=device)
    rest[rows] = False
    assert not actual["grad q"][:, :, rest].any(), "a query without an upstream gradient received one"
    for name in ("output 0", "grad q"):
        actual[name] = actual[name][:, :, rows]
    verdict = judged(actual, few, do[:, :, rows])
    assert verdict.ok, verdict.why


@TRITON
@pytest.mark.parametrize("lengths", [(8200, 130), (130, 8200)], ids=["queries", "keys"])
def test_tensors_past_two_to_the_31_elements_are_right_in_their_last_batches(impl, lengths, device):
    needs_gib(60)
    Lq, Lk = lengths
    args = taken(impl, inputs(torch.bfloat16, device, B=520, H=8, KV=8, Lq=Lq, Lk=Lk, D=64))
    assert max(args[n].numel() for n in "qk") > 2**31
    do = torch.randn_like(args["q"])
    last = slice(-2, None)
    actual = {name: t[last] for name, t in run(kernel(impl), args, do).items()}
    verdict = judged(actual, {k: v[last] if isinstance(v, torch.Tensor) else v for k, v in args.items()}, do[last])
    assert verdict.ok, verdict.why


@TRITON
@pytest.mark.parametrize("lengths", [(70000, 129), (129, 70000)], ids=["queries", "keys"])
def test_rows_further_than_two_to_the_31_elements_apart_are_right(impl, lengths, device):
    """Within one head: q, k and v are narrow columns of one very wide matrix."""
    needs_gib(24)
    (Lq, Lk), D = lengths, 64
    wide = torch.empty(1, 1, max(lengths), 32768, dtype=torch.bfloat16, device=device)
    wide[..., : 3 * D].normal_()
    args = dict(q=wide[:, :, -Lq:, :D], k=wide[:, :, -Lk:, D : 2 * D], v=wide[:, :, -Lk:, 2 * D : 3 * D])
    do = torch.randn(1, 1, Lq, D, dtype=torch.bfloat16, device=device)
    taken(impl, args)
    verdict = judged(run(kernel(impl), args, do), args, do)
    assert verdict.ok, verdict.why
