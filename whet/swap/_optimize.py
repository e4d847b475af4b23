"""whet.optimize: parts of a live model replaced where that is proved right and measured faster, in place, and put back."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from whet.choices import Choices
from whet.figures import error_line
from whet.judge import Verdict
from whet.lock import Lock
from whet.machine import set_float32_precision
from whet.measure import now, race
from whet.swap import Edit, Left, Met, Site
from whet.swap._ahead import OUT_OF_MEMORY, Ahead, verifying, with_memory
from whet.swap._alike import facts_of
from whet.swap._begin import allowed, in_allowed, prepared, refuse, refuse_step_options, undone, with_optimizer
from whet.swap._given import usable
from whet.swap._groups import BEFORE, SiteGroup, _time_group, grouped, joined, ratio, recorded
from whet.swap._kept import Decisions
from whet.swap._memory import KIND as CHECKPOINT
from whet.swap._memory import bytes_of, fit
from whet.swap._proof import floating, prove
from whet.swap._replace import Known, Replaced, as_calls, cut, met_in, prove_covered, quiet, recognise, size_of, uncached
from whet.swap._ways import GRAPH, Way, best_of, mixed, slower_in
from whet.tune import leader, modes_here, tune
from whet.worker import Crew, hands_here
from whet.workload import Workload, quick_collections

REACH = 1.25  # times as slow as a rival: what a candidate is not proved for, since it could not be chosen
Progress = Callable[[str, int, int], None]


@dataclass
class Optimized:
    """What optimize() did to a model: print it; to_record() gives its figures."""

    model: nn.Module
    replaced: Replaced
    groups: list[SiteGroup] = field(default_factory=list)
    choices: Choices = field(default_factory=Choices)
    entries: dict[str, dict] = field(default_factory=dict)  # the lock's, of the calls that the replacements make
    mode: str = "train"
    before_ms: float | None = None
    after_ms: float | None = None
    note: str = ""
    seconds: float = 0.0
    batches: list[dict] = field(default_factory=list)  # the whole before and after at each batch, the largest first
    lock_lines: list[str] = field(default_factory=list)  # what came from the lock, and what in it was ignored
    memory: dict = field(default_factory=dict)  # where max_memory was given: bytes before and after, blocks checkpointed
    allow: tuple[str, ...] = ()  # what may change the precision
    precision_before: str = ""  # of float32 products, where TF32 was allowed
    optimizer: str = ""  # whose step is part of the whole that was timed
    ways: dict[str, Way] = field(default_factory=dict)  # by mode; `groups` and `choices` are those of the one that is used
    way: str = ""
    dry: bool = False  # parts were found and proved, none replaced and none timed

    @property
    def kept(self) -> list[SiteGroup]:
        """The groups that are replaced now."""
        there = {(s.kind, s.path) for s, _ in self.replaced.sites}
        return [g for g in self.groups if g.replaced and not self.dry and any((s.kind, s.path) in there for s, _ in g.sites)]

    def choose(self, mode: str) -> None:
        """From now on this is about what was decided in this mode."""
        way = self.ways[mode]
        self.way, self.groups, self.choices, self.replaced.sites = mode, way.groups, way.choices, way.sites
        left = [Left(s.path, f"{g.words}: {g.why}", g.kind) for g in way.groups if not g.replaced for s, _ in g.sites]
        self.replaced.left += left

    @contextlib.contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        """While it is on, what is replaced is what is best in this mode, also where nothing is when the host launches it."""
        way = self.ways.get(mode)
        checkpointed = [s for s in self.replaced.sites if s[0].kind == CHECKPOINT]
        there = mode == self.way and len(checkpointed) < len(self.replaced.sites)
        if way is None or way.wrong or not way.sites or there:
            yield
            return
        try:
            self.replaced.ask(way.choices, way.sites + checkpointed)
            yield
        finally:
            self.replaced.ask(self.choices)

    def __repr__(self) -> str:
        return f"Optimized({sum(len(g.sites) for g in self.kept)} modules replaced)"

    def __str__(self) -> str:
        from whet.report import swap_tables  # only report formats, and it stands below

        return swap_tables.text(self.to_record())

    def to_record(self) -> dict:
        """Every figure as plain data that JSON can hold; what was not measured is None."""
        kept, grouped_paths = self.kept, {(g.kind, s.path) for g in self.groups for s, _ in g.sites}
        return {
            "kind": "train" if self.mode == "train" else "forward", "dry_run": self.dry,
            "before_ms": self.before_ms, "after_ms": self.after_ms, "speedup": ratio(self.before_ms, self.after_ms),
            "groups": [g.to_record() | {"replaced": any(g is k for k in kept), "would_be": g.replaced} for g in self.groups],
            "left": [
                {"kind": x.kind, "path": x.path, "why": x.why} for x in self.replaced.left
                if (x.kind, x.path) not in grouped_paths
            ],
            "entries": list(self.entries.values()), "note": self.note, "seconds": self.seconds,
            "batches": self.batches, "lock_lines": self.lock_lines, "memory": self.memory, "optimizer": self.optimizer,
            "allow": list(self.allow), "way": self.way,
        }


def optimize(
    model: nn.Module, batch: Any, *, mode: str | None = None, loss: Callable | None = None, lock: Lock | str | None = None,
    keep_logits: bool | None = None, optimizer: torch.optim.Optimizer | None = None, max_memory: int | str | None = None,
    allow: str | Iterable[str] = (), seconds: float = 0.15, progress: Progress = lambda text, done, total: None,
) -> nn.Module:
    """Replace parts of this model, in place, by kernels that are proved to compute the same and measured faster here.

    batch    what the model's forward takes: a dict, a tuple or a tensor, as large as in real use; or a list of dicts or of
             tuples, several batches: parts are replaced where the whole is slower at none of them
    mode     "train" or "infer"; None: "train" where the forward gives a loss
    loss     loss(output) -> scalar, where the model returns none
    lock     a path, where choices and decisions are kept between processes; None: $WHET_LOCK, else ./whet.lock
    keep_logits  False: in training the head and the loss may be one, and the model returns None for its logits. True: never.
             None: so for a Hugging Face model that is given labels, not for one that calls cross_entropy itself
    optimizer   its step is part of the whole that is timed; weights and its state are afterwards as they were
    max_memory  bytes, or "40GiB": where a training step takes more on a GPU, the fewest repeated blocks are checkpointed
    allow       "tf32": float32 products as TF32, set for the process until restore(); on a GPU
    Returns the model; print(model.whet) shows what was done, whet.restore(model) takes it back.
    """
    limit, names = None if max_memory is None else bytes_of(max_memory), allowed(allow)
    with quick_collections(), begun(model, batch, mode, loss, keep_logits) as (report, works, calls):
        refuse_step_options(works[0], optimizer, limit)
        try:
            with in_allowed(report, names):
                whole = with_optimizer(report, works, optimizer)
                _optimize(report, OptimizeTask(works, whole, calls, seconds, progress, keep_logits), Lock.of(lock))
                if limit is not None:
                    _fit(report, whole[0], calls, limit, seconds)
        except BaseException:
            report.replaced.restore()
            raise
    model.__dict__["whet"] = report
    return model


def restore(model: nn.Module) -> nn.Module:
    """Put a model back exactly as optimize() found it; one that was not optimised stays as it is."""
    report = model.__dict__.pop("whet", None)
    if isinstance(report, Optimized):
        report.replaced.restore()
        if report.precision_before:
            set_float32_precision(report.precision_before)
    return model


@contextlib.contextmanager
def begun(
    model: nn.Module, batch: Any, mode: str | None, loss: Callable | None, keep_logits: bool | None = None
) -> Iterator[tuple[Optimized, list[Workload], list[Met]]]:
    """An empty report and the workloads that it is about, of a model that is not optimised, or not any more."""
    refuse(model, mode, keep_logits)
    calls, started = [usable(call) for call in as_calls(batch)], now()
    restore(model)
    report = Optimized(model, Replaced(model))
    with prepared(model, mode, calls[0], loss) as work:
        report.mode = "train" if work.kind == "train" else "infer"
        yield report, [work, *(replace(work, args=c.args, kwargs=c.kwargs) for c in calls[1:])], calls
    report.seconds = round(now() - started, 1)


@dataclass(frozen=True)
class OptimizeTask:
    """What optimize() is to work on, and how long.

    works, whole   a step of each batch, the largest first: as parts are timed, and with the optimizer where there is one
    calls          what the model is given at each batch
    crew           children that were started ahead, where the lock knows nothing of such a model
    ahead          what they verify already
    """

    works: list[Workload]
    whole: list[Workload]
    calls: list[Met]
    seconds: float
    progress: Progress
    keep_logits: bool | None
    crew: Crew | None = None
    ahead: Ahead | None = None

    @property
    def train(self) -> bool:
        return self.works[0].kind == "train"

    def find(self, model: nn.Module, known: Known) -> Replaced:
        """The parts that can be replaced, proved but for those that are known."""
        keep_logits = self.keep_logits if self.train else True
        return recognise(model, self.calls[0], Choices(), keep_logits=keep_logits, known=known, train=self.train)


def _optimize(report: Optimized, asked: OptimizeTask, lock: Lock) -> None:
    around = (asked.keep_logits, report.optimizer, report.allow)
    decided = Decisions(lock, report.model, asked.calls, asked.works[0].kind, around, modes_here())
    ahead = _worth_starting_ahead(decided)
    with Crew(hands_here() if ahead else 0) as crew, contextlib.ExitStack() as stack:
        asked = replace(asked, crew=crew)
        if ahead:
            asked.progress("looking for what can be replaced", 0, 1)
            started = verifying(report.model, asked, lock=lock, modes=decided.modes, reach=REACH)
            asked = replace(asked, ahead=stack.enter_context(started))
        while not _attempt(report, asked, decided):
            report.groups, report.ways, report.note = [], {}, ""
    report.lock_lines = decided.lines()


def _worth_starting_ahead(decided: Decisions) -> bool:
    """Whether there is much to verify: where the lock has met no such model."""
    return torch.cuda.is_available() and leader() and not decided.met_before()


def _attempt(report: Optimized, asked: OptimizeTask, decided: Decisions) -> bool:
    """Whether it is done; not where a decision of the lock turned out not to hold, which then no longer counts."""
    try:
        return _decide(report, asked, decided)
    except Exception as e:
        report.replaced.restore()
        if not decided.held:
            raise
        decided.ignore_all(error_line(e))
        return False


def _decide(report: Optimized, asked: OptimizeTask, decided: Decisions) -> bool:
    model = report.model
    asked.progress("looking for what can be replaced", 0, 1)
    report.replaced = found = with_memory(
        asked.ahead, lambda: asked.find(model, decided.verdicts), lambda found: any(OUT_OF_MEMORY in x.why for x in found.left)
    )
    if not found.sites:
        report.note = "nothing was replaced"
        return True
    if not _tuned(report, asked, found.sites, decided):
        return False
    with uncached(model):
        for way in report.ways.values():
            way.groups = _timed_groups(report, asked, way, found.sites, decided)
        ways = list(report.ways.values())
        lost = {way.mode: way.uncovered for way in ways}
        if more := prove_covered(found, Choices(), set().union(*lost.values())):
            alone = [s for s in found.sites if not s[0].covers]
            if not _tuned(report, asked, alone + more, decided):
                return False
            for way in ways:
                rest = joined(way.groups, [s for s in more if (s[0].kind, s[0].path) in lost[way.mode]])
                way.groups += _timed_groups(report, asked, way, rest, decided)
        if any(way.sites for way in ways):
            report.ways |= {way.mode: way for way in [mixed(report.ways, report.entries)] if way}
            return _whole(report, asked, decided)
    report.choose(next(iter(report.ways)))
    decided.save(report, None, "")
    return True


def _tuned(report: Optimized, asked: OptimizeTask, sites: list[tuple[Site, Verdict]], decided: Decisions) -> bool:
    """Candidates are chosen for what these sites ask; False where that is not what a decision of the lock was taken with."""
    made = with_memory(asked.ahead, lambda: recorded(report.replaced, asked.works, sites))
    tuned = asked.ahead.tuned(made, asked.seconds) if asked.ahead else None
    tuned = tuned or tune(made, decided.lock, decided.modes, asked.progress, asked.seconds, reach=REACH, crew=asked.crew)
    if asked.crew is not None:
        asked.crew.stop()  # whoever was not needed
    report.entries |= tuned.entries
    for mode in (m for m in decided.modes if m in tuned.choices):
        report.ways.setdefault(mode, Way(mode, tuned.choices[mode])).choices = tuned.choices[mode]
    calls = [call for call, _ in made]
    return not any([decided.disagree(calls, way.choices, way.mode) for way in report.ways.values()])


def _timed_groups(
    report: Optimized, asked: OptimizeTask, way: Way, sites: list[tuple[Site, Verdict]], decided: Decisions
) -> list[SiteGroup]:
    """The groups of these sites, each by the lock's decision or timed at the largest batch."""
    groups = grouped(sites)
    fresh = [g for g in groups if decided.of(g, way.mode) is None and g.sites[0][0].alone]
    met = met_in(report.model, asked.calls[0], {g.sites[0][0].path for g in fresh}) if fresh else {}
    for i, group in enumerate(groups):
        if entry := decided.of(group, way.mode):
            group.recall(entry)
        elif group.sites[0][0].alone:
            asked.progress(f"timing {group.words}", i, len(groups))
            decided.timed += 1
            _time_group(group, asked.works[0], met, way.choices, asked.seconds, way.mode)
    return groups


