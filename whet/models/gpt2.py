"""GPT-2 and its faster relatives in one file: grouped heads, RoPE, QK norm, sliding windows, SwiGLU, several tokens ahead.

The variants compute the same function from the same parameters, and ask `ops` for every op:
  plain   every projection its own, the vocabulary as it is; `ops` are plain formulas: attention is materialised
  stock   QKV in one projection, the vocabulary padded; `ops` are PyTorch's own calls: SDPA
  tuned   gate and up in one projection too, norms in the dtype of the products; `ops` are the chosen kernels

The padded rows of the vocabulary are zeros with a logit of OFF: exp(OFF - max) is 0 in every dtype, so that they take no
probability and get no gradient, and all three products of the loss are aligned. A softcap would lift OFF to -softcap: there
the loss reads the first rows alone. `canonical` shows none of this: parameters there have the vocabulary's own size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.alignment import padded_size
from whet.choices import Choices, current
from whet.models import Model, Recipe
from whet.models._hf import LLAMA_NAMES, config_of, llama_config, renamed
from whet.models._projections import cut, fill, joined, project
from whet.models._residual import ResidualBlock
from whet.models.tiny_llama import batch
from whet.op import autocast_of
from whet.ops._fp8 import refused as fp8_refused
from whet.ops.activated_linear import act
from whet.ops.rope import tables
from whet.padding import OFF

VARIANTS = {"plain": (), "stock": ("qkv",), "tuned": ("qkv", "gate_up")}  # what each has in one projection
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2", "silu": "silu", "swiglu": "silu"}  # in Transformers
ROWS = ("embed.weight", "head.weight")  # a row for each token


@dataclass(frozen=True)
class GPT2Config:
    vocab: int = 50257
    width: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int = 12  # fewer than heads: grouped; 1: one for all
    mlp_ratio: float = 4.0  # of the width, rounded to a multiple of 64; SwiGLU has a third matrix: 8/3 is as large as 4
    activation: str = "gelu"
    positions: str = "rope"  # or "learned"
    norm: str = "rms"  # or "layer"
    qk_norm: bool = True  # RMSNorm of each query and key head, without weights
    pattern: str = "L"  # over the layers, again and again: S sees a sliding window, L everything before
    window: int = 256  # tokens that S sees, itself among them
    softcap: float | None = None  # of the logits
    tied: bool = True  # the head is the embedding
    bias: bool = False  # of the linear layers and LayerNorms
    narrow_residual: bool = False  # under autocast the residual stream is as wide as a product's operands: half the bytes
    fp8_head: bool = False  # in training under bfloat16 autocast the head's products run in FP8, where the GPU has it
    mtp: int = 0  # further tokens that are predicted in training: 2, 3, ... ahead
    mtp_weight: float = 0.3  # of their losses, shared among them
    theta: float = 10000.0
    eps: float = 1e-6
    max_positions: int = 1024

    def __post_init__(self):
        def check(names: str, fine: Any, wanted: str) -> None:
            for name in names.split():
                if not fine(getattr(self, name)):
                    raise ValueError(f"gpt2: {name} must be {wanted}, got {getattr(self, name)!r}")

        def above_0(x: Any) -> bool:
            return type(x) in (int, float) and 0 < x < math.inf

        sizes = "vocab width layers heads kv_heads window max_positions"
        check(sizes, lambda x: type(x) is int and x > 0, "a whole number from 1 on")
        check("mtp", lambda x: type(x) is int and x >= 0, "a whole number from 0 on")
        check("mlp_ratio mtp_weight theta eps", above_0, "a number above 0")
        check("softcap", lambda x: x is None or above_0(x), "None or a number above 0")
        check("qk_norm tied bias narrow_residual fp8_head", lambda x: type(x) is bool, "true or false")
        check("activation", lambda x: x in [*ACTIVATIONS], f"one of {', '.join(ACTIVATIONS)}")
        check("positions", lambda x: x in ("rope", "learned"), "'rope' or 'learned'")
        check("norm", lambda x: x in ("rms", "layer"), "'rms' or 'layer'")
        check("pattern", lambda x: isinstance(x, str) and x and not x.strip("SL"), "letters S and L, such as SSSL")
        parts = 2 if self.positions == "rope" else 1  # a head's channels are rotated in pairs
        check("heads", lambda x: self.width % (parts * x) == 0, f"a divisor of width {self.width} / {parts}")
        check("kv_heads", lambda x: self.heads % x == 0, f"a divisor of heads {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """The width inside the MLP."""
        return max(64, round(self.mlp_ratio * self.width / 64) * 64)

    @property
    def windows(self) -> list[int | None]:
        """What each layer sees: so many tokens, or None for all."""
        return [self.window if self.pattern[i % len(self.pattern)] == "S" else None for i in range(self.layers)]

    @property
    def splits(self) -> dict[str, dict[str, int]]:
        """How the fused projections are cut: fused name -> {plain name: rows}."""
        kv = self.kv_heads * self.head_dim
        return {"qkv": {"q": self.width, "k": kv, "v": kv}, "gate_up": {"gate": self.hidden, "up": self.hidden}}


class GPT2Norm(nn.Module):
    """narrow: its result in the dtype of the products, where it goes into nothing else."""

    def __init__(self, c: GPT2Config, narrow: bool):
        super().__init__()
        self.kind, self.eps, self.narrow = c.norm, c.eps, narrow
        self.weight = nn.Parameter(torch.ones(c.width))
        self.bias = nn.Parameter(torch.zeros(c.width)) if c.bias and c.norm == "layer" else None

    def forward(self, h, delta, ops):
        """(the norm of h + delta, h + delta)"""
        weights = (self.weight,) if self.kind == "rms" else (self.weight, self.bias)
        how = *weights, self.eps, autocast_of(h) if self.narrow else None
        if delta is None:
            return (ops.rms_norm if self.kind == "rms" else ops.layer_norm)(h, *how), h
        return (ops.add_rms_norm if self.kind == "rms" else ops.add_layer_norm)(delta, h, *how)


class GPT2Block(ResidualBlock, nn.Module):
    def __init__(self, c: GPT2Config, variant: str, window: int | None):
        super().__init__()
        self.c, self.window, self.fused, narrow = c, window, VARIANTS[variant], variant == "tuned"
        rows = dict(c.splits["qkv"]) | (c.splits["gate_up"] if c.activation == "swiglu" else {"up": c.hidden})
        for fused in self.fused:
            if all(part in rows for part in c.splits[fused]):
                rows[fused] = sum(rows.pop(part) for part in c.splits[fused])
        for name, n in rows.items():
            self.add_module(name, nn.Linear(c.width, n, bias=c.bias))
        self.o, self.down = nn.Linear(c.width, c.width, bias=c.bias), nn.Linear(c.hidden, c.width, bias=c.bias)
        self.norm1, self.norm2, self.narrow = GPT2Norm(c, narrow), GPT2Norm(c, narrow), narrow

    def project(self, name: str, x, ops):
        layer = self.get_submodule(name)
        return project(x, layer.weight, ops) if layer.bias is None else ops.linear_bias(x, layer.weight, layer.bias)

    def attend(self, y, rotation, ones, ops, cache):
        """rotation: cos and sin from the first token's position on, or None; ones: the weights of the QK norm."""
        c, (B, T, _) = self.c, y.shape
        if "qkv" in self.fused:
            parts = self.project("qkv", y, ops).split([*c.splits["qkv"].values()], dim=-1)
        else:
            parts = [self.project(name, y, ops) for name in "qkv"]
        q, k, v = (t.view(B, T, -1, c.head_dim).transpose(1, 2) for t in parts)
        if rotation and c.qk_norm:
            q, k = ops.qk_norm_rope(q, k, ones, ones, *rotation, 0, c.eps)
        elif rotation:
            q, k = ops.rope(q, k, *rotation)
        elif c.qk_norm:
            out = autocast_of(q) if self.narrow else None  # PyTorch's own norm under autocast is float32
            q, k = ops.rms_norm(q, ones, c.eps, out), ops.rms_norm(k, ones, c.eps, out)
        if cache is None:
            out = ops.attention(q, k, v, causal=True, window=self.window if self.window and self.window < T else None)
        else:
            out = cache.attend(q, k, v, self.window, ops)
        return self.project("o", out.transpose(1, 2).reshape(B, T, c.width), ops)

    def mlp(self, y, ops):
        kind = self.c.activation
        if kind == "swiglu":
            halves = ["gate_up"] if "gate_up" in self.fused else ["gate", "up"]
            return self.project("down", ops.swiglu(*(self.project(name, y, ops) for name in halves)), ops)
        x = self.project("up", y, ops)
        if self.down.bias is None:
            return ops.activated_linear(x, self.down.weight, kind)
        x = ops.gelu(x, "tanh" if kind == "gelu_tanh" else "none") if "gelu" in kind else act(x, kind)
        return self.project("down", x, ops)

    def forward(self, h, delta, rotation, ones, ops, cache=None):
        """h is the residual stream, delta what the layer before adds to it, inside this one's norm."""
        y, h = self.norm1(h, delta, ops)
        y, h = self.norm2(h, self.attend(y, rotation, ones, ops, cache), ops)
        return h, self.mlp(y, ops)


