"""Gaussian processes in one dimension: their kernels, functions drawn from them, and the exact prediction.

    law = draw_law(generator)                             # a kernel, its hyperparameters, the noise of observations
    f = draw_functions([law], x, normals)                 # (1, P) values of a function at the points x (1, P)
    mean, sd = predict([law], x[:, :M], y[:, :M], x[:, M:])   # of further observations, given the first M

Up to DENSE points a covariance matrix is factorised in float64. Above that a kernel is summed as its Fourier series: stationary
kernels on an interval are, but for what lies ROOM length scales away, those of a longer circle, whose series has weights above
0 that are known. Then a function is the sum of TERMS waves with normal amplitudes, and the exact prediction a linear
regression on them. The covariance is the same to 1e-9, far below the noise of observations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KERNELS = ("rbf", "matern52", "periodic")
LOW, HIGH = -2.0, 2.0  # where the points lie
LENGTHS, SCALES, NOISES, PERIODS = (0.25, 1.0), (0.5, 1.5), (0.02, 0.2), (0.5, 2.0)  # ranges, of which logarithms are uniform
JITTER = 1e-8  # of the variance, on the diagonal of a covariance: what rounding takes from its smallest eigenvalues
DENSE = 4096  # points whose covariance matrix is factorised
TERMS, ROOM = 1024, 12.0  # of the Fourier series: waves, and length scales from one end of the interval round to the other
AT_ONCE = 8192  # points whose waves are in memory together


@dataclass(frozen=True)
class GPLaw:
    """What a function is drawn from. length and period are on the axis of x; scale and noise are standard deviations."""

    kernel: str
    length: float
    scale: float
    noise: float
    period: float = 1.0


def draw_law(generator: torch.Generator) -> GPLaw:
    """A kernel, each as likely, and hyperparameters that are uniform in their logarithms."""
    u = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
    length, scale, noise, period = (
        low * (high / low) ** v for v, (low, high) in zip(u[1:], (LENGTHS, SCALES, NOISES, PERIODS))
    )
    return GPLaw(KERNELS[int(u[0] * len(KERNELS))], length, scale, noise, period)


def column(laws: Sequence[GPLaw], name: str, like: Tensor) -> Tensor:
    """One hyperparameter of each law as (B, 1, 1)."""
    return torch.tensor([getattr(law, name) for law in laws], dtype=like.dtype, device=like.device)[:, None, None]


def correlation(kernel: str, laws: Sequence[GPLaw], apart: Tensor) -> Tensor:
    """The kernel of laws that share it, at distances (B, ...) on the axis of x, without the scale."""
    length = column(laws, "length", apart)
    if kernel == "rbf":
        return (-0.5 * (apart / length).square()).exp()
    if kernel == "matern52":
        d = math.sqrt(5) * apart.abs() / length
        return (1 + d + d.square() / 3) * (-d).exp()
    return (-2 * ((math.pi * apart / column(laws, "period", apart)).sin() / length).square()).exp()


def covariance(laws: Sequence[GPLaw], a: Tensor, b: Tensor) -> Tensor:
    """Of the function at points a (B, n) with it at points b (B, m): (B, n, m), without noise."""
    found = torch.empty(*a.shape, b.shape[1], dtype=a.dtype, device=a.device)
    for kernel in KERNELS:
        rows = [i for i, law in enumerate(laws) if law.kernel == kernel]
        if rows:
            found[rows] = correlation(kernel, [laws[i] for i in rows], a[rows, :, None] - b[rows, None, :])
    return found * column(laws, "scale", a).square()


def factor(matrix: Tensor) -> Tensor:
    """Cholesky's; NaN where there is none, which no loss survives unseen. Nothing waits for the device."""
    found, info = torch.linalg.cholesky_ex(matrix)
    return torch.where((info == 0)[:, None, None], found, torch.nan)


