"""Kernels are torch library ops: compile, checkpointing, autocast, double use and graph capture work, op by op."""

import contextlib
import re

import pytest
import torch
from conftest import assert_same_bits, every_kernel, exact, first_case, meta, narrow, ragged_case, takes, trained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import whet.ops
from whet.op import DTYPES, as_tuple, lay, tensors
from whet.verify import evaluate, judge, unchanged, upstream, verify, widen

EVERY_KERNEL = pytest.mark.parametrize("op, impl", every_kernel())
TRAINED_KERNEL = pytest.mark.parametrize("op, impl", every_kernel(trained))


def kernel_of(op, impl="triton"):
    """The public function on one of whet's own kernels."""

    def function(**args):
        return getattr(whet.ops, op.name)(**args, impl=impl)

    return function


def fresh(op, case, device, dtype="float32"):
    """Leaf arguments of a case, those of op.grads asking for gradients."""
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    return {k: v.detach().requires_grad_(k in op.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def gradients(op, function, args):
    """Outputs and gradients of one run, and what it changed in place, by name."""
    return evaluate(op, function, args, grad=True)


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


@EVERY_KERNEL
def test_fullgraph_compile_gives_the_eager_bits(op, impl, device):
    torch._dynamo.reset()
    compiled = torch.compile(kernel_of(op, impl), backend=backend(device), fullgraph=True, dynamic=False)
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    assert_same_bits(gradients(op, compiled, args), gradients(op, kernel_of(op, impl), args))


@EVERY_KERNEL
def test_fullgraph_compile_of_auto_sees_no_graph_break(op, impl, device):
    torch._dynamo.reset()
    public = getattr(whet.ops, op.name)
    compiled = torch.compile(lambda **args: public(**args), backend=backend(device), fullgraph=True, dynamic=False)
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in args.items()}, True)
    verdict = judge(gradients(op, compiled, args), gradients(op, op.reference, args), oracle)
    assert verdict.ok, verdict.why


@EVERY_KERNEL
def test_library_ops_pass_opcheck(op, impl, device):
    """Schema, autograd registration, fake tensors, and tracing: torch's own check, on the arguments a real call makes."""
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    with Watch() as watch:
        gradients(op, kernel_of(op, impl), args)
    names = {func for func, _ in watch.calls}
    backward = any(f._schema.name.endswith("_bwd") for f in names)
    assert backward == trained(op) and len(names) >= 1 + trained(op), "forward and backward are both library ops"
    for func, call in watch.calls:
        call = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in call]
        if trained(op) and not func._schema.name.endswith("_bwd"):
            ask = [a for a, s in zip(call, func._schema.arguments) if s.name in op.grads and isinstance(a, torch.Tensor)]
            assert ask, f"{func} names none of {op.grads}"
            for a in ask:
                a.requires_grad_()
        torch.library.opcheck(func, tuple(call))


def wanted(op, args):
    return [args[k] for k in op.grads if args[k] is not None]


@EVERY_KERNEL
def test_library_way_and_eager_way_give_the_same_bits(op, impl, device):
    args = op.inputs(dtype=DTYPES[narrow(op, impl)], device=device, **ragged_case(op, impl))
    direct = gradients(op, kernel_of(op, impl), args)
    with Watch() as watch:
        through = gradients(op, kernel_of(op, impl), args)
    assert watch.calls
    assert_same_bits(direct, through)


@EVERY_KERNEL
def test_autocast_stays_within_the_budget_of_the_reference_under_autocast_or_is_refused(op, impl, device):
    def under(function):
        def run(**args):
            with torch.autocast(device, dtype=torch.bfloat16):
                return function(**args)

        return run

    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    with torch.autocast(device, dtype=torch.bfloat16):
        reason = op.impls[impl].refuses(**args)
    if reason and not (trained(op) and narrow(op, impl) == "bfloat16"):  # a kernel for float32 alone has nothing to do there
        with pytest.raises(ValueError, match=re.escape(f"{op.name}[{impl}]: {reason}")):
            under(kernel_of(op, impl))(**args)
        return
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in args.items()}, True)
    plain, eager, actual = (gradients(op, f, args) for f in (op.reference, under(op.reference), under(kernel_of(op, impl))))
    assert all(actual[k].dtype == eager[k].dtype for k in eager)
    if any(not unchanged(plain[k], eager[k]) for k in eager):  # autocast computes this op in bf16: so its rounding step is
        eager, actual = ({k: v.bfloat16() for k, v in named.items()} for named in (eager, actual))
    verdict = judge(actual, eager, oracle)
    assert verdict.ok, verdict.why