def _whole(report: Optimized, asked: OptimizeTask, decided: Decisions) -> bool:
    """All replacements together: proved once more, then timed against the model as it was, at every batch.

    Where the lock has the times, the way that is used is proved; a step that compile_step captures by another it proves itself.
    """
    found, calls, ways = report.replaced, asked.calls, [way for way in report.ways.values() if way.sites]
    known = decided.whole(ways)
    if known:
        used, _ = best_of(known["batches"], [way.mode for way in ways])
        ways = [way for way in ways if way.mode == used]
    right = [way for way in ways if _together(found, way, calls, asked.train)]
    if len(right) < len(ways) and decided.held and not (right and decided.whole(right)):
        decided.ignore_all(f"together they are wrong: {next(way.wrong for way in ways if way.wrong)}")
        return False
    if not right:
        found.restore()
        found.left += [Left(s.path, f"together they are wrong: {ways[0].wrong}", s.kind) for s, _ in ways[0].sites]
        report.groups, report.choices, found.sites = ways[0].groups, ways[0].choices, []
        report.note = f"nothing was replaced: together the replacements are wrong: {ways[0].wrong}"
        return True
    known, key = known or decided.whole(right), decided.whole_key(right)
    steps = zip(asked.whole, calls)
    report.batches = known["batches"] if known else [_race_whole(report, right, w, c, asked.seconds) for w, c in steps]
    decided.timed += known is None
    mode, slower = best_of(report.batches, [way.mode for way in right])
    for b in report.batches:
        b["after_ms"], b["slower"] = b["ms"][mode], mode in b["slower_in"]
    report.before_ms, report.after_ms = (report.batches[0][name] for name in ("before_ms", "after_ms"))
    report.choose(mode)
    if slower:
        found.restore()
        at = f" at {slower}" if len(calls) > 1 else ""
        found.sites, report.note = [], f"nothing was replaced: all together it is not faster{at}"
        if (graph := report.ways.get(GRAPH)) and graph.sites and not graph.wrong:
            report.note += f"; a CUDA graph of the step, by whet.compile_step, may have {len(graph.sites)} modules replaced"
    else:
        found.ask(report.choices)
    whole = {"what": f"model: {type(report.model).__name__}", "replaced": not slower, "before_ms": report.before_ms,
             "after_ms": report.after_ms, "why": report.note, "batches": report.batches}
    decided.save(report, None if known else whole, key)
    return True


