"""whet data"""

import json
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Json, console, plain_errors, progress_bar


def command(
    files: Annotated[list[str] | None, typer.Argument(
        metavar="FILES", help="Text files, and folders of them (default: the sources of Python's standard library).",
    )] = None,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder the shards are written to.")] = "shards",
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2, or a path to a tokenizer.json.")] = "bytes",
    val: Annotated[float, typer.Option(help="Share of the text kept for validation, 0 to 1.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(help="Size of a shard at most, tokens.")] = 100_000_000,
    as_json: Json = False,
):
    """Text to shards of tokens, which training reads: 16-bit `.bin` files of llm.c's format, whole or not written at all.

    Example: whet data -o shards
    """
    from whet.train import data, tokenize

    with plain_errors("nothing is kept"), progress_bar(not as_json) as progress:
        chosen = tokenize.load_tokenizer(tokenizer)
        if not out or "" in (files or ()):
            raise ValueError("data: an empty name is no file and no folder; name FILES, and a folder with -o")
        if files:
            texts, others = tokenize.documents(files, Path(out), progress)
            source = files
            if others and not texts:
                raise ValueError(f"data: there is no text in {', '.join(files)}: files that are not UTF-8, skipped: {others:,}")
        else:
            texts, others = tokenize.standard_library(), 0
            source = [data.STANDARD_LIBRARY]
        meta = data.write_shards(texts, out, chosen, val, shard_tokens, source, progress)
    per_token = meta["bytes"] / meta["tokens"]
    if as_json:
        typer.echo(json.dumps(meta | {"folder": out, "bytes_per_token": round(per_token, 3), "skipped": others}, indent=1))
        return
    documents = f"{meta['documents']:,} document{'s' * (meta['documents'] != 1)}"
    console.print(f"{documents}, {meta['tokens']:,} tokens, {per_token:.2f} bytes per token ({tokenizer})")
    if others:
        console.print(f"{others:,} file{'s' * (others != 1)} skipped: not UTF-8 text")
    parts = f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate"
    console.print(f"{parts}, {meta['files']:,} shards: {out}")
