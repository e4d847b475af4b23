"""Copies that change nothing but the layout, where the reader would have taken the tensor as it lay.

A copy is reported only with a reason why it can be left out: what is repeated could be broadcast, the reader takes strides, the
same was copied before, or the copy is itself copied. The one copy that merges the heads after attention has no such reason.
"""

import collections
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import IDLE, pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure, percent
from whet.machine import this_machine

OF_STEP = 0.01  # of the step's time, under which nothing is reported on a GPU; a CPU's times say nothing about one
OF_BYTES = 0.01  # of what the forward moves: grouped heads written out in a Llama are 2 to 6% of it, with fused ops and without
PLAIN = 0.15  # of both, for a copy with only its size against it: a windowed transformer's permutations are under a tenth
COPIERS = ("aten::clone", "aten::_to_copy", "aten::repeat")  # copy_ writes into memory that the user set aside
ATTENTION = re.compile(r"scaled_dot_product|attention|flash_attn")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
BATCHED = ("aten::bmm", "aten::baddbmm")

FIXES = {
    "repeated": "Hand over the expanded view: an elementwise op broadcasts, a product takes the repeated dimension as rows",
    "heads": "Pass the few heads as they are: scaled_dot_product_attention(q, k, v, enable_gqa=True) or whet.ops.attention",
    "strides": "Drop the .contiguous(): attention takes any strides as long as the last dimension lies together",
    "twice": "Copy it once and keep the result",
    "again": "Leave out the first copy: make the layout that is read at once",
    "transposed": "Drop the .contiguous(): a matrix product takes a transposed operand",
    "large": "Keep the tensor in the layout that its reader wants, from the op that makes it",
}
DOES = {
    "repeated": "is expanded and then written out {repeats} times over",
    "heads": "is expanded and then written out {repeats} times over for attention, which takes grouped heads",
    "strides": "is made contiguous for attention, which takes strides",
    "twice": "is copied to the same layout more than once",
    "again": "is copied, and the copy copied again",
    "transposed": "is transposed in memory for a matrix product, which takes transposed operands",
    "large": "is copied to another layout",
}


@dataclass
class Copy:
    event: Event
    before: Event | None  # the op that wrote what is copied
    readers: list[tuple[Event, Seen]] = field(default_factory=list)
    written: bool = False  # something writes into the copy, so it is one with a purpose

    @property
    def source(self) -> Seen:
        return self.event.inputs[0]

    @property
    def result(self) -> Seen:
        return self.event.outputs[0]

    @property
    def read_bytes(self) -> int:
        """What lies in memory of the source: an expanded dimension is there once."""
        there = 1
        for size, stride in zip(self.source.shape, self.source.strides):
            there *= size if stride else 1
        return there * self.source.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.result.bytes

    @property
    def repeats(self) -> int:
        return self.result.bytes // max(1, self.read_bytes)

    @property
    def lays_out(self) -> bool:
        """Whether the layout is all that changes."""
        a, b = self.source, self.result
        return (a.dtype, a.device) == (b.dtype, b.device) and (a.shape, a.strides) != (b.shape, b.strides)

    def read_only_by(self, *ops: str) -> bool:
        return bool(self.readers) and all(e.op in ops for e, _ in self.readers)

    @property
    def for_attention(self) -> bool:
        return bool(self.readers) and all(ATTENTION.search(e.op) for e, _ in self.readers)

    @property
    def inside(self) -> bool:
        """Made within the product that reads it, by torch: the user did not ask for it."""
        return any(e.line == self.event.line and e.op in PRODUCTS for e, _ in self.readers)


def copies_in(events: list[Event]) -> list[Copy]:
    """Every copy of the forward with what made its source and what reads its result, views looked through."""
    wrote: dict[int, Event] = {}
    by_event: dict[int, Copy] = {}
    for e in (e for e in events if e.phase == "forward"):
        if e.view:
            continue
        for seen in e.inputs:
            at = wrote.get(seen.storage)
            if at is not None and at.index in by_event:
                by_event[at.index].readers.append((e, seen))
                by_event[at.index].written |= any(o.storage == seen.storage for o in e.outputs)
        if e.op in COPIERS and not e.compiled and len(e.outputs) == 1 and e.inputs and e.outputs[0].dtype.is_floating_point:
            by_event[e.index] = Copy(e, wrote.get(e.inputs[0].storage))
        for seen in e.outputs:
            wrote[seen.storage] = e
    return [c for c in by_event.values() if c.lays_out and not c.written]


