"""The host waits for the GPU inside the step: a value is read, or a shape depends on values, so the launch queue runs dry."""

import collections
import dataclasses

import torch
from torch import nn

from whet.diagnose.profile import Profile, on_cpu
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Watched
from whet.figures import figure

LEAST = 0.01  # share of the step that the waits must cost on a GPU to be reported
MASKS = (torch.bool, torch.uint8)
READ, SIZED, MASKED, COPIED = "a value is read", "a shape depends on values", "a mask indexes", "a tensor goes to the CPU"
OPS = {
    "aten::_local_scalar_dense": READ, "aten::equal": READ, "aten::nonzero": SIZED, "aten::masked_select": MASKED,
    "aten::_unique": SIZED, "aten::_unique2": SIZED, "aten::unique_dim": SIZED, "aten::unique_consecutive": SIZED,
    "aten::unique_dim_consecutive": SIZED, "aten::bincount": SIZED,
}
FIXES = {
    READ: "Keep the value on the GPU: torch.where in place of an if, arithmetic in place of .item(); read it after the step",
    MASKED: "Replace the mask's indexing by torch.where or a product with the mask: shapes then do not depend on values",
    SIZED: "Give the result a fixed size (three-argument torch.where, nonzero_static, output_size=) or move it out of the step",
    COPIED: "Leave the tensor on the GPU, or copy it with non_blocking=True and read it after the step",
}


def wait_of(e: Event, gpu: bool) -> str:
    """Why this op makes the host wait for a GPU, or nothing. On a CPU: why it would."""
    if gpu and not (e.inputs and e.inputs[0].device == "cuda"):
        return copied(e)
    if e.op in OPS:
        return OPS[e.op]
    if e.op == "aten::index" and any(t.dtype in MASKS for t in e.inputs[1:]):
        return MASKED
    if e.op in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return MASKED if any(t.dtype in MASKS for t in e.inputs[1:-1]) and not fills(e) else ""
    if e.op == "aten::repeat_interleave" and len(e.inputs) == 1 and not any(type(a) is int for a in e.args):
        return SIZED
    return copied(e)


def fills(e: Event) -> bool:
    """One value from the CPU for all that the mask picks: torch fills, without asking how many they are."""
    return e.inputs[-1].numel == 1 and e.inputs[-1].device == "cpu" and not any(a is True for a in e.args)


def copied(e: Event) -> str:
    """A copy from the GPU that is waited for: all but those with non_blocking=True."""
    to, source = (e.outputs[:1], e.inputs[:1]) if e.op == "aten::_to_copy" else (e.inputs[:1], e.inputs[1:2])
    blocking = e.op in ("aten::_to_copy", "aten::copy_") and not any(a is True for a in e.args)
    return COPIED if blocking and [t.device for t in (*source, *to)] == ["cuda", "cpu"] else ""


def constants(events: list[Event]) -> set[int]:
    """Ops that read only what was made in the step from no tensor: such values live on the CPU on any machine."""
    made: dict[int, bool] = {}  # storage -> whether it follows from what the step was given
    found = set()
    for e in events:
        given = e.op != "aten::lift_fresh" and any(made.get(t.storage, True) for t in e.inputs)
        if not given:
            found.add(e.index)
        for t in e.outputs:
            made[t.storage] = given
    return found


def one_hots(events: list[Event]) -> set[int]:
    """Reads that only the CPU's one_hot makes, to check its classes: the extremes of what is then scattered on that line."""
    found = set()
    for i, e in enumerate(events):
        if e.op not in ("aten::aminmax", "aten::min", "aten::max") or e.inputs[0].dtype != torch.int64:
            continue
        after = [a for a in events[i + 1 : i + 12] if a.line == e.line]
        if any(a.op == "aten::scatter_" and a.inputs[1].storage == e.inputs[0].storage for a in after):
            results = {t.storage for t in e.outputs}
            found |= {a.index for a in after if a.op == "aten::_local_scalar_dense" and a.inputs[0].storage in results}
    return found


def counters(events: list[Event]) -> set[int]:
    """Reads of a number just counted up by one: an optimizer's steps, which torch keeps on the CPU."""
    found: set[int] = set()
    counted: set[int] = set()
    for e in events:
        if e.op == "aten::_local_scalar_dense" and e.inputs[0].storage in counted:
            found.add(e.index)
        counted -= {t.storage for t in e.outputs if not e.view}
        if e.op in ("aten::add_", "aten::_foreach_add_") and 1 in e.args:
            counted |= {t.storage for t in e.inputs if not t.shape}
    return found


