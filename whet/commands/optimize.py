"""whet optimize"""

from typing import Annotated

import typer

from whet.commands._console import Html, Json, Records, console, emit, plain_errors, progress_bar, write_page


def command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A built-in model and size: tiny-llama:small.")],
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16; only ever what is asked for.")] = "float32",
    again: Annotated[bool, typer.Option(help="Measure the plans anew even if the lock has them (default off).")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time per plan, seconds.")] = 0.5,
    lock: Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")] = None,
    html: Html = None,
    records: Records = "records",
    as_json: Json = False,
):
    """Record the model's calls, verify and time every candidate, choose, and time the whole model before and after.

    Example: whet optimize tiny-llama:tiny
    """
    from whet.lock import Lock, lock_path
    from whet.plans import best_plan
    from whet.report import record, tables

    with plain_errors("nothing was begun yet"):
        where = lock_path(lock)
    with plain_errors(f"what was tuned so far is kept in {where}, and the next run goes on from there"):
        with progress_bar(not as_json) as progress:
            result = best_plan(target, Lock.read(where), precision, again, seconds, progress)
        made = record.make(f"whet optimize {target} --precision {precision}", result)
        if html:
            write_page(html, made)

        def show():
            tables.show_calls(console, result["entries"])
            console.print(tables.plans_table(result))
            for line in tables.busy(result["entries"], result):
                console.print(line)
            speedup = f"{result['speedup']:.2f}x the plain eager model"
            console.print(f"{tables.plan_label(result['chosen'])}: {speedup}, every gradient verified. {result['note']}")
            console.print(f"lock: {where}")

        emit(made, as_json, records, f"optimize {target} {precision}", show)
