"""A plan, how a model runs, and what came of trying it."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from whet.race import Ratio, Timing

BEFORE = "before: plain eager"


@dataclass(frozen=True)
class Plan:
    name: str
    variant: str  # which of the model's forms
    choices: str  # "eager" (plain formulas), "stock", "tuned", "own" (whatever the model has), or what a Limit calls its own
    compiled: bool = False
    graph: bool = False
    blocks: int = 0  # so many of the model's repeated blocks are computed again in the backward

    @property
    def base(self) -> str:
        """The name of the plan that it is a leaner form of, its own where it is none."""
        name, _, leaner = self.name.partition(", ")
        return name + (" + CUDA graph" if leaner.endswith(" + CUDA graph") else "")

    @property
    def mode(self) -> str:
        """Which choices it uses: host overhead counts only where the host launches each op."""
        return " + ".join(["compile"] * self.compiled + ["graph"] * self.graph) or "eager"


def graphed(plan: Plan) -> Plan:
    """The same plan as a CUDA graph."""
    return replace(plan, name=plan.name + " + CUDA graph", graph=True)


def asked_plans(plans: list[Plan], only: Collection[str], graphs: bool) -> list[Plan]:
    """Those of which `only` names one, or its CUDA graph; all where nothing is named. ValueError where a name is no plan's."""
    names = {p: [p.name, *([graphed(p).name] if graphs and not p.graph else [])] for p in plans}
    if unknown := set(only) - {name for found in names.values() for name in found}:
        known = ", ".join(name for found in names.values() for name in found)
        raise ValueError(f"optimize: there is no plan {min(unknown)!r} here; there are {known}")
    return [p for p in plans if not only or set(only) & {*names[p]}]


def compiled(plans: list[Plan]) -> list[Plan]:
    """The same plans under torch.compile."""
    return [replace(p, name=p.name.replace("eager", "torch.compile"), compiled=True) for p in plans]


@dataclass
class PlanResult:
    """What came of a plan: verified or not and why, what it took, how long a step is, and its ratio to the fastest."""

    plan: Plan
    ok: bool = False
    why: str = ""
    peak_mb: float | None = None  # device memory at its highest point
    predicted_mb: float | None = None  # the same, predicted from shapes before it was built
    ready_s: float | None = None  # to build, compile and warm up
    share: float | None = None  # of the error budget that it used
    timing: Timing | None = None
    samples_per_s: float | None = None
    before_ms: float | None = None  # of the plain model in the same race
    speedup: float | None = None
    ratio: Ratio | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def lost(self, why: str) -> None:
        """It is no candidate any more."""
        self.ok, self.why = False, why

    def to_record(self) -> dict:
        """As the lock and records hold it: what is not known is left out."""
        found = {"name": self.name, "ok": self.ok, "why": self.why} | asdict(self.plan)
        if not self.plan.blocks:
            del found["blocks"]
        if self.timing:
            found |= {k: v for k, v in self.timing.as_dict().items() if k != "peak_mib"}
        if self.ratio and self.ok:
            found |= self.ratio.as_dict()
        names = ("peak_mb", "predicted_mb", "ready_s", "share", "samples_per_s", "before_ms", "speedup")
        return found | {k: getattr(self, k) for k in names if getattr(self, k) is not None}


@contextlib.contextmanager
def peak_memory(into: Any, origin: int) -> Iterator[None]:
    """into.peak_mb: device memory at the highest point of the block, over what was held at the origin."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        into.peak_mb = round((torch.cuda.max_memory_allocated() - origin) / 1e6, 1)
