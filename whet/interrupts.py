"""What Ctrl-C and a time limit's kill do: an exception that commands answer, and before one has begun the end at once."""

import contextlib
import os
import signal
import sys

begun = False  # whether a command runs, which knows what it keeps


def interrupted(*_) -> None:
    """The handler. Imports swallow an exception, PyTorch's among them, and would go on half done."""
    torch = getattr(sys.modules.get("torch"), "__spec__", None)
    if begun and not getattr(torch, "_initializing", False):
        raise KeyboardInterrupt
    with contextlib.suppress(OSError):
        os.write(2, b"whet: stopped; nothing was begun yet\n")
    os._exit(130)


def listen() -> None:
    """From now on; not to a SIGINT that this process was started without, as a background job is."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, interrupted)


def ignore() -> None:
    """For the last moments of a process: what is done does not end as if it were killed."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
