"""transformer-np: a neural process that is a transformer. It learns to predict functions from a few of their points.

A task is M context points, whose y is given, and N targets, whose y is asked for. All M + N are one sequence without order:
every point attends to the context alone, so that keys and values are the first M and targets do not see each other. Each
target gets a mixture of K Gaussians; the loss is the negative of its mean log-likelihood.

The variants compute the same function from the same parameters, and ask `ops` for norms, attention and the likelihood:
  plain   every projection its own, widths as they are, attention materialised, one mixture head after the other
  stock   QKV in one projection, PyTorch's own calls: SDPA, all mixture heads in batched products
  tuned   QKV in one projection, widths inside the MLPs padded, every op through `ops`: chosen kernels

The padding is zeros, in rows of `up` and in columns of `down`. silu(0) is 0 and meets zeros of `down`, so that neither part
gets a gradient and no optimizer moves it. `canonical` cuts it off.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.alignment import padded_size
from whet.choices import Choices, current
from whet.models import Model, TaskRecipe
from whet.models._chunked import chunked_mean, chunks_of
from whet.models._projections import cut, fill, joined, project
from whet.models._residual import ResidualBlock
from whet.op import autocast_of

VARIANTS = ("plain", "stock", "tuned")
ORACLE_SCORES = 2**29  # that are in memory at once where a step runs in float64, which only the oracle does: 4 GiB
SHARE = 0.5  # of the points that are context: from here on one product makes q, k and v of all points
FEATURES = 3  # of a point: x, y or 0, and whether it is context
UP, DOWN = ("up.weight", "heads.up"), ("down.weight", "heads.down")  # what ends so has a padded width: rows, or columns


@dataclass(frozen=True)
class TransformerNPConfig:
    width: int = 512
    layers: int = 12
    heads: int = 8
    ffn: int = 1365
    components: int = 10  # of the mixture, each with a head of its own
    eps: float = 1e-6

    def __post_init__(self):
        for name in ("width", "layers", "heads", "ffn", "components"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"transformer-np: {name} must be a whole number from 1 on, got {value!r}")
        if self.width % self.heads:
            raise ValueError(f"transformer-np: heads must be a divisor of width {self.width}, got {self.heads}")
        if type(self.eps) not in (int, float) or not 0 < self.eps < math.inf:
            raise ValueError(f"transformer-np: eps must be a number above 0, got {self.eps!r}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def splits(self) -> dict[str, dict[str, int]]:
        """How the fused projection is cut: fused name -> {plain name: rows}."""
        return {"qkv": dict.fromkeys("qkv", self.width)}

    def stored_ffn(self, variant: str) -> int:
        """The width inside the MLPs as a variant stores it."""
        return padded_size(self.ffn) if variant == "tuned" else self.ffn


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def attention(q, k, v):
    """Materialised attention: scores and their softmax in memory. What SDPA replaces."""
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def attention_in_blocks(q, k, v):
    """The same, a few queries at once, whose scores the backward makes again: float64 of 200,000 points has 2.6 TB of them."""
    rows = max(1, ORACLE_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return torch.cat([checkpoint(attention, some, k, v, use_reentrant=False) for some in q.split(rows, dim=2)], dim=2)


class NPAttention(nn.Module):
    """Queries of all points; keys and values of the first `context`, by slicing."""

    def __init__(self, c: TransformerNPConfig, variant: str):
        super().__init__()
        self.c, self.variant = c, variant
        if variant == "plain":
            self.q, self.k, self.v = (linear(c.width, c.width) for _ in range(3))
        else:
            self.qkv = linear(c.width, 3 * c.width)
        self.o = linear(c.width, c.width)

    def projected(self, y, context: int, start: int, ops):
        """q of the points from `start` on; k and v of the context."""
        if self.variant == "plain":
            return self.q(y), self.k(y[:, :context]), self.v(y[:, :context])
        if self.variant == "stock" or (start == 0 and SHARE * y.shape[1] < context):
            q, k, v = self.project(self.qkv, y, ops).chunk(3, dim=-1)
            return q, k[:, :context], v[:, :context]
        of_q, of_kv = self.qkv.weight.split((self.c.width, 2 * self.c.width))
        return project(y[:, start:], of_q, ops), *project(y[:, :context], of_kv, ops).chunk(2, dim=-1)

    def forward(self, y, context: int, ops, start: int = 0):
        """What attention adds to the points from `start` on."""
        c, (B, P, _) = self.c, y[:, start:].shape
        q, k, v = self.projected(y, context, start, ops)
        q, k, v = (t.unflatten(-1, (c.heads, c.head_dim)).transpose(1, 2) for t in (q, k, v))
        if self.variant == "plain":
            many = q.dtype == torch.float64 and B * c.heads * P * context > ORACLE_SCORES
            out = attention_in_blocks(q, k, v) if many else attention(q, k, v)
        elif self.variant == "stock":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = ops.attention(q, k, v)
        return self.project(self.o, out.transpose(1, 2).reshape(B, P, c.width), ops)

    def project(self, layer: nn.Linear, x, ops):
        return project(x, layer.weight, ops) if self.variant == "tuned" else layer(x)


class NPMlp(nn.Module):
    def __init__(self, c: TransformerNPConfig, variant: str):
        super().__init__()
        self.variant, ffn = variant, c.stored_ffn(variant)
        self.up, self.down = linear(c.width, ffn), linear(ffn, c.width)

    def forward(self, y, ops):
        if self.variant == "tuned":
            return ops.mlp(y, self.up.weight, self.down.weight, activation="silu")
        return self.down(F.silu(self.up(y)))


class NPBlock(ResidualBlock, nn.Module):
    def __init__(self, c: TransformerNPConfig, variant: str):
        super().__init__()
        self.eps, self.narrow = c.eps, variant == "tuned"
        self.norm1, self.norm2 = nn.Parameter(torch.ones(c.width)), nn.Parameter(torch.ones(c.width))
        self.attention, self.mlp = NPAttention(c, variant), NPMlp(c, variant)

    def forward(self, h, delta, context: int, ops, start: int = 0):
        """h is the residual stream, delta what the layer before adds to it, inside this one's norm; both from `start` on."""
        y, h = normed(h, delta, self.norm1, self.eps, ops, self.narrow)
        y, h = normed(h[:, start:], self.attention(y, context, ops, start), self.norm2, self.eps, ops, self.narrow)
        return h, self.mlp(y, ops)


