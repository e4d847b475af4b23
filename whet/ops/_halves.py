"""float32 matrices as pairs of float16, and products of them on tensor cores that are as near as float32's own.

A value is scaled by a power of two and split: hi is what float16 holds of it, lo what float16 holds of the rest, 22 bits in
all. Three products, hi * hi, hi * lo and lo * hi, leave out lo * lo alone, a share of 2^-24 at most. Tensor cores drop the
bits that an addition shifts out, so a sum of a few dozen products is all that they add up; these sums are added in float32.

A scale must not vary along what a product sums over. So a split has one scale for each row, or for each column, and whoever
sums along a scaled axis gives the other operand that axis's scales as factors: powers of two, which round nothing.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from whet import machine
from whet.launch import launcher
from whet.ops._rows import cdiv, power_of_two
from whet.ops.attention.common import has_descriptors

TOP = tl.constexpr(2.0**14)  # the largest value of a row lies from here to twice that: below float16's largest, 65504
BY_TOP_SQUARED = tl.constexpr(2.0**-28)
SMALLEST = tl.constexpr(2.0**-111)  # scales below it have no inverse: such rows keep fewer of float16's powers of two unused
EXPONENT = tl.constexpr(0x7F800000)  # these bits alone are the power of two at or below a positive float32
ALIGN = 8  # halves in the 16 bytes that a descriptor wants each row to be a multiple of
BLOCK_M, BLOCK_N, WARPS = 4, 512, 4  # of a splitting program: 16 values a thread
GROUP = 8  # rows of tiles that programs walk together, so that they meet in L2


class Tile(NamedTuple):
    """Rows and columns of a result, what is summed by tensor cores alone, warps, stages: "128x128x64w8s3".

    "g128x128x64w8s3" is the kernel in Gluon, for Hopper alone: its tiles have 128 rows and two warpgroups.
    """

    M: int
    N: int
    K: int
    warps: int
    stages: int
    gluon: bool = False

    @classmethod
    def read(cls, text: str) -> "Tile":
        found = re.fullmatch(r"(g?)(\d+)x(\d+)x(\d+)w(\d+)s(\d+)", text)
        if not found:
            raise ValueError(f"linear: a tile is written like 128x128x64w8s3 (rows, columns, depth, warps, stages), got {text!r}")
        return cls(*(int(n) for n in found.groups()[1:]), gluon=bool(found[1]))


TILES = ("128x128x64w8s3", "128x64x64w4s3", "64x64x64w4s3")  # the largest first
HOPPER = ("g128x128x64w8s3", "g128x64x64w8s4", "64x64x64w4s3")


@dataclass(frozen=True)
class Halves:
    """A matrix (M, N) as hi and lo, (2, M, N rounded up to whole 16 bytes), and the scale of each row, or of each column."""

    values: torch.Tensor
    scale: torch.Tensor | None


@triton.jit
def _power(peak):
    """The power of two at or below each peak, no smaller than can be divided by."""
    return tl.maximum((peak.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True), SMALLEST)


@triton.jit
def _magnitude(x):
    """|x|, and 0 for what is no number, so that it scales nothing."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _store_halves(hi_ptr, lo_ptr, at, scaled, inside):
    hi = scaled.to(tl.float16)
    rest = scaled - hi.to(tl.float32)
    tl.store(hi_ptr + at, hi, mask=inside)
    tl.store(lo_ptr + at, tl.where(rest == rest, rest, 0.0).to(tl.float16), mask=inside)  # inf - inf: hi says it all


