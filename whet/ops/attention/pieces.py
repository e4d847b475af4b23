"""Parts of an attention call that is too large for its oracle: the queries of the first and the last head, block by block."""

from whet.ops.attention.meaning import ROWS, span
from whet.parts import Group, Part

SCORES = 2**27  # that the oracle holds at once
LONG = 2**34  # scores of a head past which the last one alone is looked at


def pieces(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """The first and last key head of the first and last batch: all their queries, and so the whole gradients of their keys.

    A block of queries from i on is a call of its own: with causal it sees the keys up to its last query's, aligned at the
    bottom right. Without causal, a window slides along the queries from the first key on, which no such call says: no parts.
    """
    (B, H, Lq, _), (KV, Lk) = q.shape, k.shape[1:3]
    offset, left, right = span(causal, window, Lq, Lk)
    if (left is not None and not causal) or offset < 0:
        return
    group = H // KV
    step = max(1, SCORES // (group * max(1, Lk)) // ROWS) * ROWS  # whole blocks, which share a scale where precision="fp8"
    options = dict(window=window, scale=scale, return_lse=return_lse, precision=precision)

    def parts(b, h):
        heads = (slice(b, b + 1), slice(h * group, (h + 1) * group))
        for start in range(0, Lq, step):
            stop = min(start + step, Lq)
            rows = (*heads, slice(start, stop))
            last = min(Lk, stop + offset) if causal else Lk
            keys = (slice(b, b + 1), slice(h, h + 1), slice(0, last))
            if causal and last < stop + offset:
                return  # queries past the last key: aligned otherwise
            args = dict(q=q[rows], k=k[keys], v=v[keys], causal="bottom-right" if causal else None) | options
            own = {"output 0": rows, "output 1": rows, "grad q": rows}
            sums = {name: (slice(None), slice(None), slice(0, last)) for name in ("grad k", "grad v")}
            yield Part(args, own, sums, own)

    complete = not causal or Lq + offset <= Lk
    first = Lq * Lk <= LONG
    for b in sorted({0, B - 1} if first else {B - 1}):
        for h in sorted({0, KV - 1} if first else {KV - 1}):
            region = (slice(b, b + 1), slice(h, h + 1))
            yield Group(parts(b, h), {name: region for name in ("grad k", "grad v")} if complete else {})