@TRAINED_KERNEL
def test_without_gradients_it_gives_the_same_bits_and_keeps_nothing(op, impl, device):
    args = fresh(op, ragged_case(op, impl), device, exact(op, impl))
    recorded = dict(enumerate(as_tuple(kernel_of(op, impl)(**args))))
    with torch.no_grad():
        alone = dict(enumerate(as_tuple(kernel_of(op, impl)(**args))))
    assert_same_bits(recorded, alone)
    assert all(o.requires_grad for o in recorded.values() if o.is_floating_point()) and not any(
        o.requires_grad for o in alone.values()
    )


@TRAINED_KERNEL
def test_activation_checkpointing_gives_the_same_bits(op, impl, device):
    def again(**args):
        return checkpoint(kernel_of(op, impl), use_reentrant=False, **args)

    args = op.inputs(dtype=DTYPES[narrow(op, impl)], device=device, **ragged_case(op, impl))
    assert_same_bits(gradients(op, again, args), gradients(op, kernel_of(op, impl), args))


@TRAINED_KERNEL
def test_used_twice_in_one_graph_doubles_the_gradient(op, impl, device):
    """A backward that writes into what it saved gives the second use a wrong gradient."""

    def twice(**args):
        return tuple(a + b for a, b in zip(as_tuple(kernel_of(op, impl)(**args)), as_tuple(kernel_of(op, impl)(**args))))

    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    once, two = gradients(op, kernel_of(op, impl), args), gradients(op, twice, args)
    assert_same_bits(two, {k: None if v is None else v + v for k, v in once.items()})


