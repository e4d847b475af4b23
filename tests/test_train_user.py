"""whet train, data and compare as a demanding user meets them: what is shown, and what is wrong in one line."""

import io

from rich.console import Console
from test_train_commands import SETTINGS, invoke
from test_train_loop import losses, quiet, shards, small  # noqa: F401

from whet.commands import _console, train


def one_line(*words: str) -> str:
    """What the command refuses with: one line on stderr, exit code 2."""
    result = invoke(*words)
    assert result.exit_code == 2 and result.stderr.startswith("whet: "), (result.exit_code, result.output, result.exception)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_on_a_terminal_a_line_shows_the_step_that_runs_and_brackets_stay(shards, monkeypatch):  # noqa: F811
    terminal = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None, markup=False, highlight=False)
    monkeypatch.setattr(_console, "console", terminal)
    monkeypatch.setattr(train, "console", terminal)
    given = [*SETTINGS, "--set", f"data.path={shards}", "--set", "run.log_every=0"]
    result = invoke("train", "gpt2-d12", *given, "--name", "live")
    assert result.exit_code == 0, result.output
    shown = terminal.file.getvalue()
    assert "by the recipe's table [cpu]: tiny, 3 steps" in shown
    assert "step 3/3  loss" in shown and "3/3 " in shown and "tok/s" in shown


def test_in_a_log_no_second_line_of_a_step_is_printed(shards):  # noqa: F811
    result = invoke("train", "gpt2-d12", *SETTINGS, "--set", f"data.path={shards}", "--name", "logged")
    assert result.exit_code == 0 and result.output.count("step 3/3  loss") == 1
