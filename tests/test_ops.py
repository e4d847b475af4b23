"""Every op, every impl, every case, every dtype: right in values and gradients, or refused with its reason."""

import functools
import inspect
import re

import pytest
import torch
from conftest import (
    DEVICE,
    assert_same_bits,
    case_id,
    every_kernel,
    every_op,
    exact,
    first_case,
    has_triton,
    is_ragged,
    meta,
    narrow,
    ragged_case,
    takes,
    trained,
)

import whet.ops
from whet.op import DTYPES, LAYOUTS, accepts, as_tuple, discover, nbytes, tensors
from whet.verify import evaluate, verify, verify_case


@functools.cache
def stands_for_all(name: str) -> dict:
    return first_case(discover()[name])


def dtypes(op, impl, case) -> tuple[str, ...]:
    """On the CPU the compile impl calls a C++ compiler for each shape and dtype: there, one case stands for all.

    For inference in the dtype of inference; gradients double what there is to get wrong. Its kernels are interpreted there in
    float16 in one case: to them it is sixteen bits as bfloat16 is.
    """
    if DEVICE == "cpu" and impl == "compile":
        few = ("float32", "bfloat16") if trained(op) else ("bfloat16",)
        return few if case == stands_for_all(op.name) else ()
    few = DEVICE == "cpu" and impl == "triton" and not trained(op) and case != stands_for_all(op.name)
    return ("float32", "bfloat16") if few else ("float32", "float16", "bfloat16")


def shows_something(op, impl, case, dtype, refusals: set[str]) -> bool:
    """False on the CPU for eager where another impl is held against it, and for a refusal whose words are known already.

    eager is the reference: to verify it is to compare it with itself, so its first case stands for all that others take too.
    """
    if DEVICE != "cpu":
        return True
    args = meta(op, case, dtype)
    if impl == "eager" and case != stands_for_all(op.name):
        others = [n for n in op.impls if n != impl and not op.unavailable(n) and dtype in dtypes(op, n, case)]
        return all(op.impls[n].refuses(**args) for n in others)
    reason = op.impls[impl].refuses(**args)
    known = reason in refusals
    refusals |= {reason} - {None}
    return not known


def grid():
    for op in discover().values():
        for impl in op.impls:
            if op.unavailable(impl):
                continue
            refusals: set[str] = set()
            for case in op.cases:
                for dtype in dtypes(op, impl, case):
                    if shows_something(op, impl, case, dtype, refusals):
                        yield pytest.param(op, impl, case, dtype, id=f"{op.name}-{impl}-{case_id(case)}-{dtype}")


