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
    per_sm: int = 1  # programs that a multiprocessor runs at once
    cost: float = 1.0  # microseconds on an H200 for BLOCK_K, per_sm of them at once
    cost_alone: float = 1.0  # the same of one that has its multiprocessor alone


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
    a_hi, a_lo, b_hi, b_lo,  # inputs: a (M, K), or (K, M) where A_TRANSPOSED; b (N, K), or (K, N) where B_TRANSPOSED
    row_ptr, column_ptr,  # inputs: scales (M,) and (N,), or None
    out_ptr,  # (M, N)
    stride_om,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):
    """out = row * column * 2^-28 * (a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi).  One program, a tile of the result.

    Fuses   three products, which share what they load, and the scales.
    Moves   a and b in, 4 bytes an element, as float32 would; out.
    Rounds  BLOCK_K products at a time by the tensor cores, the smallest first; their sums in fp32; once at the store.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    group_rows = tl.minimum(tiles_m - first, GROUP)
    m0 = (first + pid % (GROUP * tiles_n) % group_rows) * BLOCK_M
    n0 = pid % (GROUP * tiles_n) // group_rows * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if A_TRANSPOSED:
            a, a_rest = _block(a_hi, k, m0, BLOCK_K, BLOCK_M).trans(), _block(a_lo, k, m0, BLOCK_K, BLOCK_M).trans()
        else:
            a, a_rest = _block(a_hi, m0, k, BLOCK_M, BLOCK_K), _block(a_lo, m0, k, BLOCK_M, BLOCK_K)
        if B_TRANSPOSED:
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
        return t.cost_alone if count(t) <= sms else t.cost * cdiv(count(t), sms * t.per_sm)

    if capability is None:
        return AMD
    if capability[0] == 9:
        return min(HOPPER, key=time)
    return next((t for t in OTHERS if count(t) >= sms), OTHERS[-1])


def product(
    a: Halves, b: torch.Tensor, M: int, N: int, K: int, b_scale: torch.Tensor | None = None,
    a_transposed: bool = False, b_transposed: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, N) of a, (M, K), and the values of b, (N, K), in float32; transposed: that one is (K, M), or (K, N).

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
        _halves_hopper.product(out, halves, a.scale, b_scale, K, t, BLOCK_K, GROUP, a_transposed, b_transposed)
        return out
    a_block = (BLOCK_K, t.M) if a_transposed else (t.M, BLOCK_K)
    b_block = (BLOCK_K, t.N) if b_transposed else (t.N, BLOCK_K)
    launcher(_product_kernel)[(cdiv(M, t.M) * cdiv(N, t.N),)](
        *(operand(half, *block) for half, block in zip(halves, (a_block, a_block, b_block, b_block))),
        a.scale, b_scale, out, out.stride(0), M, N, K, BLOCK_M=t.M, BLOCK_N=t.N, BLOCK_K=BLOCK_K, GROUP=GROUP,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, num_warps=t.warps, num_stages=t.stages,
    )
    return out


MaybeTensor = torch.Tensor | None


def matmul_forward(x: torch.Tensor, w: torch.Tensor, out: MaybeTensor = None, w_halves: Halves | None = None) -> torch.Tensor:
    """x @ w.T of (M, K) and (N, K).  w_halves: of w, where they were made before."""
    (N, K), w_halves = w.shape, w_halves or split_rows(unit_rows(w))
    return product(split_rows(unit_rows(x)), w_halves.values, len(x), N, K, w_halves.scale, out=out)


def matmul_grad_x(dy: torch.Tensor, w: torch.Tensor, out: MaybeTensor = None, w_halves: Halves | None = None) -> torch.Tensor:
    """dy @ w of (M, N) and (N, K): the sum is over w's rows, so dy is scaled by their factors. Some rows of dy at a time."""
    (N, K), w_halves = w.shape, w_halves or split_rows(unit_rows(w))
    out = torch.empty(len(dy), K, dtype=torch.float32, device=dy.device) if out is None else out
    for chunk in chunks_of(len(dy), N, K):
        some = unit_rows(dy[chunk])
        product(split_rows(some, w_halves.scale), w_halves.values, len(some), K, N, b_transposed=True, out=out[chunk])
    return out


def matmul_grad_w(dy: torch.Tensor, x: torch.Tensor, out: MaybeTensor = None) -> torch.Tensor:
    """dy.T @ x of (M, N) and (..., K): the sum is over x's rows, so dy is scaled by their factors. Some columns at a time."""
    (M, N), x_halves, K = dy.shape, split_rows(unit_rows(x)), x.shape[-1]
    out = torch.empty(N, K, dtype=torch.float32, device=dy.device) if out is None else out
    for chunk in chunks_of(N, M, K):
        some = unit_rows(dy)[:, chunk]  # its halves have no name, so that they are freed before the next chunk's are made
        product(
            split_columns(some, x_halves.scale), x_halves.values, some.shape[1], K, M,
            a_transposed=True, b_transposed=True, out=out[chunk],
        )
    return out


def chunks_of(size: int, length: int, columns: int) -> list[slice]:
    """Slices of a dimension, whole tiles each; the halves of one, `length` values a row, take no more than CHUNK_BYTES.

    A slice's result, of so many columns, has a tile for nearly each multiprocessor: a slice is larger where that takes it.
    """
    tile = HOPPER[0]
    least = tile.M * cdiv(machine.sm_count() * 9 // 10, cdiv(max(1, columns), tile.N))
    most = max(tile.M, CHUNK_BYTES // (4 * max(1, length)))
    parts = max(1, min(cdiv(size, most), size // max(tile.M, least)))
    step = cdiv(cdiv(max(1, size), parts), tile.M) * tile.M
    return [slice(start, min(start + step, size)) for start in range(0, max(1, size), step)]


def bytes_of_chunk(size: int, length: int, columns: int) -> int:
    """Bytes of the halves of the largest slice."""
    return 4 * padded(length) * chunks_of(size, length, columns)[0].stop


def bytes_of_forward(M: int, N: int, K: int) -> int:
    """What `matmul_forward` allocates beside its result: halves of both operands."""
    return 4 * padded(K) * (M + N)


def bytes_of_grad_x(M: int, N: int, K: int) -> int:
    return 4 * padded(K) * N + bytes_of_chunk(M, N, K)


def bytes_of_grad_w(M: int, N: int, K: int) -> int:
    return 4 * padded(K) * M + bytes_of_chunk(N, M, K)