@triton.jit
def _split_rows_kernel(
    x_ptr, factor_ptr, other_ptr,  # inputs: (M, N); (N,), of columns, and (M,), of rows, or None
    hi_ptr, lo_ptr, scale_ptr, peak_ptr,  # outputs: (M, P) twice; (M,); (N,) as int32, zeros before, or None
    stride_xm,
    M, N, P,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """scale[m] * 2^-14 * (hi + lo) = x * factor;  peak[n] = max over m of |x * other|.  One program, BLOCK_M rows.

    Fuses   the peaks of columns, which the same values' other split wants, into the pass that finds those of rows.
    Moves   x in twice, the second time from L2; hi, lo out = 2*4*M*N.
    Rounds  hi to float16, lo, the rest, to float16; scales are powers of two.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (m < M)[:, None]
    peak = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=in_rows & (n < N)[None, :], other=0.0)
        if peak_ptr is not None:
            other = tl.load(other_ptr + m, mask=m < M, other=0.0)
            largest = tl.max(_magnitude(x * other[:, None]), axis=0)
            tl.atomic_max(peak_ptr + n, largest.to(tl.int32, bitcast=True), mask=n < N, sem="relaxed")
        if factor_ptr is not None:
            x = x * tl.load(factor_ptr + n, mask=n < N, other=0.0)[None, :]
        peak = tl.maximum(peak, _magnitude(x))
    scale = _power(tl.max(peak, axis=1))
    tl.store(scale_ptr + m, scale, mask=m < M)
    into = TOP / scale
    for start in range(0, P, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=in_rows & (n < N)[None, :], other=0.0)
        if factor_ptr is not None:
            x = x * tl.load(factor_ptr + n, mask=n < N, other=0.0)[None, :]
        _store_halves(hi_ptr, lo_ptr, m[:, None] * P + n[None, :], x * into[:, None], in_rows & (n < P)[None, :])


@triton.jit
def _split_columns_kernel(
    x_ptr, factor_ptr, peak_ptr,  # inputs: (M, N); (M,), of rows; (N,), of columns, as int32
    hi_ptr, lo_ptr, scale_ptr,  # outputs: (M, P) twice; (N,)
    stride_xm,
    M, N, P,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """scale[n] * 2^-14 * (hi + lo) = x * factor.  One program, BLOCK_M rows and BLOCK_N columns.

    Fuses   the factors of rows into the split.
    Moves   x in; hi, lo out = 2*4*M*N.
    Rounds  as `_split_rows_kernel`.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = _power(tl.load(peak_ptr + n, mask=n < N, other=0).to(tl.float32, bitcast=True))
    tl.store(scale_ptr + n, scale, mask=(n < N) & (tl.program_id(0) == 0))
    x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
    into = TOP / scale
    x = x * tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
    _store_halves(hi_ptr, lo_ptr, m[:, None] * P + n[None, :], x * into[None, :], (m < M)[:, None] & (n < P)[None, :])


@triton.jit
def _block(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS of a matrix, zeros past its end, by a descriptor or by pointer, stride and sizes."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        return x.load([row, column])
    else:
        m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (m < x[2])[:, None] & (n < x[3])[None, :]
        return tl.load(x[0] + m[:, None].to(tl.int64) * x[1] + n[None, :], mask=inside, other=0.0)


@triton.jit
def _product_kernel(
    a_hi, a_lo, b_hi, b_lo,  # inputs: a (M, K), or (K, M) where A_ACROSS; b (N, K), or (K, N) where B_ACROSS
    row_ptr, column_ptr,  # inputs: scales (M,) and (N,), or None
    out_ptr,  # (M, N)
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    A_ACROSS: tl.constexpr, B_ACROSS: tl.constexpr,
):
    """out = row * column * 2^-28 * (a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi).  One program, a tile of the result.

    Fuses   three products, which share what they load, and the scales.
    Moves   a and b in, 4 bytes an element, as float32 would; out.
    Rounds  BLOCK_K products at a time by the tensor cores, the smallest first; their sums in fp32; once at the store.
    """
    pid = tl.program_id(0)
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * across) * GROUP
    together = tl.minimum(down - first, GROUP)
    m0 = (first + pid % (GROUP * across) % together) * BLOCK_M
    n0 = pid % (GROUP * across) // together * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if A_ACROSS:
            a, a_rest = _block(a_hi, k, m0, BLOCK_K, BLOCK_M).trans(), _block(a_lo, k, m0, BLOCK_K, BLOCK_M).trans()
        else:
            a, a_rest = _block(a_hi, m0, k, BLOCK_M, BLOCK_K), _block(a_lo, m0, k, BLOCK_M, BLOCK_K)
        if B_ACROSS:
            b, b_rest = _block(b_hi, k, n0, BLOCK_K, BLOCK_N), _block(b_lo, k, n0, BLOCK_K, BLOCK_N)
        else:
            b, b_rest = _block(b_hi, n0, k, BLOCK_N, BLOCK_K).trans(), _block(b_lo, n0, k, BLOCK_N, BLOCK_K).trans()
        part = tl.dot(a_rest, b)
        part = tl.dot(a, b_rest, part)
        part = tl.dot(a, b, part)
        acc += part
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    acc = acc * BY_TOP_SQUARED * tl.load(row_ptr + m, mask=m < M, other=0.0)[:, None]
    if column_ptr is not None:
        acc = acc * tl.load(column_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def padded(N: int) -> int:
    return -(-N // ALIGN) * ALIGN


def block_n(N: int) -> int:
    return min(BLOCK_N, power_of_two(max(N, 16)))


def split_rows(x, factor=None, other=None, peak=None) -> Halves:
    """x * factor, of columns, with a scale for each row; into peak, of zeros, goes each column's largest |x * other|.

    x has unit stride along its rows.
    """
    M, N = x.shape
    values = torch.empty(2, M, padded(N), dtype=torch.float16, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        hi, lo = values.unbind()
        launcher(_split_rows_kernel)[(cdiv(M, BLOCK_M),)](
            x, factor, other, hi, lo, scale, peak, x.stride(0), M, N, padded(N),
            BLOCK_M=BLOCK_M, BLOCK_N=block_n(padded(N)), num_warps=WARPS,
        )
    return Halves(values, scale)


def split_columns(x, factor, peak) -> Halves:
    """x * factor, of rows, with a scale for each column, by the columns' peaks."""
    M, N = x.shape
    values = torch.empty(2, M, padded(N), dtype=torch.float16, device=x.device)
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    if M:
        hi, lo = values.unbind()
        width = block_n(padded(N))
        launcher(_split_columns_kernel)[(cdiv(M, BLOCK_M), cdiv(padded(N), width))](
            x, factor, peak, hi, lo, scale, x.stride(0), M, N, padded(N), BLOCK_M=BLOCK_M, BLOCK_N=width, num_warps=WARPS,
        )
    return Halves(values, scale)


def operand(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix as the product's kernel takes it."""
    if has_descriptors():
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
    return x, x.stride(0), *x.shape


def tile_for(M: int, N: int) -> Tile:
    """The largest tile of which there is one for every multiprocessor; else the smallest."""
    tiles = [Tile.read(text) for text in TILES]
    many = (t for t in tiles if cdiv(M, t.M) * cdiv(N, t.N) >= machine.sm_count())
    return next(many, tiles[-1])


def product(a: Halves, b: Halves, M: int, N: int, K: int, tile: str = "", a_across=False, b_across=False) -> torch.Tensor:
    """(M, N) of a, (M, K), and b, (N, K), in float32; across: that one is (K, M), or (K, N), and scaled by its columns.

    b_across with b's scales in a already: b.scale is None.
    """
    out = torch.empty(M, N, dtype=torch.float32, device=a.values.device)
    if not (M and N):
        return out
    if not K:
        return out.zero_()
    t = Tile.read(tile) if tile else tile_for(M, N)
    if t.gluon:
        from whet.ops._halves_hopper import product_hopper

        product_hopper(
            out, a.values.unbind(), b.values.unbind(), a.scale, b.scale, K, t, GROUP, a_across, b_across, BY_TOP_SQUARED.value
        )
        return out
    a_block = (t.K, t.M) if a_across else (t.M, t.K)
    b_block = (t.K, t.N) if b_across else (t.N, t.K)
    launcher(_product_kernel)[(cdiv(M, t.M) * cdiv(N, t.N),)](
        *(operand(half, *a_block) for half in a.values.unbind()), *(operand(half, *b_block) for half in b.values.unbind()),
        a.scale, b.scale, out, M, N, K, BLOCK_M=t.M, BLOCK_N=t.N, BLOCK_K=t.K, GROUP=GROUP,
        A_ACROSS=a_across, B_ACROSS=b_across, num_warps=t.warps, num_stages=t.stages,
    )
    return out
