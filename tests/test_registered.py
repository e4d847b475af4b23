"""Kernels are torch library ops: compile, checkpointing, autocast, double use and graph capture work, op by op."""

import contextlib
import re

import pytest
import torch
from conftest import every_op, first_case, has_triton, meta, ragged_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import whet.ops
from whet.op import DTYPES, as_tuple, lay, tensors
from whet.verify import evaluate, judge, upstream, verify, widen

EVERY_OP = pytest.mark.parametrize("op", every_op(has_triton))


def kernel_of(op):
    """The public function on its Triton impl."""

    def function(**args):
        return getattr(whet.ops, op.name)(**args, impl="triton")

    return function


def fresh(op, case, device, dtype="float32"):
    """Leaf arguments of a case, those of op.grads asking for gradients."""
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    return {k: v.detach().requires_grad_(k in op.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def gradients(op, function, args):
    """Outputs and gradients of one run, by name."""
    return evaluate(op, function, args, grad=True)


def assert_same_bits(a: dict, b: dict):
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k] is None) == (b[k] is None), k
        assert a[k] is None or torch.equal(a[k], b[k]), f"{k} differs"


class Watch(TorchDispatchMode):
    """Sees every library call below autograd and lets it pass; while it is on, kernels go the torch.library way."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "whet":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def backend(device):
    return "inductor" if device == "cuda" else "aot_eager"


@EVERY_OP
def test_fullgraph_compile_gives_the_eager_bits(op, device):
    torch._dynamo.reset()
    compiled = torch.compile(kernel_of(op), backend=backend(device), fullgraph=True, dynamic=False)
    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    assert_same_bits(gradients(op, compiled, args), gradients(op, kernel_of(op), args))


@EVERY_OP
def test_fullgraph_compile_of_auto_sees_no_graph_break(op, device):
    torch._dynamo.reset()
    public = getattr(whet.ops, op.name)
    compiled = torch.compile(lambda **args: public(**args), backend=backend(device), fullgraph=True, dynamic=False)
    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in args.items()}, True)
    verdict = judge(gradients(op, compiled, args), gradients(op, op.reference, args), oracle)
    assert verdict.ok, verdict.why


@EVERY_OP
def test_library_ops_pass_opcheck(op, device):
    """Schema, autograd registration, fake tensors, and tracing: torch's own check, on the arguments a real call makes."""
    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    with Watch() as watch:
        gradients(op, kernel_of(op), args)
    names = {func for func, _ in watch.calls}
    assert any(f._schema.name.endswith("_bwd") for f in names) and len(names) >= 2, "forward and backward are both library ops"
    for func, call in watch.calls:
        call = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in call]
        if not func._schema.name.endswith("_bwd"):
            ask = [a for a, s in zip(call, func._schema.arguments) if s.name in op.grads and isinstance(a, torch.Tensor)]
            assert ask, f"{func} names none of {op.grads}"
            for a in ask:
                a.requires_grad_()
        torch.library.opcheck(func, tuple(call))


def wanted(op, args):
    return [args[k] for k in op.grads if args[k] is not None]


@EVERY_OP
def test_library_way_and_eager_way_give_the_same_bits(op, device):
    args = op.inputs(dtype=torch.bfloat16, device=device, **ragged_case(op))
    direct = gradients(op, kernel_of(op), args)
    with Watch() as watch:
        through = gradients(op, kernel_of(op), args)
    assert watch.calls
    assert_same_bits(direct, through)


@EVERY_OP
def test_autocast_stays_within_the_budget_of_the_reference_under_autocast(op, device):
    def under(function):
        def run(**args):
            with torch.autocast(device, dtype=torch.bfloat16):
                return function(**args)

        return run

    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in args.items()}, True)
    plain, eager, actual = (gradients(op, f, args) for f in (op.reference, under(op.reference), under(kernel_of(op))))
    assert all(actual[k].dtype == eager[k].dtype for k in eager)
    if any(not torch.equal(plain[k], eager[k]) for k in eager):  # autocast computes this op in bf16: so its rounding step is
        eager, actual = ({k: v.bfloat16() for k, v in named.items()} for named in (eager, actual))
    verdict = judge(actual, eager, oracle)
    assert verdict.ok, verdict.why


@EVERY_OP
def test_activation_checkpointing_gives_the_same_bits(op, device):
    def again(**args):
        return checkpoint(kernel_of(op), use_reentrant=False, **args)

    args = op.inputs(dtype=torch.bfloat16, device=device, **ragged_case(op))
    assert_same_bits(gradients(op, again, args), gradients(op, kernel_of(op), args))


