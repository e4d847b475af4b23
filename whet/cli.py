"""The command line: one function per command."""

import ast
import contextlib
import inspect
import json
import shlex
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from typer.core import TyperGroup

import whet.ops  # noqa: F401  (fills the registry)
from whet import clinic, machine, measure, models, ncu, proofs, talk
from whet.lock import Lock, lock_path
from whet.op import DTYPES, Call, Op, discover
from whet.plans import PRECISIONS, best_plan
from whet.report import record, tables
from whet.terminal import Json, Records, Shapes, console, emit, plain_errors, progress_bar
from whet.tune import modes_here, reduced_note, tune

MEANING = "Sharpens PyTorch transformers: kernels proven right, measured faster, with the proof shown."


class TwoWords(TyperGroup):
    """A command's name may have two words, `bench decode`: it has options and help of its own."""

    def resolve_command(self, ctx, args):
        name = " ".join(args[:2])
        return super().resolve_command(ctx, [name, *args[2:]] if name in self.commands else args)


app = typer.Typer(cls=TwoWords, no_args_is_help=True, add_completion=False, help=MEANING)
for name, command in (clinic.COMMANDS | talk.COMMANDS).items():
    app.command(name)(command)

TARGETS = [f"{m.name}:{size}" for m in models.discover().values() for size in m.sizes]

Again = Annotated[bool, typer.Option(help="Measure the ceilings anew (default: from the cache).")]
Mode = Annotated[str, typer.Option(help="eager (host overhead included), graph (GPU work alone) or both; a CPU: eager only.")]


def show_calls(entries: list[dict]) -> None:
    console.print(tables.calls_table(entries))
    for line in (*(f"* {line}" for line in tables.proved(entries)), *tables.left_out(entries), *tables.stale(entries)):
        console.print(line)


@app.command("machine")
def machine_command(as_json: Json = False, again: Again = False):
    """GPU, compute capability, versions, measured ceilings (GB/s, TFLOP/s), and what Triton can do here.

    Example: whet machine
    """
    with console.status("measuring ceilings") if console.is_terminal and not as_json else contextlib.nullcontext():
        roof = asdict(measure.ceilings(again))
    m = machine.this_machine().as_dict()
    if as_json:
        typer.echo(json.dumps({"machine": m, "ceilings": roof}, indent=1))
    else:
        console.print(tables.machine_table(m, roof))


@app.command("ops")
def ops_command(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to show, with their whole meaning (default: all).")] = None,
    as_json: Json = False,
):
    """Each op: its arguments, meaning, impls, and what each impl refuses.

    Example: whet ops attention
    """
    found = {name: op for name, op in discover().items() if not ops or name in ops}
    with plain_errors("nothing was started"):
        if unknown := [name for name in ops or () if name not in found]:
            raise ValueError(f"ops: there is no {unknown[0]}; there are {', '.join(discover())}")
    if not as_json:
        console.print(tables.ops_table(found, whole=bool(ops)))
        return
    listed = {
        op.name: {
            "signature": str(op.signature), "doc": op.reference.__doc__, "shapes": op.shapes,
            "impls": {n: {"needs": i.needs, "refuses": list(i.limits)} for n, i in op.impls.items()},
        }
        for op in found.values()
    }
    typer.echo(json.dumps(listed, indent=1))


