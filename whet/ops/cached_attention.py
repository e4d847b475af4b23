"""cached_attention: the attention of a decode step: QK norm, RoPE, new keys and values into the cache, split-KV attention."""

import torch
import triton

from whet import machine
from whet.launch import launcher
from whet.op import Cost, Impl, Op, lay, layout_of, nbytes
from whet.ops._cached import check_caches, check_tables, layout_refused, tensors_refused
from whet.ops._gemv import few
from whet.ops._pdl import pdl_options
from whet.ops._rotary import tables
from whet.ops._split_kv import _combine_kernel, _split_kv_kernel
from whet.ops.attention.common import LOG2E
from whet.ops.rms_norm import reference as rms_norm
from whet.ops.rope import reference as rope
from whet.torch_ops import Forward
from whet.values import changed, families

SPAN = 64  # keys taken at a time, one after another within a split
WHOLE = 4  # spans that one program takes alone where there are more than a few sequences: nothing is left to combine
PROGRAMS = 2  # an SM's share of programs, where there are spans enough: a sequence is cut into that many splits
MANY = 8  # sequences from which on each is cut into fewer splits
LONG = 8192  # tokens from which on the loop over spans is pipelined
GATHER = 64  # splits whose results are combined at a time
MOST = 8  # new tokens of a sequence in one call


