"""whet step"""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from whet.commands._console import Json, LockFile, Records, console, emit, plain_errors, progress_bar

if TYPE_CHECKING:
    from whet.commands._steps import StepRun

TARGET_HELP = "A Hugging Face folder, random weights where it has none, or file.py:function with model and batch; or several."
Tokens = Annotated[int | None, typer.Option(
    min=1, help="A folder: tokens in a row (default 2048; 64 on a CPU). Of several, as far as each has positions.",
)]
MaxMemory = Annotated[str | None, typer.Option(
    metavar="SIZE", help="whet's ways: checkpoint blocks until a step takes no more, 40GiB (default: no limit).",
)]


def command(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    batch: Annotated[int | None, typer.Option(min=1, help="A folder: rows of the batch (default 4; 2 on a CPU).")] = None,
    tokens: Tokens = None,
    dtype: Annotated[str, typer.Option(help="A folder: bfloat16, float32, or auto: as its config.json says.")] = "auto",
    only: Annotated[str, typer.Option(help="Some of the ways, by name, comma between (default: all).")] = "",
    compiled: Annotated[bool, typer.Option(help="Let whet.compile_step try torch.compile, too.")] = True,
    seconds: Annotated[float | None, typer.Option(
        min=0.0, help="Measuring time per candidate, seconds (default 0.15, as whet.optimize's).",
    )] = None,
    max_memory: MaxMemory = None,
    lock: LockFile = None,
    records: Records = "records",
    as_json: Json = False,
):
    """One training step by every way: as it is, Liger's, torch.compile's, whet.optimize's and whet.compile_step's, in turns.

    Forward, backward and a fused AdamW, on random tokens, images or sound, or on the batch of your function. Each way has its
    own copy of the model. Beside the time: memory, how long it took to get ready, and what the GPU is busy with.

    Of several targets there is one table, a row for each, and one record. One that fails costs its row, and exit code 1.

    Example: whet step examples/models/gpt2 --batch 16 --tokens 1024

    Example: whet step examples/models/small/* examples/plain_models.py:nano_gpt --only "as it is,whet.optimize"
    """
    given: dict = {"--batch": batch, "--tokens": tokens, "--dtype": None if dtype == "auto" else dtype, "--only": only or None}
    given |= {"--seconds": seconds, "--max-memory": max_memory}
    with plain_errors("nothing was written"):
        run = asked_of(targets, given, compiled, lock)
    (one if len(targets) == 1 else several)(targets, given, run, records, as_json)


def asked_of(targets: list[str], given: dict, compiled: bool, lock: str | None) -> "StepRun":
    """The options; ValueError, before any work, where one has a value that there is not, or no target that it is for."""
    from whet.commands._folder import FolderOptions
    from whet.commands._steps import StepRun, is_function
    from whet.lock import Lock, lock_path
    from whet.step_rivals import SECONDS, WAYS, StepOptions
    from whet.swap._memory import bytes_of

    ways = tuple(w.strip() for w in given["--only"].split(",")) if given["--only"] else WAYS
    if unknown := [w for w in ways if w not in WAYS]:
        raise ValueError(f"step: --only knows {', '.join(WAYS)}, got {unknown[0]!r}")
    if given["--max-memory"] is not None:
        bytes_of(given["--max-memory"])
    of_folders = [name for name in ("--batch", "--tokens", "--dtype") if given[name] is not None]
    if of_folders and all(map(is_function, targets)):
        raise ValueError(f"step: {of_folders[0]} is for a Hugging Face folder, and no target is one")
    folder = FolderOptions(
        True, given["--batch"], given["--tokens"], given["--dtype"] or "auto", shorten=len(targets) > 1
    )
    seconds = SECONDS if given["--seconds"] is None else given["--seconds"]
    return StepRun(folder, StepOptions(Lock.read(lock_path(lock)), seconds, compiled, given["--max-memory"]), ways)


def one(targets: list[str], given: dict, run: "StepRun", records: str, as_json: bool) -> None:
    """One target: a row for each way."""
    from whet.commands._steps import of_target, raced
    from whet.report import record, step_tables

    with plain_errors("nothing was written"), progress_bar(not as_json) as progress:
        taken = of_target(targets[0], run.folder)
        measured = raced(taken, run, progress)
    limit = given["--max-memory"]
    said = f"whet step {targets[0]} {taken.options}".rstrip() + " --no-compiled" * (not run.step.compiled)
    said += f" --max-memory {limit}" if limit else ""
    size = "x".join(map(str, measured["batch"])) + (f" {limit}" if limit else "")
    made = record.make(said, measured)
    emit(made, as_json, records, f"step {measured['target']} {size}", lambda: step_tables.show(console, measured))


def several(targets: list[str], given: dict, run: "StepRun", records: str, as_json: bool) -> None:
    """Several targets: a row for each; exit code 1 where one failed."""
    from whet.commands._steps import raced_models
    from whet.report import record, step_tables

    options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    said = shlex.join(["whet", "step", *targets, *options, *(() if run.step.compiled else ("--no-compiled",))])
    made, models, name = record.make(said, {"models": []}), list[dict](), f"steps {len(targets)} models"
    kept = lambda: f"{len(models)} of {len(targets)} models are in the record"  # noqa: E731
    with plain_errors(kept), progress_bar(not as_json) as progress:
        for found in raced_models(targets, run, progress):
            models.append(found)
            made["measured"]["models"] = models
            record.write(made, records, name)  # each as it is done: a run of many models may be cut short
    emit(made, as_json, records, name, lambda: step_tables.show_models(console, models))
    if any(map(step_tables.failure, models)):
        raise typer.Exit(1)
