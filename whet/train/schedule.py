"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no state of them.

    schedule = Schedule("cosine", lr=6e-4, warmup=100, steps=2000)
    lr_at(schedule, step)                # of one optimizer with one rate
    set_lr(optimizer, schedule, step)    # of every group, each scaled from its own base_lr
"""

import math
from dataclasses import dataclass

import torch

KINDS = ("cosine", "wsd", "linear", "constant")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then the way down.

    kind     "cosine" or "linear": from lr, after the warm-up, to final * lr at `steps`; "wsd" (warm-up, stable, decay): lr
             until the last decay * steps, then linear to final * lr; "constant": lr
    lr       the highest rate
    warmup   steps that the rate rises over, linearly, before it is lr
    steps    of the run: step 0 to step steps - 1. Past them the rate stays what it is at the end
    final    fraction of lr at the end
    decay    fraction of steps that "wsd" decays over
    """

    kind: str = "cosine"
    lr: float = 6e-4
    warmup: int = 0
    steps: int = 1000
    final: float = 0.1
    decay: float = 0.2

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"schedule: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not _number(self.lr) or self.lr <= 0:
            raise ValueError(f"schedule: lr must be a number above 0, got {self.lr!r}")
        if not _whole(self.steps) or self.steps < 1:
            raise ValueError(f"schedule: steps must be a whole number of at least 1, got {self.steps!r}")
        if not _whole(self.warmup) or not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"schedule: warmup must be a whole number from 0 to below steps={self.steps}, got {self.warmup!r}"
            )
        if not _number(self.final) or not 0 <= self.final <= 1:
            raise ValueError(f"schedule: final must be a fraction of lr from 0 to 1, got {self.final!r}")
        if not _number(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(f"schedule: decay must be a fraction of steps above 0 and up to 1, got {self.decay!r}")
        if self.kind == "wsd" and self.warmup + self.decay_steps > self.steps:
            raise ValueError(
                f"schedule: warmup={self.warmup} and a decay over {self.decay_steps} steps do not fit into steps={self.steps}; "
                "lower warmup or decay"
            )

    @property
    def decay_steps(self) -> int:
        """Steps at the end that "wsd" decays over."""
        return max(1, round(self.decay * self.steps))


def factor_at(schedule: Schedule, step: int) -> float:
    """The fraction of the highest rate at this step, the first being step 0."""
    s = schedule
    if not _whole(step) or step < 0:
        raise ValueError(f"schedule: step must be a whole number of at least 0, got {step!r}")
    if step < s.warmup:
        return (step + 1) / (s.warmup + 1)
    if s.kind == "constant":
        return 1.0
    start = s.steps - s.decay_steps if s.kind == "wsd" else s.warmup
    progress = min(1.0, max(0.0, (step - start) / (s.steps - start)))
    left = (1 + math.cos(math.pi * progress)) / 2 if s.kind == "cosine" else 1 - progress
    return s.final + (1 - s.final) * left


def lr_at(schedule: Schedule, step: int) -> float:
    """The learning rate of this step, the first being step 0."""
    return schedule.lr * factor_at(schedule, step)


def set_lr(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int) -> float:
    """Every group's rate at this step, its own `base_lr` scaled, or the schedule's lr where it has none; returns lr_at."""
    factor = factor_at(schedule, step)
    for group in optimizer.param_groups:
        lr = group.get("base_lr", schedule.lr) * factor
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return schedule.lr * factor
