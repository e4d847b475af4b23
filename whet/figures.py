"""How a figure is written: three digits that count, thousands set apart, no exponent, and no zero for what is not zero."""

import math

SMALLEST = 5e-5  # ms: half of the last decimal that is shown, under which a time is the clock's and the sums' rounding


def figure(value: float, digits: int = 3) -> str:
    """0.000123, 0.456, 12.3, 1,020: never 1.02e+03."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    written = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.01 else f"{100 * share:,.0f}%"


def ms(value: float | None) -> str:
    """A time for a table's cell, with four decimals under 1 ms and fewer above."""
    if value is None:
        return "-"
    if value < SMALLEST:
        return "0"
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"
