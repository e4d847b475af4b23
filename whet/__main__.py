"""The command `whet`, and `python -m whet`. An interrupt before a command has begun ends it without a traceback, and so does
a standard output that is closed or full."""

import atexit
import io
import os
import sys
from typing import Any

from whet import interrupts


class Output(io.FileIO):
    """Standard output that remembers why it could not be written."""

    failed: OSError | None = None

    def write(self, data):
        try:
            return super().write(data)
        except OSError as e:
            self.failed = e
            raise


def main() -> None:
    interrupts.listen()
    atexit.register(interrupts.ignore)  # the first to be registered is the last to be called
    if sys.stderr is None:  # 2>&-: what would be printed there must not land in a file that is given its number
        sys.stderr = io.TextIOWrapper(io.FileIO(os.devnull, "w"), line_buffering=True)
    if sys.stdout is None:
        print("whet: standard output is closed; send it to a file, a pipe or /dev/null", file=sys.stderr)
        raise SystemExit(1)
    from whet.commands import main as command

    try:
        with_output(command)
    finally:
        exec("")  # else an interrupt that passed an exec, as of a dataclass, ends Python by SIGINT, whatever the exit code


def with_output(command) -> None:
    """Run it. A standard output that fails is one line, and none where its reader, `head` say, has had enough; exit code 1."""
    output, before = Output(sys.stdout.fileno(), "w", closefd=False), sys.stdout
    how: dict[str, Any] = dict(encoding=before.encoding, errors=before.errors, line_buffering=output.isatty())
    sys.stdout = stdout = io.TextIOWrapper(io.BufferedWriter(output), **how)
    try:
        try:
            command()
        finally:
            stdout.flush()
    except OSError:
        if output.failed is None:
            raise
    finally:
        if output.failed is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # for what is still to be flushed
            if not isinstance(output.failed, BrokenPipeError):
                why = output.failed.strerror
                print(f"whet: standard output cannot be written ({why}); what was printed is not whole", file=sys.stderr)
            sys.exit(1)
        sys.stdout = before


if __name__ == "__main__":
    main()
