"""Compile Triton kernels for GPUs that are not here, and read their registers, spills and shared memory.

The launches come from the launchers themselves, run on meta tensors with Triton's launch replaced by a recorder, and are
specialised by Triton's own binder: what is compiled here is what a GPU would compile. `python -m whet.aot [OP...]`
prints the table; TRITON_INTERPRET must be off, since interpreted kernels cannot be compiled.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from whet import machine
from whet.child import run_to_end
from whet.op import DTYPES, Op, as_tuple, discover
from whet.ops._pdl import pdl

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32), "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}
CAPABILITY = {"sm_90": (9, 0), "sm_80": (8, 0), "sm_100": (10, 0), "gfx942": None}
PTXAS_LIMIT_S = 600.0
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes one program may take


@dataclass(frozen=True)
class Launch:
    """One kernel launch as a launcher made it."""

    op: str
    impl: str
    case: str
    dtype: str
    fn: JITFunction
    args: tuple
    options: dict

    @property
    def kernel(self) -> str:
        return self.fn.__name__

    @property
    def config(self) -> str:
        """Constexprs and launch options, in the launcher's words."""
        return " ".join(f"{k}={v}" for k, v in self.options.items())


@dataclass(frozen=True)
class Compiled:
    registers: int
    spills: int  # bytes a thread
    shared: int  # bytes a program


@dataclass(frozen=True)
class CompiledKernel:
    """One line of the table: a kernel in one configuration on one target."""

    op: str
    impl: str
    kernel: str
    case: str
    dtype: str
    config: str
    target: str
    registers: int
    spills: int
    shared: int
    problem: str  # empty: fit to ship


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple]]:
    """Within the block kernels are not launched: (function, arguments, options) of each launch is kept."""
    seen: list[tuple] = []

    def keep(self, *args, grid, warmup, **options):
        seen.append((self, args, options))

    def never(device_type=None):  # PyTorch's own raises for the meta device
        return False

    with mock.patch.object(JITFunction, "run", keep), mock.patch.object(torch, "is_autocast_enabled", never):
        yield seen


def launches(op: Op, impl: str, case: dict, dtype: str, target: str = "sm_90") -> list[Launch]:
    """Every launch of a case's forward and backward, with all its outputs used and with each alone. Nothing is computed.

    An op for inference is launched with PDL, as a decoder runs it; without, a kernel is the same, less two waits.
    """
    args = op.inputs(dtype=DTYPES[dtype], device="meta", **case)
    leaves = [args[k].requires_grad_() for k in op.grads if args[k] is not None]
    with recorded() as seen, pretended(target):
        candidate = op.candidate(impl)
        if candidate.refuses(**args):
            return []
        if op.grads:
            outs = [o for o in as_tuple(candidate.run(**args)) if o.requires_grad]
            for used in [outs, *([o] for o in outs)] if len(outs) > 1 else [outs]:
                torch.autograd.grad(used, leaves, [torch.empty_like(o) for o in used], allow_unused=True, retain_graph=True)
        with torch.no_grad(), contextlib.nullcontext() if op.grads else pdl():
            candidate.run(**args)
    name = " ".join(f"{k}={v}" for k, v in case.items())
    return [Launch(op.name, impl, name, dtype, fn, a, options) for fn, a, options in seen]


@contextlib.contextmanager
def pretended(target: str, sms: int = machine.DEFAULT_SMS) -> Iterator[None]:
    """Within the block this machine has the target's compute capability, by which launchers choose among kernels, and sms."""
    there = replace(machine.this_machine(), capability=CAPABILITY[target])
    with mock.patch.object(machine, "this_machine", lambda: there), mock.patch.object(machine, "sm_count", lambda: sms):
        yield


def specialise(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict]:
    """The source and options the JIT would compile for this launch: dtypes, ones, multiples of 16, constexprs."""
    fn, backend = launch.fn, make_backend(target)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, options = bind(*launch.args, **launch.options)
    parsed, signature, constexprs, attrs = fn._pack_args(backend, launch.options, bound, specialization, options)
    source = GluonASTSource if fn.is_gluon() else ASTSource
    return source(fn, signature, constexprs, attrs), parsed.__dict__


def identity(launch: Launch, target: str = "sm_90") -> str:
    """What makes two launches the same kernel on a target: the source with all it calls, its arguments' types, the options."""
    source, options = specialise(launch, TARGETS[target])
    said = sorted((k, str(v)) for k, v in options.items() if k != "extern_libs")  # paths, which differ where Triton lies
    return f"{launch.kernel} {source.hash()} {said}"


