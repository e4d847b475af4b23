"""Who holds the memory at its highest: parameters, gradients, the optimizer, and what each module keeps for the backward.

No fault by itself: reported only where the device is nearly full.
"""

import torch
from torch import nn

from whet.diagnose.modules import tensors_in
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Watched, restored
from whet.figures import figure, percent

FULL = 0.90  # of the device: beyond it the allocator begins to give memory back and ask again, and a longer batch fails
MAX_KEPT = 0.60  # of the device, kept for the backward alone, while
TIMES = 2.0  # it is this much larger than parameters and optimizer state: the part that checkpointing gives back
KEPT = "kept by "


def group(path: str) -> str:
    """The block that a module belongs to: "layers.3.mlp.up" -> "layers.*"."""
    starred = pattern(path)
    return starred[: starred.index("*") + 1] if "*" in starred else starred or "the model"


def kept(watched: Watched) -> dict[str, int]:
    """Bytes kept for the backward by group of modules; log-probabilities of a loss apart, as "logits"."""
    found = dict(watched.kept)
    logits = 0
    for e in watched.of("aten::_log_softmax", phase="forward"):
        bytes_ = min(e.outputs[0].bytes, found.get(e.module, 0))
        found[e.module] = found.get(e.module, 0) - bytes_
        logits += bytes_
    groups: dict[str, int] = {"logits": logits}
    for path, bytes_ in found.items():
        groups[KEPT + group(path)] = groups.get(KEPT + group(path), 0) + bytes_
    return groups


def state_bytes(target: Target) -> int:
    """The optimizer's state once it has made a step."""
    if target.optimizer is None:
        return 0
    if not target.optimizer.state:
        with restored(target):
            target.step()
            return nbytes(tensors_in(list(target.optimizer.state.values())))
    return nbytes(tensors_in(list(target.optimizer.state.values())))


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def owners(run: Run) -> dict[str, int]:
    """Owner -> bytes, the largest first; on a GPU with what is left of the measured peak, as "workspace".

    Each owner at its own highest: gradients grow while what is kept shrinks, so the sum can pass the peak.
    """
    target = run.target
    trains = target.kind == "train"
    found = {
        "parameters": nbytes(target.model.parameters()), "buffers": nbytes(target.model.buffers()),
        "inputs": nbytes(tensors_in((target.args, target.kwargs))),
        "gradients": nbytes(p for p in target.model.parameters() if p.requires_grad) if trains else 0,
        "optimizer state": state_bytes(target) if trains else 0,
    }
    found |= kept(run.watched)
    if run.gpu:
        found["workspace"] = max(0, peak_bytes(target) - sum(found.values()))
    return dict(sorted(((name, n) for name, n in found.items() if n), key=lambda item: -item[1]))


def peak_bytes(target: Target) -> int:
    """The most that was allocated on the GPU at once during a step, all that was there before included."""
    state = tensors_in(list(target.optimizer.state.values())) if target.optimizer else ()
    copies = nbytes((*target.model.parameters(), *target.model.buffers(), *state))  # `restored` holds them during the step
    with restored(target):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        target.step()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - copies)


def kept_bytes(held: dict[str, int]) -> int:
    return held.get("logits", 0) + sum(n for name, n in held.items() if name.startswith(KEPT))


def verdict(held: dict[str, int], peak: int, memory: int) -> str | None:
    """"kept": what is kept for the backward fills the device for no need; "full": the device is full; None: neither."""
    fixed = held.get("parameters", 0) + held.get("optimizer state", 0)
    if kept_bytes(held) > TIMES * fixed and kept_bytes(held) >= MAX_KEPT * memory:
        return "kept"
    return "full" if peak >= FULL * memory else None


def advice(held: dict[str, int]) -> str:
    largest = max((n for n in held if n != "workspace"), key=lambda n: held[n], default="")
    if largest == "logits":
        return "Take the loss in chunks with whet.ops.linear_cross_entropy, which never holds the logits of all tokens"
    if largest.startswith(KEPT):
        name = largest.removeprefix(KEPT)
        return f"Run {name} through torch.utils.checkpoint.checkpoint: what it keeps is computed again in the backward"
    if largest == "optimizer state":
        return "Shard the optimizer's state over GPUs, or take an optimizer that keeps less than two moments in float32"
    return "Hold parameters and gradients in bfloat16, shard them over GPUs, or make the batch smaller"


def gib(n: int) -> str:
    return f"{figure(n / 2**30)} GiB"


def judged(held: dict[str, int], peak: int, memory: int):
    reason = verdict(held, peak, memory)
    if reason is None:
        return
    first = f"the step takes {gib(peak)} of the GPU's {gib(memory)}" if reason == "full" else (
        f"the forward keeps {gib(kept_bytes(held))} for the backward, {percent(kept_bytes(held) / memory)} of the GPU"
    )
    largest = max((n for n in held if n.startswith(KEPT)), key=lambda n: held[n], default="")
    yield Finding(
        "peak_memory", f"{first}; most of it is {next(iter(held), 'unknown')}",
        [f"peak {gib(peak)} of {gib(memory)}", *(f"{name}: {gib(n)}" for name, n in list(held.items())[:6])],
        fix=advice(held), module=largest.removeprefix(KEPT),
    )


def find(run: Run):
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    yield from judged(owners(run), peak_bytes(run.target), memory)


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.sin(x * self.scale)


class MemoryExample(nn.Module):
    """Each block keeps two tensors of the input's size."""

    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Sine() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean()


def example(share: float) -> Target:
    """A step that keeps this share of the GPU's memory for its backward."""
    blocks, memory = 16, torch.cuda.get_device_properties(0).total_memory
    elements = int(share * memory / (2 * blocks * 4))
    return target_of("example", (MemoryExample(blocks).cuda(), torch.ones(elements, device="cuda")))


CHECK = Check("peak_memory", "a device that is nearly full", find, lambda: example(0.66), lambda: example(0.2), gpu=True)
