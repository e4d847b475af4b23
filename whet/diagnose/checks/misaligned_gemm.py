"""A matrix product whose rows are no multiple of 16 bytes: tensor cores then load element by element, or not at all.

Which rows: those of either input and of the result, as they lie in memory. So a vocabulary of 50257 counts, a batch of 1023
rows does not.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import nn

from whet.alignment import ROW_BYTES, SMALL, aligned, padded_size
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure, percent
from whet.measure import compare

LEAST_FLOPS = 0.05  # share of the step's flops below which nothing is reported where nothing can be timed
LEAST = 0.01  # share of the step that padding must give back on a GPU
MAX_TIMED = 6  # products, the largest first: a fifth of a second each
HALF = (torch.bfloat16, torch.float16)
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::linear": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # where the matrices begin


@dataclasses.dataclass(frozen=True)
class Product:
    """One product a @ b, with b as it is multiplied: (K, N)."""

    event: Event
    a: Seen
    b: Seen
    out: Seen

    @property
    def sizes(self) -> tuple[int, int, int]:
        k, n = self.b.shape[-2:]
        return self.a.shape[-2] if len(self.b.shape) > 2 else self.a.numel // k, k, n

    @property
    def misaligned(self) -> set[int]:
        """Sizes that rows in memory have and should not."""
        return {size for t in (self.a, self.b, self.out) for size in [row(t)] if not aligned(size, t.dtype)}

    @property
    def bad(self) -> bool:
        return min(self.sizes) >= SMALL and bool(self.misaligned)


def row(t: Seen) -> int:
    """The step from one row in memory to the next, in elements; 0 where there are no rows."""
    if len(t.shape) < 2 or 1 not in t.strides[-2:]:
        return 0
    return max(t.strides[-2:])


def product(e: Event) -> Product | None:
    at = PRODUCTS.get(e.op)
    if at is None or len(e.inputs) < at + 2 or not e.outputs or not e.inputs[at].numel:
        return None
    a, b = e.inputs[at : at + 2]
    if e.op == "aten::linear":
        b = dataclasses.replace(b, shape=b.shape[::-1], strides=b.strides[::-1])
    return Product(e, a, b, e.outputs[0])


@dataclasses.dataclass
class GemmGroup:
    """Products with rows of these sizes, forward and backward: one size is padded for all of them."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    products: list[Product] = dataclasses.field(default_factory=list)
    names: dict[str, None] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> int:
        return sum(p.event.flops for p in self.products)

    @property
    def padded(self) -> dict[int, int]:
        return {size: padded_size(size) for size in self.sizes}

    @property
    def subject(self) -> str:
        """The beginning of the finding's sentence: the tensors by name, and their verb."""
        names = list(dict.fromkeys(map(pattern, self.names)))
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        if not names:
            return f"a product in {self.where} has"
        return ", ".join(names[:2]) + more + (" is multiplied with" if len(names) == 1 else " are multiplied with")

    @property
    def where(self) -> str:
        return ", ".join(dict.fromkeys(pattern(p.event.module) or "the model itself" for p in self.products))


