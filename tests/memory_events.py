"""The peak of a computation on the CPU by the allocator's own events, which torch.profiler writes down."""

from collections.abc import Callable

import torch


def measured_peak(run: Callable) -> tuple[int, int]:
    """(bytes at the highest point, bytes at the end) of what was allocated while it ran and what it returned is alive."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak, now
