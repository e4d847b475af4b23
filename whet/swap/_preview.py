"""What whet.optimize would replace in a model: found and proved, with nothing replaced and nothing timed."""

from collections.abc import Callable
from typing import Any

from torch import nn

from whet.choices import Choices
from whet.swap._optimize import Optimized, begun, grouped
from whet.swap._replace import recognise


def preview(model: nn.Module, batch: Any, *, mode: str | None = None, loss: Callable | None = None) -> Optimized:
    """The report that optimize() would begin with. Takes its arguments; the model is afterwards as it was before it."""
    with begun(model, batch, mode, loss) as (report, _, calls):
        report.dry, report.replaced = True, recognise(model, calls[0], Choices())
    report.groups = grouped(report.replaced.sites)
    count = len(report.replaced.sites)
    report.note = f"dry run: {count} module{'s' * (count != 1)} can be replaced; nothing was replaced and nothing was timed"
    return report
