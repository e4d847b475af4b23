"""whet step"""

import json
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Json, Records, console, emit, plain_errors, progress_bar


def command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A Hugging Face folder; random weights where it has none.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of the batch (default 4; 2 on a CPU).")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a row (default 2048; 64 on a CPU).")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or auto: as its config.json says.")] = "auto",
    only: Annotated[str, typer.Option(help="Some of the ways, by name, comma between (default: all).")] = "",
    compiled: Annotated[bool, typer.Option(help="Let whet.compile_step try torch.compile, too.")] = True,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per candidate, seconds.")] = 0.3,
    max_memory: Annotated[str | None, typer.Option(
        metavar="SIZE", help="whet's ways: checkpoint blocks until a step takes no more, 40GiB (default: no limit).",
    )] = None,
    lock: Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")] = None,
    records: Records = "records",
    as_json: Json = False,
):
    """One training step by every way: as it is, Liger's, torch.compile's, whet.optimize's and whet.compile_step's, in turns.

    Forward, backward and a fused AdamW, on random tokens or images. Each way has its own copy of the model. Beside the time:
    memory, how long it took to get ready, and what the GPU is busy with.

    Example: whet step examples/models/gpt2 --batch 16 --tokens 1024
    """
    from whet.commands._folder import FolderOptions, folder_model
    from whet.lock import Lock, lock_path
    from whet.report import record, step_tables
    from whet.step_rivals import WAYS, StepOptions, raced_steps
    from whet.swap._memory import bytes_of

    with plain_errors("nothing was written"), progress_bar(not as_json) as progress:
        ways = tuple(w.strip() for w in only.split(",")) if only else WAYS
        if unknown := [w for w in ways if w not in WAYS]:
            raise ValueError(f"step: --only knows {', '.join(WAYS)}, got {unknown[0]!r}")
        if max_memory is not None:
            bytes_of(max_memory)  # refused before any work
        taken = folder_model(Path(folder).expanduser(), FolderOptions(True, batch, tokens, dtype))
        asked = StepOptions(Lock.read(lock_path(lock)), seconds, compiled, max_memory)
        rows = raced_steps(taken.model, taken.batch, asked, progress, ways)
        name = Path(folder).resolve().name
        measured = {
            "target": name, "config": json.loads((Path(folder).expanduser() / "config.json").read_text()),
            "batch": taken.shape, "dtype": taken.dtype, "weights": taken.weights, "max_memory": max_memory, "ways": rows,
        }
    said = f"whet step {folder} {taken.options}{' --no-compiled' * (not compiled)}"
    said += f" --max-memory {max_memory}" if max_memory else ""
    size = "x".join(map(str, taken.shape)) + (f" {max_memory}" if max_memory else "")
    made = record.make(said, measured)
    emit(made, as_json, records, f"step {name} {size}", lambda: step_tables.show(console, measured))
