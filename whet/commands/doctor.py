"""whet doctor"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Html, Json, Records, console, emit, progress_bar, write_page
from whet.commands._diagnose import Args, Decode, Seconds, Train, Where, could_run, details, kind_of, quiet_profiler


def command(
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
    from whet.diagnose import doctor as clinic
    from whet.report import findings, record

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


def applied(found, progress, seconds: float) -> dict:
    """Every mechanical fix done, and the step before and after."""
    from whet.diagnose import doctor as clinic

    before, done = found.run.step_ms, clinic.apply(found)
    if not done:
        return {"fixes": [], "before_ms": before, "after_ms": before}
    again = clinic.diagnose(found.target, progress, seconds)
    left = [f.cause for f in again.findings]
    return {"fixes": [f.fix for f in done], "before_ms": before, "after_ms": again.run.step_ms, "left": left}
