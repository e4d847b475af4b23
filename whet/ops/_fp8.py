"""Products of 8-bit floats: tensors as E4M3 with one power-of-two scale, gradients as E5M2, and the product of two of them."""

import contextlib
import math

import torch
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.op import autocast_of
from whet.ops._rows import cdiv

LOWEST = (8, 9)  # the least compute capability whose tensor cores multiply them
UNIT = 16  # every size of such a product is a multiple of it: rows are whole loads
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def refused(device: str) -> str | None:
    """None, or why the device, "cuda" or "cpu", multiplies no 8-bit floats; the interpreter stands in for a GPU."""
    have = machine.this_machine().capability
    if device != "cuda" and machine.triton_mode() != "interpret":
        return "FP8 products need a GPU"
    if torch.version.hip:
        return "FP8 products need an NVIDIA GPU"
    return f"FP8 products need compute capability 8.9, got {have[0]}.{have[1]}" if have and have < LOWEST else None


refused._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a look at the machine cannot be traced


def casts_in_ptx() -> bool:
    """Whether kernels may cast by PTX: on NVIDIA GPUs, of which each has a compute capability."""
    return machine.this_machine().capability is not None and machine.triton_mode() != "interpret"


def padded(size: int) -> int:
    return cdiv(size, UNIT) * UNIT


