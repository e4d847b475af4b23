"""whet export"""

import json
from typing import Annotated

import typer

from whet.commands._console import Json, console, plain_errors


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, runs/NAME.")],
    out: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write; new or empty.")],
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="step-00000100 (default: the newest good one).")] = "",
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2 or a tokenizer.json (default: as beside the run's data).")] = "",
    as_json: Json = False,
):
    """A Hugging Face folder of a training run: for Transformers, and for `whet generate` where it knows the architecture.

    Example: whet export runs/first exported
    """
    from pathlib import Path

    from whet.train.export import export, load_run

    with plain_errors("nothing was written"):
        made = export(load_run(Path(run), checkpoint), Path(out), tokenizer)
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    else:
        console.print(f"{made['architecture']} of step {made['step']}: {made['folder']}")
