"""Matrix products inside a custom op, where torch's own would be faster: a kernel written by hand seldom reaches cuBLAS."""

import collections
import contextlib
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.figures import figure
from whet.machine import this_machine
from whet.measure import Timing, compare

SLOWER = 1.5  # times the stock product, before it is reported: what an op fuses besides may well cost the rest
OF_STEP = 0.01  # of the step, under which nothing is reported
SECONDS = 0.3  # to time each of the two
STOCK = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


def plain(t: Seen) -> bool:
    """Of a type that the stock product takes: quantised weights have no stock product to be measured against."""
    return t.dtype.is_floating_point and t.dtype.itemsize > 1


def weights_of(e: Event) -> tuple[Seen, list[Seen]] | None:
    """(x, its weights) where the shapes say that x (..., K) is multiplied by (N, K) or (K, N) matrices into (..., N)."""
    if not e.outputs or not plain(e.outputs[0]) or not e.outputs[0].shape:
        return None
    out = e.outputs[0]
    for x in e.inputs:
        if len(x.shape) < 2 or not plain(x) or not x.numel:
            continue
        rows, K = x.numel // x.shape[-1], x.shape[-1]
        weights = [w for w in e.inputs if w is not x and is_weight(w, x, K, out.shape[-1])]
        if weights and out.numel == rows * out.shape[-1]:
            return x, weights
    return None


def is_weight(w: Seen, x: Seen, K: int, N: int) -> bool:
    """An (N, K) or (K, N) matrix. One that would fit x elementwise too, as a gate or a table of angles, only as a parameter."""
    return w.dtype == x.dtype and w.shape in ((N, K), (K, N)) and (bool(w.name) or w.shape != x.shape[-2:])


def inside(run: Run, modules: set[str]) -> bool:
    """Whether stock products run within the ops: the profile then has more of them in these modules than the watched step."""
    ran = sum(k.op in STOCK and k.phase == "forward" and k.module in modules for k in run.profile.kernels)
    asked = sum(e.op in STOCK and e.phase == "forward" and e.module in modules for e in run.watched.events)
    return ran > asked


def arguments(e: Event, device: str) -> list:
    """Random tensors of the event's shapes and what else it was given, in the order of the op's schema."""
    space, _, name = e.op.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    schema = getattr(packet, packet.overloads()[0])._schema
    tensors, rest, made = list(e.inputs), list(e.args), []
    for argument in schema.arguments[: len(tensors) + len(rest)]:
        kind = str(argument.type)
        if kind == "Tensor" or kind == "Optional[Tensor]" and tensors and not (rest and rest[0] is None):
            seen = tensors.pop(0)
            t = torch.empty_strided(seen.shape, seen.strides, dtype=seen.dtype, device=device)
            made.append(t.normal_() if seen.dtype.is_floating_point else t.zero_())
        elif "List" in kind:
            raise ValueError(f"{e.op} takes a list, which is not kept")
        else:
            made.append(rest.pop(0))
    return made


def stock(x: Seen, weights: list[Seen], device: str) -> Callable:
    """The same products by F.linear; with two weights or more their results multiplied, as a gate does."""
    given = torch.randn(x.shape, device=device).to(x.dtype)
    K = x.shape[-1]
    rows = [w.shape if w.shape[1] == K else (w.shape[1], w.shape[0]) for w in weights]
    made = [torch.randn(shape, device=device).to(x.dtype) for shape in rows]

    def run():
        outs = [F.linear(given, w) for w in made]
        return F.silu(outs[0]) * outs[1] if len(outs) > 1 else outs[0]

    return run


@torch.no_grad()
def timed(run: Run, e: Event, x: Seen, weights: list[Seen]) -> dict[str, Timing]:
    """The op and the stock product at these shapes, the GPU's work alone where it can be captured."""
    space, _, name = e.op.partition("::")
    op, given = getattr(getattr(torch.ops, space), name), arguments(e, run.target.device)
    runs = {"custom": lambda: op(*given), "stock": stock(x, weights, run.target.device)}
    with contextlib.suppress(RuntimeError):
        return compare(runs, "graph", SECONDS)
    torch.cuda.synchronize()
    return compare(runs, "eager", SECONDS)


def profiled_ms(run: Run, e: Event) -> float:
    """Time of the kernels that the op launched in its module, each time it ran there, from the profile."""
    us = [k.us for k in run.profile.kernels if k.module == e.module and k.phase == e.phase and k.op == e.op]
    times = sum(o.op == e.op and o.module == e.module and o.phase == e.phase for o in run.watched.events)
    return sum(us) / max(1, times) / 1e3


