"""What attention means: the reference, the span of keys that a query sees, the E4M3 rounding, inputs, cases and cost."""

import math

import torch
import torch.nn.functional as F

from whet import machine
from whet.op import Cost, autocast_of, floating, lay, nbytes, same_device
from whet.ops._fp8 import scale_of as scale_of_e4m3

ROWS = 128  # that share one scale where precision="fp8", and whose remainder `proof` keeps
PROVABLE = 2**27  # scores that the float64 oracle is asked for at most
LAYOUTS = ("contiguous", "bshd", "sliced", "expanded", "transposed")
KINDS = dict(
    causal="None | bool | 'top-left' | 'bottom-right'", window="None | int >= 1", scale="None | number",
    precision="None | 'fp8'",
)
NO_FP8 = "computes in the inputs' precision; precision='fp8' is served by triton_fp8, eager and compile"


def reference(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """o = softmax(scale * q k^T) v for each head, over the keys that a query sees.

    q is (B, Hq, Lq, D), k and v are (B, Hkv, Lk, D); query head h reads key head h // (Hq / Hkv).
    causal: None or False; "top-left", query i at position p = i, as SDPA's is_causal; "bottom-right", p = i + Lk - Lq;
        True where Lq = Lk. A query sees the keys j <= p.
    window: with causal the keys p - window < j <= p; without, |j - i| < window. Its own position counts.
    scale: D ** -0.5 where None. A query that sees no key gives 0.
    return_lse: (o, lse), lse = log(sum(exp(scores))) as (B, Hq, Lq) in float32 or wider, -inf where no key is seen.
    precision: "fp8" rounds q, k, v to E4M3, one power-of-two scale per 128 rows; the gradient passes straight through.
        float64 is not rounded. The kernel rounds the weights of the second product to E4M3 as well.
    """
    if precision == "fp8":
        q, k, v = rounded(q), rounded(k), rounded(v)
    k, v = per_query_head(k, q), per_query_head(v, q)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale_of(scale, q)
    scores, blind = masked(scores, *span(causal, window, q.shape[2], k.shape[2]))
    o = (scores.softmax(-1).to(v.dtype) @ v).masked_fill(blind, 0.0)
    return (o, scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)) if return_lse else o


def scale_of(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def dtype_of(t):
    """The dtype that products with t run in."""
    return autocast_of(t) or t.dtype


def per_query_head(t, q):
    group = q.shape[1] // t.shape[1]
    return t.repeat_interleave(group, 1) if group > 1 else t


def span(causal, window, Lq, Lk):
    """(offset, left, right): query i sees key j where -left <= j - (i + offset) <= right; None: no limit on that side."""
    offset = Lk - Lq if causal == "bottom-right" else 0
    left = None if window is None else window - 1
    return offset, left, 0 if causal else left


def seen(offset, left, right, Lq, Lk, device):
    """(Lq, Lk) booleans: whether query i sees key j."""
    i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (Lq, Lk))
    ahead = j - (i + offset)[:, None]
    see = torch.ones_like(ahead, dtype=torch.bool) if left is None else ahead >= -left
    return see if right is None else see & (ahead <= right)


def masked(scores, offset, left, right):
    """Scores with -inf where a query does not see the key, and (Lq, 1) booleans: the queries that see none.

    Their scores stay as they are: over -inf alone the gradient of a softmax is NaN, and what comes of them is replaced.
    """
    Lq, Lk = scores.shape[-2:]
    if left is None and right is None:
        return scores, torch.full((Lq, 1), Lk == 0, device=scores.device)
    see = seen(offset, left, right, Lq, Lk, scores.device)
    blind = ~see.any(-1, keepdim=True)
    return scores.masked_fill(~(see | blind), -math.inf), blind


def any_blind(offset, left, right, Lq, Lk):
    """Whether some query sees no key: the first sees furthest to the left, the last furthest to the right."""
    if Lq == 0 or Lk == 0:
        return Lq > 0
    return (right is not None and offset + right < 0) or (left is not None and Lq - 1 + offset - left > Lk - 1)