def tf32(dtype: torch.dtype, gpu: bool) -> bool:
    """Whether products of this dtype run on tensor cores though it is no half one."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return gpu and dtype == torch.float32 and allowed


def groups(run: Run) -> list[GemmGroup]:
    """The misaligned ones, the most flops first. A weight that autocast has cast keeps its name."""
    found: dict[tuple, GemmGroup] = {}
    names: dict[int, str] = {}  # storage of a cast -> the parameter it was cast from
    for e in run.watched.events:
        if e.op == "aten::_to_copy" and e.inputs and e.inputs[0].name:
            names[e.outputs[0].storage] = e.inputs[0].name
        elif not e.view:
            for t in e.outputs:
                names.pop(t.storage, None)
        p = product(e) if e.phase != "optimizer" and not e.compiled else None  # Inductor pads what it compiles
        if p is None or not p.bad or not (p.a.dtype in HALF or tf32(p.a.dtype, run.gpu)):
            continue
        key = (tuple(sorted(p.misaligned)), p.a.dtype)
        group = found.setdefault(key, GemmGroup(*key))
        group.products.append(p)
        named = [t.name or names.get(t.storage, "") for t in (p.a, p.b)]
        group.names |= {n: None for n in named if n}
    return sorted(found.values(), key=lambda g: -g.flops)


def random_like(t: Seen, pad: dict[int, int]) -> torch.Tensor:
    """Random values laid out as this tensor was, its sizes replaced by the padded ones."""
    shape = [pad.get(size, size) for size in t.shape]
    across = t.strides[-1] != 1
    made = torch.randn([*shape[:-2], *(shape[-2:][::-1] if across else shape[-2:])], device=t.device).to(t.dtype)
    return made.transpose(-1, -2) if across else made


def timed(products: list[Product], pad: dict[int, int], mode: str) -> tuple[float, float]:
    """ms of these products now and with padded sizes; equal ones are timed once."""
    kinds: dict[tuple, list[Product]] = {}
    for p in products:
        kinds.setdefault((p.a.shape, p.a.strides, p.b.shape, p.b.strides), []).append(p)
    now = padded = 0.0
    for equal in list(kinds.values())[:MAX_TIMED]:
        a, b = equal[0].a, equal[0].b
        runs: dict[str, Callable] = {
            name: functools.partial(torch.matmul, random_like(a, to), random_like(b, to))
            for name, to in (("now", {}), ("padded", pad))
        }
        found = compare(runs, mode=mode, seconds=0.1)
        now += len(equal) * found["now"].ms
        padded += len(equal) * found["padded"].ms
    return now, padded


def find(run: Run):
    found = groups(run)
    if not found:
        return
    total = sum(e.flops for e in run.watched.events) or 1
    for g in found[:2] if run.gpu else found:
        sizes = ", ".join(f"{was} to {to}" for was, to in g.padded.items())
        gain, figures = None, "not timed: the cost shows only on a GPU"
        if run.gpu:
            now, padded = timed(g.products, g.padded, "graph")
            gain = now - padded
            figures = f"{len(g.products)} products take {figure(now)} ms, padded {figure(padded)} ms: measured one by one"
        if (gain is None and g.flops < LEAST_FLOPS * total) or (gain is not None and gain < LEAST * run.step_ms):
            continue
        yield finding(run, g, sizes, gain, figures, g.flops / total)


def finding(run: Run, g: GemmGroup, sizes: str, gain: float | None, figures: str, share: float) -> Finding:
    first = g.products[0]
    m, k, n = first.sizes
    kind = str(g.dtype).removeprefix("torch.")
    odd = min(g.padded)
    return Finding(
        "misaligned_gemm",
        f"{g.subject} rows of {odd} {kind}, which is no multiple of {ROW_BYTES} bytes"
        + ("" if run.gpu else ": on a GPU its products load slowly"),
        [
            f"{first.event.op} {m} x {k} x {n}, {len(g.products)} such products a step, {percent(share)} of its flops",
            f"in {g.where}",
            *(f"{size} * {g.dtype.itemsize} bytes = {size * g.dtype.itemsize // ROW_BYTES} loads of {ROW_BYTES} bytes and "
              f"{size * g.dtype.itemsize % ROW_BYTES} more" for size in g.padded),
            figures,
        ],
        f"Pad {sizes}, and leave what was added out of the loss (or slice it off the result)",
        gain, gain, measured=gain is not None, module=first.event.module, line=first.event.line,
    )


class Head(nn.Module):
    def __init__(self, vocab: int):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(vocab, 64), nn.Linear(64, vocab, bias=False)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.lm_head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def example(vocab: int) -> Target:
    torch.manual_seed(0)
    return target_of("example", (Head(vocab).bfloat16(), torch.randint(vocab, (4, 32))))


CHECK = Check(
    "misaligned_gemm", "a product whose rows are not whole 16-byte loads", find, lambda: example(1003), lambda: example(1008)
)
