"""whet exercise"""

from typing import Annotated

import typer

from whet.commands._console import Json, Records, console, emit, progress_bar
from whet.commands._diagnose import could_run


def command(
    stage: Annotated[str, typer.Argument(metavar="1..5|all", help="Which stage, or all of them with a summary.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    num_steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 20,
    hidden_dim: Annotated[int, typer.Option(min=8, help="Width.")] = 512,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 8,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    records: Records = "records",
    as_json: Json = False,
):
    """Five stages of debugging a slow, wrong tiny Llama; `all` prints the summary with this machine's figures.

    Example: whet exercise 5 --batch-size 2 --seq-len 32 --num-steps 2 --hidden-dim 64 --num-layers 2 --num-heads 4
    """
    from whet import exercise
    from whet.report import record
    from whet.report.exercises import exercises_table

    with could_run():
        with progress_bar(not as_json) as progress:
            sizes = dict(
                batch_size=batch_size, seq_len=seq_len, num_steps=num_steps, hidden_dim=hidden_dim, num_layers=num_layers,
                num_heads=num_heads,
            )
            rows = exercise.run(stage, **sizes, progress=progress)
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes.items())
        made = record.make(f"whet exercise {stage} {flags}", {"rows": rows})
        emit(made, as_json, records, f"exercise {stage}", lambda: console.print(exercises_table(rows)))