def rounded(x):
    """x at E4M3's precision, in x's dtype, with one scale per ROWS rows of a head. Float64 passes: it is the oracle."""
    if x.dtype == torch.float64:
        return x
    L = x.shape[-2]
    blocks = -(-L // ROWS)
    wide = F.pad(x.detach().float(), (0, 0, 0, blocks * ROWS - L)).unflatten(-2, (blocks, ROWS))
    scale, inverse = scale_of_e4m3(wide.abs().amax((-1, -2), keepdim=True))
    near = ((wide * inverse).to(torch.float8_e4m3fn).float() * scale).flatten(-3, -2)[..., :L, :].to(x.dtype)
    return x + (near - x).detach()  # exact: near shares x's leading bits, so the difference fits


def inputs(
    dtype, device, B, H, KV, Lq, Lk, D,
    causal=None, window=None, scale=None, return_lse=False, precision=None, layout="contiguous",
):
    options = dict(causal=causal, window=window, scale=scale, return_lse=return_lse, precision=precision)
    sizes = ((H, Lq), (KV, Lk), (KV, Lk))
    if layout == "sliced":  # parts of one packed projection
        packed = torch.randn(B, max(Lq, Lk), H + 2 * KV, D, dtype=dtype, device=device)
        parts = (part[:, :L].transpose(1, 2) for part, (_, L) in zip(packed.split([H, KV, KV], 2), sizes))
    elif layout == "bshd":  # what a projection each gives
        parts = (torch.randn(B, L, heads, D, dtype=dtype, device=device).transpose(1, 2) for heads, L in sizes)
    elif layout in LAYOUTS:
        ways = (layout if layout == "transposed" else "contiguous", layout, layout)  # keys are what a batch may share
        parts = (lay(torch.randn(B, h, L, D, dtype=dtype, device=device), way) for (h, L), way in zip(sizes, ways))
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return dict(zip("qkv", parts)) | options


def layout_of(q, k, v):
    if all(t.is_contiguous() for t in (q, k, v)):
        return "contiguous"
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (q, k, v)):
        return "transposed"
    if any(t.stride(0) == 0 and t.shape[0] > 1 for t in (k, v)):
        return "expanded"
    return "bshd" if all(t.transpose(1, 2).is_contiguous() for t in (q, k, v)) else "sliced"