def normed(h, delta, weight, eps: float, ops, narrow: bool):
    """(the norm of h + delta, h + delta)  narrow: the norm in the dtype of the products, all that it goes into."""
    out = autocast_of(h) if narrow else None
    return (ops.rms_norm(h, weight, eps, out), h) if delta is None else ops.add_rms_norm(delta, h, weight, eps, out)


class MixtureHeads(nn.Module):
    """One small MLP for each component of the mixture: the logit of its weight, mu and log_sigma."""

    def __init__(self, c: TransformerNPConfig, variant: str):
        super().__init__()
        self.variant, ffn = variant, c.stored_ffn(variant)
        self.up = nn.Parameter(torch.zeros(c.components, ffn, c.width))
        self.down = nn.Parameter(torch.zeros(c.components, 3, ffn))

    def forward(self, y, ops):
        """y (B, N, width) -> (B, N, K, 3)"""
        if self.variant == "tuned":
            return ops.grouped_mlp(y, self.up, self.down)
        if self.variant == "plain":
            heads = (F.linear(F.silu(F.linear(y, up)), down) for up, down in zip(self.up, self.down))
            return torch.stack([*heads], dim=-2)
        K, H, D = self.up.shape
        hidden = F.silu(F.linear(y, self.up.view(K * H, D))).view(-1, K, H)
        return torch.bmm(hidden.transpose(0, 1), self.down.mT).transpose(0, 1).reshape(*y.shape[:-1], K, 3)


