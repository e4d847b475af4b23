"""whet optimize"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.commands._console import (
    Html,
    Json,
    LockFile,
    Records,
    comma_list,
    console,
    emit,
    plain_errors,
    progress_bar,
    write_page,
)

if TYPE_CHECKING:
    from whet.commands._folder import FolderOptions

TARGET_HELP = "A built-in model (tiny-llama:small, gpt2:d12@4x512), a Hugging Face folder, or file.py:function."
Against = Annotated[str, typer.Option(
    metavar="MODEL", help="Another built-in model, timed under torch.compile in turns with the chosen plan (default: none).",
)]
Only = Annotated[str, typer.Option(
    help='Plans to try, comma between, as their table names them: "torch.compile,choices + CUDA graph" (default: all).',
)]
Step = Annotated[bool | None, typer.Option(
    "--train/--infer", help="A folder: a training step or a forward pass (default: train where the model takes labels).",
    show_default=False,
)]
Rows = Annotated[int | None, typer.Option(min=1, help="A folder: rows of random tokens (default 4; 2 on a CPU).")]
Tokens = Annotated[int | None, typer.Option(min=1, help="A folder: tokens in a row (default 2048; 64 on a CPU).")]
Weights = Annotated[str, typer.Option(help="A folder: bfloat16, float32, or auto: as its config.json says.")]
DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="A folder: find and prove what would be replaced, and time nothing (default off).",
)]

Allow = Annotated[str, typer.Option(
    help="A folder: what may change the precision: tf32, float32 products as TF32, on a GPU (default: nothing).",
)]
MaxMemory = Annotated[str | None, typer.Option(
    metavar="SIZE", help="Memory limit of a step, 40GiB or 512MiB: blocks are checkpointed, leaner plans tried (default none).",
)]
StepPlans = Annotated[bool | None, typer.Option(
    "--plans/--no-plans", help="A folder: time the optimised step by each plan of compile_step (default: on a GPU).",
    show_default=False,
)]


def command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16; only ever what is asked for.")] = "float32",
    again: Annotated[bool, typer.Option(help="Measure the plans anew even if the lock has them (default off).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per candidate and plan, seconds.")] = 0.5,
    against: Against = "",
    only: Only = "",
    train: Step = None,
    batch: Rows = None,
    tokens: Tokens = None,
    dtype: Weights = "auto",
    dry_run: DryRun = False,
    allow: Allow = "",
    max_memory: MaxMemory = None,
    plans: StepPlans = None,
    lock: LockFile = None,
    html: Html = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Record the model's calls, verify and time every candidate, choose, and time the whole model before and after.

    What a function of yours returns runs as it is, with proved parts replaced, under torch.compile and, on a GPU, as a CUDA
    graph: copies of it, each verified in float64 before it is timed. It is always measured anew.

    Of a Hugging Face folder, parts of the live model are replaced as whet.optimize does it: each is proved on the module
    itself and timed against it. Weights are the folder's where it has safetensors, and random otherwise.

    Example: whet optimize tiny-llama:tiny

    Example: whet optimize path/to/model_folder --dry-run
    """
    from whet.commands._folder import FolderOptions, is_folder
    from whet.lock import lock_path

    asked = FolderOptions(train, batch, tokens, dtype, dry_run, allow, max_memory, plans)
    with plain_errors("nothing was begun yet"):
        where, folder = lock_path(lock), is_folder(target)
        if lock is not None or "WHET_LOCK" in os.environ:
            refuse_others_file(where)
        refuse_other_options(folder, [o for o in asked.given() if o != "--max-memory"], precision, again, against, only)
        refuse_values(asked)
        refuse_precision(precision)
    before = state(where)
    with plain_errors(lambda: kept_in(where, before)):
        if folder:
            of_folder(target, asked, where, seconds, html, records, as_json)
        else:
            by_plans(target, precision, again, against, only, max_memory, where, seconds, html, records, as_json)