def _together(found: Replaced, way: Way, calls: list[Met], train: bool) -> bool:
    """Whether all that a way replaces is right together, at a small part of each batch; else why not is noted."""
    found.sites = way.sites
    for small in {facts_of(c): c for c in map(cut, calls)}.values():
        verdict = prove(together(found, small, train), small, way.choices)
        if not verdict.ok:
            way.wrong = verdict.why
            return False
    return True


def _race_whole(report: Optimized, ways: list[Way], work: Workload, call: Met, seconds: float) -> dict:
    """The whole step before and after, each way, in turns."""
    found = report.replaced

    def step(way: Way | None):
        found.ask(way.choices, way.sites) if way else found.restore()
        if report.precision_before:
            set_float32_precision("high" if way else report.precision_before)
        return work.step()

    runs: dict[str, Callable] = {BEFORE: lambda: step(None)} | {way.mode: functools.partial(step, way) for way in ways}
    with undone(work):
        raced = race(runs, keep=BEFORE, seconds=seconds, flush=False)
    if report.precision_before:
        torch.set_float32_matmul_precision("high")
    return {
        "batch": size_of(call), "before_ms": raced.timings[BEFORE].ms, "ms": {w.mode: raced.timings[w.mode].ms for w in ways},
        "mib": {w.mode: raced.timings[w.mode].peak_mib for w in ways}, "slower_in": slower_in(raced, [w.mode for w in ways]),
    }


