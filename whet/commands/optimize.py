"""whet optimize"""

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Html, Json, Records, console, emit, plain_errors, progress_bar, write_page

TARGET_HELP = "A built-in model and size (tiny-llama:small), or file.py:function returning model and batch."


def command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16; only ever what is asked for.")] = "float32",
    again: Annotated[bool, typer.Option(help="Measure the plans anew even if the lock has them (default off).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per plan, seconds.")] = 0.5,
    lock: Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")] = None,
    html: Html = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Record the model's calls, verify and time every candidate, choose, and time the whole model before and after.

    What a function of yours returns runs as it is, under torch.compile and, on a GPU, as a CUDA graph: copies of it, each
    verified in float64 before it is timed. It is always measured anew.

    Example: whet optimize tiny-llama:tiny
    """
    import torch

    from whet.commands._memory import refuse_what_does_not_fit
    from whet.lock import Lock, lock_path
    from whet.plans import best_plan
    from whet.report import record

    with plain_errors("nothing was begun yet"):
        where = lock_path(lock)
        if lock is not None or "WHET_LOCK" in os.environ:
            refuse_others_file(where)
        if precision == "tf32" and not torch.cuda.is_available():
            raise ValueError("optimize: --precision tf32 needs a GPU, and there is none here; use float32 or bfloat16")
    before = state(where)
    with plain_errors(lambda: kept_in(where, before)):
        known, ours = Lock.read(where), not target.partition(":")[0].endswith(".py")
        if ours:
            refuse_what_does_not_fit(known, target, precision, again)
        with progress_bar(not as_json) as progress:
            result = best_plan(target, known, precision, again, seconds, progress)
        made = record.make(f"whet optimize {target} --precision {precision}", result)
        if html:
            write_page(html, made)
        shown_lock = where if ours or result["calls"] else None
        emit(made, as_json, records, f"optimize {Path(target).name} {precision}", lambda: show(result, shown_lock))


def show(result: dict, lock: Path | None) -> None:
    """Calls and their candidates, the plans, which one was chosen, and the lock that keeps it."""
    from whet.report import tables

    if result["entries"]:
        tables.show_calls(console, result["entries"])
    console.print(tables.plans_table(result))
    for line in tables.busy(result["entries"], result):
        console.print(line)
    speedup = f"{result['speedup']:.2f}x the plain eager model"
    proved = "every output" if result.get("kind") == "forward" else "every gradient"
    console.print(f"{tables.plan_label(result['chosen'])}: {speedup}, {proved} verified. {result['note']}".strip())
    for note in result.get("notes", ()):
        console.print(f"note: {note}")
    if lock is not None:
        console.print(f"lock: {lock}")


def state(where: Path) -> tuple | None:
    """What changes when the file is written anew; None where there is none."""
    try:
        found = os.stat(where)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def kept_in(where: Path, before: tuple | None) -> str:
    """What a stopped run says of its lock."""
    if state(where) == before:
        return f"nothing of this run is in {where} yet"
    return f"what was tuned so far is kept in {where}, and the next run goes on from there"


def refuse_others_file(where: Path) -> None:
    """ValueError where the file that was named for the lock is something else, which a lock would take the place of."""
    from whet import lock_file

    lock_file.refuse_other_kinds(where)
    try:
        text = (lock_file.read(where) or b"").decode(errors="replace")
    except OSError:
        return  # the lock says that it cannot be read
    try:
        found = json.loads(text, strict=False)
        ours = isinstance(found, dict) and {"format", "machines"} <= found.keys()
    except (ValueError, RecursionError):  # a lock that was damaged still begins like one
        ours = re.match(r'\s*\{\s*"format": *\d+,\s*"machines"', text) is not None
    if text.strip() and not ours:
        raise ValueError(f"optimize: {where} is no lock of whet's and stays as it is; name a new file, or a lock, by --lock")