def kind_of(copy: Copy, made: dict[int, Copy], seen: set[tuple], softmaxes: set[tuple[str, str]]) -> str | None:
    """Why this copy can be left out, or None. `seen`: what was copied before; `softmaxes`: modules and lines that have one."""
    source, result = copy.source, copy.result
    index = copy.before.index if copy.before else -1
    key = (index, source.storage, source.offset, source.shape, source.strides, result.strides)
    before = copy.before is not None and key in seen
    seen.add(key)
    if copy.inside or not copy.for_attention and (copy.event.module, copy.event.line) in softmaxes:
        return None  # made within a product, or within attention that torch spells out, not by the user
    if copy.repeats > 1:
        attends = copy.for_attention or len(source.shape) > 3 and copy.event.module in {m for m, _ in softmaxes}
        return "heads" if attends else "repeated"
    if before:
        return "twice"
    first = made.get(copy.before.index) if copy.before else None
    if first is not None and all(e.index == copy.event.index for e, _ in first.readers):
        return "again"
    if copy.for_attention and all(lies_together(source, read.shape[-1]) for _, read in copy.readers):
        return "strides"
    if copy.read_only_by(*PRODUCTS) and taken_transposed(copy):
        return "transposed"
    heads = copy.before is not None and (copy.before.op in BATCHED or ATTENTION.search(copy.before.op))
    taken = any(e.op in (*PRODUCTS, *COPIERS) or ATTENTION.search(e.op) for e, _ in copy.readers)
    return "large" if not heads and not taken and not source.contiguous else None


def lies_together(source: Seen, head: int) -> bool:
    """Whether a dimension of this size is the innermost: attention's last, wherever a view has put it."""
    return any(stride == 1 and size == head for size, stride in zip(source.shape, source.strides))


def taken_transposed(copy: Copy) -> bool:
    """Two or three dimensions, the last two of them swapped in memory, read in this shape or swapped back."""
    source = copy.source
    if len(source.shape) not in (2, 3) or source.strides[-2] != 1 or source.contiguous:
        return False
    swapped = (*source.shape[:-2], source.shape[-1], source.shape[-2])
    return all(seen.shape in (source.shape, swapped) for _, seen in copy.readers)


def measured_us(run: Run, module: str) -> dict[int, float]:
    """Event index -> measured time of the module's copies: one by one where the profile has as many as the watched step.

    Else their mean: kernels copy what they cannot take as it lies, and no op shows those.
    """
    asked = [e for e in run.watched.events if e.phase == "forward" and e.module == module and not e.view]
    asked = [e for e in asked if e.op in (*COPIERS, "aten::copy_")]
    ran = [k.us for k in run.profile.kernels if k.phase == "forward" and k.module == module and k.op == "aten::copy_"]
    if len(asked) == len(ran):
        return {e.index: us for e, us in zip(asked, ran)}
    return {e.index: sum(ran) / len(ran) for e in asked} if ran else {}


def all_copies_ms(run: Run, module: str) -> float:
    """Every copy kernel in modules of this kind, the backward's and those inside other ops too."""
    return sum(k.us for k in run.profile.kernels if k.op == "aten::copy_" and pattern(k.module) == module) / 1e3


def cost(run: Run, group: list[Copy]) -> tuple[float, bool]:
    """(ms, whether measured): by the profile on a GPU, launches included, else by the bytes over the ceiling."""
    times: dict[int, float] = {}
    for module in {c.event.module for c in group} if run.gpu else ():
        times |= measured_us(run, module)
    measured = bool(times) and all(c.event.index in times for c in group)
    ms = sum(times[c.event.index] for c in group) / 1e3 if measured else run.floor_ms(sum(c.bytes for c in group))
    if run.gpu and run.profile.idle_share > IDLE:  # the step waits for launches, and each copy is one
        return ms + len(group) * run.profile.idle_us / max(1, run.profile.launches) / 1e3, False
    return ms, measured


