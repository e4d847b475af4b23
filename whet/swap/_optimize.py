"""whet.optimize: parts of a live model replaced where that is proved right and measured faster, in place, and put back."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whet.choices import Choices, Recorder
from whet.figures import error_line, ms
from whet.judge import Verdict
from whet.lock import Lock
from whet.measure import now, race
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

    @property
    def share(self) -> float:
        """Of the error budget, the most that a site used."""
        return max(v.share for _, v in self.sites)


@dataclass
class Optimized:
    """What optimize() did to a model: print it."""

    model: nn.Module
    replaced: Replaced
    groups: list[SiteGroup] = field(default_factory=list)
    choices: Choices = field(default_factory=Choices)
    mode: str = "train"
    before_ms: float | None = None
    after_ms: float | None = None
    note: str = ""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Optimized({sum(len(g.sites) for g in self.groups if g.replaced)} modules replaced)"

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("kind", "what", "modules", "error / budget", "before", "after", "")]
        for g in self.groups:
            times = [ms(t) if t is not None else "-" for t in (g.before_ms, g.after_ms)]
            lines.append((g.kind, g.words, str(len(g.sites)), f"{g.share:.2f}", *times, g.why))
        widths = [max(map(len, column)) for column in zip(*lines)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        left: dict[tuple[str, str], list[str]] = {}
        for item in self.replaced.left:
            left.setdefault((item.kind, item.why), []).append(item.path or "the model")
        for (kind, why), paths in left.items():
            more = f" and {len(paths) - 1} more" if paths[1:] else ""
            rows.append(f"left as it is: {kind}, {paths[0]}{more}: {why}")
        if self.before_ms and self.after_ms:
            what = "training step" if self.mode == "train" else "forward"
            ratio = self.before_ms / self.after_ms
            rows.append(f"{what}: {ms(self.before_ms)} before, {ms(self.after_ms)} after, {ratio:.2f}x")
        return "\n".join([*rows, *([self.note] if self.note else [])])


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
    refuse(model, mode, keep_logits)
    restore(model)
    call, started = as_call(batch), now()
    report = Optimized(model, Replaced(model))
    with prepared(model, mode, call, loss) as work:
        report.mode = "train" if work.kind == "train" else "infer"
        try:
            _optimize(report, work, call, lock or Lock.read(), seconds, progress, keep_logits)
        except BaseException:
            report.replaced.restore()
            raise
    report.seconds = round(now() - started, 1)
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
def prepared(model: nn.Module, mode: str | None, call: Met, loss: Callable | None) -> Iterator[Workload]:
    """The workload, with modes, gradients, buffers and random numbers of the model afterwards as they were."""
    training = [(m, m.training) for m in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    work = Workload(model, call.args, call.kwargs, "train", loss_with=loss)
    try:
        with quiet(model):
            if mode != "infer":
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
    recorder = Recorder()
    found.ask(recorder)
    with torch.set_grad_enabled(work.kind == "train"), uncached(model):
        work.forward()
    found.restore()
    report.choices = tune(list(recorder.calls.values()), lock, ("eager",), progress, seconds).choices["eager"]
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


def _time_group(group: SiteGroup, work: Workload, met: dict[str, Met], ops: Choices, seconds: float) -> None:
    site = group.sites[0][0]
    run = work.step if not site.path else stepper(site.module, met[site.path], work.kind == "train")
    try:
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
