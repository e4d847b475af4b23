"""What the decode kernels share: rows of weights, loaded before anything is waited for, times a few rows of x.

A warp takes whole rows of w, in registers. With programmatic dependent launch (see `pdl`) a kernel starts while
the one before it still runs, loads its weights, and only then waits for x.
The rows of x are taken one by one, each in the same order of sums: a row's bits do not depend on how many there are.
"""
# Tuples that grow in jitted loops:
# mypy: disable-error-code="assignment"

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.op import autocast_of, floating, same_device
from whet.ops._gemm import many
from whet.ops._pdl import launch_dependents, pdl_options, wait
from whet.ops._rows import KERNEL_DTYPES
from whet.ops._weights import check_weight, columns, quant_of

WIDE = tl.constexpr(256)  # columns of a tile: eight a thread of one warp
BY_BITS = tl.constexpr(not triton.knobs.runtime.interpret and not torch.version.hip)
FEW, EXACT = 3, 8  # rows of x taken one by one: where that is faster than tensor cores, and at most
FP8 = (8, 9)  # the lowest compute capability that converts fp8
_batch_invariant = contextvars.ContextVar("whet_batch_invariant", default=False)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Within the block a product of up to 8 rows of x gives each the bits it would have alone: they are taken one by one."""
    before = _batch_invariant.set(True)
    try:
        yield
    finally:
        _batch_invariant.reset(before)


def few() -> int:
    """How many rows of x are taken one by one."""
    return EXACT if _batch_invariant.get() else FEW


@dataclass(frozen=True)
class Rows:
    """How the rows of w are cut: BLOCK_N a program, one at a time to each of its warps."""

    BLOCK_N: int
    num_warps: int

    @staticmethod
    def parse(text: str) -> "Rows":
        """'8w4'"""
        n, _, warps = text.partition("w")
        return Rows(int(n), int(warps))


def plan(w: torch.Tensor, tile: str | None, M: int) -> Rows:
    """By default, for one row of x: two rows of w to each of eight warps where w is tall, else a row to each of two."""
    if tile:
        return Rows.parse(tile)
    if M > 1:
        return Rows(4, 4)
    if quant_of(w) == "fp8":
        return Rows(8, 4) if w.shape[0] > 4096 else Rows(16, 4) if w.shape[0] == 4096 else Rows(4, 4)
    if quant_of(w) and w.shape[0] > 4096:
        return Rows(8, 4)
    return Rows(16, 8) if w.shape[0] >= 4096 else Rows(2, 2)


PRODUCT_LIMITS = (
    "dtypes other than fp32, fp16, bf16, all alike", "weights and rows that are not contiguous along K",
    "inputs that ask for gradients", "rows of more than 16384 columns", "products that autocast gives another dtype",
    f"fp8 weights on GPUs of compute capability below {FP8[0]}.{FP8[1]}",
)


def check_product(x, w, scale, bias=None, norm=None, res=None) -> str | None:
    """None, or why these do not go together: x (M, K), w (N, K), norm (K,), bias (N,), res (M, N)."""
    wide = dict(x=x, bias=bias, norm=norm, res=res)
    if reason := floating(**wide) or same_device(x=x, w=w, scale=scale, bias=bias, norm=norm, res=res):
        return reason
    if x.dim() != 2:
        return f"x must have two dimensions, got shape {tuple(x.shape)}"
    M, K = x.shape
    if not K:
        return "x must have columns, got none"
    if reason := check_weight(w, scale, K):
        return reason
    for name, t, shape in (("norm", norm, (K,)), ("bias", bias, w.shape[:1]), ("res", res, (M, w.shape[0]))):
        if t is not None and t.shape != shape:
            return f"{name} must have shape {tuple(shape)} to match x and w, got {tuple(t.shape)}"
    if bias is not None and bias.dtype != x.dtype and autocast_of(x) is None:
        return f"bias must have x's dtype {x.dtype} outside autocast, got {bias.dtype}"
    return None


def fp8_refused() -> str | None:
    """None, or why this GPU cannot widen fp8 weights."""
    have = machine.this_machine().capability
    return f"fp8 weights need compute capability {FP8[0]}.{FP8[1]}, got {have[0]}.{have[1]}" if have and have < FP8 else None


fp8_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a look at the machine cannot be traced


def product_refused(x, w, scale=None, **others) -> str | None:
    """None, or why the kernels cannot take these."""
    plain = {"x": x, **({} if quant_of(w) else {"w": w}), **{k: t for k, t in others.items() if t is not None}}
    if x.dtype not in KERNEL_DTYPES or any(t.dtype != x.dtype for t in plain.values()):
        got = ", ".join(str(t.dtype) for t in plain.values())
        return f"{', '.join(plain)} must all be float32, all float16 or all bfloat16, got {got}"
    if autocast_of(x) not in (None, x.dtype):
        return f"x must have the dtype of autocast, {autocast_of(x)}, or be used outside it, got {x.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*plain.values(), scale) if t is not None):
        return "is for inference and keeps no gradients: call it under torch.no_grad()"
    if quant_of(w) == "fp8" and (reason := fp8_refused()):
        return reason
    for name, t in {**plain, "w": w, "scale": scale}.items():
        if t is not None and t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"{name} must be contiguous along its last dimension, got strides {t.stride()}"
    return None if x.shape[1] <= 16384 else f"rows of at most 16384 columns fit in registers, got {x.shape[1]}"


def storage(w: torch.Tensor, scale: torch.Tensor | None) -> dict:
    """The constexprs that say how w is stored: KS columns as they lie in memory, int4 with GROUP columns a scale."""
    quant = quant_of(w) or ""
    return dict(KS=w.shape[1], QUANT=quant, GROUP=columns(w) // scale.shape[1] if quant == "int4" and scale is not None else 1)


@triton.jit
def held(w_ptr, n, N, stride_wn, KS: tl.constexpr, TURNS: tl.constexpr):
    """Rows n, n + WARPS, ... of w as stored: tiles of a row a warp and WIDE columns; past the last row, the last again.

    Eight columns a thread whatever the dtype, so that w and x lie alike and a sum stays within a warp.
    """
    tiles = ()
    for turn in tl.static_range(TURNS):
        at = w_ptr + tl.minimum(n + turn * n.shape[0], N - 1)[:, None] * stride_wn
        for i in tl.static_range((KS + WIDE - 1) // WIDE):
            k = tl.arange(0, WIDE)[None, :] + i * WIDE
            if KS == KS // WIDE * WIDE:
                tiles = tiles + (tl.load(at + k, eviction_policy="evict_first"),)
            else:
                tiles = tiles + (tl.load(at + k, mask=k < KS, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def scales(s_ptr, n, N, stride_sn, KS: tl.constexpr, TURNS: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr):
    """What belongs to those rows: nothing, a scale a row, or for int4 one for each thread's columns, low halves and high."""
    found = ()
    for turn in tl.static_range(TURNS):
        row = tl.minimum(n + turn * n.shape[0], N - 1)
        if QUANT == "int4":
            for i in tl.static_range((KS + WIDE - 1) // WIDE):
                g = tl.minimum((tl.arange(0, WIDE // 8) * 8 + i * WIDE) // GROUP, KS // GROUP - 1)[None, :]
                at = s_ptr + row[:, None] * stride_sn + g
                found = found + (tl.load(at).to(tl.float32), tl.load(at + KS // GROUP).to(tl.float32))
        elif QUANT != "":
            found = found + (tl.load(s_ptr + row).to(tl.float32),)
    return found


@triton.jit
def row_of(x_ptr, n, KS: tl.constexpr, QUANT: tl.constexpr):
    """One row of x, the same to every warp, in tiles of WIDE columns; those of int4's high halves follow those of the low."""
    tiles, at = (), x_ptr + (n * 0)[:, None]
    for half in tl.static_range(2 if QUANT == "int4" else 1):
        for i in tl.static_range((KS + WIDE - 1) // WIDE):
            k = tl.arange(0, WIDE)[None, :] + i * WIDE
            if KS == KS // WIDE * WIDE:
                tiles = tiles + (tl.load(at + half * KS + k),)
            else:
                tiles = tiles + (tl.load(at + half * KS + k, mask=k < KS, other=0.0),)
    return tiles


@triton.jit
def normed(x, norm):
    """x times the norm's weights in fp32, and the sum of x squared."""
    tiles, squares = (), tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(len(x)):
        u = x[i].to(tl.float32)
        squares += u * u
        tiles = tiles + (u * norm[i].to(tl.float32),)
    return tiles, tl.sum(squares, axis=1)


@triton.jit
def from_bytes(u, BIAS: tl.constexpr):
    """Unsigned bytes less BIAS in fp32: set into the bits of 2^23 + u. Converting an integer takes longer."""
    if BY_BITS:
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x4B000000, 0x7440;
            prmt.b32 $1, $4, 0x4B000000, 0x7441;
            prmt.b32 $2, $4, 0x4B000000, 0x7442;
            prmt.b32 $3, $4, 0x4B000000, 0x7443;
            """, "=r,=r,=r,=r,r", [u], dtype=tl.float32, is_pure=True, pack=4,
        ) - (8388608.0 + BIAS)
    else:
        return u.to(tl.float32) - BIAS


@triton.jit
def from_int4(w):
    """1024 + the low four bits of bytes, and 1024 + 16 times the high, in fp32: by way of the bits of fp16."""
    low, high = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v;
        and.b32 u, $4, 0x0F0F0F0F;
        and.b32 v, $4, 0xF0F0F0F0;
        prmt.b32 $0, u, 0x64646464, 0x4140;
        prmt.b32 $1, u, 0x64646464, 0x4342;
        prmt.b32 $2, v, 0x64646464, 0x4140;
        prmt.b32 $3, v, 0x64646464, 0x4342;
        }
        """, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def wide(w, QUANT: tl.constexpr):
    """Stored weights in fp32."""
    if QUANT == "int8":
        return from_bytes(w.to(tl.uint8, bitcast=True) ^ 128, 128.0)
    else:
        return w.to(tl.float32)


@triton.jit
def product(
    w, scale, x, TURN: tl.constexpr, KS: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, ROUGH: tl.constexpr = False,
):
    """A row of w for each warp times x: (WARPS,) in fp32. ROUGH: int4 from which 1024 is taken only after the sum, of eight."""
    TILES: tl.constexpr = (KS + WIDE - 1) // WIDE
    warps: tl.constexpr = w[0].shape[0]
    if QUANT == "int4" and ROUGH:
        sums = tl.zeros((warps, WIDE // 8), tl.float32)
        for i in tl.static_range(TILES):
            low, high = from_int4(w[TURN * TILES + i])
            x_low, x_high = x[i].to(tl.float32), x[TILES + i].to(tl.float32)
            lo = tl.sum(tl.reshape(low * x_low, (warps, WIDE // 8, 8)), axis=2)
            hi = tl.sum(tl.reshape(high * x_high, (warps, WIDE // 8, 8)), axis=2)
            of_lo = tl.sum(tl.reshape(x_low, (warps, WIDE // 8, 8)), axis=2)
            of_hi = tl.sum(tl.reshape(x_high, (warps, WIDE // 8, 8)), axis=2)
            sums += (lo - 1032.0 * of_lo) * scale[2 * (TURN * TILES + i)]
            sums += (hi - 1152.0 * of_hi) * (0.0625 * scale[2 * (TURN * TILES + i) + 1])
        y = tl.sum(sums, axis=1)
    elif QUANT == "int4":
        sums = tl.zeros((warps, WIDE // 8), tl.float32)
        for i in tl.static_range(TILES):
            stored = w[TURN * TILES + i]
            lo = tl.reshape(from_bytes(stored & 15, 8.0) * x[i], (warps, WIDE // 8, 8))
            hi = tl.reshape(from_bytes(stored >> 4, 8.0) * x[TILES + i], (warps, WIDE // 8, 8))
            sums += tl.sum(lo, axis=2) * scale[2 * (TURN * TILES + i)]
            sums += tl.sum(hi, axis=2) * scale[2 * (TURN * TILES + i) + 1]
        y = tl.sum(sums, axis=1)
    else:
        total = wide(w[TURN * TILES], QUANT) * x[0]
        for i in tl.static_range(1, TILES):
            total += wide(w[TURN * TILES + i], QUANT) * x[i]
        y = tl.sum(total, axis=1)
        if QUANT != "":
            y *= scale[TURN]
    return y


@triton.jit
def _few_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, res_ptr,  # inputs; norm, scale, bias and res may be absent
    y_ptr,  # output
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    N, eps,
    M: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, WARPS: tl.constexpr, TURNS: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):
    """y = [norm of x] @ w.T [+ bias] [+ res], or with PAIRED silu(that) * the same of rows N onward.  One program, a few rows.

    Fuses   the norm, which every warp does again (x is small), the product, and what follows; nothing waits for another warp.
    Moves   w and its scales in, once; x, norm, y, res. With PDL the weights are on their way before x is there.
    Rounds  y once, at the store; x, w and all sums in fp32, the norm's factor taken out of the product.
    """
    launch_dependents(PDL)
    n = tl.program_id(0).to(tl.int64) * (WARPS * TURNS) + tl.arange(0, WARPS)
    w = held(w_ptr, n, N, stride_wn, KS, TURNS)
    scale = scales(scale_ptr, n, N, stride_sn, KS, TURNS, QUANT, GROUP)
    ROUGH: tl.constexpr = BY_BITS and x_ptr.dtype.element_ty != tl.float32
    if PAIRED:
        up = held(w_ptr, N + n, 2 * N, stride_wn, KS, TURNS)
        up_scale = scales(scale_ptr, N + n, 2 * N, stride_sn, KS, TURNS, QUANT, GROUP)
    if norm_ptr is not None:
        norm = row_of(norm_ptr, n, KS, QUANT)
    wait(PDL)

    for m in tl.static_range(M):
        x, rstd, added = row_of(x_ptr + m * stride_xm, n, KS, QUANT), 1.0, ()
        for turn in tl.static_range(TURNS):
            row, more = n + turn * WARPS, tl.zeros((WARPS,), tl.float32)
            if bias_ptr is not None:
                more += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
            if res_ptr is not None:
                more += tl.load(res_ptr + m * stride_rm + row, mask=row < N, other=0.0).to(tl.float32)
            added = added + (more,)
        if norm_ptr is not None:
            x, squares = normed(x, norm)
            rstd = 1.0 / tl.sqrt_rn(squares / K + eps)
        for turn in tl.static_range(TURNS):
            row = n + turn * WARPS
            y = product(w, scale, x, turn, KS, QUANT, GROUP, ROUGH) * rstd
            if PAIRED:
                y = y * tl.sigmoid(y) * (product(up, up_scale, x, turn, KS, QUANT, GROUP, ROUGH) * rstd)
            tl.store(y_ptr + m * stride_ym + row, y + added[turn], mask=row < N)


def multiply(x, norm, w, scale, bias, res, eps, paired=False, tile=None, out=None):
    """Launch the product of few rows of x or of many."""
    M, K = x.shape
    N = w.shape[0] // 2 if paired else w.shape[0]
    y = torch.empty(M, N, dtype=out or x.dtype, device=x.device)
    if not y.numel():
        return y
    strides = (x.stride(0), w.stride(0), *(0 if t is None else t.stride(0) for t in (scale, res)), N)
    how = storage(w, scale) | dict(PAIRED=paired) | pdl_options()
    if few() < M:
        return many(x, norm, w, scale, bias, res, y, strides, eps, how)
    cut = plan(w, tile, M)
    launcher(_few_kernel)[(triton.cdiv(N, cut.BLOCK_N),)](
        x, norm, w, scale, bias, res, y, *strides, N, eps,
        M=M, WARPS=cut.num_warps, TURNS=cut.BLOCK_N // cut.num_warps, num_warps=cut.num_warps, K=K, **how,
    )
    return y
