"""Progress of a long command where there is no terminal: a line now and then, on stderr."""

import io

from rich.console import Console

from whet.commands import _console


def test_a_log_gets_a_line_every_ten_seconds_and_nothing_before(monkeypatch, capsys):
    clock = iter([0.0, 4.0, 10.5, 10.5, 12.0, 31.0, 31.0])
    monkeypatch.setattr("whet.measure.now", lambda: next(clock))
    progress = _console.progress_lines()
    progress("verifying a", 1, 9)
    progress("verifying b", 2, 9)
    progress("verifying c", 3, 9)
    progress("timing d", 7, 9)
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["whet: 10 s: verifying b, 2 of 9", "whet: 31 s: timing d, 7 of 9"] and not shown.out


def test_json_asks_for_no_progress(monkeypatch, capsys):
    monkeypatch.setattr(_console, "EVERY", 0.0)
    with _console.progress_bar(False) as progress:
        progress("a", 1, 2)
    with _console.progress_bar(True) as progress:
        progress("b", 1, 2)
    assert capsys.readouterr().err == "whet: 0 s: b, 1 of 2\n"


def test_brackets_of_a_progress_bar_are_shown_as_they_are(monkeypatch):
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None, markup=False)
    monkeypatch.setattr(_console, "console", terminal)
    with _console.progress_bar(True) as progress:
        progress("timing rope[triton] of [cpu]", 1, 2)
    assert "timing rope[triton] of [cpu]" in terminal.file.getvalue()
