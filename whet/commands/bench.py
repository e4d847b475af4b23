"""whet bench"""

import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from whet import interrupts
from whet.commands._console import Dtype, Json, Records, Shapes, console, emit, plain_errors, progress_bar

Mode = Annotated[str, typer.Option(help="eager (host overhead included), graph (GPU work alone) or both; a CPU: eager only.")]


def command(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Ops to time (default all).")] = None,
    shapes: Shapes = None,
    mode: Mode = "both",
    dtype: Dtype = "bfloat16",
    forward_only: Annotated[bool, typer.Option(help="Leave the backward out (default: forward + backward).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per candidate, seconds.")] = 0.25,
    records: Records = "records",
    name: Annotated[str, typer.Option(help="Name of the record (default: bench and the ops).")] = "",
    as_json: Json = False,
):
    """Verify every impl of each op, then time the survivors in turns. `whet bench decode` times the decoder instead.

    Example: whet bench rms_norm --shapes M=64,N=128
    """
    from whet import measure
    from whet.commands._shapes import calls_of_shapes
    from whet.lock import Lock
    from whet.report import record, tables
    from whet.tune import modes_here, reduced_note, tune

    with plain_errors("nothing was timed yet, so there is nothing to keep"):
        if mode not in (*measure.MODES, "both"):
            raise ValueError(f"bench: mode must be eager, graph or both, got {mode!r}")
        if mode == "graph" and "graph" not in modes_here():
            raise ValueError("bench: mode graph needs a GPU")
        modes = modes_here() if mode == "both" else (mode,)
        lock, calls = Lock(), calls_of_shapes(ops or [], shapes or [], dtype, not forward_only)
        with progress_bar(not as_json) as progress:
            stopped = stopped_early(lambda: tune(calls, lock, modes, progress, seconds, bucket=False), lock)
        entries = [e for e in lock.calls.values() if e.get("chosen")]
        asked = [*(ops or []), *(f"--shapes {shlex.quote(s)}" for s in shapes or []), f"--mode {mode} --dtype {dtype}"]
        command = " ".join(["whet bench", *asked, f"--seconds {seconds:g}", *(["--forward-only"] if forward_only else [])])
        also = {"ceilings": asdict(measure.ceilings()), **measure.dispatch_us(), "note": reduced_note()}
        made = record.make(command, {"entries": entries} | also | ({"stopped": True} if stopped else {}))

        def show():
            tables.show_calls(console, entries)
            for line in tables.busy(entries):
                console.print(line)
            console.print(f"dispatch through choices adds {also['dispatch_us']} us a call. {reduced_note()}")

        other = [*([] if dtype == "bfloat16" else [dtype]), *(["forward"] if forward_only else [])]
        default = ["bench", *(ops or ["all"]), *(shapes or []), *other]
        emit(made, as_json, records, name or " ".join(default), show)
        if stopped:
            typer.echo(f"whet: stopped; {len(entries)} of {len(lock.calls)} were timed and are in the record", err=True)
            raise typer.Exit(interrupts.code())


def stopped_early(work: Callable[[], object], lock) -> bool:
    """Do the work; True if it was stopped with something already timed, which is then kept."""
    try:
        work()
    except KeyboardInterrupt:
        if not any(e.get("chosen") for e in lock.calls.values()):
            raise
        return True
    return False
