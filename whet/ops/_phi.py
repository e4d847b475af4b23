"""The factor of a GELU: the standard normal's cumulative probability, exactly or through tanh, and its derivative."""

import triton
import triton.language as tl

CHOICES = ("none", "tanh")  # of approximate


@triton.jit
def _tanh_phi(x):
    """p = (1 + tanh(z)) / 2 = sigmoid(2z) for z = sqrt(2/pi) * (x + 0.044715 * x^3), and its derivative over x.

    From exp(-|2z|), which cannot overflow.  1 - p is never taken: dx would multiply its rounding error by 56 at x = 6.
    """
    xx = tl.minimum(x * x, 1000.0)  # there p is 0 or 1 already; beyond 1e19 an infinite square would make dx NaN
    z2 = x * (1.5957691216057308 + 0.07135481627260025 * xx)
    e = tl.exp(-tl.abs(z2))
    r = 1.0 / (1.0 + e)
    return tl.where(z2 < 0, e * r, r), e * r * r * (1.5957691216057308 + 0.21406444881780076 * xx)


@triton.jit
def _phi(x):
    """The standard normal's cumulative probability of x, and its density, to fp32 precision."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _half_phi(x):
    """_phi for x held in 16 bits: relative error under 5e-6 for every x, also where 1 + erf(x) cancels.

    Phi(-a) = t * Q(t) * exp(-a^2 / 2), t = 1 / (1 + 0.31 * a), Q a minimax fit on [0, 14].  On sm_90 a GELU's forward takes 27
    instructions an element in place of erf's 37, its backward 31 for 47; at 4.27 TB/s there is time for 31 and 46.
    """
    t = 1.0 / (1.0 + 0.31 * tl.abs(x))
    q = 0.01574750880892237 + t * (0.18044879373741474 + t * -0.0739288554741394)
    q = 0.12386059664995802 + t * (0.12044208088157873 + t * (0.13342755290472622 + t * q))
    e = tl.exp2(x * x * -0.7213475204444817)
    tail = t * q * e
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804014327 * e


@triton.jit
def _gelu_factor(x, x_ptr, TANH: tl.constexpr):
    """p and dp/dx of x * p, for x loaded from x_ptr and widened to fp32."""
    if TANH:
        p, density = _tanh_phi(x)
    elif x_ptr.dtype.element_ty == tl.float32:
        p, density = _phi(x)
    else:
        p, density = _half_phi(x)
    return p, density
