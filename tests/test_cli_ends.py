"""What the command line refuses, and how it ends: one line, the right exit code, and nothing of the user's touched."""

import shlex
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["ops", "--help", "machine --json"])
@pytest.mark.parametrize("stream, code, line", [
    (">&-", 1, "whet: standard output is closed; send it to a file, a pipe or /dev/null"),
    (">/dev/full", 1, "whet: standard output cannot be written (No space left on device); what was printed is not whole"),
    ("<&-", 0, ""), ("2>&-", 0, ""),
], ids=["no-output", "full", "no-input", "no-errors"])
def test_a_closed_or_full_stream_is_no_traceback(command, stream, code, line):
    asked = " ".join([shlex.quote(sys.executable), "-m whet", command, stream])
    done = subprocess.run(["sh", "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (code, line)
    assert bool(done.stdout) == (code == 0)


def test_a_prompt_from_a_closed_input_is_one_line():
    done = subprocess.run(["sh", "-c", f"{shlex.quote(sys.executable)} -m whet generate - <&-"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "whet: generate: standard input is closed; give the prompt itself, not -\n")
