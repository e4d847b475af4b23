"""gmm_log_prob: the mean log-likelihood that mixtures of Gaussians give their targets."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, same_device
from whet.ops._rows import KERNEL_DTYPES, cdiv, power_of_two
from whet.torch_ops import Fused, may_ask
from whet.values import changed, families

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MAX_K = 512  # one program holds all components of a row, three numbers each
TILE, WARPS = 512, 4  # components of a program: four a thread


def reference(z, y):
    """mean over rows of log sum_k softmax(logit)_k * Normal(y; mu_k, exp(log_sigma_k)), in float32 (float64 for float64 z).

    z (..., K, 3) has of each component the logit of its weight, mu and log_sigma; y (...) the targets, in float32 or z's dtype.
    A logit of -inf is a weight of 0. The mean over no rows is NaN.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    logit, mu, log_sigma = z.to(wide).unbind(-1)
    t = (y.to(wide)[..., None] - mu) * torch.exp(-log_sigma)
    terms = F.log_softmax(logit, dim=-1) - 0.5 * t.square() - log_sigma - HALF_LOG_2PI
    return torch.logsumexp(terms, dim=-1).mean()


def inputs(dtype, device, M, K, layout="contiguous", y_dtype="float32", y_layout="contiguous"):
    scales = torch.tensor([1.0, 1.0, 0.5], device=device)
    y = torch.randn(M, device=device).to(dtype if y_dtype == "same" else torch.float32)
    return dict(z=lay((torch.randn(M, K, 3, device=device) * scales).to(dtype), layout), y=lay(y, y_layout))


def case_of(z, y):
    K = z.shape[-2]
    case = dict(M=y.numel(), K=K, layout=layout_of(z))
    case |= {} if y.dtype == torch.float32 else dict(y_dtype="same")
    return case if y.is_contiguous() else case | dict(y_layout=layout_of(y.reshape(-1)))


def check(z, y):
    if reason := floating(z=z, y=y) or same_device(z=z, y=y):
        return reason
    if z.dim() < 2 or z.shape[-1] != 3 or z.shape[-2] < 1:
        return f"z must have shape (..., K, 3) with K at least 1, got {tuple(z.shape)}"
    if y.shape != z.shape[:-2]:
        return f"y must have shape {tuple(z.shape[:-2])} to match z.shape[:-2], got {tuple(y.shape)}"
    if y.dtype not in (torch.float32, z.dtype):
        return f"y must be float32 or of z's dtype {z.dtype}, got {y.dtype}"
    return None


def cost(z, y):
    """About twenty operations a component forwards, four of them exponentials, and twice as many with the backward's."""
    n = z.numel() // 3
    return Cost(bytes=nbytes(z, y) + 4, flops=20 * n, bwd_bytes=nbytes(z, y, z, y), bwd_flops=35 * n)


@triton.jit
def _exp(x):
    """exp(x) to a step of fp32 at any x: tl.exp rounds x * log2(e) first, which at |x| = 15 costs five.

    x = n * log(2) + r, |r| <= log(2) / 2; the coefficients of exp(r) are those of Cephes' expf.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.1219444005469057e-4  # log(2) in two parts: the first product is exact
    r = tl.where(tl.abs(n) < 256.0, r, 0.0)  # beyond, and at infinity, exp2(n) says it all
    p = 0.041665795894 + r * (0.0083334519073 + r * (0.0013981999507 + r * 0.00019875691500))
    return tl.exp2(n) * (1.0 + (r + r * r * (0.50000001201 + r * (0.16666665459 + r * p))))


@triton.jit
def _components(z_ptr, y_ptr, m, k, stride_zm, stride_zk, stride_zc, stride_ym, M, K):
    """Of each row: prior = exp(logit - max), its sum; 1 / sigma, t = (y - mu) / sigma; the largest term; likelihood =
    exp(term - largest), its sum. A component beyond K has a logit of -inf; rows beyond M are of zeros."""
    in_row, is_component = m < M, (k < K)[None, :]
    inside = in_row[:, None] & is_component
    at = z_ptr + m[:, None] * stride_zm + k[None, :] * stride_zk
    logit = tl.where(is_component, tl.load(at, mask=inside, other=0.0).to(tl.float32), float("-inf"))
    mu = tl.load(at + stride_zc, mask=inside, other=0.0).to(tl.float32)
    log_sigma = tl.load(at + 2 * stride_zc, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + m * stride_ym, mask=in_row, other=0.0).to(tl.float32)

    a = logit - tl.max(logit, axis=1)[:, None]
    prior = tl.exp(a)
    rate = _exp(-log_sigma)
    t = (y[:, None] - mu) * rate
    term = a - 0.5 * t * t - log_sigma
    top = tl.max(term, axis=1)
    likelihood = tl.exp(term - top[:, None])
    return prior, tl.sum(prior, axis=1), rate, t, top, likelihood, tl.sum(likelihood, axis=1)


@triton.jit
def _gmm_log_prob_kernel(
    z_ptr, y_ptr,  # inputs
    partial_ptr,  # output: one fp32 sum a program
    stride_zm, stride_zk, stride_zc, stride_ym,
    M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """partial = sum over BLOCK_M rows of log sum_k softmax(logit)_k * Normal(y; mu_k, sigma_k).  One program, BLOCK_M rows.

    Fuses   both log-sum-exps, the densities and the sum over rows; nothing is kept for the backward but z and y.
    Moves   z, y in; partial out = 3*M*K*itemsize + 4*M + 4*M/BLOCK_M.  Unfused: 40*M*K and more, in fp32.
    Rounds  nothing: fp32 inside and out. Each log-sum-exp subtracts its maximum.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    _, prior_sum, _, _, top, _, likelihood_sum = _components(
        z_ptr, y_ptr, m, k, stride_zm, stride_zk, stride_zc, stride_ym, M, K
    )
    log_p = top + (tl.log(likelihood_sum) - tl.log(prior_sum)) - 0.9189385332046727
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.where(m < M, log_p, 0.0), axis=0))


