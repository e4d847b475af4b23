"""rope: rotate pairs of query and key channels by an angle that grows with the token's position."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, nbytes, same_device
from whet.ops._rotary import tables
from whet.ops._rows import KERNEL_DTYPES, cdiv, power_of_two
from whet.torch_ops import Fused
from whet.values import families

MAX_D = 1024  # one program holds whole heads in registers


def reference(q, k, cos, sin, positions=0, interleaved=False):
    """Rotate q (B, Hq, S, D) and k (B, Hk, S, D): pair (a, b) becomes (a cos - b sin, b cos + a sin).

    cos, sin      tables (P, R/2), from whet.ops.rope import tables; channels from R on pass through; no gradient
    positions     the table row of each token: an offset (token s takes row positions + s), or rows (S,) or (B, S)
    interleaved   pairs are (2i, 2i+1); else (i, i + R/2)
    """
    rows = positions if isinstance(positions, torch.Tensor) else slice(positions, positions + q.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    c, s = (t[rows].to(wide) for t in (cos, sin))
    if c.dim() == 3:
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    return rotated(q, c, s, interleaved), rotated(k, c, s, interleaved)


def rotated(x, c, s, interleaved):
    R = 2 * c.shape[-1]
    h = x[..., :R].to(c.dtype)
    a, b = (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y.to(x.dtype), x[..., R:]), -1)


LAYOUTS = ("bshd", "bhsd", "packed", "transposed", "expanded")
OFFSET, SPARE = 3, 5  # token 0 is not at position 0, and the table is longer than the sequence


def inputs(dtype, device, B, S, Hq, Hk, D, R=None, layout="bshd", positions="offset", interleaved=False, table_dtype="float32"):
    def randn(*shape):
        return torch.randn(*shape, dtype=dtype, device=device)

    if layout == "packed":  # slices of one projection
        q, k, _ = randn(B, S, Hq + 2 * Hk, D).transpose(1, 2).split((Hq, Hk, Hk), 1)
    elif layout == "expanded":  # one batch for all, one key head for all
        q, k = randn(1, Hq, S, D).expand(B, -1, -1, -1), randn(B, 1, S, D).expand(-1, Hk, -1, -1)
    elif layout == "transposed":  # last dimension not contiguous
        q, k = (randn(B, H, D, S).transpose(2, 3) for H in (Hq, Hk))
    elif layout in ("bshd", "bhsd"):
        q, k = (randn(B, H, S, D) if layout == "bhsd" else randn(B, S, H, D).transpose(1, 2) for H in (Hq, Hk))
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    P = S + SPARE
    rows = OFFSET if positions == "offset" else torch.randint(P, (S,) if positions == "tensor" else (B, S), device=device)
    cos, sin = (t.to(getattr(torch, table_dtype)) for t in tables(P, R or D, device=device))
    return dict(q=q, k=k, cos=cos, sin=sin, positions=rows, interleaved=interleaved)


def far(args):
    """Hostile values: tables four times as long, and positions at their end."""
    (P, half), positions = args["cos"].shape, args["positions"]
    cos, sin = (t.to(args["cos"].dtype) for t in tables(4 * P, 2 * half, device=args["q"].device))
    return args | dict(cos=cos, sin=sin, positions=positions + 3 * P)


def case_of(q, k, cos, sin, positions=0, interleaved=False):
    (B, Hq, S, D), Hk = q.shape, k.shape[1]
    if q.transpose(1, 2).is_contiguous():
        layout = "bshd"
    elif q.is_contiguous():
        layout = "bhsd"
    elif q.stride(3) != 1:
        layout = "transposed"
    else:
        layout = "expanded" if 0 in q.stride() else "packed"
    kind = ("tensor" if positions.dim() == 1 else "batched") if isinstance(positions, torch.Tensor) else "offset"
    case = dict(B=B, S=S, Hq=Hq, Hk=Hk, D=D, R=2 * cos.shape[1], layout=layout, positions=kind, interleaved=interleaved)
    return case if cos.dtype == torch.float32 else case | dict(table_dtype=str(cos.dtype).removeprefix("torch."))


def check(q, k, cos, sin, positions=0, interleaved=False):
    if reason := floating(q=q, k=k, cos=cos, sin=sin) or same_device(q=q, k=k, cos=cos, sin=sin):
        return reason
    if q.dim() != 4 or k.dim() != 4:
        return f"q and k must have shape (B, H, S, D), got {tuple(q.shape)} and {tuple(k.shape)}"
    B, Hq, S, D = q.shape
    if not Hq or not k.shape[1]:
        return f"q and k must have at least one head, got {Hq} and {k.shape[1]}"
    if k.shape[0] != B or k.shape[2] != S or k.shape[3] != D:
        return f"k must have shape ({B}, Hk, {S}, {D}) to match q, got {tuple(k.shape)}"
    if k.dtype != q.dtype:
        return f"k must have q's dtype {q.dtype}, got {k.dtype}"
    if cos.dim() != 2 or not 2 <= 2 * cos.shape[1] <= D:
        return f"cos must have shape (P, R/2) with 2 <= R <= {D}, q.shape[-1], got {tuple(cos.shape)}"
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        return f"sin must be {tuple(cos.shape)} {cos.dtype} to match cos, got {tuple(sin.shape)} {sin.dtype}"
    if cos.requires_grad or sin.requires_grad:
        return "cos and sin must not require gradients: they are tables; detach them"
    return check_positions(positions, q, cos.shape[0])


def check_positions(positions, q, P):
    B, _, S, _ = q.shape
    if isinstance(positions, torch.Tensor):
        if positions.dtype not in (torch.int32, torch.int64):
            return f"positions must be int32 or int64, got {positions.dtype}"
        if positions.shape != (S,) and positions.shape != (B, S):
            return f"positions must have shape ({S},) or ({B}, {S}) to match q, got {tuple(positions.shape)}"
        return same_device(q=q, positions=positions)
    if positions < 0 or positions + S > P:
        return f"positions must lie in 0..{P - S} so that {S} tokens fit the {P} rows of cos, got {positions}"
    return None


def cost(q, k, cos, sin, positions=0, interleaved=False):
    rows = positions.numel() if isinstance(positions, torch.Tensor) else q.shape[2]
    table = 2 * min(rows, cos.shape[0]) * cos.shape[1] * cos.element_size()
    table += nbytes(positions) if isinstance(positions, torch.Tensor) else 0
    flops = 3 * q.shape[0] * q.shape[2] * (q.shape[1] + k.shape[1]) * 2 * cos.shape[1]
    both = 2 * nbytes(q, k) + table
    return Cost(bytes=both, flops=flops, bwd_bytes=both, bwd_flops=flops)


@triton.jit
def _rotate_tile(
    x_ptr, cos_ptr, sin_ptr, rows_ptr, y_ptr, pid,
    stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_cp, stride_sp, stride_rb, stride_rs,
    S, P, offset, sign,
    H: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The rotation of BLOCK_H heads of BLOCK_S tokens; pid counts head blocks, then token blocks, then batches."""
    blocks_h = tl.cdiv(H, BLOCK_H)
    blocks_s = tl.cdiv(S, BLOCK_S)
    b = (pid // blocks_h // blocks_s).to(tl.int64)
    h = ((pid % blocks_h) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None, None]
    s = ((pid // blocks_h % blocks_s) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :, None]
    i = tl.arange(0, BLOCK_C)[None, None, :]
    in_sequence = s < S
    inside = (h < H) & in_sequence
    in_table = in_sequence & (i < HALF)
    h, s = h.to(tl.int64), s.to(tl.int64)

    if rows_ptr is not None:
        row = tl.load(rows_ptr + b * stride_rb + s * stride_rs, mask=in_sequence, other=0).to(tl.int64)
        row = tl.where(row < 0, row + P, row)  # from the end, as an index counts
        in_table = in_table & (row >= 0) & (row < P)  # a position outside the table gives NaN, never another's memory
    else:
        row = s + offset
    c = tl.load(cos_ptr + row * stride_cp + i, mask=in_table, other=float("nan")).to(tl.float32)
    sn = tl.load(sin_ptr + row * stride_sp + i, mask=in_table, other=float("nan")).to(tl.float32) * sign

    x_ptr += b * stride_xb + h * stride_xh + s * stride_xs
    y_ptr += b * stride_yb + h * stride_yh + s * stride_ys
    if INTERLEAVED:
        j = tl.arange(0, 2 * BLOCK_C)[None, None, :]
        in_head = inside & (j < 2 * HALF)
        x = tl.load(x_ptr + j, mask=in_head, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_S, BLOCK_C, 2)))
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        y = tl.join((x1 * c - x2 * sn).to(x.dtype), (x2 * c + x1 * sn).to(x.dtype))
        tl.store(y_ptr + j, tl.reshape(y, (BLOCK_H, BLOCK_S, 2 * BLOCK_C)), mask=in_head)
    else:
        in_half = inside & (i < HALF)
        x1 = tl.load(x_ptr + i, mask=in_half, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + HALF + i, mask=in_half, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, x1 * c - x2 * sn, mask=in_half)
        tl.store(y_ptr + HALF + i, x2 * c + x1 * sn, mask=in_half)

    if TAIL > 0:
        j = tl.arange(0, BLOCK_TAIL)[None, None, :]
        in_tail = inside & (j < TAIL)
        tl.store(y_ptr + 2 * HALF + j, tl.load(x_ptr + 2 * HALF + j, mask=in_tail), mask=in_tail)


@triton.jit(do_not_specialize=["S", "P", "offset", "programs_q"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, rows_ptr,  # inputs; rows_ptr may be None
    q_out_ptr, k_out_ptr,  # outputs
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos,
    stride_cp, stride_sp, stride_rb, stride_rs,
    S, P, programs_q, offset, sign,
    Hq: tl.constexpr, Hk: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """(a, b) -> (a*cos - sign*b*sin, b*cos + sign*a*sin).  One program, ROWS token-heads of q or of k.

    Fuses   q and k in one launch; the backward is the same kernel with sign = -1.
    Moves   q, k in; q, k out = 2*B*S*(Hq+Hk)*D * itemsize. A program reads a token's cos and sin once for its heads.
    Rounds  once, at the store; fp32 inside.
    """
    pid = tl.program_id(0)
    if pid < programs_q:
        _rotate_tile(
            q_ptr, cos_ptr, sin_ptr, rows_ptr, q_out_ptr, pid,
            stride_qb, stride_qh, stride_qs, stride_qob, stride_qoh, stride_qos, stride_cp, stride_sp, stride_rb, stride_rs,
            S, P, offset, sign, Hq, HALF, TAIL, BLOCK_HQ, ROWS // BLOCK_HQ, BLOCK_C, BLOCK_TAIL, INTERLEAVED,
        )
    else:
        _rotate_tile(
            k_ptr, cos_ptr, sin_ptr, rows_ptr, k_out_ptr, pid - programs_q,
            stride_kb, stride_kh, stride_ks, stride_kob, stride_koh, stride_kos, stride_cp, stride_sp, stride_rb, stride_rs,
            S, P, offset, sign, Hk, HALF, TAIL, BLOCK_HK, ROWS // BLOCK_HK, BLOCK_C, BLOCK_TAIL, INTERLEAVED,
        )


def unit(x):
    """x with unit stride in its last dimension: itself where it has, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_like(x):
    """An empty tensor of x's shape, dense in the order of x's memory: (B, S, H, D) memory stays so.

    Strides are spelled out: empty_like gives a fake tensor others than a real one where a size is 0 or 1.
    """
    order = [0, 1, 2] if x.stride(3) != 1 or 0 in x.stride() else sorted((0, 1, 2), key=lambda d: (-x.stride(d), -x.shape[d]))
    stride, step = [1, 1, 1, 1], x.shape[3]
    for d in reversed(order):
        stride[d] = step
        step *= max(x.shape[d], 1)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)


def config(Hq, Hk, R, D):
    """The constexprs of a launch."""
    BLOCK_C, BLOCK_TAIL = power_of_two(R // 2), power_of_two(D - R) if D > R else 0
    ROWS = min(128, max(1, 2048 // max(BLOCK_C, BLOCK_TAIL // 2)))
    BLOCK_HQ, BLOCK_HK = (min(power_of_two(H), 16, ROWS) for H in (Hq, Hk))
    return dict(
        Hq=Hq, Hk=Hk, HALF=R // 2, TAIL=D - R, BLOCK_HQ=BLOCK_HQ, BLOCK_HK=BLOCK_HK, ROWS=ROWS, BLOCK_C=BLOCK_C,
        BLOCK_TAIL=BLOCK_TAIL,
    )


def launch(q, k, cos, sin, rows, offset, interleaved, q_out, k_out, sign):
    """Rotate q into q_out and k into k_out; None in place of q or k stands for zeros."""
    if q is None:
        q_out.zero_()
    if k is None:
        k_out.zero_()
    B, Hq, S, D = q_out.shape
    Hk = k_out.shape[1]
    c = config(Hq, Hk, 2 * cos.shape[1], D)
    programs_q = 0 if q is None else B * cdiv(Hq, c["BLOCK_HQ"]) * cdiv(S, c["ROWS"] // c["BLOCK_HQ"])
    programs_k = 0 if k is None else B * cdiv(Hk, c["BLOCK_HK"]) * cdiv(S, c["ROWS"] // c["BLOCK_HK"])
    if programs_q + programs_k:
        q, k = unit(k_out if q is None else q), unit(q_out if k is None else k)
        cos, sin = unit(cos), unit(sin)
        launcher(_rope_kernel)[(programs_q + programs_k,)](
            q, k, cos, sin, rows, q_out, k_out,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], cos.stride(0), sin.stride(0),
            rows.stride(0) if rows is not None and rows.dim() == 2 else 0, rows.stride(-1) if rows is not None else 0,
            S, cos.shape[0], programs_q, offset, sign, INTERLEAVED=interleaved, num_warps=4, **c,
        )
    return q_out, k_out


def forward(q, k, cos, sin, rows, offset, interleaved):
    return launch(q, k, cos, sin, rows, offset, interleaved, dense_like(q), dense_like(k), 1.0)


def backward(dq, dk, cos, sin, rows, offset, interleaved, q_shape, q_stride, k_shape, k_stride):
    like = dict(dtype=(dk if dq is None else dq).dtype, device=cos.device)
    grads = torch.empty_strided(q_shape, q_stride, **like), torch.empty_strided(k_shape, k_stride, **like)
    return launch(dq, dk, cos, sin, rows, offset, interleaved, *grads, -1.0)


def backward_fake(dq, dk, cos, sin, rows, offset, interleaved, q_shape, q_stride, k_shape, k_stride):
    like = dict(dtype=(dk if dq is None else dq).dtype, device=cos.device)
    return torch.empty_strided(q_shape, q_stride, **like), torch.empty_strided(k_shape, k_stride, **like)


def save(args, results):
    """The tables, and the layout the gradients are written in: the outputs'."""
    _, _, cos, sin, rows, offset, interleaved = args
    return (cos, sin, rows), (offset, interleaved, *(layout for y in results for layout in (list(y.shape), list(y.stride()))))


FUSED = Fused(
    "rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? rows, SymInt offset, bool interleaved) -> (Tensor, Tensor)", forward,
    lambda q, k, cos, sin, rows, offset, interleaved: (dense_like(q), dense_like(k)),
    "(Tensor? dq, Tensor? dk, Tensor cos, Tensor sin, Tensor? rows, SymInt offset, bool interleaved, "
    "SymInt[] q_shape, SymInt[] q_stride, SymInt[] k_shape, SymInt[] k_stride) -> (Tensor, Tensor)", backward,
    backward_fake,
    save=save,
    grads_to=(0, 1, None, None, None, None, None),
    n_out=2, visible=True, bwd_visible=True, grads_from=((0,), (1,)),
)


def refuses(q, k, cos, sin, positions=0, interleaved=False):
    if q.dtype not in KERNEL_DTYPES or cos.dtype not in KERNEL_DTYPES:
        return f"q and cos must be float32, float16 or bfloat16, got {q.dtype} and {cos.dtype}"
    if q.shape[-1] > MAX_D:
        return f"q.shape[-1] must be at most {MAX_D}, the widest head one program holds, got {q.shape[-1]}"
    return None


def run_triton(q, k, cos, sin, positions=0, interleaved=False):
    rows, offset = (positions, 0) if isinstance(positions, torch.Tensor) else (None, positions)
    return FUSED(q, k, cos, sin, rows, offset, interleaved)


def liger_refuses(q, k, cos, sin, positions=0, interleaved=False):
    if interleaved:
        return "interleaved must be False: Liger pairs channel i with i + R/2 only"
    if cos.dtype != torch.float32:  # it computes in the tables' dtype
        return f"cos must be float32, the dtype Liger then computes in, got {cos.dtype}"
    return None


def owned(x):
    """A copy of x where Liger would write into x itself, which is in (B, S, H, D) memory; else x.

    The copy has the strides of fresh memory: Liger trusts the token stride also where S is 1 and it may be any.
    """
    y = x.transpose(1, 2)
    return y.clone(memory_format=torch.contiguous_format).transpose(1, 2) if y.is_contiguous() else x


class OwnedGradient(torch.autograd.Function):
    """The identity. Its backward hands Liger, which rotates gradients in place, one that nobody else holds."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return owned(dx)


def run_liger(q, k, cos, sin, positions=0, interleaved=False):
    from liger_kernel.ops.rope import LigerRopeFunction

    rows = positions if isinstance(positions, torch.Tensor) else slice(positions, positions + q.shape[2])
    outs = LigerRopeFunction.apply(owned(q), owned(k), cos[rows], sin[rows], None, 1, 2 * cos.shape[1])
    return tuple(OwnedGradient.apply(y) for y in outs)


OP = Op(
    name="rope",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(B=2, S=7, Hq=4, Hk=2, D=64), dict(B=2, S=5, Hq=8, Hk=8, D=48), dict(B=1, S=33, Hq=8, Hk=1, D=64),
        dict(B=0, S=8, Hq=4, Hk=2, D=64), dict(B=2, S=0, Hq=4, Hk=2, D=64), dict(B=3, S=1, Hq=12, Hk=3, D=128),
        dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="bhsd"), dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="packed"),
        dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="transposed"), dict(B=2, S=9, Hq=4, Hk=2, D=64, layout="expanded"),
        dict(B=2, S=9, Hq=4, Hk=4, D=80, R=32), dict(B=2, S=6, Hq=2, Hk=2, D=6, R=2),
        dict(B=2, S=7, Hq=4, Hk=2, D=64, interleaved=True), dict(B=2, S=5, Hq=9, Hk=3, D=48, interleaved=True),
        dict(B=2, S=9, Hq=4, Hk=2, D=80, R=32, layout="bhsd", interleaved=True),
        dict(B=2, S=7, Hq=4, Hk=2, D=64, positions="tensor"), dict(B=2, S=7, Hq=4, Hk=2, D=64, positions="batched"),
        dict(B=2, S=7, Hq=4, Hk=2, D=48, layout="bhsd", positions="batched", interleaved=True),
        dict(B=2, S=7, Hq=4, Hk=2, D=64, table_dtype="bfloat16"),
    ),
    shapes={
        "B8 S2048 H16 KV8 D128": dict(B=8, S=2048, Hq=16, Hk=8, D=128),
        "B16 S256 H8 D48": dict(B=16, S=256, Hq=8, Hk=8, D=48),
        "B8 S128 H8 KV4 D64": dict(B=8, S=128, Hq=8, Hk=4, D=64),
    },
    cost=cost,
    grads=("q", "k"),
    impls={
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", f"heads wider than {MAX_D}")
        ),
        "liger": Impl(run_liger, liger_refuses, needs="liger_kernel", limits=("interleaved pairs", "tables other than fp32")),
    },
    dynamic=("B", "S"),
    tiny=dict(B=1, S=8),
    hostile=families(("q", "k"), positions_far_out=far),
    kinds=dict(positions="int | tensor"),
)