class Known:
    """What kernels take as compiled before, by a hash of their identity and of Triton's version: no need to compile them again.

    Whatever is edited has another hash, and is compiled. `used` is what this run met, known or not.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.kernels: dict[str, list[int]] = json.loads(path.read_text()) if path and path.exists() else {}
        self.used: dict[str, list[int]] = {}

    def compiled(self, launch: Launch, target: str) -> Compiled:
        key = hashlib.sha256(f"{triton.__version__} {target} {identity(launch, target)}".encode()).hexdigest()[:20]
        if key not in self.kernels:
            self.kernels[key] = list(astuple(compile_for(launch, target)))
        self.used[key] = self.kernels[key]
        return Compiled(*self.used[key])

    def save(self) -> None:
        assert self.path
        self.path.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in sorted(self.used.items())) + "\n}\n")


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile one launch for a target of TARGETS and read what it takes."""
    gpu = TARGETS[target]
    source, options = specialise(launch, gpu)
    kernel = triton.compile(source, target=gpu, options=options)
    if gpu.backend == "cuda":
        read = _read_ptxas(kernel.asm["ptx"], gpu.arch, launch.fn.is_gluon())
    else:
        read = _read_amdgcn(kernel.asm["amdgcn"])
    return Compiled(*read, shared=kernel.metadata.shared)


