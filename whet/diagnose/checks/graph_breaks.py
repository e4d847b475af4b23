"""A compiled model that falls apart into several graphs, or is compiled again on steps like those before."""

import os

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import restored

SHOWN = 5  # breaks listed; the rest are counted
WARM, COUNTED = 2, 3  # steps: the first compiles, the second may meet an optimizer's new state


def compiled(target: Target) -> list[str]:
    """What of the target goes through torch.compile: modules, functions they hold, functions their forwards name."""
    found = ["the step"] if made(target.step_with) else []
    for path, module in target.model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            found.append(path or "the model")
            continue
        forward = type(module).forward
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        held = {**vars(module), **{n: forward.__globals__[n] for n in names if n in forward.__globals__}}
        found += [f"{name} of {path or 'the model'}" for name, value in held.items() if made(value)]
    return found


def made(value) -> bool:
    """Whether torch.compile made this function."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "_torchdynamo_orig_callable")


def broken(target: Target) -> tuple[list[tuple[str, str]], int]:
    """(reason, line) of each break in a step compiled afresh, and the graphs compiled by steps that should need none."""
    from torch._dynamo.utils import counters, graph_break_reasons

    torch._dynamo.reset()
    old = len(graph_break_reasons)
    with restored(target):
        target.step()
        breaks = [(first_line(b.reason), line_of(b.user_stack)) for b in graph_break_reasons[old:]]
        for _ in range(WARM - 1):
            target.step()
        before = counters["stats"]["unique_graphs"]
        for _ in range(COUNTED):
            target.step()
    return breaks, counters["stats"]["unique_graphs"] - before


def first_line(reason: str) -> str:
    return reason.strip().splitlines()[0].rstrip(".") if reason.strip() else "no reason given"


def line_of(stack) -> str:
    frame = stack[-1] if stack else None
    return f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""


def find(run: Run):
    parts = compiled(run.target)
    if not parts:
        return
    breaks, again = broken(run.target)
    where = ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
    distinct = list(dict.fromkeys(breaks))
    if breaks:
        reason, line = distinct[0]
        more = [f"and {len(distinct) - SHOWN} more"] if len(distinct) > SHOWN else []
        yield Finding(
            "graph_breaks", f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''} in what is compiled ({where}), first "
            f"at {line or 'an unknown line'}: {reason}",
            [*(f"{at or 'an unknown line'}: {why}" for why, at in distinct[:SHOWN]), *more],
            fix="Take what cannot be traced out of the compiled part, and keep it whole with torch.compile(..., "
            "fullgraph=True), which stops at the next break", line=line,
        )
    if again:
        yield Finding(
            "graph_breaks", f"what is compiled ({where}) is compiled again by like steps: {again} times in {COUNTED} steps",
            [f"{again} graphs compiled in steps {WARM + 1} to {WARM + COUNTED}, of the same inputs",
             'TORCH_LOGS="recompiles" names the guard that fails'],
            fix="Keep Python numbers that change from step to step out of the compiled part, or pass them as tensors: each "
            "value compiles it again, until torch gives up and runs it uncompiled",
        )


class GraphBreaksExample(nn.Module):
    """With a break where a tensor's value is asked for in Python."""

    def __init__(self, breaks: bool):
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(16, 16), nn.Linear(16, 16), breaks

    def forward(self, x):
        h = self.first(x)
        if self.breaks and h.sum().item() > 1e9:
            h = h * 0.5
        return self.second(h).square().mean()


def example(breaks: bool) -> Target:
    return target_of("example", (torch.compile(GraphBreaksExample(breaks), backend="eager"), torch.randn(4, 16)))


CHECK = Check("graph_breaks", "graph breaks and recompilations", find, lambda: example(True), lambda: example(False))
