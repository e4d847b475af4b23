"""Triton kernels launched at little cost to the host, and in the open where Inductor compiles.

`launcher(kernel)[grid](...)` launches what `kernel[grid](...)` would. The first launch of a key is Triton's own, with all that
it checks; later ones hand the compiled kernel's C launcher the same arguments. Triton's way binds the arguments anew, writes
its key out as text and calls empty hooks at every launch. Where a library op is traced for Inductor the launch becomes a
node of the graph, and Inductor launches the kernel itself.
"""

import contextlib
import functools
import hashlib
import inspect
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from whet import machine

LIMIT = 4096  # keys of one kernel: they hold sizes, and a size that never repeats would fill the memory
OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg")  # a Gluon kernel may have them as arguments, too


class Tracing(threading.local):
    """Whether launches of this thread are being traced."""

    on = False


TRACING = Tracing()
_prepared: dict[int, tuple[Any, Any]] = {}  # by id: a kernel's own hash is that of its source, taken under a lock


def launcher(kernel):
    """What `[grid]` and the arguments launch a kernel with: directly, as a node of a traced graph, or as Triton does."""
    if TRACING.on:
        return torch.library.wrap_triton(kernel)
    found = _prepared.get(id(kernel))
    return found[1] if found else prepare(kernel)


def prepare(kernel):
    """The launcher of a kernel: the kernel itself where Triton interprets or tunes it, or where there is no CUDA."""
    _prepared[id(kernel)] = kernel, Direct(kernel) if plain(kernel) and cuda() else interpreted(kernel)
    return _prepared[id(kernel)][1]


def interpreted(kernel):
    """Gluon's kernels by whet's own interpreter, where kernels are interpreted: Triton has none for them."""
    if machine.triton_mode() != "interpret" or not getattr(kernel, "is_gluon", bool)():
        return kernel
    from whet.interpret_gluon.language import Interpreted

    return Interpreted(kernel)


def plain(kernel) -> bool:
    """Whether it is a jitted function that launches as Triton's own do."""
    from triton.runtime.jit import JITFunction

    return isinstance(kernel, JITFunction) and type(kernel).run is JITFunction.run


def cuda() -> bool:
    return torch.version.hip is None and torch.cuda.is_available()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Within the block launches become nodes of the graph that is being traced."""
    from torch._library.triton import set_wrap_triton_enabled

    before, TRACING.on = TRACING.on, True
    try:
        with set_wrap_triton_enabled(True):
            yield
    finally:
        TRACING.on = before


class Direct:
    """A kernel with its compiled forms by key: `direct[grid](...)` launches the one that Triton would."""

    def __init__(self, kernel):
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        self.kernel, self.final = kernel, CompiledKernel
        self.names = list(kernel.signature.parameters)
        self.by_place = next((i for i, name in enumerate(self.names) if name in OPTIONS), len(self.names))
        self.compiled: dict[tuple, tuple] = {}
        scope = dict(
            _kernel=kernel, _compiled=self.compiled, _ordinary=self.ordinary, _jitted=JITFunction, _run=JITFunction.run,
            _runtime=knobs.runtime, _enter=knobs.runtime.launch_enter_hook, _leave=knobs.runtime.launch_exit_hook,
            _current_device=torch._C._cuda_getDevice, _stream=torch._C._cuda_getCurrentRawStream,
            _defaults={name: p.default for name, p in kernel.signature.parameters.items()},
        )
        exec(written_out(kernel.signature), scope)
        self.launch = scope["launch"]

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def ordinary(self, key: tuple | None, grid, args: tuple, options: dict) -> None:
        """Triton's own launch. What it compiled is kept for the key, where nothing is unusual about it.

        An argument that is an option of Triton's as well is one only where it is given by name.
        """
        named = dict(zip(self.names[self.by_place :], args[self.by_place :]))
        launched = self.kernel[grid](*args[: self.by_place], **named, **options)
        if key is not None and isinstance(launched, self.final) and self.simple(args):
            if len(self.compiled) >= LIMIT:
                self.compiled.clear()
            self.compiled[key] = launched.run, launched.function, launched.packed_metadata

    def simple(self, args: tuple) -> bool:
        """Whether the key holds all that Triton asks of these arguments: no descriptors, and no numbers but Python's."""
        for p, a in zip(self.kernel.params, args):
            if pointer(p.name):
                if a is not None and not (isinstance(a, torch.Tensor) and a.is_cuda):
                    return False
            elif not p.is_constexpr and type(a) not in (int, float, bool, types.NoneType):
                return False
        return True


def pointer(name: str) -> bool:
    """By the house's names: a tensor or None. Anything else passed there is launched as Triton does."""
    return name.endswith("_ptr")


def written_out(signature: inspect.Signature) -> str:
    """The source of a kernel's launch, for its own arguments: one key, one look-up, one call.

    Of a tensor the key holds what Triton asks of it, the dtype and how the pointer is aligned, and that it lies on a GPU. A
    number it holds itself, with its class: whether it is 1, divides by 16 or fits 32 bits follows from that.
    """
    names = list(signature.parameters)
    pointers, others = [n for n in names if pointer(n)], [n for n in names if not pointer(n)]
    given = [n if p.default is p.empty else f"{n}=_defaults[{n!r}]" for n, p in signature.parameters.items()]
    facts = [f"{n} is None or {n}.dtype, {n} is None or {n}.is_cuda, _at_{n} & 15, " for n in pointers]
    nl = "\n        "
    return f"""
def launch(_grid, {', '.join(given)}, **_options):
    try:
        {nl.join(f"_at_{n} = 0 if {n} is None else {n}.data_ptr()" for n in pointers) or "pass"}
        _others = ({''.join(f"{n}, " for n in others)})
        _device = _current_device()
        _key = (_device, _runtime.debug, {''.join(facts)}_others, *map(type, _others), *_options.items())
        _found = _compiled.get(_key)
        _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1, 1)[:3]
    except Exception:  # something else than a tensor, an argument that cannot be a key, a grid that is a function
        _key = _found = None
    if (
        _found is None or _jitted.run is not _run or _kernel.pre_run_hooks
        or _runtime.launch_enter_hook is not _enter or _enter.calls or _runtime.launch_exit_hook is not _leave or _leave.calls
    ):
        return _ordinary(_key, _grid, ({''.join(f"{n}, " for n in names)}), _options)
    _call, _function, _metadata = _found
    _call(
        _x, _y, _z, _stream(_device), _function, _metadata, None, None, None,
        {', '.join(f"_at_{n}" if pointer(n) else n for n in names)},
    )
"""


class Sources:
    """What torch.compile's cache on disk reads of an op whose launchers are traced: a hash of every op's file.

    A graph that was cached before an edit holds the kernels, tiles and grids of that time. PyTorch asks for the kernels that an
    op may launch and hashes their sources, `src` and what `fn` refers to.
    """

    __name__ = "whet_ops"

    @staticmethod
    def fn():
        return None

    @functools.cached_property
    def src(self) -> str:
        here = Path(__file__).parent
        files = sorted([*(here / "ops").rglob("*.py"), Path(__file__), here / "torch_ops.py"])
        return f"# whet {hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()}"


SOURCES = Sources()
