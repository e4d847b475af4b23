"""Shapes of ops as a user types them, for the commands that take an op and its shapes."""

import ast
import inspect

from whet.op import DTYPES, Call, Op, discover


def sizes_of(op: Op) -> str:
    """'M=...,N=...': the sizes that a shape of this op must have."""
    given = inspect.signature(op.inputs).parameters.items()
    needed = [k for k, p in given if p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    return ",".join(f"{k}=..." for k in needed if k not in ("dtype", "device"))


def parse_value(text: str) -> int | float | bool | str | None:
    """4096, 0.5, True, None, or the word itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_shapes(op: Op, text: str, command: str) -> list[dict]:
    """'M=4096,N=384', or the name of one of the op's shapes, or what several of their names have in common."""
    if text in op.shapes:
        return [op.shapes[text]]
    pairs = [part.partition("=") for part in text.split(",")]
    if all(sign for _, sign, _ in pairs):
        return [{k.strip(): parse_value(v.strip()) for k, _, v in pairs}]
    found = [case for name, case in op.shapes.items() if text and text in name]
    if not found:
        raise ValueError(f"{command}: a shape of {op.name} is {sizes_of(op)} or one of {list(op.shapes)}, got {text}")
    return found


def check_case(op: Op, case: dict, dtype: str, command: str) -> None:
    """Raises, before anything is started, for sizes that the op does not have or that do not go together."""
    given = ",".join(f"{k}={v}" for k, v in case.items())
    try:
        reason = op.check(**op.inputs(dtype=DTYPES[dtype], device="meta", **case))
    except (TypeError, RuntimeError):
        wanted = f"a shape of {op.name} is {sizes_of(op)} or one of {list(op.shapes)}"
        raise ValueError(f"{command}: {wanted}, got {given}") from None
    if reason:
        raise ValueError(f"{command}: {op.name} cannot run {given}: {reason}")


def calls_of_shapes(
    names: list[str], shapes: list[str], dtype: str, grad: bool, command: str = "bench"
) -> list[tuple[Call, int]]:
    ops = discover()
    if unknown := [n for n in names if n not in ops]:
        raise ValueError(f"{command}: unknown op {unknown[0]!r}; there are {', '.join(ops)}")
    if dtype not in DTYPES:
        raise ValueError(f"{command}: dtype must be one of {list(DTYPES)}, got {dtype!r}")
    calls = {}
    for op in (ops[n] for n in names or ops):
        cases = [case for s in shapes for case in parse_shapes(op, s, command)] or list(op.shapes.values())
        for case in cases:
            check_case(op, case, dtype, command)
            call = Call(op.name, case, dtype, grad and bool(op.grads))
            calls[call.key] = (call, 1)
    return list(calls.values())