class TokenAhead(nn.Module):
    """What one more token is predicted from: the last layer's output, and a projection of it, behind a norm."""

    def __init__(self, c: GPT2Config, narrow: bool):
        super().__init__()
        self.proj, self.norm = nn.Linear(c.width, c.width, bias=False), GPT2Norm(c, narrow)

    def forward(self, y, ops):
        return self.norm(y, self.proj(y), ops)[0]


class GPT2(nn.Module):
    ones: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, c: GPT2Config, variant: str = "tuned", ops: Choices | None = None, seed: int = 42):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"gpt2: variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        self.c, self.variant = c, variant
        self.ops = ops if ops is not None else {"plain": Choices(default="eager"), "stock": Choices()}.get(variant) or current()
        rows = c.vocab if variant == "plain" else padded_size(c.vocab)
        self.embed = nn.Embedding(rows, c.width)
        self.pos = nn.Embedding(c.max_positions, c.width) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(GPT2Block(c, variant, window) for window in c.windows)
        narrow = variant == "tuned"
        self.norm = GPT2Norm(c, narrow and not c.mtp)  # whose result TokenAhead adds to
        self.head = None if c.tied else nn.Linear(c.width, rows, bias=False)
        self.mtp = nn.ModuleList(TokenAhead(c, narrow) for _ in range(c.mtp))
        off = F.pad(torch.zeros(c.vocab), (0, rows - c.vocab), value=OFF) if rows > c.vocab else None
        cos, sin = tables(c.max_positions, c.head_dim, c.theta) if c.positions == "rope" else (None, None)
        for name, buffer in dict(off=off, cos=cos, sin=sin, ones=torch.ones(c.head_dim)).items():
            self.register_buffer(name, buffer, persistent=False)
        self.init_weights(seed)

    def init_weights(self, seed: int) -> None:
        """N(0, 0.02), the two projections back into the residual stream scaled by depth; the same for every variant."""
        generator, plain = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        for name, t in sorted(canonical(self.c, dict(self.named_parameters())).items()):
            std = 0.02 / (2 * self.c.layers) ** 0.5 if name.endswith((".o.weight", ".down.weight")) else 0.02
            fill = 0.0 if name.endswith("bias") else 1.0
            plain[name] = torch.randn(t.shape, generator=generator) * std if t.dim() == 2 else torch.full(t.shape, fill)
        self.load(plain)

    def load(self, plain: Mapping[str, torch.Tensor]) -> None:
        """Set every parameter from those of the plain variant, as `canonical` and `from_hf` give them."""
        c, variant = self.c, self.variant
        fill("gpt2", dict(self.named_parameters()), lambda t: canonical(c, t), lambda t: adapt(c, variant, t), plain)

    def hidden(self, tokens, cache=None):
        """What the head reads of each token: (B, T, width). cache: as logits takes it."""
        c, start = self.c, cache[0].length if cache else 0
        end = start + tokens.shape[1]
        if c.max_positions < end:
            raise ValueError(f"gpt2: tokens must be at most {c.max_positions} a row (max_positions), got {end}")
        h, delta = self.embed(tokens), None
        if self.pos is not None:
            h = h + self.pos.weight[start:end]
        if c.narrow_residual:
            h = h.to(autocast_of(h) or h.dtype)
        rotation = (self.cos[start:], self.sin[start:]) if c.positions == "rope" else None
        ones = self.ones.to(autocast_of(h) or h.dtype)  # as queries are: stock norms take no other weights
        for i, block in enumerate(self.blocks):
            h, delta = block(h, delta, rotation, ones, self.ops, cache[i] if cache else None)
        return self.norm(h, delta, self.ops)[0]

    def loss(self, y, labels):
        """The mean cross-entropy of labels, which the padded rows have no part in."""
        w, y = (self.head or self.embed).weight, y.to(autocast_of(y) or y.dtype)  # as the product takes it
        if self.training and self.c.fp8_head and autocast_of(y) == torch.bfloat16 and not fp8_refused(y.device.type):
            return self.ops.linear_cross_entropy(y, w[: self.c.vocab], labels, softcap=self.c.softcap, precision="fp8")
        if self.c.softcap is None:
            return self.ops.linear_cross_entropy(y, w, labels, b=None if self.off is None else self.off.to(y.dtype))
        return self.ops.linear_cross_entropy(y, w[: self.c.vocab], labels, softcap=self.c.softcap)

    def forward(self, tokens, labels):
        """The loss of labels, which are tokens shifted once by whoever made the batch; in training of later tokens too."""
        y = self.hidden(tokens)
        loss = self.loss(y, labels)
        if not self.training or not self.c.mtp:
            return loss
        if self.c.mtp >= labels.shape[1]:
            raise ValueError(f"gpt2: mtp must be less than the {labels.shape[1]} tokens of a row, got {self.c.mtp}")
        for i, ahead in enumerate(self.mtp, 1):
            later = F.pad(labels[:, i:], (0, i), value=-100)  # labels that do not count
            loss = loss + self.c.mtp_weight / self.c.mtp * self.loss(ahead(y, self.ops), later)
        return loss

    @torch.no_grad()
    def logits(self, tokens, last: bool = False, cache=None):
        """(B, T, vocab); last: of the last token alone; cache: a LayerCache for each layer, of the tokens before these."""
        y = self.hidden(tokens, cache)
        y = y[:, -1:] if last else y
        z = F.linear(y, (self.head or self.embed).weight)[..., : self.c.vocab]
        return z if self.c.softcap is None else self.c.softcap * torch.tanh(z / self.c.softcap)


