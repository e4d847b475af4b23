"""A tiny Llama in one file: RMSNorm, RoPE, grouped heads, SwiGLU, tied embedding. It asks `ops` for every op.

Three variants compute the same function from the same parameters:
  v1  separate projections, attention materialised, every op its plain formula
  v2  fused QKV projection and SDPA, stock calls
  v3  fused QKV and gate/up projections, norms in the dtype of the products, every op through `ops`: chosen kernels

python -m whet.models.tiny_llama --batch-size 8 --seq-len 128 --num-steps 20
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.choices import Choices, current
from whet.measure import Stopwatch
from whet.models import Model, Recipe
from whet.models._hf import LLAMA_NAMES, llama_config, renamed
from whet.models._projections import cut, joined, project
from whet.models._residual import ResidualBlock
from whet.op import autocast_of
from whet.ops.rope import tables
from whet.workload import PHASES, Workload

VARIANTS = {"v1": (), "v2": ("qkv",), "v3": ("qkv", "gate_up")}  # what each has in one projection


@dataclass(frozen=True)
class TinyLlamaConfig:
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 1000
    ffn_mult: int = 4
    theta: float = 10000.0
    eps: float = 1e-6
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """The width inside the MLP."""
        return self.ffn_mult * self.hidden

    @property
    def splits(self) -> dict[str, dict[str, int]]:
        """How the fused projections are cut: fused name -> {plain name: rows}."""
        kv = self.kv_heads * self.head_dim
        return {"qkv": {"q": self.hidden, "k": kv, "v": kv}, "gate_up": {"gate": self.ffn, "up": self.ffn}}


SIZES = {
    "small": TinyLlamaConfig(),
    "tiny": TinyLlamaConfig(hidden=256, layers=4),
    "medium": TinyLlamaConfig(hidden=1024, layers=12),
    "large": TinyLlamaConfig(hidden=2048, layers=16),
}
RECIPES = {
    "small": Recipe(), "tiny": Recipe(), "medium": Recipe(batch=16, seq_len=512), "large": Recipe(seq_len=1024),
}


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def attention(q, k, v):
    """Materialised causal attention: scores, mask, softmax, all in memory. What SDPA replaces."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class TinyLlamaBlock(ResidualBlock, nn.Module):
    def __init__(self, c: TinyLlamaConfig, variant: str):
        super().__init__()
        self.c, self.variant = c, variant
        kv, ffn = c.kv_heads * c.head_dim, c.ffn
        self.norm1, self.norm2 = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))
        if variant == "v1":
            self.q, self.k, self.v = linear(c.hidden, c.hidden), linear(c.hidden, kv), linear(c.hidden, kv)
        else:
            self.qkv = linear(c.hidden, c.hidden + 2 * kv)
        self.o = linear(c.hidden, c.hidden)
        if variant == "v3":
            self.gate_up = linear(c.hidden, 2 * ffn)
        else:
            self.gate, self.up = linear(c.hidden, ffn), linear(c.hidden, ffn)
        self.down = linear(ffn, c.hidden)

    def project(self, name: str, x, ops):
        layer = self.get_submodule(name)
        return project(x, layer.weight, ops) if self.variant == "v3" else layer(x)

    def attend(self, y, cos, sin, ops, cache):
        c, (B, S, _) = self.c, y.shape
        if self.variant == "v1":
            q, k, v = self.q(y), self.k(y), self.v(y)
        else:
            q, k, v = self.project("qkv", y, ops).split([*c.splits["qkv"].values()], dim=-1)
        q, k, v = (t.view(B, S, -1, c.head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = ops.rope(q, k, cos, sin)
        if cache is not None:
            out = cache.attend(q, k, v, None, ops)
        elif self.variant == "v1":
            out = attention(q, k, v)
        elif self.variant == "v2":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.heads != c.kv_heads)
        else:
            out = ops.attention(q, k, v, causal=True)
        return self.project("o", out.transpose(1, 2).reshape(B, S, c.hidden), ops)

    def mlp(self, y, ops):
        if self.variant != "v3":
            return self.down(ops.swiglu(self.gate(y), self.up(y)))
        return ops.gated_linear(self.project("gate_up", y, ops), None, self.down.weight)

    def forward(self, h, delta, cos, sin, ops, cache=None):
        """h is the residual stream, delta what the layer before would add to it: v3 adds inside the norm."""
        if self.variant != "v3":
            h = h if delta is None else h + delta
            h = h + self.attend(ops.rms_norm(h, self.norm1, self.c.eps), cos, sin, ops, cache)
            return h + self.mlp(ops.rms_norm(h, self.norm2, self.c.eps), ops), None
        how = self.c.eps, autocast_of(h)
        y, h = (ops.rms_norm(h, self.norm1, *how), h) if delta is None else ops.add_rms_norm(delta, h, self.norm1, *how)
        y, h = ops.add_rms_norm(self.attend(y, cos, sin, ops, cache), h, self.norm2, *how)
        return h, self.mlp(y, ops)


class TinyLlama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, c: TinyLlamaConfig, variant: str = "v3", ops: Choices | None = None, seed: int = 42):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"tiny-llama: variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        if min(c.hidden, c.heads, c.kv_heads) < 1 or c.hidden % c.heads or c.heads % c.kv_heads or c.head_dim % 2:
            heads = f"{c.heads} heads of even width, and those into {c.kv_heads} groups"
            raise ValueError(f"tiny-llama: hidden {c.hidden} must split into {heads}")
        self.c, self.variant = c, variant
        self.ops = ops if ops is not None else {"v1": Choices(default="eager"), "v2": Choices()}.get(variant) or current()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(TinyLlamaBlock(c, variant) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))
        cos, sin = tables(c.max_positions, c.head_dim, c.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(seed)

    def init_weights(self, seed: int):
        """N(0, 0.02), the two projections back into the residual stream scaled by depth; the loss starts at 6.9, not 478."""
        generator = torch.Generator().manual_seed(seed)
        named = {n: p for n, p in self.named_parameters() if p.dim() == 2}
        plain = {}
        for name in sorted(MODEL.canonical(self.c, named)):  # drawn under the plain names: every variant starts the same
            shape = MODEL.canonical(self.c, named)[name].shape
            std = 0.02 / (2 * self.c.layers) ** 0.5 if name.endswith(("o.weight", "down.weight")) else 0.02
            plain[name] = torch.randn(shape, generator=generator) * std
        with torch.no_grad():
            for name, value in MODEL.adapt(self.c, self.variant, plain).items():
                named[name].copy_(value)

    def final(self, tokens, cache=None):
        """What the head reads of each token: (B, T, hidden). cache: as logits takes it."""
        h, delta, start = self.embed(tokens), None, cache[0].length if cache else 0
        cos, sin = (t[start : start + tokens.shape[1]] for t in (self.cos, self.sin))
        for i, block in enumerate(self.blocks):
            h, delta = block(h, delta, cos, sin, self.ops, cache[i] if cache else None)
        if delta is not None:
            return self.ops.add_rms_norm(delta, h, self.norm, self.c.eps, autocast_of(h))[0]
        return self.ops.rms_norm(h, self.norm, self.c.eps)

    @torch.no_grad()
    def logits(self, tokens, last: bool = False, cache=None):
        """(B, T, vocab); last: of the last token alone; cache: a LayerCache for each layer, of the tokens before these."""
        y = self.final(tokens, cache)
        return F.linear(y[:, -1:] if last else y, self.embed.weight)

    def forward(self, tokens, labels):
        """The mean cross-entropy of labels, which are tokens shifted once, by whoever made the batch."""
        y = self.final(tokens)
        if self.variant == "v3":
            return self.ops.linear_cross_entropy(y, self.embed.weight, labels)
        return self.ops.cross_entropy(F.linear(y, self.embed.weight), labels)


def batch(c: Any, recipe: Recipe, device: str, step: int = 0) -> dict:
    """Tokens and labels of a made-up language: each token has four likely successors, so there is something to learn."""
    generator = torch.Generator().manual_seed(recipe.seed + 1000 + step)
    successors = torch.randint(c.vocab, (c.vocab, 4), generator=torch.Generator().manual_seed(recipe.seed))
    text = torch.randint(c.vocab, (recipe.batch, recipe.seq_len + 1), generator=generator)
    which = torch.randint(5, text.shape, generator=generator)  # 4: a token of its own, unforeseen
    for t in range(1, text.shape[1]):
        follows = successors[text[:, t - 1], which[:, t].clamp(max=3)]
        text[:, t] = torch.where(which[:, t] < 4, follows, text[:, t])
    text = text.to(device)
    return dict(tokens=text[:, :-1].contiguous(), labels=text[:, 1:].contiguous())


def canonical(c: TinyLlamaConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused projections cut into the plain ones."""
    return cut(c.splits, named)


def adapt(c: TinyLlamaConfig, variant: str, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain projections joined into those that the variant fuses."""
    return joined(c.splits, VARIANTS[variant], plain)


def to_hf(c: TinyLlamaConfig, named: Mapping[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and parameters of Transformers' Llama, from any variant's."""
    state = {n if t.dim() == 2 else f"{n}.weight": t for n, t in canonical(c, named).items()}  # norms there are modules
    return llama_config("Llama", c, c.hidden, c.ffn, "silu", tied=True, bias=False), renamed(state, LLAMA_NAMES)


MODEL = Model(
    name="tiny-llama", sizes=SIZES, recipes=RECIPES, build=TinyLlama, batch=batch, canonical=canonical, adapt=adapt,
    plain="v1", stock="v2", tuned="v3", samples=True, to_hf=to_hf,
)


def train(c: TinyLlamaConfig, recipe: Recipe, variant: str, steps: int, device: str) -> dict:
    """Train for real and time each phase with synchronisation; raises if any parameter is without a gradient."""
    for name, value in (("batch", recipe.batch), ("seq_len", recipe.seq_len), ("layers", c.layers), ("steps", steps)):
        if value < 1:
            raise ValueError(f"tiny-llama: {name} must be at least 1, got {value}")
    if recipe.seq_len > c.max_positions:
        raise ValueError(f"tiny-llama: seq_len must be at most {c.max_positions}, got {recipe.seq_len}")
    model = TinyLlama(c, variant, seed=recipe.seed).to(device)
    work = Workload(model, optimizer=torch.optim.AdamW(model.parameters(), lr=recipe.lr))
    watch, loss, warm = Stopwatch(device), None, min(3, steps - 1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        work.kwargs = batch(c, recipe, device, step)
        with watch("batch"):
            loss = work.step(watch)
        if step == 0 and (dead := work.without_gradient()):
            raise RuntimeError(f"tiny-llama[{variant}]: no gradient reaches {', '.join(dead[:5])} ({len(dead)} in all)")
    assert loss is not None
    result: dict = {f"{part}_ms": watch.ms(part, warm) for part in ("batch", *PHASES)}
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    speed = recipe.batch / result["batch_ms"] * 1e3
    return result | {"loss": loss.item(), "samples_per_s": speed, "peak_mb": peak, "warm_up": warm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default 8)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sequence (default 128)")
    parser.add_argument("--num-steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--hidden-dim", type=int, default=512, help="width (default 512)")
    parser.add_argument("--num-layers", type=int, default=8, help="layers (default 8)")
    parser.add_argument("--num-heads", type=int, default=8, help="query heads; half as many key/value heads (default 8)")
    parser.add_argument("--variant", choices=VARIANTS, default="v3", help="which form of the model (default v3)")
    a = parser.parse_args()
    c = TinyLlamaConfig(hidden=a.hidden_dim, layers=a.num_layers, heads=a.num_heads, kv_heads=max(1, a.num_heads // 2))
    recipe = Recipe(a.batch_size, a.seq_len)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        r = train(c, recipe, a.variant, a.num_steps, device)
    except ValueError as e:
        parser.error(str(e))
    timed = f"{a.num_steps} steps, medians without the first {r['warm_up']}"
    print(f"tiny-llama {a.variant} on {device}: batch {recipe.batch} x {recipe.seq_len}, {timed}")
    print(f"Final loss: {r['loss']:.4f}")
    print(f"Average training speed: {r['samples_per_s']:.1f} samples/sec")
    for part in ("batch", *PHASES):
        print(f"Average {part} time: {r[f'{part}_ms']:.1f} ms")
    print(f"Peak memory usage: {r['peak_mb']:.1f} MB" if r["peak_mb"] else "Peak memory usage: not measured on a CPU")


if __name__ == "__main__":
    main()
