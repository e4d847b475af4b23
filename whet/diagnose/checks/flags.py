"""Switches left on that slow every step: anomaly detection, deterministic algorithms, blocking launches, a running profiler.

A switch is read while a step runs, so one that is on inside a `with` of the user's step is seen too.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import restored
from whet.figures import figure
from whet.measure import compare
from whet.race import tie

LEAST = 0.01  # of the step: a switch that costs less may have been left on for a reason
CLEAR = 0.05  # of the step, for what is torch's default
ROUNDS = 9  # at least, of each: a median of fewer is moved by one interruption
CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::cudnn_convolution")


@dataclass(frozen=True)
class Flag:
    """A switch of torch's that can be turned within a process; `best` is how it is fastest."""

    cause: str
    fix: str
    read: Callable[[], bool]
    write: Callable[[bool], None]
    best: bool = False
    least: float = LEAST
    convolutions: bool = False  # matters to cuDNN's convolutions alone, on a GPU


def cudnn_flag(name: str) -> tuple[Callable[[], bool], Callable[[bool], None]]:
    return lambda: getattr(torch.backends.cudnn, name), lambda value: setattr(torch.backends.cudnn, name, value)


FLAGS = (
    Flag(
        "anomaly detection is on: each node of the graph keeps a stack trace, and each gradient is searched for NaN",
        "Turn it off with torch.autograd.set_detect_anomaly(False); turn it on again to look for a NaN",
        torch.is_anomaly_enabled, torch.set_anomaly_enabled,
    ),
    Flag(
        "deterministic algorithms are on: ops take slower kernels, and new memory is filled",
        "Turn them off with torch.use_deterministic_algorithms(False), unless runs must repeat bit for bit",
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
    ),
    Flag(
        "torch.backends.cudnn.deterministic is on: convolutions may take no faster algorithm",
        "Set torch.backends.cudnn.deterministic = False, unless runs must repeat bit for bit",
        *cudnn_flag("deterministic"), convolutions=True,
    ),
    Flag(
        "torch.backends.cudnn.benchmark is off: cuDNN guesses a convolution's algorithm and does not try them",
        "Set torch.backends.cudnn.benchmark = True, if the inputs' sizes do not change from batch to batch",
        *cudnn_flag("benchmark"), best=True, least=CLEAR, convolutions=True,
    ),
)
VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel before it launches the next",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor's memory is asked of the driver, which waits for the GPU",
}


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """What the environment asks for; it cannot be taken back within the process, so there is no cost."""
    return [
        Finding(
            "flags", f"{name}={environment[name]} is in the environment: {what}", [f"{name}={environment[name]}"],
            fix=f"Unset {name} and start again",
        )
        for name, what in VARIABLES.items() if environment.get(name, "") not in ("", "0")
    ]


@contextlib.contextmanager
def on_entry(model: nn.Module, act: Callable[[], None]):
    hook = model.register_forward_pre_hook(lambda module, args: act())
    try:
        yield
    finally:
        hook.remove()


def while_running(target: Target, flags: list[Flag]) -> tuple[list[bool], bool]:
    """Each flag as it is where a step's forward begins, and whether a profiler is on there."""
    seen: list[tuple[list[bool], bool]] = []
    with restored(target), on_entry(target.model, lambda: seen.append(state(flags))):
        target.step()
    return seen[0] if seen else state(flags)


def state(flags: list[Flag]) -> tuple[list[bool], bool]:
    return [f.read() for f in flags], torch.autograd._profiler_enabled()


def step_with_flag(target: Target, flag: Flag, value: bool):
    """The step with the flag at this value, whatever the step itself sets it to; afterwards it is as it was."""
    def step():
        before = flag.read()
        try:
            flag.write(value)
            with on_entry(target.model, lambda: flag.write(value)):
                return target.step()
        finally:
            flag.write(before)

    return step


def find(run: Run):
    target = run.target
    convolves = run.gpu and bool(run.watched.of(*CONVOLUTIONS))
    flags = [f for f in FLAGS if convolves or not f.convolutions]
    values, profiling = while_running(target, flags)
    for flag, value in zip(flags, values):
        if value != flag.best:
            yield from costly(run, flag)
    if profiling:
        yield Finding(
            "flags", "a profiler of autograd is on in every step: each op is recorded",
            ["torch.autograd._profiler_enabled() is True where the forward begins"],
            fix="Profile a few steps and close the profiler, or give torch.profiler.profile a schedule",
        )
    if run.gpu:
        yield from variables(os.environ)


def costly(run: Run, flag: Flag):
    steps = {"now": step_with_flag(run.target, flag, not flag.best), "then": step_with_flag(run.target, flag, flag.best)}
    with restored(run.target):
        times = compare(steps, seconds=min(0.5, run.seconds), flush=False, least=ROUNDS)
    now, then = times["now"], times["then"]
    gain = now.ms - then.ms
    if tie(now, then) or gain < flag.least * now.ms:
        return
    everywhere = flag.read() != flag.best
    yield Finding(
        "flags", flag.cause, [f"the step takes {figure(now.ms)} ms so, and {figure(then.ms)} ms otherwise, measured in turns",
                              "it is so in the whole process" if everywhere else "it is so within the step alone"],
        fix=flag.fix, cost_ms=gain, gain_ms=gain, measured=True,
        apply=(lambda target: flag.write(flag.best)) if everywhere else None,
    )


class FlagsExample(nn.Module):
    """Many small ops, as in a model's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(20)))

    def forward(self, x):
        return self.layers(x).square().mean()


def example(anomaly: bool) -> Target:
    """The flag is on within the step alone, so nothing is left on behind it."""
    model, x = FlagsExample(), torch.randn(4, 16)

    def step():
        model.zero_grad()
        with torch.autograd.set_detect_anomaly(anomaly):
            loss = model(x)
            loss.backward()
        return loss

    return target_of("example", dict(model=model, batch=x, step=step))


CHECK = Check("flags", "debugging switches left on", find, lambda: example(True), lambda: example(False))