@TRAINED_KERNEL
def test_backward_twice_over_a_retained_graph_gives_the_same_bits(op, impl, device):
    args = fresh(op, ragged_case(op, impl), device, exact(op, impl))
    outs = as_tuple(kernel_of(op, impl)(**args))
    douts = [upstream(o, i, "contiguous") for i, o in enumerate(outs)]
    first, second = (
        torch.autograd.grad(outs, wanted(op, args), douts, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    assert_same_bits(dict(enumerate(first)), dict(enumerate(second)))


@TRAINED_KERNEL
def test_each_output_alone_gets_its_gradient(op, impl, device):
    """An output nobody uses has no upstream gradient: None, not garbage. An argument it does not depend on has none either."""
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    for i in range(len(as_tuple(op.reference(**args)))):
        def only(function, i=i):
            return lambda **a: as_tuple(function(**a))[i]

        oracle = evaluate(op, only(op.reference), {k: widen(v) for k, v in args.items()}, True)
        actual = gradients(op, only(kernel_of(op, impl)), args)
        with Watch():
            assert_same_bits(gradients(op, only(kernel_of(op, impl)), args), actual)
        assert [k for k, v in actual.items() if v is None] == [k for k, v in oracle.items() if v is None], f"output {i}"
        verdict = judge(actual, gradients(op, only(op.reference), args), oracle)
        assert verdict.ok, f"output {i}: {verdict.why}"


def strided_arguments():
    for kernel in every_kernel():
        op, impl = kernel.values
        args = meta(op, first_case(op, impl=impl), exact(op, impl))
        for k in (k for k, v in args.items() if isinstance(v, torch.Tensor) and v.dim() > 1):
            yield pytest.param(op, impl, k, id=f"{kernel.id}-{k}")


def chooses(op, args) -> bool:
    """Whether the op returns the place of a largest value."""
    return any(not o.is_floating_point() for o in as_tuple(op.reference(**args)))


def summed_exactly(args: dict) -> dict:
    """The arguments of an op that chooses, with values whose sums are exact in any order, so that equals stay equal.

    Rows of ones and minus ones are their own norm; the rest are small integers.
    """
    made = {k: v.sign().where(v != 0, 1) if k == "x" else v.mul(4).round() if k == "w" else v for k, v in args.items()}
    return made | dict(norm=torch.ones_like(args["norm"]), eps=0.0)


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
@pytest.mark.parametrize("op, impl, name", strided_arguments())
def test_an_argument_of_any_layout_is_right_or_refused(op, impl, name, layout, device):
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **ragged_case(op, impl))
    if layout == "expanded" and chooses(op, args):  # rows of w that are all equal are ties
        args = summed_exactly(args)
    args[name] = lay(args[name], layout)
    if reason := op.impls[impl].refuses(**args):
        with pytest.raises(ValueError, match=re.escape(f"{op.name}[{impl}]: {reason}")):
            kernel_of(op, impl)(**args)
        return
    verdict = verify(op, op.impls[impl], args)
    assert verdict.ok, verdict.why


@EVERY_KERNEL
def test_empty_batch_compiles_and_gives_the_reference_gradients(op, impl, device):
    torch._dynamo.reset()
    empty = [case for case in op.cases if tensors(meta(op, case))[0].numel() == 0]
    case = next((case for case in empty if takes(op, impl, case, exact(op, impl))), None)
    if case is None and impl != "triton":
        pytest.skip(f"no empty case is one that {impl} takes")
    args = op.inputs(dtype=DTYPES[exact(op, impl)], device=device, **case)
    compiled = torch.compile(kernel_of(op, impl), backend=backend(device), fullgraph=True, dynamic=False)
    expected = gradients(op, op.reference, args)
    for function in (kernel_of(op, impl), compiled):
        actual = gradients(op, function, args)
        for k, v in expected.items():
            assert actual[k].shape == v.shape and torch.equal(torch.nan_to_num(actual[k]), torch.nan_to_num(v)), k


@pytest.mark.parametrize("way", ["eager", "library"])
@TRAINED_KERNEL
def test_double_backward_raises_and_names_the_kernel(op, impl, way, device):
    args = fresh(op, ragged_case(op, impl), device, exact(op, impl))
    with Watch() if way == "library" else contextlib.nullcontext():
        outs = as_tuple(kernel_of(op, impl)(**args))
        total = sum((o * o).sum() for o in outs)
        grads = torch.autograd.grad(total, wanted(op, args), create_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match=rf"{op.name}\w*\[{impl}\]: double backward is not supported"):
            sum(g.sum() for g in grads if g is not None).backward()


@EVERY_KERNEL
def test_two_runs_give_the_same_bits(op, impl, device):
    args = op.inputs(dtype=DTYPES[narrow(op, impl)], device=device, **ragged_case(op, impl))
    assert_same_bits(gradients(op, kernel_of(op, impl), args), gradients(op, kernel_of(op, impl), args))


def replay_with_new_values(op, impl, case, device):
    """Outputs and gradients of a captured step replayed after its inputs changed, and of the same step run directly.

    Of an op for inference the first input changes. What it changes in place is compared too, NaN where nothing was written.
    """
    args = fresh(op, case, device, narrow(op, impl))
    leaves = wanted(op, args) or tensors(args)[:1]
    douts = [torch.randn_like(o) for o in as_tuple(kernel_of(op, impl)(**args))] if trained(op) else []

    def step():
        outs = as_tuple(kernel_of(op, impl)(**args))
        return (*outs, *torch.autograd.grad(outs, leaves, douts, allow_unused=True)) if trained(op) else outs

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
                t.fill_(float("nan") if t.is_floating_point() else -1)
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    torch.cuda.synchronize()
    replayed = {str(i): t for i, t in enumerate(captured)} | {f"changed {k}": args[k].clone() for k in op.mutates}
    return replayed, {str(i): t for i, t in enumerate(step())} | {f"changed {k}": args[k] for k in op.mutates}


@pytest.mark.gpu
@EVERY_KERNEL
def test_graph_capture_replays_with_new_values(op, impl, device):
    assert_same_bits(*replay_with_new_values(op, impl, ragged_case(op, impl), device))
