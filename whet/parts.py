"""Parts of a call that is too large for its oracle: what an op's `pieces` is made of.

A part is arguments that give some of the results exactly: rows of a norm, the queries of one head. What adds up over parts,
such as the gradient of a weight or of a key, is added in float64.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

PART = 2**24  # elements of a part's arguments
SAMPLED = 8  # parts of many that are looked at where nothing adds up over all of them
EDGE = 2**31  # elements past which an offset in 32 bits overflows


@dataclass(frozen=True)
class Part:
    """Arguments of one part, and where its results lie.

    index  {result: index into the whole call's}; those of outputs cut the upstream gradients, too
    added  {result: index into its group's region}: results that it contributes to
    """

    args: dict
    index: Mapping[str, tuple]
    added: Mapping[str, tuple] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Parts, and {result: region of the whole call's} for what they add up to."""

    parts: Iterable[Part]
    regions: Mapping[str, tuple] = field(default_factory=dict)


def row_pieces(*rows: str, added: tuple[str, ...] = ()) -> Callable[..., Iterator[Group]]:
    """`pieces` of an op whose rows are independent: the named arguments are (M, N), `added` are those shared by all rows."""

    def pieces(**args) -> Iterator[Group]:
        present = [k for k in rows if args[k] is not None]
        shared = [k for k in added if args[k] is not None]
        M = args[present[0]].shape[0]
        width = sum(args[k].shape[1] for k in present)
        step = max(1, PART // width)
        starts = range(0, M, step)
        if not shared:
            edge = EDGE // max(args[k].shape[1] for k in present) // step * step
            spread = [starts[i * (len(starts) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
            starts = sorted({*spread, min(edge, starts[-1])})

        def parts() -> Iterator[Part]:
            for start in starts:
                cut = (slice(start, min(start + step, M)),)
                sums = {f"grad {k}": (...,) for k in shared}
                yield Part(args | {k: args[k][cut] for k in present}, {"output 0": cut, "output 1": cut} | {
                    f"grad {k}": cut for k in present}, sums)

        yield Group(parts(), {f"grad {k}": (...,) for k in shared})

    return pieces
