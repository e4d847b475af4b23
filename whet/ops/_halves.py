"""float32 matrices as pairs of float16, and products of them on tensor cores that are as accurate as float32.

A value is scaled by a power of two and split: hi is what float16 holds of it, lo what float16 holds of the rest, 22 bits in
all; of values below 2^-17 of the largest that has their scale, 2^-39 of that one is left out. Three products, hi * hi, hi * lo
and lo * hi, leave out lo * lo alone, a share of 2^-24 at most. Tensor cores drop the bits that an addition shifts out, so a sum
of a few dozen products is all that they add up; these sums are added in float32.

A scale must not vary along what a product sums over. So a split has one scale for each row, or for each column, and whoever
sums along a scaled axis gives the other operand that axis's scales as factors: powers of two, which round nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from whet import machine
from whet.launch import launcher
from whet.ops import _halves_hopper
from whet.ops._pairs import BY_TOPS, TOP, in_halves, magnitude, padded, power_below
from whet.ops._rows import MAX_N, cdiv, power_of_two, programs, unit_rows
from whet.ops.attention.common import has_descriptors

BLOCK_K = 64
ELEMENTS, BLOCK_M, BLOCK_N, WARPS = 2048, 4, 512, 4  # of a splitting program: 16 values a thread
PEAK_N, LOADS, PER_SM = 128, 4, 4  # columns of a program that looks for peaks, blocks of a turn, programs
CHUNK_BYTES = 64 << 20  # of an upstream gradient's halves: it is the largest of what a backward holds, and they as large
GROUP = 8  # rows of tiles that programs walk together, so that they meet in L2


class ProductTile(NamedTuple):
    """BLOCK_M rows and BLOCK_N columns of a result; BLOCK_K is what tensor cores alone sum. Gluon's are for Hopper alone."""

    M: int
    N: int
    warps: int
    stages: int
    gluon: bool = False
    together: int = 1  # programs to a multiprocessor
    cost: float = 1.0  # of as many as run together, for BLOCK_K: microseconds on an H200
    alone: float = 1.0  # of one, where there is no more than one for each multiprocessor


HOPPER = (
    ProductTile(128, 128, 8, 3, True, 1, 1.2, 1.2), ProductTile(128, 64, 8, 4, True, 1, 0.63, 0.63),
    ProductTile(64, 64, 4, 3, False, 2, 0.9, 0.5),
)
OTHERS = (ProductTile(128, 128, 8, 2), ProductTile(128, 64, 4, 2), ProductTile(64, 64, 4, 3))  # the largest first
AMD = ProductTile(64, 64, 4, 2)  # 64 KiB of shared memory hold no more


class Halves(NamedTuple):
    """A matrix (M, N) as hi and lo, (2, M, N rounded up to whole 16 bytes), and the scale of each row, or of each column."""

    values: torch.Tensor
    scale: torch.Tensor


@triton.jit
def _scaled(at, factor_ptr, n, inside, N):
    x = tl.load(at, mask=inside, other=0.0)
    if factor_ptr is not None:
        x = x * tl.load(factor_ptr + n, mask=n < N, other=0.0)[None, :]
    return x


@triton.jit
def _store_halves(hi_ptr, lo_ptr, at, scaled, inside):
    hi, lo = in_halves(scaled)
    tl.store(hi_ptr + at, hi, mask=inside)
    tl.store(lo_ptr + at, lo, mask=inside)