@pytest.mark.parametrize("op, impl, case, dtype", grid())
def test_impl_is_right_or_says_why_not(op, impl, case, dtype, device):
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    if reason := op.impls[impl].refuses(**args):
        with pytest.raises(ValueError, match=re.escape(f"{op.name}[{impl}]: {reason}")):
            getattr(whet.ops, op.name)(**args, impl=impl)
        return
    verdict = verify_case(op, impl, case, dtype, device)
    if not verdict.ok and dtype in op.impls[impl].known_inaccurate and not op.ours(impl):
        pytest.xfail(f"{op.impls[impl].known_inaccurate}: {verdict.why}")
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_upstream_gradient_may_have_any_layout(op, impl, layout, device):
    verdict = verify_case(op, impl, ragged_case(op, impl), exact(op, impl), device, dout_layout=layout)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_gradient_of_a_sum_has_stride_zero_and_is_right(op, impl, device):
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))

    def grads_of_sum(upstream):
        leaves = {k: v.detach().requires_grad_(k in op.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        outs = as_tuple(op.impls[impl].run(**leaves))
        return torch.autograd.grad(outs, [leaves[k] for k in op.grads if leaves[k] is not None], [upstream(o) for o in outs])

    expanded = grads_of_sum(lambda o: torch.ones((), dtype=o.dtype, device=device).expand(o.shape))
    for a, b in zip(expanded, grads_of_sum(torch.ones_like)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", every_op())
def test_cost_counts_what_must_move_once(op):
    """Differentiable inputs, or the first of an op for inference, and outputs whole; other inputs (labels, tables) at most
    whole, since a part may do. What is changed in place is in part written too."""
    args = meta(op, first_case(op), "bfloat16")
    cost = op.cost(**args)
    outputs = nbytes(*as_tuple(op.reference(**args)))
    least = [args[k] for k in op.grads] or tensors(args)[:1]
    most = nbytes(*tensors(args), *(args[k] for k in op.mutates)) + outputs
    assert nbytes(*least) + outputs <= cost.bytes <= most
    assert cost.flops > 0 and (cost.bwd_bytes > 0) == (cost.bwd_flops > 0) == bool(op.grads)


@pytest.mark.parametrize(
    "op, case", [pytest.param(op, case, id=f"{op.name}-{case_id(case)}") for op in discover().values() for case in op.cases]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_of_describes_the_arguments_it_is_given(op, case, dtype):
    args = meta(op, case, dtype)
    again = meta(op, op.case_of(**args), dtype)
    assert {k: describe(v) for k, v in again.items()} == {k: describe(v) for k, v in args.items()}


def describe(v):
    """What a kernel can tell of an argument; the stride of a dimension of size one is not among it."""
    if not isinstance(v, torch.Tensor):
        return v
    strides = "any" if v.numel() == 0 else tuple(s for s, n in zip(v.stride(), v.shape) if n > 1)
    return tuple(v.shape), v.dtype, strides


@pytest.mark.parametrize("op", every_op())
def test_cases_cover_ragged_empty_and_strided_inputs(op):
    every = [meta(op, case) for case in op.cases]
    first = [tensors(args)[0] for args in every]
    assert any(x.numel() == 0 for x in first), "no empty case"
    assert any(not t.is_contiguous() for args in every for t in tensors(args)), "no strided case"
    assert any(is_ragged(args) for args in every), "no ragged case"


@pytest.mark.parametrize("op", every_op())
def test_reference_is_short_and_the_public_function_documented(op):
    assert op.reference.__doc__
    code = inspect.getsource(op.reference).replace(op.reference.__doc__, "")
    assert len(code.splitlines()) < 15
    function = getattr(whet.ops, op.name)
    assert op.reference.__doc__ in function.__doc__
    assert all(impl in function.__doc__ for impl in op.impls)
    assert list(inspect.signature(function).parameters) == [*op.signature.parameters, "impl"]


@pytest.mark.parametrize("op", every_op())
def test_an_impl_that_refuses_lists_its_limits_and_the_others_have_none(op):
    for name, impl in op.impls.items():
        assert bool(impl.limits) == (impl.refuses is not accepts), f"{op.name}[{name}]"


@pytest.mark.parametrize("op", every_op())
def test_named_grads_sizes_and_shapes_exist(op):
    assert set(op.grads) | set(op.mutates) <= set(op.signature.parameters)
    for case in op.shapes.values():
        assert set(op.dynamic) | set(op.tiny) <= set(op.case_of(**meta(op, case))), "dynamic and tiny name sizes of a case"


@pytest.mark.parametrize("op", every_op())
def test_unknown_impl_names_the_choices(op, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    with pytest.raises(ValueError, match=rf"^{op.name}: impl must be 'auto' or one of .*'eager'.* got 'cuda'"):
        getattr(whet.ops, op.name)(**args, impl="cuda")


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
@pytest.mark.parametrize("op", every_op(has_triton))
def test_unknown_option_names_it_and_the_arguments(op, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    with pytest.raises(ValueError, match=rf"^{op.name}: .*'colour'.*the arguments are \("):
        getattr(whet.ops, op.name)(**args, colour="red", impl=impl)


def later_tensors():
    for op in discover().values():
        args = meta(op, first_case(op))
        for k in [k for k, v in args.items() if isinstance(v, torch.Tensor)][1:]:
            yield pytest.param(op, k, id=f"{op.name}-{k}")


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
@pytest.mark.parametrize("op, name", later_tensors())
def test_wrong_shape_names_the_argument_and_both_shapes(op, name, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    args[name] = torch.cat([args[name], args[name][..., :1]], dim=-1)
    got = re.escape(str(tuple(args[name].shape)))
    with pytest.raises(ValueError, match=rf"^{op.name}\[{impl}\]: .*\b{name}\b.* must .*got .*{got}"):
        getattr(whet.ops, op.name)(**args, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
@pytest.mark.parametrize("op, name", later_tensors())
def test_wrong_device_names_the_argument_and_both_devices(op, name, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    args[name] = args[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{op.name}\[{impl}\]: {name} must be on \w+'s device {device}.*, got meta"):
        getattr(whet.ops, op.name)(**args, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
@pytest.mark.parametrize("op", every_op(has_triton))
def test_wrong_dtype_names_the_argument_and_both_dtypes(op, impl, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    for name in (k for k in op.grads or args if isinstance(args[k], torch.Tensor) and args[k].is_floating_point()):
        wrong = args | {name: args[name].to(torch.int32)}
        with pytest.raises(ValueError, match=rf"^{op.name}\[{impl}\]: .*\b{name}\b must be .*got .*int32"):
            getattr(whet.ops, op.name)(**wrong, impl=impl)


@pytest.mark.parametrize("op, impl", every_kernel())
def test_float64_is_refused_by_the_kernel_and_taken_by_eager(op, impl, device):
    args = op.inputs(dtype=torch.float64, device=device, **first_case(op, impl=impl))
    with pytest.raises(ValueError, match=rf"^{op.name}\[{impl}\]: .*got .*float64"):
        getattr(whet.ops, op.name)(**args, impl=impl)
    assert as_tuple(getattr(whet.ops, op.name)(**args, impl="eager"))[0].isfinite().all()


@pytest.mark.parametrize("op", every_op())
def test_auto_without_a_lock_is_the_stock_impl(op, device):
    args = op.inputs(dtype=torch.float32, device=device, **first_case(op))
    stock = op.stock if op.why_not(op.stock, args) is None else "eager"
    auto = evaluate(op, getattr(whet.ops, op.name), args, grad=True)
    named = evaluate(op, op.impls[stock].run, args, grad=True)
    assert_same_bits(auto, named)


@pytest.mark.parametrize("op, impl", every_kernel())
def test_kernel_is_right_at_every_bench_shape_cut_to_tiny(op, impl, device):
    shapes = [case for case in op.shapes.values() if takes(op, impl, case, narrow(op, impl))]
    assert shapes, "the kernel takes none of them"
    cut = [case | {k: min(v, case[k]) for k, v in op.tiny.items() if k in case} for case in shapes]
    for small in {case_id(small): small for small in cut}.values():
        args = op.inputs(dtype=DTYPES[narrow(op, impl)], device=device, **small)
        verdict = verify(op, op.impls[impl], args)
        assert verdict.ok, f"{small}: {verdict.why}"
