"""The doctor's commands: doctor, profile, exercise."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from whet import exercise
from whet.diagnose import decode as decoding
from whet.diagnose import doctor as clinic
from whet.diagnose import tell, whatif
from whet.diagnose.checks import peak_memory
from whet.diagnose.run import Run
from whet.diagnose.script import silenced
from whet.diagnose.target import MEANS, CannotRun, Target, raised
from whet.report import findings, record
from whet.report.exercises import exercises_table
from whet.terminal import Json, Records, console, emit, progress_bar

Where = Annotated[str, typer.Argument(metavar="TARGET", help=f"{MEANS[0].upper()}{MEANS[1:]}.")]
Train = Annotated[bool, typer.Option("--train", help="Look at a training step (default where the model returns a loss).")]
Decode = Annotated[bool, typer.Option("--decode", help="Look at the step that makes one token, at batch 1 (default off).")]
Seconds = Annotated[float, typer.Option(min=0.0, help="Measuring time for the step, seconds.")]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write one self-contained page (default: none).")]
Args = Annotated[str, typer.Option("--args", help="Arguments for a script, in one string (default: none).")]


def kind_of(train: bool, decode: bool) -> str | None:
    if train and decode:
        raise CannotRun("--train and --decode exclude each other")
    return "train" if train else "decode" if decode else None


@contextlib.contextmanager
def could_run() -> Iterator[None]:
    """What cannot be run is one line and exit code 2, as findings are 1 and a clean bill is 0."""
    try:
        yield
    except (CannotRun, ValueError) as e:
        typer.echo(f"whet: {e}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("whet: stopped; nothing is kept", err=True)
        raise typer.Exit(130) from None


def quiet_profiler():
    """torch's profiler writes its starts and stops to stderr, past Python: what it says there is dropped."""
    return silenced(sys.stderr, 2)


def doctor(
    target: Where,
    train: Train = False,
    decode: Decode = False,
    html: Html = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply mechanical fixes, then look again (default off).")] = False,
    args: Args = "",
    seconds: Seconds = 1.0,
    records: Records = "records",
    as_json: Json = False,
):
    """What is slow, what is wrong, what it costs and what fixes it. Exit code 0: clean; 1: findings; 2: could not run.

    Example: whet doctor tiny-llama:tiny
    """
    with could_run():
        with progress_bar(not as_json) as progress, quiet_profiler():
            opened = clinic.open_target(target, kind_of(train, decode), shlex.split(args))
            found = clinic.diagnose(opened, progress, seconds)
            result = found.as_dict() | details(found.run)
            if apply:
                result["applied"] = applied(found, progress, seconds)
        flags = [*(["--train"] if train else []), *(["--decode"] if decode else []), *(["--apply"] if apply else [])]
        made = record.make(" ".join(["whet doctor", target, *flags, *([f"--args {args!r}"] if args else [])]), result)
        if html:
            write_page(html, made)
        kind = [found.target.kind] if decode or train else []
        emit(made, as_json, records, " ".join(["doctor", Path(target).name, *kind]), lambda: findings.show(console, result))
        if html and not as_json:
            console.print(f"page: {html}")
    raise typer.Exit(1 if result["findings"] else 2 if found.blind else 0)


def details(run: Run) -> dict:
    """What the page and the record tell beside the findings; what cannot be had is left out."""
    found: dict = {}
    with contextlib.suppress(Exception):
        chains = whatif.what_if(run)
        whatif.realise(run, chains)
        found["whatif"] = [c.as_dict(run.step_ms) for c in chains[:12]]
    with contextlib.suppress(Exception):
        found["memory"] = peak_memory.owners(run)
    if run.target.kind == "decode":
        found["layers"], found["tokens_per_s"] = tell.per_layer(run), 1e3 / run.step_ms
    return found


