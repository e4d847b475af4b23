"""whet.optimize: parts of a live model replaced where that is proved right and measured faster, in place, and put back."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whet.choices import Choices, Recorder
from whet.figures import error_line
from whet.judge import Verdict
from whet.lock import Lock
from whet.measure import now, race
from whet.op import Call, discover
from whet.swap import Edit, Left, Met, Site
from whet.swap._proof import cast, edited, floating, prove, upstream
from whet.swap._replace import Replaced, as_call, cut, met_in, quiet, recognise, uncached
from whet.tune import tune
from whet.workload import Workload

MODES = ("train", "infer")
BEFORE, AFTER = "before", "after"
Progress = Callable[[str, int, int], None]


@dataclass
class SiteGroup:
    """Like sites: one kind, one formula, one size. They are timed by their first, and replaced or left together."""

    kind: str
    words: str
    sites: list[tuple[Site, Verdict]]
    before_ms: float | None = None
    after_ms: float | None = None
    why: str = ""
    replaced: bool = True
    impls: dict[str, str] = field(default_factory=dict)  # {op: the candidate that serves it}

    @property
    def share(self) -> float:
        """Of the error budget, the most that a site used."""
        return max(v.share for _, v in self.sites)

    def to_record(self) -> dict:
        return {
            "kind": self.kind, "what": self.words, "modules": len(self.sites), "paths": [s.path for s, _ in self.sites],
            "impls": self.impls, "share": self.share, "before_ms": self.before_ms, "after_ms": self.after_ms,
            "speedup": ratio(self.before_ms, self.after_ms), "why": self.why,
        }


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
    dry: bool = False  # parts were found and proved, none replaced and none timed

    @property
    def kept(self) -> list[SiteGroup]:
        """The groups that are replaced now."""
        return [g for g in self.groups if g.replaced and self.replaced.sites and not self.dry]

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
            "groups": [g.to_record() | {"replaced": any(g is k for k in kept)} for g in self.groups],
            "left": [
                {"kind": x.kind, "path": x.path, "why": x.why} for x in self.replaced.left
                if (x.kind, x.path) not in grouped_paths
            ],
            "entries": list(self.entries.values()), "note": self.note, "seconds": self.seconds,
        }


def ratio(before: float | None, after: float | None) -> float | None:
    return before / after if before and after else None


def optimize(
    model: nn.Module, batch: Any, *, mode: str | None = None, loss: Callable | None = None, lock: Lock | None = None,
    keep_logits: bool | None = None, seconds: float = 0.3, progress: Progress = lambda text, done, total: None,
) -> nn.Module:
    """Replace parts of this model, in place, by kernels that are proved to compute the same and measured faster here.

    batch    what the model's forward takes: a dict, a tuple or a tensor, as large as in real use
    mode     "train" or "infer"; None: "train" where the forward gives a loss
    loss     loss(output) -> scalar, where the model returns none
    lock     where choices are kept between processes; ./whet.lock where None
    keep_logits  False: in training the head and the loss may be one, and the model returns None for its logits. True: never.
             None: so for a Hugging Face model that is given labels, not for one that calls cross_entropy itself
    Returns the model; print(model.whet) shows what was done, whet.restore(model) takes it back.
    """
    with begun(model, batch, mode, loss, keep_logits) as (report, work, call):
        try:
            _optimize(report, work, call, lock or Lock.read(), seconds, progress, keep_logits)
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
    return model


def refuse(model: Any, mode: str | None, keep_logits: bool | None = None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"optimize: model must be a torch.nn.Module, got {type(model).__name__}")
    if mode not in (None, *MODES):
        raise ValueError(f"optimize: mode must be one of {MODES} or None, got {mode!r}")
    if keep_logits not in (None, True, False):
        raise ValueError(f"optimize: keep_logits must be True, False or None, got {keep_logits!r}")
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ValueError(f"optimize: parameter {meta[0]} is on the meta device ({len(meta)} such); load the weights first")


@contextlib.contextmanager
def begun(
    model: nn.Module, batch: Any, mode: str | None, loss: Callable | None, keep_logits: bool | None = None
) -> Iterator[tuple[Optimized, Workload, Met]]:
    """An empty report and the workload that it is about, of a model that is not optimised, or not any more."""
    refuse(model, mode, keep_logits)
    restore(model)
    call, started = as_call(batch), now()
    report = Optimized(model, Replaced(model))
    with prepared(model, mode, call, loss) as work:
        report.mode = "train" if work.kind == "train" else "infer"
        yield report, work, call
    report.seconds = round(now() - started, 1)


@contextlib.contextmanager
def prepared(model: nn.Module, mode: str | None, call: Met, loss: Callable | None) -> Iterator[Workload]:
    """The workload, with modes, gradients, buffers and random numbers of the model afterwards as they were."""
    training = [(m, m.training) for m in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    work = Workload(model, call.args, call.kwargs, "train", loss_with=loss)
    try:
        with quiet(model):
            if mode == "infer":
                work.kind = "infer"
            else:
                model.train()
                work.kind = "train" if mode == "train" or work.loss(work.forward()) is not None else "infer"
            if work.kind != "train":
                for module, flag in training:
                    module.training = flag
            yield work
    finally:
        for module, flag in training:
            module.training = flag
        for p, grad in grads:
            p.grad = grad


def _optimize(
    report: Optimized, work: Workload, call: Met, lock: Lock, seconds: float, progress: Progress, keep_logits: bool | None
) -> None:
    model = report.model
    progress("looking for what can be replaced", 0, 1)
    report.replaced = found = recognise(model, call, Choices(), keep_logits=keep_logits)
    if not found.sites:
        report.note = "nothing was replaced"
        return
    tuned = tune(calls_asked(found, work), lock, ("eager",), progress, seconds)
    report.choices, report.entries = tuned.choices["eager"], tuned.entries
    report.groups = grouped(found.sites + found.covered)
    with uncached(model):
        covering = [g for g in report.groups if any(s.covers for s, _ in g.sites)]
        _time_groups(covering, work, call, report.choices, seconds, progress)
        report.groups = without_covered(report.groups)
        others = [g for g in report.groups if not any(g is c for c in covering)]
        _time_groups(others, work, call, report.choices, seconds, progress)
        kept = [g for g in report.groups if g.replaced]
        found.left += [Left(s.path, f"{g.words}: {g.why}", g.kind) for g in report.groups if not g.replaced for s, _ in g.sites]
        found.sites = [s for g in kept for s in g.sites]
        if found.sites:
            _whole(report, work, call, seconds)


def calls_asked(found: Replaced, work: Workload) -> list[tuple[Call, int]]:
    """What the replacements ask of ops in one forward; and what the covered ones would, were those that cover them not kept."""
    ways, calls = [found.sites], dict[str, tuple[Call, int]]()
    if found.covered:
        ways.append([s for s in found.sites + found.covered if not s[0].covers])
    for sites in ways:
        recorder = Recorder()
        found.ask(recorder, sites)
        with torch.set_grad_enabled(work.kind == "train"), uncached(found.model):
            work.forward()
        calls = recorder.calls | calls
    found.restore()
    return list(calls.values())


def without_covered(groups: list[SiteGroup]) -> list[SiteGroup]:
    """The groups, less the sites that those of a group that is replaced cover."""
    gone = {where for g in groups if g.replaced for site, _ in g.sites for where in site.covers}
    for group in groups:
        group.sites = [(s, v) for s, v in group.sites if (s.kind, s.path) not in gone]
    return [g for g in groups if g.sites]


def grouped(sites: list[tuple[Site, Verdict]]) -> list[SiteGroup]:
    found: dict[tuple, SiteGroup] = {}
    for site, verdict in sites:
        key = site.kind, site.words, type(site.module)
        found.setdefault(key, SiteGroup(site.kind, site.words, [])).sites.append((site, verdict))
    return list(found.values())


def stepper(module: nn.Module, call: Met, train: bool) -> Callable:
    """Runs a module on what it met: forward, and backward where the model is trained."""
    dtype = next((t.dtype for t in floating((call.args, call.kwargs)).values()), torch.float32)
    args, kwargs = cast(call.args, dtype), cast(call.kwargs, dtype)
    leaves = [*(t for t in floating((args, kwargs)).values() if t.requires_grad), *module.parameters()]
    grads: dict[int, torch.Tensor] = {}

    def run():
        for t in leaves:
            t.grad = None
        with torch.set_grad_enabled(train):
            out = module(*args, **kwargs)
        outs = [t for t in floating(out).values() if t.requires_grad] if train else []
        if outs:
            for i in range(len(grads), len(outs)):  # made once: making them takes longer than the module
                grads[i] = upstream(outs[i])
            torch.autograd.backward(outs, [grads[i] for i in range(len(outs))])

    return run


def toggled(site: Site, ops: Choices, run: Callable) -> Callable:
    """The run with the site's edits in place."""
    def both():
        with edited(site.module, site, ops):
            return run()

    return both


