"""What every command shares: the console, the progress bar, how results and errors are printed."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from whet import interrupts

WAIT_S = 5.0  # for rank 0, which may have begun later, to say what this process would
LOOK_S = 0.05
EVERY = 10.0  # seconds between lines of progress in a log
WIDTH = 160  # letters, where there is no terminal and COLUMNS says nothing


def width() -> int | None:
    """Of what is printed: None leaves it to the terminal."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None if sys.stdout.isatty() else WIDTH


# Nothing printed is markup: a reason such as "rope[triton]: ..." or a path must come out as it is.
console = Console(width=width(), highlight=False, markup=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables (default off).")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shapes", help="Part of a shape's name, or sizes and options, M=4096,N=384; repeatable (default: all)."),
]


def writable(folder: str) -> str:
    """The folder for records, refused before any work where nothing can be written there; it need not exist yet."""
    there = Path(folder).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    why = "it is no folder" if not there.is_dir() else "" if os.access(there, os.W_OK | os.X_OK) else "it is write-protected"
    if why:
        typer.echo(f"whet: --records: {folder} cannot be written: {there}: {why}; name another folder", err=True)
        raise typer.Exit(2)
    return folder


LockFile = Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")]
Records = Annotated[str, typer.Option("--records", metavar="DIR", help="Folder the record is written to.", callback=writable)]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write one self-contained page (default: none).")]
DEFAULT_NAMES = {"--trace": "trace.json", "--html": "report.html"}
DTYPE_HELP = "bfloat16, float16, float32."  # a test holds these to what there is
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]


def progress_lines() -> Callable[[str, int, int], None]:
    from whet.measure import now  # and with it PyTorch, which --help does not wait for

    began = last = now()

    def progress(text: str, done: int, total: int) -> None:
        nonlocal last
        if now() - last >= EVERY:
            last = now()
            typer.echo(f"whet: {last - began:.0f} s: {text}, {done} of {total}", err=True)

    return progress


@contextlib.contextmanager
def progress_bar(show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere, in a log, a line on stderr at most every EVERY seconds."""
    if not (show and console.is_terminal):
        yield progress_lines() if show else lambda text, done, total: None
        return
    columns = (TextColumn("{task.description:<36}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def comma_list(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def emit(made: dict, as_json: bool, folder: str, name: str, show: Callable[[], None]) -> None:
    from whet.report import record

    path = record.write(made, folder, name)
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    else:
        show()
    if not path:
        raise typer.Exit(2)
    if not as_json:
        console.print(f"record: {path}")


@contextlib.contextmanager
def plain_errors(kept: str | Callable[[], str]) -> Iterator[None]:
    """What a user did wrong is one line, exit code 2; a stopped run says what it kept, exit code 130, after SIGTERM 143."""
    try:
        yield
    except ValueError as e:
        complain(f"whet: {e}")
        raise typer.Exit(2) from None
    except OSError as e:
        if e.filename is None:  # as of standard output, which whet.__main__ answers for
            raise
        complain(f"whet: {e.filename}: {e.strerror or type(e).__name__}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        complain(f"whet: stopped; {kept if isinstance(kept, str) else kept()}", stopped=True)
        raise typer.Exit(interrupts.code()) from None


def complain(line: str, stopped: bool = False) -> None:
    """A line on stderr. Of processes that torchrun started only the first one prints what all have to say."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not said_by_first(line, stopped):
        typer.echo(line, err=True)


def said_by_first(line: str, stopped: bool) -> bool:
    """Whether rank 0 prints the same, or anything where this process was stopped; it leaves its line in torchrun's store.

    One that rank 0 does not meet is printed after WAIT_S, or when torchrun stops this process.
    """
    from datetime import timedelta
    from threading import Event

    from torch.distributed import TCPStore

    store, found = None, None
    with contextlib.suppress(KeyError, ValueError, RuntimeError, KeyboardInterrupt):  # a store that is gone is a RuntimeError
        host, port, again = (os.environ[k] for k in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        key = f"whet/said/{again}"
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=WAIT_S))
        if os.environ["RANK"] == "0":
            store.set(key, line)
            return False
        for _ in range(round(WAIT_S / LOOK_S)):
            if store.check([key]):
                found = store.get(key).decode()
                break
            Event().wait(LOOK_S)
    return found is not None and (stopped or found == line)


def refuse_directory(option: str, path: str | None) -> None:
    """A file that cannot be written is refused before the work that it is to hold."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"{option}: {path} is a directory; name a file in it, {Path(path) / DEFAULT_NAMES[option]}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option}: {path} cannot be written (no directory {Path(path).parent})")


def write_page(path: str, made: dict) -> None:
    from whet.report import page  # and with it jinja2, which no other command waits for

    try:
        Path(path).write_text(page.page(made), encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--html: {path} cannot be written ({e.strerror})") from None
