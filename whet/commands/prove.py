"""whet prove"""

from typing import Annotated

import typer

from whet import interrupts
from whet.commands._console import DTYPE_HELP, Json, Records, console, emit, plain_errors, progress_bar


def command(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to prove (default: all).")] = None,
    dtype: Annotated[str, typer.Option(help=f"{DTYPE_HELP} Several with commas.")] = "bfloat16",
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Only this impl; repeatable (default: all).")] = None,
    without: Annotated[list[str] | None, typer.Option("--without", help="All but this; repeatable (default: none).")] = None,
    cases: Annotated[bool, typer.Option("--cases", help="The tests' small cases, not bench's shapes (default off).")] = False,
    both: Annotated[bool, typer.Option("--all", help="Bench's shapes and the tests' cases (default off).")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes at once (default: half the cores, at most 8).", min=1)] = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Try every impl of each op as tuning does before it times one, and say which trial stops which. Exit code 1 if any is.

    Example: whet prove rms_norm --cases --impl torch
    """
    from whet import proofs
    from whet.op import DTYPES
    from whet.report import record, tables

    with plain_errors("nothing is kept"), progress_bar(not as_json) as progress:
        dtypes = dtype.split(",")
        if unknown := [d for d in dtypes if d not in DTYPES]:
            raise ValueError(f"prove: dtype must be among {list(DTYPES)}, got {unknown[0]!r}")
        calls = proofs.calls_of(ops or [], dtypes, both or not cases, both or cases)
        stopped = False
        try:
            rows = proofs.prove_all(calls, impls or [], without or [], progress, jobs=jobs)
        except proofs.Stopped as e:
            rows, stopped = e.rows, True
        some = [*(f"--impl {i}" for i in impls or []), *(f"--without {i}" for i in without or [])]
        asked = [*(ops or []), f"--dtype {dtype}", *some]
        which = ["all"] if both else ["cases"] if cases else []
        made = record.make(" ".join(["whet prove", *asked, *(f"--{w}" for w in which)]), {"rows": rows, "stopped": stopped})
        chosen = [*(impls or []), *(f"without {name}" for name in without or [])]
        those = [*(["shapes", "cases"] if both else which), *dtypes, *chosen]
        name = " ".join(["prove", *(ops or ["all"]), *those])
        emit(made, as_json, records, name, lambda: tables.show_proofs(console, rows))
    if stopped:
        typer.echo(f"whet: stopped; {len(rows)} candidates were proved and are in the record", err=True)
        raise typer.Exit(interrupts.code())
    if any(row["outcome"] in ("rejected", "failed") for row in rows):
        raise typer.Exit(1)
