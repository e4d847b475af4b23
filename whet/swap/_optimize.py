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
from whet.op import discover
from whet.race import Timing
from whet.swap import Edit, Journal, Left, Met, Site
from whet.swap._given import kind_of, refuse_model, undisturbed, usable
from whet.swap._proof import cast, floating, prove, upstream
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
    forms_ms: dict[str, float] = field(default_factory=dict)  # {form: its time}, of every form that ran

    @property
    def form(self) -> str:
        """Of the forms of its sites, the one that is used, or all between which no race has chosen."""
        return " or ".join(s.form for s in self.sites[0][0].in_each_form() if s.form)

    def use(self, form: str, impls: dict[str, str]) -> None:
        self.sites, self.impls = [(s.with_forms((form,)), v) for s, v in self.sites], impls

    @property
    def share(self) -> float:
        """Of the error budget, the most that a site used."""
        return max(v.share for _, v in self.sites)

    def to_record(self) -> dict:
        return {
            "kind": self.kind, "what": self.words, "modules": len(self.sites), "paths": [s.path for s, _ in self.sites],
            "impls": self.impls, "form": self.form, "forms_ms": self.forms_ms, "share": self.share,
            "before_ms": self.before_ms, "after_ms": self.after_ms,
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
    refuse_model(model)


@contextlib.contextmanager
def begun(
    model: nn.Module, batch: Any, mode: str | None, loss: Callable | None, keep_logits: bool | None = None
) -> Iterator[tuple[Optimized, Workload, Met]]:
    """An empty report and the workload that it is about, of a model that is not optimised, or not any more."""
    refuse(model, mode, keep_logits)
    call, started = usable(as_call(batch)), now()
    restore(model)
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
        with undisturbed(model), quiet(model):
            if mode != "infer":
                model.train()
            work.kind = kind_of(work, mode)
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
    keep_logits = keep_logits if work.kind == "train" else True
    report.replaced = found = recognise(model, call, Choices(), keep_logits=keep_logits)
    if not found.sites:
        report.note = "nothing was replaced"
        return
    tuned = tune(list(recorded(found, work).calls.values()), lock, ("eager",), progress, seconds)
    report.choices, report.entries = tuned.choices["eager"], tuned.entries
    report.groups = grouped(found.sites)
    with uncached(model):
        heads = {g.sites[0][0].path for g in report.groups}
        met = met_in(model, call, heads)
        for i, group in enumerate(report.groups):
            progress(f"timing {group.words}", i, len(report.groups))
            _time_group(group, work, met, report.choices, seconds)
        kept = [g for g in report.groups if g.replaced]
        found.left += [Left(s.path, f"{g.words}: {g.why}", g.kind) for g in report.groups if not g.replaced for s, _ in g.sites]
        found.sites = [s for g in kept for s in g.sites]
        if found.sites:
            _whole(report, work, call, seconds)


def recorded(found: Replaced, work: Workload) -> Recorder:
    """The calls that the replacements make, each site in every one of its forms."""
    recorder = Recorder()
    for nth in range(max(1 + len(s.forms) for s, _ in found.sites)):
        formed = [(s.in_each_form()[min(nth, len(s.forms))], v) for s, v in found.sites]
        found.ask(recorder, formed)
        with torch.set_grad_enabled(work.kind == "train"), uncached(found.model):
            work.forward()
        found.restore()
    return recorder


def grouped(sites: list[tuple[Site, Verdict]]) -> list[SiteGroup]:
    found: dict[tuple, SiteGroup] = {}
    for site, verdict in sites:
        key = site.kind, site.words, type(site.module), site.form, *site.forms
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
    """The run with the site's edits in place, made once: making them is no part of what is timed."""
    edits, journal = site.edits(site.module, ops), Journal()

    def both():
        try:
            journal.make(edits)
            return run()
        finally:
            journal.undo()

    return both


def serving(site: Site, run: Callable, ops: Choices) -> dict[str, str]:
    """{op: candidate} of what the site's replacement asks for in one run."""
    recorder = Recorder()
    toggled(site, recorder, run)()
    return {call.op: ops.pick(discover()[call.op], call) for call, _ in recorder.calls.values()}


def served_forms(site: Site, run: Callable, ops: Choices) -> tuple[dict[str, tuple[Site, dict[str, str]]], str]:
    """{form, or AFTER: (the site in it, what serves it)} of those that run on the whole batch; why another did not."""
    found, why = {}, ""
    for one in site.in_each_form():
        try:
            found[one.form or AFTER] = one, serving(one, run, ops)
        except Exception as e:
            why = f"it could not be timed: {error_line(e)}"
    return found, why


def _time_group(group: SiteGroup, work: Workload, met: dict[str, Met], ops: Choices, seconds: float) -> None:
    """Every form of the group's first site against the module as it is; the group takes the form that was chosen."""
    site = group.sites[0][0]
    run = work.step if not site.path else stepper(site.module, met[site.path], work.kind == "train")
    forms, group.why = served_forms(site, run, ops)
    runs = {BEFORE: run} | {name: toggled(one, ops, run) for name, (one, _) in forms.items()}
    try:
        raced = race(runs, keep=BEFORE, seconds=seconds) if forms else None
    except Exception as e:
        raced, group.why = None, f"it could not be timed: {error_line(e)}"
    if raced is None:
        group.replaced = False
        return
    times, found = raced.timings, raced.outcome
    chosen, group.why = found.chosen, found.why
    if chosen == BEFORE:
        leaner = {n: mib for n in forms if not found.ratios[n].slower and (mib := saves(times[BEFORE], times[n])) is not None}
        group.replaced = found.tied and bool(leaner)
        chosen = min(leaner, key=lambda n: leaner[n]) if group.replaced else min(forms, key=lambda n: found.ratios[n].value)
        group.why += ", and takes less memory" * group.replaced
    group.use(forms[chosen][0].form, forms[chosen][1])
    group.before_ms, group.after_ms = times[BEFORE].ms, times[chosen].ms
    group.forms_ms = {name: times[name].ms for name in forms}


def saves(before: Timing, after: Timing) -> float | None:
    """The memory that it takes, in MiB, where that is surely less than before."""
    if before.peak_mib is None or after.peak_mib is None or not after.peak_mib < 0.95 * before.peak_mib:
        return None
    return after.peak_mib


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
    asks = any(s.asks for s, _ in found.sites)
    return Site("", model, lambda m, ops: edits_of(found, m, ops), "the whole model", compares=compares, asks=asks)


def edits_of(found: Replaced, model: nn.Module, ops: Choices) -> Iterator[Edit]:
    """The edits of every site, in this model or a copy of it; a site that edits what another did comes after it."""
    for site, _ in found.sites:
        yield from site.edits(model.get_submodule(site.path), ops)
