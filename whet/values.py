"""Hostile values: families of inputs that a kernel meets in a real run and that normally distributed ones never show.

An op names its arguments by their part in it; each family maps ordinary arguments to others of the same shapes, dtypes and
layouts, or to None where it has nothing to change.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Family = Callable[[dict], dict | None]
SMALL = 2.0**-10  # mean squares near 1e-6: there a norm's eps is half of what it divides by
OFFSET = 200.0  # exp(200) overflows float32: what does not subtract a maximum shows
OVERFLOWING = "overflowing scores"  # whose differences have few digits left: looked at for what overflows, and for gross errors
EXACT = "exact ties"  # of scores that are exact in any order: there the first of equals must be picked
UNDEFINED = "all targets ignored"  # the mean over no targets: 0 / 0
POISONED = ("a row of NaN", "a row of inf")  # judged by what they leave alone


@dataclass(frozen=True)
class Option:
    """The family of other values of scalar arguments, where they were given one: {name: value}."""

    new: Mapping

    def __call__(self, args: dict) -> dict | None:
        new = {k: v for k, v in self.new.items() if args[k]}
        return args | new if new else None


def relaid(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values in t's dtype and memory layout; of elements that share memory, the first one's."""
    kept = [1 if s == 0 and n > 1 else n for s, n in zip(t.stride(), t.shape)]
    part = values[tuple(slice(n) for n in kept)]
    return torch.empty_strided(kept, t.stride(), dtype=t.dtype, device=t.device).copy_(part).expand(t.shape)


def changed(names: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor | None], clamp: bool = True) -> Family:
    """The family that changes each named argument by one function, in float32 or wider; clamped to an eighth of its range."""

    def family(args: dict) -> dict | None:
        new = {}
        for name in names:
            t = args.get(name)
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel():
                values = change(t.to(torch.promote_types(t.dtype, torch.float32)))
                if values is not None:
                    limit = torch.finfo(t.dtype).max / 8
                    new[name] = relaid(t, values.clamp(-limit, limit) if clamp else values)
        return args | new if new else None

    return family


def heavy_tails(x: torch.Tensor) -> torch.Tensor:
    """Three channels a hundred times as large, and everywhere a tail: magnitudes from 0.01 to 100."""
    y = x * torch.exp(1.5 * torch.randn_like(x))
    y[..., : min(3, x.shape[-1])] *= 100.0
    return y


def wide_range(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Magnitudes spread evenly over powers of two from 2^-12 up to the limit."""

    def change(x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x) * torch.exp2(torch.rand_like(x) * (math.log2(limit) + 12.0) - 12.0)

    return change


def ties(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers, of which many are equal; every third row is constant, and one is zero. The first is neither."""
    y = x.round()
    if x.dim() > 1 and x.shape[-2] > 3:
        y[..., 2::3, :] = y[..., 2::3, :1]
        y[..., 1, :] = 0.0
    return y


def signs(w: torch.Tensor) -> torch.Tensor:
    """Half of them negative, every eighth zero."""
    y = torch.where(torch.rand_like(w) < 0.5, -w, w)
    y[..., ::8] = 0.0
    return y


def balanced_columns(x: str, w: str) -> Family:
    """Columns of x up to 2^8 times as large or as small, and those of w the other way: all weigh alike in x @ w.T."""

    def family(args: dict) -> dict | None:
        by = torch.exp2(torch.linspace(-8, 8, args[x].shape[-1], device=args[x].device).round())
        return args | {name: relaid(args[name], args[name] * side) for name, side in ((x, by), (w, 1 / by))}

    return family


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """One row of a value that is no number, and others to leave alone. An only row of NaN: it must be seen."""

    def change(x: torch.Tensor) -> torch.Tensor | None:
        axis = next((d for d in (x.dim() - 2, *range(x.dim() - 2)) if d >= 0 and x.shape[d] > 1), None)
        if axis is None and not math.isnan(value):
            return None
        y = x.clone()
        (y if axis is None else y.select(axis, x.shape[axis] - 2))[..., ::2] = value
        return y

    return change


def families(
    stream: tuple[str, ...], weights: tuple[str, ...] = (), options: Mapping[str, dict] | None = None, limit: float = 2.0**40,
    shifted: tuple[str, ...] | None = None, offset: float = OFFSET, tails: tuple[str, ...] | None = None,
    tied: tuple[str, ...] | None = None, **more: Family,
) -> dict[str, Family]:
    """The usual families of an op.

    stream   activations: what flows through the op
    weights  learned factors and shifts
    options  {words: arguments to replace}, scalars that a case does not hold, such as another eps
    limit    the largest magnitude at which the formula itself does not overflow float32
    shifted  what a common offset is added to; None: to the first of the stream
    offset   that offset
    tails    what gets outliers; None: the stream
    tied     what gets equal values and constant rows; None: the stream
    more     families of the op's own, by name with underscores for spaces
    """
    found: dict[str, Family] = {
        "small values": changed(stream, lambda x: x * SMALL),
        "a common offset": changed(shifted or stream[:1], lambda x: x + offset),
        "outlier channels": changed(tails or stream, heavy_tails),
        "a wide range": changed(stream, wide_range(limit)),
        "ties and constant rows": changed(tied or stream, ties),
    }
    if weights:
        found["negative and zero weights"] = changed(weights, signs)
    found |= {words: Option(new) for words, new in (options or {}).items()}
    found |= {name: changed(stream[:1], poisoned(float(name.split()[-1])), clamp=False) for name in POISONED}
    return found | {name.replace("_", " "): family for name, family in more.items()}