def sizes_of(op: Op) -> str:
    """'M=...,N=...': the sizes that a shape of this op must have."""
    given = inspect.signature(op.inputs).parameters.items()
    needed = [k for k, p in given if p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    return ",".join(f"{k}=..." for k in needed if k not in ("dtype", "device"))


def parse_value(text: str) -> int | float | bool | str | None:
    """4096, 0.5, True, None, or the word itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_shapes(op: Op, text: str) -> list[dict]:
    """'M=4096,N=384', or the name of one of the op's shapes, or what several of their names have in common."""
    if text in op.shapes:
        return [op.shapes[text]]
    pairs = [part.partition("=") for part in text.split(",")]
    if all(sign for _, sign, _ in pairs):
        return [{k.strip(): parse_value(v.strip()) for k, _, v in pairs}]
    found = [case for name, case in op.shapes.items() if text and text in name]
    if not found:
        raise ValueError(f"bench: a shape of {op.name} is {sizes_of(op)} or one of {list(op.shapes)}, got {text}")
    return found


def check_case(op: Op, case: dict, dtype: str) -> None:
    """Raises, before anything is started, for sizes that the op does not have or that do not go together."""
    given = ",".join(f"{k}={v}" for k, v in case.items())
    try:
        reason = op.check(**op.inputs(dtype=DTYPES[dtype], device="meta", **case))
    except (TypeError, RuntimeError):
        raise ValueError(f"bench: a shape of {op.name} is {sizes_of(op)} or one of {list(op.shapes)}, got {given}") from None
    if reason:
        raise ValueError(f"bench: {op.name} cannot run {given}: {reason}")


def bench_calls(names: list[str], shapes: list[str], dtype: str, grad: bool) -> list[tuple[Call, int]]:
    ops = discover()
    if unknown := [n for n in names if n not in ops]:
        raise ValueError(f"bench: unknown op {unknown[0]!r}; there are {', '.join(ops)}")
    if dtype not in DTYPES:
        raise ValueError(f"bench: dtype must be one of {list(DTYPES)}, got {dtype!r}")
    calls = {}
    for op in (ops[n] for n in names or ops):
        cases = [case for s in shapes for case in parse_shapes(op, s)] or list(op.shapes.values())
        for case in cases:
            check_case(op, case, dtype)
            call = Call(op.name, case, dtype, grad and bool(op.grads))
            calls[call.key] = (call, 1)
    return list(calls.values())


def stopped_early(work: Callable[[], object], lock: Lock) -> bool:
    """Do the work; True if it was stopped with something already timed, which is then kept."""
    try:
        work()
    except KeyboardInterrupt:
        if not any(e.get("chosen") for e in lock.calls.values()):
            raise
        return True
    return False


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP...]", help="Ops to time (default all).")] = None,
    shapes: Shapes = None,
    mode: Mode = "both",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "bfloat16",
    forward_only: Annotated[bool, typer.Option(help="Leave the backward out (default: forward + backward).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per candidate, seconds.")] = 0.25,
    records: Records = "records",
    name: Annotated[str, typer.Option(help="Name of the record (default: bench and the ops).")] = "",
    as_json: Json = False,
):
    """Verify every impl of each op, then time the survivors in turns. `whet bench decode` times the decoder instead.

    Example: whet bench rms_norm --shapes M=64,N=128
    """
    with plain_errors("nothing was timed yet, so there is nothing to keep"):
        if mode not in (*measure.MODES, "both"):
            raise ValueError(f"bench: mode must be eager, graph or both, got {mode!r}")
        if mode == "graph" and "graph" not in modes_here():
            raise ValueError("bench: mode graph needs a GPU")
        modes = modes_here() if mode == "both" else (mode,)
        lock, calls = Lock(), bench_calls(ops or [], shapes or [], dtype, not forward_only)
        with progress_bar(not as_json) as progress:
            stopped = stopped_early(lambda: tune(calls, lock, modes, progress, seconds, bucket=False), lock)
        entries = [e for e in lock.calls.values() if e.get("chosen")]
        asked = [*(ops or []), *(f"--shapes {shlex.quote(s)}" for s in shapes or []), f"--mode {mode} --dtype {dtype}"]
        command = " ".join(["whet bench", *asked, f"--seconds {seconds:g}", *(["--forward-only"] if forward_only else [])])
        also = {"ceilings": asdict(measure.ceilings()), "dispatch_us": measure.dispatch_us(), "note": reduced_note()}
        made = record.make(command, {"entries": entries} | also | ({"stopped": True} if stopped else {}))

        def show():
            show_calls(entries)
            for line in tables.busy(entries):
                console.print(line)
            console.print(f"dispatch through choices adds {also['dispatch_us']} us a call. {reduced_note()}")

        other = [*([] if dtype == "bfloat16" else [dtype]), *(["forward"] if forward_only else [])]
        default = ["bench", *(ops or ["all"]), *(shapes or []), *other]
        emit(made, as_json, records, name or " ".join(default), show)
        if stopped:
            typer.echo(f"whet: stopped; {len(entries)} of {len(lock.calls)} were timed and are in the record", err=True)
            raise typer.Exit(130)


