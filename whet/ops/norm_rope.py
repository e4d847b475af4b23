"""norm_rope: the heads of a prompt's projection, normed and rotated; queries come out, keys and values go into the cache."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, lay, layout_of, nbytes
from whet.ops._cached import check_caches, check_tables, layout_refused, tensors_refused
from whet.ops._rotary import tables
from whet.ops._rows import cdiv, power_of_two
from whet.ops.rms_norm import reference as rms_norm
from whet.ops.rope import reference as rope
from whet.torch_ops import Forward
from whet.values import families


def reference(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    """qkv (B, T, (H + 2 KV) D): T new tokens of each of B sequences, at positions `start` onward.  Returns q (B, T, H, D).
    Keys and values go into the caches (B, KV, S, D), in place.  cos, sin (S, D/2): pairs are (i, i + D/2).
    q_norm, k_norm (D,): rms_norm of each head before the rotation.
    """
    (T, width), (KV, _, D) = qkv.shape[1:], k_cache.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, D)).transpose(1, 2).split([width // D - 2 * KV, KV, KV], dim=1)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rope(q, k, cos, sin, start)
    k_cache[:, :, start : start + T], v_cache[:, :, start : start + T] = k, v
    return q.transpose(1, 2).contiguous()


def inputs(dtype, device, B, T, H, KV, D, S, start=0, norms=True, layout="contiguous"):
    k_cache, v_cache = (lay(torch.full((B, KV, S, D), 7.0, dtype=dtype, device=device), layout) for _ in range(2))
    cos, sin = tables(S, D, device=device)
    q_norm, k_norm = ((torch.rand(D, device=device) + 0.5).to(dtype) for _ in range(2)) if norms else (None, None)
    return dict(
        qkv=lay(torch.randn(B, T, (H + 2 * KV) * D, dtype=dtype, device=device), layout), k_cache=k_cache, v_cache=v_cache,
        cos=cos, sin=sin, start=start, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
    )


def case_of(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    (B, T, width), (KV, S, D) = qkv.shape, k_cache.shape[1:]
    case = dict(B=B, T=T, H=width // D - 2 * KV, KV=KV, D=D, S=S, start=start, norms=q_norm is not None)
    return case if k_cache.is_contiguous() else case | dict(layout=layout_of(k_cache))


def check(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    if reason := check_caches(qkv, k_cache, v_cache, cos, sin, q_norm, k_norm):
        return reason
    (T, width), (KV, S, D) = qkv.shape[1:], k_cache.shape[1:]
    if D % 2 or width % D or width // D <= 2 * KV:
        return f"qkv must hold query heads and {KV} key and value heads of {D}, got {width} columns"
    if not 0 <= start <= S - T:
        return f"start must lie in 0..{S - T} so that {T} tokens fit the cache of {S}, got {start!r}"
    return check_tables(k_cache, cos, sin, q_norm, k_norm, start + T)


def cost(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    table = 2 * qkv.shape[1] * cos.shape[1] * cos.element_size()
    return Cost(bytes=2 * nbytes(qkv) + table + nbytes(q_norm, k_norm), flops=7 * qkv.numel())


@triton.jit
def _heads(
    x_ptr, w_ptr, cos_ptr, sin_ptr, out_ptr, block, stride_xt, stride_cp, stride_sp, stride_ot, stride_oh, T, start, eps,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr,
):
    """A block of ROWS heads of tokens, one token's H after another's."""
    row, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)[None, :]
    t, h = (row // H).to(tl.int64), row % H
    live = t < T
    there = live[:, None] & (d < D // 2)
    x_at = (x_ptr + t * stride_xt + h * D)[:, None] + d
    y_at = (out_ptr + t * stride_ot + h.to(tl.int64) * stride_oh)[:, None] + d
    x1 = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + D // 2, mask=there, other=0.0).to(tl.float32)
    if w_ptr is not None:
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x1 * x1 + x2 * x2, axis=1) / D + eps)[:, None]
        x1 *= rstd * tl.load(w_ptr + d, mask=d < D // 2, other=0.0).to(tl.float32)
        x2 *= rstd * tl.load(w_ptr + D // 2 + d, mask=d < D // 2, other=0.0).to(tl.float32)
    if ROTATED:
        at = (t + start)[:, None]
        c = tl.load(cos_ptr + at * stride_cp + d, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin_ptr + at * stride_sp + d, mask=there, other=0.0).to(tl.float32)
        x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    tl.store(y_at, x1, mask=there)
    tl.store(y_at + D // 2, x2, mask=there)


@triton.jit(do_not_specialize=["T", "start"])
def _norm_rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,  # inputs; the norms may be None
    q_ptr, k_ptr, v_ptr,  # outputs
    stride_xb, stride_xt, stride_cp, stride_sp, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    T, start, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):
    """rms_norm of each head of q and k, rotation; v as it is.  One program, ROWS heads of one kind.

    Fuses   both norms, the rotation and the writes into the cache: a projection is read once.
    Moves   qkv, a token's cos and sin in; q, k, v out = 2*B*T*(H + 2*KV)*D * itemsize.  Apart: 4 of q, 6 of k, 2 of v.
    Rounds  once, at the store; fp32 inside.
    """
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_q, of_k = tl.cdiv(T * H, ROWS), tl.cdiv(T * KV, ROWS)
    qkv_ptr += b * stride_xb
    new = tl.full((), 0, tl.int64) + start
    if block < of_q:
        _heads(
            qkv_ptr, q_norm_ptr, cos_ptr, sin_ptr, q_ptr + b * T * H * D, block, stride_xt, stride_cp, stride_sp, H * D, D,
            T, start, eps, H, D, HALF, ROWS, True,
        )
    elif block < of_q + of_k:
        _heads(
            qkv_ptr + H * D, k_norm_ptr, cos_ptr, sin_ptr, k_ptr + b * stride_kb + new * stride_ks, block - of_q,
            stride_xt, stride_cp, stride_sp, stride_ks, stride_kh, T, start, eps, KV, D, HALF, ROWS, True,
        )
    else:
        _heads(
            qkv_ptr + (H + KV) * D, None, cos_ptr, sin_ptr, v_ptr + b * stride_vb + new * stride_vs, block - of_q - of_k,
            stride_xt, stride_cp, stride_sp, stride_vs, stride_vh, T, start, eps, KV, D, HALF, ROWS, False,
        )


def launch(qkv, k_cache, v_cache, cos, sin, start, q_norm, k_norm, eps):
    (B, T, width), (KV, _, D) = qkv.shape, k_cache.shape[1:]
    H = width // D - 2 * KV
    q = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
    if not q.numel():
        return q
    HALF = power_of_two(max(16, D // 2))
    ROWS = max(1, 2048 // HALF)
    launcher(_norm_rope_kernel)[(cdiv(T * H, ROWS) + 2 * cdiv(T * KV, ROWS), B)](
        qkv, cos, sin, q_norm, k_norm, q, k_cache, v_cache,
        *qkv.stride()[:2], cos.stride(0), sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        T, start, eps, H=H, KV=KV, D=D, HALF=HALF, ROWS=ROWS, num_warps=4,
    )
    return q


def _fake(qkv, k_cache, v_cache, *_):
    KV, _, D = k_cache.shape[1:]
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // D - 2 * KV, D)


KERNEL = Forward(
    "norm_rope",
    "(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cos, Tensor sin, SymInt start, Tensor? q_norm, "
    "Tensor? k_norm, float eps) -> Tensor",
    launch, _fake,
)


def refuses(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    norms = dict(q_norm=q_norm, k_norm=k_norm)
    return tensors_refused(qkv, k_cache, v_cache, **norms) or layout_refused(norms, qkv, k_cache, v_cache, cos=cos, sin=sin)


def run_triton(qkv, k_cache, v_cache, cos, sin, start=0, q_norm=None, k_norm=None, eps=1e-6):
    return KERNEL(qkv, k_cache, v_cache, cos, sin, start, q_norm, k_norm, eps)


OP = Op(
    name="norm_rope",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(B=2, T=7, H=4, KV=2, D=16, S=12), dict(B=1, T=5, H=3, KV=1, D=40, S=9, start=4),
        dict(B=1, T=33, H=2, KV=2, D=128, S=40, start=3, norms=False), dict(B=1, T=0, H=2, KV=1, D=16, S=8),
        dict(B=2, T=3, H=2, KV=1, D=6, S=8, start=1, layout="sliced"), dict(B=1, T=2, H=1, KV=1, D=256, S=4, start=2),
    ),
    shapes={
        f"qwen3-0.6b {T} at {start}": dict(B=1, T=T, H=16, KV=8, D=128, S=4096, start=start)
        for T, start in ((2048, 0), (2048, 2048), (32, 0))
    },
    cost=cost,
    grads=(),
    mutates=("k_cache", "v_cache"),
    impls={
        "triton": Impl(
            run_triton, refuses, needs="triton",
            limits=(
                "dtypes other than fp32, fp16, bf16, or several", "gradients", "heads wider than 256",
                "strided last dimensions, norms with gaps, caches whose elements share memory",
            ),
        ),
    },
    dynamic=("T",),
    tiny=dict(T=3, S=8, start=2, H=4, KV=2),
    hostile=families(("qkv",), ("q_norm", "k_norm"), options={"eps 0.01": dict(eps=1e-2)}),
)
