"""Plans that take no more memory than is allowed: impls that keep less, and blocks that are computed again, by prediction.

Which of them is fastest is measured as it is of all plans; prediction only says which are worth building.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whet.choices import Choices
from whet.decode.cache import free_bytes
from whet.measure import Race
from whet.op import DTYPES, Call, discover, tensors
from whet.plan import BEFORE, Plan, PlanResult, graphed
from whet.plan_memory import WITHIN, PlanMemory, StorageBytes
from whet.race import Outcome, Ratio, decide, paired, through
from whet.subjects import Subject
from whet.swap._memory import fewest, gib

AIM = 0.97  # of the limit, by prediction: a plan that is a little larger than predicted still fits
ROUNDS = 3  # of plans, each after those before it were measured


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


def _timed(entries: Mapping[str, dict], key: str, mode: str) -> tuple[dict[str, float], Call]:
    """The verified candidates of a call with their times; none of a call that the lock does not have."""
    entry = entries.get(f"{key} @ {mode}", {})
    timed = {n: c["ms"] for n, c in entry.get("candidates", {}).items() if c["ok"] and c.get("ms")}
    return (timed, Call(**entry["call"])) if entry.get("call") else ({}, Call("", {}, "", False))


def leaner(entries: Mapping[str, dict], table: Mapping[str, str], mode: str, device: str) -> list[Leaner]:
    """The candidates that keep less than what a table has chosen, the cheapest byte first."""
    found = []
    for key, chosen in table.items():
        timed, call = _timed(entries, key, mode)
        if not call.grad or chosen not in timed:
            continue
        count = entries[f"{key} @ {mode}"].get("count", 1)
        kept = {n: size for n in timed if (size := kept_bytes(call, n, device)) is not None}
        for name, size in kept.items():
            if (saved := kept.get(chosen, 0) - size) > 0:
                found.append(Leaner(key, name, count * saved, count * (timed[name] - timed[chosen])))
    return sorted(found, key=lambda one: (one.ms / one.saved, -one.saved))


def told(entries: Mapping[str, dict], table: Mapping[str, str], mode: str, device: str) -> dict[str, str]:
    """The table, with the fastest candidate whose memory can be told in the place of one whose cannot, as torch.compile's."""
    made = dict(table)
    for key, chosen in table.items():
        timed, call = _timed(entries, key, mode)
        if chosen in timed and kept_bytes(call, chosen, device) is None:
            by_time = sorted(timed, key=timed.__getitem__)
            made[key] = next((n for n in by_time if kept_bytes(call, n, device) is not None), chosen)
    return made


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

    choices   those that plans have, by what they call them, also of the plans that it adds
    least     bytes of the leanest of them, by prediction
    aim       of the limit, what a prediction may come to
    """

    most: int
    memory: PlanMemory
    precision: str
    graphs: bool
    choices: dict[str, Choices] = field(default_factory=dict)
    least: tuple[int, str] | None = None
    aim: float = AIM

    def peak(self, plan: Plan, choices: Choices | None) -> int | None:
        """As a CUDA graph where there is a GPU, which takes a little more."""
        found = self.memory.of(graphed(plan) if self.graphs and not plan.graph else plan, choices, self.precision)
        if found is not None and (self.least is None or found.peak < self.least[0]):
            self.least = found.peak, plan.name
        return None if found is None else found.peak

    def fits(self, plan: Plan, choices: Choices | None) -> bool:
        peak = self.peak(plan, choices)
        return peak is not None and peak <= self.aim * self.most

    def plans(self, plan: Plan, choices: Choices | None, entries: Mapping[str, dict], blocks: int) -> list[Plan]:
        """Beside a plan that takes too much: leaner choices, as few blocks computed again as need be, or both.

        entries   of the lock, of the calls that were tuned
        blocks    that the model has
        """
        if plan.compiled or self.fits(plan, choices):
            return []
        mode, device, tuned = "graph" if self.graphs else "eager", self.memory.device, plan.choices == "tuned"
        base, used = plan, choices
        if used is not None and tuned and (known := told(entries, used.table, mode, device)) != used.table:
            used = Choices(known, used.default)
            base = self._leaner(plan, used)
            if self.fits(base, used):
                return [base]
        again = self._computed_again(base, used, blocks)
        if used is None or not tuned:
            return again
        made = [Choices(t, used.default) for t in steps_down(used.table, leaner(entries, used.table, mode, device))]
        if not made:
            return again
        least = fewest(len(made), lambda k: self.fits(replace(plan, name=f"{plan.name}, leaner", choices=""), made[k - 1]))
        lean = self._leaner(plan, made[(least or len(made)) - 1])
        return [*again, *([lean] if least else self._computed_again(lean, self.choices[lean.choices], blocks))]

    def _leaner(self, plan: Plan, choices: Choices) -> Plan:
        """The plan with these choices, which it calls what no other choices are called."""
        word = "leaner"
        while self.choices.setdefault(f"{plan.variant}, {word}", choices).table != choices.table:
            word += " still"
        return replace(plan, name=f"{plan.name}, {word}", choices=f"{plan.variant}, {word}")

    def _computed_again(self, plan: Plan, choices: Choices | None, blocks: int) -> list[Plan]:
        """The plan with as few blocks computed again as need be; none where all are not enough."""
        def with_blocks(k: int) -> Plan:
            return replace(plan, name=f"{plan.name}, {k} of {blocks} blocks computed again", blocks=k)

        count = fewest(blocks, lambda k: self.fits(with_blocks(k), choices)) if blocks else None
        return [with_blocks(count)] if count else []

    def missed(self, results: Iterable[PlanResult]) -> bool:
        """Whether a plan that was to keep to the limit took more after all; predictions then aim as much lower."""
        known = [(r.peak_mb * 1e6, r.predicted_mb * 1e6) for r in results if r.peak_mb and r.predicted_mb]
        factors = [peak / predicted for peak, predicted in known if peak > self.most and predicted <= self.aim * self.most]
        if factors:
            self.aim = AIM / max(factors)
        return bool(factors)

    def refuse_in_vain(self, name: str, blocks: int) -> None:
        """ValueError, with the figures, where prediction says that even all of it together cannot keep to the limit.

        Also where neither it nor a GPU says what any plan takes.
        """
        if self.least is None and self.memory.device != "cuda":
            why = "; ".join(note for note in self.memory.notes if note.startswith("memory is not predicted"))
            raise ValueError(f"optimize: {name}: what plans take is not known without a GPU: {why}")
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


def refuse_early(memory: PlanMemory, subject: Subject, precision: str, most: int) -> None:
    """ValueError, with the figures, before anything is built: a step does not fit what is free, or what stays the limit."""
    memory.refuse(subject.name, subject.plans(), precision, free_bytes(torch.device(subject.device)))
    stock = next((p for p in subject.plans() if p.choices == "stock" and not p.compiled), None)
    found = memory.of(stock, Choices(), precision) if most and stock else None
    if found is not None and found.kept * (1 - WITHIN) > most:
        what = "parameters" if subject.kind == "forward" else "parameters, gradients and the optimizer's state"
        raise ValueError(
            f"optimize: {subject.name}: no plan takes {gib(most)} or less; {what} alone take {gib(found.kept)}, and a step of "
            f"PyTorch's own calls {gib(found.peak)}, by prediction"
        )


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
        known = [((r.peak_mb or r.predicted_mb or 0.0) * 1e6, n) for n, r in results.items()]
        least, plan = min((one for one in known if one[0] > limit.most), default=limit.least or (0, BEFORE))
        lost = "".join(f"; {n}: {results[n].why}" for size, n in known if size <= limit.most)
        raise ValueError(limit.nothing(name, int(least), plan) + lost)
    best = min(found, key=lambda n: found[n].value)
    chosen = decide(list(found), best, lambda a, b: through(found[a], found[b]), BEFORE if BEFORE in found else None)
    groups = f"; raced in {len(heats)} groups, since memory does not hold all plans at once" if len(heats) > 1 else ""
    return replace(chosen, why=f"{chosen.why}{f', of those within {gib(limit.most)}' if limit else ''}{groups}")


def rounds(
    todo: Sequence[Plan], subject: Subject, limit: Limit | None, choices_of: Callable[[Plan], Choices | None],
    entries: Mapping[str, dict], results: Mapping[str, PlanResult],
) -> Iterator[Sequence[Plan]]:
    """The plans to try; under a limit leaner ones still, where the results say that they took more than was predicted."""
    if limit is None:
        yield todo
        return
    tried: set[str] = set()
    for _ in range(ROUNDS):
        found = [p for p in within(todo, subject, limit, choices_of, entries) if p.name not in tried]
        tried |= {p.name for p in found}
        yield found
        if not limit.missed(results.values()):
            return


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
    for plan in todo:
        used = choices_of(graphed(plan) if limit.graphs and not plan.graph else plan)
        found += [plan, *limit.plans(plan, used, entries, blocks)]
    limit.refuse_in_vain(subject.name, blocks)
    return list({p.name: p for p in found}.values())
