"""The command line. One file for each command, found by discovery: its name is the file's, its function is `command`.

Files here import typer and little else; what a command needs it imports when it runs, so that `whet --help` answers at once.
"""

import importlib
import pkgutil
import re
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from whet import interrupts

MEANING = "Sharpens PyTorch transformers: kernels proven right, measured faster, with the proof shown."


class TwoWords(TyperGroup):
    """A command's name may have two words, `bench decode`: it has options and help of its own."""

    def resolve_command(self, ctx, args):
        name = " ".join(args[:2])
        return super().resolve_command(ctx, [name, *args[2:]] if name in self.commands else args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # commands answer for what they began
            typer.echo("whet: stopped; nothing was begun yet", err=True)
            raise typer.Exit(interrupts.code()) from None


class PlainHelp(TyperCommand):
    """A command whose help is text, not markup: brackets, as of a recipe's [cpu], come out as they are.

    A paragraph is one line, to be wrapped where the terminal ends.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        shown: list[Any] = [self, *self.params]
        for part in shown:
            if text := getattr(part, "help", None):
                part.help = escape(re.sub(r"(?<!\n)\n(?!\n)", " ", text))

    def invoke(self, ctx):
        interrupts.begun = True
        return super().invoke(ctx)


def version(show: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version (default off).")] = False):
    if show:
        from whet import machine

        typer.echo(f"whet {machine.whet_version()}")
        raise typer.Exit


def application() -> typer.Typer:
    """Every command of this folder; `bench_decode.py` is `whet bench decode`, a further underscore is a hyphen."""
    made = typer.Typer(cls=TwoWords, no_args_is_help=True, help=MEANING)
    made.callback(invoke_without_command=True)(version)
    for name in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
        module = importlib.import_module(f"{__name__}.{name}")
        made.command(name.replace("_", " ", 1).replace("_", "-"), cls=PlainHelp)(module.command)
    return made


app = application()


def main() -> None:
    interrupts.listen()
    app()