def scale_of(amax):
    """(2 ** ceil(log2(amax / 448)), its inverse) in float32, at least 2^-126; 448 = 1.75 * 2^8 is E4M3's largest value.

    Read off the bits of amax, so that no logarithm rounds; over zeros any scale would do.
    """
    bits = amax.view(torch.int32)
    exponent = ((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=-126)
    return tuple(((127 + e) << 23).view(torch.float32) for e in (exponent, -exponent))


def rounded(x):
    """x at E4M3's precision, in x's dtype, with one scale; the gradient passes straight through. Not so of float64."""
    if x.dtype == torch.float64 or not x.numel():
        return x
    wide = x.detach().float()
    scale, inverse = scale_of(amax := wide.abs().amax())
    scale = torch.where(amax.isfinite(), scale, math.nan)  # else all that is finite would become zeros, and none would know
    near = ((wide * inverse).to(E4M3).float() * scale).to(x.dtype)
    return x + (near - x).detach()  # exact: near shares x's leading bits, so the difference fits


@triton.jit
def power(exponent):
    """2^(exponent - 127), by its bits; exponent is within 1..254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(bits):
    """Of what scale_of gives for an amax of these bits, for `power`; 127, a scale of 1, where all is zero."""
    exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    return tl.where(bits == 0, 127, exponent)


@triton.jit
def nearest_e4m3(x):
    """|x| as the nearest value that E4M3 has, in fp32, ties to even: what is over 448 goes on in the same steps."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    big = 1.5 * power(tl.maximum(exponent, 121) + 20)  # from 2^-6 down, steps are 2^-9
    return (tl.abs(x) + big) - big


@triton.jit
def e4m3_bits(x):
    """The bits of the E4M3 nearest to x, ties to even, as an int32; |x| is at most 448, and what is not finite becomes NaN.

    2^-8 x in float16 has the exponent, the subnormals and the first bits of the mantissa that x has in E4M3. By bits, since of
    Triton's own casts, of two numbers each, some bytes arrive in the wrong places on an H200 where the tile is then turned.
    """
    near = nearest_e4m3(x)
    h = (near * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(near < 1024.0, (h >> 7) & 0x7F, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _e5m2_bits(x):
    """The bits of the E5M2 nearest to x, as an int32: of float16 the first byte.

    Rounds to float16 first: what lies within 2^-11 of halfway between two may go to the even one instead of the nearer one.
    """
    h = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where((h & 0x7FFF) > 0x7C00, 0x7F, (h + 0x7F + ((h >> 8) & 1)) >> 8)  # NaN's bits would run over into a zero


# Two casts of the GPU, each of two numbers, and their bytes in one register.
_CAST = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)


@triton.jit
def e5m2_bytes(x, IN_PTX: tl.constexpr):
    """The E5M2 nearest to x, of at most 57344, as uint8."""
    if IN_PTX:
        return tl.inline_asm_elementwise(_CAST, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return _e5m2_bits(x).to(tl.uint8)


@triton.jit
def widened(x, IN_PTX: tl.constexpr):
    """bfloat16 in float32. In PTX one instruction each: of two in a register ptxas takes two for the upper one."""
    if IN_PTX:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )
    else:
        return x.to(tl.float32)


# Sixteen numbers, four of each operand: two casts make a word of an operand's neighbours, and eight permutations of bytes make
# the four words of what lies at one place.
_CAST_AND_TURN = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 a, b, c, d, ab, cd, ef, gh;"
    " cvt.rn.satfinite.e5m2x2.f32 low, $9, $8; cvt.rn.satfinite.e5m2x2.f32 high, $11, $10; mov.b32 a, {low, high};"
    " cvt.rn.satfinite.e5m2x2.f32 low, $13, $12; cvt.rn.satfinite.e5m2x2.f32 high, $15, $14; mov.b32 b, {low, high};"
    " cvt.rn.satfinite.e5m2x2.f32 low, $17, $16; cvt.rn.satfinite.e5m2x2.f32 high, $19, $18; mov.b32 c, {low, high};"
    " cvt.rn.satfinite.e5m2x2.f32 low, $21, $20; cvt.rn.satfinite.e5m2x2.f32 high, $23, $22; mov.b32 d, {low, high};"
    " prmt.b32 ab, a, b, 0x5140; prmt.b32 cd, c, d, 0x5140; prmt.b32 ef, a, b, 0x7362; prmt.b32 gh, c, d, 0x7362;"
    " mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;"
    " prmt.b32 $4, ab, cd, 0x5410; prmt.b32 $5, ab, cd, 0x7632; prmt.b32 $6, ef, gh, 0x5410; prmt.b32 $7, ef, gh, 0x7632; }"
)


@triton.jit
def e5m2_four(a, b, c, d, IN_PTX: tl.constexpr):
    """The E5M2 nearest to each, as uint8, and the four bytes as one int32, that of a the lowest."""
    if IN_PTX:
        return tl.inline_asm_elementwise(
            _CAST_AND_TURN, "=r,=r,=r,=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f", [a, b, c, d],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.int32), is_pure=True, pack=4,
        )
    else:
        a, b, c, d = _e5m2_bits(a), _e5m2_bits(b), _e5m2_bits(c), _e5m2_bits(d)
        return a.to(tl.uint8), b.to(tl.uint8), c.to(tl.uint8), d.to(tl.uint8), a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def _cast_turned_kernel(
    x_ptr, amax_ptr,  # inputs
    y_ptr, turned_ptr, scale_ptr,  # outputs: (rows, D) bytes, (D, rows / 4) int32 of four rows' bytes each, one number
    stride_xm, stride_xd,
    M, D, rows,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """y = E4M3(x / s), turned = y.T;  s = 2^ceil(log2(amax / 448)), 1 where all is zero.  One program, 4 BLOCK_M rows.

    Fuses   the rounding, the transpose, and rows of zeros from M on.
    Moves   x in; y and turned out, a byte an element each. Four rows are turned as one word.
    Rounds  once, to nearest, ties to even. x / s is exact; s stays at 2^-126 or above. An infinity becomes NaN.
    """
    blocks = tl.cdiv(D, BLOCK_D)
    pid = tl.program_id(0)
    four = (pid // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = (pid % blocks).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    bits = tl.load(amax_ptr).to(tl.int32, bitcast=True)
    exponent = scale_exponent(bits)
    if pid == 0:
        tl.store(scale_ptr, tl.where(bits >= 0x7F800000, float("nan"), power(exponent)))  # of an amax that is not finite
    inverse, in_row = power(254 - exponent), (d < D)[None, :]
    words = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.int32)
    for r in tl.static_range(4):
        m = 4 * four + r
        x = tl.load(x_ptr + m[:, None] * stride_xm + d[None, :] * stride_xd, mask=(m < M)[:, None] & in_row, other=0.0)
        y = e4m3_bits(x.to(tl.float32) * inverse)
        tl.store(y_ptr + m[:, None] * D + d[None, :], y.to(tl.uint8), mask=(m < rows)[:, None] & in_row)
        words |= y << (8 * r)
    stored = (d < D)[:, None] & (four < rows // 4)[None, :]
    tl.store(turned_ptr + d[:, None] * (rows // 4) + four[None, :], tl.trans(words), mask=stored)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, y.T, scale) of x (M, D) in E4M3, with rows of zeros up to a multiple of UNIT. M is at least 1."""
    (M, D), rows = x.shape, padded(x.shape[0])
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    y, turned = (torch.empty(shape, dtype=E4M3, device=x.device) for shape in ((rows, D), (D, rows)))
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    launcher(_cast_turned_kernel)[(cdiv(rows, 64) * cdiv(D, 128),)](
        x, amax, y.view(torch.uint8), turned.view(torch.int32), scale, *x.stride(), M, D, rows,
        BLOCK_M=16, BLOCK_D=128, num_warps=4,
    )
    return y, turned, scale


def product(a, b, scale_a, scale_b, dtype: torch.dtype, bias=None, fast: bool = False, out=None) -> torch.Tensor:
    """a @ b.T * scale_a * scale_b + bias for a (M, K) and b (N, K); K and N are multiples of UNIT.

    fast   adds inside the tensor cores alone, in 14 bits of a sum: for a short K
    """
    if a.is_cuda:
        how = dict(bias=bias, out_dtype=dtype, use_fast_accum=fast)
        if out is None:
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, **how)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, **how, out=out)
    with torch.autocast(a.device.type, enabled=False) if autocast_of(a) else contextlib.nullcontext():
        made = (a.float() @ b.float().t()) * (scale_a * scale_b)
        made = (made if bias is None else made + bias.float()).to(dtype)
    return made if out is None else out.copy_(made)