def reference(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    """qkv (B, T, (H + 2 KV) D): T new tokens of each of B sequences, at positions[b] onward.  Keys and values go into the
    caches (B, KV, S, D), in place; each token attends to all up to itself, the last `window` of them where that is not 0.
    What none has written may be anything.  cos, sin (S, D/2).  q_norm, k_norm (D,): rms_norm of each head before the rotation.
    context: no key is at it or beyond; 0 where that is not known.
    """
    (B, T, _), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, D)).transpose(1, 2).split([qkv.shape[-1] // D - 2 * KV, KV, KV], dim=1)
    at = positions[:, None] + torch.arange(T, device=qkv.device)
    q, k = (t if w is None else rms_norm(t, w, eps) for t, w in ((q, q_norm), (k, k_norm)))
    q, k = rope(q, k, cos, sin, at)
    row, head = torch.arange(B, device=qkv.device)[:, None, None], torch.arange(KV, device=qkv.device)[:, None]
    k_cache[row, head, at[:, None]], v_cache[row, head, at[:, None]] = k, v
    wide, j = torch.promote_types(q.dtype, torch.float32), torch.arange(S, device=qkv.device)
    keys, values = (c.to(wide).repeat_interleave(q.shape[1] // KV, dim=1) for c in (k_cache, v_cache))
    seen = (j <= at[..., None]) & (j > at[..., None] - (window or S + 1))
    weights = (q.to(wide) @ keys.transpose(-1, -2) * D**-0.5).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return (weights @ values.masked_fill(~seen.any(1)[:, None, :, None], 0.0)).to(qkv.dtype).transpose(1, 2).flatten(2)


def inputs(dtype, device, B, H, KV, D, S, T=1, at=None, norms=True, window=0, layout="contiguous"):
    """Positions spread up to the last that fits, or up to `at`; what lies beyond them in the cache is not a number."""
    last = S - T if at is None else min(at, S - T)
    positions = (torch.arange(B, device=device) * 7919 + last) % (last + 1)
    k_cache, v_cache = (torch.randn(B, KV, S, D, dtype=dtype, device=device) for _ in range(2))
    if k_cache.device.type != "meta":
        unwritten = (torch.arange(S, device=device) >= positions[:, None])[:, None, :, None]
        k_cache, v_cache = (c.masked_fill(unwritten, float("nan")) for c in (k_cache, v_cache))
    cos, sin = tables(S, D, device=device)
    q_norm, k_norm = ((torch.rand(D, device=device) + 0.5).to(dtype) for _ in range(2)) if norms else (None, None)
    return dict(
        qkv=lay(torch.randn(B, T, (H + 2 * KV) * D, dtype=dtype, device=device), layout),
        k_cache=lay(k_cache, layout), v_cache=lay(v_cache, layout), positions=positions, cos=cos, sin=sin,
        q_norm=q_norm, k_norm=k_norm, window=window, context=min(S, last + T), eps=1e-6,
    )


def sharp(args):
    """Hostile values: scores that overflow where their maximum is not subtracted."""
    names = ("qkv",) if args["q_norm"] is None else ("q_norm", "k_norm")
    return changed(names, lambda t: 12 * t)(args)


def case_of(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    (B, T, width), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    case = dict(B=B, H=width // D - 2 * KV, KV=KV, D=D, S=S, T=T, norms=q_norm is not None, window=window)
    case |= dict(at=context - T) if context and context < S else {}
    return case if k_cache.is_contiguous() else case | dict(layout=layout_of(k_cache))


def check(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    if reason := check_caches(qkv, k_cache, v_cache, cos, sin, q_norm, k_norm, positions=positions):
        return reason
    (B, _, width), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    if D % 2 or width % D or width // D <= 2 * KV or (width // D - 2 * KV) % KV:
        return f"qkv must hold a multiple of {KV} query heads and {KV} key and value heads of {D}, got {width} columns"
    if k_cache.dtype != qkv.dtype:
        return f"qkv, k_cache and v_cache must all be of one dtype, got {qkv.dtype}, {k_cache.dtype} and {v_cache.dtype}"
    if positions.shape != (B,) or positions.dtype not in (torch.int32, torch.int64):
        return f"positions must be {B} integers of int32 or int64, got {tuple(positions.shape)} {positions.dtype}"
    if reason := check_tables(k_cache, cos, sin, q_norm, k_norm, min(S, context or S)):
        return reason
    if window < 0 or not 0 <= context <= S:
        return f"window must not be negative and context at most {S}, got {window} and {context}"
    return None


def cost(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    (B, T, width), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    H, keys = width // D - 2 * KV, min(context or S, window or S)
    new = B * T * KV * D * 2 * k_cache.element_size()
    out = B * T * H * D * qkv.element_size()
    return Cost(bytes=nbytes(qkv) + out + new + B * keys * KV * D * 2 * k_cache.element_size(), flops=4 * B * T * H * keys * D)


def plan(B: int, T: int, context: int, alone: bool, wide: bool) -> dict:
    """How a program takes its split: all of it at once, or span by span in a loop of so many stages."""
    if alone and T == 1:
        return dict(ALONE=True, STAGES=1, num_warps=8)
    return dict(ALONE=False, STAGES=1 if T > 1 else 2 if B > MANY else 3 if context > LONG else 1, num_warps=8 if wide else 4)


def launch(qkv, k_cache, v_cache, positions, cos, sin, q_norm, k_norm, window, context, eps):
    (B, T, width), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    H = width // D - 2 * KV
    out = torch.empty(B, T, H * D, dtype=qkv.dtype, device=qkv.device)
    if not out.numel():
        return out
    context = context or S
    max_splits = max(1, PROGRAMS * machine.sm_count() // (KV * (B if B > MANY else 1)))
    spans = triton.cdiv(context, SPAN)
    whole, wide = WHOLE if few() < B else 1, qkv.dtype == torch.float32
    splits = 1 if spans <= whole else min(max_splits, spans)
    acc, row_max, row_sum = out, out, out
    if splits > 1:
        acc = torch.empty(B * T * H, splits, D, dtype=torch.float32, device=qkv.device)
        row_max, row_sum = (torch.empty(B * T * H, splits, dtype=torch.float32, device=qkv.device) for _ in range(2))
    how = dict(T=T, H=H, D=D, SPLITS=splits, MAX_SPLITS=max_splits, SPAN=SPAN, WHOLE=whole) | pdl_options()
    how |= dict(BLOCK_D=max(32, triton.next_power_of_2(D)))
    launcher(_split_kv_kernel)[(splits, KV, B)](
        qkv, k_cache, v_cache, positions, cos, sin, q_norm, k_norm, acc, row_max, row_sum,
        *qkv.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], S, context, window or None, LOG2E * D**-0.5, eps,
        KV=KV, BLOCK_R=max(16, triton.next_power_of_2(MOST * H // KV)),
        **plan(B, T, context, splits == 1 and few() < B <= MANY and not wide, wide), **how,
    )
    if splits > 1:
        launcher(_combine_kernel)[(B * T * H,)](
            acc, row_max, row_sum, positions, out, context, GATHER=GATHER, num_warps=4, **how
        )
    return out


KERNEL = Forward(
    "cached_attention",
    "(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor cos, Tensor sin, Tensor? q_norm, "
    "Tensor? k_norm, int window, int context, float eps) -> Tensor",
    launch,
    lambda qkv, k_cache, v_cache, *_: qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * k_cache.shape[1] * k_cache.shape[3]),
)


def refuses(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    if reason := tensors_refused(qkv, k_cache, v_cache, q_norm, k_norm):
        return reason
    if qkv.shape[1] > MOST:
        return f"at most {MOST} new tokens of a sequence in one call, got {qkv.shape[1]}; a longer prompt is for attention"
    whole = dict(positions=positions, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    return layout_refused(whole, qkv, k_cache, v_cache)


def run_triton(qkv, k_cache, v_cache, positions, cos, sin, q_norm=None, k_norm=None, window=0, context=0, eps=1e-6):
    return KERNEL(qkv, k_cache, v_cache, positions, cos, sin, q_norm, k_norm, window, context, eps)


OP = Op(
    name="cached_attention",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(B=1, H=2, KV=1, D=16, S=24), dict(B=2, H=4, KV=2, D=32, S=70), dict(B=2, H=1, KV=1, D=16, S=140, norms=False),
        dict(B=1, H=4, KV=2, D=16, S=80, T=5), dict(B=1, H=3, KV=1, D=24, S=33, T=3, layout="sliced"),
        dict(B=1, H=2, KV=1, D=16, S=200, window=40),
        dict(B=1, H=1, KV=1, D=16, S=137, T=8, at=124), dict(B=1, H=2, KV=1, D=16, S=40, at=0), dict(B=0, H=2, KV=1, D=16, S=8),
        dict(B=1, H=2, KV=1, D=16, S=90, T=4, window=7),
    ),
    shapes={
        f"qwen3-0.6b {B}x{S}": dict(B=B, H=16, KV=8, D=128, S=S)
        for B, S in ((1, 256), (1, 1024), (1, 4096), (1, 16384), (8, 1024), (64, 1024))
    } | {"qwen3-0.6b 1x1024, 8 new": dict(B=1, H=16, KV=8, D=128, S=1024, T=8)},
    cost=cost,
    grads=(),
    impls={
        "triton": Impl(
            run_triton, refuses, needs="triton",
            spills="eight new tokens at once, which speculation alone asks for",
            limits=(
                "dtypes other than fp32, fp16, bf16, all alike", "inputs that ask for gradients",
                f"more than {MOST} new tokens of a sequence", "heads wider than 256",
                "caches not contiguous along a head, or expanded", "positions, cos, sin and norms that are not contiguous",
            ),
        ),
    },
    dynamic=("B", "S"),
    tiny=dict(B=2, S=64),
    mutates=("k_cache", "v_cache"),
    hostile=families(
        ("qkv",), ("q_norm", "k_norm"), options={"eps 0.01": dict(eps=1e-2)}, limit=16.0, overflowing_scores=sharp,
    ),
)
