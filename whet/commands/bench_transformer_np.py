"""whet bench transformer-np"""

from typing import Annotated

import typer

from whet.commands._console import Json, Records, console, emit, plain_errors, progress_bar

MODEL = "transformer-np"


def command(
    shapes: Annotated[str, typer.Option(
        help="Sizes, comma between: small, small-b256, mid, mid-b8, large, tiny (default small,mid,large; on a CPU tiny).",
        show_default=False,
    )] = "",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per cell, seconds.")] = 0.5,
    records: Records = "records",
    name: Annotated[str, typer.Option(help="Name of the record (default: bench, the model and the shapes).")] = "",
    as_json: Json = False,
):
    """TransformerNP's training step by every way: SDPA, torch.compile, whet's kernels, FP8; checkpointed, and as a graph.

    Each cell is verified in float64, then timed in turns with the SDPA baseline. tokens/s are B * (M + N) a step. A cell that
    cannot run says why.

    Example: whet bench transformer-np --shapes tiny --precision float32 --seconds 0.05
    """
    import torch

    from whet.matrix import Matrix, points
    from whet.models import find
    from whet.report import matrix_tables, record
    from whet.workload import PRECISIONS

    with plain_errors("nothing was timed yet, so there is nothing to keep"):
        if precision not in PRECISIONS:
            raise ValueError(f"bench: --precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        asked = (shapes or ("small,mid,large" if torch.cuda.is_available() else "tiny")).split(",")
        targets = [f"{MODEL}:{shape.strip()}" for shape in asked]
        for target in targets:
            find(target)
    measured: list[dict] = []
    with plain_errors("the shapes that were done are shown above"), progress_bar(not as_json) as progress:
        for target in targets:
            matrix = Matrix(target, precision, seconds)
            shape: dict = {"target": target, "points": points(matrix.subject), "precision": precision, "cells": []}
            measured.append(shape)
            for done, cell in enumerate(matrix.cells(), 1):
                shape["cells"].append(cell.to_record())
                progress(f"{target}: {cell.way}", done, matrix.count)
    made = record.make(f"whet bench {MODEL} --shapes {','.join(asked)} --precision {precision} --seconds {seconds:g}", measured)

    def show() -> None:
        for shape in measured:
            console.print(matrix_tables.cells_table(shape))
            if (stages := matrix_tables.stages_table(shape)) is not None:
                console.print(stages)

    emit(made, as_json, records, name or f"bench {MODEL} {' '.join(asked)}", show)
