"""What is known about a target: each observation is made when a check first asks for it, and only once."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from whet import measure
from whet.diagnose.profile import Profile, profiled
from whet.diagnose.target import Target
from whet.diagnose.watch import Watched, watch
from whet.figures import percent


@dataclass
class Finding:
    """What the doctor says.

    cause      one sentence, the thing itself first: "lm_head.weight is drawn from N(0, 1): logits start 22 wide"
    evidence   what shows it: tensors, modules, source lines, figures; a line each
    cost_ms    of the step, or None where the cost is not time (a wrong loss, a severed gradient)
    fix        one sentence in the imperative
    gain_ms    what the fix is expected to give back, or None
    wrong      the result is wrong, not slow: such findings come first
    measured   whether cost and gain were measured on this machine, or follow from counts
    apply      does the fix to the live target, where that is mechanical; None elsewhere
    """

    check: str
    cause: str
    evidence: list[str]
    fix: str
    cost_ms: float | None = None
    gain_ms: float | None = None
    wrong: bool = False
    measured: bool = False
    module: str = ""
    line: str = ""
    apply: Callable[[Target], None] | None = field(default=None, repr=False)

    def as_dict(self) -> dict:
        fields = asdict(replace(self, apply=None))  # asdict would try to copy the function
        del fields["apply"]
        return fields | {"applies": self.apply is not None}


class Run:
    """One target under observation.

    target     what is run
    watched    one step, op by op (watch.py)
    profile    where its time goes (profile.py)
    step_ms    the measured step, un-watched
    """

    def __init__(self, target: Target, seconds: float = 1.0):
        self.target, self.seconds = target, seconds

    @functools.cached_property
    def watched(self) -> Watched:
        return watch(self.target)

    @functools.cached_property
    def profile(self) -> Profile:
        return profiled(self.target, self.seconds)

    @functools.cached_property
    def ceilings(self) -> measure.Ceilings:
        return measure.ceilings()

    @property
    def step_ms(self) -> float:
        return self.profile.step.ms

    @property
    def gpu(self) -> bool:
        return self.target.device == "cuda"

    def floor_ms(self, bytes_: float, flops: float = 0.0, dtype: torch.dtype = torch.float32) -> float:
        """The least time that moving these bytes and doing these flops takes here, by the measured ceilings."""
        name = str(dtype).removeprefix("torch.")
        rate = self.ceilings.tflops.get(name, self.ceilings.tflops["float32"])
        return max(bytes_ / self.ceilings.copy_gbs / 1e6, flops / rate / 1e9)

    def share(self, ms: float | None) -> str:
        """' (12% of the step)', or nothing where there is no time."""
        return f" ({percent(ms / self.step_ms)} of the step)" if ms is not None and self.step_ms else ""


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong or slow. A file in checks/ defines CHECK; discovery finds it.

    find(run)     the findings, none where all is well
    planted()     a Target that it must flag, small enough for two CPU cores
    clean()       the nearest Target that it must not flag
    gpu           the symptom exists only on a GPU: planted and clean are tested there
    title         what it looks for, in a few words, for the docs
    """

    name: str
    title: str
    find: Callable[[Run], Iterable[Finding]]
    planted: Callable[[], Any]
    clean: Callable[[], Any]
    gpu: bool = False
    kinds: tuple[str, ...] = ("train", "forward", "decode")
