"""whet profile"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Json, Records, console, emit, progress_bar, refuse_directory
from whet.commands._diagnose import Args, Decode, Seconds, Train, Where, could_run, details, kind_of, quiet_profiler


def command(
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
    from whet.diagnose import decode as decoding
    from whet.diagnose import doctor as clinic
    from whet.diagnose import summary
    from whet.report import findings, record

    with could_run():
        refuse_directory("--trace", trace)
        with progress_bar(not as_json) as progress, quiet_profiler():
            opened = clinic.open_target(target, kind_of(train, decode), shlex.split(args))
            run = seen(opened, seconds, progress)
            result: dict = {"target": opened.name, "kind": opened.kind, "notes": summary.notes(run)}
            result |= {"sentence": summary.slowest_part(run)} | summary.overview(run) | details(run)
            if isinstance(opened, decoding.DecodeTarget):
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


def write_trace(path: str, run) -> None:
    try:
        Path(path).touch()  # the profiler says nothing of a file that it cannot write
    except OSError as e:
        raise ValueError(f"--trace: {path} cannot be written ({e.strerror})") from None
    run.profile.trace.export_chrome_trace(path)  # type: ignore[attr-defined]


def seen(target, seconds: float, progress):
    """Every observation made; the first that cannot be ends the command."""
    from whet.diagnose import doctor as clinic
    from whet.diagnose.run import Run
    from whet.diagnose.target import CannotRun
    from whet.figures import error_line

    run = Run(target, seconds)
    for i, (text, observe) in enumerate(clinic.observations(run)):
        progress(text, i, 2)
        try:
            observe()
        except CannotRun:
            raise
        except (Exception, SystemExit) as e:
            raise CannotRun(f"{target.name}: {text}: {error_line(e)}") from e
    return run
