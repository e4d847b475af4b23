"""whet counters"""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from whet.commands._console import Dtype, Json, Records, Shapes, console, emit, plain_errors, progress_bar

if TYPE_CHECKING:
    from whet.op import Call


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op.")],
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Impl or impl@tile; repeatable (default: triton).")] = None,
    shapes: Shapes = None,
    dtype: Dtype = "bfloat16",
    forward_only: Annotated[bool, typer.Option(help="Leave the backward out (default: forward + backward).")] = False,
    records: Records = "records",
    as_json: Json = False,
):
    """What bounds each kernel of an impl, from the GPU's own counters: how busy each unit is, and what warps wait for.

    Example: whet counters attention --impl triton --impl sdpa_cudnn --shapes mid
    """
    from whet import ncu
    from whet.commands._shapes import calls_of_shapes
    from whet.report import record, tables

    with plain_errors("nothing is kept"), progress_bar(not as_json) as progress:
        calls, rows = calls_of_shapes([op], shapes or [], dtype, not forward_only, "counters"), []
        work = [(call, impl) for call, _ in calls for impl in impls or ["triton"] if takes(call, impl)]
        if not work:
            raise ValueError(f"counters: {', '.join(impls or ['triton'])} of {op} takes none of these shapes")
        for i, (call, impl) in enumerate(work):
            progress(f"{call.op} {impl}", i, len(work))
            rows += [{"call": call.key, "impl": impl, **row} for row in ncu.read(call, impl)]
        asked = [*(f"--impl {i}" for i in impls or []), *(f"--shapes {shlex.quote(s)}" for s in shapes or [])]
        command = " ".join(["whet counters", op, *asked, f"--dtype {dtype}", *(["--forward-only"] if forward_only else [])])
        made = record.make(command, {"kernels": rows})
        other = [*([] if dtype == "bfloat16" else [dtype]), *(["forward"] if forward_only else [])]
        name = " ".join(["counters", op, *(impls or []), *(shapes or []), *other])
        emit(made, as_json, records, name, lambda: console.print(tables.counters_table(rows)))


def takes(call: "Call", impl: str) -> bool:
    """Whether an impl takes a shape; raises for a name that is none."""
    import torch

    from whet.op import DTYPES, discover

    op = discover()[call.op]
    device = "cuda" if torch.cuda.is_available() else "meta"
    return op.impl(impl).refuses(**op.inputs(dtype=DTYPES[call.dtype], device=device, **call.case)) is None
