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

from whet.op import Op, discover
from whet.report.markdown import grid

HEAD = """\
<!-- made by `python -m whet.report.readme` from docstrings; edits here are overwritten -->
# Reference

The Python names that a user calls, then the command line. Names that are not here may change without notice.
"""
OPS_TEXT = """\
Each is a function of `whet.ops`. It also takes `impl`: `"auto"`, the default, runs what was chosen by measurement on this
machine, else the stock PyTorch call; any implementation can be named instead. [Ops](ops.md) has the whole meaning of each,
its implementations and what they refuse.
"""
GROUPS = {
    "Choosing kernels": (
        ("whet.choices", "Choices"), ("whet.choices", "use"), ("whet.choices", "Recorder"), ("whet.tune", "tune"),
        ("whet.lock", "Lock.read"), ("whet.lock", "Lock.table"), ("whet.plans", "best_plan"),
    ),
    "Choosing at the start of training": (
        ("whet.autoselect", "auto_select_kernels"), ("whet.autoselect", "ModelConfig"),
        ("whet.autoselect", "benchmark_rms_norm"), ("whet.autoselect", "benchmark_rotary"),
        ("whet.autoselect", "manual_kernel_benchmark"),
    ),
    "Generating text": (
        ("whet.decode.engine", "LLM"), ("whet.decode.engine", "LLM.generate"), ("whet.decode.engine", "LLM.stream"),
        ("whet.decode.engine", "LLM.chat"), ("whet.decode.engine", "LLM.of"), ("whet.decode.engine", "Options"),
        ("whet.decode.request", "Completion"), ("whet.decode.engine", "Stream"), ("whet.decode.engine", "Piece"),
    ),
}
COMPLETION = """\
`whet --install-completion` sets up completion of commands and options for the shell that it is run in; `whet
--show-completion` prints what it would install. `whet COMMAND --help` shows what is below.
"""


def found(module: str, name: str) -> Callable:
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return getattr(thing, "__func__", thing)


def public_name(module: str, name: str) -> str:
    """whet.X where the package offers it so, else the module's own path."""
    import whet

    return f"whet.{name}" if name.split(".")[0] in whet._HOMES else f"{module}.{name}"


def definition(thing: Callable) -> ast.FunctionDef | ast.ClassDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    return node


def is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(d).startswith("dataclass") for d in node.decorator_list)


def parameters(node: ast.FunctionDef) -> list[str]:
    """As they are written, self and cls left out, one string each, annotations and defaults included."""
    given = node.args
    none: list[ast.expr | None] = [None]
    plain = list(zip(given.args, none * (len(given.args) - len(given.defaults)) + [*given.defaults]))
    texts = [written(arg, default) for arg, default in plain if arg.arg not in ("self", "cls")]
    if given.vararg:
        texts.append(f"*{written(given.vararg, None)}")
    elif given.kwonlyargs:
        texts.append("*")
    texts += [written(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults)]
    return texts + ([f"**{written(given.kwarg, None)}"] if given.kwarg else [])


def written(arg: ast.arg, default: ast.expr | None) -> str:
    name = arg.arg + (f": {ast.unparse(arg.annotation)}" if arg.annotation else "")
    if default is None:
        return name
    return f"{name}{' = ' if arg.annotation else '='}{ast.unparse(default)}"


def fields(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign) and n.simple]


def signature(name: str, thing: Callable) -> str:
    """name(parameters) -> what it returns, in lines of at most 120 columns."""
    node, returns = definition(thing), ""
    if isinstance(node, ast.FunctionDef):
        given, returns = parameters(node), f" -> {ast.unparse(node.returns)}" if node.returns else ""
    elif is_dataclass(node):
        given = fields(node)
    else:
        makers = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        given = parameters(makers[0]) if makers else []
    line = f"{name}({', '.join(given)}){returns}"
    if len(line) <= 120:
        return line
    return f"{name}(\n" + textwrap.indent("\n".join(f"{text}," for text in given), "    ") + f"\n){returns}"


def section(module: str, name: str) -> str:
    thing, public = found(module, name), public_name(module, name)
    meaning = inspect.cleandoc(thing.__doc__ or "")
    text = "\n\n".join(part for part in (signature(public, thing), meaning) if part)
    return f"### {public}\n\n```text\n{text}\n```\n"


def first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]


def ops_section(ops: dict[str, Op]) -> str:
    rows = []
    for op in ops.values():
        meaning = first_sentence(op.reference.__doc__ or "")
        rows.append((f"[`{op.name}{op.signature}`](ops.md#{op.name})", f"`{meaning}`" if "=" in meaning else meaning))
    return f"## Ops\n\n{OPS_TEXT}\n{grid(('function', 'meaning'), rows, text=2)}\n"


def commands() -> Iterator[str]:
    """Each command: what it does, then its arguments and options with their help."""
    import typer

    from whet.commands import app

    group = typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        rows = [(f"`{usage(p)}`", shown_default(p), getattr(p, "help", "") or "") for p in command.params if p.name != "help"]
        table = grid(("argument or option", "default", "meaning"), rows, text=3)
        meaning = inspect.cleandoc(command.help or "").replace("Example: ", "Example: `").rstrip()
        meaning += "`" if "Example: " in meaning else ""
        yield f"### whet {name}\n\n{meaning}\n\n{table}\n"


def usage(p: click.Parameter) -> str:
    if p.param_type_name == "argument":
        return p.metavar or (p.name or "").upper()
    return "/".join((*p.opts, *p.secondary_opts))


def shown_default(p: click.Parameter) -> str:
    """What is taken where nothing is given; a dash where there is nothing, and for a switch that is off."""
    value = "on" if p.default is True else p.default
    return f"`{value}`" if value and isinstance(value, str) or type(value) in (int, float) else "-"


def page() -> str:
    parts = [HEAD, ops_section(discover())]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n\n" + "\n".join(section(module, name) for module, name in names))
    return "\n".join((*parts, f"## Command line\n\n{COMPLETION}", *commands()))
