"""attention in FP8, for Hopper and newer: q, k and v rounded to E4M3, both products on the FP8 tensor cores.

The limits of E4M3 weights: a key whose weight is below 2^-18 of the largest its row has met adds nothing to the output;
and the 128-row blocks of v in one head may differ by at most 2^90 in size, beyond which the output overflows.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from whet.launch import launcher
from whet.ops._fp8 import nearest_e4m3, power, scale_exponent
from whet.ops.attention.common import INTERPRETED, LOG2E, Tile, edges, limits, seen
from whet.ops.attention.meaning import ROWS  # rows that share a scale: also the keys of a tile, which so has one for k and v

# By the padded head size; the first is the default.
TILES = {
    32: ("64x128w4s3",),
    64: ("64x128w4s3", "64x128w4s2", "128x128w8s2"),
    128: ("64x128w4s2", "64x128w4s3", "128x128w8s2"),
    256: ("64x128w8s2",),
}
BLOCK_N = tl.constexpr(ROWS)
SHIFT = tl.constexpr(8.0)  # a row's largest weight is held as 2^8: E4M3 reaches from 448 down to 2^-9


@triton.jit
def _e4m3(x):
    """fp32 of at most 448 -> the nearest E4M3, ties to even."""
    if INTERPRETED:
        # The interpreter's cast loses the carry out of the mantissa (1.96 becomes 1): there, round first and cast exactly.
        x = nearest_e4m3(x) * ((x.to(tl.int32, bitcast=True) >> 31) | 1).to(tl.float32)
    return x.to(tl.float8e4nv)


@triton.jit
def _inverse(power):
    """1 / power for a power of two within 2^-126..2^126, by its bits: the GPU's division may be off by two steps."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_kernel(
    x_ptr,  # (B, H, L, D)
    y_ptr, s_ptr,  # E4M3 and its scales; without s_ptr, y takes what they stand for in its own dtype
    stride_xb, stride_xh, stride_xl, stride_xd, stride_yn, stride_yl, stride_yd,
    H, L, D, rows, width, blocks,
    BLOCK_D: tl.constexpr,
):
    """y = E4M3(x / s);  s = 2^ceil(log2(max|x| / 448)), 1 where all is zero.  One program, 128 rows of one head.

    Fuses   the maximum, the rounding, the padding with zeros to (rows, width), and the transpose that y's strides ask for.
    Moves   x in; y out, one byte an element, and four for every 128 rows.
    Rounds  once, to nearest, ties to even. s comes from the bits of max|x|, so x / s is exact; it stays at 2^-126 or above.
            An infinity becomes NaN, since E4M3 has none.
    """
    pid = tl.program_id(0)
    n = (pid // blocks).to(tl.int64)
    row = (pid % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    at = n // H * stride_xb + n % H * stride_xh + row[:, None] * stride_xl + d[None, :].to(tl.int64) * stride_xd
    x = tl.load(x_ptr + at, mask=(row < L)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)

    bits = tl.max(tl.abs(x)).to(tl.int32, bitcast=True)
    s = power(scale_exponent(bits))
    y = _e4m3(tl.where(tl.abs(x) == float("inf"), float("nan"), x) * _inverse(s))

    to = y_ptr + n * stride_yn + row[:, None] * stride_yl + d[None, :].to(tl.int64) * stride_yd
    stored = (row < rows)[:, None] & (d < width)[None, :]
    if s_ptr is None:
        tl.store(to, y.to(tl.float32) * s, mask=stored)
    else:
        tl.store(to, y, mask=stored)
        tl.store(s_ptr + pid, s)


@triton.jit
def _attend(
    acc, row_max, row_sum, unit_v, q, sq, k_desc, v_desc, sk_ptr, sv_ptr, kv, i, lo, hi, Lk, rate, left, right,
    BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):
    """The state after the keys [lo, hi): acc * unit_v the weighted values, row_max the largest q . k, row_sum the weights.

    Scales are powers of two, so that acc and row_max pass exactly from the units of one tile to those of the next. A tile's
    scales are read during the tile before it: read where they are used, they cost a barrier a tile. What is carried of v's
    is their ratio: a value that is carried over two tiles makes Triton give up copying tiles ahead.
    """
    end = (Lk - 1) // BLOCK_N
    tile = tl.minimum(lo // BLOCK_N, end)
    sk, sv = tl.load(sk_ptr + tile), tl.load(sv_ptr + tile)
    ratio = unit_v * _inverse(sv)
    for n in tl.range(lo, hi, BLOCK_N):
        k = k_desc.load([kv, n, 0]).reshape(BLOCK_N, BLOCK_D)
        tile = tl.minimum(n // BLOCK_N + 1, end)
        sk_next, sv_next = tl.load(sk_ptr + tile), tl.load(sv_ptr + tile)
        unit = tl.maximum(sq * sk, 2.0**-60)  # smaller scores are all zero; rate * unit must not be, nor its inverse infinite
        s = tl.dot(q, k.T)
        if MASKED:
            see = seen(i[:, None], n + tl.arange(0, BLOCK_N)[None, :], Lk, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(see, s, float("-inf"))
        new = tl.maximum(row_max, tl.max(s, 1) * unit)
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)  # a row that has met no key yet
        if rate * unit * (448.0 * 448.0 * BLOCK_D) < 2.0**15:
            z = s * (rate * unit) - (base * rate - SHIFT)[:, None]
        else:  # the rounding of base * rate could push weights past 448: subtract first, which is exact at the largest
            z = (s - (base * _inverse(unit))[:, None]) * (rate * unit) + SHIFT
        p = tl.exp2(z)
        alpha = tl.exp2((row_max - base) * rate)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v = v_desc.load([kv, 0, n]).reshape(BLOCK_D, BLOCK_N)
        acc = acc * (alpha * ratio)[:, None] + tl.dot(_e4m3(p), v.T)
        row_max = new
        ratio = sv * _inverse(sv_next)
        sk, sv = sk_next, sv_next
    return acc, row_max, row_sum, ratio * sv


@triton.jit
def _fp8_forward_kernel(
    q_desc, k_desc, v_desc,  # E4M3: (B*Hq, Lq, BLOCK_D), (B*Hkv, Lk, BLOCK_D), (B*Hkv, BLOCK_D, Lk in whole tiles)
    sq_ptr, sk_ptr, sv_ptr,  # their scales, one per 128 rows
    o_ptr, lse_ptr,  # outputs
    stride_ob, stride_oh, stride_ol, stride_od,
    H, GROUP, Lq, Lk, D, rate, offset, left, right,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """o = softmax(scale * q k^T) v over the keys j with -left <= j - (i + offset) <= right.  One program, BLOCK_M queries.

    Fuses   both products and the softmax, as the forward in the inputs' precision does; the blocks of a head run side by
            side, those that see most keys first.
    Moves   q8, k8, v8, a byte an element, in; o and one fp32 per row out. k8 and v8 come from L2 once per BLOCK_M queries.
    Rounds  weights to E4M3 before the second product, o at the store. Weights are summed before they are rounded: the sum
            is then that of the rounded q and k, which the backward computes again, and the kernel keeps to 128 registers
            at D = 64 (167 with the sum of rounded weights), so that four programs share an SM, not three.
            Hopper's tensor cores keep about 14 bits of an FP8 sum, and Triton leaves sums there (max_num_imprecise_acc is
            2^30): so each tile's product starts from zero, and tiles are added in fp32 outside.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    pid = tl.program_id(0)
    block, bh = pid % blocks, pid // blocks
    if HAS_RIGHT:
        block = blocks - 1 - block
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    kv = bh // GROUP
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    i = row + offset
    lo, full_lo, full_hi, hi = edges(
        first + offset, tl.minimum(first + BLOCK_M, Lq) - 1 + offset, Lk, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    q = q_desc.load([bh, first, 0]).reshape(BLOCK_M, BLOCK_D)
    sq = tl.load(sq_ptr + bh.to(tl.int64) * tl.cdiv(Lq, BLOCK_N) + first // BLOCK_N)
    sk_ptr += kv.to(tl.int64) * tl.cdiv(Lk, BLOCK_N)
    sv_ptr += kv.to(tl.int64) * tl.cdiv(Lk, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    unit_v = 1.0
    if HAS_LEFT:
        acc, row_max, row_sum, unit_v = _attend(
            acc, row_max, row_sum, unit_v, q, sq, k_desc, v_desc, sk_ptr, sv_ptr, kv, i, lo, full_lo, Lk, rate, left, right,
            BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )
    acc, row_max, row_sum, unit_v = _attend(
        acc, row_max, row_sum, unit_v, q, sq, k_desc, v_desc, sk_ptr, sv_ptr, kv, i, full_lo, full_hi, Lk, rate, left, right,
        BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
    )
    acc, row_max, row_sum, unit_v = _attend(
        acc, row_max, row_sum, unit_v, q, sq, k_desc, v_desc, sk_ptr, sv_ptr, kv, i, full_hi, hi, Lk, rate, left, right,
        BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
    )
    none = row_sum == 0.0  # and acc is zero there
    row_sum = tl.where(none, 1.0, row_sum)
    lse = tl.where(none, float("-inf"), row_max * rate + tl.log2(row_sum) - SHIFT)
    tl.store(lse_ptr + bh.to(tl.int64) * Lq + row, lse, mask=row < Lq)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    to = o_ptr + b * stride_ob + h * stride_oh + row[:, None].to(tl.int64) * stride_ol + d[None, :] * stride_od
    tl.store(to, acc * (unit_v / row_sum)[:, None], mask=(row < Lq)[:, None] & (d < D)[None, :])


def padded(D: int) -> int:
    """The head size in the kernels: a power of two, and at least what one step of an FP8 product takes."""
    return max(32, triton.next_power_of_2(D))


def tile_of(D: int, tile: str) -> Tile:
    """The tile asked for, else the default for heads of D."""
    read = Tile.read(tile or TILES[padded(D)][0])
    if read.N != ROWS or read.M not in (64, ROWS):
        raise ValueError(f"attention[triton_fp8]: tile must be 64 or {ROWS} queries by {ROWS} keys, as scales, got {tile!r}")
    return read


def _launch(x, y, s, strides, rows, width):
    B, H, L, D = x.shape
    blocks, BLOCK_D = triton.cdiv(L, ROWS), padded(D)
    if x.numel():
        launcher(_quantize_kernel)[(B * H * blocks,)](
            x, y, s, *x.stride(), *strides, H, L, D, rows, width, blocks, BLOCK_D=BLOCK_D, num_warps=max(4, BLOCK_D // 16)
        )


def quantized(x: torch.Tensor, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x as E4M3 (B*H, L, D') and its scales (B*H, blocks of 128 rows); transposed: (B*H, D', L in whole blocks)."""
    B, H, L, D = x.shape
    blocks, width = triton.cdiv(L, ROWS), padded(D)
    rows = blocks * ROWS if transposed else L
    shape = (B * H, width, rows) if transposed else (B * H, rows, width)
    y = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    s = torch.empty(B * H, blocks, dtype=torch.float32, device=x.device)
    _launch(x, y, s, (rows * width, 1, rows) if transposed else (rows * width, width, 1), rows, width)
    return y, s


def dequantized(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each (B, H, L, D) as the forward sees it, in its own dtype: exact, but for float16 past 63488, which becomes infinite."""
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
    for x, y in zip(given, outs):
        L, D = x.shape[2:]
        _launch(x, y, None, (L * D, D, 1), L, D)
    return outs


def forward(q, k, v, scale, offset, left, right, tile=""):
    """o in q's dtype and layout, and the log-sum-exp in base 2, of q, k and v rounded to E4M3; left, right: -1 is no limit."""
    B, H, Lq, D = q.shape
    Lk, BLOCK_D, shape = k.shape[2], padded(D), tile_of(D, tile)
    o = torch.empty_like(q)
    lse = torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    if not (o.numel() and Lk):
        return o.zero_(), lse.fill_(-math.inf)
    (q8, sq), (k8, sk), (v8, sv) = quantized(q), quantized(k), quantized(v, transposed=True)
    blocks = ((q8, [1, shape.M, BLOCK_D]), (k8, [1, ROWS, BLOCK_D]), (v8, [1, BLOCK_D, ROWS]))
    launcher(_fp8_forward_kernel)[(B * H * triton.cdiv(Lq, shape.M),)](
        *(TensorDescriptor.from_tensor(x, block) for x, block in blocks), sq, sk, sv, o, lse, *o.stride(),
        H, H // k.shape[1], Lq, Lk, D, max(scale * LOG2E, 2.0**-40), offset, **limits(left, right),  # 0 * -inf is no weight
        BLOCK_M=shape.M, BLOCK_D=BLOCK_D, num_warps=shape.warps, num_stages=shape.stages,
    )
    return o, lse
