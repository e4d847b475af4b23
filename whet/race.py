"""Which of several is fastest, from times taken in turns: the statistics of a race and the rule that settles it. No clock.

Every round runs each candidate once, so what slows a round touches all equally, and candidates are compared by the ratios
of their times within rounds. Of these the median counts, and its interval between order statistics, which holds for any
distribution: that half of the rounds lie on either side of the true median is all it needs.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace

TIE = 0.01  # a difference this small is none
NARROW = 0.04  # a tie is believed once the simpler one is surely no more than this slower
DOUBT = 0.01  # that some interval of a race misses its true ratio; a race looks at them several times, hence not 5%
MARGINS = ((5, 1.2), (3, 5.0))  # (rounds, ratio): in fewer rounds than that takes, every ratio must be over this

FASTEST = "fastest of the verified"
TIED = "a tie: the simplest is kept"
LEANEST = "a tie: the leanest is kept"
LEAN, LEAN_MIB = 0.5, 256.0  # of the simplest one's memory at most, and so much less: what a leaner one has to offer
NOISY = "too noisy to decide"


@dataclass(frozen=True)
class Timing:
    ms: float  # median
    low: float  # first quartile
    high: float  # third quartile
    samples: int
    host_us: float | None = None  # host time to issue the work, eager mode on a GPU
    peak_mib: float | None = None  # extra device memory at the highest point of one run

    @property
    def notch(self) -> float:
        """How far the median may be off, 95%: the notch of a box plot."""
        return 1.57 * (self.high - self.low) / self.samples**0.5

    @property
    def spread(self) -> float:
        """How far apart two medians must lie to differ: the notch, and never under 1%."""
        return max(self.notch, TIE * self.ms)

    def as_dict(self) -> dict:
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


def timing(ms: Sequence[float], host_us: float | None = None, peak: float | None = None) -> Timing:
    quartiles = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [ms[0]] * 3
    return Timing(statistics.median(ms), quartiles[0], quartiles[2], len(ms), host_us, peak)


def tie(a: Timing, b: Timing) -> bool:
    """A difference inside the spread is no difference. For two medians that must do; candidates are ranked by `decide`."""
    return abs(a.ms - b.ms) <= max(a.spread, b.spread)


@dataclass(frozen=True)
class Ratio:
    """How many times as long one candidate takes as another, and the interval in which the true ratio lies."""

    value: float
    low: float
    high: float
    rounds: int  # that it was taken from
    sure: bool = True  # the rounds were enough for the confidence asked

    @property
    def slower(self) -> bool:
        """Surely slower, and by more than a tie."""
        if self.sure:
            return self.low > 1 + TIE
        return self.low > next((margin for least, margin in MARGINS if self.rounds >= least), math.inf)

    @property
    def tied(self) -> bool:
        """Perhaps a tie, and surely little slower than one."""
        return self.sure and self.low <= 1 + TIE and self.high <= 1 + NARROW

    @property
    def maybe_faster(self) -> bool:
        """Perhaps faster, by more than a tie is believed with."""
        return not self.slower and not (self.sure and self.low >= 1 / (1 + NARROW))

    def as_dict(self) -> dict:
        """As the lock and records hold it."""
        return {f"vs_best{end}": round(v, 4) for end, v in (("", self.value), ("_low", self.low), ("_high", self.high))}


@functools.cache
def rank(n: int, doubt: float) -> int:
    """The k for which the k-th smallest and the k-th largest of n hold the median, but for the doubt; 0 if n are too few."""
    k, tail = 0, 1  # tail: the ways in which at most k of n fall on one side
    while k < n // 2 and 2 * tail <= doubt * 2**n:
        k += 1
        tail += math.comb(n, k)
    return k


@functools.cache
def fewest(rivals: int) -> int:
    """The fewest rounds that can settle a race against so many rivals by anything but a wide margin."""
    return next(n for n in itertools.count(1) if rank(n, DOUBT / max(rivals, 1)))


def paired(a: Sequence[float], b: Sequence[float], rivals: int = 1) -> Ratio:
    """a's time over b's, from the rounds that both ran: the median, between its order statistics.

    rivals: how many such intervals are to hold together
    """
    ratios = sorted(x / y for x, y in zip(a, b))
    k = rank(len(ratios), DOUBT / max(rivals, 1))
    low, high = (ratios[k - 1], ratios[-k]) if k else (ratios[0], ratios[-1])
    return Ratio(statistics.median(ratios), low, high, len(ratios), k > 0)


def through(a: Ratio, b: Ratio) -> Ratio:
    """a's time over b's where each is known over a third that ran beside it."""
    return Ratio(a.value / b.value, a.low / b.high, a.high / b.low, min(a.rounds, b.rounds), a.sure and b.sure)


def apart(a: Timing, b: Timing) -> Ratio:
    """a's time over b's where they did not run in turns: each median may be off by its notch."""
    low, high = (max(a.ms + s * a.notch, 0.0) / max(b.ms - s * b.notch, 1e-9) for s in (-1, 1))
    samples = min(a.samples, b.samples)
    return Ratio(a.ms / b.ms, low, high, samples, rank(samples, DOUBT) > 0)


@dataclass(frozen=True)
class Outcome:
    """What was chosen and by which figures."""

    chosen: str
    why: str
    ratios: dict[str, Ratio]  # each candidate's time over the fastest one's
    settled: bool  # more rounds would not change it

    @property
    def tied(self) -> bool:
        return self.why.startswith(TIED)

    def over(self, name: str) -> float:
        """A candidate's time over the chosen one's."""
        return self.ratios[name].value / self.ratios[self.chosen].value

    def as_dict(self) -> dict:
        return {"chosen": self.chosen, "why": self.why, "ratios": {n: astuple(r) for n, r in self.ratios.items()}}


def outcome(chosen: str, why: str, ratios: Mapping[str, Sequence]) -> Outcome:
    """An Outcome back from its dict."""
    return Outcome(chosen, why, {n: Ratio(*r) for n, r in ratios.items()}, True)


def leanest(found: Outcome, timings: Mapping[str, Timing]) -> Outcome:
    """Of candidates that tie, the one that takes least memory, where the simplest takes much more of it."""
    mib = {n: t.peak_mib for n, t in timings.items() if t.peak_mib is not None and not found.ratios[n].slower}
    if not found.tied or found.chosen not in mib:
        return found
    lean = min(mib, key=lambda n: mib[n])
    most = min(LEAN * mib[found.chosen], mib[found.chosen] - LEAN_MIB)
    return replace(found, chosen=lean, why=LEANEST) if mib[lean] <= most and found.ratios[lean].tied else found


def decide(
    order: Sequence[str], best: str, ratio: Callable[[str, str], Ratio], keep: str | None, out: Sequence[str] = ()
) -> Outcome:
    """The simplest that the best does not surely beat, where the intervals are narrow enough to say so; else what there was.

    order  simplest first
    best   the one with the least time
    ratio  one's time over another's
    keep   what the user had
    out    those that were found to be slower before
    """
    ratios = {n: ratio(n, best) if n != best else Ratio(1.0, 1.0, 1.0, 0) for n in order}
    left = [n for n in order if n not in out and not ratios[n].slower]
    simplest = left[0]
    if (simplest == best or ratios[simplest].tied) and not any(ratios[n].maybe_faster for n in left[1:] if n != best):
        return Outcome(simplest, FASTEST if simplest == best else TIED, ratios, True)
    if keep is None or keep not in ratios:
        return Outcome(simplest, f"{NOISY}: kept {simplest}", ratios, False)
    if keep in left:
        return Outcome(keep, f"{NOISY}: kept {keep}", ratios, False)
    sure = next(n for n in left if n == best or ratio(keep, n).slower)
    return Outcome(sure, f"{NOISY}: kept {sure}, which is faster than {keep}", ratios, False)


def race_outcome(times: Mapping[str, Sequence[float]], keep: str | None = None) -> Outcome:
    """The outcome of times taken in turns, simplest candidate first; those with fewer rounds than others fell out as slower."""
    rounds = max(map(len, times.values()))
    left = [n for n, ms in times.items() if len(ms) == rounds]
    middle = [statistics.median(one) for one in zip(*(times[n] for n in left))]
    best = min(left, key=lambda n: statistics.median(x / m for x, m in zip(times[n], middle)))
    out = [n for n in times if n not in left]
    return decide(list(times), best, lambda a, b: paired(times[a], times[b], len(left) - 1), keep, out)


def apart_outcome(timings: Mapping[str, Timing], keep: str | None = None) -> Outcome:
    """The outcome of times that were not taken in turns, simplest candidate first."""
    best = min(timings, key=lambda n: timings[n].ms)
    return decide(list(timings), best, lambda a, b: apart(timings[a], timings[b]), keep)