@dataclasses.dataclass
class Waits:
    """The waits of one source line; those of a backward belong to the line whose module they are in."""

    line: str
    modules: set[str] = dataclasses.field(default_factory=set)
    events: list[tuple[str, Event]] = dataclasses.field(default_factory=list)

    @property
    def whys(self) -> list[str]:
        return list(dict.fromkeys(why for why, _ in self.events))

    @property
    def place(self) -> str:
        where = sorted(pattern(m) or "the model itself" for m in self.modules)
        return f"{self.line or 'the backward'} in {', '.join(dict.fromkeys(where))}"


def waits(watched: Watched, gpu: bool) -> list[Waits]:
    """Every wait of the forward and backward, by line. An optimizer's reads are of its own counters, kept on the CPU."""
    aside = set() if gpu else constants(watched.events) | one_hots(watched.events) | counters(watched.events)
    found: dict[str, Waits] = {}
    for e in watched.events:
        why = wait_of(e, gpu) if e.phase != "optimizer" else ""
        if not why or (e.index in aside and why == READ):
            continue
        near = [w for w in found.values() if pattern(e.module) in map(pattern, w.modules)]
        key = near[0].line if e.phase == "backward" and near else e.line
        group = found.setdefault(key, Waits(key))
        group.modules.add(e.module)
        group.events.append((why, e))
    return list(found.values())


def idle_after(ends: list[float], starts: list[float]) -> float:
    """How long the GPU idles after waits that end at these times until a kernel starts; the last wait is followed by none."""
    starts = sorted(starts)
    idle, reached = 0.0, float("-inf")
    for end in sorted(ends):
        next_start = next((s for s in starts if s >= end), None)
        if next_start is not None and next_start > reached:
            idle += next_start - max(end, reached)
            reached = next_start
    return idle


def waited_us(profile: Profile) -> float:
    """GPU idle time that follows the host's waits, from the profiler's trace; no more than the step idles in all."""
    if not profile.syncs or profile.trace is None:
        return 0.0
    events = profile.trace.profiler.kineto_results.events()  # type: ignore[attr-defined]
    ends = [e.start_ns() / 1e3 + e.duration_ns() / 1e3 for e in events if on_cpu(e) and e.name().endswith("Synchronize")]
    launched = [e.start_ns() / 1e3 for e in events if not on_cpu(e) and not getattr(e, "is_user_annotation", bool)()]
    return min(profile.idle_us, idle_after(ends, launched))


def find(run: Run):
    found = waits(run.watched, run.gpu)
    if not found:
        return
    cost = waited_us(run.profile) / 1e3 if run.gpu else None
    if cost is not None and cost < LEAST * run.step_ms:
        return
    total = sum(len(w.events) for w in found)
    for w in found:
        mine = None if cost is None else cost * len(w.events) / total
        ops = collections.Counter(f"{e.op} {e.phase}" for _, e in w.events)
        seen = [f"{w.line or 'backward'}: {op}, {n} a step, of {on(w, op)}" for op, n in ops.items()]
        idle = "on a CPU nothing waits, so its cost is not known here" if cost is None else (
            f"the GPU idles {figure(cost)} ms{run.share(cost)} after {run.profile.syncs} waits"
        )
        yield Finding(
            "host_syncs", f"the host waits for the GPU {times(len(w.events))} a step at {w.place}: {', '.join(w.whys)}"
            + ("" if run.gpu else " (on a GPU)"),
            [*seen, idle], fix_of(w), mine, mine, module=w.events[0][1].module, line=w.line,
        )


def fix_of(w: Waits) -> str:
    first, *others = (FIXES[why] for why in w.whys)
    return "; ".join([first, *(fix[0].lower() + fix[1:] for fix in others)])


def on(w: Waits, op: str) -> str:
    return str(next(e.inputs[0] for _, e in w.events if f"{e.op} {e.phase}" == op and e.inputs))


def times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


class Masked(nn.Module):
    """A mean over positive values: by picking them, which needs their number, or by weights."""

    def __init__(self, picks: bool):
        super().__init__()
        self.picks, self.linear = picks, nn.Linear(64, 64)

    def forward(self, x):
        h = self.linear(x)
        mask = x > 0
        if self.picks:
            return h[mask].square().mean() if mask.any() else h.sum()
        return torch.where(mask, h, 0.0).square().sum() / mask.sum().clamp(min=1)


def example(picks: bool) -> Target:
    torch.manual_seed(0)
    return target_of("example", (Masked(picks), torch.randn(8, 64)))


CHECK = Check(
    "host_syncs", "the host waiting for the GPU inside the step", find, lambda: example(True), lambda: example(False)
)
