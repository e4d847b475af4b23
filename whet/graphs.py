"""CUDA graphs, marks in a device's queue of work, and how long a child waits for it."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

HANG_S = 30.0  # what a candidate launched is given up after so long: a run of seconds takes so long beside seven others
hang_s: float | None = None  # in the tuner's child: after how long it is ended


@contextmanager
def patient() -> Iterator[None]:
    """No limit within the block: a formula in float64 may take long on a GPU that has little of it, and hangs nowhere."""
    global hang_s
    before, hang_s = hang_s, None
    try:
        yield
    finally:
        hang_s = before


def synchronize() -> None:
    """Wait for the GPU, where this process has used one: a run on the CPU starts none for that."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def finish(wait: Callable[[], object] | None = None) -> None:
    """Wait for what was launched. Where it hangs, a child of the tuner dies of SIGALRM: that needs no thread of Python."""
    armed = 0.0 if signal.getitimer(signal.ITIMER_REAL)[0] else hang_s or 0.0  # a timer that runs is somebody else's
    if armed:
        signal.setitimer(signal.ITIMER_REAL, armed)
    try:
        (wait or synchronize)()
    finally:
        if armed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


class Graph:
    """A captured run: call it to replay.

    beside   a graph whose memory this one takes for its own too: one runs after the other, and neither's result is kept
    """

    def __init__(self, run: Callable, warm_up: int = 3, beside: "Graph | None" = None):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        finish()
        self.run = run  # what it reads must live as long as it may be replayed
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=None if beside is None else beside.graph.pool()):
            self.out = run()

    def __call__(self):
        self.graph.replay()
        return self.out


class Mark:
    """A point in a device's queue: reached when the work enqueued before it is done. On a CPU that is at once."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.at = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: "Mark") -> float:
        """Seconds between two marks that are both reached."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3
