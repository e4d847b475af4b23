"""The times that a script claims, read from its source: each difference of two clock readings, and what lies between them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whet.diagnose.script import CLOCKS

WORKS = re.compile(r"model|net|module|layer|block|encode|decode|train|step|ward$|attention|matmul|generate|bench|fn$")
NOT_WORK = frozenset((
    "no_grad", "inference_mode", "enable_grad", "autocast", "manual_seed", "device", "load", "save", "tensor", "empty",
    "Generator", "set_float32_matmul_precision", "set_default_device", "is_available", "get_device_name", "compile", "train",
    "eval", "zero_grad", "state_dict", "load_state_dict", "parameters", "named_parameters", "modules", "named_modules",
))
Place = tuple[int, int]


@dataclass
class Claim:
    """One difference of two readings."""

    file: str
    function: str
    start: int  # line
    end: int
    reading: str  # "file.py:12", where the clock is read at the end
    waits: bool  # something between the readings waits for the GPU
    works: bool  # something between them may be the GPU's work
    around: bool = False  # from one turn of a loop to the next: what one time leaves out, the next has in it


@dataclass
class Source:
    """A file and the files beside it that it imports: its functions by name, its clocks."""

    path: Path
    tree: ast.Module
    text: str
    waits: frozenset[str]  # names of what waits for the GPU
    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # names of the modules time and timeit
    clocks: set[str] = field(default_factory=set)  # names of their functions
    wrapped: dict[str, int] = field(default_factory=dict)  # functions that return a reading -> the line that reads

    @property
    def for_gpu(self) -> bool:
        return bool(re.search(r"\bcuda\b|\bdevice\b|\bhip\b|DEVICE", self.text))


def read(path: Path, waits: frozenset[str], beside: bool = True) -> Source:
    text = path.read_text()
    source = Source(path, ast.parse(text), text, waits)
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            source.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import):
            source.modules |= {a.asname or a.name for a in node.names if a.name in ("time", "timeit")}
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "timeit"):
            source.clocks |= {a.asname or a.name for a in node.names if a.name in (*CLOCKS, "default_timer")}
    for name, found in source.functions.items():
        returns = [n for f in found for n in ast.walk(f) if isinstance(n, ast.Return) and n.value is not None]
        calls = [c for r in returns for c in ast.walk(r) if is_clock(c, source)]
        if calls and not any(isinstance(n, ast.BinOp) for r in returns for n in ast.walk(r)):
            source.wrapped[name] = place(calls[0])[0]
    if beside:
        for other in imported(source):
            source.text += other.text
            for name, found in other.functions.items():
                source.functions.setdefault(name, []).extend(found)
    return source


def imported(source: Source) -> list[Source]:
    names = [n.module or "" for n in ast.walk(source.tree) if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in ast.walk(source.tree) if isinstance(n, ast.Import) for a in n.names]
    paths = [source.path.parent / f"{name.replace('.', '/')}.py" for name in dict.fromkeys(names) if name]
    return [read(p, source.waits, beside=False) for p in paths if p.exists()]


def last_name(node: ast.AST) -> str:
    """'synchronize' of torch.cuda.synchronize, 'x' of x."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_clock(node: Any, source: Source) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name, owner = last_name(node.func), node.func.value if isinstance(node.func, ast.Attribute) else None
    if name in source.wrapped:
        return True
    if owner is None:
        return name in source.clocks
    return last_name(owner) in source.modules and name in (*CLOCKS, "default_timer")


