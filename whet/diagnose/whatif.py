"""What fusing would give: chains of ops that only move memory, their time now, and the time one kernel would take.

A chain is a run of ops in one module, each reading what an earlier one wrote, none of them a product of matrices. Fused, it
reads what comes from outside and writes what is used outside, once, in one launch.
"""

import collections
import functools
from dataclasses import dataclass

import torch

from whet.diagnose.run import Run
from whet.diagnose.summary import IDLE, pattern
from whet.diagnose.watch import Event, OpWatch
from whet.measure import compare, stepper
from whet.op import DTYPES, discover

LAUNCH_MS = 0.002  # one kernel after another inside a CUDA graph; what a fused kernel takes at least
LEAST = 0.005  # share of the step that a chain must save to be listed
ALONE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::embedding", "aten::embedding_dense_backward")


@dataclass
class FusableChain:
    module: str  # pattern
    phase: str
    ops: tuple[str, ...]
    count: int
    now_ms: float
    fused_ms: float
    saved_launches: int
    realised_ms: float | None = None
    realised_by: str = ""

    @property
    def gain_ms(self) -> float:
        return max(0.0, self.now_ms - self.fused_ms)

    def as_dict(self, step_ms: float) -> dict:
        return {
            "chain": list(self.ops), "module": self.module, "phase": self.phase, "count": self.count, "now_ms": self.now_ms,
            "fused_ms": self.fused_ms, "gain_ms": self.gain_ms, "saved_launches": self.saved_launches,
            "step_ms_after": max(0.0, step_ms - self.gain_ms), "realised_ms": self.realised_ms, "realised_by": self.realised_by,
        }


def fusible(e: Event) -> bool:
    """Moves memory and multiplies no matrices; what is fused already (a custom op, whet's, the compiler's) stays by itself."""
    return e.op.startswith("aten::") and not (e.flops or e.view or e.compiled) and bool(e.outputs) and e.op not in ALONE


def short(op: str) -> str:
    """'aten::add_' -> 'add': in place or not is one op."""
    return op.removeprefix("aten::").rstrip("_")


def chains(events: list[Event]) -> list[list[Event]]:
    """Runs of fusible ops of one module and phase, each fed by one before it; views between them are looked through."""
    found: list[list[Event]] = []
    open_: list[Event] = []
    written: set[int] = set()

    def close():
        if len(open_) > 1:
            found.append(list(open_))
        open_.clear()
        written.clear()

    for e in events:
        if e.view:
            continue
        same = open_ and (e.module, e.phase) == (open_[0].module, open_[0].phase)
        if not fusible(e) or not same or not written & {t.storage for t in e.inputs}:
            close()
        if fusible(e):
            open_.append(e)
            written.update(t.storage for t in e.outputs)
    close()
    return found


def fused_bytes(chain: list[Event], events: list[Event]) -> int:
    """What one kernel would move: inputs from outside the chain, and outputs that anything after it reads."""
    made = {t.storage for e in chain for t in e.outputs}
    outside = {(t.storage, t.bytes) for e in chain for t in e.inputs if t.storage not in made}
    later = {t.storage for e in events[chain[-1].index + 1 :] for t in e.inputs}
    kept = {(t.storage, t.bytes) for e in chain for t in e.outputs if t.storage in later}
    kept = kept or {(t.storage, t.bytes) for t in chain[-1].outputs}
    return sum(size for _, size in outside | kept)


def times(run: Run) -> dict[tuple[str, str, str], float]:
    """ms of one op by (phase, module, op): what the profile holds for it, over how often the step runs it."""
    total: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for k in run.profile.kernels:
        total[k.phase, k.module, k.op] += k.us / 1e3
    often = collections.Counter((e.phase, e.module, e.op) for e in run.watched.events if not e.view)
    return {key: ms / often[key] for key, ms in total.items() if often[key]}


def launch_ms(run: Run) -> float:
    """What a launch costs the step: where the GPU idles for its launches, its share of that; else nothing."""
    p = run.profile
    return p.idle_us / 1e3 / p.launches if run.gpu and p.idle_share > IDLE and p.launches else 0.0


def what_if(run: Run) -> list[FusableChain]:
    """Chains of one kind listed together, the largest gain first."""
    known, per_launch, events = times(run), launch_ms(run), run.watched.events
    found: dict[tuple, FusableChain] = {}
    for chain in chains(events):
        ops = tuple(short(e.op) for e in chain)
        key = (pattern(chain[0].module), chain[0].phase, ops)
        now = sum(known.get((e.phase, e.module, e.op), run.floor_ms(e.bytes)) + per_launch for e in chain)
        fused = min(now, run.floor_ms(fused_bytes(chain, events)) + max(per_launch, LAUNCH_MS))
        c = found.setdefault(key, FusableChain(key[0], key[1], ops, 0, 0.0, 0.0, 0))
        c.count, c.now_ms, c.fused_ms = c.count + 1, c.now_ms + now, c.fused_ms + fused
        c.saved_launches += len(chain) - 1
    listed = [c for c in found.values() if c.gain_ms >= LEAST * run.step_ms]
    return sorted(listed, key=lambda c: -c.gain_ms)


@functools.cache
def signatures() -> dict[tuple[str, ...], str]:
    """The aten ops that each of whet's formulas runs, forward, in order -> the op that does them in one kernel."""
    from whet.diagnose.modules import Modules

    found = {}
    for name, op in discover().items():
        case = {k: min(v, 32) if type(v) is int else v for k, v in next(iter(op.shapes.values())).items()}
        try:
            args = op.inputs(dtype=DTYPES["float32"], device="cpu", **case)
            with torch.no_grad(), OpWatch(Modules(torch.nn.Module()), {}) as seen:
                op.reference(**args)
        except Exception:  # a formula that cannot be cut to this size names no chain
            continue
        found[tuple(short(e.op) for e in seen.events if fusible(e))] = name
    return found


def named(chain: FusableChain) -> str:
    """The whet op whose formula this chain is, or which its ops contain: "" where there is none."""
    given = tuple(op for op in chain.ops if op != "_to_copy")  # a change of precision inside is no other formula
    for ops, name in sorted(signatures().items(), key=lambda item: -len(item[0])):
        if len(ops) > 1 and any(given[i : i + len(ops)] == ops for i in range(len(given) - len(ops) + 1)):
            return name
    return ""


def realise(run: Run, found: list[FusableChain], limit: int = 3) -> None:
    """Beside a prediction, what an impl of whet's own gives: formula against kernel, timed at a shape of the op's own bench."""
    for chain in found[:limit]:
        chain.realised_by = named(chain)
        if not chain.realised_by or not run.gpu or chain.phase != "forward":
            continue
        op = discover()[chain.realised_by]
        args = op.inputs(dtype=torch.float32, device="cuda", **next(iter(op.shapes.values())))
        if op.why_not("triton", args):
            continue
        steps = {n: stepper(op, op.impls[n].run, args, grad=False) for n in ("eager", "triton")}
        timed = compare(steps, mode="graph", seconds=0.05)
        chain.realised_ms = chain.now_ms * (1 - timed["triton"].ms / timed["eager"].ms)
