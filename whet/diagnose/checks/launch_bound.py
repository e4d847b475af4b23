"""The GPU idles because the host cannot launch fast enough: many short kernels, and a host slower than they are."""

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from whet.diagnose.checks.host_syncs import waited_us
from whet.diagnose.profile import Profile
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import IDLE
from whet.diagnose.target import Target, target_of
from whet.figures import figure, percent

SHORT_US = 10.0  # about what PyTorch needs on the host for one op: shorter kernels end before the next is launched
MANY = 50  # launches a step; with fewer a graph gives back tenths of a millisecond at most
SLOW_HOST_US = 200.0  # per launch; above it the host does other work than launching, and a graph would not be the cure


@dataclass(frozen=True)
class Launching:
    """A step that waits for launches."""

    launches: int
    busy_ms: float
    step_ms: float
    median_us: float
    host_us: float  # per launch

    @property
    def idle_ms(self) -> float:
        return self.step_ms - self.busy_ms


def launching(profile: Profile, waited: float = 0.0, replays: int = 0) -> Launching | None:
    """Whether launches are what this step waits for. waited: us of idling that the host's waits explain."""
    host = profile.step.host_us if profile.step.host_us is not None else profile.host_us
    if replays or profile.launches < MANY or profile.idle_share < IDLE or host < profile.busy_us:
        return None
    median, each = statistics.median(k.us for k in profile.kernels), host / profile.launches
    if median >= SHORT_US or each > SLOW_HOST_US or waited > 0.5 * profile.idle_us:
        return None
    return Launching(profile.launches, profile.busy_us / 1e3, profile.step.ms, median, each)


def decoding(run: Run) -> list[str]:
    """Tokens a second now, and where reading every parameter once a step would be all that a step does."""
    read, tokens = set(), 0
    for e in run.watched.events:
        if e.op == "aten::embedding":
            tokens = tokens or e.inputs[1].numel
        elif not e.view:
            read |= {t.name for t in e.inputs if t.name}
    size = sum(p.numel() * p.element_size() for n, p in run.target.model.named_parameters() if n in read)
    floor, tokens = run.floor_ms(size), max(1, tokens)
    now = f"{tokens / run.step_ms * 1e3:.0f} tokens/s now, {tokens} a step"
    if not floor:
        return [now]
    return [now, f"{figure(size / 2**20)} MiB of parameters read a step: {figure(floor)} ms at "
                 f"{run.ceilings.copy_gbs:,.0f} GB/s, or {tokens / floor * 1e3:.0f} tokens/s at best"]


def find(run: Run):
    seen = launching(run.profile, waited_us(run.profile), getattr(run.target.script, "replays", 0))
    if seen is None:
        return
    yield Finding(
        "launch_bound",
        f"the GPU idles for {percent(seen.idle_ms / seen.step_ms)} of the step: the host launches {seen.launches} kernels, "
        f"{seen.host_us:.1f} us each, and half of them take under {seen.median_us:.1f} us",
        [
            f"{seen.launches} launches a step, {seen.host_us:.1f} us of host time each",
            f"GPU busy {figure(seen.busy_ms)} ms of a {figure(seen.step_ms)} ms step, median kernel {seen.median_us:.1f} us",
            *(decoding(run) if run.target.kind == "decode" else []),
        ],
        'Capture the step as a CUDA graph, let torch.compile(mode="reduce-overhead") do so, or take a larger batch',
        seen.idle_ms, seen.idle_ms,
    )


def example(layers: int, width: int, rows: int) -> Target:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, x):
            return self.stack(x).square().mean()

    return target_of("example", (Stack().to(device), torch.randn(rows, width, device=device)))


CHECK = Check(
    "launch_bound", "a GPU idle while the host launches", find, lambda: example(48, 64, 8), lambda: example(4, 4096, 4096),
    gpu=True,
)
