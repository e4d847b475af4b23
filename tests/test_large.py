"""Ops for inference on tensors too large for the oracle, judged by their last rows: the way it is done, tried on small ones."""

import pytest
import torch
from conftest import every_kernel, exact, first_case, meta, trained
from test_registered import kernel_of

from whet.op import DTYPES, as_tuple, discover, tensors
from whet.verify import Verdict, evaluate, judge, widen

ROWS = 3  # compared at the end of a tensor too large for the oracle
ROPE = discover()["norm_rope"]


def large(op, args: dict) -> torch.Tensor:
    """What is to pass a number of elements: what is changed in place, or the first input."""
    return args[op.mutates[0]] if op.mutates else tensors(args)[0]


def batched(op, case: dict) -> tuple[str, list[str]]:
    """The size that is the first dimension of the large tensor, and the names of all arguments that have it as theirs."""
    for size in (k for k, v in case.items() if type(v) is int):
        before, after = meta(op, case), meta(op, case | {size: case[size] + 1})
        names = [k for k, v in before.items() if isinstance(v, torch.Tensor) and v.shape[0] < after[k].shape[0]]
        if large(op, before).shape[0] < large(op, after).shape[0]:
            return size, names
    raise AssertionError(f"{op.name}: no size of {case} is the first dimension of what is to be large")


def grown(op, case: dict, elements: int) -> tuple[dict, list[str]]:
    """The case with rows added until what is large passes the elements, and the arguments that have these rows.

    Sizes that only other tensors have are cut to the op's tiny ones, since of those a result for each row is kept.
    """
    size, names = batched(op, case)
    count = large(op, meta(op, case)).numel()
    cut = {k: min(v, case[k]) for k, v in op.tiny.items() if k in case and k != size}
    case = case | {k: v for k, v in cut.items() if large(op, meta(op, case | {k: v})).numel() == count}
    return case | {size: elements // (count // case[size]) + 1}, names


def judged_by_last_rows(op, impl: str, case: dict, elements: int, device: str, dtype: str = "bfloat16") -> Verdict:
    """The kernel's last rows at a size grown past the elements, against the reference given those rows alone."""
    case, names = grown(op, case, elements)
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    assert large(op, args).numel() > elements
    few = args | {k: args[k][-ROWS:] for k in names}
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in few.items()}, False)
    eager = evaluate(op, op.reference, few, False)
    outs = as_tuple(kernel_of(op, impl)(**args))
    actual = {f"output {i}": o[-ROWS:] for i, o in enumerate(outs)} | {f"changed {k}": args[k][-ROWS:] for k in op.mutates}
    return judge(actual, eager, oracle)


def judged_by_last_tokens(case: dict, elements: int, device: str, dtype: str = "bfloat16") -> Verdict:
    """norm_rope of one prompt whose projection passes the elements: tables and caches have a row for each token, too."""
    T = elements // ((case["H"] + 2 * case["KV"]) * case["D"]) + 1
    args = ROPE.inputs(dtype=DTYPES[dtype], device=device, **case, T=T, S=T)
    assert args["qkv"].numel() > elements
    few = args | dict(qkv=args["qkv"][:, -ROWS:], cos=args["cos"][-ROWS:], sin=args["sin"][-ROWS:])
    few |= {k: args[k][:, :, -ROWS:] for k in ROPE.mutates}
    oracle = evaluate(ROPE, ROPE.reference, {k: widen(v) for k, v in few.items()}, False)
    eager = evaluate(ROPE, ROPE.reference, few, False)
    out = kernel_of(ROPE)(**args)
    return judge({"output 0": out[:, -ROWS:]} | {f"changed {k}": few[k] for k in ROPE.mutates}, eager, oracle)


@pytest.mark.parametrize("op, impl", every_kernel(lambda op: not trained(op)))
def test_the_last_rows_of_a_grown_call_are_those_of_the_reference(op, impl, device):
    case = first_case(op, impl=impl)
    count = 5 * large(op, meta(op, case)).numel()
    verdict = judged_by_last_rows(op, impl, case, count, device, exact(op, impl))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("op, impl", every_kernel(lambda op: not trained(op)))
def test_a_bench_shape_grown_past_int32_is_one_that_a_kernel_takes_in_reasonable_memory(op, impl):
    """Nothing is computed: the arguments have no memory."""
    case, names = grown(op, next(iter(op.shapes.values())), 2**31)
    args = meta(op, case, "bfloat16")
    assert op.check(**args) is None and op.impls[impl].refuses(**args) is None
    assert sum(t.numel() * t.element_size() for t in tensors(args)) < 16 << 30
    assert all(args[k].shape[0] == large(op, args).shape[0] for k in names)
    assert args[names[0]].shape[0] < 65536 or not op.mutates, "a sequence is a grid's second or third dimension"


def test_the_last_tokens_of_a_long_prompt_are_those_of_the_reference(device):
    verdict = judged_by_last_tokens(dict(B=1, H=2, KV=1, D=16), 4096, device, "float32")
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("rows", [slice(0, ROWS), slice(-2 * ROWS, -ROWS)], ids=["the first", "those before"])
def test_other_rows_than_the_last_are_noticed(rows, device, monkeypatch):
    """As from an offset that has wrapped."""
    op = discover()["norm_linear"]
    run = kernel_of(op)
    monkeypatch.setattr("test_large.kernel_of", lambda *_: lambda **args: run(**args)[rows])
    assert not judged_by_last_rows(op, "triton", first_case(op), 2048, device, "float32").ok