def _fit(report: Optimized, work: Workload, calls: list[Met], limit: int, seconds: float) -> None:
    """Blocks are checkpointed until a step stays below the limit."""
    small = cut(calls[0])

    def proved() -> Verdict:
        report.replaced.restore()
        return prove(together(report.replaced, small), small, report.choices)

    with uncached(report.model):
        fit(report, work.step, lambda: undone(work), calls[0], limit, proved, seconds)


def together(found: Replaced, call: Met, train: bool = True) -> Site:
    """Every site at once, as one. In training a loss by that name is what counts; else all outputs that are still there."""
    model = found.model
    compares = next((s.compares for s, _ in found.sites if not s.path and s.compares), ())
    if train and not compares:
        with quiet(model), uncached(model), torch.no_grad():
            compares = tuple(k for k in floating(model(*call.args, **call.kwargs)) if k == "['loss']")
    asks = any(s.asks for s, _ in found.sites)
    return Site("", model, lambda m, ops: edits_of(found, m, ops), "the whole model", compares=compares, asks=asks)


def edits_of(found: Replaced, model: nn.Module, ops: Choices) -> Iterator[Edit]:
    """The edits of every site, in this model or a copy of it; a site that edits what another did comes after it."""
    for site, _ in found.sites:
        yield from site.edits(model.get_submodule(site.path), ops)
