"""Kernels chosen at the start of training, for this model, batch and machine; and timed again while it runs."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from whet.autoselect import lines_of, result_of
from whet.choices import Choices
from whet.lock import Lock
from whet.op import DTYPES, Call, discover
from whet.swap._optimize import REACH
from whet.train.recipe import nearest
from whet.tune import DECIDED, modes_here, tune
from whet.workload import Workload, asks

Progress = Callable[[str, int, int], None]


@dataclass
class KernelChoices:
    """What serves the calls of a model, by mode, and what there is to say of it."""

    calls: list[tuple[Call, int]] = field(default_factory=list)
    by_mode: dict[str, Choices] = field(default_factory=dict)
    entries: dict[str, dict] = field(default_factory=dict)
    lock: Lock | None = None
    force: Mapping[str, str] = field(default_factory=dict)
    used: str = ""  # the mode that the step's plan runs in
    tuned: bool = False  # also on ranks that only received what was chosen

    @property
    def mode(self) -> str:
        """The one that is shown: that of the step's plan, once that is chosen; till then what a CUDA graph takes."""
        return self.used if self.used in self.by_mode else modes_here()[-1]

    def table(self) -> dict[str, str]:
        """{call: candidate}"""
        chosen = self.by_mode.get(self.mode)
        return {call.key: chosen.pick(discover()[call.op], call) for call, _ in self.calls} if chosen else {}

    def lines(self, batch: str) -> list[str]:
        """What is printed before step 0: both times of each call, the speed-up and what is used, then all in one line."""
        ops = discover()
        shown = [e for e in self.entries.values() if e["mode"] == self.mode and e.get("chosen")]
        found = [f"Choosing kernels for {batch}"]
        for entry in shown:
            op = ops[entry["call"]["op"]]
            call = Call(**entry["call"])
            found += lines_of(result_of(call.key, op, entry["mode"], entry))
            if op.name in self.force and not unserved(call, self.force[op.name]):
                found[-1] = f"    Using:   {self.force[op.name]}, by kernels.force.{op.name}"
        used = {call.op: impl for (call, _), impl in zip(self.calls, self.table().values())}
        return [*found, "Kernel selection: " + ", ".join(f"{op}={impl}" for op, impl in used.items())]

    def forced_lines(self) -> list[str]:
        """What comes of kernels.force: a line for each op that it names."""
        found = []
        for op, impl in self.force.items():
            met = [call for call, _ in self.calls if call.op == op]
            reasons = [why for call in met if (why := unserved(call, impl))]
            what = f"kernels.force.{op}={impl}"
            if not met:
                called = ", ".join(dict.fromkeys(call.op for call, _ in self.calls))
                found.append(f"{what} does nothing here: the model does not call {op}, only {called}")
            elif reasons:
                some = "" if len(reasons) == len(met) else f" {len(reasons)} of {len(met)} calls"
                found.append(f"{what} does not serve{some or ' here'}: {impl} {reasons[0]}; another implementation does")
            else:
                tried = [e["candidates"].get(impl, {}) for e in self.entries.values() if e["call"]["op"] == op]
                proved = bool(tried) and all(candidate.get("ok") for candidate in tried)
                found.append(f"{what}: it serves every {op} of the model{'' if proved else ', and nobody verified it'}")
        return found

    def hand_to(self, model: nn.Module) -> None:
        """The model asks these from now on; compile_step takes those of the mode that its plan runs in."""
        for module in asks(model):
            module.ops = self.by_mode["eager"]
            module.__dict__["choices_by_mode"] = dict(self.by_mode)

    def retimed(self, seconds: float) -> "KernelChoices":
        """The verified candidates timed again, now; what was measured before does not count."""
        fresh = Lock()
        for key, entry in (self.lock.calls if self.lock else {}).items():
            fresh.calls[key] = {k: copy.deepcopy(v) for k, v in entry.items() if k not in DECIDED}
        tuned = tune(self.calls, fresh, seconds=seconds)
        by_mode = {mode: forced(choices, self.calls, self.force) for mode, choices in tuned.choices.items()}
        return replace(self, by_mode=by_mode, entries=tuned.entries)


def forced(choices: Choices, calls: list[tuple[Call, int]], force: Mapping[str, str]) -> Choices:
    """The same, with one impl for every call of some ops that it can serve here."""
    ops = discover()
    for op, impl in force.items():
        if op not in ops:
            raise ValueError(f"recipe: kernels.force: there is no op {op!r}; {nearest(op, ops)}")
        if impl not in ops[op].impls:
            raise ValueError(f"recipe: kernels.force.{op} must be one of {', '.join(ops[op].impls)}, got {impl!r}")
    named = {call.key: force[call.op] for call, _ in calls if call.op in force and not unserved(call, force[call.op])}
    table = choices.table | named
    return Choices(table, evidence={k: v for k, v in choices.evidence.items() if table.get(k) == choices.table.get(k)})


def unserved(call: Call, impl: str) -> str | None:
    """Why this impl cannot serve this call here; None where it can."""
    op = discover()[call.op]
    args = op.inputs(dtype=DTYPES[call.dtype], device="meta", **call.case)
    return op.unavailable(impl) or op.impls[impl].refuses(**args)


def select(
    work: Workload, tuned: bool, force: Mapping[str, str], lock: Lock, progress: Progress, seconds: float = 0.1
) -> KernelChoices:
    """Choices for the calls of one forward of this workload.

    tuned   False: stock calls, but for what is forced
    """
    if not asks(work.model):
        return KernelChoices()
    calls = work.calls()
    reach = None if torch.cuda.is_available() else REACH  # without one only what can be chosen is verified
    found = tune(calls, lock, progress=progress, seconds=seconds, reach=reach) if tuned else None
    by_mode = found.choices if found else {mode: Choices() for mode in (*modes_here(), "compile", "compile + graph")}
    by_mode = {mode: forced(choices, calls, force) for mode, choices in by_mode.items()}
    return KernelChoices(calls, by_mode, found.entries if found else {}, lock, dict(force), tuned=tuned)
