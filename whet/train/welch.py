"""Welch's t-test: whether two means differ, of few values with spreads of their own. No clock, no SciPy."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
TINY = 1e-300  # what a denominator of the continued fraction is at least
TERMS = 10_000


@dataclass(frozen=True)
class WelchTest:
    """b's mean less a's, the interval in which the true difference lies, and how likely so large a one is by chance."""

    difference: float
    low: float
    high: float
    t: float
    df: float
    p: float  # two-sided

    @property
    def significant(self) -> bool:
        return self.p < 1 - CONFIDENCE


def welch(a: Sequence[float], b: Sequence[float]) -> WelchTest | None:
    """The test at 95%; None with fewer than two values on a side, or where neither side has any spread."""
    if min(len(a), len(b)) < 2:
        return None
    va, vb = (statistics.variance(values) / len(values) for values in (a, b))
    difference, error = statistics.fmean(b) - statistics.fmean(a), math.sqrt(va + vb)
    if not error:
        return None
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    margin, t = t_quantile(CONFIDENCE, df) * error, difference / error
    return WelchTest(difference, difference - margin, difference + margin, t, df, t_tails(t, df))


def t_tails(t: float, df: float) -> float:
    """The share of Student's t distribution that lies beyond t on either side."""
    return beta_share(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


def t_quantile(confidence: float, df: float) -> float:
    """The t between whose negative and positive the share `confidence` of the distribution lies, by bisection."""
    low, high = 0.0, 1.0
    while t_tails(high, df) > 1 - confidence:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_tails(middle, df) > 1 - confidence else (low, middle)
    return high


def beta_share(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function I_x(a, b); rest: 1 - x, given so that it is not rounded away."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - beta_share(b, a, rest, x)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(logs) / (a * beta_fraction(a, b, x))


def beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of the incomplete beta function, by Lentz's method."""
    value = c = 1.0
    d = 0.0
    for n in range(1, TERMS):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d or TINY)
        c = 1 + term / c or TINY
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
