"""What whet.optimize would replace in a model: found and proved, with nothing replaced and nothing timed."""

from collections.abc import Callable
from typing import Any

from torch import nn

from whet.choices import Choices
from whet.lock import Lock
from whet.swap._groups import grouped
from whet.swap._kept import Decisions
from whet.swap._optimize import Optimized, begun
from whet.swap._replace import recognise
from whet.swap._ways import Way
from whet.tune import modes_here


def preview(
    model: nn.Module, batch: Any, *, mode: str | None = None, loss: Callable | None = None, lock: Lock | str | None = None
) -> Optimized:
    """The report that optimize() would begin with. Takes its arguments; the model is afterwards as it was before it.

    lock   whose times of these groups are shown, where it has them
    """
    with begun(model, batch, mode, loss) as (report, works, calls):
        report.dry, report.replaced = True, recognise(model, calls[0], Choices(), train=works[0].kind == "train")
        sites = report.replaced.sites
        decided = Decisions(Lock.of(lock), model, calls, works[0].kind, (None, "", ()), modes_here())
        decided.find(report.replaced.proposed)
        for mode in decided.modes:
            groups = grouped(sites)
            for group in groups:
                group.recall(decided.of(group, mode))
            report.ways[mode] = Way(mode, Choices(), groups)
        report.groups = report.ways[decided.modes[0]].groups
        if whole := decided.whole([way for way in report.ways.values() if way.sites]):
            report.before_ms, report.after_ms, report.batches = whole["before_ms"], whole["after_ms"], whole["batches"]
    count = sum(len(g.sites) for g in report.groups if g.replaced)
    alone = [g for g in report.groups if g.sites[0][0].alone]
    known = [g.decided for g in alone if g.decided]
    timed = "nothing was timed"
    if known:
        timed = f"times of {len(known)} of {len(alone)} groups are the lock's, of {max(known)}"
    report.note = f"dry run: {count} module{'s' * (count != 1)} can be replaced; nothing was replaced and {timed}"
    return report
