"""Groups of like sites: what calls they make, and each timed against the module as it was."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from whet.choices import Choices, Recorder
from whet.figures import error_line
from whet.judge import Verdict
from whet.measure import Race, race
from whet.op import Call, discover
from whet.race import Timing
from whet.swap import Journal, Met, Site
from whet.swap._kept import name_of
from whet.swap._proof import cast, floating, upstream
from whet.swap._replace import Replaced, uncached
from whet.workload import Workload

BEFORE, AFTER = "before", "after"


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
    decided: str = ""  # the day of the lock's decision; empty: it was timed now
    same: bool = False  # what would serve it is what it runs as it is: there is nothing to time

    @property
    def form(self) -> str:
        """Of the forms of its sites, the one that is used, or all between which no race has chosen."""
        return " or ".join(s.form for s in self.sites[0][0].in_each_form() if s.form)

    def use(self, form: str, impls: dict[str, str]) -> None:
        self.sites, self.impls = [(s.in_form(form), v) for s, v in self.sites], impls

    @property
    def share(self) -> float:
        """Of the error budget, the most that a site used."""
        return max(v.share for _, v in self.sites)

    def recall(self, entry: dict | None) -> None:
        """What the lock decided of it, if it did."""
        if entry is not None:
            self.before_ms, self.after_ms, self.why = entry["before_ms"], entry["after_ms"], entry["why"]
            self.replaced, self.decided = entry["replaced"], entry["date"]
            self.use(entry.get("form", ""), dict(entry.get("impls", {})))

    def to_record(self) -> dict:
        return {
            "kind": self.kind, "what": self.words, "modules": len(self.sites), "paths": [s.path for s, _ in self.sites],
            "impls": self.impls, "form": self.form, "forms_ms": self.forms_ms, "share": self.share,
            "before_ms": self.before_ms, "after_ms": self.after_ms,
            "speedup": ratio(self.before_ms, self.after_ms), "why": self.why, "decided": self.decided,
        }


def ratio(before: float | None, after: float | None) -> float | None:
    return before / after if before and after else None


def recorded(found: Replaced, works: list[Workload], sites: list[tuple[Site, Verdict]]) -> list[tuple[Call, int]]:
    """The calls that these sites make at every batch, in every form."""
    calls = dict[str, tuple[Call, int]]()
    for nth in range(max((1 + len(s.forms) for s, _ in sites), default=0)):
        recorder = Recorder()
        found.ask(recorder, [(s.in_each_form()[min(nth, len(s.forms))], v) for s, v in sites])
        with torch.set_grad_enabled(works[0].kind == "train"), uncached(found.model):
            for work in works:
                work.forward()
        calls = recorder.calls | calls
        found.restore()
    return list(calls.values())


def joined(groups: list[SiteGroup], more: list[tuple[Site, Verdict]]) -> list[tuple[Site, Verdict]]:
    """More sites, each put into the group of its like that was decided already; returns those that there is none for."""
    decided = {name_of(g.sites[0][0]): g for g in groups if not g.sites[0][0].forms}
    rest = []
    for site, verdict in more:
        group = decided.get(name_of(site))
        if group is not None and site.in_form(group.form).form == group.form:
            group.sites.append((site.in_form(group.form), verdict))
        else:
            rest.append((site, verdict))
    return rest


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


def plainly_served(impls: dict[str, str]) -> bool:
    """Whether plain PyTorch serves it: what is compiled is not to run while it is looked at."""
    return bool(impls) and all(impl in ("eager", discover()[op].stock) for op, impl in impls.items())


class NotedWork(TorchDispatchMode):
    """Notes which operators run on what, while it is on."""

    def __init__(self):
        super().__init__()
        self.seen: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_flatten((args, kwargs))[0]
        self.seen.append((func, [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in given]))
        return func(*args, **(kwargs or {}))


def same_work(run: Callable, other: Callable) -> bool:
    """Whether both run the same operators with the same options, on tensors of the same sizes, in the same order."""
    def noted(run: Callable) -> list:
        with NotedWork() as work:
            run()
        return work.seen

    try:
        return noted(run) == noted(other)
    except Exception:  # something in it cannot be looked at: that is for the clock to say
        return False


def raced_in(mode: str, runs: dict[str, Callable], seconds: float) -> tuple[Race, str]:
    """A race in a mode; one that cannot be captured as CUDA graphs is launched by the host, and why."""
    try:
        return race(runs, keep=BEFORE, mode=mode, seconds=seconds), ""
    except Exception as e:
        if mode != "graph":
            raise
        return race(runs, keep=BEFORE, seconds=seconds), f"launched by the host, since it was not captured: {error_line(e)}"


def _time_group(
    group: SiteGroup, work: Workload, met: dict[str, Met], ops: Choices, seconds: float, mode: str = "eager"
) -> None:
    """Every form of the group's first site against the module as it is; the group takes the form that was chosen.

    mode   "graph" takes what the device needs, the host's launches aside; a whole model is always launched by the host
    """
    site = group.sites[0][0]
    if not site.alone:
        return
    run = work.step if not site.path else stepper(site.module, met[site.path], work.kind == "train")
    forms, group.why = served_forms(site, run, ops)
    runs = {BEFORE: run} | {name: toggled(one, ops, run) for name, (one, _) in forms.items()}
    if site.path and forms and all(plainly_served(used) and same_work(run, runs[name]) for name, (_, used) in forms.items()):
        first, group.replaced, group.same = next(iter(forms.values())), False, True
        group.why = "it already makes the chosen PyTorch calls"
        return group.use(first[0].form, first[1])
    try:
        raced, how = raced_in(mode if site.path else "eager", runs, seconds) if forms else (None, "")
    except Exception as e:
        raced, how, group.why = None, "", f"it could not be timed: {error_line(e)}"
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
    group.why += f" ({how})" * bool(how)
    group.forms_ms = {name: times[name].ms for name in forms}


def saves(before: Timing, after: Timing) -> float | None:
    """The memory that it takes, in MiB, where that is surely less than before."""
    if before.peak_mib is None or after.peak_mib is None or not after.peak_mib < 0.95 * before.peak_mib:
        return None
    return after.peak_mib
