"""How figures and errors are written: three digits that count, no exponent, no zero for what is not zero; one line."""

import math

LONG = 240  # characters of an error that are kept: torch lists every backend it has
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


def error_line(e: BaseException) -> str:
    """'ValueError: what it says', in one line, and that cut where it is long."""
    message = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
    message = f"{message[:LONG]}..." if len(message) > LONG else message
    return f"{type(e).__name__}: {message}" if message else type(e).__name__
