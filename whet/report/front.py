"""README's excerpts from records: terminal output of real runs."""

import io
from pathlib import Path

from rich.console import Console

from whet.report import findings, run_tables, tables
from whet.report.markdown import absent, read, source

WIDTH = 144  # columns: the table of plans fits without wrapping


def terminal() -> Console:
    """A console that keeps what is printed, as plain text."""
    return Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)


def screen(command: str, console: Console) -> str:
    """A command and what it printed, empty lines left out, as a block of text."""
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(("```text", f"$ {command}", *filter(None, lines), "```"))


def optimize_run(root: Path) -> str:
    """The end of a run of `whet optimize`: the plans, and which one was chosen."""
    if (found := run_tables.main_run(root)) is None:
        return absent("optimize")
    name, r = found
    result, console = r["measured"], terminal()
    narrow = [{k: v for k, v in plan.items() if k != "predicted_mb"} for plan in result["plans"]]  # which results.md has
    console.print(tables.plans_table(result | {"plans": narrow}))
    for line in tables.busy([], result):
        console.print(line, soft_wrap=True)
    if result.get("speedup"):
        faster = f"{result['speedup']:.2f}x the plain eager model"
        console.print(f"{tables.plan_label(result['chosen'])}: {faster}, every gradient verified.")
    return f"{screen(r['command'], console)}\n{source({name: r})}"


def finding(root: Path) -> str:
    """The doctor on a model from another library: its summary sentence, and its first measured finding."""
    for name, r in read(root, "doctor").items():
        made = r["measured"]
        measured = [f for f in made["findings"] if f["measured"]]
        if "exercises/" in r["command"] or not measured:
            continue
        console = terminal()
        findings.show(console, {"sentence": made["sentence"], "findings": measured[:1], "step": made["step"]})
        return f"{screen(r['command'], console)}\n{source({name: r})}"
    return absent("doctor")
