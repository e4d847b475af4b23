"""What Ctrl-C and a time limit's kill do: an exception that commands answer, and before one has begun the end at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

STOPS = (signal.SIGINT, signal.SIGTERM)
TOGETHER_S = 1.0  # torchrun and `timeout` pass a signal on to processes that had it already: that is no second one
begun = False  # whether a command runs, which knows what it keeps
received: int = signal.SIGINT  # the last one


def code() -> int:
    """The exit code of a process that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + received


def interrupted(number: int = signal.SIGINT, *_) -> None:
    """The handler. Imports swallow an exception, PyTorch's among them, and would go on half done."""
    global received
    received = number
    torch = getattr(sys.modules.get("torch"), "__spec__", None)
    if begun and not getattr(torch, "_initializing", False):
        raise KeyboardInterrupt
    with contextlib.suppress(OSError):
        if os.environ.get("RANK", "0") == "0":  # of processes that torchrun started the first one says it
            os.write(2, b"whet: stopped; nothing was begun yet\n")
    os._exit(code())


@dataclass
class StopSignal:
    """Which signal asked for the end; 0: none."""

    signal: int = 0
    at: float = 0.0


@contextlib.contextmanager
def deferred(notice: str, now: Callable[[], float]) -> Iterator[StopSignal]:
    """Within the block the first signal is noted, for the block to end when it can; a second one is KeyboardInterrupt.

    Handlers that someone else has set stay. notice: a line for stderr at the first one; now: a clock, seconds
    """
    asked = StopSignal()

    def note(number: int, *_) -> None:
        global received
        if asked.signal and now() - asked.at < TOGETHER_S:
            return
        received = number
        if asked.signal:
            raise KeyboardInterrupt
        asked.signal, asked.at = number, now()
        with contextlib.suppress(OSError):
            os.write(2, notice.encode())

    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.getsignal(s) for s in STOPS} if main else {}
    before = {s: h for s, h in before.items() if h in (interrupted, signal.default_int_handler, signal.SIG_DFL)}
    try:
        for s in before:
            signal.signal(s, note)
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def listen() -> None:
    """From now on; not to a SIGINT that this process was started without, as a background job is."""
    for stop in STOPS:
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, interrupted)


def ignore() -> None:
    """For the last moments of a process: what is done does not end as if it were killed."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