def find(run: Run):
    groups: dict[tuple, list[tuple[Event, Seen, list[Seen]]]] = collections.defaultdict(list)
    for e in run.watched.events:
        if e.custom and e.phase == "forward" and (found := weights_of(e)):
            groups[e.op, tuple((t.shape, t.dtype) for t in e.inputs)].append((e, *found))
    for group in groups.values():
        if run.gpu:
            yield from measured_finding(run, group)
        elif not inside(run, {e.module for e, _, _ in group}):
            yield structural_finding(group)


def cause_and_evidence(group: list[tuple[Event, Seen, list[Seen]]]) -> tuple[str, list[str]]:
    e, x, weights = group[0]
    where = pattern(e.module) or "the model itself"
    cause = f"{e.op} in {where} multiplies matrices by hand"
    shapes = " and ".join(str(w) for w in weights)
    often = "once" if len(group) == 1 else f"{len(group)} times"
    return cause, [f"{x} by {shapes} into {e.outputs[0]}", f"{often} a step in {where}, {e.line}"]


def fix_for(e: Event, weights: list[Seen]) -> str:
    products = "F.linear" if len(weights) == 1 else f"{len(weights)} calls of F.linear (or one over both weights)"
    return f"Leave the product to {products} and keep in {e.op} only what is elementwise"


def structural_finding(group: list[tuple[Event, Seen, list[Seen]]]) -> Finding:
    """Without a GPU: by structure alone."""
    e, _, weights = group[0]
    cause, evidence = cause_and_evidence(group)
    evidence.append("no stock product runs inside it; kernels are interpreted here, so it is not timed")
    return Finding(
        "custom_matmul", f"{cause}: on a GPU a stock product at these shapes runs at the rate of cuBLAS", evidence,
        fix_for(e, weights), module=e.module, line=e.line,
    )


def measured_finding(run: Run, group):
    e, x, weights = group[0]
    cause, evidence = cause_and_evidence(group)
    try:
        both = timed(run, e, x, weights)
        custom, plain_ms = both["custom"].ms, both["stock"].ms
    except Exception:  # the op cannot be called again: its kernels were timed in the step
        custom = profiled_ms(run, e)
        plain_ms = compare({"stock": stock(x, weights, run.target.device)}, "graph", SECONDS)["stock"].ms
    cost = (custom - plain_ms) * len(group)
    if custom <= SLOWER * plain_ms or cost < OF_STEP * run.step_ms:
        return
    evidence.append(f"{figure(custom)} ms a call, the stock product at these shapes {figure(plain_ms)} ms")
    yield Finding(
        "custom_matmul", f"{cause}, {custom / plain_ms:.1f} times slower than the stock product", evidence, fix_for(e, weights),
        cost_ms=cost, gain_ms=cost, measured=True, module=e.module, line=e.line,
    )


@cache
def planted_ops() -> tuple[Callable, Callable]:
    """(a product by hand, a gate), registered when first asked for."""

    @torch.library.custom_op("planted::linear_by_hand", mutates_args=())
    def linear_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-2) * w).sum(-1)

    @linear_by_hand.register_fake
    def _(x, w):
        return x.new_empty(*x.shape[:-1], w.shape[0])

    def back(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)

    linear_by_hand.register_autograd(back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    @torch.library.custom_op("planted::gate", mutates_args=())
    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(a) * b

    def gate_back(ctx, dy):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return dy * b * s * (1 + a * (1 - s)), dy * F.silu(a)

    gate.register_autograd(gate_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return linear_by_hand, gate


class Gated(nn.Module):
    def __init__(self, width: int, by_hand: bool):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.linear = planted_ops()[0] if by_hand else F.linear

    def forward(self, x):
        a, b = self.linear(x, self.gate.weight), F.linear(x, self.up.weight)
        return planted_ops()[1](a, b).square().mean()


def example(by_hand: bool) -> Target:
    torch.manual_seed(0)
    device = this_machine().device
    width, rows = (512, 512) if device == "cuda" else (32, 16)
    return target_of("example", (Gated(width, by_hand).to(device), torch.randn(2, rows, width, device=device)))


CHECK = Check("custom_matmul", "matrix products in custom ops", find, lambda: example(True), lambda: example(False))