def by_plans(
    target: str, precision: str, again: bool, against: str, only: str, max_memory: str | None, where: Path, seconds: float,
    html: str | None, records: str, as_json: bool,
) -> None:
    """A built-in model, or what a function returned: the ways to run it."""
    from whet.commands._memory import refuse_what_does_not_fit
    from whet.lock import Lock
    from whet.plans import best_plan
    from whet.report import record
    from whet.swap._memory import bytes_of

    known, ours = Lock.read(where), not target.partition(":")[0].endswith(".py")
    if ours:
        refuse_what_does_not_fit(known, target, precision, again or bool(against or only or max_memory))
    limit = bytes_of(max_memory) if max_memory else 0
    with progress_bar(not as_json) as progress:
        names = [*map(plan_name, comma_list(only))]
        result = best_plan(target, known, precision, again, seconds, progress, against, names, limit)
    given = {"--against": against, "--only": shlex.quote(only) if only else "", "--max-memory": max_memory}
    more = "".join(f" {option} {value}" for option, value in given.items() if value)
    made = record.make(f"whet optimize {target} --precision {precision}{more}", result)
    if html:
        write_page(html, made)
    shown_lock = where if ours or result["calls"] else None
    within = f" within {max_memory}" if max_memory else ""  # a record of its own, beside that of all memory
    emit(made, as_json, records, f"optimize {Path(target).name} {precision}{within}", lambda: show(result, shown_lock))


def plan_name(label: str) -> str:
    """The name of a plan that a table calls so."""
    if label.startswith("stock"):
        return f"eager{label.removeprefix('stock')}"
    return f"eager + {label}" if label.startswith(("choices", "swapped")) else label


def of_folder(
    target: str, asked: "FolderOptions", where: Path, seconds: float, html: str | None, records: str, as_json: bool
) -> None:
    """A Hugging Face folder: what whet.optimize replaces in its model."""
    from whet.commands._folder import optimized_folder
    from whet.lock import Lock
    from whet.report import record

    with progress_bar(not as_json) as progress:
        command, measured, lines = optimized_folder(target, asked, Lock.read(where), seconds, progress)
    made = record.make(command, measured)
    if html:
        write_page(html, made)
    infer, dry = measured["kind"] != "train", asked.dry_run
    name = f"optimize {measured['target']}{' infer' * infer}{' dry run' * dry}"
    emit(made, as_json, records, name, lambda: show_folder(measured, lines, None if dry else where))


def show_folder(measured: dict, lines: list[str], lock: Path | None) -> None:
    """What was taken, its calls and their candidates, the groups that were replaced, and what was left."""
    from whet.report import swap_tables, tables

    for line in lines:
        console.print(line)
    if measured["entries"]:
        tables.show_calls(console, measured["entries"])
    swap_tables.show(console, measured)
    for line in tables.busy(measured["entries"]):
        console.print(line)
    if lock is not None:
        console.print(f"lock: {lock}")


def refuse_other_options(
    folder: bool, given: list[str], precision: str, again: bool, against: str, only: str
) -> None:
    """ValueError where an option was given that this kind of target does not have."""
    if not folder and given:
        raise ValueError(f"optimize: {given[0]} is for a Hugging Face folder, which the target is not")
    if folder and against:
        raise ValueError("optimize: --against compares built-in models; `whet step` times a folder by every way")
    if folder and only:
        raise ValueError("optimize: --only names plans of a built-in model or a function; `whet step --only` takes a folder")
    if folder and (precision != "float32" or again):
        what = "--again measures plans anew, and a folder has none" if again else "--precision is for plans; use --dtype"
        raise ValueError(f"optimize: {what}")


def refuse_precision(precision: str) -> None:
    import torch

    if precision == "tf32" and not torch.cuda.is_available():
        raise ValueError("optimize: --precision tf32 needs a GPU, and there is none here; use float32 or bfloat16")


def refuse_values(asked: "FolderOptions") -> None:
    """ValueError where --allow or --max-memory has a value that optimize() does not take."""
    from whet.swap._begin import allowed
    from whet.swap._memory import bytes_of

    allowed(asked.allow)
    if asked.max_memory is not None:
        bytes_of(asked.max_memory)


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
    if other := result.get("against"):
        console.print(tables.against_line(other))
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