def applied(found: clinic.Diagnosis, progress, seconds: float) -> dict:
    """Every mechanical fix done, and the step before and after."""
    before, done = found.run.step_ms, clinic.apply(found)
    if not done:
        return {"fixes": [], "before_ms": before, "after_ms": before}
    again = clinic.diagnose(found.target, progress, seconds)
    left = [f.cause for f in again.findings]
    return {"fixes": [f.fix for f in done], "before_ms": before, "after_ms": again.run.step_ms, "left": left}


def write_page(path: str, made: dict) -> None:
    from whet.report import page  # and with it jinja2, which no other command waits for

    try:
        Path(path).write_text(page.page(made), encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--html: {path} cannot be written ({e.strerror})") from None


def write_trace(path: str, run: Run) -> None:
    try:
        Path(path).touch()  # the profiler says nothing of a file that it cannot write
    except OSError as e:
        raise ValueError(f"--trace: {path} cannot be written ({e.strerror})") from None
    run.profile.trace.export_chrome_trace(path)  # type: ignore[attr-defined]


def profile(
    target: Where,
    train: Train = False,
    decode: Decode = False,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Also write a trace for Perfetto (default: none).")] = None,
    args: Args = "",
    seconds: Seconds = 1.0,
    records: Records = "records",
    as_json: Json = False,
):
    """Where a step's time goes: each module forward and backward, kernels, idle time, roofline, what fusing would give.

    Example: whet profile tiny-llama:tiny
    """
    with could_run():
        with progress_bar(not as_json) as progress, quiet_profiler():
            opened = clinic.open_target(target, kind_of(train, decode), shlex.split(args))
            run = seen(opened, seconds, progress)
            told = {"target": opened.name, "kind": opened.kind, "notes": opened.notes, "sentence": tell.slowest_part(run)}
            result = told | tell.overview(run) | details(run)
            if isinstance(opened, decoding.Decoder):
                progress("the same by the decode ops", 1, 2)
                result["after"] = decoding.after(opened, seconds)
            if trace:
                write_trace(trace, run)
        flags = [*(["--train"] if train else []), *(["--decode"] if decode else [])]
        made = record.make(" ".join(["whet profile", target, *flags]), result)
        kind = [opened.kind] if decode or train else []
        name = " ".join(["profile", Path(target).name, *kind])
        emit(made, as_json, records, name, lambda: findings.show_profile(console, result))
        if trace and not as_json:
            console.print(f"trace: {trace} (open it in Perfetto)")


def seen(target: Target, seconds: float, progress) -> Run:
    """Every observation made; the first that cannot be ends the command."""
    run = Run(target, seconds)
    for i, (text, observe) in enumerate(clinic.observations(run)):
        progress(text, i, 2)
        try:
            observe()
        except CannotRun:
            raise
        except (Exception, SystemExit) as e:
            raise CannotRun(f"{target.name}: {text}: {raised(e)}") from e
    return run


def exercise_command(
    stage: Annotated[str, typer.Argument(metavar="1..5|all", help="Which stage, or all of them with a summary.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    num_steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 20,
    hidden_dim: Annotated[int, typer.Option(min=8, help="Width.")] = 512,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 8,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    records: Records = "records",
    as_json: Json = False,
):
    """Five stages of debugging a slow, wrong tiny Llama; `all` prints the summary with this machine's figures.

    Example: whet exercise 5 --batch-size 2 --seq-len 32 --num-steps 2 --hidden-dim 64 --num-layers 2 --num-heads 4
    """
    with could_run():
        with progress_bar(not as_json) as progress:
            sizes = dict(
                batch_size=batch_size, seq_len=seq_len, num_steps=num_steps, hidden_dim=hidden_dim, num_layers=num_layers,
                num_heads=num_heads,
            )
            rows = exercise.run(stage, **sizes, progress=progress)
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes.items())
        made = record.make(f"whet exercise {stage} {flags}", {"rows": rows})
        emit(made, as_json, records, f"exercise {stage}", lambda: console.print(exercises_table(rows)))


COMMANDS: dict[str, Callable] = {"doctor": doctor, "profile": profile, "exercise": exercise_command}