def serving(site: Site, run: Callable, ops: Choices) -> dict[str, str]:
    """{op: candidate} of what the site's replacement asks for in one run."""
    recorder = Recorder()
    toggled(site, recorder, run)()
    return {call.op: ops.pick(discover()[call.op], call) for call, _ in recorder.calls.values()}


def _time_groups(
    groups: list[SiteGroup], work: Workload, call: Met, ops: Choices, seconds: float, progress: Progress
) -> None:
    met = met_in(work.model, call, {g.sites[0][0].path for g in groups}) if groups else {}
    for i, group in enumerate(groups):
        progress(f"timing {group.words}", i, len(groups))
        _time_group(group, work, met, ops, seconds)


def _time_group(group: SiteGroup, work: Workload, met: dict[str, Met], ops: Choices, seconds: float) -> None:
    site = group.sites[0][0]
    run = work.step if not site.path else stepper(site.module, met[site.path], work.kind == "train")
    try:
        group.impls = serving(site, run, ops)
        raced = race({BEFORE: run, AFTER: toggled(site, ops, run)}, keep=BEFORE, seconds=seconds)
    except Exception as e:
        group.replaced, group.why = False, f"it could not be timed: {error_line(e)}"
        return
    times, memory = raced.timings, [raced.timings[n].peak_mib for n in (BEFORE, AFTER)]
    group.before_ms, group.after_ms, group.why = times[BEFORE].ms, times[AFTER].ms, raced.outcome.why
    leaner = memory[0] is not None and memory[1] is not None and memory[1] < 0.95 * memory[0]
    if raced.outcome.chosen == BEFORE:
        group.replaced = raced.outcome.tied and leaner
        group.why = f"{raced.outcome.why}{', and takes less memory' if group.replaced else ''}"