@triton.jit
def _mean_kernel(
    partial_ptr,  # (G,) fp32
    out_ptr,  # one number
    G, M,
    BLOCK_G: tl.constexpr,
):
    """out = sum(partial) / M.  One program, always the same order of additions.

    Moves   4*G in, 4 out.
    Rounds  fp32 sums and one division; over no rows it is 0 / 0, as in torch.
    """
    total = tl.zeros((BLOCK_G,), tl.float32)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        total += tl.load(partial_ptr + g, mask=g < G, other=0.0)
    tl.store(out_ptr, tl.div_rn(tl.sum(total, axis=0), tl.full((), 1.0, tl.float32) * M))


@triton.jit
def _gmm_log_prob_bwd_kernel(
    dout_ptr, z_ptr, y_ptr,  # inputs; dout is one number
    dz_ptr, dy_ptr,  # outputs: (M, K, 3), (M,)
    stride_zm, stride_zk, stride_zc, stride_ym,
    M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_DY: tl.constexpr,
):
    """dlogit = d * (r - w), dmu = d * r * t / sigma, dlog_sigma = d * r * (t^2 - 1), dy = -sum dmu.  One program, BLOCK_M rows.

    w is the softmax of the logits, r that of the terms, t = (y - mu) / sigma, d = dout / M.
    Fuses   the whole formula, made again from z and y, which are read once.
    Moves   z, y in; dz, dy out = 6*M*K*itemsize + 8*M.
    Rounds  once, at the stores; fp32 inside. Where r is 0 so are dmu and dlog_sigma, however large t is.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    prior, prior_sum, rate, t, _, likelihood, likelihood_sum = _components(
        z_ptr, y_ptr, m, k, stride_zm, stride_zk, stride_zc, stride_ym, M, K
    )
    d = tl.load(dout_ptr).to(tl.float32) / (tl.full((), 1.0, tl.float32) * M)
    w = prior / prior_sum[:, None]
    r = likelihood / likelihood_sum[:, None]
    dmu = tl.where(r == 0.0, 0.0, d * r * t * rate)
    dlog_sigma = tl.where(r == 0.0, 0.0, d * r * (t * t - 1.0))

    inside = (m < M)[:, None] & (k < K)[None, :]
    at = dz_ptr + (m[:, None] * K + k[None, :]) * 3
    tl.store(at, d * (r - w), mask=inside)
    tl.store(at + 1, dmu, mask=inside)
    tl.store(at + 2, dlog_sigma, mask=inside)
    if HAS_DY:
        tl.store(dy_ptr + m, -tl.sum(dmu, axis=1), mask=m < M)


def mixtures(z, y):
    """z as (M, K, 3) and y as (M,): views where the strides allow them, else copies."""
    return z.reshape(y.numel(), *z.shape[-2:]), y.reshape(-1)


def tile(K: int) -> dict:
    """BLOCK_M, BLOCK_K, num_warps: all components of a row, of as many rows as make up a program."""
    BLOCK_K = power_of_two(K)
    return dict(BLOCK_M=max(1, TILE // BLOCK_K), BLOCK_K=BLOCK_K, num_warps=WARPS)


def forward(z, y, need_dy):
    z, y = mixtures(z, y)
    M, K, _ = z.shape
    sizes = tile(K)
    partial = torch.empty(cdiv(M, sizes["BLOCK_M"]), dtype=torch.float32, device=z.device)
    out = torch.empty((), dtype=torch.float32, device=z.device)
    if M:
        launcher(_gmm_log_prob_kernel)[(partial.numel(),)](z, y, partial, *z.stride(), y.stride(0), M, K, **sizes)
    launcher(_mean_kernel)[(1,)](partial, out, partial.numel(), M, BLOCK_G=1024, num_warps=4)
    return out


def backward(dout, z, y, need_dy):
    """dz, and dy, of no elements where it is not asked for."""
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    dy = torch.empty_like(y, memory_format=torch.contiguous_format) if need_dy else y.new_empty(0)
    z, y = mixtures(z, y)
    M, K, _ = z.shape
    sizes = tile(K)
    if M:
        launcher(_gmm_log_prob_bwd_kernel)[(cdiv(M, sizes["BLOCK_M"]),)](
            dout, z, y, dz, dy, *z.stride(), y.stride(0), M, K, HAS_DY=need_dy, **sizes
        )
    return dz, dy


FUSED = Fused(
    "gmm_log_prob",
    "(Tensor z, Tensor y, bool need_dy) -> Tensor", forward, lambda z, y, need_dy: z.new_empty((), dtype=torch.float32),
    "(Tensor dout, Tensor z, Tensor y, bool need_dy) -> (Tensor, Tensor)", backward,
    lambda dout, z, y, need_dy: (z.new_empty(z.shape), y.new_empty(y.shape if need_dy else 0)),
    save=lambda args, results: ((args[0], args[1]), (args[2],)),
    grads_to=(0, 1, None),
    visible=True, bwd_visible=True,
)


def refuses(z, y):
    if z.dtype not in KERNEL_DTYPES:
        return f"z must be float32, float16 or bfloat16, got {z.dtype}"
    K = z.shape[-2]
    return None if K <= MAX_K else f"z.shape[-2] must be at most {MAX_K}, the components one program holds, got {K}"


def run_triton(z, y):
    return FUSED(z, y, may_ask(y))


def run_torch(z, y):
    wide = torch.promote_types(z.dtype, torch.float32)
    logit, mu, log_sigma = z.to(wide).unbind(-1)
    t = (y.to(wide)[..., None] - mu) * torch.exp(-log_sigma)
    terms = torch.addcmul(F.log_softmax(logit, dim=-1) - log_sigma, t, t, value=-0.5)
    return torch.logsumexp(terms, dim=-1).mean() - HALF_LOG_2PI


def column(c: int, change):
    """The family that changes one column of z: 0 the logits, 1 the means, 2 the logarithms of the deviations."""

    def of_z(z):
        new = change(z[..., c])
        return None if new is None else torch.cat((z[..., :c], new[..., None], z[..., c + 1 :]), dim=-1)

    return changed(("z",), of_z, clamp=False)


def some_absent(logit):
    """Every other component has weight 0."""
    K = logit.shape[-1]
    return None if K < 2 else torch.where(torch.arange(K, device=logit.device) % 2 == 0, logit, -math.inf)


def one_present(logit):
    """All components but the last have weight 0."""
    K = logit.shape[-1]
    return None if K < 2 else torch.where(torch.arange(K, device=logit.device) == K - 1, logit, -math.inf)


def uniform(limit: float):
    return lambda t: (2 * torch.rand_like(t) - 1) * limit


HOSTILE = dict(
    some_weights_zero=column(0, some_absent), one_weight_not_zero=column(0, one_present), large_logits=column(0, uniform(1e4)),
    any_deviation=column(2, uniform(15.0)), distant_means=column(1, uniform(6e4)),
)

OP = Op(
    name="gmm_log_prob",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, K=16), dict(M=7, K=10), dict(M=33, K=5), dict(M=0, K=10), dict(M=9, K=1), dict(M=3, K=67), dict(M=300, K=10),
        dict(M=2, K=MAX_K), dict(M=9, K=10, y_dtype="same"), dict(M=9, K=10, y_layout="strided"),
        dict(M=9, K=10, y_layout="expanded"),
        dict(M=9, K=10, layout="sliced"), dict(M=9, K=10, layout="transposed"), dict(M=9, K=10, layout="expanded"),
    ),
    shapes={
        "small 32x500x10": dict(M=16000, K=10), "mid 8x1000x10": dict(M=8000, K=10), "large 5000x10": dict(M=5000, K=10),
        "256x500x10": dict(M=128000, K=10),
    },
    cost=cost,
    grads=("z", "y"),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", f"more than {MAX_K} components"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=64),
    hostile=families(("z",), shifted=("y",), tails=("y",), limit=8.0, **HOSTILE),
)
