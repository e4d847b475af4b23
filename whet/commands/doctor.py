"""whet doctor"""

import enum
import shlex
from pathlib import Path
from typing import Annotated

import typer

from whet.commands._console import Html, Json, Records, console, emit, progress_bar, refuse_directory, write_page
from whet.commands._diagnose import Args, Decode, Seconds, Train, Where, could_run, details, kind_of, quiet_profiler


class FailOn(str, enum.Enum):
    wrong = "wrong"
    slow = "slow"
    never = "never"


FAIL_HELP = "Which findings give exit code 1: wrong (results that are wrong), slow (any finding), never (none)."


def command(
    target: Where,
    train: Train = False,
    decode: Decode = False,
    html: Html = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply mechanical fixes, then look again (default off).")] = False,
    fail_on: Annotated[FailOn, typer.Option("--fail-on", help=FAIL_HELP)] = FailOn.slow,
    args: Args = "",
    seconds: Seconds = 1.0,
    records: Records = "records",
    as_json: Json = False,
):
    """What is slow, what is wrong, what it costs and what fixes it.

    Exit code 0: no problem found; 1: findings (see --fail-on); 2: could not run, or not see the step; 70: whet itself failed.

    Example: whet doctor tiny-llama:tiny
    """
    from whet.diagnose import doctor as clinic
    from whet.report import findings, record

    with could_run():
        refuse_directory("--html", html)
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
    raise typer.Exit(exit_code(result["findings"], fail_on, found.blind))


def exit_code(findings: list[dict], fail_on: FailOn, blind: bool) -> int:
    failing = {FailOn.wrong: [f for f in findings if f["wrong"]], FailOn.slow: findings, FailOn.never: []}[fail_on]
    return 1 if failing else 2 if blind else 0


def applied(found, progress, seconds: float) -> dict:
    """Every mechanical fix done, and the step before and after."""
    from whet.diagnose import doctor as clinic

    before, done = found.run.step_ms, clinic.apply(found)
    if not done:
        return {"fixes": [], "before_ms": before, "after_ms": before}
    again = clinic.diagnose(found.target, progress, seconds)
    left = [f.cause for f in again.findings]
    return {"fixes": [f.fix for f in done], "before_ms": before, "after_ms": again.run.step_ms, "left": left}
