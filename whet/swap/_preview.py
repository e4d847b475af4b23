"""What whet.optimize would replace in a model: found and proved, with nothing replaced and nothing timed."""

from collections.abc import Callable
from typing import Any

from torch import nn

from whet.choices import Choices
from whet.measure import now
from whet.swap._optimize import Optimized, grouped, prepared, refuse, restore
from whet.swap._replace import Replaced, as_call, recognise


def preview(model: nn.Module, batch: Any, *, mode: str | None = None, loss: Callable | None = None) -> Optimized:
    """The report that optimize() would begin with. Takes its arguments; the model is afterwards as it was before it."""
    refuse(model, mode)
    restore(model)
    call, started = as_call(batch), now()
    report = Optimized(model, Replaced(model), dry=True)
    with prepared(model, mode, call, loss) as work:
        report.mode = "train" if work.kind == "train" else "infer"
        report.replaced = recognise(model, call, Choices())
    report.groups = grouped(report.replaced.sites)
    count = len(report.replaced.sites)
    report.note = f"dry run: {count} module{'s' * (count != 1)} can be replaced; nothing was replaced and nothing was timed"
    report.seconds = round(now() - started, 1)
    return report
