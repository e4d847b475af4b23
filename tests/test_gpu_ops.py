"""What only a GPU shows: real sizes, tensors past 2^31 elements, graph capture, determinism, inductor."""

import pytest
import torch
from conftest import assert_same_bits, every_kernel, takes, trained
from test_large import ROWS, judged_by_last_rows, judged_by_last_tokens
from test_registered import gradients, kernel_of, replay_with_new_values

from whet.op import as_tuple, discover, tensors
from whet.ops._gemv import batch_invariant
from whet.ops._pdl import pdl
from whet.verify import evaluate, judge, verify_case, widen

pytestmark = pytest.mark.gpu

BENCH = [
    pytest.param(op, impl, case, id=f"{op.name}-{impl}-{name}")
    for op, impl in (kernel.values for kernel in every_kernel())
    for name, case in op.shapes.items() if takes(op, impl, case, "bfloat16")
]
PAST_INT32 = 2**31 + 2**20  # elements: int32 offsets wrap well before the last rows


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    torch.cuda.empty_cache()


def impls_at_bench_shapes():
    for op in discover().values():
        for impl in op.impls:
            if impl != "eager" and op.unavailable(impl) is None:
                for name, case in op.shapes.items():
                    yield pytest.param(op, impl, case, id=f"{op.name}-{impl}-{name}")


@pytest.mark.parametrize("op, impl, case", impls_at_bench_shapes())
def test_impl_is_right_at_its_bench_shapes(op, impl, case, device):
    try:
        verdict = verify_case(op, impl, op.proof(case), "bfloat16", device)
    except torch.OutOfMemoryError as e:
        pytest.skip(f"the float64 oracle does not fit this GPU: {str(e).splitlines()[0]}")
    assert verdict.ok or verdict.why.startswith("refused: "), verdict.why


def shapes_of(op, impl) -> list[dict]:
    return [case for case in op.shapes.values() if takes(op, impl, case, "bfloat16")]


def past_int32(op, impl) -> dict:
    """A kernel's narrowest bench shape, provable, its first dynamic size grown until the first tensor passes 2^31 elements."""
    case = min(shapes_of(op, impl), key=lambda c: tensors(op.inputs(dtype=torch.bfloat16, device="meta", **c))[0].numel())
    case = op.proof(case)
    size = op.dynamic[0]
    x = tensors(op.inputs(dtype=torch.bfloat16, device="meta", **case))[0]
    return case | {size: PAST_INT32 // (x.numel() // case[size]) + 1}


def ends(v, length: int, where: slice):
    """The rows `where` of a tensor that has all of them; anything else as it is."""
    return v[where] if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == length else v


def enough_memory(needed: int = 72 << 30) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} are free")


