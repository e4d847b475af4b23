"""gmm_log_prob where float32 is short of range or digits: narrow and wide deviations, distant targets, weights of zero."""

import math

import pytest
import torch

import whet.ops
from whet.op import DTYPE_NAMES, DTYPES, discover
from whet.ops.gmm_log_prob import FUSED, MAX_K
from whet.prove import further
from whet.verify import evaluate, judge, unchanged, widen

OP = discover()["gmm_log_prob"]
IMPLS = ["torch", "triton"]
COLUMNS = ("logit", "mu", "log_sigma")


def of(impl):
    return lambda **args: whet.ops.gmm_log_prob(**args, impl=impl)


def apart(results):
    """The gradient of z by its columns, which have sizes of their own."""
    dz = results.pop("grad z")
    return results | {f"grad {name}": dz[..., c] for c, name in enumerate(COLUMNS)}


def held_to_the_oracle(args, impl):
    """The results of one run, after each of them was judged, by the budget of the proof's further trials, and found finite."""
    found = apart(evaluate(OP, of(impl), args, grad=True))
    oracle = apart(evaluate(OP, OP.reference, {k: widen(v) for k, v in args.items()}, grad=True))
    eager = apart(evaluate(OP, OP.reference, args, grad=True))
    verdict = judge(found, eager, oracle, slack=further(DTYPE_NAMES[args["z"].dtype]))
    assert verdict.ok, verdict.why
    assert all(torch.isfinite(t).all() for t in found.values())
    return found


def mixtures(device, M=33, K=10, distance=1.0, log_sigma=0.0, dtype="float32"):
    """Components whose means lie apart, and targets at a distance from all of them."""
    z = torch.randn(M, K, 3)
    z[..., 1] += 100.0 * torch.arange(K)
    z[..., 2] = log_sigma
    z = z.to(DTYPES[dtype])
    y = z[..., 1].float().amax(-1) + distance
    return dict(z=z.to(device), y=y.to(device))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("K", [1, 10])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("log_sigma", [-15.0, -7.0, 0.0, 7.0, 15.0])
def test_any_deviation_at_any_distance_is_finite_and_right(log_sigma, distance, K, impl, device):
    held_to_the_oracle(mixtures(device, 7, K, distance, log_sigma), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("K", [1, 10])
def test_deviations_of_all_sizes_in_one_mixture(K, dtype, impl, device):
    args = mixtures(device, 33, K, 1e6, dtype=dtype)
    args["z"][..., 2].uniform_(-15.0, 15.0)
    held_to_the_oracle(args, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(DTYPES)[:3])
@pytest.mark.parametrize("present", [slice(1, 10), slice(0, 7), slice(9, 10), slice(0, 1)], ids=lambda s: f"{s.start}:{s.stop}")
def test_a_weight_of_zero_takes_its_component_away(present, dtype, impl, device):
    args = OP.inputs(dtype=DTYPES[dtype], device=device, M=33, K=10)
    full = args["z"].clone()
    args["z"][..., 0] = -math.inf
    args["z"][..., present, 0] = full[..., present, 0]
    held_to_the_oracle(args, impl)
    found = evaluate(OP, of(impl), args, grad=True)["grad z"]
    kept = torch.zeros(10, dtype=torch.bool, device=device)
    kept[present] = True
    assert not found[..., ~kept, :].any() and found[..., kept, 1].any(0).all()


def test_an_absent_component_may_be_narrow_and_distant(device):
    """0 times infinity is no number: the square of the one that is absent overflows float32."""
    args = mixtures(device, 9, 4)
    args["z"][:, 1] = torch.tensor([-math.inf, 1e6, -40.0])
    found = evaluate(OP, of("triton"), args, grad=True)
    assert all(torch.isfinite(t).all() for t in found.values()) and not found["grad z"][:, 1].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(DTYPES)[:3])
