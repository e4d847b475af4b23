"""A command that runs to its end: what it printed, its fault in one line, and nothing of it left when it is late."""

import os
import sys
import threading
from pathlib import Path

import pytest

from whet import child
from whet.child import Ended, Lost, run_to_end, stop_running
from whet.measure import now

ROOT = Path(__file__).parent.parent


def python(code: str, *args, **options) -> Ended:
    return run_to_end([sys.executable, "-c", code], *args, **options)


def gone(pid: int) -> bool:
    """Whether a process is over: not there, or only waiting to be reaped by whoever inherits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_what_it_reads_prints_and_where_it_runs_are_its_own(tmp_path):
    code = "import os, sys; print(sys.stdin.read(), os.environ['WORD'], os.getcwd()); print('aside', file=sys.stderr)"
    done = python(code, 60, "given", os.environ | {"WORD": "word"}, tmp_path)
    assert done == Ended(0, f"given word {tmp_path}\n", "aside\n") and done.fault == ""


@pytest.mark.parametrize("code, fault", [
    ("import sys; print('a warning\\nno data\\n', file=sys.stderr); sys.exit(3)", "no data"),
    ("import sys; sys.exit(3)", "exit 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ("raise ValueError('x' * 9999)", "ValueError: " + "x" * 288),
])
def test_a_fault_is_the_last_line_that_it_said(code, fault):
    assert python(code).fault == fault


def test_a_command_that_does_not_exist_is_lost_with_its_name():
    with pytest.raises(Lost, match=r"^/nowhere/ptxas cannot be started \(No such file or directory\)$"):
        run_to_end(["/nowhere/ptxas"])


SLEEPS = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "


def test_what_is_late_is_ended_with_all_that_it_started(tmp_path):
    with pytest.raises(Lost, match="^took longer than 3 s$") as lost:
        python(SLEEPS + "open('pid', 'w').write(str(p.pid)); time.sleep(99)", 3, cwd=tmp_path)
    assert lost.value.hung and not child.running
    pid = int((tmp_path / "pid").read_text())
    deadline = now() + 5
    while not gone(pid) and now() < deadline:
        threading.Event().wait(0.05)
    assert gone(pid)


def test_commands_of_other_threads_can_be_ended():
    ended: list[Ended] = []
    thread = threading.Thread(target=lambda: ended.append(python("import time; time.sleep(99)")))
    thread.start()
    while not child.running:
        threading.Event().wait(0.01)
    stop_running()
    thread.join(10)
    assert ended[0].fault == "signal 9" and not child.running


def test_only_child_starts_processes():
    """git beside it, which machine asks for the commit."""
    starts = [p for p in (ROOT / "whet").rglob("*.py") if "import subprocess" in p.read_text()]
    assert {p.name for p in starts} == {"child.py", "machine.py"}