def case_of(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    (B, H, Lq, D), (KV, Lk) = q.shape, k.shape[1:3]
    case = dict(B=B, H=H, KV=KV, Lq=Lq, Lk=Lk, D=D)
    alignment = "top-left" if causal is True else causal or None
    options = dict(causal=alignment, window=window, scale=scale, return_lse=return_lse or None, precision=precision)
    return case | {name: value for name, value in options.items() if value is not None} | dict(layout=layout_of(q, k, v))


def check(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    return _tensors_refused(q, k, v) or _causal_refused(causal, q.shape[2], k.shape[2])


def _tensors_refused(q, k, v):
    if reason := floating(q=q, k=k, v=v) or same_device(q=q, k=k, v=v):
        return reason
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            return f"{name} must have four dimensions (batch, heads, length, head size), got {tuple(t.shape)}"
        if dtype_of(t) != dtype_of(q):
            return f"{name} must have q's dtype {q.dtype} outside autocast, got {t.dtype}"
    B, H, _, D = q.shape
    if D == 0 or H == 0:
        return f"q must have at least one head and a head size of at least 1, got {tuple(q.shape)}"
    if k.shape[0] != B or k.shape[3] != D:
        return f"k must have shape ({B}, heads, length, {D}) to match q, got {tuple(k.shape)}"
    if v.shape != k.shape:
        return f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}"
    if k.shape[1] == 0 or H % k.shape[1]:
        return f"k and v must have a number of heads that divides q's {H}, got {k.shape[1]}"
    return None


def _causal_refused(causal, Lq, Lk):
    if causal is True and Lq != Lk:
        return (
            f"causal must be 'top-left' (query i sees keys j <= i) or 'bottom-right' (j <= i {Lk - Lq:+d}) where there are "
            f"{Lq} queries and {Lk} keys, got True"
        )
    return None


def pairs(offset, left, right, Lq, Lk):
    """How many (query, key) pairs are seen, in closed form."""

    def ramp(n):  # the sum of min(m, Lk) over m = 1 .. n
        n, top = max(n, 0), min(max(n, 0), Lk)
        return top * (top + 1) // 2 + (n - top) * Lk

    def up_to(d):  # pairs with j - i <= d: query i has min(max(i + d + 1, 0), Lk)
        return ramp(Lq + d) - ramp(d)

    highest = Lk if right is None else offset + right
    return up_to(highest) - (0 if left is None else up_to(min(offset - left - 1, highest)))


def cost(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """Two products forward; five backward, the scores' among them, since to keep them would take more than the inputs."""
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    offset, left, right = span(causal, window, Lq, Lk)
    work = B * H * D * pairs(offset, left, right, Lq, Lk)
    lse = B * H * Lq * max(4, q.element_size()) if return_lse else 0
    return Cost(
        bytes=nbytes(q, k, v, q) + lse, flops=4 * work,
        bwd_bytes=nbytes(q, k, v, q, q) + nbytes(q, k, v) + lse, bwd_flops=10 * work,
        dtype="float8_e4m3fn" if precision == "fp8" else "",
    )


def smaller(case, most):
    """As `proof`, for so many elements: their lengths squared are scores."""
    return proof(case, most // 4)


def proof(case, provable=PROVABLE):
    """The case with both lengths cut in proportion until the oracle's scores fit, then the batch.

    Their remainders modulo ROWS and which of them is longer stay; so does whether the blocks of keys are so few that the
    backward splits the queries among them, which is another kernel, where five times as many scores allow it. A window
    stays, unless it would then hold every key, which it did not: it is cut likewise.
    """
    small, share, most = dict(case), 1.0, provable
    while _scores(small) > most and share > 2**-40:
        share *= 0.9
        Lq, Lk = _cut(case["Lq"], share), _cut(case["Lk"], share)
        if (Lq < Lk) != (case["Lq"] < case["Lk"]) or (Lq > Lk) != (case["Lq"] > case["Lk"]):
            Lq, Lk = (Lq + ROWS, Lk) if case["Lq"] > case["Lk"] else (Lq, Lk + ROWS)
        if _blocks(small) == _blocks(case) != _blocks(small | dict(Lk=Lk)) and _scores(small) <= 5 * provable:
            most = 5 * provable
        else:
            small |= dict(Lq=Lq, Lk=Lk)
    if _scores(small) > most:
        small["B"] = max(1, case["B"] * provable // _scores(small))
    if (window := case.get("window")) is not None and small["Lk"] <= window < case["Lk"]:
        small["window"] = max(1, min(_cut(window, share), small["Lk"] - 1))
    return small


def few(programs):
    """Whether programs, one for each block of keys, leave SMs idle: then each is split into several over the queries."""
    return programs <= machine.sm_count()


def _blocks(case):
    return [few(case["B"] * case["KV"] * -(-case["Lk"] // n)) for n in (64, 128)]


def _scores(case):
    return case["B"] * case["H"] * case["Lq"] * case["Lk"]


def _cut(n, share):
    """n made smaller by whole multiples of ROWS; at least one stays where there was one."""
    whole = n // ROWS
    return n % ROWS + ROWS * max(min(whole, 1), int(whole * share))


def _case(B, H, KV, Lq, Lk, D, **options):
    return dict(B=B, H=H, KV=KV, Lq=Lq, Lk=Lk, D=D) | options


CASES = (
    _case(1, 2, 2, 65, 63, 40), _case(1, 2, 2, 1, 63, 16), _case(2, 2, 2, 63, 65, 64, causal="top-left"),
    _case(1, 1, 1, 65, 1000, 64), _case(1, 8, 1, 33, 65, 32, causal="bottom-right"), _case(1, 1, 1, 33, 65, 256),
    _case(1, 2, 1, 130, 140, 96),
    _case(1, 2, 2, 65, 63, 32, scale=0.3), _case(1, 2, 2, 33, 33, 32, causal="top-left", scale=-0.3),
    _case(1, 2, 2, 33, 33, 32, causal="top-left", scale=0.0),
    # The first of each pair leaves no query without a key, the second some.
    _case(1, 2, 2, 65, 129, 32, causal="bottom-right"), _case(1, 2, 2, 129, 65, 32, causal="bottom-right"),
    _case(1, 2, 2, 65, 129, 80, causal="top-left", window=17), _case(1, 2, 1, 129, 65, 64, causal="top-left", window=17),
    _case(1, 2, 2, 65, 129, 32, causal="bottom-right", window=17),
    _case(1, 2, 2, 129, 65, 32, causal="bottom-right", window=17, return_lse=True),
    _case(1, 2, 2, 129, 129, 32, window=17), _case(1, 1, 1, 129, 63, 16, window=9),
    _case(1, 2, 2, 65, 63, 32, window=200), _case(1, 2, 2, 63, 63, 32, causal="top-left", window=200),
    _case(1, 2, 2, 65, 129, 32, causal="bottom-right", window=200),
    _case(1, 2, 2, 65, 63, 32, return_lse=True), _case(2, 2, 1, 65, 65, 32, causal="top-left", return_lse=True),
    _case(2, 2, 1, 65, 63, 32, layout="bshd"), _case(2, 4, 2, 65, 65, 32, causal="top-left", layout="sliced"),
    _case(2, 2, 2, 33, 65, 32, layout="expanded"), _case(2, 2, 1, 65, 63, 32, layout="transposed"),
    _case(2, 2, 1, 0, 65, 32), _case(2, 2, 1, 65, 0, 32, return_lse=True), _case(0, 2, 1, 65, 63, 32),
    _case(1, 2, 1, 0, 0, 32, causal="top-left"),
    _case(1, 2, 1, 129, 150, 64, precision="fp8"),
    _case(1, 2, 2, 130, 130, 32, causal="top-left", return_lse=True, precision="fp8"),
)

SHAPES = {
    "small B32 (64, 500)": _case(32, 8, 8, 564, 64, 64),
    "mid (10k, 1k)": _case(1, 8, 8, 11000, 10000, 64),
    "50k (50k, 5k)": _case(1, 8, 8, 55000, 50000, 64),
    "large (200k, 5k)": _case(1, 8, 8, 205000, 200000, 64),
    "GPT-2 causal": _case(32, 12, 12, 1024, 1024, 64, causal="top-left"),
    "Llama GQA causal": _case(4, 32, 8, 4096, 4096, 128, causal="top-left"),
    "window 256": _case(4, 32, 8, 4096, 4096, 128, causal="top-left", window=256),
    "mid fp8": _case(1, 8, 8, 11000, 10000, 64, precision="fp8"),
    "large fp8": _case(1, 8, 8, 205000, 200000, 64, precision="fp8"),
}
