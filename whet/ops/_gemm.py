"""What the decode ops share where there are many rows of x: the product on tensor cores, weights widened as they come."""

# Tuples that grow in jitted loops:
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.ops._pdl import launch_dependents, pdl_options, wait
from whet.ops.attention.common import dot_add

BY_BITS = tl.constexpr(not triton.knobs.runtime.interpret and not torch.version.hip)


@triton.jit
def widened(w, s_ptr, n, g, stride_sn, dtype: tl.constexpr, QUANT: tl.constexpr):
    """A tile of stored weights in the dtype of the product; int8 and fp8 are exact and scaled after it."""
    wide = w.to(tl.float32)
    if QUANT == "int4":
        wide = (wide - 8.0) * tl.load(s_ptr + n[:, None] * stride_sn + g).to(tl.float32)
    return wide.to(dtype)


@triton.jit
def ask(w_ptr, n, N, stride_wn, k, KS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr):
    """Have PART columns of rows n of w, from column k on, brought into L2."""
    if PDL:
        size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = triton.next_power_of_2((PART * size + 127) // 128)
        line = tl.minimum(k + tl.arange(0, LINES) * (128 // size), KS - 1)[None, :]
        at = w_ptr + tl.minimum(n, N - 1)[:, None] * stride_wn + line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.uint64, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def _many_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, res_ptr,  # inputs; scale, bias and res may be absent
    y_ptr,  # output
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    M, N,
    KS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, ASK: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):
    """y = x @ w.T [+ bias] [+ res], or with PAIRED silu(that) * the same of rows N onward, on tensor cores.

    Fuses   what follows the product; with PARTS > 1 nothing: a program sums one part of K, in fp32, and y holds the parts.
    Moves   w and its scales in, once for BLOCK_M rows of x; x once a program; y, res.
    Rounds  int4 times its scale to the storage dtype, as operand; sums in fp32; y once.
    """
    launch_dependents(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    PART: tl.constexpr = (KS + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * PART
    if ASK:
        ask(w_ptr, n, N, stride_wn, first, KS, PART, PDL)
        if PAIRED:
            ask(w_ptr, N + n, 2 * N, stride_wn, first, KS, PART, PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait(PDL)

    for i in range(first, tl.minimum(first + PART, KS), BLOCK_K):
        k = i + tl.arange(0, BLOCK_K)
        at = n[:, None] * stride_wn + k[None, :]
        inside = (n < N)[:, None] & (k < KS)[None, :]
        stored = tl.load(w_ptr + at, mask=inside, other=0.0)
        up = (N + n)[:, None] * stride_wn + k[None, :]
        stored_up = tl.load(w_ptr + up, mask=inside, other=0.0) if PAIRED else stored
        for half in tl.static_range(2 if QUANT == "int4" else 1):
            g = (half * KS + i) // GROUP
            in_x = (m < M)[:, None] & (k < KS)[None, :]
            x = tl.load(x_ptr + m[:, None] * stride_xm + half * KS + k[None, :], mask=in_x, other=0.0)
            w, w_up = stored, stored_up
            if QUANT == "int4":
                w, w_up = (stored >> (4 * half)) & 15, (stored_up >> (4 * half)) & 15
            wide = widened(w, scale_ptr, tl.minimum(n, N - 1), g, stride_sn, dtype, QUANT)
            acc = dot_add(acc, x, tl.trans(wide))
            if PAIRED:
                wide_up = widened(w_up, scale_ptr, N + tl.minimum(n, N - 1), g, stride_sn, dtype, QUANT)
                acc_up = dot_add(acc_up, x, tl.trans(wide_up))

    if QUANT == "int8" or QUANT == "fp8":
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
        if PAIRED:
            acc_up *= tl.load(scale_ptr + N + n, mask=n < N, other=0.0)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if PAIRED:
        acc = acc * tl.sigmoid(acc) * acc_up
    if PARTS > 1:
        y_ptr += tl.program_id(2) * M.to(tl.int64) * N
    else:
        acc = finished(acc, bias_ptr, res_ptr, stride_rm, m, n, inside)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], acc, mask=inside)


@triton.jit
def finished(acc, bias_ptr, res_ptr, stride_rm, m, n, inside):
    """acc [+ bias] [+ res]"""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n[None, :] + m[:, None] * 0, mask=inside, other=0.0).to(tl.float32)
    if res_ptr is not None:
        acc += tl.load(res_ptr + m[:, None] * stride_rm + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _sum_kernel(
    part_ptr, bias_ptr, res_ptr,  # inputs, part (PARTS, M, N); bias and res may be absent
    y_ptr,  # output
    stride_rm, stride_ym,
    M, N,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    """y = the parts' sum [+ bias] [+ res].  One program, a row or a piece of it.

    Moves   PARTS sums in fp32, bias and res in, y out.
    Rounds  once, at the store; the parts are summed in order.
    """
    launch_dependents(PDL)
    m = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    wait(PDL)
    acc = tl.zeros((1, BLOCK_N), tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(part_ptr + (part * M.to(tl.int64) + m[:, None]) * N + n[None, :], mask=inside, other=0.0)
    acc = finished(acc, bias_ptr, res_ptr, stride_rm, m, n, inside)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :], acc, mask=inside)


@triton.jit
def from_int8(w, dtype: tl.constexpr):
    """int8 in bf16, exactly: 128 + the low bits, less 128 or 256 by the sign bit, which is the exponent's lowest."""
    if BY_BITS and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, a, b, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 p, $2, 0, 0x4140;
            prmt.b32 q, $2, 0, 0x4342;
            lop3.b32 a, p, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, p, 0x00800080, 0xC300C300, 0xEA;
            fma.rn.bf16x2 $0, a, one, b;
            lop3.b32 a, q, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, q, 0x00800080, 0xC300C300, 0xEA;
            fma.rn.bf16x2 $1, a, one, b;
            }
            """, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4,
        )
    else:
        return w.to(tl.float32).to(dtype)


@triton.jit
def from_int4(w, dtype: tl.constexpr):
    """Low and high halves of bytes, less 8, in bf16: 128 + four bits, less 136."""
    if BY_BITS and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, a, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            prmt.b32 p, $4, 0, 0x4140;
            prmt.b32 q, $4, 0, 0x4342;
            lop3.b32 a, p, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, less;
            lop3.b32 a, q, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, a, one, less;
            shr.u32 p, p, 4;
            shr.u32 q, q, 4;
            lop3.b32 a, p, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, a, one, less;
            lop3.b32 a, q, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, a, one, less;
            }
            """, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )
    else:
        return ((w & 15).to(tl.float32) - 8.0).to(dtype), ((w >> 4).to(tl.float32) - 8.0).to(dtype)


@triton.jit
def strips(at, n, N, k, KS: tl.constexpr, PIECE: tl.constexpr, HALVES: tl.constexpr):
    """Rows n in pieces of PIECE columns, each (WARPS, rows, columns to a warp); those of a second half follow."""
    tiles = ()
    for half in tl.static_range(HALVES):
        for i in tl.static_range((KS + PIECE - 1) // PIECE):
            if KS == KS // PIECE * PIECE:
                tiles = tiles + (tl.load(at + half * KS + i * PIECE + k, mask=n < N, other=0.0),)
            else:
                there = (n < N) & (i * PIECE + k < KS)
                tiles = tiles + (tl.load(at + half * KS + i * PIECE + k, mask=there, other=0.0),)
    return tiles


@triton.jit
def strip_scales(
    s_ptr, n, N, stride_sn, KS: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr,
):
    """int4: for each piece the scales of a warp's columns, (WARPS, rows, 1), low halves and high."""
    found = ()
    if QUANT == "int4":
        for i in tl.static_range((KS + WARPS * WIDE - 1) // (WARPS * WIDE)):
            g = tl.minimum((i * WARPS + tl.arange(0, WARPS)) * WIDE // GROUP, KS // GROUP - 1)[:, None, None]
            at = s_ptr + tl.minimum(n, N - 1) * stride_sn + g
            found = found + (tl.load(at).to(tl.float32), tl.load(at + KS // GROUP).to(tl.float32))
    return found


@triton.jit
def added(acc, w, scale, x, i, QUANT: tl.constexpr):
    """acc plus piece i of w times x."""
    dtype: tl.constexpr = x[0].dtype
    if QUANT == "int4":
        low, high = from_int4(w[i], dtype)
        acc += dot_add(tl.zeros(acc.shape, tl.float32), low, x[i]) * scale[2 * i]
        return acc + dot_add(tl.zeros(acc.shape, tl.float32), high, x[len(w) + i]) * scale[2 * i + 1]
    elif QUANT == "int8":
        return dot_add(acc, from_int8(w[i], dtype), x[i])
    else:
        return dot_add(acc, w[i].to(dtype), x[i])


@triton.jit
def _some_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, res_ptr,  # inputs; norm, scale, bias and res may be absent
    y_ptr,  # output
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    M, N, eps,
    K: tl.constexpr, KS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):
    """y = [norm of x] @ w.T [+ bias] [+ res], or with PAIRED silu(that) * the same of rows N onward, of 8 or 16 rows of x.

    Fuses   the norm, its factor taken out of the product, and what follows. With PDL the weights are on their way before x is
            there. Each warp sums its own columns on tensor cores, with w as the tall side: no row of the tile is empty.
    Moves   w and its scales in, once; x once a program; y, res.
    Rounds  x times norm to the storage dtype, as operand; sums in fp32, the warps' in order; y once.
    """
    launch_dependents(PDL)
    PIECE: tl.constexpr = WARPS * WIDE
    HALVES: tl.constexpr = 2 if QUANT == "int4" else 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n, m = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    tall, flat = n[None, :, None], m[None, :, None]
    k = tl.arange(0, WARPS)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    w = strips(w_ptr + tall * stride_wn, tall, N, k, KS, PIECE, 1)
    scale = strip_scales(scale_ptr, tall, N, stride_sn, KS, WARPS, WIDE, QUANT, GROUP)
    if PAIRED:
        up = strips(w_ptr + (N + tall) * stride_wn, tall, N, k, KS, PIECE, 1)
        up_scale = strip_scales(scale_ptr, N + tall, 2 * N, stride_sn, KS, WARPS, WIDE, QUANT, GROUP)
    if norm_ptr is not None:
        norm = strips(norm_ptr, k * 0, 1, k, KS, PIECE, HALVES)
    wait(PDL)

    squares, x = tl.zeros((WARPS, BLOCK_M), tl.float32), ()
    rows = strips(x_ptr + flat * stride_xm, flat, M, k, KS, PIECE, HALVES)
    for i in tl.static_range(len(rows)):
        if norm_ptr is not None:
            u = rows[i].to(tl.float32)
            squares += tl.sum(u * u, axis=2)
            x = x + (tl.permute((u * norm[i].to(tl.float32)).to(dtype), (0, 2, 1)),)
        else:
            x = x + (tl.permute(rows[i], (0, 2, 1)),)
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    for i in tl.static_range(len(w)):
        acc = added(acc, w, scale, x, i, QUANT)
        if PAIRED:
            acc_up = added(acc_up, up, up_scale, x, i, QUANT)

    y, y_up, n, m = tl.sum(acc, axis=0), tl.sum(acc_up, axis=0), n[:, None], m[None, :]
    if norm_ptr is not None:
        rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / K + eps)[None, :]
        y, y_up = y * rstd, y_up * rstd
    if QUANT == "int8" or QUANT == "fp8":
        y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
        if PAIRED:
            y_up *= tl.load(scale_ptr + N + n, mask=n < N, other=0.0)
    if PAIRED:
        y = y * tl.sigmoid(y) * y_up
    inside = (n < N) & (m < M)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if res_ptr is not None:
        y += tl.load(res_ptr + m * stride_rm + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * stride_ym + n, y, mask=inside)


SOME = 16  # rows of x at most that are taken by programs which hold their rows of w
WIDEST = 4096  # columns that such a program holds at most, of gate and up together: twice as many need 278,528 bytes on sm_90


@dataclass(frozen=True)
class GemmCut:
    """Rows of x and of w and columns that a program takes at a time, stages, parts of K, whether w is asked for early."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    stages: int
    PARTS: int = 1
    ASK: bool = False


def modern() -> bool:
    """Whether the GPU has the memory and the instructions that the wider cuts were chosen for."""
    capability = machine.this_machine().capability
    return bool(capability and capability >= (9, 0))


def cut(M: int, N: int, paired: bool, dtype: torch.dtype) -> GemmCut:
    """Narrow enough that every SM has rows of w, or K in parts; less at once where memory is small.

    64 rows of x even for few: narrower tiles go through slower tensor instructions.
    """
    if dtype == torch.float32 or not modern():
        return GemmCut(64, 16, 64, 2)
    if N < 2048:
        in_parts = SOME < M <= 64 and not paired
        return GemmCut(64, 32, 128, 4, PARTS=4, ASK=True) if in_parts else GemmCut(64, 16, 256, 4 if paired else 5)
    return GemmCut(64, 32, 128, 4, ASK=SOME < M <= 64) if N < 2**16 else GemmCut(64, 64, 64, 4)


def some(x, norm, w, scale, bias, res, y, strides, eps, how) -> torch.Tensor:
    """Launch the product of some rows of x."""
    (M, N), int4 = y.shape, how["QUANT"] == "int4"
    BLOCK_N, WARPS, WIDE = 16, 4, min(128, how["GROUP"]) if int4 else 256
    launcher(_some_kernel)[(triton.cdiv(N, BLOCK_N),)](
        x, norm, w, scale, bias, res, y, *strides, M, N, eps, K=x.shape[1], BLOCK_M=8 if M <= 8 else 16,
        BLOCK_N=BLOCK_N, WARPS=WARPS, WIDE=WIDE, num_warps=WARPS, **how,
    )
    return y


def many(x, norm, w, scale, bias, res, y, strides, eps, how) -> torch.Tensor:
    """Launch the product of many rows of x, normed first where it is to be."""
    (M, N), K = y.shape, x.shape[1]
    if M <= SOME and modern() and x.dtype != torch.float32 and K * (1 + how["PAIRED"]) <= WIDEST and N < 2**16:
        return some(x, norm, w, scale, bias, res, y, strides, eps, how)
    if norm is not None:
        x = normed(x, norm, eps)
        strides = (x.stride(0), *strides[1:])
    c = cut(M, N, how["PAIRED"], x.dtype)
    BLOCK_K = min(c.BLOCK_K, how["GROUP"]) if how["QUANT"] == "int4" else c.BLOCK_K
    sums = y if c.PARTS == 1 else torch.empty(c.PARTS, M, N, dtype=torch.float32, device=y.device)
    launcher(_many_kernel)[(triton.cdiv(N, c.BLOCK_N), triton.cdiv(M, c.BLOCK_M), c.PARTS)](
        x, w, scale, bias, res, sums, *strides, M, N, BLOCK_M=c.BLOCK_M, BLOCK_N=c.BLOCK_N, BLOCK_K=BLOCK_K,
        PARTS=c.PARTS, ASK=c.ASK, num_warps=4, num_stages=c.stages, **how,
    )
    if c.PARTS > 1:
        launcher(_sum_kernel)[(triton.cdiv(N, 512), M)](
            sums, bias, res, y, *strides[3:], M, N, PARTS=c.PARTS, BLOCK_N=512, num_warps=4, **pdl_options(),
        )
    return y


@triton.jit
def _normed_kernel(
    x_ptr, norm_ptr,  # inputs
    y_ptr,  # output
    stride_xm,
    K, eps,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """y = x * rsqrt(mean(x^2) + eps) * norm.  One program, one row; rms_norm as a decode kernel, with PDL.

    Moves   x and norm in, y out.
    Rounds  y once, at the store; fp32 inside.
    """
    launch_dependents(PDL)
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + m * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x) / K + eps)
    tl.store(y_ptr + m * K + k, x * rstd * norm, mask=k < K)


def normed(x, norm, eps) -> torch.Tensor:
    M, K = x.shape
    y = torch.empty(M, K, dtype=x.dtype, device=x.device)
    launcher(_normed_kernel)[(M,)](
        x, norm, y, x.stride(0), K, eps, BLOCK_K=triton.next_power_of_2(K), num_warps=4, **pdl_options()
    )
    return y
