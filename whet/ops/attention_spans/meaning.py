"""What attention over spans of keys means: the reference, the mask that spans stand for, inputs, cases and cost."""

import math

import torch

from whet.op import Cost, nbytes, same_device
from whet.ops.attention import meaning as attention
from whet.ops.attention.meaning import per_query_head, scale_of

SPANS = ("padded", "packed", "window", "random")


def reference(q, k, v, first, last, scale=None):
    """o = softmax(scale * q k^T) v for each head, each query over one run of keys: first <= j < last.

    q is (B, Hq, Lq, D), k and v are (B, Hkv, Lk, D); query head h reads key head h // (Hq / Hkv).
    first, last: (B, Lq), int32 or int64, any values: a span counts as far as there are keys. Causal attention has
        first = 0, last = i + 1; padding, packed documents and windows move either end.
    scale: D ** -0.5 where None. A query whose span is empty gives 0.
    """
    k, v = per_query_head(k, q), per_query_head(v, q)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale_of(scale, q)
    see = seen(first, last, k.shape[2])
    blind = ~see.any(-1, keepdim=True)
    weights = scores.masked_fill(~(see | blind), -math.inf).softmax(-1)
    return (weights.to(v.dtype) @ v).masked_fill(blind, 0.0)


def seen(first, last, Lk):
    """(B, 1, Lq, Lk) booleans: whether a query sees a key."""
    j = torch.arange(Lk, dtype=first.dtype, device=first.device)
    return ((j >= first[..., None]) & (j < last[..., None]))[:, None]


def spans_of(spans, B, Lq, Lk, device):
    """Spans as a batch has them: aligned at the last key, each row of the batch with other padding or other documents."""
    if spans == "random":  # in no order, beyond both ends, empty ones among them
        ends = torch.randint(-Lk // 4 - 1, Lk + Lk // 4 + 1, (2, B, Lq), dtype=torch.int32, device=device)
        return ends[0], ends[1]
    row = torch.arange(B, dtype=torch.int32, device=device)[:, None]
    at = torch.arange(Lq, dtype=torch.int32, device=device) + (Lk - Lq)
    padding = (1 + row % 4) * Lk // 8
    if spans == "packed":
        width = Lk // 3 + 1
        shift = 7 * row
        return (at + shift) // width * width - shift, (at + 1).expand(B, Lq).contiguous()
    if spans == "window":
        return torch.maximum(at - max(2, Lk // 5), padding), (at + 1).expand(B, Lq).contiguous()
    if spans != "padded":
        raise ValueError(f"spans must be one of {SPANS}, got {spans!r}")
    left = row % 2 == 1  # one row is padded at its end, the next at its start
    return (padding * left).expand(B, Lq).contiguous(), torch.minimum(at + 1, torch.where(left, Lk, Lk - padding))


def inputs(dtype, device, B, H, KV, Lq, Lk, D, spans="padded", scale=None, layout="contiguous"):
    made = attention.inputs(dtype, device, B, H, KV, Lq, Lk, D, scale=scale, layout=layout)
    first, last = spans_of(spans, B, Lq, Lk, device)
    return dict(q=made["q"], k=made["k"], v=made["v"], first=first, last=last, scale=scale)


def case_of(q, k, v, first, last, scale=None):
    """Sizes alone: where spans begin and end is not looked at, which would make the host wait for the device."""
    case = attention.case_of(q, k, v, scale=scale)
    return {name: case[name] for name in ("B", "H", "KV", "Lq", "Lk", "D", "scale", "layout") if name in case}


def check(q, k, v, first, last, scale=None):
    if reason := attention.check(q, k, v) or same_device(q=q, first=first, last=last):
        return reason
    for name, t in (("first", first), ("last", last)):
        if t.shape != (q.shape[0], q.shape[2]):
            return f"{name} must have shape {(q.shape[0], q.shape[2])} to match q, got {tuple(t.shape)}"
        if t.dtype not in (torch.int32, torch.int64) or t.dtype != first.dtype:
            return f"first and last must both be int32 or both int64, got {first.dtype} and {last.dtype}"
    return None


def cost(q, k, v, first, last, scale=None):
    """As attention's, for the pairs that are seen; where the spans have no values, for those of a causal mask."""
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    if first.is_meta:
        pairs = B * attention.pairs(Lk - Lq, None, 0, Lq, Lk)
    else:
        pairs = int((last.clamp(0, Lk) - first.clamp(0, Lk)).clamp(min=0).sum())
    ends = nbytes(first, last)
    return Cost(
        bytes=nbytes(q, k, v, q) + ends, flops=4 * H * D * pairs,
        bwd_bytes=nbytes(q, k, v, q, q) + nbytes(q, k, v) + ends, bwd_flops=10 * H * D * pairs,
    )


def _case(B, H, KV, Lq, Lk, D, **options):
    return dict(B=B, H=H, KV=KV, Lq=Lq, Lk=Lk, D=D) | options


CASES = (
    _case(2, 2, 1, 65, 65, 32), _case(2, 2, 2, 130, 130, 16, spans="packed"), _case(2, 4, 1, 65, 65, 64, spans="random"),
    _case(2, 2, 2, 67, 131, 40), _case(1, 2, 1, 131, 67, 32), _case(2, 1, 1, 140, 140, 32, spans="window"),
    _case(1, 1, 1, 33, 65, 256), _case(1, 2, 1, 70, 150, 128, spans="packed"),
    _case(2, 1, 1, 100, 300, 32, spans="random"), _case(1, 2, 2, 1, 63, 16), _case(2, 1, 1, 17, 1, 16, spans="random"),
    _case(2, 2, 1, 65, 63, 32, scale=0.3), _case(1, 2, 2, 33, 33, 32, scale=-0.3),
    _case(2, 2, 1, 65, 65, 32, layout="bshd", spans="packed"), _case(2, 4, 2, 65, 65, 32, layout="sliced"),
    _case(2, 2, 2, 33, 65, 32, layout="expanded"), _case(2, 2, 1, 65, 63, 32, layout="transposed"),
    _case(2, 2, 1, 0, 65, 32), _case(2, 2, 1, 65, 0, 32), _case(0, 2, 1, 65, 63, 32),
)

SHAPES = {
    "GPT-2 padded": _case(32, 12, 12, 1024, 1024, 64),
    "Llama GQA padded": _case(4, 32, 8, 4096, 4096, 128),
    "Llama GQA packed": _case(1, 32, 8, 16384, 16384, 128, spans="packed"),
}
