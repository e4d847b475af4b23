"""Models as people write them in plain PyTorch, each with a batch to train on, for `whet step`, `optimize` and `doctor`.

whet step examples/plain_models.py:nano_gpt --only "as it is,whet.optimize"
whet doctor examples/plain_models.py:encoder

On a GPU four layers of 1024 in bfloat16 and 4 x 1024 tokens; on a CPU the same in small.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class PlainConfig:
    vocab: int = 32000
    width: int = 1024
    inner: int = 2816  # of a gated MLP
    layers: int = 4
    heads: int = 16
    kv_heads: int = 8
    rows: int = 4
    tokens: int = 1024
    dtype: torch.dtype = torch.bfloat16


SMALL = PlainConfig(vocab=96, width=64, inner=160, layers=2, heads=4, kv_heads=2, rows=2, tokens=24, dtype=torch.float32)


class CausalSelfAttention(nn.Module):
    def __init__(self, c: PlainConfig):
        super().__init__()
        self.heads = c.heads
        self.c_attn, self.c_proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, c: PlainConfig):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.attn = CausalSelfAttention(c)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT: learned positions, tied embeddings; returns logits and loss."""

    def __init__(self, c: PlainConfig):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.width), nn.Embedding(c.tokens, c.width)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f, self.lm_head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Encoder(nn.Module):
    """torch.nn's own encoder between an embedding and a classifier of rows; returns the loss."""

    def __init__(self, c: PlainConfig, classes: int = 8):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            c.width, c.heads, 4 * c.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.TransformerEncoder(layer, c.layers, norm=nn.LayerNorm(c.width), enable_nested_tensor=False)
        self.head = nn.Linear(c.width, classes)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(self.layers(self.embed(tokens)).mean(1)), labels)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class GroupedAttention(nn.Module):
    """Several query heads share one of keys and values."""

    def __init__(self, c: PlainConfig):
        super().__init__()
        self.head = c.width // c.heads
        self.wq, self.wo = nn.Linear(c.width, c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        self.wk, self.wv = (nn.Linear(c.width, c.kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    def __init__(self, c: PlainConfig):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(c.width), RMSNorm(c.width)
        self.attention, self.mlp = GroupedAttention(c), SwiGLU(c.width, c.inner)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class HandWritten(nn.Module):
    """A decoder of hand-written parts; returns the loss."""

    def __init__(self, c: PlainConfig):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.layers))
        self.norm, self.head = RMSNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def built(kind: type[nn.Module], device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, random tokens, and the token after each."""
    c = PlainConfig() if device == "cuda" else SMALL
    torch.manual_seed(0)
    with torch.device(device):
        model, tokens = kind(c).to(c.dtype), torch.randint(c.vocab, (c.rows, c.tokens))
    return model, tokens, tokens.roll(-1, 1)


def nano_gpt(device: str = "cpu"):
    """nanoGPT with a LayerNorm, biases and GELU."""
    model, tokens, following = built(NanoGPT, device)
    return model, dict(idx=tokens, targets=following)


def encoder(device: str = "cpu"):
    """nn.TransformerEncoder, and a class for each row."""
    model, tokens, _ = built(Encoder, device)
    return model, dict(tokens=tokens, labels=tokens[:, 0] % 8)


def hand_written(device: str = "cpu"):
    """RMSNorm, grouped-query attention and SwiGLU by hand."""
    model, tokens, following = built(HandWritten, device)
    return model, dict(tokens=tokens, labels=following)
