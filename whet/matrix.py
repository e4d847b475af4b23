"""A model's training step by every way, with and without checkpointed blocks and a CUDA graph: each verified, then timed.

    for cell in Matrix("transformer-np:small").cells(): ...

Every cell of a shape is timed in turns with one baseline, the first way that runs: the step as it is, by SDPA's flash backend
where there is one. What does not run says why.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet import ops as public
from whet.choices import Choices
from whet.diagnose.profile import profiled
from whet.diagnose.target import Target
from whet.figures import error_line
from whet.graphs import Graph
from whet.judge import judge
from whet.measure import compare, free_memory, memory_allocated, race
from whet.op import discover
from whet.plan import Plan, peak_memory
from whet.race import paired
from whet.subjects import BuiltIn, subject_of
from whet.swap import Journal
from whet.swap import _memory as memory
from whet.workload import ROUNDING, Workload

KERNELS = {"rms_norm": "triton", "add_rms_norm": "triton", "gmm_log_prob": "triton"}
SEPARATE = KERNELS | {"attention": "triton", "mlp": "hybrid", "grouped_mlp": "torch"}
FUSED = KERNELS | {"attention": "triton", "mlp": "triton", "grouped_mlp": "triton"}
FP8 = torch.finfo(torch.float8_e4m3fn).eps
CELLS = ("plain", "graph", "checkpointed", "checkpointed graph")
STAGES = {"attention": r"\.attention(\.|$)", "MLP": r"\.mlp(\.|$)", "heads": r"^heads(\.|$)", "norms": r"\.\d+$", "loss": ""}


@dataclass(frozen=True)
class StepWay:
    """One way to run a step.

    variant    of the model
    force      the impl of each op, by name: what it refuses is an error, and the cell's reason
    backend    of SDPA, the only one that may serve
    rounding   the relative rounding step of its arithmetic, where that is coarser than the precision asked for
    """

    name: str
    variant: str
    force: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False
    backend: SDPBackend | None = None
    rounding: float = 0.0

    def around(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel([self.backend])

    def choices(self) -> Choices:
        """Stock calls, but for the impls that are named."""
        found = Choices()
        for name, impl in self.force.items():
            if impl in discover()[name].impls:
                setattr(found, name, functools.partial(getattr(public, name), impl=impl))
        return found


def ways(subject: BuiltIn) -> list[StepWay]:
    stock, tuned = subject.model.stock, subject.model.tuned
    return [
        StepWay("SDPA flash", stock, backend=SDPBackend.FLASH_ATTENTION),
        StepWay("SDPA cuDNN", stock, backend=SDPBackend.CUDNN_ATTENTION),
        StepWay("torch.compile", stock, compiled=True),
        StepWay("custom separate", tuned, SEPARATE),
        StepWay("custom fused", tuned, FUSED),
        StepWay("custom FP8", tuned, SEPARATE | {"attention": "triton_fp8"}, rounding=FP8),
    ]


@dataclass
class MatrixCell:
    """A way with or without checkpointed blocks and a CUDA graph: what it took, or why it did not run."""

    way: str
    checkpointed: bool
    graph: bool
    ok: bool = False
    why: str = ""
    proved: str = ""  # "1 of 12 layers", which were proved in the place of all
    share: float | None = None  # of the error budget that it used
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None
    peak_mb: float | None = None
    speedup: float | None = None  # over the baseline, in turns
    speedup_low: float | None = None
    speedup_high: float | None = None
    stages: dict[str, float] = field(default_factory=dict)  # ms of the GPU, forward and backward

    def to_record(self) -> dict:
        return {k: v for k, v in asdict(self).items() if v is not None and v != {}}


class Matrix:
    """The cells of one model and shape.

    target      a built-in model and its size, 'transformer-np:small'
    seconds     of timing for each cell
    only        names of the ways to run; none: all
    cells       which of CELLS each way has
    """

    def __init__(
        self, target: str, precision: str = "bfloat16", seconds: float = 0.5, device: str = "", only: Sequence[str] = (),
        cells: Sequence[str] = CELLS,
    ):
        subject = subject_of(target)
        if not isinstance(subject, BuiltIn):
            raise ValueError(f"bench: {target} is no built-in model")
        self.subject, self.precision, self.seconds = subject, precision, seconds
        self.subject.device = device or subject.device
        self.proof = self.subject.proof()
        self.base: tuple[str, Callable] | None = None
        known = {way.name: way for way in ways(subject)}
        refuse_unknown("way", only, list(known))
        refuse_unknown("cell", cells, CELLS)
        self.ways = [way for name, way in known.items() if name in only or not only]
        self.kinds = [kind for kind in CELLS if kind in cells]
        self.count = len(self.kinds) * len(self.ways)

    def cells(self) -> Iterator[MatrixCell]:
        """Each cell when it is done; what a cell held is given back before the next."""
        self.truth = self.proof.truth()
        plain = StepWay("eager", self.subject.model.stock)
        self.eager = self._evidence(self._workload(self.proof, plain, False))
        for way in self.ways:
            for kind in self.kinds:
                yield self.cell(way, "checkpointed" in kind, "graph" in kind)
                free_memory()
            torch._dynamo.reset()

    def cell(self, way: StepWay, checkpointed: bool, graph: bool) -> MatrixCell:
        found = MatrixCell(way.name, checkpointed, graph)
        try:
            if graph and self.subject.device != "cuda":
                raise ValueError("a CUDA graph needs a GPU")
            self._prove(way, found)
            self._time(way, found)
        except torch.OutOfMemoryError:
            held = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            found.why = f"out of memory at {held:.1f} GiB"
        except Exception as e:  # whatever a way dies of is that cell's reason
            found.why = str(e) if isinstance(e, ValueError) else error_line(e)
        return found

    def _workload(self, subject: BuiltIn, way: StepWay, checkpointed: bool) -> Workload:
        work = subject.workload(Plan(way.name, way.variant, "own", way.compiled), way.choices(), self.precision)
        work.around = way.around
        if checkpointed:
            for block in blocks(work.model):
                Journal().make(memory.edits(block, Choices()))
        return work

    def _evidence(self, work: Workload, step: Callable | None = None) -> dict:
        return work.evidence(step, self.proof.canonical)

    def _prove(self, way: StepWay, into: MatrixCell) -> None:
        """Loss and every gradient against the plain variant in float64; with fewer layers where all are too many for it."""
        work, step = self._workload(self.proof, way, into.checkpointed), None
        if into.graph:  # it trains while it is captured: the weights are put back
            weights = [p.detach().clone() for p in work.model.parameters()]
            step = Graph(work.outcome)
            with torch.no_grad():
                for p, weight in zip(work.model.parameters(), weights):
                    p.copy_(weight)
        found, rounding = self._evidence(work, step), max(way.rounding, ROUNDING[self.precision] or 0.0)
        verdict = judge({name: found.get(name) for name in self.truth}, self.eager, self.truth, rounding or None)
        into.share = round(verdict.share, 4)
        if not verdict.ok:
            raise ValueError(f"wrong: {verdict.why}")
        if self.proof is not self.subject:
            into.proved = self.proof.part

    def _time(self, way: StepWay, into: MatrixCell) -> None:
        with peak_memory(into, memory_allocated()):
            work = self._workload(self.subject, way, into.checkpointed)
            step: Callable = Graph(work.outcome) if into.graph else work.outcome
            step()
            loss = step()
        if not math.isfinite(loss.item()) or work.without_gradient():
            raise ValueError(f"its loss is {loss.item():.4g} and {len(work.without_gradient())} parameters have no gradient")
        if self.base is None:
            self.base, timing = (way.name, step), compare({way.name: step}, seconds=self.seconds, flush=False)[way.name]
            into.speedup = into.speedup_low = into.speedup_high = 1.0
        else:
            name, other = self.base
            before = f"baseline {name}"
            raced = race({before: other, "cell": step}, keep=None, seconds=self.seconds, flush=False)
            ratio, timing = paired(raced.times[before], raced.times["cell"]), raced.timings["cell"]
            into.speedup, into.speedup_low, into.speedup_high = (round(x, 4) for x in (ratio.value, ratio.low, ratio.high))
        into.ok, into.ms, into.low, into.high = True, timing.ms, timing.low, timing.high
        into.tokens_per_s = round(tokens(self.subject) / timing.ms * 1e3, 1)
        if not (into.graph or into.checkpointed or way.compiled):
            into.stages = stages(work)


def refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """ValueError where a name is not known."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"bench: there is no {what} {unknown[0]!r}; there are {', '.join(known)}")


