"""Tensors that are built on the CPU and copied to the GPU again in every layer: masks, positions, tables."""

import collections
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure

TIMES = 2  # a step: one copy may be the batch's
LARGE = 0.01  # of the step, for what is copied once


@dataclass
class Upload:
    """Copies of one line of the user's code in modules of one kind."""

    module: str  # pattern
    line: str
    events: list[Event] = field(default_factory=list)
    built: str = ""  # the line that last wrote what is copied, where that was in the step

    @property
    def tensor(self) -> Seen:
        return max((source_of(e) for e in self.events), key=lambda t: t.bytes)

    @property
    def bytes(self) -> int:
        return sum(source_of(e).bytes for e in self.events)


def source_of(e: Event) -> Seen:
    return e.inputs[1] if e.op == "aten::copy_" else e.inputs[0]


def is_upload(e: Event, device: str) -> bool:
    """A copy of more than one value from the CPU to the device."""
    if e.phase != "forward" or e.op not in ("aten::_to_copy", "aten::copy_") or len(e.inputs) < 1 + (e.op == "aten::copy_"):
        return False
    to = e.inputs[0] if e.op == "aten::copy_" else e.outputs[0]
    return source_of(e).device == "cpu" and to.device == device and source_of(e).numel > 1


def uploads(events: list[Event], device: str) -> list[Upload]:
    """Every copy of the forward from the CPU to the device, by line and kind of module; the most bytes first."""
    found: dict[tuple[str, str], Upload] = collections.defaultdict(lambda: Upload("", ""))
    wrote: dict[int, str] = {}  # storage -> the line that last wrote it
    for e in events:
        if is_upload(e, device):
            up = found[pattern(e.module), e.line]
            up.module, up.line = pattern(e.module), e.line
            up.events.append(e)
            up.built = up.built or wrote.get(source_of(e).storage, "")
        if not e.view:
            wrote |= {t.storage: e.line or "an unknown line" for t in e.outputs if t.device == "cpu"}
    return sorted(found.values(), key=lambda u: -u.bytes)


def copy_ms(run: Run, up: Upload) -> float:
    """What the copies to the GPU take in modules of this kind, by the profile."""
    copies = [k for k in run.profile.kernels if "HtoD" in k.name and k.phase == "forward" and pattern(k.module) == up.module]
    return sum(k.us for k in copies) / 1e3


def finding(up: Upload, cost: float | None, share: str = "") -> Finding:
    shown, times = f"{str(up.tensor.dtype).removeprefix('torch.')}{list(up.tensor.shape)}", len(up.events)
    what = f"a mask, {shown}," if up.tensor.dtype == torch.bool else shown
    where, at = up.module or "the model itself", f" at {up.line}" if up.line else ""
    made = "is built on the CPU" if up.built else "lies on the CPU"
    often = "once a step" if times == 1 else f"{times} times a step"
    took = [] if cost is None else [f"the copies take {figure(cost)} ms{share}; the host waits for each"]
    built = [f"it is built at {up.built}"] if up.built else []
    return Finding(
        "uploads", f"{what} {made} and copied to the GPU in {where}{at}, {often}",
        [f"{figure(up.bytes / 2**20)} MiB go to the GPU in {times} copies a step", *built, *took],
        "Build it on the GPU with device=x.device, once for all layers, or keep it as a buffer (register_buffer); for a "
        "causal mask use is_causal=True of scaled_dot_product_attention",
        cost_ms=cost, gain_ms=cost, measured=cost is not None, module=up.events[0].module, line=up.line,
    )


def find(run: Run):
    for up in uploads(run.watched.events, run.target.device):
        cost = copy_ms(run, up)
        if len(up.events) >= TIMES or cost >= LARGE * run.step_ms:
            yield finding(up, cost, run.share(cost))


class Causal(nn.Module):
    """Attention with a mask that is made on the CPU, or where x is."""

    def __init__(self, on_cpu: bool):
        super().__init__()
        self.qkv, self.on_cpu = nn.Linear(64, 192), on_cpu

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu" if self.on_cpu else x.device)
        mask = ones.tril().to(x.device)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class UploadsExample(nn.Module):
    def __init__(self, on_cpu: bool):
        super().__init__()
        self.layers = nn.ModuleList(Causal(on_cpu) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def example(on_cpu: bool, device: str = "cuda") -> Target:
    return target_of("example", (UploadsExample(on_cpu).to(device), torch.randn(2, 256, 64, device=device)))


CHECK = Check(
    "uploads", "tensors copied from the CPU in every layer", find, lambda: example(True), lambda: example(False), gpu=True
)