@app.command("prove")
def prove_command(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to prove (default: all).")] = None,
    dtype: Annotated[str, typer.Option(help="Of " + ", ".join(DTYPES) + ", several with commas.")] = "bfloat16",
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Only this impl; repeatable (default: all).")] = None,
    without: Annotated[list[str] | None, typer.Option("--without", help="All but this; repeatable (default: none).")] = None,
    cases: Annotated[bool, typer.Option("--cases", help="The tests' small cases, not bench's shapes (default off).")] = False,
    both: Annotated[bool, typer.Option("--all", help="Bench's shapes and the tests' cases (default off).")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes at once (default: half the cores, at most 8).", min=1)] = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Try every impl of each op as tuning does before it times one, and say which trial stops which. Exit code 1 if any is.

    Example: whet prove rms_norm --cases --impl torch
    """
    with plain_errors("nothing is kept"), progress_bar(not as_json) as progress:
        dtypes = dtype.split(",")
        if unknown := [d for d in dtypes if d not in DTYPES]:
            raise ValueError(f"prove: dtype must be among {list(DTYPES)}, got {unknown[0]!r}")
        calls = proofs.calls_of(ops or [], dtypes, both or not cases, both or cases)
        stopped = False
        try:
            rows = proofs.prove_all(calls, impls or [], without or [], progress, jobs=jobs)
        except proofs.Stopped as e:
            rows, stopped = e.rows, True
        some = [*(f"--impl {i}" for i in impls or []), *(f"--without {i}" for i in without or [])]
        asked = [*(ops or []), f"--dtype {dtype}", *some]
        which = ["all"] if both else ["cases"] if cases else []
        made = record.make(" ".join(["whet prove", *asked, *(f"--{w}" for w in which)]), {"rows": rows, "stopped": stopped})
        chosen = [*(impls or []), *(f"without {name}" for name in without or [])]
        those = [*(["shapes", "cases"] if both else which), *dtypes, *chosen]
        name = " ".join(["prove", *(ops or ["all"]), *those])
        emit(made, as_json, records, name, lambda: console.print(tables.proofs_table(rows)))
    if stopped:
        typer.echo(f"whet: stopped; {len(rows)} candidates were proved and are in the record", err=True)
        raise typer.Exit(130)
    if any(row["outcome"] in ("rejected", "failed") for row in rows):
        raise typer.Exit(1)


def takes(call: Call, impl: str) -> bool:
    """Whether an impl takes a shape; raises for a name that is none."""
    op = discover()[call.op]
    device = "cuda" if torch.cuda.is_available() else "meta"
    return op.impl(impl).refuses(**op.inputs(dtype=DTYPES[call.dtype], device=device, **call.case)) is None


@app.command("counters")
def counters_command(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op.")],
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Impl or impl@tile; repeatable (default: triton).")] = None,
    shapes: Shapes = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "bfloat16",
    forward_only: Annotated[bool, typer.Option(help="Leave the backward out (default: forward + backward).")] = False,
    records: Records = "records",
    as_json: Json = False,
):
    """What bounds each kernel of an impl, from the GPU's own counters: how busy each unit is, and what warps wait for.

    Example: whet counters attention --impl triton --impl sdpa_cudnn --shapes mid
    """
    with plain_errors("nothing is kept"), progress_bar(not as_json) as progress:
        calls, rows = bench_calls([op], shapes or [], dtype, not forward_only), []
        work = [(call, impl) for call, _ in calls for impl in impls or ["triton"] if takes(call, impl)]
        if not work:
            raise ValueError(f"counters: {', '.join(impls or ['triton'])} of {op} takes none of these shapes")
        for i, (call, impl) in enumerate(work):
            progress(f"{call.op} {impl}", i, len(work))
            rows += [{"call": call.key, "impl": impl, **row} for row in ncu.read(call, impl)]
        asked = [*(f"--impl {i}" for i in impls or []), *(f"--shapes {shlex.quote(s)}" for s in shapes or [])]
        command = " ".join(["whet counters", op, *asked, f"--dtype {dtype}", *(["--forward-only"] if forward_only else [])])
        made = record.make(command, {"kernels": rows})
        other = [*([] if dtype == "bfloat16" else [dtype]), *(["forward"] if forward_only else [])]
        name = " ".join(["counters", op, *(impls or []), *(shapes or []), *other])
        emit(made, as_json, records, name, lambda: console.print(tables.counters_table(rows)))


@app.command("optimize")
def optimize_command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A built-in model and size: " + ", ".join(TARGETS) + ".")],
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}; only ever what is asked for.")] = "float32",
    again: Annotated[bool, typer.Option(help="Measure the plans anew even if the lock has them (default off).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per plan, seconds.")] = 0.5,
    lock: Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")] = None,
    html: clinic.Html = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Record the model's calls, verify and time every candidate, choose, and time the whole model before and after.

    Example: whet optimize tiny-llama:tiny
    """
    with plain_errors("nothing was begun yet"):
        where = lock_path(lock)
    with plain_errors(f"what was tuned so far is kept in {where}, and the next run goes on from there"):
        with progress_bar(not as_json) as progress:
            result = best_plan(target, Lock.read(where), precision, again, seconds, progress)
        made = record.make(f"whet optimize {target} --precision {precision}", result)
        if html:
            clinic.write_page(html, made)

        def show():
            show_calls(result["entries"])
            console.print(tables.plans_table(result))
            for line in tables.busy(result["entries"], result):
                console.print(line)
            speedup = f"{result['speedup']:.2f}x the plain eager model"
            console.print(f"{result['chosen']}: {speedup}, every gradient verified. {result['note']}")
            console.print(f"lock: {where}")

        emit(made, as_json, records, f"optimize {target} {precision}", show)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version (default off).")] = False):
    if show:
        typer.echo(f"whet {machine.whet_version()}")
        raise typer.Exit


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit's kill ends like Ctrl-C: what is done is kept
    app()


if __name__ == "__main__":
    main()
