"""Qwen3 and its relatives in one file: Qwen2, Llama and Mistral differ by a few fields of Qwen3Config.

forward   the plain meaning, without a cache: logits, or the loss where labels are given
extend    the same over a cache of keys and values: any number of new tokens for each row; what prefill runs
step      extend for a few tokens a row, by the decode ops; choose: the likeliest next token
logits    the final norm and the head

Every op is asked of `ops`, so the variants are one set of parameters: plain (formulas), stock (PyTorch's own calls), tuned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.choices import Choices, current
from whet.models import Model, Recipe
from whet.models._rotary import SCALINGS, scaling_of, tables
from whet.models.tiny_llama import batch
from whet.ops._weights import dense

FAMILIES: dict[str, dict] = {  # what the architecture says that its config.json does not
    "Qwen3ForCausalLM": dict(name="qwen3", qk_norm=True, qkv_bias=False),
    "Qwen2ForCausalLM": dict(name="qwen2", qk_norm=False, qkv_bias=True),
    "LlamaForCausalLM": dict(name="llama", qk_norm=False, qkv_bias=False),
    "MistralForCausalLM": dict(name="mistral", qk_norm=False, qkv_bias=False),
}
VARIANTS = ("plain", "stock", "tuned")


@dataclass(frozen=True)
class Qwen3Config:
    name: str = "qwen3"
    vocab: int = 151936
    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 3072
    theta: float = 1e6
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)  # as in config.json: rope_type, factor, ...
    eps: float = 1e-6
    tied: bool = True  # the head is the embedding
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None  # a token sees this many, itself among them
    max_positions: int = 40960
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions")
        if bad := [n for n in sizes if getattr(self, n) < 1]:
            raise ValueError(f"{self.name}: {bad[0]} must be at least 1, got {getattr(self, bad[0])}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.name}: heads must be a multiple of kv_heads and head_dim even, got {self.heads}, {self.kv_heads} "
                f"and {self.head_dim}"
            )
        kind = scaling_of(self.rope_scaling)
        if kind not in SCALINGS:
            raise ValueError(f"{self.name}: rope_type must be one of {', '.join(SCALINGS)}, got {kind!r}")

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> "Qwen3Config":
        """What a Hugging Face config.json says; what it asks for and cannot be had is refused by name."""
        names = given.get("architectures") or ["none"]
        arch = names if isinstance(names, str) else names[0] if isinstance(names, list) else names
        if not isinstance(arch, str):
            raise ValueError(f"config.json: architectures must be a list of names, got {names!r}")
        if arch not in FAMILIES:
            raise ValueError(f"config.json: architecture {arch} is not supported; there are {', '.join(FAMILIES)}")
        fields = dict(FAMILIES[arch])
        wanted = dict(
            vocab="vocab_size", hidden="hidden_size", layers="num_hidden_layers", heads="num_attention_heads",
            ffn="intermediate_size", max_positions="max_position_embeddings",
        )
        if missing := [theirs for theirs in wanted.values() if given.get(theirs) is None]:
            raise ValueError(f"config.json: {missing[0]} is missing ({len(missing)} such)")
        check_fields(given)
        fields |= {ours: given[theirs] for ours, theirs in wanted.items()}
        for key, fine in dict(hidden_act="silu", mlp_bias=False, quantization_config=None, partial_rotary_factor=1).items():
            if given.get(key) not in (fine, None):
                raise ValueError(f"config.json: {key} must be {fine!r} or absent, got {given[key]!r}")
        biased = bool(given.get("attention_bias"))
        rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or given.get("rope_theta") or 10000.0
        if scaling_of(rope) != "default":  # both read the context that the model was trained on
            rope.setdefault("original_max_position_embeddings", given["max_position_embeddings"])
        eos = given.get("eos_token_id")
        fields |= dict(
            kv_heads=given.get("num_key_value_heads") or given["num_attention_heads"],
            head_dim=given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
            theta=float(theta), rope_scaling=rope if scaling_of(rope) != "default" else None,
            eps=given.get("rms_norm_eps") or 1e-6, tied=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=fields["qkv_bias"] or biased, o_bias=biased, window=window_of(arch, given),
            bos=given.get("bos_token_id"), eos=tuple(eos if isinstance(eos, list) else () if eos is None else (eos,)),
        )
        return cls(**fields)


WHOLE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "sliding_window",
)
FACTORS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow",
)


def check_fields(given: Mapping[str, Any], file: str = "config.json") -> None:
    """Refuse values of a wrong kind, such as "64" for 64 or "false" for false. What is absent or null is fine."""

    def whole(x: Any, least: int) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= least

    def above_0(x: Any) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf

    def check(names, fine, wanted: str, found: Mapping[str, Any] = given, within: str = "") -> None:
        for name in names:
            if found.get(name) is not None and not fine(found[name]):
                raise ValueError(f"{file}: {within}{name} must be {wanted}, got {found[name]!r}")

    check(WHOLE, lambda x: whole(x, 1), "a whole number from 1 on")
    check(("max_window_layers", "bos_token_id"), lambda x: whole(x, 0), "a whole number from 0 on")
    ends = lambda x: all(whole(t, 0) for t in (x if isinstance(x, list) else [x]))  # noqa: E731
    check(["eos_token_id"], ends, "a whole number from 0 on or a list of them")
    check(("rms_norm_eps", "rope_theta"), above_0, "a number above 0")
    check(("tie_word_embeddings", "attention_bias", "use_sliding_window"), lambda x: isinstance(x, bool), "true or false")
    kinds = lambda x: isinstance(x, list) and x and all(isinstance(kind, str) for kind in x)  # noqa: E731
    check(["layer_types"], kinds, "a list of names")
    for name in ("rope_parameters", "rope_scaling"):
        check([name], lambda x: isinstance(x, Mapping), "an object or null")
        rope = given.get(name) or {}
        check(FACTORS, above_0, "a number above 0", rope, f"{name}.")
        check(("rope_type", "type"), lambda x: isinstance(x, str), "a name", rope, f"{name}.")


def window_of(arch: str, given: Mapping[str, Any]) -> int | None:
    """The sliding window of every layer. Mistral's counts always, Qwen's where it is switched on, from a layer on."""
    window, layers = given.get("sliding_window"), given["num_hidden_layers"]
    if window is None or arch == "LlamaForCausalLM" or (arch != "MistralForCausalLM" and not given.get("use_sliding_window")):
        return None
    kinds = given.get("layer_types")
    if kinds is None:
        first = 0 if arch == "MistralForCausalLM" else given.get("max_window_layers", layers)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(set(kinds)) > 1:
        raise ValueError(f"config.json: layer_types must be one kind for all layers, got {', '.join(sorted(set(kinds)))}")
    return window if kinds[0] == "sliding_attention" else None


SIZES = {
    "tiny": Qwen3Config(
        vocab=1024, hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=512, max_positions=4096
    ),
    "0.6b": Qwen3Config(),
    "1.7b": Qwen3Config(hidden=2048, ffn=6144),
    "4b": Qwen3Config(hidden=2560, layers=36, heads=32, ffn=9728),
    "8b": Qwen3Config(hidden=4096, layers=36, heads=32, ffn=12288, tied=False),
}
RECIPES = {size: Recipe(batch=4, seq_len=64 if size == "tiny" else 512) for size in SIZES}


class Weight(nn.Module):
    """A matrix as it is stored: (N, K) as it is, or quantised with its scale (whet/ops/_weights.py)."""

    scale: torch.Tensor | None

    def __init__(self, data: torch.Tensor):
        super().__init__()
        self.data = data if isinstance(data, nn.Parameter) else nn.Parameter(data)
        self.register_buffer("scale", None)

    def replace(self, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.data, self.scale = nn.Parameter(data, requires_grad=False), scale

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dense(self.data, self.scale, dtype)

    def forward(self, x, bias=None):
        return F.linear(x, self.data if self.scale is None else self.dense(x.dtype), bias)


class Layer(nn.Module):
    def __init__(self, c: Qwen3Config, **where):
        super().__init__()

        def vector(n, present=True):
            return nn.Parameter(torch.empty(n, **where)) if present else None

        def matrix(n, k):
            return Weight(torch.empty(n, k, **where))

        self.c = c
        self.norm1, self.norm2 = vector(c.hidden), vector(c.hidden)
        self.qkv, self.qkv_bias = matrix(sum(c.qkv_rows), c.hidden), vector(sum(c.qkv_rows), c.qkv_bias)
        self.q_norm, self.k_norm = vector(c.head_dim, c.qk_norm), vector(c.head_dim, c.qk_norm)
        self.o, self.o_bias = matrix(c.hidden, c.qkv_rows[0]), vector(c.hidden, c.o_bias)
        self.gate_up, self.down = matrix(2 * c.ffn, c.hidden), matrix(c.hidden, c.ffn)

    def project(self, y, rope, ops):
        """Queries, keys and values (B, heads, T, D), normed and rotated; rope: cos, sin, positions."""
        c, (B, T, _) = self.c, y.shape
        packed = self.qkv(y, self.qkv_bias).view(B, T, -1, c.head_dim)
        q, k, v = packed.split([c.heads, c.kv_heads, c.kv_heads], dim=2)
        if c.qk_norm:
            q, k = ops.rms_norm(q, self.q_norm, c.eps), ops.rms_norm(k, self.k_norm, c.eps)
        return *ops.rope(q.transpose(1, 2), k.transpose(1, 2), *rope), v.transpose(1, 2)

    def forward(self, h, delta, attend, ops):
        """h is the residual stream, delta what the layer before adds to it, inside this one's norm.

        attend   (this layer, y) -> what each token's heads (B, heads, T, D) gather
        """
        if delta is None:
            y = ops.rms_norm(h, self.norm1, self.c.eps)
        else:
            y, h = ops.add_rms_norm(delta, h, self.norm1, self.c.eps)
        out = attend(self, y).transpose(1, 2).flatten(2)
        y, h = ops.add_rms_norm(self.o(out, self.o_bias), h, self.norm2, self.c.eps)
        return h, self.down(ops.swiglu(self.gate_up(y)))


class Qwen3(nn.Module):
    """Parameters are allocated, not set: random_weights or whet.decode.load does that."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, c: Qwen3Config, variant: str = "tuned", ops: Choices | None = None, **where):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"{c.name}: variant must be one of {VARIANTS}, got {variant!r}")
        self.c, self.variant, self.own_ops = c, variant, ops is not None
        self.ops = ops if ops is not None else {"plain": Choices(default="eager"), "stock": Choices()}.get(variant) or current()
        self.embed = nn.Parameter(torch.empty(c.vocab, c.hidden, **where))
        self.layers: Any = nn.ModuleList(Layer(c, **where) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.empty(c.hidden, **where))
        self.head = Weight(self.embed if c.tied else torch.empty(c.vocab, c.hidden, **where))
        cos, sin = tables(c.max_positions, c.head_dim, c.theta, c.rope_scaling, self.embed.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, labels=None):
        """Logits (B, T, V), or the mean cross-entropy of labels, which are tokens shifted once by whoever made the batch."""
        def attend(layer, y):
            q, k, v = layer.project(y, (self.cos, self.sin, 0), self.ops)
            return self.ops.attention(q, k, v, causal=True, window=self.c.window)

        h, delta = F.embedding(tokens, self.embed), None
        for layer in self.layers:
            h, delta = layer(h, delta, attend, self.ops)
        y, _ = self.ops.add_rms_norm(delta, h, self.norm, self.c.eps)
        return self.head(y) if labels is None else self.ops.linear_cross_entropy(y, self.head.dense(y.dtype), labels)

    @torch.no_grad()
    def extend(self, tokens, cache_k, cache_v, positions, start: int | None = None):
        """The residual stream (B, T, K) after the last layer, of tokens (B, T) that follow what the cache holds.

        cache_k, cache_v   (layers, B, KV, S, D): row b's new keys and values are written from positions[b] on
        positions          (B,) integers on the device, never read by the host
        start              where all rows begin at the same place and the host knows it: only start + T keys are read, by
                           the attention op; else all S are scored and the unseen masked
        """
        B, T = tokens.shape
        if start is not None and start + T > cache_k[0].shape[2]:
            raise ValueError(f"extend: start + {T} tokens must fit the cache of {cache_k[0].shape[2]}, got start {start}")
        if start is None:
            at, row = positions[:, None] + torch.arange(T, device=tokens.device), torch.arange(B, device=tokens.device)[:, None]
        h, delta = F.embedding(tokens, self.embed), None
        for layer, keys, values in zip(self.layers, cache_k, cache_v):
            def attend(layer, y, keys=keys, values=values):
                if start is None:
                    q, k, v = layer.project(y, (self.cos, self.sin, at), self.ops)
                    keys.transpose(1, 2)[row, at], values.transpose(1, 2)[row, at] = k.transpose(1, 2), v.transpose(1, 2)
                    return attend_all(q, keys, values, at, self.c.window)
                qkv, norms = layer.qkv(y, layer.qkv_bias), (layer.q_norm, layer.k_norm)
                q = self.ops.norm_rope(qkv, keys, values, self.cos, self.sin, start, *norms, self.c.eps)
                seen = (t[:, :, : start + T] for t in (keys, values))
                return self.ops.attention(q.transpose(1, 2), *seen, causal="bottom-right", window=self.c.window)

            h, delta = layer(h, delta, attend, self.ops)
        return h if delta is None else h + delta

    @torch.no_grad()
    def step(self, tokens, cache_k, cache_v, positions, context: int = 0):
        """extend for at most 8 new tokens a row, by the decode ops: five kernels a layer, one after the other.

        context   no token stands at this place or beyond: the host's bound, which sets attention's grid; 0: the cache's end
        """
        (B, T), ops, eps = tokens.shape, self.ops, self.c.eps
        h = F.embedding(tokens.reshape(-1), self.embed)
        for layer, keys, values in zip(self.layers, cache_k, cache_v):
            qkv = ops.norm_linear(h, layer.norm1, layer.qkv.data, layer.qkv.scale, layer.qkv_bias, eps)
            y = ops.cached_attention(
                qkv.view(B, T, -1), keys, values, positions, self.cos, self.sin, layer.q_norm, layer.k_norm,
                self.c.window or 0, context, eps,
            )
            h = ops.linear_add(y.view(B * T, -1), h, layer.o.data, layer.o.scale, layer.o_bias)
            y = ops.norm_swiglu(h, layer.norm2, layer.gate_up.data, layer.gate_up.scale, eps)
            h = ops.linear_add(y, h, layer.down.data, layer.down.scale)
        return h.view(B, T, -1)

    @torch.no_grad()
    def choose(self, hidden):
        """The likeliest token of each row (M, K) and its logit, by the decode op."""
        return self.ops.norm_argmax(hidden, self.norm, self.head.data, self.head.scale, self.c.eps)

    @torch.no_grad()
    def logits(self, hidden):
        """float32 logits of what extend gives: final norm and head."""
        return self.head(self.ops.rms_norm(hidden, self.norm, self.c.eps)).float()


