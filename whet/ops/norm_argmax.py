"""norm_argmax: the final rms_norm, the head and the likeliest token, without the logits. For greedy decoding."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, lay, nbytes
from whet.ops._gemv import BY_BITS, Rows, check_product, few, held, multiply, normed, product, row_of, scales, storage
from whet.ops._pdl import launch_dependents, pdl_options, wait
from whet.ops._product import product_op
from whet.ops._weights import dense, quant_of, random_weight
from whet.ops.rms_norm import reference as rms_norm
from whet.values import families, relaid

ROWS, MORE, CHUNK = "16w4", "16w4", 1024  # rows of w a program for one row of x and for more; results looked at together


def scores(x, norm, w, scale=None, eps=1e-6):
    """The logits (M, N) that the reference chooses among: a choice is as good as its logit here, whichever of equals it is."""
    return F.linear(rms_norm(x, norm, eps), dense(w, scale, x.dtype)).to(torch.promote_types(x.dtype, torch.float32))


def reference(x, norm, w, scale=None, eps=1e-6):
    """logits = rms_norm(x, norm, eps) @ w.T.  Returns the index of each row's largest (the first of equals) and its value."""
    value, token = scores(x, norm, w, scale, eps).max(-1)
    return token, value


def inputs(dtype, device, M, K, N, quant=None, layout="contiguous"):
    """Each row of x points along one row of w, a different one for each: the largest logit stands clear of rounding."""
    w, scale = random_weight(N, K, quant, dtype, device)
    likely = (torch.arange(M, device=device) * 7919 + N // 3) % N
    x = (F.normalize(dense(w, scale, torch.float32)[likely], dim=-1) + torch.randn(M, K, device=device) * 0.2 * K**-0.5) * 8
    x, norm = lay(x.to(dtype), layout), (torch.rand(K, device=device) * 0.1 + 1).to(dtype)
    return dict(x=x, norm=norm, w=w, scale=scale, eps=1e-6)


def exact_ties(args):
    """Hostile values: logits that are whole numbers, most of them 16 times, exact in any order and dtype."""
    x, w, scale = args["x"], args["w"], args["scale"]
    if x.shape[1] > 2048:
        return None
    if w.dtype == torch.uint8:  # halves of a byte, 8 above their values: 7 and 9 are -1 and 1
        signs = (7 + 2 * (w & 1)) | (7 + 2 * (w >> 4 & 1)) << 4
    else:
        signs = torch.where(w.float() >= 0, 1.0, -1.0).to(w.dtype)
    raw = signs.view(torch.uint8) if w.element_size() == 1 else signs
    row = torch.arange(len(raw), device=raw.device)
    raw.copy_(raw[row & ~0b11101])  # rows that stand 1, 4, 8 or 16 apart
    ones = None if scale is None else torch.ones_like(scale)
    x = relaid(x, torch.where(x >= 0, 1.0, -1.0))
    return args | dict(x=x, norm=torch.ones_like(args["norm"]), w=signs, scale=ones, eps=0.0)


def below_zero(args):
    """Hostile values: all logits negative."""
    w = args["w"]
    if w.dtype == torch.uint8:  # halves of a byte, 8 above their values
        low, high = ((8 - (half.int() - 8).abs()) for half in (w & 15, w >> 4))
        negative = (low | high << 4).to(torch.uint8)
    else:
        negative = (-w.float().abs()).to(w.dtype)
    return args | dict(x=relaid(args["x"], args["x"].float().abs()), w=negative)


def nan_among_logits(args):
    """Hostile values: one logit of every row is NaN, and must be seen."""
    name = "w" if args["scale"] is None else "scale"
    new = args[name].clone()
    new[len(new) // 2] = float("nan")
    return args | {name: new}


def check(x, norm, w, scale=None, eps=1e-6):
    return check_product(x, w, scale, norm=norm) or (None if w.shape[0] else "w must have a row to choose, got none")


def cost(x, norm, w, scale=None, eps=1e-6):
    M, N = x.shape[0], w.shape[0]
    return Cost(bytes=nbytes(x, norm, w, scale) + M * 12, flops=2 * M * N * x.shape[1] + 5 * x.numel() + M * N)


@triton.jit
def _better(value, token, other_value, other):
    """The larger value, the first of equals; NaN beats all, so that it is seen."""
    nan, other_nan = value != value, other_value != other_value
    take = (~nan & (other_nan | (other_value > value))) | ((other < token) & ((other_value == value) | (nan & other_nan)))
    return tl.where(take, other_value, value), tl.where(take, other, token)


@triton.jit
def _head_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr,  # inputs
    value_ptr, token_ptr,  # outputs, (M, programs)
    stride_xm, stride_wn, stride_sn,
    N, eps,
    M: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, WARPS: tl.constexpr, TURNS: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """The largest logit among a few rows of w, and its row.  One program.

    Fuses   the norm, the product and the choice: no logit is stored.
    Moves   w and its scales in, once for all rows of x; one value and one index out for each row of x.
    Rounds  nothing: x, w, sums and logits in fp32, the norm's factor taken out of the product.
    """
    launch_dependents(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n = pid.to(tl.int64) * (WARPS * TURNS) + tl.arange(0, WARPS)
    w = held(w_ptr, n, N, stride_wn, KS, TURNS)
    scale = scales(scale_ptr, n, N, stride_sn, KS, TURNS, QUANT, GROUP)
    ROUGH: tl.constexpr = BY_BITS and x_ptr.dtype.element_ty != tl.float32
    wait(PDL)

    for m in tl.static_range(M):
        x, squares = normed(row_of(x_ptr + m * stride_xm, n, KS, QUANT), row_of(norm_ptr, n, KS, QUANT))
        rstd = 1.0 / tl.sqrt_rn(squares / K + eps)
        value, token = product(w, scale, x, 0, KS, QUANT, GROUP, ROUGH) * rstd, n
        value = tl.where(n < N, value, float("-inf"))
        for turn in tl.static_range(1, TURNS):
            row = n + turn * WARPS
            logit = tl.where(row < N, product(w, scale, x, turn, KS, QUANT, GROUP, ROUGH) * rstd, float("-inf"))
            value, token = _better(value, token, logit, row)
        best, at = tl.reduce((value, token), 0, _better)
        tl.store(value_ptr + m * programs + pid, best)
        tl.store(token_ptr + m * programs + pid, at)


@triton.jit
def _choose_kernel(
    value_ptr, token_ptr,  # inputs, (M, P); without tokens the place in the row is the token
    best_ptr, at_ptr,  # outputs, (M, pieces)
    P, PER,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The largest of PER of a row's P values and its token.  One program, one piece of one row.

    Moves   a value and a token for each of PER in, one of each out.
    Rounds  nothing.
    """
    launch_dependents(PDL)
    m, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 2**62, tl.int64)
    wait(PDL)
    for i in range(piece * PER, tl.minimum((piece + 1) * PER, P), BLOCK):
        inside = i + p < tl.minimum((piece + 1) * PER, P)
        v = tl.load(value_ptr + m * P + i + p, mask=inside, other=float("-inf")).to(tl.float32)
        t = (i + p).to(tl.int64)
        if token_ptr is not None:
            t = tl.load(token_ptr + m * P + i + p, mask=inside, other=2**62)
        value, token = _better(value, token, v, tl.where(inside, t, 2**62))
    best, at = tl.reduce((value, token), 0, _better)
    tl.store(best_ptr + m * tl.num_programs(1) + piece, best)
    tl.store(at_ptr + m * tl.num_programs(1) + piece, at)


def chosen(value: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of the largest value of each row, and that value; long rows in pieces first."""
    M, P = value.shape
    PER = CHUNK if P > 8 * CHUNK else P
    pieces = triton.cdiv(P, PER)
    best = torch.empty(M, pieces, dtype=torch.float32, device=value.device)
    at = torch.empty(M, pieces, dtype=torch.int64, device=value.device)
    BLOCK = min(CHUNK, triton.next_power_of_2(PER))
    launcher(_choose_kernel)[(M, pieces)](value, token, best, at, P, PER, BLOCK=BLOCK, num_warps=4, **pdl_options())
    return (at[:, 0], best[:, 0]) if pieces == 1 else chosen(best, at)


def launch(x, norm, w, scale, eps, tile):
    M, N = x.shape[0], w.shape[0]
    if not M:
        return torch.empty(0, dtype=torch.int64, device=x.device), torch.empty(0, dtype=torch.float32, device=x.device)
    if few() < M:
        return chosen(multiply(x, norm, w, scale, None, None, eps, out=torch.float32), None)
    cut = Rows.parse(tile or ("32w4" if M == 1 and quant_of(w) == "int4" else ROWS if M == 1 else MORE))
    P = triton.cdiv(N, cut.BLOCK_N)
    value = torch.empty(M, P, dtype=torch.float32, device=x.device)
    token = torch.empty(M, P, dtype=torch.int64, device=x.device)
    launcher(_head_kernel)[(P,)](
        x, norm, w, scale, value, token, x.stride(0), w.stride(0), scale.stride(0) if scale is not None else 0, N, eps,
        M=M, K=x.shape[1], WARPS=cut.num_warps, TURNS=cut.BLOCK_N // cut.num_warps, num_warps=cut.num_warps,
        **storage(w, scale), **pdl_options(),
    )
    return chosen(value, token)


def fake(x, norm, w, scale, eps, tile):
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.float32)


def run_torch(x, norm, w, scale=None, eps=1e-6):
    logits = F.linear(F.rms_norm(x, norm.shape, norm, eps), dense(w, scale, x.dtype))
    value, token = logits.max(-1)
    return token, value.to(torch.promote_types(x.dtype, torch.float32))


OP = product_op(
    "norm_argmax", reference, run_torch, launch, fake, "(Tensor, Tensor)",
    inputs=inputs,
    check=check,
    cases=(
        dict(M=1, K=128, N=96), dict(M=1, K=64, N=150), dict(M=3, K=300, N=37, layout="sliced"), dict(M=0, K=64, N=8),
        dict(M=1, K=192, N=50, quant="int4"), dict(M=2, K=64, N=45, quant="int8"), dict(M=1, K=128, N=24, quant="fp8"),
        dict(M=9, K=100, N=13), dict(M=17, K=72, N=20),
    ),
    shapes={f"qwen3-0.6b head {M}": dict(M=M, K=1024, N=151936) for M in (1, 8, 64)},
    cost=cost,
    tiny=dict(M=16, N=16),
    hostile=families(
        ("x",), ("norm",), options={"eps 0.01": dict(eps=1e-2)},
        exact_ties=exact_ties, logits_below_zero=below_zero, a_NaN_among_the_logits=nan_among_logits,
    ),
    coarse=("output 1",),
    scores=scores,
)