@EVERY_OP
def test_used_twice_in_one_graph_doubles_the_gradient(op, device):
    """A backward that writes into what it saved gives the second use a wrong gradient."""

    def twice(**args):
        return tuple(a + b for a, b in zip(as_tuple(kernel_of(op)(**args)), as_tuple(kernel_of(op)(**args))))

    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    once, two = gradients(op, kernel_of(op), args), gradients(op, twice, args)
    assert_same_bits(two, {k: None if v is None else v + v for k, v in once.items()})


@EVERY_OP
def test_backward_twice_over_a_retained_graph_gives_the_same_bits(op, device):
    args = fresh(op, ragged_case(op), device)
    outs = as_tuple(kernel_of(op)(**args))
    douts = [upstream(o, i, "contiguous") for i, o in enumerate(outs)]
    first, second = (
        torch.autograd.grad(outs, wanted(op, args), douts, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    assert_same_bits(dict(enumerate(first)), dict(enumerate(second)))


@EVERY_OP
def test_each_output_alone_gets_its_gradient(op, device):
    """An output nobody uses has no upstream gradient: None, not garbage."""
    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    for i in range(len(as_tuple(op.reference(**args)))):
        def only(function, i=i):
            return lambda **a: as_tuple(function(**a))[i]

        oracle = evaluate(op, only(op.reference), {k: widen(v) for k, v in args.items()}, True)
        actual = gradients(op, only(kernel_of(op)), args)
        for k in [k for k, v in oracle.items() if v is None]:  # an argument this output does not depend on: none, or zero
            del oracle[k]
            assert actual[k] is None or not actual[k].any(), f"output {i}: {k} must be none or zero"
        verdict = judge(actual, gradients(op, only(op.reference), args), oracle)
        assert verdict.ok, f"output {i}: {verdict.why}"


def strided_arguments():
    for op in every_op(has_triton):
        args = meta(op.values[0], first_case(op.values[0]))
        for k in (k for k, v in args.items() if isinstance(v, torch.Tensor) and v.dim() > 1):
            yield pytest.param(op.values[0], k, id=f"{op.id}-{k}")


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
@pytest.mark.parametrize("op, name", strided_arguments())
def test_an_argument_of_any_layout_is_right_or_refused(op, name, layout, device):
    args = op.inputs(dtype=torch.float32, device=device, **ragged_case(op))
    args[name] = lay(args[name], layout)
    if reason := op.impls["triton"].refuses(**args):
        with pytest.raises(ValueError, match=re.escape(f"{op.name}[triton]: {reason}")):
            kernel_of(op)(**args)
        return
    verdict = verify(op, op.impls["triton"], args)
    assert verdict.ok, verdict.why


@EVERY_OP
def test_empty_batch_compiles_and_gives_the_reference_gradients(op, device):
    torch._dynamo.reset()
    case = next(case for case in op.cases if tensors(meta(op, case))[0].numel() == 0)
    args = op.inputs(dtype=torch.float32, device=device, **case)
    compiled = torch.compile(kernel_of(op), backend=backend(device), fullgraph=True, dynamic=False)
    expected = gradients(op, op.reference, args)
    for function in (kernel_of(op), compiled):
        actual = gradients(op, function, args)
        for k, v in expected.items():
            assert actual[k].shape == v.shape and torch.equal(torch.nan_to_num(actual[k]), torch.nan_to_num(v)), k


@pytest.mark.parametrize("way", ["eager", "library"])
@EVERY_OP
def test_double_backward_raises_and_names_the_kernel(op, way, device):
    args = fresh(op, ragged_case(op), device)
    with Watch() if way == "library" else contextlib.nullcontext():
        outs = as_tuple(kernel_of(op)(**args))
        total = sum((o * o).sum() for o in outs)
        grads = torch.autograd.grad(total, wanted(op, args), create_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match=rf"{op.name}\w*\[triton\]: double backward is not supported"):
            sum(g.sum() for g in grads if g is not None).backward()


@EVERY_OP
def test_two_runs_give_the_same_bits(op, device):
    args = op.inputs(dtype=torch.bfloat16, device=device, **ragged_case(op))
    assert_same_bits(gradients(op, kernel_of(op), args), gradients(op, kernel_of(op), args))


def replay_with_new_values(op, case, device):
    """Outputs and gradients of a captured step replayed after its inputs changed, and of the same step run directly."""
    args = fresh(op, case, device, "bfloat16")
    leaves = wanted(op, args)
    douts = [torch.randn_like(o) for o in as_tuple(kernel_of(op)(**args))]

    def step():
        outs = as_tuple(kernel_of(op)(**args))
        return (*outs, *torch.autograd.grad(outs, leaves, douts, allow_unused=True))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in captured:
            if t is not None:
                t.fill_(float("nan"))
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    torch.cuda.synchronize()
    return dict(enumerate(captured)), dict(enumerate(step()))


@pytest.mark.gpu
@EVERY_OP
def test_graph_capture_replays_with_new_values(op, device):
    assert_same_bits(*replay_with_new_values(op, ragged_case(op), device))
