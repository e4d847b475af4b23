"""A float32 as a pair of float16: how it is scaled, by a power of two that the largest of its kind decides, and split."""

import triton
import triton.language as tl

TOP = tl.constexpr(2.0**14)  # the largest half lies from here to twice that: below float16's largest, 65504
BY_TOPS = tl.constexpr(2.0**-28)  # what undoes that, of two operands
SMALLEST = tl.constexpr(2.0**-111)  # scales below it have no inverse: such rows keep fewer of float16's powers of two unused
EXPONENT = tl.constexpr(0x7F800000)  # these bits alone are the power of two at or below a positive float32
ALIGN = 8  # halves in the 16 bytes that a descriptor wants each row to be a multiple of


@triton.jit
def power_below(peak):
    """The power of two at or below each peak, no smaller than can be divided by."""
    return tl.maximum((peak.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True), SMALLEST)


@triton.jit
def magnitude(x):
    """|x|, and 0 for what is no number, so that it scales nothing."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def in_halves(x):
    """hi and lo of what is scaled already; of what is no number hi alone."""
    hi = x.to(tl.float16)
    rest = x - hi.to(tl.float32)
    return hi, tl.where(rest == rest, rest, 0.0).to(tl.float16)


def padded(N: int) -> int:
    """Columns in memory."""
    return -(-N // ALIGN) * ALIGN
