"""Logits in float32: rows x vocabulary, copied wide from a half-precision head, and kept for the backward."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from whet.choices import current
from whet.diagnose.checks.attention_materialised import kept_bytes
from whet.diagnose.checks.misaligned_gemm import HALF, Product, product
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure, percent

LOSSES = ("aten::_log_softmax", "aten::logsumexp", "whet::cross_entropy")
VOCABULARY = 1000  # classes: fewer make no logits worth a thought
WIDE = 8  # times the width of what the head reads: so much wider is a vocabulary, whatever comes after it
LEAST_BYTES = 64 << 20  # of half-precision logits made float32; smaller ones are read back from a GPU's cache
LEAST_FLOAT_BYTES = 256 << 20  # of logits that are float32 by nature: only a fused loss would spare them
LEAST_ON_CPU, OF_KEPT = 1 << 20, 0.5  # a small copy of a model, run on a CPU: what is most of its memory there is so anywhere
LEAST, LEAST_KEPT = 0.01, 0.1  # share of the step's time or of the memory it keeps, one of which a GPU's finding must reach


@dataclasses.dataclass
class Logits:
    head: Event  # the product that made them
    widened: Event | None  # the op that made them float32; None where the product did
    out: Seen
    name: str  # the head's weight

    def same_size(self, t: Seen) -> bool:
        """As wide, and as long but for a few rows: labels are often shifted by one."""
        return t.shape[-1:] == self.out.shape[-1:] and self.out.numel / 2 < t.numel <= self.out.numel

    @property
    def bytes(self) -> int:
        return 4 * self.out.numel


def heads(events: list[Event]) -> list[tuple[Event, str]]:
    """Products as wide as a vocabulary, with the name of their weight: far wider than what they read, or the last."""
    found: list[tuple[Product, str]] = []
    names: dict[int, str] = {}  # storage of a cast -> the parameter it was cast from
    for e in events:
        if e.op == "aten::_to_copy" and e.inputs[0].name:
            names[e.outputs[0].storage] = e.inputs[0].name
        p = product(e) if e.phase == "forward" else None
        if p is not None and len(p.b.shape) == 2:
            found.append((p, p.b.name or names.get(p.b.storage, "")))
    last = found[-1][0] if found else None
    wide = [(p, name) for p, name in found if name and p.sizes[2] >= VOCABULARY]
    return [(p.event, name) for p, name in wide if p.sizes[2] >= WIDE * p.sizes[1] or p is last]


def logits(run: Run) -> list[Logits]:
    """The float32 logits of the step, but for those that whet's own loss makes where it has no kernel to run."""
    events, found = run.watched.events, []
    half = any(p.dtype in HALF for p in run.target.model.parameters())
    for head, name in heads(events):
        made = Logits(head, None, head.outputs[0], name)
        after = [e for e in events[head.index + 1 :] if e.phase == "forward" and e.inputs and made.same_size(e.inputs[0])]
        if not any(e.op in LOSSES for e in after):
            continue
        widened = next((e for e in after if widens(e)), None)
        if widened is not None and not made_by_whet(events, head, widened):
            found.append(dataclasses.replace(made, widened=widened))
        elif made.out.dtype == torch.float32:
            least = LEAST_BYTES if half else LEAST_FLOAT_BYTES
            if made.bytes >= least and not made_by_whet(events, head, after[-1]):
                found.append(made)
    return found


def widens(e: Event) -> bool:
    casts = e.op in ("aten::_to_copy", "aten::_log_softmax", "aten::_softmax")
    return casts and e.inputs[0].dtype in HALF and e.outputs[0].dtype == torch.float32


def made_by_whet(events: list[Event], head: Event, until: Event) -> bool:
    """Whether whet's stock formula made them: it asks for the wider dtype first, on the line that multiplies."""
    between = events[head.index : until.index]
    return any(e.op == "aten::promote_types" and e.line == head.line for e in between)


def large(run: Run, found: Logits) -> bool:
    kept = sum(run.watched.kept.values())
    if found.bytes >= LEAST_BYTES:
        return True
    return not run.gpu and found.bytes >= max(LEAST_ON_CPU, OF_KEPT * kept)


def traffic(run: Run, found: Logits) -> tuple[int, int]:
    """(bytes moved by ops that only read and write logits, tensors of their size that are float32)."""
    moved, made = 0, 0
    for e in run.watched.events:
        if e.view or e.flops or e.phase == "optimizer":
            continue
        moved += sum(t.bytes for t in (*e.inputs, *e.outputs) if t.shape and found.same_size(t))
        made += sum(t.dtype == torch.float32 for t in e.outputs if t.shape and found.same_size(t))
    return moved, made


def find(run: Run):
    for found in logits(run):
        if not large(run, found):
            continue
        moved, made = traffic(run, found)
        cost = run.floor_ms(max(0, moved - found.bytes))  # once written and once read in half precision is float32's bytes once
        kept = kept_bytes(run.watched.events, lambda t, f=found: t.dtype == torch.float32 and f.same_size(t))  # type: ignore[misc]
        share = kept / max(1, sum(run.watched.kept.values()))
        if run.gpu and cost < LEAST * run.step_ms and share < LEAST_KEPT:
            continue
        yield finding(run, found, cost, made, kept)


def finding(run: Run, found: Logits, cost: float, made: int, kept: int) -> Finding:
    rows, vocab = found.out.numel // found.out.shape[-1], found.out.shape[-1]
    at, kept_share = found.widened or found.head, kept / max(1, sum(run.watched.kept.values()))
    was = str(at.inputs[0].dtype).removeprefix("torch.")
    how = f"{at.op} makes float32 of {was}" if found.widened else f"{at.op} in float32"
    mib = found.bytes / 2**20
    return Finding(
        "logits_fp32",
        f"the logits of {found.name}, {rows} x {vocab}, are held in float32: {figure(mib)} MiB, {made} times over",
        [
            f"{at.line or 'the forward'} in {at.module or 'the model itself'}: {how}",
            f"{figure(kept / 2**20)} MiB of them kept for the backward, {percent(kept_share)} of all that is kept",
            f"a loss in chunks of rows spares all {made}; cost: their bytes over this machine's copy rate",
        ],
        f"Take the loss with whet.ops.linear_cross_entropy(hidden, {found.name}, labels), or in chunks under checkpoint",
        cost, cost, module=at.module, line=at.line,
    )


class LogitsExample(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused, self.embed, self.lm_head = fused, nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        if self.fused:
            return current().linear_cross_entropy(h, self.lm_head.weight, tokens)
        return F.cross_entropy(self.lm_head(h).float().flatten(0, 1), tokens.flatten())


def example(fused: bool) -> Target:
    torch.manual_seed(0)
    return target_of("example", (LogitsExample(fused).bfloat16(), torch.randint(4096, (4, 64))))


CHECK = Check(
    "logits_fp32", "logits in float32", find, lambda: example(False), lambda: example(True), kinds=("train",)
)
