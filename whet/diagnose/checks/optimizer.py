"""An optimizer that launches an op for each parameter and each term, where one fused kernel does the whole update."""

import inspect
from typing import Any

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import restored
from whet.figures import figure
from whet.measure import compare
from whet.race import tie

LEAST = 0.01  # of the step
OPS = 4  # to a parameter: an update over lists of parameters needs fewer, one written as a loop needs them for Adam's moments
FEW = 8  # parameters: for fewer a loop costs next to nothing
ROUNDS = 9  # at least, of each: a median of fewer is moved by one interruption
TRAFFIC = 7  # Adam's: parameter and both moments are read and written, the gradient is read


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def better(optimizer: torch.optim.Optimizer, gpu: bool) -> str | None:
    """The switch of torch's optimizer that is off and could be on: "fused", or on a GPU "foreach" where nothing is fused."""
    takes, groups = inspect.signature(type(optimizer)).parameters, optimizer.param_groups
    if any(g.get("differentiable") for g in groups) or not all(p.is_floating_point() for p in parameters(optimizer)):
        return None
    if "fused" in takes:
        return None if all(g.get("fused") for g in groups) else "fused"
    if gpu and "foreach" in takes and any(g.get("foreach") is False for g in groups):
        return "foreach"
    return None


def switched(optimizer: torch.optim.Optimizer, way: str) -> dict:
    """The optimizer's state with the switch on in every group."""
    state = optimizer.state_dict()
    groups = [{**g, **{k: k == way for k in ("fused", "foreach") if k in g}} for g in state["param_groups"]]
    return {**state, "param_groups": groups}


def copy_with(optimizer: torch.optim.Optimizer, way: str) -> torch.optim.Optimizer | None:
    """Another optimizer of the same parameters, moments and settings, with the switch on; None where torch refuses."""
    try:
        groups = [{**g, **{k: k == way for k in ("fused", "foreach") if k in g}} for g in optimizer.param_groups]
        kind: Any = type(optimizer)
        made = kind(groups, **{way: True})
        made.load_state_dict(switched(optimizer, way))
    except (RuntimeError, TypeError, ValueError):
        return None
    return made


def switch(way: str):
    """The fix, in place: schedulers and the user's loop keep their optimizer."""
    def apply(target: Target) -> None:
        assert target.optimizer is not None
        target.optimizer.load_state_dict(switched(target.optimizer, way))
        target.optimizer.defaults |= {k: k == way for k in ("fused", "foreach") if k in target.optimizer.defaults}

    return apply


def timed(target: Target, optimizer: torch.optim.Optimizer):
    """On a GPU the whole step, as the host may run ahead of the update; on a CPU the update alone, which adds to the step."""
    if target.device != "cuda":
        return optimizer.step

    def step():
        target.optimizer = optimizer
        return target.step()

    return step


def find(run: Run):
    optimizer = run.target.optimizer
    if optimizer is None or run.target.step_with is not None:
        return
    yield from slower_switch(run, optimizer) if is_torchs(optimizer) else python_loop(run, optimizer)


def slower_switch(run: Run, optimizer: torch.optim.Optimizer):
    way = better(optimizer, run.gpu)
    if way is None:
        return
    with restored(run.target):
        run.target.step()  # moments exist from the first step on
        other = copy_with(optimizer, way)
        if other is None:
            return
        try:
            updates = {"now": timed(run.target, optimizer), way: timed(run.target, other)}
            times = compare(updates, seconds=min(0.5, run.seconds), flush=False, least=ROUNDS)
        finally:
            run.target.optimizer = optimizer
    now, then = times["now"], times[way]
    gain = now.ms - then.ms
    if tie(now, then) or gain < LEAST * (now.ms if run.gpu else run.step_ms):
        return
    what = "step" if run.gpu else "update"
    name = type(optimizer).__name__
    now_is = "over lists of parameters, term by term" if run.gpu and way == "fused" else "parameter by parameter, term by term"
    yield Finding(
        "optimizer", f"torch.optim.{name} updates {now_is}: {way}=True is off",
        [f"{len(parameters(optimizer))} parameters, {sum(p.numel() for p in parameters(optimizer)):,} elements",
         f"the {what} takes {figure(now.ms)} ms, and {figure(then.ms)} ms with {way}=True, measured in turns"],
        fix=f"Make the optimizer with torch.optim.{name}(..., {way}=True)", cost_ms=gain, gain_ms=gain, measured=True,
        module="optimizer", apply=switch(way),
    )


def python_loop(run: Run, optimizer: torch.optim.Optimizer):
    """An optimizer of the user's own that goes over parameters one by one."""
    updated = [p for p in parameters(optimizer) if p.requires_grad]
    events = [e for e in run.watched.events if e.phase == "optimizer" and not e.view and not e.op.startswith("profiler::")]
    compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")
    if compiled or len(updated) < FEW or len(events) < OPS * len(updated):
        return
    cost = spent_ms(run)
    least = run.floor_ms(TRAFFIC * sum(p.numel() * p.element_size() for p in updated))
    if cost - least < LEAST * run.step_ms:
        return
    name = type(optimizer).__name__
    yield Finding(
        "optimizer", f"{name}.step launches {len(events)} ops for {len(updated)} parameters, in a Python loop over them",
        [f"{len(events) / len(updated):.1f} ops to a parameter, first at {events[0].line or 'an unknown line'}",
         f"the update takes {figure(cost)} ms{run.share(cost)}; moving what Adam moves takes {figure(least, 2)} ms"],
        fix="Write the update over lists of parameters with torch._foreach_* ops, wrap it in torch.compile, or where it is "
        "Adam's take torch.optim.AdamW(..., fused=True)",
        cost_ms=cost, gain_ms=cost - least, module="optimizer", line=events[0].line,
    )


def spent_ms(run: Run) -> float:
    """What the update takes of the step: its kernels, and of the host's time no more than leaves the device idle."""
    profile = run.profile
    row = profile.rows.get("optimizer")
    if row is None:
        return 0.0
    host = row.host_us / profile.host_us * profile.step.ms * 1e3 if profile.host_us else 0.0
    return min(max(row.optimizer_us, host), row.optimizer_us + profile.idle_us) / 1e3


class OptimizerExample(nn.Module):
    """Many small parameters, so that the update is launches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))

    def forward(self, x):
        return self.layers(x).square().mean()


def example(fused: bool | None) -> Target:
    model = OptimizerExample()
    return target_of("example", (model, torch.randn(8, 32), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)))


CHECK = Check(
    "optimizer", "an optimizer that updates parameter by parameter", find, lambda: example(None), lambda: example(True),
    kinds=("train",),
)
