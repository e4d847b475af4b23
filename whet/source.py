"""Which source a candidate was proved from: an edited kernel is proved again, an unedited one is not.

A fingerprint covers the file that defines an impl, the files of its package and of whet.ops that it uses, how kernels are
launched, the version of another package that it calls, and the verifier itself: what an older verifier let through has not
passed this one.
"""

import functools
import hashlib
import sys
from pathlib import Path
from types import ModuleType

from whet import machine
from whet.op import Op

VERIFIER = ("judge", "verify", "values", "parts", "whole", "prove")
LAUNCHERS = ("launch", "torch_ops")


def fingerprint(op: Op, name: str) -> str:
    """A short hash of everything that a proof of this candidate rests on, versions of torch and triton apart."""
    impl = op.impl(name)
    foreign = impl.needs not in ("torch", "triton", "cudnn")
    package = f"{impl.needs} {machine.version(impl.needs.replace('_', '-'))}" if foreign else ""
    return _fingerprint(tuple(sorted({module_of(impl.run), module_of(op.reference), module_of(op.inputs)})), package)


@functools.cache
def _fingerprint(modules: tuple[str, ...], package: str) -> str:
    here = Path(__file__).parent
    files = {path for name in modules for path in files_of(name)} | {here / f"{name}.py" for name in VERIFIER + LAUNCHERS}
    digest = hashlib.sha256(package.encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def module_of(function) -> str:
    """The module in which a function, a partial, a wrapped or a jitted function was written."""
    while inner := getattr(function, "func", None) or getattr(function, "__wrapped__", None) or getattr(function, "fn", None):
        function = inner
    return getattr(function, "__module__", "") or ""


def files_of(name: str) -> set[Path]:
    """The source files of a module and of the modules of its package, or of whet.ops, that it refers to."""
    found: set[Path] = set()
    todo, seen = [name], set()
    while todo:
        module = sys.modules.get(current := todo.pop())
        if current in seen or module is None:
            continue
        seen.add(current)
        if file := getattr(module, "__file__", None):
            found.add(Path(file))
        roots = {"whet.ops", name.rpartition(".")[0] or name}
        for value in list(vars(module).values()):
            other = value.__name__ if isinstance(value, ModuleType) else module_of(value)
            if any(other == root or str(other).startswith(f"{root}.") for root in roots) and other != "whet.ops":
                todo.append(other)
    return {path for path in found if path.is_file()}