def _whole(report: Optimized, work: Workload, call: Met, seconds: float) -> None:
    """All replacements together: proved once more, then timed against the model as it was."""
    found = report.replaced
    verdict = prove(together(found, cut(call), work.kind == "train"), cut(call), report.choices)
    if not verdict.ok:
        found.restore()
        found.left += [Left(s.path, f"together they are wrong: {verdict.why}", s.kind) for s, _ in found.sites]
        found.sites, report.note = [], f"nothing was replaced: together the replacements are wrong: {verdict.why}"
        return

    def step(after: bool):
        found.ask(report.choices) if after else found.restore()
        return work.step()

    raced = race({BEFORE: lambda: step(False), AFTER: lambda: step(True)}, keep=BEFORE, seconds=seconds, flush=False)
    report.before_ms, report.after_ms = raced.timings[BEFORE].ms, raced.timings[AFTER].ms
    if raced.outcome.chosen == BEFORE and not raced.outcome.tied:
        found.restore()
        found.sites, report.note = [], "nothing was replaced: all together it is not faster"
    else:
        found.ask(report.choices)


def together(found: Replaced, call: Met, train: bool = True) -> Site:
    """Every site at once, as one. In training a loss by that name is what counts; else all outputs that are still there."""
    model = found.model
    compares = next((s.compares for s, _ in found.sites if not s.path and s.compares), ())
    if train and not compares:
        with quiet(model), uncached(model), torch.no_grad():
            compares = tuple(k for k in floating(model(*call.args, **call.kwargs)) if k == "['loss']")
    return Site("", model, lambda m, ops: edits_of(found, m, ops), "the whole model", compares=compares)


def edits_of(found: Replaced, model: nn.Module, ops: Choices) -> list[Edit]:
    """The edits of every site, in this model or a copy of it."""
    return [e for site, _ in found.sites for e in site.edits(model.get_submodule(site.path), ops)]
