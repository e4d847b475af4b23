"""A step that fits a given memory: as few of the repeated blocks as need be keep no activations and compute them again."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.choices import Choices
from whet.judge import Verdict
from whet.measure import free_memory, race
from whet.swap import Edit, Journal, Met, Site
from whet.swap._replace import cut, quiet, uncached

if TYPE_CHECKING:
    from whet.swap._optimize import Optimized

KIND = "checkpoint"
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
KEPT, AGAIN = "kept", "computed again"
Around = Callable[[], contextlib.AbstractContextManager]


def bytes_of(value: int | str) -> int:
    """What max_memory says, in bytes: 40 * 2**30, or "40GiB"."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", value)):
        number = float(found[1]) * UNITS.get(found[2].lower(), 0)
    else:
        number = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if number < 1:
        raise ValueError(f"optimize: max_memory must be bytes above 0 or a size such as '40GiB' or '512MiB', got {value!r}")
    return int(number)


def gib(size: float) -> str:
    if size < 2**18:
        return f"{size / 2**10:,.1f} KiB"
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"


def measurable(device: str) -> bool:
    """Whether the peak memory of a step is known here."""
    return device == "cuda"


def peak_bytes(run: Callable) -> float:
    """The most that tensors held while it ran, weights included; infinite where memory did not do."""
    torch.cuda.synchronize()
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    try:
        run()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    return torch.cuda.max_memory_allocated()


def blocks_of(model: nn.Module, call: Met) -> list[tuple[str, nn.Module]]:
    """The longest list of modules of one class, each called once in a forward; none that is checkpointed already."""
    lists = [
        [(f"{path}.{i}".lstrip("."), block) for i, block in enumerate(m)] for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) > 1 and len({type(block) for block in m}) == 1
    ]
    count: dict[int, int] = {}
    with contextlib.ExitStack() as stack, quiet(model), uncached(model), torch.no_grad():
        for block in {id(b): b for found in lists for _, b in found}.values():
            def before(module, args):
                count[id(module)] = count.get(id(module), 0) + 1

            stack.callback(block.register_forward_pre_hook(before).remove)
        small = cut(call)
        model(*small.args, **small.kwargs)
    once = [found for found in lists if all(count.get(id(b)) == 1 for _, b in found)]
    longest = max(once, key=len, default=[])
    return [(path, b) for path, b in longest if getattr(b, "gradient_checkpointing", False) is not True]


def is_cache(value: Any) -> bool:
    """Keys and values of a Hugging Face model, which a block that ran twice would add to twice."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def computed_again(self, *args, **kwargs):
    """The forward of a block that keeps only its inputs, or what its `kept_inputs` makes of them.

    As Transformers does it, such a block is given no cache.
    """
    if not (self.training and torch.is_grad_enabled()):
        return self._whet_unsaved(*args, **kwargs)
    args = tuple(None if is_cache(a) else a for a in args)
    args = self.kept_inputs(*args) if hasattr(self, "kept_inputs") else args
    kwargs = {k: None if is_cache(v) else False if k == "use_cache" else v for k, v in kwargs.items()}
    return checkpoint(self._whet_unsaved, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def edits(block: nn.Module, ops: Choices) -> list[Edit]:
    return [Edit(block, "_whet_unsaved", block.forward), Edit(block, "forward", types.MethodType(computed_again, block))]


def compute_again(model: nn.Module, paths: list[str]) -> None:
    """From now on the blocks at these paths keep their inputs alone."""
    for path in paths:
        Journal().make(edits(model.get_submodule(path), Choices()))


def fewest(count: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest k of 1..count that fits, by bisection, where more fit no worse; None where not even all do."""
    if not fits(count):
        return None
    low, high = 0, count  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


class BlockMemory:
    """The peak of a step with so many blocks checkpointed, each number of them measured once."""

    def __init__(self, report: "Optimized", run: Callable, around: Around, sites: list[Site]):
        self.report, self.run, self.around, self.sites = report, run, around, sites
        self.base, self.peaks = list(report.replaced.sites), dict[int, float]()

    def lay(self, count: int) -> None:
        """The first so many blocks are checkpointed, beside what is replaced."""
        found = self.report.replaced
        found.sites = [*self.base, *((site, Verdict(True, 0.0, 1.0)) for site in self.sites[:count])]
        found.ask(self.report.choices)

    def peak(self, count: int) -> float:
        if count not in self.peaks:
            self.lay(count)
            with self.around():
                self.peaks[count] = peak_bytes(self.run)
        return self.peaks[count]


def fit(
    report: "Optimized", run: Callable, around: Around, call: Met, limit: int, proved: Callable[[], Verdict], seconds: float
) -> None:
    """Checkpoint the fewest blocks such that the step stays below the limit. ValueError where all of them are not enough.

    run      the step whose memory counts; around: a context that undoes what it did to weights
    proved   the proof of everything that is replaced now, together
    """
    sites = [Site(path, b, edits, "a block that is computed again", kind=KIND, asks=False)
             for path, b in blocks_of(report.model, call)]
    memory, many = BlockMemory(report, run, around, sites), len(sites)
    before = memory.peak(0)
    report.memory = {"limit": limit, "before": before, "after": before, "blocks": 0, "of": many}
    if before <= limit:
        return
    asked = f"more than max_memory, {gib(limit)}"
    if not sites:
        raise ValueError(f"optimize: a step takes {taken(before)}, {asked}, and the model has no repeated blocks to checkpoint")
    count = fewest(many, lambda k: memory.peak(k) <= limit)
    if count is None:
        least = f"{taken(memory.peak(many))} with all {many} blocks checkpointed ({taken(before)} with none)"
        raise ValueError(f"optimize: a step takes {least}, {asked}")
    memory.lay(count)
    verdict = proved()
    if not verdict.ok:
        raise ValueError(f"optimize: with {count} blocks checkpointed the model computes something else: {verdict.why}")
    report.memory |= {"after": memory.peak(count), "blocks": count} | dict(cost(memory, count, seconds))
    memory.lay(count)
    report.after_ms = report.memory.get("with_ms", report.after_ms)


def taken(peak: float) -> str:
    return "more memory than there is" if peak == float("inf") else gib(peak)


def cost(memory: BlockMemory, count: int, seconds: float) -> Iterator[tuple[str, float]]:
    """What the checkpoints cost in time, where the step runs without them."""
    def step(blocks: int) -> None:
        memory.lay(blocks)
        memory.run()

    runs = {KEPT: lambda: step(0), AGAIN: lambda: step(count)}
    if memory.peak(0) == float("inf"):
        del runs[KEPT]
    with memory.around():
        timings = race(runs, keep=next(iter(runs)), seconds=seconds, flush=False).timings
    if KEPT in timings:
        yield "without_ms", timings[KEPT].ms
    yield "with_ms", timings[AGAIN].ms


def line(m: dict) -> str:
    """What was done for memory, in a sentence; takes `memory` of a report."""
    if not m["blocks"]:
        return f"memory: a step takes {gib(m['before'])}, within {gib(m['limit'])}; no block is checkpointed"
    times = f", for {m['with_ms'] / m['without_ms'] - 1:+.0%} time" if m.get("without_ms") else ""
    return (
        f"memory: {m['blocks']} of {m['of']} blocks are checkpointed: a step takes {gib(m['after'])} where it took "
        f"{taken(m['before'])}, within {gib(m['limit'])}{times}"
    )
