"""whet compare"""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Html, Json, console, plain_errors, refuse_directory

RUN_HELP = "Run folders; those whose recipes differ only in the seed are one arm. Others are held against the first."


def command(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help=RUN_HELP)] = None,
    arm: Annotated[list[str] | None, typer.Option(
        metavar="NAME=RUN,RUN", help="Runs to take as one arm, whatever their recipes; repeatable (default: by recipe).",
    )] = None,
    target: Annotated[float | None, typer.Option(
        metavar="LOSS", help="The validation loss whose time and tokens are compared (default: the worst final one).",
    )] = None,
    html: Html = None,
    record: Annotated[str, typer.Option(metavar="NAME", help="Keep it as records/compare-NAME.json (default: not kept).")] = "",
    as_json: Json = False,
):
    """Training runs against one another: what differs, how fast each is, and the losses at equal steps, tokens and time.

    Several seeds give mean, spread and whether a difference is significant. Where the data, the validation or the GPU differ,
    what depends on it is shown, and no winner is called.

    Example: whet compare runs/base runs/muon --html compare.html
    """
    from whet.train.compare import compare, group

    with plain_errors("nothing was written"):
        refuse_directory("--html", html)
        arms = group(runs or [], arm or [])
        found = compare(arms, target)
        said = shlex.join(["whet", "compare", *(runs or []), *(word for text in arm or [] for word in ("--arm", text))])
        if html:
            write(html, found, [[run.as_dict() for run in a.runs] for a in arms], said)
        if record:
            kept(found, said, record)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    from whet.report import compare_tables

    compare_tables.show(console, found)
    if html:
        console.print(f"page: {html}")


def kept(found: dict, said: str, name: str) -> None:
    from whet.report import record as records

    made = records.make(said, found)
    if records.write(made, "records", f"compare {name}") is None:
        raise ValueError(f"--record: records/compare-{name}.json cannot be written")


def write(path: str, found: dict, runs: list[list[dict]], said: str) -> None:
    from whet import machine
    from whet.report.run_pages import compare_page

    try:
        Path(path).write_text(compare_page(found, runs, said, machine.commit()), encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--html: {path} cannot be written ({e.strerror})") from None
