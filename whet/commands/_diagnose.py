"""What doctor and profile share: how a target is opened, and the message of a run that cannot be done."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated

import typer

from whet import interrupts

TARGET_HELP = "A built-in model (tiny-llama:tiny), file.py:function returning model and batch, or a script (file.py)."
Where = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)]
Train = Annotated[bool, typer.Option("--train", help="Look at a training step (default where the model returns a loss).")]
Decode = Annotated[bool, typer.Option("--decode", help="Look at the step that makes one token, at batch 1 (default off).")]
Seconds = Annotated[float, typer.Option(min=0.0, help="Measuring time for the step, seconds.")]
Args = Annotated[str, typer.Option("--args", help="Arguments for a script, in one string (default: none).")]

CRASHED = 70  # EX_SOFTWARE of sysexits.h: an internal error of the program


def kind_of(train: bool, decode: bool) -> str | None:
    from whet.diagnose.target import CannotRun

    if train and decode:
        raise CannotRun("--train and --decode exclude each other")
    return "train" if train else "decode" if decode else None


@contextlib.contextmanager
def could_run() -> Iterator[None]:
    """What cannot be run is one line and exit code 2; a failure of whet's own is one line and 70, as findings are 1."""
    from whet.figures import error_line

    try:
        yield
    except ValueError as e:
        typer.echo(f"whet: {e}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("whet: stopped; nothing is kept", err=True)
        raise typer.Exit(interrupts.code()) from None
    except typer.Exit:
        raise
    except Exception as e:
        if os.environ.get("WHET_TRACEBACK"):
            traceback.print_exc()
        at = traceback.extract_tb(e.__traceback__)[-1]
        line = f"{os.path.basename(at.filename)}:{at.lineno}"
        failure = f"whet itself failed at {line}: {error_line(e)}"
        typer.echo(f"whet: {failure} (WHET_TRACEBACK=1 shows the traceback)", err=True)
        raise typer.Exit(CRASHED) from None


def quiet_profiler():
    """torch's profiler writes its starts and stops to stderr, past Python: what it says there is dropped."""
    from whet.diagnose.script import silenced

    return silenced(sys.stderr, 2)


def details(run) -> dict:
    """What the page and the record hold beside the findings; what cannot be had is left out."""
    from whet.diagnose import summary, whatif
    from whet.diagnose.checks import peak_memory

    found: dict = {}
    with contextlib.suppress(Exception):
        chains = whatif.what_if(run)
        whatif.realise(run, chains)
        found["whatif"] = [c.as_dict(run.step_ms) for c in chains[:12]]
    with contextlib.suppress(Exception):
        found["memory"] = peak_memory.owners(run)
    if run.target.kind == "decode":
        found["layers"], found["tokens_per_s"] = summary.per_layer(run), 1e3 / run.step_ms
    return found