def attend_all(q, k, v, at, window):
    """Attention of queries at positions `at` (B, T) over a whole cache (B, KV, S, D), of which each sees what is not later.

    What lies after the last query may be anything, NaN too: it is never multiplied.
    """
    (B, H, T, D), (KV, S) = q.shape, k.shape[1:3]
    j = torch.arange(S, device=q.device)
    see = j <= at[:, :, None] if window is None else (j <= at[:, :, None]) & (j > at[:, :, None] - window)
    scores = q.reshape(B, KV, H // KV * T, D) @ k.mT * D**-0.5
    scores = scores.view(B, KV, H // KV, T, S).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~see[:, None, None], -math.inf).softmax(-1).to(v.dtype)
    v = v.masked_fill((j > at[:, -1:])[:, None, :, None], 0)
    return (weights.view(B, KV, H // KV * T, S) @ v).view(B, H, T, D)


def kernels() -> Choices:
    """This machine's measured choices, and whet's kernels for what was not measured.

    For a model whose kernels were verified here (whet/decode/trust.py), or are before they are timed. Any other has current():
    the measured choices, and stock calls.
    """
    return Choices(current().table, default="triton")


@torch.no_grad()
def random_weights(c: Qwen3Config, variant: str = "tuned", ops: Choices | None = None, seed: int = 42, **where) -> Qwen3:
    """N(0, 0.02), the two projections back into the residual stream scaled by depth; drawn on the device."""
    model = Qwen3(c, variant, ops, **where)
    generator = None if model.embed.is_meta else torch.Generator(model.embed.device).manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(0 if name.endswith("bias") else 1)
        else:
            p.normal_(0, 0.02 / (2 * c.layers) ** 0.5 if name.endswith(("o.data", "down.data")) else 0.02, generator=generator)
    return model


MODEL = Model(
    name="qwen3", sizes=SIZES, recipes=RECIPES, build=random_weights, batch=batch, decodes=True,
    canonical=lambda c, named: dict(named), adapt=lambda c, variant, named: dict(named),
    plain="plain", stock="stock", tuned="tuned",
)
