"""docs/api.md, made from signatures and docstrings: the Python names that users call, and every command with its options.

Signatures are read from the source, so that the page is the same under every version of Python.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import click

from whet.op import discover
from whet.report import markdown
from whet.report.templates import fill

GROUPS = {
    "Your own model": (
        "swap._optimize.optimize", "swap._optimize.restore", "swap._stored.pad_weights", "swap._stored.unpad_weights",
        "swap._optimize.Optimized",
    ),
    "Your own training loop": ("step.compile_step", "step.CompiledStep", "callback.TrainerCallback"),
    "Choosing kernels": (
        "choices.Choices", "choices.use", "choices.Recorder", "tune.tune", "lock.Lock.read", "lock.Lock.table",
        "plans.best_plan",
    ),
    "Choosing at the start of training": tuple(f"autoselect.{name}" for name in (
        "auto_select_kernels", "ModelConfig", "benchmark_rms_norm", "benchmark_rotary", "manual_kernel_benchmark",
    )),
    "Generating text": (
        *(f"decode.engine.{name}" for name in ("LLM", "LLM.generate", "LLM.stream", "LLM.chat", "LLM.of", "Options")),
        "decode.request.Completion", "decode.engine.Stream", "decode.engine.Piece",
    ),
}


def found(path: str) -> tuple[str, Callable]:
    """(public name, object) of a path in the package; the public name is whet.X where whet exports X."""
    import whet

    module = re.match(r"[a-z_.]+\.(?=[A-Z])|[a-z_.]+\.", path)[0].rstrip(".")  # type: ignore[index]
    name = path.removeprefix(f"{module}.")
    thing: Any = importlib.import_module(f"whet.{module}")
    for part in name.split("."):
        thing = getattr(thing, part)
    public = name if name.split(".")[0] in whet._HOMES else path
    return f"whet.{public}", getattr(thing, "__func__", thing)


def signature(name: str, thing: Callable) -> str:
    """name(parameters) -> what it returns, as it is written, in lines of at most 120 columns."""
    node: Any = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]
    maker = node
    if isinstance(node, ast.ClassDef):
        maker = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if maker is None:  # a dataclass
        given = ", ".join(ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign) and n.simple)
    else:
        given = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(maker.args))
    returns = f" -> {ast.unparse(node.returns)}" if isinstance(node, ast.FunctionDef) and node.returns else ""
    line = f"{name}({given}){returns}"
    return line if len(line) <= 120 else f"{name}(\n{textwrap.indent(textwrap.fill(given, 112), '    ')}\n){returns}"


def described(paths: tuple[str, ...]) -> dict[str, str]:
    things = dict(map(found, paths))
    return {name: f"{signature(name, thing)}\n\n{inspect.cleandoc(thing.__doc__ or '')}" for name, thing in things.items()}


def ops() -> str:
    """The table of ops: signature, and the first sentence of the reference's docstring."""
    rows = []
    for op in discover().values():
        paragraph = " ".join(inspect.cleandoc(op.reference.__doc__ or "").partition("\n\n")[0].split())
        meaning = re.split(r"(?<=\.) ", paragraph)[0].replace("`", "'")
        rows.append((f"[`{op.name}{op.signature}`](ops.md#{op.name})", f"`{meaning}`"))
    return markdown.grid(("function", "meaning"), rows, text=2)


def commands() -> Iterator[tuple[str, str, str]]:
    """Each command: its name, what it does, and its arguments and options with their help."""
    import typer

    from whet.commands import app

    group: Any = typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):
        rows = [(f"`{usage(p)}`", shown_default(p), unescaped(p)) for p in command.params if p.name != "help"]
        meaning = re.sub(r"Example: (.*)", r"Example: `\1`", inspect.cleandoc(unescaped(command)))
        yield name, meaning, markdown.grid(("argument or option", "default", "meaning"), rows, text=3)


def unescaped(shown: Any) -> str:
    """The help of a command, argument or option, which whet.commands.PlainHelp escapes for rich."""
    return (getattr(shown, "help", None) or "").replace("\\[", "[")


def usage(p: click.Parameter) -> str:
    if p.param_type_name == "argument":
        return p.metavar or (p.name or "").upper()
    return "/".join((*p.opts, *p.secondary_opts))


def shown_default(p: click.Parameter) -> str:
    """An option's default; a dash where it has none, and for a flag that is off."""
    value = "on" if p.default is True else p.default
    return f"`{value}`" if value and isinstance(value, str) or type(value) in (int, float) else "-"


def page() -> str:
    groups = {title: described(paths) for title, paths in GROUPS.items()}
    return fill("api.md.j2", ops=ops(), groups=groups, commands=commands())