@triton.jit
def _split_rows_kernel(
    x_ptr, factor_ptr,  # inputs: (M, N); (N,), of columns, or None
    hi_ptr, lo_ptr, scale_ptr,  # outputs: (M, P) twice; (M,)
    stride_xm,
    M, N, P,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_WHOLE: tl.constexpr,
):
    """scale[m] * 2^-14 * (hi + lo) = x * factor.  One program, BLOCK_M rows, each a whole block or read twice.

    Fuses   the factors of columns into the split.
    Moves   x in, where no block holds a row twice, the second time from L2; hi, lo out = 2*4*M*N.
    Rounds  hi to float16, lo, the rest, to float16; scales are powers of two.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (m < M)[:, None]
    at = tl.arange(0, BLOCK_N)
    peak = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, BLOCK_N if IS_WHOLE else P, BLOCK_N):
        n = start + at
        x = _scaled(x_ptr + m[:, None] * stride_xm + n[None, :], factor_ptr, n, in_rows & (n < N)[None, :], N)
        peak = tl.maximum(peak, magnitude(x))
        if IS_WHOLE:
            scale = power_below(tl.max(peak, axis=1))
            tl.store(scale_ptr + m, scale, mask=m < M)
            into = TOP / scale
            _store_halves(hi_ptr, lo_ptr, m[:, None] * P + n[None, :], x * into[:, None], in_rows & (n < P)[None, :])
    if not IS_WHOLE:
        scale = power_below(tl.max(peak, axis=1))
        tl.store(scale_ptr + m, scale, mask=m < M)
        into = TOP / scale
        for start in range(0, P, BLOCK_N):
            n = start + at
            x = _scaled(x_ptr + m[:, None] * stride_xm + n[None, :], factor_ptr, n, in_rows & (n < N)[None, :], N)
            _store_halves(hi_ptr, lo_ptr, m[:, None] * P + n[None, :], x * into[:, None], in_rows & (n < P)[None, :])


@triton.jit
def _column_peaks_kernel(
    x_ptr, factor_ptr,  # inputs: (M, N); (M,), of rows
    peak_ptr,  # (N,) as int32, zeros before
    stride_xm,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr,
):
    """peak[n] = max over m of |x * factor|.  One program, BLOCK_N columns of a part of the rows, LOADS blocks a turn.

    Moves   x in = 4*M*N; an atomic maximum for each column of a part: positive floats are in order as integers.
    Rounds  nothing.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = (n < N)[None, :]
    peak = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(tl.program_id(1), tl.cdiv(M, BLOCK_M * LOADS), tl.num_programs(1)):
        for j in tl.static_range(LOADS):
            m = ((i * LOADS + j) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            x = tl.load(x_ptr + m[:, None] * stride_xm + n[None, :], mask=(m < M)[:, None] & in_row, other=0.0)
            peak = tl.maximum(peak, magnitude(x * tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]))
    tl.atomic_max(peak_ptr + n, tl.max(peak, axis=0).to(tl.int32, bitcast=True), mask=n < N, sem="relaxed")


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
    scale = power_below(tl.load(peak_ptr + n, mask=n < N, other=0).to(tl.float32, bitcast=True))
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
    stride_om,
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
    by_row, acc = tl.load(row_ptr + m, mask=m < M, other=0.0)[:, None], acc * BY_TOPS
    if column_ptr is None:
        acc = acc * by_row
    else:  # the smaller first: the larger alone may pass float32's range where both do not
        by_column = tl.load(column_ptr + n, mask=n < N, other=0.0)[None, :]
        acc = acc * tl.minimum(by_row, by_column) * tl.maximum(by_row, by_column)
    tl.store(out_ptr + m[:, None].to(tl.int64) * stride_om + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def split_rows(x: torch.Tensor, factor: torch.Tensor | None = None) -> Halves:
    """x * factor, of columns, with a scale for each row. x has unit stride along its rows."""
    M, N = x.shape
    P = padded(N)
    values = torch.empty(2, M, P, dtype=torch.float16, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        hi, lo = values.unbind()
        width = power_of_two(max(P, 16)) if P <= MAX_N else BLOCK_N
        height = min(16, max(1, ELEMENTS // width))
        launcher(_split_rows_kernel)[(cdiv(M, height),)](
            x, factor, hi, lo, scale, x.stride(0), M, N, P,
            BLOCK_M=height, BLOCK_N=width, IS_WHOLE=P <= MAX_N, num_warps=max(WARPS, WARPS * width // ELEMENTS),
        )
    return Halves(values, scale)


def split_columns(x: torch.Tensor, factor: torch.Tensor) -> Halves:
    """x * factor, of rows, with a scale for each column. x has unit stride along its rows."""
    M, N = x.shape
    P, width = padded(N), min(BLOCK_N, power_of_two(max(padded(N), 16)))
    values = torch.empty(2, M, P, dtype=torch.float16, device=x.device)
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    if M:
        hi, lo = values.unbind()
        peak = torch.zeros(N, dtype=torch.int32, device=x.device)
        height, across = ELEMENTS // PEAK_N, cdiv(N, PEAK_N)
        parts = max(1, min(cdiv(M, height * LOADS), programs(M, PER_SM) // across))
        launcher(_column_peaks_kernel)[(across, parts)](
            x, factor, peak, x.stride(0), M, N, BLOCK_M=height, BLOCK_N=PEAK_N, LOADS=LOADS, num_warps=WARPS,
        )
        launcher(_split_columns_kernel)[(cdiv(M, BLOCK_M), cdiv(P, width))](
            x, factor, peak, hi, lo, scale, x.stride(0), M, N, P, BLOCK_M=BLOCK_M, BLOCK_N=width, num_warps=WARPS,
        )
    return Halves(values, scale)


def operand(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix as the product's kernel takes it."""
    if has_descriptors():
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
    return x, x.stride(0), *x.shape


def tile_for(M: int, N: int) -> ProductTile:
    """On Hopper the tile by which all is done first; on other NVIDIA GPUs the largest with one for each multiprocessor."""
    sms, capability = machine.sm_count(), machine.this_machine().capability

    def count(t: ProductTile) -> int:
        return cdiv(M, t.M) * cdiv(N, t.N)

    def time(t: ProductTile) -> float:
        return t.alone if count(t) <= sms else t.cost * cdiv(count(t), sms * t.together)

    if capability is None:
        return AMD
    if capability[0] == 9:
        return min(HOPPER, key=time)
    return next((t for t in OTHERS if count(t) >= sms), OTHERS[-1])


def product(
    a: Halves, b: torch.Tensor, M: int, N: int, K: int, b_scale: torch.Tensor | None = None,
    a_across: bool = False, b_across: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, N) of a, (M, K), and the values of b, (N, K), in float32; across: that one is (K, M), or (K, N).

    a is scaled along M, b along N or, where b_scale is None, along K: then a has those scales as factors.
    out has unit stride along its rows.
    """
    if out is None:
        out = torch.empty(M, N, dtype=torch.float32, device=b.device)
    if not (M and N):
        return out
    if not K:
        return out.zero_()
    t, halves = tile_for(M, N), (*a.values.unbind(), *b.unbind())
    if t.gluon:
        _halves_hopper.product(out, halves, a.scale, b_scale, K, t, BLOCK_K, GROUP, a_across, b_across)
        return out
    a_block = (BLOCK_K, t.M) if a_across else (t.M, BLOCK_K)
    b_block = (BLOCK_K, t.N) if b_across else (t.N, BLOCK_K)
    launcher(_product_kernel)[(cdiv(M, t.M) * cdiv(N, t.N),)](
        *(operand(half, *block) for half, block in zip(halves, (a_block, a_block, b_block, b_block))),
        a.scale, b_scale, out, out.stride(0), M, N, K, BLOCK_M=t.M, BLOCK_N=t.N, BLOCK_K=BLOCK_K, GROUP=GROUP,
        A_ACROSS=a_across, B_ACROSS=b_across, num_warps=t.warps, num_stages=t.stages,
    )
    return out


Given = torch.Tensor | None


def multiply(x: torch.Tensor, w: torch.Tensor, out: Given = None, of_w: Halves | None = None) -> torch.Tensor:
    """x @ w.T of (M, K) and (N, K).  of_w: w's halves, where they are at hand."""
    (N, K), of_w = w.shape, of_w or split_rows(unit_rows(w))
    return product(split_rows(unit_rows(x)), of_w.values, len(x), N, K, of_w.scale, out=out)


def multiply_back(dy: torch.Tensor, w: torch.Tensor, out: Given = None, of_w: Halves | None = None) -> torch.Tensor:
    """dy @ w of (M, N) and (N, K): it sums over w's rows, whose scales go to dy as factors. Some rows of dy at a time."""
    (N, K), of_w = w.shape, of_w or split_rows(unit_rows(w))
    out = torch.empty(len(dy), K, dtype=torch.float32, device=dy.device) if out is None else out
    for cut in cuts(len(dy), N, K):
        some = unit_rows(dy[cut])
        product(split_rows(some, of_w.scale), of_w.values, len(some), K, N, b_across=True, out=out[cut])
    return out


def multiply_across(dy: torch.Tensor, x: torch.Tensor, out: Given = None) -> torch.Tensor:
    """dy.T @ x of (M, N) and (..., K): it sums over x's rows, whose scales are factors of dy. Some columns of dy at a time."""
    (M, N), of_x, K = dy.shape, split_rows(unit_rows(x)), x.shape[-1]
    out = torch.empty(N, K, dtype=torch.float32, device=dy.device) if out is None else out
    for cut in cuts(N, M, K):
        some = unit_rows(dy)[:, cut]  # its halves have no name, so that they are let go before the next part's are made
        product(split_columns(some, of_x.scale), of_x.values, some.shape[1], K, M, a_across=True, b_across=True, out=out[cut])
    return out


def cuts(size: int, length: int, across: int) -> list[slice]:
    """A dimension cut into parts, whole tiles each, of which the halves of one take no more than CHUNK_BYTES.

    A part's result, by `across`, has a tile for nearly each multiprocessor: a part is larger where it must be for that.
    """
    tile = HOPPER[0]
    least = tile.M * cdiv(machine.sm_count() * 9 // 10, cdiv(max(1, across), tile.N))
    most = max(tile.M, CHUNK_BYTES // (4 * max(1, length)))
    parts = max(1, min(cdiv(size, most), size // max(tile.M, least)))
    step = cdiv(cdiv(max(1, size), parts), tile.M) * tile.M
    return [slice(start, min(start + step, size)) for start in range(0, max(1, size), step)]


def bytes_of_chunk(size: int, length: int, across: int) -> int:
    """Of a dimension's parts, the halves of the largest."""
    return 4 * padded(length) * cuts(size, length, across)[0].stop


def bytes_of(M: int, N: int, K: int) -> int:
    """What `multiply` allocates beside its result: halves of both operands."""
    return 4 * padded(K) * (M + N)


def bytes_of_back(M: int, N: int, K: int) -> int:
    return 4 * padded(K) * N + bytes_of_chunk(M, N, K)


def bytes_of_across(M: int, N: int, K: int) -> int:
    return 4 * padded(K) * M + bytes_of_chunk(N, M, K)
