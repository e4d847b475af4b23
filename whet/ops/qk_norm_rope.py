"""qk_norm_rope: rms_norm of every query and key head, then the rotation by position; with gradients, for training."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, nbytes, same_device
from whet.ops._rows import KERNEL_DTYPES, cdiv, column_sum, power_of_two, programs
from whet.ops.rms_norm import reference as rms_norm
from whet.ops.rope import OP as ROPE
from whet.ops.rope import dense_like, far, unit
from whet.ops.rope import reference as rope
from whet.torch_ops import Fused
from whet.values import families

MAX_D = 256  # one program holds whole heads, and its sums over them, in registers


def reference(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    """rms_norm of each head of q (B, Hq, S, D) by wq and of k (B, Hk, S, D) by wk, both (D,), then rotated as rope does.

    cos, sin      tables (P, D/2), from whet.ops.rope import tables: pairs are (i, i + D/2); no gradient
    positions     the table row of each token: an offset (token s takes row positions + s), or rows (S,) or (B, S)
    """
    return rope(rms_norm(q, wq, eps), rms_norm(k, wk, eps), cos, sin, positions)


def inputs(dtype, device, B, S, Hq, Hk, D, layout="bshd", positions="offset", table_dtype="float32", w_dtype=None):
    args = ROPE.inputs(dtype, device, B, S, Hq, Hk, D, layout=layout, positions=positions, table_dtype=table_dtype)
    q, k, *others = (args[n] for n in ("q", "k", "cos", "sin", "positions"))
    wq, wk = ((torch.rand(D, device=device) + 0.5).to(w_dtype and getattr(torch, w_dtype) or dtype) for _ in range(2))
    return dict(q=q, k=k, wq=wq, wk=wk) | dict(zip(("cos", "sin", "positions"), others)) | dict(eps=1e-6)


def case_of(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    case = {n: v for n, v in ROPE.case_of(q, k, cos, sin, positions).items() if n not in ("R", "interleaved")}
    return case if wq.dtype == q.dtype else case | dict(w_dtype=str(wq.dtype).removeprefix("torch."))


def check(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    if reason := ROPE.check(q, k, cos, sin, positions) or floating(wq=wq, wk=wk) or same_device(q=q, wq=wq, wk=wk):
        return reason
    D = q.shape[-1]
    if 2 * cos.shape[1] != D:
        return f"cos must have shape (P, {D // 2}), half of q.shape[-1], got {tuple(cos.shape)}"
    for name, w in (("wq", wq), ("wk", wk)):
        if w.shape != (D,):
            return f"{name} must have shape ({D},) to match q.shape[-1], got {tuple(w.shape)}"
    return None if wk.dtype == wq.dtype else f"wk must have wq's dtype {wq.dtype}, got {wk.dtype}"


def cost(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    rotation, n = ROPE.cost(q, k, cos, sin, positions), q.numel() + k.numel()
    return Cost(
        bytes=rotation.bytes + nbytes(wq, wk), flops=rotation.flops + 4 * n,
        bwd_bytes=rotation.bytes + nbytes(q, k) + 2 * nbytes(wq, wk), bwd_flops=rotation.bwd_flops + 8 * n,
    )


@triton.jit
def _angles(
    cos_ptr, sin_ptr, rows_ptr, b, s, there, d, stride_cp, stride_sp, stride_rb, stride_rs, P, offset,
):
    """cos and sin of the tokens (b, s), for the channels d."""
    if rows_ptr is not None:
        row = tl.load(rows_ptr + b * stride_rb + s * stride_rs).to(tl.int64)
        row = tl.where(row < 0, row + P, row)  # from the end, as an index counts
        there = there & ((row >= 0) & (row < P))[:, None]  # a position outside the table gives NaN, never another's memory
    else:
        row = s + offset
    c = tl.load(cos_ptr + row[:, None] * stride_cp + d, mask=there, other=float("nan")).to(tl.float32)
    sn = tl.load(sin_ptr + row[:, None] * stride_sp + d, mask=there, other=float("nan")).to(tl.float32)
    return c, sn


@triton.jit
def _norm_rotate(
    x_ptr, w_ptr, cos_ptr, sin_ptr, rows_ptr, y_ptr, block,
    stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_cp, stride_sp, stride_rb, stride_rs,
    M, S, P, offset, eps,
    H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """ROWS heads, one token's H after another's."""
    m, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_C)[None, :]
    live = m < M
    m = tl.where(live, m, 0)
    b, s, h = (m // H // S).to(tl.int64), (m // H % S).to(tl.int64), (m % H).to(tl.int64)
    there = live[:, None] & (d < HALF)
    x_at = (x_ptr + b * stride_xb + h * stride_xh + s * stride_xs)[:, None] + d
    x1 = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF, mask=there, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    c, sn = _angles(cos_ptr, sin_ptr, rows_ptr, b, s, there, d, stride_cp, stride_sp, stride_rb, stride_rs, P, offset)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * rstd * w1, x2 * rstd * w2
    y_at = (y_ptr + b * stride_yb + h * stride_yh + s * stride_ys)[:, None] + d
    tl.store(y_at, n1 * c - n2 * sn, mask=there)
    tl.store(y_at + HALF, n2 * c + n1 * sn, mask=there)


@triton.jit(do_not_specialize=["S", "P", "offset", "Mq", "Mk"])
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, rows_ptr,  # inputs; rows_ptr may be None
    q_out_ptr, k_out_ptr,  # outputs
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos,
    stride_cp, stride_sp, stride_rb, stride_rs,
    Mq, Mk, S, P, offset, eps,
    Hq: tl.constexpr, Hk: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """n = x * rsqrt(mean(x^2) + eps) * w;  (a, b) of n -> (a*cos - b*sin, b*cos + a*sin).  One program, ROWS heads of q or k.

    Fuses   both norms and the rotation, q and k in one launch: a head is read once.
    Moves   q, k in; q, k out = 2*B*S*(Hq+Hk)*D * itemsize.  Norms, then the rotation: twice that.
    Rounds  once, at the store; fp32 inside.
    """
    block, of_q = tl.program_id(0), tl.cdiv(Mq, ROWS)
    if block < of_q:
        _norm_rotate(
            q_ptr, wq_ptr, cos_ptr, sin_ptr, rows_ptr, q_out_ptr, block,
            stride_qb, stride_qh, stride_qs, stride_qob, stride_qoh, stride_qos, stride_cp, stride_sp, stride_rb, stride_rs,
            Mq, S, P, offset, eps, Hq, HALF, ROWS, BLOCK_C,
        )
    else:
        _norm_rotate(
            k_ptr, wk_ptr, cos_ptr, sin_ptr, rows_ptr, k_out_ptr, block - of_q,
            stride_kb, stride_kh, stride_ks, stride_kob, stride_koh, stride_kos, stride_cp, stride_sp, stride_rb, stride_rs,
            Mk, S, P, offset, eps, Hk, HALF, ROWS, BLOCK_C,
        )


@triton.jit
def _norm_rotate_bwd(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, rows_ptr, dx_ptr, partial_ptr, pid,
    stride_yb, stride_yh, stride_ys, stride_xb, stride_xh, stride_xs, stride_dxb, stride_dxh, stride_dxs,
    stride_cp, stride_sp, stride_rb, stride_rs,
    M, S, P, offset, eps,
    H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """A program's share of the blocks of ROWS heads, the last first, and its row of dw."""
    d = tl.arange(0, BLOCK_C)[None, :]
    w1 = tl.load(w_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    dw1, dw2 = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32), tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    blocks = tl.cdiv(M, ROWS)
    for i in range(pid, blocks, tl.num_programs(0)):
        m = (blocks - 1 - i) * ROWS + tl.arange(0, ROWS)
        live = m < M
        m = tl.where(live, m, 0)
        b, s, h = (m // H // S).to(tl.int64), (m // H % S).to(tl.int64), (m % H).to(tl.int64)
        there = live[:, None] & (d < HALF)
        x_at = (x_ptr + b * stride_xb + h * stride_xh + s * stride_xs)[:, None] + d
        x1 = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + HALF, mask=there, other=0.0).to(tl.float32)
        dy_at = (dy_ptr + b * stride_yb + h * stride_yh + s * stride_ys)[:, None] + d
        dy1 = tl.load(dy_at, mask=there, other=0.0).to(tl.float32)
        dy2 = tl.load(dy_at + HALF, mask=there, other=0.0).to(tl.float32)
        c, sn = _angles(cos_ptr, sin_ptr, rows_ptr, b, s, there, d, stride_cp, stride_sp, stride_rb, stride_rs, P, offset)
        dn1, dn2 = tl.where(there, dy1 * c + dy2 * sn, 0.0), tl.where(there, dy2 * c - dy1 * sn, 0.0)

        rstd = 1.0 / tl.sqrt_rn(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
        u1, u2 = x1 * rstd, x2 * rstd
        dw1 += dn1 * u1
        dw2 += dn2 * u2
        dn1, dn2 = dn1 * w1, dn2 * w2
        mean = tl.sum(u1 * dn1 + u2 * dn2, axis=1)[:, None] / (2 * HALF)
        dx_at = (dx_ptr + b * stride_dxb + h * stride_dxh + s * stride_dxs)[:, None] + d
        tl.store(dx_at, (dn1 - u1 * mean) * rstd, mask=there)
        tl.store(dx_at + HALF, (dn2 - u2 * mean) * rstd, mask=there)

    e = tl.arange(0, BLOCK_C)
    partial_ptr += pid.to(tl.int64) * (2 * HALF) + e
    tl.store(partial_ptr, tl.sum(dw1, axis=0), mask=e < HALF)
    tl.store(partial_ptr + HALF, tl.sum(dw2, axis=0), mask=e < HALF)


@triton.jit(do_not_specialize=["S", "P", "offset", "Mq", "Mk"])
def _qk_norm_rope_bwd_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, rows_ptr,  # inputs; rows_ptr may be None
    q_grad_ptr, k_grad_ptr, partial_ptr,  # outputs
    stride_dqb, stride_dqh, stride_dqs, stride_dkb, stride_dkh, stride_dks,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_qgb, stride_qgh, stride_qgs, stride_kgb, stride_kgh, stride_kgs,
    stride_cp, stride_sp, stride_rb, stride_rs,
    Mq, Mk, S, P, offset, eps,
    Hq: tl.constexpr, Hk: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """dn = dy turned back;  u = x * rstd;  dx = (w*dn - u * mean(u*w*dn)) * rstd;  dw = sum over heads of dn*u.

    Fuses   the rotation's gradient, the norms' and both dw: dy and x are read once; rstd is computed again from x. Programs
            stride over blocks of heads, of q, then of k; each keeps its share of dw in registers.
    Moves   dq, dk, q, k in; their gradients out = 3*B*S*(Hq+Hk)*D * itemsize, and two fp32 rows of dw per program.
    Rounds  dx once, at the store; dw is summed in fp32 in a fixed order, then rounded once.
    """
    pid = tl.program_id(0)
    _norm_rotate_bwd(
        dq_ptr, q_ptr, wq_ptr, cos_ptr, sin_ptr, rows_ptr, q_grad_ptr, partial_ptr, pid,
        stride_dqb, stride_dqh, stride_dqs, stride_qb, stride_qh, stride_qs, stride_qgb, stride_qgh, stride_qgs,
        stride_cp, stride_sp, stride_rb, stride_rs, Mq, S, P, offset, eps, Hq, HALF, ROWS, BLOCK_C,
    )
    _norm_rotate_bwd(
        dk_ptr, k_ptr, wk_ptr, cos_ptr, sin_ptr, rows_ptr, k_grad_ptr, partial_ptr + tl.num_programs(0) * 2 * HALF, pid,
        stride_dkb, stride_dkh, stride_dks, stride_kb, stride_kh, stride_ks, stride_kgb, stride_kgh, stride_kgs,
        stride_cp, stride_sp, stride_rb, stride_rs, Mk, S, P, offset, eps, Hk, HALF, ROWS, BLOCK_C,
    )


def strides_of(cos, sin, rows):
    batch = rows.stride(0) if rows is not None and rows.dim() == 2 else 0
    return cos.stride(0), sin.stride(0), batch, rows.stride(-1) if rows is not None else 0


def config(q, k, elements):
    """The constexprs of a launch: tiles of so many pairs of channels."""
    half = q.shape[3] // 2
    BLOCK_C = power_of_two(max(16, half))
    return dict(Hq=q.shape[1], Hk=k.shape[1], HALF=half, ROWS=max(1, elements // BLOCK_C), BLOCK_C=BLOCK_C)


def forward(q, k, wq, wk, cos, sin, rows, offset, eps):
    q_out, k_out = dense_like(q), dense_like(k)
    if not q.numel():
        return q_out, k_out
    q, k, cos, sin, wq, wk = unit(q), unit(k), unit(cos), unit(sin), wq.contiguous(), wk.contiguous()
    (B, Hq, S, _), Hk = q.shape, k.shape[1]
    c, Mq, Mk = config(q, k, 1024), B * S * Hq, B * S * Hk
    launcher(_qk_norm_rope_kernel)[(cdiv(Mq, c["ROWS"]) + cdiv(Mk, c["ROWS"]),)](
        q, k, wq, wk, cos, sin, rows, q_out, k_out,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *strides_of(cos, sin, rows),
        Mq, Mk, S, cos.shape[0], offset, eps, num_warps=4, **c,
    )
    return q_out, k_out


def backward(dq, dk, q, k, wq, wk, cos, sin, rows, offset, eps):
    """Gradients of q, k, wq and wk; None in place of dq or dk stands for zeros."""
    grads = dense_like(q), dense_like(k)
    dws = tuple(torch.empty_like(w, memory_format=torch.contiguous_format) for w in (wq, wk))
    if not q.numel():
        return *grads, *(dw.zero_() for dw in dws)
    for grad, given in zip(grads, (dq, dk)):
        if given is None:
            grad.zero_()
    (B, Hq, S, D), Hk = q.shape, k.shape[1]
    Mq, Mk = (0 if g is None else B * S * H for g, H in ((dq, Hq), (dk, Hk)))
    q, k, cos, sin, wq, wk = unit(q), unit(k), unit(cos), unit(sin), wq.contiguous(), wk.contiguous()
    dq, dk = (x if g is None else unit(g) for g, x in ((dq, q), (dk, k)))
    c = config(q, k, 1024)
    G = programs(cdiv(max(Mq, Mk), c["ROWS"]), 3)
    partial = torch.empty(2, G, D, dtype=torch.float32, device=q.device)
    launcher(_qk_norm_rope_bwd_kernel)[(G,)](
        dq, dk, q, k, wq, wk, cos, sin, rows, *grads, partial,
        *dq.stride()[:3], *dk.stride()[:3], *q.stride()[:3], *k.stride()[:3], *grads[0].stride()[:3], *grads[1].stride()[:3],
        *strides_of(cos, sin, rows), Mq, Mk, S, cos.shape[0], offset, eps, num_warps=4, **c,
    )
    return *grads, *(column_sum(part, dw) for part, dw in zip(partial, dws))


FUSED = Fused(
    "qk_norm_rope",
    "(Tensor q, Tensor k, Tensor wq, Tensor wk, Tensor cos, Tensor sin, Tensor? rows, SymInt offset, float eps) "
    "-> (Tensor, Tensor)", forward,
    lambda q, k, *_: (dense_like(q), dense_like(k)),
    "(Tensor? dq, Tensor? dk, Tensor q, Tensor k, Tensor wq, Tensor wk, Tensor cos, Tensor sin, Tensor? rows, SymInt offset, "
    "float eps) -> (Tensor, Tensor, Tensor, Tensor)", backward,
    lambda dq, dk, q, k, wq, wk, *_: (dense_like(q), dense_like(k), wq.new_empty(wq.shape), wk.new_empty(wk.shape)),
    save=lambda args, results: (args[:7], args[7:]),
    grads_to=(0, 1, 2, 3, None, None, None, None, None),
    n_out=2, grads_from=((0,), (1,), (0,), (1,)),
)


def refuses(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    if any(t.dtype not in KERNEL_DTYPES for t in (q, wq, cos)):
        return f"q, wq and cos must be float32, float16 or bfloat16, got {q.dtype}, {wq.dtype} and {cos.dtype}"
    if q.shape[-1] > MAX_D:
        return f"q.shape[-1] must be at most {MAX_D}, the widest head one program holds, got {q.shape[-1]}"
    return None


def run_triton(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    rows, offset = (positions, 0) if isinstance(positions, torch.Tensor) else (None, positions)
    return FUSED(q, k, wq, wk, cos, sin, rows, offset, eps)


def torch_refuses(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    return None if wq.dtype == q.dtype else f"wq and wk must have q's dtype {q.dtype}, got {wq.dtype}"


def run_torch(q, k, wq, wk, cos, sin, positions=0, eps=1e-6):
    return rope(F.rms_norm(q, wq.shape, wq, eps), F.rms_norm(k, wk.shape, wk, eps), cos, sin, positions)


OP = Op(
    name="qk_norm_rope",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(B=2, S=7, Hq=4, Hk=2, D=64), dict(B=2, S=5, Hq=8, Hk=8, D=48), dict(B=1, S=33, Hq=8, Hk=1, D=128),
        dict(B=0, S=8, Hq=4, Hk=2, D=64), dict(B=2, S=0, Hq=4, Hk=2, D=64), dict(B=3, S=1, Hq=12, Hk=3, D=32),
        dict(B=1, S=5, Hq=2, Hk=1, D=256), dict(B=2, S=6, Hq=2, Hk=2, D=6),
        dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="bhsd"), dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="packed"),
        dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="transposed"), dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="expanded"),
        dict(B=2, S=7, Hq=4, Hk=2, D=64, positions="tensor"), dict(B=2, S=7, Hq=4, Hk=2, D=40, positions="batched"),
        dict(B=2, S=7, Hq=4, Hk=2, D=64, table_dtype="bfloat16"), dict(B=2, S=7, Hq=4, Hk=2, D=64, w_dtype="float32"),
    ),
    shapes={
        "B8 S2048 H16 KV8 D128": dict(B=8, S=2048, Hq=16, Hk=8, D=128),
        "B8 S1024 H4 KV1 D256": dict(B=8, S=1024, Hq=4, Hk=1, D=256),
    },
    cost=cost,
    grads=("q", "k", "wq", "wk"),
    impls={
        "torch": Impl(run_torch, torch_refuses, limits=("weights of another dtype than q",)),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", f"heads wider than {MAX_D}")
        ),
    },
    dynamic=("B", "S"),
    tiny=dict(B=1, S=8),
    hostile=families(("q", "k"), ("wq", "wk"), options={"eps 0.01": dict(eps=1e-2)}, positions_far_out=far),
    kinds=dict(positions="int | tensor"),
)