@pytest.mark.parametrize("logits", ["alternating", "common", "random"])
def test_large_logits_lose_nothing(logits, dtype, impl, device):
    args = OP.inputs(dtype=DTYPES[dtype], device=device, M=33, K=10)
    z = args["z"][..., 0]
    if logits == "alternating":
        z[:, ::2], z[:, 1::2] = 1e4, -1e4
    elif logits == "common":
        z += 1e4
    else:
        z.uniform_(-1e4, 1e4)
    held_to_the_oracle(args, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_that_are_all_impossible_give_nan_as_the_formula_does(impl, device):
    args = OP.inputs(dtype=torch.float32, device=device, M=9, K=10)
    args["z"][3, :, 0] = -math.inf
    assert torch.isnan(OP.reference(**args)) and torch.isnan(of(impl)(**args))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_mean_over_no_rows_is_nan_and_its_gradients_are_empty(impl, device):
    found = evaluate(OP, of(impl), OP.inputs(dtype=torch.float32, device=device, M=0, K=10), grad=True)
    assert torch.isnan(found["output 0"]) and found["grad z"].shape == (0, 10, 3) and found["grad y"].shape == (0,)


@pytest.mark.parametrize("shape", [(), (1,), (4, 5), (2, 3, 4)], ids=str)
def test_leading_dimensions_are_rows(shape, device):
    args = dict(z=torch.randn(*shape, 10, 3, device=device), y=torch.randn(shape, device=device))
    held_to_the_oracle(args, "triton")
    assert OP.case_of(**args)["M"] == math.prod(shape)


def test_leading_dimensions_may_be_in_any_order(device):
    args = dict(z=torch.randn(4, 5, 10, 3, device=device).transpose(0, 1), y=torch.randn(4, 5, device=device).t())
    held_to_the_oracle(args, "triton")


def test_the_most_components_and_more_partial_sums_than_one_block_adds(device):
    held_to_the_oracle(OP.inputs(dtype=torch.float32, device=device, M=1100, K=MAX_K), "triton")


def test_the_same_bits_every_time_and_of_any_layout(device):
    args = OP.inputs(dtype=torch.bfloat16, device=device, M=300, K=10)
    first = evaluate(OP, of("triton"), args, grad=True)
    sliced = args | dict(z=args["z"].transpose(-1, -2).contiguous().transpose(-1, -2), y=args["y"].repeat_interleave(2)[::2])
    for other in (args, sliced):
        again = evaluate(OP, of("triton"), other, grad=True)
        assert all(unchanged(first[k], again[k]) for k in first)


def test_the_gradient_of_y_is_written_only_where_it_is_asked_for(device):
    args = OP.inputs(dtype=torch.bfloat16, device=device, M=9, K=10)
    dout = torch.ones((), device=device)
    dz, dy = FUSED.backward(dout, *args.values(), True)
    alone, none = FUSED.backward(dout, *args.values(), False)
    assert torch.equal(dz, alone) and none.numel() == 0
    assert dy.dtype == args["y"].dtype == torch.float32 and dz.dtype == torch.bfloat16
    z = args["z"].requires_grad_()
    of("triton")(z=z, y=args["y"]).backward()
    assert torch.equal(z.grad, dz) and args["y"].grad is None


REFUSED = {
    r"gmm_log_prob\[eager\]: z must have shape \(\.\.\., K, 3\) with K at least 1, got \(4, 5\)": ((4, 5), (4,)),
    r"gmm_log_prob\[eager\]: z must have shape .* got \(4, 0, 3\)": ((4, 0, 3), (4,)),
    r"gmm_log_prob\[eager\]: y must have shape \(4,\) to match z.shape\[:-2\], got \(4, 1\)": ((4, 10, 3), (4, 1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusal_names_the_argument_and_both_shapes(message, device):
    z, y = (torch.zeros(shape, device=device) for shape in REFUSED[message])
    with pytest.raises(ValueError, match=f"^{message}"):
        whet.ops.gmm_log_prob(z, y, impl="eager")


def test_other_dtypes_and_too_many_components_are_refused_by_name(device):
    z, y = torch.zeros(4, MAX_K + 1, 3, device=device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=rf"^gmm_log_prob\[triton\]: z.shape\[-2\] must be at most {MAX_K}, .* {MAX_K + 1}"):
        whet.ops.gmm_log_prob(z, y, impl="triton")
    with pytest.raises(ValueError, match=r"^gmm_log_prob\[torch\]: y must be float32 or of z's dtype .*, got torch.float64"):
        whet.ops.gmm_log_prob(z, y.double(), impl="torch")
