"""whet sample"""

from typing import Annotated

import typer

from whet.commands._console import plain_errors


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, runs/NAME.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model goes on from (default: a new document).")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "--max-new-tokens", min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many of the likeliest tokens; 0: among all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the random numbers (default 0).")] = 0,
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="step-00000100 (default: the newest good one).")] = "",
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2 or a tokenizer.json (default: as beside the run's data).")] = "",
):
    """Text from a checkpoint of a training run.

    Example: whet sample runs/first "def main" --tokens 100
    """
    from pathlib import Path

    from whet.train.export import load_run
    from whet.train.export import sample as sampled

    with plain_errors("nothing was written"):
        found = load_run(Path(run), checkpoint)
        typer.echo(sampled(found, text, tokens, temperature, top_k or None, seed, tokenizer))
