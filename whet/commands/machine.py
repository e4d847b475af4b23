"""whet machine"""

import contextlib
import json
from dataclasses import asdict
from typing import Annotated

import typer

from whet.commands._console import Json, console

Again = Annotated[bool, typer.Option(help="Measure the ceilings anew (default: from the cache).")]


def command(as_json: Json = False, again: Again = False):
    """GPU, compute capability, versions, measured ceilings (GB/s, TFLOP/s), and what Triton can do here.

    Example: whet machine
    """
    from whet import machine, measure
    from whet.report import tables

    with console.status("measuring ceilings") if console.is_terminal and not as_json else contextlib.nullcontext():
        roof = asdict(measure.ceilings(again))
    m = machine.this_machine().as_dict()
    if as_json:
        typer.echo(json.dumps({"machine": m, "ceilings": roof}, indent=1))
    else:
        console.print(tables.machine_table(m, roof))
