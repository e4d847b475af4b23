"""Plans that take no more memory than is allowed: impls that keep less, and blocks that are computed again, by prediction.

Which of them is fastest is measured as it is of all plans; prediction only says which are worth building.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whet.choices import Choices
from whet.measure import Race
from whet.op import DTYPES, Call, discover, tensors
from whet.plan import BEFORE, Plan, PlanResult, graphed
from whet.plan_memory import WITHIN, PlanMemory, StorageBytes
from whet.race import Outcome, Ratio, decide, paired, through
from whet.subjects import Subject
from whet.swap._memory import fewest, gib

AIM = 0.97  # of the limit, by prediction: a plan that is a little larger than predicted still fits


@dataclass(frozen=True)
class Leaner:
    """A verified candidate for a call that keeps less for the backward than the chosen one; bytes and ms of a whole step."""

    key: str
    candidate: str
    saved: int
    ms: float


def kept_bytes(call: Call, name: str, device: str) -> int | None:
    """What a call keeps until its backward, arguments and results included; None where it cannot be told."""
    op = discover()[call.op]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            args = op.inputs(dtype=DTYPES[call.dtype], device=device, **call.case)
            with StorageBytes(device) as counted:
                for t in tensors(args):
                    counted.count(t)
                for t in tensors({n: args[n] for n in op.grads}):
                    t.requires_grad_()
                out = op.run(name)(**args)  # noqa: F841  what autograd keeps lives as long as this
                return counted.now
    except Exception:  # torch.compile decides itself, and another package's calls may not know such tensors
        return None


def leaner(entries: Mapping[str, dict], table: Mapping[str, str], mode: str, device: str) -> list[Leaner]:
    """The candidates that keep less than what a table has chosen, the cheapest byte first."""
    found = []
    for key, chosen in table.items():
        entry = entries.get(f"{key} @ {mode}", {"candidates": {}})
        timed = {n: c["ms"] for n, c in entry["candidates"].items() if c["ok"] and c.get("ms")}
        if not (entry.get("call") or {}).get("grad") or chosen not in timed:
            continue
        call, count = Call(**entry["call"]), entry.get("count", 1)
        kept = {n: size for n in timed if (size := kept_bytes(call, n, device)) is not None}
        for name, size in kept.items():
            if (saved := kept.get(chosen, 0) - size) > 0:
                found.append(Leaner(key, name, count * saved, count * (timed[name] - timed[chosen])))
    return sorted(found, key=lambda one: (one.ms / one.saved, -one.saved))


def steps_down(table: Mapping[str, str], found: Sequence[Leaner]) -> Iterator[dict[str, str]]:
    """The table with one more call served by a leaner candidate, and one more."""
    made, saved = dict(table), dict[str, int]()
    for one in found:
        if one.saved > saved.get(one.key, 0):
            made, saved[one.key] = made | {one.key: one.candidate}, one.saved
            yield made


@dataclass
class Limit:
    """The most memory that a plan may take, and what was found of plans that keep to it.

    choices   of the plans that it adds, by what they call their choices
    least     bytes of the leanest of them, by prediction
    """

    most: int
    memory: PlanMemory
    precision: str
    graphs: bool
    choices: dict[str, Choices] = field(default_factory=dict)
    least: tuple[int, str] | None = None

    def peak(self, plan: Plan, choices: Choices | None) -> int | None:
        """As a CUDA graph where there is a GPU, which takes a little more."""
        found = self.memory.of(graphed(plan) if self.graphs and not plan.graph else plan, choices, self.precision)
        if found is not None and (self.least is None or found.peak < self.least[0]):
            self.least = found.peak, plan.name
        return None if found is None else found.peak

    def fits(self, plan: Plan, choices: Choices | None) -> bool:
        peak = self.peak(plan, choices)
        return peak is not None and peak <= AIM * self.most

    def plans(self, plan: Plan, choices: Choices | None, entries: Mapping[str, dict], blocks: int) -> list[Plan]:
        """Beside a plan that takes too much: leaner choices, as few blocks computed again as need be, or both.

        entries   of the lock, of the calls that were tuned
        blocks    that the model has
        """
        if plan.compiled or self.peak(plan, choices) is None or self.fits(plan, choices):
            return []
        again = self._computed_again(plan, choices, blocks)
        if choices is None or plan.choices != "tuned":
            return again
        mode = "graph" if self.graphs else "eager"
        made = [Choices(t, choices.default) for t in steps_down(
            choices.table, leaner(entries, choices.table, mode, self.memory.device)
        )]
        if not made:
            return again
        lean = replace(plan, name=f"{plan.name}, leaner", choices=f"{plan.variant}, leaner")
        least = fewest(len(made), lambda k: self.fits(lean, made[k - 1]))
        self.choices[lean.choices] = made[(least or len(made)) - 1]
        return [*again, *([lean] if least else self._computed_again(lean, self.choices[lean.choices], blocks))]

    def _computed_again(self, plan: Plan, choices: Choices | None, blocks: int) -> list[Plan]:
        """The plan with as few blocks computed again as need be; none where all are not enough."""
        def with_blocks(k: int) -> Plan:
            return replace(plan, name=f"{plan.name}, {k} of {blocks} blocks computed again", blocks=k)

        count = fewest(blocks, lambda k: self.fits(with_blocks(k), choices)) if blocks else None
        return [with_blocks(count)] if count else []

    def refuse_in_vain(self, name: str, blocks: int) -> None:
        """ValueError, with the figures, where prediction says that even all of it together cannot keep to the limit."""
        if blocks and self.least and self.least[0] * (1 - WITHIN) > self.most:
            raise ValueError(self.nothing(name, self.least[0], f"{self.least[1]}, by prediction"))

    def nothing(self, name: str, least: int, plan: str) -> str:
        return f"optimize: {name}: no plan takes {gib(self.most)} or less; the least any plan takes is {gib(least)}: {plan}"

    def surely_over(self, result: PlanResult) -> str:
        """Why a plan need not be built; empty where it may fit."""
        mb = result.predicted_mb
        return self.over(result) + " by prediction" if mb is not None and mb * 1e6 * (1 - WITHIN) > self.most else ""

    def over(self, result: PlanResult) -> str:
        """Why a plan may not be chosen: what it took, or by prediction takes, is over the limit or not known; empty: it may."""
        mb = result.peak_mb or result.predicted_mb
        if mb is None:
            return "its memory is not known here"
        return f"over the limit of {gib(self.most)}: it takes {gib(mb * 1e6)}" if mb * 1e6 > self.most else ""


def fastest(heats: Sequence[Race], results: Mapping[str, PlanResult], limit: Limit | None, name: str) -> Outcome:
    """The plan that the races chose; those over the limit are no candidates, the model as it was among them.

    Plans that were not in memory together are compared by their ratios to the model as it was.
    """
    over = {n: limit.over(r) for n, r in results.items() if r.ok} if limit else {}
    for n in filter(over.get, over):
        results[n].why = over[n]
    if not any(over.values()):
        if not heats:
            return Outcome(BEFORE, "no other plan passed", {BEFORE: Ratio(1.0, 1.0, 1.0, 0)}, True)
        if len(heats) == 1:
            return heats[0].outcome
    found = {n: paired(ms, h.times[BEFORE]) for h in heats for n, ms in h.times.items() if not over.get(n) and results[n].ok}
    if limit and not found:
        known = [(r.peak_mb or r.predicted_mb or 0.0, n) for n, r in results.items() if r.peak_mb or r.predicted_mb]
        least, plan = min(known, default=(0.0, BEFORE))
        raise ValueError(limit.nothing(name, int(least * 1e6), plan))
    best = min(found, key=lambda n: found[n].value)
    chosen = decide(list(found), best, lambda a, b: through(found[a], found[b]), BEFORE if BEFORE in found else None)
    groups = f"; raced in {len(heats)} groups, since memory does not hold all plans at once" if len(heats) > 1 else ""
    return replace(chosen, why=f"{chosen.why}{f', of those within {gib(limit.most)}' if limit else ''}{groups}")


def within(
    todo: Sequence[Plan], subject: Subject, limit: Limit, choices_of: Callable[[Plan], Choices | None],
    entries: Mapping[str, dict],
) -> list[Plan]:
    """The plans to try, those that a limit adds behind the one that each is of; also those of a user's model as it was.

    ValueError, with the figures, where prediction says that none can keep to the limit.
    """
    before, blocks = subject.before(), len(subject.blocks)
    own = [replace(before, name="eager")] if before.choices == "own" else []
    found = [p for plan in own for p in limit.plans(plan, None, entries, blocks)]
    found += [p for plan in todo for p in (plan, *limit.plans(plan, choices_of(plan), entries, blocks))]
    limit.refuse_in_vain(subject.name, blocks)
    return list({p.name: p for p in found}.values())
