"""Ways a fused kernel can be silently wrong. Each was found in a public kernel, or nearly shipped here."""

import pytest
import torch
from conftest import DEVICE, every_kernel, every_op, exact, first_case, has_triton, trained
from torch.autograd import forward_ad

import whet.ops
from whet.op import DTYPES, as_tuple
from whet.ops.rope import tables
from whet.verify import compare


def leaves(op, dtype=None, impl="triton"):
    """The arguments of the first plain case that the impl takes, the differentiable ones as leaves."""
    args = op.inputs(dtype=DTYPES[dtype or exact(op, impl)], device=DEVICE, **first_case(op, impl=impl))
    return {k: v.detach().requires_grad_() if k in op.grads and v is not None else v for k, v in args.items()}


class Severs(torch.autograd.Function):
    """Passes values on and no gradient back, as a frozen branch does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return None


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_a_gradient_penalty_raises_rather_than_losing_its_gradient(op, impl):
    args = leaves(op, impl=impl)
    out = as_tuple(getattr(whet.ops, op.name)(**args, impl=impl))[0].sum()
    grads = torch.autograd.grad(out, [args[k] for k in op.grads if args[k] is not None], create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in grads if g is not None)
    with pytest.raises(RuntimeError, match=rf"{op.name}\w*\[{impl}\]: double backward is not supported"):
        (out + penalty).backward()


@pytest.mark.parametrize("op, impl", every_kernel())
def test_forward_mode_differentiation_raises_rather_than_giving_zeros(op, impl):
    args = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in leaves(op, impl=impl).items()}
    name = op.grads[0] if op.grads else next(iter(args))

    def run(x):
        return as_tuple(getattr(whet.ops, op.name)(**(args | {name: x}), impl=impl))[0]

    with pytest.raises(RuntimeError, match=rf"\[{impl}\]: forward-mode"):
        torch.func.jvp(run, (args[name],), (torch.ones_like(args[name]),))


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_gradients_of_torch_func_are_refused_with_what_to_do(op, impl):
    args = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in leaves(op, impl=impl).items()}

    def run(x):
        return as_tuple(getattr(whet.ops, op.name)(**(args | {op.grads[0]: x}), impl=impl))[0].float().sum()

    with pytest.raises(RuntimeError, match=rf"\[{impl}\]: torch.func's gradients are not supported; use impl='eager'"):
        torch.func.grad(run)(args[op.grads[0]])


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_a_tangent_is_refused_where_no_gradient_is_asked_for_too(op, impl):
    args = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in leaves(op, impl=impl).items()}
    x = args[op.grads[0]]
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward AD|jvp"):
            getattr(whet.ops, op.name)(**(args | {op.grads[0]: dual}), impl=impl)


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_a_severed_consumer_gives_no_gradient_and_no_crash(op, impl):
    args = leaves(op, impl=impl)
    out = as_tuple(getattr(whet.ops, op.name)(**args, impl=impl))[0]
    Severs.apply(out).sum().backward()
    assert all(args[k] is None or args[k].grad is None or not args[k].grad.any() for k in op.grads)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_loss_per_token_may_be_masked_in_place(name):
    op = next(p.values[0] for p in every_op() if p.values[0].name == name)
    args = leaves(op) | {"reduction": "none"}
    loss = getattr(whet.ops, name)(**args, impl="triton")
    loss *= torch.ones_like(loss)
    loss.sum().backward()
    assert args[op.grads[0]].grad.isfinite().all()


def test_a_named_impl_checks_its_arguments_inside_torch_compile_too():
    x, w = torch.randn(4, 8, device=DEVICE), torch.ones(1, device=DEVICE)
    run = torch.compile(lambda x, w: whet.ops.rms_norm(x, w, impl="triton"), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w must have shape \(8,\)"):
        run(x, w)


def test_rope_positions_count_from_the_end_like_indices_and_never_leave_the_table():
    q, k = (torch.randn(1, 2, 3, 8, device=DEVICE) for _ in range(2))
    cos, sin = tables(5, 8, device=DEVICE)
    inside = torch.tensor([4, -1, -5], device=DEVICE)
    both = (whet.ops.rope(q, k, cos, sin, inside, impl=impl) for impl in ("triton", "eager"))
    for ours, plain in zip(*both):
        torch.testing.assert_close(ours, plain)
    outside = whet.ops.rope(q, k, cos, sin, torch.tensor([0, 5, -6], device=DEVICE), impl="triton")[0]
    assert outside[:, :, 0].isfinite().all() and outside[:, :, 1:].isnan().all()


def test_an_overflow_of_eager_does_not_excuse_an_error_elsewhere():
    oracle = torch.tensor([1.0, 2.0, 6e4], dtype=torch.float64)
    eager, wrong = torch.tensor([1.0, 2.0, float("inf")]).half(), torch.tensor([300.0, 2.0, 6e4]).half()
    assert not compare("output 0", wrong, eager, oracle, 2.0).ok


def test_nan_is_not_taken_for_infinity():
    oracle = torch.tensor([1.0, float("inf")], dtype=torch.float64)
    assert not compare("output 0", torch.tensor([1.0, float("nan")]), oracle.float(), oracle, 2.0).ok
    assert not compare("output 0", torch.tensor([1.0, -float("inf")]), oracle.float(), oracle, 2.0).ok
    assert compare("output 0", oracle.float(), oracle.float(), oracle, 2.0).ok


@pytest.mark.parametrize("op", every_op(lambda op: trained(op) and has_triton(op) and "M" in first_case(op)))
def test_a_batch_of_sequences_gives_what_its_rows_give(op):
    """Calls are tuned as (M, N); models make them as (B, S, N). Every impl that can run here must take both."""
    case = first_case(op) | {"M": 6}
    args = op.inputs(dtype=torch.float32, device=DEVICE, **case)

    def batched(v):
        return v.reshape(2, 3, *v.shape[1:]) if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == 6 else v

    for name in [n for n in op.impls if n != "compile" and op.why_not(n, args) is None]:
        flat, deep = ({k: (v.detach().requires_grad_() if k in op.grads and v is not None else v) for k, v in given.items()}
                      for given in (args, {k: batched(v) for k, v in args.items()}))
        out_flat, out_deep = (as_tuple(op.impls[name].run(**given))[0] for given in (flat, deep))
        torch.testing.assert_close(out_deep.reshape(out_flat.shape), out_flat, msg=name)
        out_flat.sum().backward()
        out_deep.sum().backward()
        for k in op.grads:
            if flat[k] is not None:
                torch.testing.assert_close(deep[k].grad.reshape(flat[k].shape), flat[k].grad, msg=f"{name} grad {k}")
