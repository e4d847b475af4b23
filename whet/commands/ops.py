"""whet ops"""

import json
from typing import Annotated

import typer

from whet.commands._console import Json, console, plain_errors


def command(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to show, with their whole meaning (default: all).")] = None,
    as_json: Json = False,
):
    """Each op: its arguments, meaning, impls, and what each impl refuses.

    Example: whet ops attention
    """
    from whet.op import discover
    from whet.report import tables

    found = {name: op for name, op in discover().items() if not ops or name in ops}
    with plain_errors("nothing was started"):
        if unknown := [name for name in ops or () if name not in found]:
            raise ValueError(f"ops: there is no {unknown[0]}; there are {', '.join(discover())}")
    if not as_json:
        console.print(tables.ops_table(found, whole=bool(ops)))
        return
    listed = {
        op.name: {
            "signature": str(op.signature), "doc": op.reference.__doc__, "shapes": op.shapes,
            "impls": {n: {"needs": i.needs, "refuses": list(i.limits)} for n, i in op.impls.items()},
        }
        for op in found.values()
    }
    typer.echo(json.dumps(listed, indent=1))