def draw_functions(laws: Sequence[GPLaw], x: Tensor, normals: Tensor) -> Tensor:
    """Values (B, P) at the points x (B, P), float64. normals: (B, normals_for(P)), of which the functions are made."""
    if x.shape[1] <= DENSE:
        k = covariance(laws, x, x)
        k.diagonal(dim1=1, dim2=2).add_(JITTER * column(laws, "scale", x)[:, 0].square())
        return (factor(k) @ normals[..., None])[..., 0]
    parts = [[w @ n for w in waves(law, points)] for law, points, n in zip(laws, x, normals)]
    return torch.stack([torch.cat(row) for row in parts])


def normals_for(points: int) -> int:
    """How many normal numbers a function at so many points is made of."""
    return points if points <= DENSE else 2 * TERMS


def weights(law: GPLaw) -> tuple[Tensor, float]:
    """w (TERMS,) and T with kernel(d) = sum_j w_j cos(2 pi j d / T), on the CPU in float64."""
    j = torch.arange(TERMS, dtype=torch.float64)
    if law.kernel == "periodic":  # analytic, so that a sum over a grid of one period is exact
        grid = torch.arange(2 * TERMS, dtype=torch.float64)[None] * (law.period / (2 * TERMS))
        found = torch.fft.rfft(correlation("periodic", [law], grid[None])[0, 0]).real[:TERMS] / (2 * TERMS)
        around = law.period
    else:
        around = HIGH - LOW + ROOM * law.length
        s = 2 * math.pi * law.length * j / around
        if law.kernel == "rbf":
            density = math.sqrt(2 * math.pi) * (-0.5 * s.square()).exp()
        else:
            density = 16 / 3 * 5**2.5 / (5 + s.square()) ** 3
        found = density * law.length / around
    return law.scale**2 * found.clamp(min=0) * torch.where(j == 0, 1.0, 2.0), around


def waves(law: GPLaw, x: Tensor):
    """The waves at points x, scaled so that their products are the kernel: parts (n, 2 * TERMS) of at most AT_ONCE points."""
    w, around = weights(law)
    root = w.sqrt().to(x.device)
    turns = torch.arange(TERMS, dtype=x.dtype, device=x.device) * (2 * math.pi / around)
    for part in x.split(AT_ONCE):
        phase = part[:, None] * turns
        yield torch.cat([phase.cos() * root, phase.sin() * root], 1)


def predict(laws: Sequence[GPLaw], x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (B, N) of observations at points `at`, given y at x and the true law: the exact GP's."""
    noise = column(laws, "noise", x)[:, 0].square()
    if x.shape[1] + at.shape[1] > DENSE:
        rows = [regressed(*row) for row in zip(laws, x, y, at)]
        mean, variance = (torch.stack(of_rows) for of_rows in zip(*rows))
    else:
        k = covariance(laws, x, x)
        k.diagonal(dim1=1, dim2=2).add_(noise + JITTER * column(laws, "scale", x)[:, 0].square())
        root, across = factor(k), covariance(laws, x, at)
        whitened = torch.linalg.solve_triangular(root, torch.cat([y[..., None], across], 2), upper=False)
        mean = (whitened[..., 1:] * whitened[..., :1]).sum(1)
        variance = column(laws, "scale", x)[:, 0].square() - whitened[..., 1:].square().sum(1)
    return mean, (variance.clamp(min=0) + noise).sqrt()


def regressed(law: GPLaw, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """predict for one task with many points: Bayesian linear regression on the waves; the variance without noise."""
    gram = torch.eye(2 * TERMS, dtype=x.dtype, device=x.device) * law.noise**2
    seen = x.new_zeros(2 * TERMS)
    for part, values in zip(waves(law, x), y.split(AT_ONCE)):
        gram += part.mT @ part
        seen += part.mT @ values
    root = factor(gram[None])[0]
    mean_weights = torch.cholesky_solve(seen[:, None], root)
    found = []
    for part in waves(law, at):
        spread = torch.linalg.solve_triangular(root, part.mT, upper=False).square().sum(0)
        found.append(((part @ mean_weights)[:, 0], law.noise**2 * spread))
    mean, variance = (torch.cat(of_parts) for of_parts in zip(*found))
    return mean, variance


def log_density(y: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """Of a normal distribution, at each y."""
    return -0.5 * ((y - mean) / sd).square() - sd.log() - 0.5 * math.log(2 * math.pi)
