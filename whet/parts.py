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

    index     {result: index into the whole call's}
    added     {result: index into its group's region}: results that it contributes to
    upstream  {output: index into its upstream gradient}
    """

    args: dict
    index: Mapping[str, tuple]
    added: Mapping[str, tuple] = field(default_factory=dict)
    upstream: Mapping[str, tuple] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Parts, and {result: region of the whole call's} for what they add up to."""

    parts: Iterable[Part]
    regions: Mapping[str, tuple] = field(default_factory=dict)


def row_pieces(*rows: str, added: tuple[str, ...] = (), along: tuple[str, ...] = ()) -> Callable[..., Iterator[Group]]:
    """`pieces` of an op whose rows are independent: the named arguments are (M, N), `added` are those shared by all rows.

    along   arguments (M,) of such rows; where the op has a reduction, its outputs are per row only if that is "none"
    """

    def pieces(**args) -> Iterator[Group]:
        present, shared = ([k for k in names if args[k] is not None] for names in (rows, added))
        M, width = args[present[0]].shape[0], sum(args[k].shape[1] for k in present)
        step = max(1, min(M, PART // width))
        starts = list(range(0, M, step))
        reduced = args.get("reduction", "none") != "none"
        sums = {f"grad {k}": (...,) for k in shared} | ({"output 0": (...,)} if reduced else {})
        if not sums:
            edge = EDGE // max(args[k].shape[1] for k in present) // step * step
            spread = [starts[i * (len(starts) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
            starts = sorted({*spread, min(edge, starts[-1])})

        def parts() -> Iterator[Part]:
            for start in starts:
                cut = (slice(start, min(start + step, M)),)
                outputs: dict[str, tuple] = {} if reduced else {"output 0": cut, "output 1": cut}
                own = outputs | {f"grad {k}": cut for k in present}
                upstream = outputs or {"output 0": (...,)}
                yield Part(args | {k: args[k][cut] for k in (*present, *along)}, own, sums, upstream)

        yield Group(parts(), sums)

    return pieces