def results(op, function, args, douts):
    """Outputs and gradients of one run under given upstream gradients."""
    leaves = {k: v.detach().requires_grad_(k in op.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    outs = as_tuple(function(**leaves))
    names = [k for k in op.grads if leaves[k] is not None]
    grads = torch.autograd.grad(outs, [leaves[k] for k in names], douts)
    return {f"output {i}": o.detach() for i, o in enumerate(outs)} | {f"grad {k}": g for k, g in zip(names, grads)}


@pytest.mark.parametrize("op, impl", every_kernel(trained))
def test_tensors_past_two_to_the_31_elements(op, impl, device):
    """Upstream gradients are zero but for the last rows, so every gradient is that of the reference on those rows."""
    enough_memory()
    case = past_int32(op, impl)
    if reason := op.impls[impl].refuses(**op.inputs(dtype=torch.bfloat16, device="meta", **case)):
        pytest.skip(f"refused: {reason}")
    args = op.inputs(dtype=torch.bfloat16, device=device, **case)
    if "reduction" in args:
        args["reduction"] = "none"  # a result per row, so that rows can be compared
    length, last = tensors(args)[0].shape[0], slice(-ROWS, None)

    few = {k: ends(v, length, last) for k, v in args.items()}
    small = [torch.randn_like(o) for o in as_tuple(op.reference(**few))]
    with torch.no_grad():
        whole = [torch.zeros_like(o) for o in as_tuple(kernel_of(op, impl)(**args))]
    for d, s in zip(whole, small):
        d[last] = s
    actual = results(op, kernel_of(op, impl), args, whole)
    for g in (g for k, g in actual.items() if k.startswith("grad") and g.shape[0] == length):
        assert not g[:ROWS].any(), "a row without an upstream gradient received one"
    actual = {k: ends(v, length, last) for k, v in actual.items()}
    oracle = results(op, op.reference, {k: widen(v) for k, v in few.items()}, [s.double() for s in small])
    verdict = judge(actual, results(op, op.reference, few, small), oracle)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("op, impl", every_kernel(lambda op: not trained(op)))
def test_the_last_rows_of_tensors_past_two_to_the_31_elements_in_inference(op, impl, device):
    enough_memory()
    verdict = judged_by_last_rows(op, impl, shapes_of(op, impl)[0], PAST_INT32, device)
    assert verdict.ok, verdict.why


def test_the_last_tokens_of_a_prompt_past_two_to_the_31_elements(device):
    enough_memory()
    verdict = judged_by_last_tokens(dict(B=1, H=4, KV=2, D=128), PAST_INT32, device)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("op, impl, case", [p for p in BENCH if not trained(p.values[0])])
def test_a_row_has_the_same_bits_alone_and_among_others_at_a_bench_shape(op, impl, case, device):
    """Sizes choose how a kernel is cut. Eight rows at most where that is asked for: more are for the tensor cores."""
    case = case | {op.dynamic[0]: 8}
    args = op.inputs(dtype=torch.bfloat16, device=device, **case)
    with batch_invariant():
        whole = evaluate(op, kernel_of(op, impl), args, False)
    batched = [k for k, v in args.items() if k in ("x", "res", "qkv", "positions", *op.mutates)]
    for where in (slice(5, 6), slice(2, 5)):
        part = evaluate(op, kernel_of(op, impl), args | {k: args[k][where] for k in batched}, False)
        assert_same_bits(part, {k: v[where] for k, v in whole.items()})


@pytest.mark.parametrize("op, impl, case", [p for p in BENCH if not trained(p.values[0])])
def test_dependent_launches_give_the_bits_of_calls_apart(op, impl, case, device):
    """Each kernel starts before the one before it has ended: three calls, each over what the last one wrote."""
    args = op.inputs(dtype=torch.bfloat16, device=device, **case)
    apart = evaluate(op, kernel_of(op, impl), args, False)

    def thrice(**given):
        with pdl():
            return [kernel_of(op, impl)(**given) for _ in range(3)][-1]

    assert_same_bits(evaluate(op, thrice, args, False), apart)


@pytest.mark.parametrize("op, impl, case", BENCH)
def test_graph_of_forward_and_backward_replays_with_new_values(op, impl, case, device):
    assert_same_bits(*replay_with_new_values(op, impl, case, device))


@pytest.mark.parametrize("op, impl, case", BENCH)
def test_five_runs_give_the_same_bits(op, impl, case, device):
    args = op.inputs(dtype=torch.bfloat16, device=device, **case)
    first = gradients(op, kernel_of(op, impl), args)
    for _ in range(4):
        assert_same_bits(first, gradients(op, kernel_of(op, impl), args))


@pytest.mark.parametrize("op, impl", every_kernel())
def test_inductor_fullgraph_at_a_bench_shape_gives_the_eager_bits(op, impl, device):
    torch._dynamo.reset()
    args = op.inputs(dtype=torch.bfloat16, device=device, **shapes_of(op, impl)[0])
    compiled = torch.compile(kernel_of(op, impl), fullgraph=True, dynamic=False)
    assert_same_bits(gradients(op, compiled, args), gradients(op, kernel_of(op, impl), args))