class TransformerNP(nn.Module):
    def __init__(self, c: TransformerNPConfig, variant: str = "tuned", ops: Choices | None = None, seed: int = 42):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"transformer-np: variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        self.c, self.variant = c, variant
        self.ops = ops if ops is not None else {"plain": Choices(default="eager"), "stock": Choices()}.get(variant) or current()
        self.embed = linear(FEATURES, c.width)
        self.blocks = nn.ModuleList(NPBlock(c, variant) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.width))
        self.heads = MixtureHeads(c, variant)
        self.init_weights(seed)

    def init_weights(self, seed: int) -> None:
        """N(0, 0.02), the two projections back into the residual stream scaled by depth; the same for every variant.

        The three features are of size 1, so the embedding's weights are too. The components' means start apart through
        `heads.down`, which sums over `ffn` values.
        """
        c, generator, plain = self.c, torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        stds = {"embed.weight": 1.0, "heads.up": c.width**-0.5, "heads.down": c.ffn**-0.5}
        for name, t in sorted(canonical(c, dict(self.named_parameters())).items()):
            deep = 0.02 / (2 * c.layers) ** 0.5 if name.endswith((".o.weight", ".down.weight")) else 0.02
            drawn = torch.randn(t.shape, generator=generator) if t.dim() > 1 else torch.ones(t.shape)
            plain[name] = drawn * stds.get(name, deep) if t.dim() > 1 else drawn
        self.load(plain)

    def load(self, plain: Mapping[str, torch.Tensor]) -> None:
        """Set every parameter from those of the plain variant, as `canonical` gives them."""
        c, variant = self.c, self.variant
        fill("transformer-np", dict(self.named_parameters()), lambda t: canonical(c, t), lambda t: adapt(c, variant, t), plain)

    def embedded(self, features):
        """In float32 also where the rest is in 16 bits: a rounded x is another point."""
        w = self.embed.weight
        wide = torch.promote_types(w.dtype, torch.float32)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features.to(wide), w.to(wide)).to(w.dtype)

    def hidden(self, features, context: int):
        """What the heads read of each target: (B, N, width)."""
        h = self.embedded(features)
        delta: Any = None
        *others, last = self.blocks
        for block in others:
            h, delta = block(h, delta, context, self.ops)
        if self.variant == "tuned":  # no later layer attends to the context as the last one leaves it
            h, delta = last(h, delta, context, self.ops, context)
        else:
            h, delta = (t[:, context:] for t in last(h, delta, context, self.ops))
        return normed(h, delta, self.norm, self.c.eps, self.ops, self.variant == "tuned")[0]

    def mixture(self, features, context: int):
        """Of each target (logit of its weight, mu, log_sigma) of K components: (B, N, K, 3)."""
        return self.heads(self.hidden(features, context), self.ops)

    def loss(self, y, targets):
        """The negative mean log-likelihood of targets (B, N), by what the heads read of them."""
        def loss_of(y, targets):
            return -self.ops.gmm_log_prob(self.heads(y, self.ops), targets)

        if self.variant != "tuned":
            return loss_of(y, targets)
        K, H, _ = self.heads.up.shape
        count = chunks_of(targets.numel(), K * H * (autocast_of(y) or y.dtype).itemsize)
        return chunked_mean(loss_of, y, targets, [*self.heads.parameters()], count)

    def forward(self, features, targets):
        """The negative mean log-likelihood of targets (B, N), which are the last N of the points (B, M + N, 3)."""
        context = features.shape[1] - targets.shape[1]
        if context < 1 or targets.shape[1] < 1 or features.shape[2] != FEATURES:
            shapes = f"features (B, M + N, {FEATURES}) and targets (B, N), M and N from 1 on"
            raise ValueError(f"transformer-np: expected {shapes}, got {tuple(features.shape)} and {tuple(targets.shape)}")
        return self.loss(self.hidden(features, context), targets)

    @torch.no_grad()
    def predict(self, features, context: int):
        """Mean and standard deviation (B, N) of the mixture of each target."""
        z = self.mixture(features, context)
        logit, mu, log_sigma = z.to(torch.promote_types(z.dtype, torch.float32)).unbind(-1)
        share = logit.softmax(-1)
        mean = (share * mu).sum(-1)
        return mean, (share * ((2 * log_sigma).exp() + (mu - mean[..., None]).square())).sum(-1).sqrt()


def batch(c: Any, recipe: Any, device: str, step: int = 0) -> dict:
    """Features and targets of made-up functions: sums of three sines, with a little noise."""
    generator, shape = torch.Generator().manual_seed(recipe.seed + 1000 + step), (recipe.batch, recipe.seq_len)
    x = 4 * torch.rand(shape, generator=generator) - 2
    waves = torch.randn(3, 3, recipe.batch, 1, generator=generator)
    y = sum(a * torch.sin(2 * w * x + p) for a, w, p in waves) / 3**0.5 + 0.05 * torch.randn(shape, generator=generator)
    seen = (torch.arange(recipe.seq_len) < recipe.context).expand(shape).float()
    made = dict(features=torch.stack([x, y * seen, seen], -1), targets=y[:, recipe.context :].contiguous())
    return {name: t.to(device) for name, t in made.items()}


def canonical(c: TransformerNPConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """QKV cut into the plain projections, the padding inside the MLPs cut off."""
    return {
        name: t[..., : c.ffn, :] if name.endswith(UP) else t[..., : c.ffn] if name.endswith(DOWN) else t
        for name, t in cut(c.splits, named).items()
    }


def adapt(c: TransformerNPConfig, variant: str, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain projections joined into QKV where the variant has it in one, the MLPs padded with zeros where it pads."""
    named, more = joined(c.splits, c.splits if variant != "plain" else (), plain), c.stored_ffn(variant) - c.ffn
    for name, t in named.items() if more else ():
        if name.endswith(UP + DOWN):
            named[name] = F.pad(t, (0, 0, 0, more) if name.endswith(UP) else (0, more))
    return named


FULL = TransformerNPConfig()
SIZES = {
    "small": FULL, "small-b256": FULL, "mid": FULL, "mid-b8": FULL, "large": FULL,
    "tiny": TransformerNPConfig(width=64, layers=2, heads=4, ffn=85, components=4),
}
RECIPES = {
    "small": TaskRecipe(batch=32, seq_len=64 + 500, context=64),
    "small-b256": TaskRecipe(batch=256, seq_len=64 + 500, context=64),
    "mid": TaskRecipe(batch=1, seq_len=10_000 + 1_000, context=10_000),
    "mid-b8": TaskRecipe(batch=8, seq_len=10_000 + 1_000, context=10_000),
    "large": TaskRecipe(batch=1, seq_len=200_000 + 5_000, context=200_000),
    "tiny": TaskRecipe(batch=4, seq_len=16 + 24, context=16, lr=1e-3),
}
MODEL = Model(
    name="transformer-np", sizes=SIZES, recipes=RECIPES, build=TransformerNP, batch=batch, canonical=canonical, adapt=adapt,
    plain="plain", stock="stock", tuned="tuned", takes="tasks",
)
