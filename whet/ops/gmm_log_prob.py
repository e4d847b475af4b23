"""gmm_log_prob: the mean log-likelihood that mixtures of Gaussians give their targets."""

import math

import torch
import torch.nn.functional as F

from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, same_device
from whet.values import changed, families

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


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
        dict(M=9, K=10, y_dtype="same"), dict(M=9, K=10, y_layout="strided"), dict(M=9, K=10, y_layout="expanded"),
        dict(M=9, K=10, layout="sliced"), dict(M=9, K=10, layout="transposed"), dict(M=9, K=10, layout="expanded"),
    ),
    shapes={
        "small 32x500x10": dict(M=16000, K=10), "mid 8x1000x10": dict(M=8000, K=10), "large 5000x10": dict(M=5000, K=10),
        "256x500x10": dict(M=128000, K=10),
    },
    cost=cost,
    grads=("z", "y"),
    impls={"torch": Impl(run_torch)},
    dynamic=("M",),
    tiny=dict(M=64),
    hostile=families(("z",), shifted=("y",), tails=("y",), limit=8.0, **HOSTILE),
)