def own(scope: ast.AST) -> Iterator[Any]:
    """What is in a scope, functions and classes inside it left out."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from own(child)


def place(node) -> Place:
    return node.lineno, node.col_offset


def end_of(node) -> Place:
    return node.end_lineno, node.end_col_offset


def claims(source: Source) -> list[Claim]:
    found = in_scope(source, source.tree, "<module>")
    classes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)]
    owners = {id(f): f"{c.name}." for c in classes for f in c.body}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef):
            found += in_scope(source, node, owners.get(id(node), "") + node.name)
        elif isinstance(node, ast.ClassDef):
            found += in_class(source, node)
    return found


def in_class(source: Source, node: ast.ClassDef) -> list[Claim]:
    """A timer that keeps its start in itself: one method reads it, another takes the difference."""
    methods = [f for f in node.body if isinstance(f, ast.FunctionDef)]
    bound = {m.name: bindings(in_order(m), source) for m in methods}
    waits, found = waits_in(list(ast.walk(node)), source) or with_waits(node.name, source), []
    for method in methods:
        for sub in (n for n in own(method) if is_difference(n)):
            call = next((c for c in ast.walk(sub.left) if is_clock(c, source)), None)
            starts = [c for m in methods if m is not method for c in bound[m.name].get(ast.unparse(sub.right), ())]
            if call is not None and starts:
                found.append(claim(source, f"{node.name}.{method.name}", starts[-1], call, waits, works=True))
    return found


def claim(source: Source, name: str, start, end, waits: bool, works: bool) -> Claim:
    line = source.wrapped.get(last_name(end.func), end.lineno)
    return Claim(source.path.name, name, start.lineno, end.lineno, f"{source.path.name}:{line}", waits, works)


def is_difference(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def in_order(scope: ast.AST) -> list:
    return sorted((n for n in own(scope) if hasattr(n, "lineno")), key=place)


def in_scope(source: Source, scope: ast.AST, name: str) -> list[Claim]:
    nodes = in_order(scope)
    bound, found = bindings(nodes, source), []
    for node in (n for n in nodes if is_difference(n)):
        call = next((c for c in ast.walk(node.left) if is_clock(c, source)), None)
        before = [b for b in bound.get(ast.unparse(node.left), ()) if place(b) < place(node)]
        call = call or next((b for b in reversed(before) if isinstance(b, ast.Call)), None)
        starts = bound.get(ast.unparse(node.right), [])
        if call is None or not starts:
            continue
        start, between, around = region(nodes, starts, call)
        yields = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in between)
        waits = waits_in([*between, call], source) or yields and with_waits(name, source)
        busy = any(works(n, source, scope) for n in between)
        found.append(replace(claim(source, name, start, call, waits, busy), around=around))
    return found


def bindings(nodes: list, source: Source) -> dict[str, list]:
    """Name -> the calls that read a clock for it, in order; `t0 = t1` hands a reading on, and counts where it stands."""
    bound: dict[str, list] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or any(is_difference(n) for n in ast.walk(node.value)):
            continue
        calls = [c for c in ast.walk(node.value) if is_clock(c, source)]
        handed = ast.unparse(node.value) in bound
        for target in node.targets:
            if calls or handed:
                bound.setdefault(ast.unparse(target), []).append(calls[0] if calls else node.value)
    return bound


def region(nodes: list, starts: list, end) -> tuple:
    """(the reading at the start, what lies between, whether round a loop, the start being read again after the end)."""
    later = [s for s in starts if place(s) >= place(end) or s is end]
    loops = [n for n in nodes if isinstance(n, (ast.For, ast.While)) and place(n) <= place(end) <= end_of(n)]
    around = [n for n in loops for s in later if place(s) <= end_of(n)]
    if around:
        loop = around[0]
        return later[-1], [n for n in nodes if place(loop) <= place(n) <= end_of(loop)], True
    before = [s for s in starts if place(s) < place(end)] or starts
    start = before[-1]
    return start, [n for n in nodes if end_of(start) <= place(n) < place(end)], False


def names_in(nodes: list) -> set[str]:
    return {last_name(n) for n in nodes if isinstance(n, (ast.Attribute, ast.Name))}


def waits_in(nodes: list, source: Source) -> bool:
    """Whether any of this waits for the GPU, functions of the file that it calls looked into once."""
    if names_in(nodes) & source.waits:
        return True
    results = [n for n in nodes if isinstance(n, ast.Assign) and any(isinstance(c, ast.Call) for c in ast.walk(n.value))]
    results = [n for n in results if not any(is_clock(c, source) for c in ast.walk(n.value))]
    made = {t.id for n in results for target in n.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        shown = {n.id for a in node.args for n in ast.walk(a) if isinstance(n, ast.Name)}
        if name == "print" and shown & made or name in ("float", "bool") and shown:
            return True
        if any(names_in(list(ast.walk(f))) & source.waits for f in source.functions.get(name, ())):
            return True
    return False


def with_waits(name: str, source: Source) -> bool:
    """For a timer by this name: whether every body that it is put around, in this file, waits."""
    around = [(n.body, i.context_expr) for n in ast.walk(source.tree) if isinstance(n, ast.With) for i in n.items]
    bodies = [body for body, call in around if isinstance(call, ast.Call) and last_name(call.func) == name.split(".")[-1]]
    return bool(bodies) and all(waits_in([n for s in body for n in ast.walk(s)], source) for body in bodies)


def works(node: ast.AST, source: Source, scope: ast.AST, deep: int = 2) -> bool:
    """Whether this may be the GPU's work: a model, a backward, an op of torch's, a function handed in, or a timer's body."""
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    if not isinstance(node, ast.Call) or is_clock(node, source):
        return False
    name, root = last_name(node.func), ast.unparse(node.func).split(".")[0]
    if name in source.functions and deep:
        return any(works(n, source, f, deep - 1) for f in source.functions[name] for n in own(f))
    if name in NOT_WORK:
        return False
    if isinstance(node.func, ast.Name) and name in parameters(scope):
        return True
    return root in ("torch", "F") or bool(WORKS.search(name))


def parameters(scope: ast.AST) -> set[str]:
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return set()
    return {a.arg for a in (*scope.args.args, *scope.args.kwonlyargs, *scope.args.posonlyargs)}
