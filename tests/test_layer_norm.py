"""layer_norm where the spread of a row is small beside its mean: what rounding leaves of the mean must not count as spread."""

import pytest
import torch

import whet.ops
from whet.op import DTYPES, discover
from whet.verify import evaluate, judge, widen

OP = discover()["layer_norm"]


def kernel(**args):
    return whet.ops.layer_norm(**args, impl="triton")


def judged(args):
    """Against the oracle, by the budget of one that rounds each result once: the formula itself errs here."""
    oracle = evaluate(OP, OP.reference, {k: widen(v) for k, v in args.items()}, grad=True)
    return judge(evaluate(OP, kernel, args, grad=True), {k: v.to(args["x"].dtype) for k, v in oracle.items()}, oracle)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [100, 768])
def test_a_constant_row_is_its_bias_whatever_its_value_and_eps(N, dtype, device):
    args = OP.inputs(dtype=DTYPES[dtype], device=device, M=6, N=N) | dict(eps=1e-12)
    args["x"] = torch.tensor([100.37, 0.1, -3e4 / 7, 1e-3, 7.0, 1e6 / 3], device=device)[:, None].expand(6, N).to(DTYPES[dtype])
    verdict = judged(args)
    assert verdict.ok, verdict.why
    found = evaluate(OP, kernel, args, grad=True)
    assert torch.equal(found["output 0"], args["b"].expand(6, N)) and not found["grad w"].any()


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_values_far_from_zero_are_as_right_as_values_near_it(offset, device):
    args = OP.inputs(dtype=torch.float32, device=device, M=7, N=300)
    args["x"] += offset
    value = {"output 0": kernel(**args)}
    oracle = {"output 0": OP.reference(**{k: widen(v) for k, v in args.items()})}
    verdict = judge(value, {k: v.float() for k, v in oracle.items()}, oracle)
    assert verdict.ok, verdict.why