def find(run: Run):
    found = copies_in(run.watched.events)
    forward = [e for e in run.watched.events if e.phase == "forward"]
    softmaxes = {(e.module, e.line) for e in forward if e.op in SOFTMAX}
    made, seen = {c.event.index: c for c in found}, set()  # type: ignore[var-annotated]
    groups: dict[tuple[str, str], list[Copy]] = collections.defaultdict(list)
    for copy in found:
        if kind := kind_of(copy, made, seen, softmaxes):
            groups[kind, pattern(copy.event.module)].append(copy)
    moved = sum(e.bytes for e in forward)
    for (kind, module), group in groups.items():
        least_bytes, least_time = (PLAIN, PLAIN) if kind == "large" else (OF_BYTES, OF_STEP)
        bytes_ = sum(c.bytes for c in group)
        if bytes_ < least_bytes * moved:
            continue
        ms, measured = cost(run, group)
        if not run.gpu or ms >= least_time * run.step_ms:
            yield finding(run, kind, module, group, ms, measured, bytes_ / moved)


def finding(run: Run, kind: str, module: str, group: list[Copy], ms: float, measured: bool, share: float) -> Finding:
    first = max(group, key=lambda c: c.bytes)
    lines = ", ".join(dict.fromkeys(c.event.line for c in group if c.event.line))
    readers = dict.fromkeys(f"{e.op}" + (f" at {e.line}" if e.line else "") for e, _ in first.readers)
    size = sum(c.bytes for c in group) / 1e6
    took = f"{figure(ms)} ms{run.share(ms)}" if run.gpu else f"at least {figure(ms, 2)} ms at this machine's copy rate"
    evidence = [
        f"{len(group)} a step in {module or 'the model itself'}, {lines}: {first.source} -> {first.result}",
        f"{size:.1f} MB read and written, {percent(share)} of what the forward moves; {took}",
        *([f"read by {', '.join(list(readers)[:3])}"] if readers else []),
    ]
    if run.gpu and (whole := all_copies_ms(run, module)) > 1.5 * ms:
        evidence.append(f"all copies there, in the backward and inside other ops too: {figure(whole)} ms{run.share(whole)}")
    if back := sums_back(run, group):
        evidence.append(f"the backward sums the repeated gradients: {back / 1e6:.1f} MB more, not counted in the cost")
    count = "1 copy" if len(group) == 1 else f"{len(group)} copies"
    does = DOES[kind].format(repeats=first.repeats)
    shown = f"{first.source.name or 'tensor'} {str(first.source.dtype).removeprefix('torch.')}{list(first.source.shape)}"
    return Finding(
        "copies", f"{shown} in {module or 'the model itself'} ({lines}) {does}: {count} a step", evidence,
        FIXES[kind], cost_ms=ms, gain_ms=ms, measured=measured, module=first.event.module, line=first.event.line,
    )


def sums_back(run: Run, group: list[Copy]) -> int:
    """Bytes of the backward's sums over what was repeated."""
    sizes = {(c.event.module, c.result.numel, c.result.numel // c.repeats) for c in group if c.repeats > 1}
    sums = run.watched.of("aten::sum", phase="backward")
    return sum(e.bytes for e in sums if (e.module, e.inputs[0].numel, e.outputs[0].numel) in sizes)


class Grouped(nn.Module):
    """Attention with 16 heads over 2 of keys and values, these written out or not."""

    def __init__(self, written_out: bool):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 512), nn.Linear(32, 128), nn.Linear(512, 32)
        self.written_out = written_out

    def forward(self, x):
        (B, S, _), kv = x.shape, self.kv(x)
        q = self.q(x).view(B, S, 16, 32).transpose(1, 2)
        k, v = kv.view(B, S, 2, 2, 32).permute(2, 0, 3, 1, 4)
        if self.written_out:
            k, v = (t.unsqueeze(2).expand(B, 2, 8, S, 32).reshape(B, 16, S, 32) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=not self.written_out)
        return x + self.o(out.transpose(1, 2).reshape(B, S, 512))


class CopiesExample(nn.Module):
    def __init__(self, written_out: bool):
        super().__init__()
        self.layers = nn.ModuleList(Grouped(written_out) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def example(written_out: bool) -> Target:
    torch.manual_seed(0)
    device = this_machine().device
    dtype, batch = (torch.bfloat16, 1024) if device == "cuda" else (torch.float32, 4)  # large enough to be seen in a step
    x = torch.randn(batch, 64, 32, device=device, dtype=dtype)
    return target_of("example", (CopiesExample(written_out).to(device, dtype), x))


CHECK = Check("copies", "copies that only change the layout", find, lambda: example(True), lambda: example(False))