def _read_ptxas(ptx: str, arch: int, asynchronous: bool) -> tuple[int, int]:
    """asynchronous: the kernel's products are meant to run beside what follows them; ptxas tells where it made them wait."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        name = sm_arch_from_capability(arch)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", "kernel.ptx", "-o", "kernel.cubin"]
        done = run_to_end(command, PTXAS_LIMIT_S, cwd=folder)
        if done.fault:
            raise RuntimeError(f"ptxas for {name}: {done.fault}")
        log = done.stderr
    if asynchronous and (found := re.search(r"instructions are (serialized due to .*?) in the function", log)):
        raise RuntimeError(f"its asynchronous products are {found[1]}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    return max(int(n) for n in re.findall(r"Used (\d+) registers", log)), spills


def _read_amdgcn(text: str) -> tuple[int, int]:
    count = {k: int(v) for k, v in re.findall(r"^\s*\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text, re.M)}
    return count["vgpr_count"], 4 * count["vgpr_spill_count"]


def wanted(op: Op, impl: str, seen: set[str]) -> Iterator[tuple[Launch, str]]:
    """The launches of an impl not yet seen, each with its target.

    sm_90 gets every case, and at the bench shapes every tile that tuning tries; the others the bench shapes in bf16, or in
    fp32 where the impl takes that alone.
    Of an op for inference see `decoding`.
    """
    if not op.grads:
        yield from decoding(op, impl, seen)
        return
    usual = "bfloat16" if any(launches(op, impl, case, "bfloat16") for case in op.shapes.values()) else "float32"
    plans = [(case, dtype, "sm_90") for dtype in ("bfloat16", "float32") for case in op.shapes.values()]
    plans += [(case, usual, "sm_90") for case in op.cases]
    plans += [(case, usual, target) for target in TARGETS if target != "sm_90" for case in op.shapes.values()]
    for i, (case, dtype, target) in enumerate(plans):
        lowest = op.impls[impl].capability
        if lowest and (CAPABILITY[target] or (0, 0)) < lowest:
            continue
        for name in [impl, *tiles(op, impl, case, target)] if i < len(op.shapes) else [impl]:
            for launch in launches(op, name, case, dtype, target):
                key = f"{target} {identity(launch)}"
                if key not in seen:
                    seen.add(key)
                    yield launch, target


def decoding(op: Op, impl: str, seen: set[str]) -> Iterator[tuple[Launch, str]]:
    """What is compiled of an op for inference: all that a decoder launches, and each kernel once in what it might meet.

    sm_90 gets the bench shapes in bf16, where registers run out if they do; of the cases, whose rows are short, those with
    words (how weights are stored) that the kernel has not met; and each kernel once in fp32. The ops share kernels: on the
    other targets each op gets its first launch, and each kernel one.
    """
    shapes = list(op.shapes.values())
    plans = [(case, "bfloat16", "sm_90") for case in (*shapes, *op.cases)] + [(case, "float32", "sm_90") for case in shapes]
    plans += [(case, "bfloat16", target) for target in TARGETS if target != "sm_90" for case in shapes]
    for i, (case, dtype, target) in enumerate(plans):
        for launch in launches(op, impl, case, dtype, target):
            met = {f"{target} {dtype} {launch.kernel}", f"{target} {op.name}"}
            if (dtype, target) == ("bfloat16", "sm_90"):
                met |= {f"{launch.kernel} {v}" for v in launch.options.values() if isinstance(v, str)}
            if i < len(shapes):
                met.add(identity(launch))
            if not met <= seen:
                seen |= met
                yield launch, target


def tiles(op: Op, impl: str, case: dict, target: str) -> list[str]:
    args = op.inputs(dtype=DTYPES["bfloat16"], device="meta", **case)
    with pretended(target):
        return [f"{impl}@{tile}" for tile in op.impls[impl].tiles(**args)]


def row(launch: Launch, target: str, allowed: str, known: Known | None = None) -> CompiledKernel:
    """Compile and judge: a failure, spills on sm_90 without a stated reason, or too much shared memory is a problem."""
    head = (launch.op, launch.impl, launch.kernel, launch.case, launch.dtype, launch.config, target)
    try:
        c = (known or Known(None)).compiled(launch, target)
    except Exception as e:  # whatever a compiler throws is this row's problem, not the table's
        return CompiledKernel(*head, 0, 0, 0, f"does not compile: {(str(e).strip() or type(e).__name__).splitlines()[-1]}")
    problem = ""
    if c.shared > SHARED_LIMIT[target]:
        problem = f"takes {c.shared} bytes of shared memory, {target} has {SHARED_LIMIT[target]}"
    elif c.spills and target == "sm_90" and not allowed:
        problem = f"spills {c.spills} bytes a thread, and the impl gives no reason"
    return CompiledKernel(*head, c.registers, c.spills, c.shared, problem)


def check(names: list[str], progress, known: Known | None = None) -> list[CompiledKernel]:
    """The rows of the named ops (all when none is named), `progress(done, total, text)` after each compile."""
    ops = discover()
    if unknown := set(names) - set(ops):
        raise ValueError(f"op must be among {list(ops)}, got {sorted(unknown)}")
    work, seen = [], set()  # type: ignore[var-annotated]
    for op in (ops[n] for n in names or ops):
        for name, impl in op.impls.items():
            if impl.needs == "triton":
                work += [(launch, target, impl.spills) for launch, target in wanted(op, name, seen)]
    rows = []
    for i, (launch, target, allowed) in enumerate(work, 1):
        rows.append(row(launch, target, allowed, known))
        progress(i, len(work), f"{launch.op} {launch.kernel} {target}")
    return rows


def table(rows: list[CompiledKernel]) -> str:
    head = ("op", "kernel", "case", "dtype", "config", "target", "regs", "spills", "shared", "problem")
    numbers = [[str(n) for n in (r.registers, r.spills, r.shared)] for r in rows]
    body = [(r.op, r.kernel, r.case, r.dtype, r.config, r.target, *n, r.problem) for r, n in zip(rows, numbers)]
    widths = [max(map(len, column)) for column in zip(head, *body)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in (head, *body))


def show(done: int, total: int, text: str) -> None:
    """Progress on stderr: one line rewritten on a terminal, every 25th elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K[{done}/{total}] {text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % 25 == 0 or done == total:
        print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m whet.aot", description=(__doc__ or "").splitlines()[0],
        epilog="Example: python -m whet.aot rms_norm. The exit code is 1 where a row has a problem.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops to compile (default: all)")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file (default: print it)")
    parser.add_argument("--known", type=Path, metavar="FILE", help="kernels compiled before, which are not compiled again")
    parser.add_argument("--update", action="store_true", help="write the kernels of this run to the --known file")
    options = parser.parse_args(argv)
    if options.update and (not options.known or options.ops):
        parser.error("--update needs --known FILE, and all ops")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET must be off: interpreted kernels cannot be compiled")
    try:
        known = Known(options.known)
        rows = check(options.ops, show, known)
    except ValueError as e:
        parser.error(str(e))
    text = json.dumps([asdict(r) for r in rows]) if options.json else table(rows)
    if options.update:
        known.save()
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)
    return int(any(r.problem for r in rows))


if __name__ == "__main__":
    sys.exit(main())
