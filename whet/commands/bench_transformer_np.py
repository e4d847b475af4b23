"""whet bench transformer-np"""

import functools
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer

from whet.commands._console import Json, Records, comma_list, console, emit, plain_errors, progress_bar
from whet.commands._diagnose import quiet_profiler

MODEL = "transformer-np"
Sizes = Annotated[str, typer.Option(
    help="Sizes, comma between: small, small-b256, mid, mid-b8, large, tiny (default small,mid,large; on a CPU tiny).",
    show_default=False,
)]
Ways = Annotated[str, typer.Option(
    help='Ways to run, comma between: "torch.compile,custom FP8"; the first one is the baseline (default: all).',
)]
Cells = Annotated[str, typer.Option(
    help="Cells of each way, comma between: plain, graph, checkpointed, checkpointed graph (default: all four).",
)]


def command(
    shapes: Sizes = "",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per cell, seconds.")] = 0.5,
    records: Records = "records",
    name: Annotated[str, typer.Option(help="Name of the record (default: bench, the model and the shapes).")] = "",
    only: Ways = "",
    cells: Cells = "",
    as_json: Json = False,
):
    """TransformerNP's training step by every way: SDPA, torch.compile, whet's kernels, FP8; checkpointed, and as a graph.

    Each cell is verified in float64, then timed in turns with the SDPA baseline. tokens/s are B * (M + N) a step. A cell that
    cannot run says why.

    Example: whet bench transformer-np --shapes tiny --precision float32 --seconds 0.05
    """
    import torch

    from whet.matrix import CELLS, Matrix
    from whet.models import find
    from whet.report import matrix_tables, record
    from whet.workload import PRECISIONS

    with plain_errors("nothing was timed yet, so there is nothing to keep"):
        if precision not in PRECISIONS:
            raise ValueError(f"bench: --precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        asked = comma_list(shapes) or (["small", "mid", "large"] if torch.cuda.is_available() else ["tiny"])
        for shape in asked:
            find(f"{MODEL}:{shape}")
        make = functools.partial(
            Matrix, precision=precision, seconds=seconds, only=comma_list(only), cells=comma_list(cells) or CELLS,
        )
        count = make(f"{MODEL}:{asked[0]}").count  # which refuses what it does not know
    announce(count, asked, torch.cuda.is_available())
    options = {"shapes": ",".join(asked), "precision": precision, "seconds": f"{seconds:g}", "only": only, "cells": cells}
    said = " ".join(f"--{option} {shlex.quote(value)}" for option, value in options.items() if value)
    made, name = record.make(f"whet bench {MODEL} {said}", []), name or f"bench {MODEL} {' '.join(asked)}"
    kept = lambda: f"{sum(len(shape['cells']) for shape in made['measured'])} cells are in the record"  # noqa: E731
    with plain_errors(kept), progress_bar(not as_json) as progress, quiet_profiler():
        for shape in asked:
            run(make(f"{MODEL}:{shape}"), made, lambda: record.write(made, records, name), progress)

    def show() -> None:
        for shape in made["measured"]:
            console.print(matrix_tables.cells_table(shape))
            if (stages := matrix_tables.stages_table(shape)) is not None:
                console.print(stages)

    emit(made, as_json, records, name, show)


def announce(count: int, shapes: list[str], gpu: bool) -> None:
    """What is tried, where no bar shows it."""
    if not console.is_terminal:
        long = "" if gpu else ", which takes minutes and more on a CPU"
        typer.echo(f"whet: each of {count} cells of {' and '.join(shapes)} is verified in float64, then timed{long}", err=True)


def run(matrix: Any, made: dict, write: Callable, progress: Callable[[str, int, int], None]) -> None:
    """The cells of one shape, each written as it is done: a run of a large shape may be cut short."""
    from whet.matrix import points

    subject, writable = matrix.subject, True
    shape: dict = {"target": subject.name, "points": points(subject), "precision": matrix.precision, "cells": []}
    made["measured"].append(shape)
    for done, cell in enumerate(matrix.cells(), 1):
        shape["cells"].append(cell.to_record())
        progress(f"{subject.name}: {cell.way}", done, matrix.count)
        writable = writable and write() is not None