def blocks(model: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model: its longest list of modules."""
    return max((list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=lambda found: len(found))


def tokens(subject: BuiltIn) -> int:
    """B * (M + N): every point, or token, of a batch."""
    return subject.recipe.batch * subject.recipe.seq_len


def points(subject: BuiltIn) -> str:
    """'B2 (384, 384)', or 'B2 x 384' of a model without context."""
    r: Any = subject.recipe
    inside = f" ({r.context:,}, {r.seq_len - r.context:,})" if hasattr(r, "context") else f" x {r.seq_len:,}"
    return f"B{r.batch}{inside}"


def stages(work: Workload) -> dict[str, float]:
    """Where a step's time goes, ms: of each stage forward and backward, and the optimizer's; idle is what they leave."""
    target = Target(
        model=work.model, args=work.args, kwargs=work.kwargs, optimizer=work.optimizer, precision=work.precision,
        around=work.around, name="bench",
    )
    found = profiled(target, seconds=0.0)
    ms = dict.fromkeys([*STAGES, "optimizer"], 0.0)
    for path, row in found.rows.items():
        stage = next(name for name, pattern in STAGES.items() if re.search(pattern, path))
        ms[stage] += (row.forward_us + row.backward_us) / 1e3
        ms["optimizer"] += row.optimizer_us / 1e3
    return {name: round(t, 4) for name, t in ms.items()} | {"idle": round(found.idle_us / 1e3, 4)}