def canonical(c: GPT2Config, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused projections cut into the plain ones, the padding of the vocabulary cut off."""
    return {name: t[: c.vocab] if name in ROWS else t for name, t in cut(c.splits, named).items()}


def adapt(c: GPT2Config, variant: str, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain projections joined into those that the variant fuses, the vocabulary padded with zeros."""
    named = joined(c.splits, VARIANTS[variant], plain)
    for name in ROWS:
        if name in named and variant != "plain":
            named[name] = F.pad(named[name], (0, 0, 0, padded_size(c.vocab) - c.vocab))
    return named


GPT2_NAMES = {  # ours: Transformers'
    "embed": "wte", "pos": "wpe", "blocks": "h", "norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj",
    "up": "mlp.c_fc", "down": "mlp.c_proj", "norm": "ln_f", "head": "lm_head",
}


def home(c: GPT2Config) -> str:
    """The architecture of Transformers that computes this; where there is none, an error names the field that has no place."""
    gated = c.activation == "swiglu"
    if c.positions == "learned":
        arch = "GPT2"
        odd = dict(norm=c.norm != "layer", qk_norm=c.qk_norm, activation=gated, kv_heads=c.kv_heads != c.heads)
    else:
        arch = ("Qwen3" if c.qk_norm else "Llama") if gated else "Apertus" if c.qk_norm else "Arcee"
        odd = dict(norm=c.norm != "rms", bias=c.bias and c.qk_norm)
    odd |= dict(pattern=arch != "Qwen3" and any(c.windows), softcap=c.softcap is not None)
    if bad := [name for name, is_odd in odd.items() if is_odd]:
        nearest = f"{arch}, the nearest architecture in Transformers"
        raise ValueError(f"gpt2: {bad[0]} {getattr(c, bad[0])!r} has no counterpart in {nearest}")
    return arch


def from_hf(state: Mapping[str, torch.Tensor], c: GPT2Config) -> dict[str, torch.Tensor]:
    """Parameters of a GPT2LMHeadModel, or of its checkpoint, as `load` takes them."""
    if home(c) != "GPT2" or not c.bias:
        raise ValueError(f"gpt2: weights of GPT-2 need positions 'learned' and bias, got {c.positions!r} and {c.bias}")
    named = {}
    for name, t in state.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")) or (c.tied and name == "lm_head.weight"):  # masks; the embedding
            continue
        name = name.removeprefix("transformer.")
        for ours, theirs in GPT2_NAMES.items():
            name = name.replace(f"{theirs}.", f"{ours}.")
        named[name] = t.t() if t.dim() == 2 and name.startswith("blocks") else t  # Conv1D is (in, out)
    return canonical(c, named)


def to_hf(c: GPT2Config, named: Mapping[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and parameters for Transformers, from any variant's. The heads for further tokens stay behind."""
    arch, act = home(c), ACTIVATIONS[c.activation]
    state = {n: t for n, t in canonical(c, named).items() if not n.startswith("mtp.")}
    if arch == "GPT2":
        state = joined(c.splits, ("qkv",), state)
        if not c.bias:  # there, every linear layer and norm has one
            inner = {n: t for n, t in state.items() if n.startswith(("blocks", "norm"))}
            state |= {n.replace("weight", "bias"): t.new_zeros(t.shape[0]) for n, t in inner.items()}
        state = {n: t.t() if n.startswith("blocks") and t.dim() == 2 else t for n, t in state.items()}  # Conv1D is (in, out)
        config = config_of(arch, "LMHeadModel", c.vocab, c.tied)
        config |= dict(n_positions=c.max_positions, n_embd=c.width, n_layer=c.layers, n_head=c.heads, n_inner=c.hidden)
        config |= dict(activation_function=act, layer_norm_epsilon=c.eps, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return config, renamed(state, GPT2_NAMES, "transformer")
    names = LLAMA_NAMES | (dict(norm1="attention_layernorm", norm2="feedforward_layernorm") if arch == "Apertus" else {})
    norms = [f"blocks.{i}.self_attn.{n}_norm.weight" for i in range(c.layers) for n in "qk" if c.qk_norm]
    state |= {n: state["norm.weight"].new_ones(c.head_dim) for n in norms}
    config = llama_config(arch, c, c.width, c.hidden, act, c.tied, c.bias)
    if any(c.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in c.windows]
        config |= dict(use_sliding_window=True, sliding_window=c.window, layer_types=kinds)
    return config, renamed(state, names)


SIZES = {
    "d12": GPT2Config(),
    "d12-gqa": GPT2Config(kv_heads=4),
    "d12-mqa": GPT2Config(kv_heads=1),
    "d12-swiglu": GPT2Config(activation="swiglu", mlp_ratio=8 / 3),
    "d12-hybrid": GPT2Config(pattern="SSSL"),
    "d12-fast": GPT2Config(
        kv_heads=4, mlp_ratio=3.0, activation="relu2", pattern="SSSL", narrow_residual=True, fp8_head=True
    ),
    "llm-med": GPT2Config(vocab=49152, width=384, layers=6, heads=8, kv_heads=8, activation="silu", qk_norm=False),
    "hf": GPT2Config(activation="gelu_tanh", positions="learned", norm="layer", qk_norm=False, bias=True, eps=1e-5),
    "tiny": GPT2Config(vocab=257, width=128, layers=4, heads=4, kv_heads=4),
}
RECIPES = {size: Recipe(batch=32, seq_len=1024, lr=1.8e-3) for size in SIZES} | {
    "llm-med": Recipe(batch=16, seq_len=256, lr=1e-3), "hf": Recipe(batch=16, seq_len=1024, lr=6e-4), "tiny": Recipe(lr=1e-3),
}
MODEL = Model(
    name="gpt2", sizes=SIZES, recipes=RECIPES, build=GPT2, batch=batch, canonical=canonical, adapt=adapt,
    plain="plain", stock="stock", tuned="tuned", samples=True, to_hf=to_hf,
)
