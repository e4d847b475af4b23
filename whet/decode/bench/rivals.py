"""What whet's decoder is measured against, with the same weights in the same run.

transformers            Hugging Face's model in eager mode, a cache that grows by a token, greedy
transformers-optimized  the same after whet.optimize(model, batch, mode="infer")
transformers-static     the same as the first with a static cache, one step compiled whole: mode="reduce-overhead"
gpt-fast                a decoder written by hand in gpt-fast's style: static cache, one step compiled whole, reduce-overhead
gpt-fast-tuned          the same with Inductor's coordinate descent, which also turns products with one row into reductions

Each is a Contender, as whet's own are: one system at one batch and one length of cache.
"""

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.decode.bench.contender import Contender
from whet.decode.chunks import CHUNK
from whet.lock import Lock
from whet.models.qwen3 import FAMILIES, Qwen3, Qwen3Config
from whet.swap._optimize import optimize


def hf_config(c: Qwen3Config, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of these sizes, as Hugging Face writes it."""
    arch = next(name for name, family in FAMILIES.items() if family["name"] == c.name)
    given: dict[str, Any] = dict(
        architectures=[arch], model_type=c.name, vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn,
        rms_norm_eps=c.eps, tie_word_embeddings=c.tied, max_position_embeddings=c.max_positions, hidden_act="silu",
        bos_token_id=c.bos, eos_token_id=list(c.eos) or None, torch_dtype=str(dtype).removeprefix("torch."),
        rope_parameters={"rope_type": "default", **(c.rope_scaling or {}), "rope_theta": c.theta}, rope_theta=c.theta,
        sliding_window=c.window, use_sliding_window=c.window is not None, attention_bias=c.o_bias,
    )
    return given | ({"max_window_layers": 0} if c.window is not None and c.name.startswith("qwen") else {})


def hf_state(model: Qwen3) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names: views of the model's own."""
    state = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    if not model.c.tied:
        state["lm_head.weight"] = model.head.data
    for i, layer in enumerate(model.layers):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        for kind, packed in (("weight", layer.qkv.data), ("bias", layer.qkv_bias)):
            if packed is not None:
                parts = packed.split(list(model.c.qkv_rows))
                state |= {f"{attn}{n}_proj.{kind}": part for n, part in zip("qkv", parts)}
        gate, up = layer.gate_up.data.split(model.c.ffn)
        named = {
            f"{at}input_layernorm.weight": layer.norm1, f"{at}post_attention_layernorm.weight": layer.norm2,
            f"{attn}q_norm.weight": layer.q_norm, f"{attn}k_norm.weight": layer.k_norm,
            f"{attn}o_proj.weight": layer.o.data, f"{attn}o_proj.bias": layer.o_bias,
            f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up, f"{at}mlp.down_proj.weight": layer.down.data,
        }
        state |= {name: t for name, t in named.items() if t is not None}
    return {name: t.detach() for name, t in state.items()}


def save_hf(model: Qwen3, folder: Path) -> None:
    """A directory as Hugging Face's from_pretrained reads it, without a tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model.c, model.embed.dtype), indent=1))
    save_file({name: t.contiguous().cpu() for name, t in hf_state(model).items()}, folder / "model.safetensors")


def transformers_model(model: Qwen3) -> Any:
    """Hugging Face's module of the same family over the same memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = hf_config(model.c, model.embed.dtype)
    config = AutoConfig.for_model(given.pop("model_type"), **{k: v for k, v in given.items() if k != "torch_dtype"})
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=model.embed.dtype)
    missing, unknown = made.load_state_dict(hf_state(model), strict=False, assign=True)
    made.tie_weights()
    if lost := [n for n in (*missing, *unknown) if n != "lm_head.weight"]:
        raise ValueError(f"transformers: {made.config.model_type} has other weights: {lost[0]} ({len(lost)} such)")
    rotary = type(made.model.rotary_emb)
    made.model.rotary_emb = rotary(config=config).to(model.embed.device)  # its tables are no weights: made on the device
    return made.eval().requires_grad_(False)


class Transformers(Contender):
    """Eager, as generate() runs it: the cache is concatenated at every step."""

    def __init__(self, model: Qwen3, batch: int, length: int):
        if model.c.window is not None:
            raise ValueError("a cache with a sliding window cannot be rewound")
        self.module = transformers_model(model)
        self.cache: Any = None
        self.base: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def feed(self, prompt, first):
        from transformers import DynamicCache

        self.cache, self.first = DynamicCache(config=self.module.config), first
        read_prompt(self.module, self.cache, prompt.expand(len(first), -1))
        self.base = [(layer.keys, layer.values) for layer in self.cache.layers]

    @torch.no_grad()
    def step(self, token):
        logits = self.module(input_ids=token, past_key_values=self.cache, use_cache=True).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits

    def rewind(self):
        for layer, (keys, values) in zip(self.cache.layers, self.base):
            layer.keys, layer.values = keys, values


class TransformersOptimized(Transformers):
    """The same model after whet.optimize, given a prompt of this length: what a user of generate() gets by one line."""

    def __init__(self, model: Qwen3, batch: int, length: int):
        super().__init__(model, batch, length)
        tokens = torch.arange(batch * length, device=model.embed.device).view(batch, length) % model.c.vocab
        optimize(self.module, {"input_ids": tokens, "logits_to_keep": 1}, mode="infer", lock=Lock())


def must_be_placed(module: Any) -> bool:
    """Whether this version's cache does not count its tokens, and must be given the position of new ones."""
    return "cache_position" in inspect.signature(module.forward).parameters


def read_prompt(module: Any, cache, tokens: torch.Tensor) -> None:
    for i, part in enumerate(tokens.split(CHUNK, dim=1)):
        at = torch.arange(part.shape[1], device=part.device) + i * CHUNK
        given = {"cache_position": at} if must_be_placed(module) else {}
        module(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1, **given)


class CompiledContender(Contender):
    """compiled(token, at): a step at the position `at` (1,), which stays on the device."""

    compiled: Any
    at: torch.Tensor

    @torch.no_grad()
    def step(self, token):
        torch.compiler.cudagraph_mark_step_begin()
        found = self.compiled(token, self.at)
        self.at += 1
        return found


class TransformersStatic(CompiledContender):
    """A static cache, and the step (forward and argmax) compiled whole."""

    def __init__(self, model: Qwen3, batch: int, length: int):
        from transformers import StaticCache

        if model.c.window is not None:
            raise ValueError("a cache with a sliding window cannot be rewound")
        self.module = transformers_model(model)
        self.cache: Any = StaticCache(config=self.module.config, max_cache_len=length)
        self.cached_tokens, self.at = 0, torch.zeros(1, dtype=torch.int64, device=model.embed.device)
        self.placed, self.compiled = must_be_placed(self.module), compiled(self.one)

    def one(self, token, at):
        given = {"cache_position": at} if self.placed else {}
        logits = self.module(input_ids=token, past_key_values=self.cache, use_cache=True, **given).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits

    @torch.no_grad()
    def feed(self, prompt, first):
        self.cached_tokens, self.first = 0, first
        self.rewind()
        read_prompt(self.module, self.cache, prompt.expand(len(first), -1))
        self.cached_tokens = prompt.shape[1]

    def rewind(self):
        self.at.fill_(self.cached_tokens)
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(self.cached_tokens)

    def close(self):
        torch._dynamo.reset()


def skipped_graphs() -> int:
    """How often this process's compiler gave up on a CUDA graph, which it does without an error."""
    compiler = sys.modules.get("torch._dynamo.utils")  # which is slow to import, and counts nothing before it is
    return compiler.counters["inductor"]["cudagraph_skips"] if compiler else 0


def compiled(one: Callable, tuned: bool = False) -> Callable:
    """mode="reduce-overhead" without graph breaks; tuned: with coordinate descent too, which modes and options exclude."""
    if not tuned:
        return torch.compile(one, mode="reduce-overhead", fullgraph=True, dynamic=False)
    options: dict[str, Any] = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    return torch.compile(one, fullgraph=True, dynamic=False, options=options)


def rms(x, w, eps: float):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rotated(x, cos, sin):
    """x (B, T, heads, D); cos, sin (T, 1, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class ByHandBlock(nn.Module):
    """One layer by hand over its own static cache."""

    keys: torch.Tensor
    values: torch.Tensor
    norm1: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    norm2: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def __init__(self, c: Qwen3Config, layer: nn.Module, batch: int, length: int):
        super().__init__()
        self.c = c
        weights = {n.removesuffix(".data"): p for n, p in layer.named_parameters()}
        for name in ("norm1", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "norm2", "gate_up", "down"):
            self.register_buffer(name, weights[name].detach() if name in weights else None, persistent=False)
        held = weights["qkv"].new_zeros(batch, c.kv_heads, length, c.head_dim)
        self.register_buffer("keys", held, persistent=False)
        self.register_buffer("values", held.clone(), persistent=False)
        for t in (self.keys, self.values):
            torch._dynamo.mark_static_address(t)  # else Inductor leaves a step that writes to them out of its CUDA graphs

    def forward(self, x, cos, sin, see, at):
        c, (B, T, _) = self.c, x.shape
        packed = F.linear(rms(x, self.norm1, c.eps), self.qkv, self.qkv_bias).view(B, T, -1, c.head_dim)
        q, k, v = packed.split([c.heads, c.kv_heads, c.kv_heads], dim=2)
        if c.qk_norm:
            q, k = rms(q, self.q_norm, c.eps), rms(k, self.k_norm, c.eps)
        q, k = rotated(q, cos, sin).transpose(1, 2), rotated(k, cos, sin).transpose(1, 2)
        self.keys[:, :, at], self.values[:, :, at] = k, v.transpose(1, 2)
        x = x + F.linear(self.attend(q, see).transpose(1, 2).reshape(B, T, -1), self.o, self.o_bias)
        gate, up = F.linear(rms(x, self.norm2, c.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def attend(self, q, see):
        """One token: the queries that share keys are rows of one product, and no key is copied."""
        B, H, T, D = q.shape
        if T == 1:
            q = q.view(B, self.c.kv_heads, -1, D)
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=see).reshape(B, H, T, D)
        k, v = (t.repeat_interleave(H // self.c.kv_heads, dim=1) for t in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=see)


class ByHand(nn.Module):
    """The family's decoder by hand: every layer written out, the cache static, positions a tensor."""

    embed: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    j: torch.Tensor

    def __init__(self, model: Qwen3, batch: int, length: int):
        super().__init__()
        self.c = model.c
        self.blocks = nn.ModuleList(ByHandBlock(model.c, layer, batch, length) for layer in model.layers)
        head = model.head.data
        held: Mapping[str, torch.Tensor] = dict(
            embed=model.embed, norm=model.norm, head=head, cos=model.cos[:length, None], sin=model.sin[:length, None],
            j=torch.arange(length, device=head.device),
        )
        for name, t in held.items():
            self.register_buffer(name, t.detach(), persistent=False)

    def forward(self, tokens, at):
        """Logits (B, V) of the last of tokens (B, T), which stand at positions `at` (T,)."""
        see = self.j <= at[:, None]
        if self.c.window is not None:
            see = see & (self.j > at[:, None] - self.c.window)
        x = F.embedding(tokens, self.embed)
        for block in self.blocks:
            x = block(x, self.cos[at], self.sin[at], see, at)
        return F.linear(rms(x[:, -1], self.norm, self.c.eps), self.head)


class GptFast(CompiledContender):
    def __init__(self, model: Qwen3, batch: int, length: int, tuned: bool = False):
        self.module, self.cached_tokens = ByHand(model, batch, length), 0
        self.at = torch.zeros(1, dtype=torch.int64, device=model.embed.device)
        self.compiled = compiled(self.one, tuned)

    def one(self, token, at):
        logits = self.module(token, at)
        return logits.argmax(-1, keepdim=True), logits

    @torch.no_grad()
    def feed(self, prompt, first):
        self.cached_tokens, self.first = prompt.shape[1], first
        for i, part in enumerate(prompt.expand(len(first), -1).split(CHUNK, dim=1)):
            self.module(part, torch.arange(part.shape[1], device=part.device) + i * CHUNK)
        self.rewind()

    def rewind(self):
        self.at.fill_(self.cached_tokens)

    def close(self):
        torch._dynamo.reset()


class GptFastTuned(GptFast):
    def __init__(self, model: Qwen3, batch: int, length: int):
        super().__init__(model, batch, length, tuned=True)


RIVALS: dict[str, type[Contender]] = {
    "transformers": Transformers, "transformers-optimized": TransformersOptimized, "transformers-static": TransformersStatic,
    "gpt-fast": GptFast, "gpt-fast-tuned": GptFastTuned,
}
AHEAD = ("transformers-static", "gpt-fast")  # whose code can be made beforehand by another process


def parse(text: str) -> list[str]:
    """'all', 'none', or names with commas between them."""
    names = {"all": list(RIVALS), "none": []}.get(text)
    if names is None:
        names = [n.strip() for n in text.split(",") if n.strip()]
    if unknown := [n for n in names if n not in RIVALS]:
        raise ValueError(f"bench decode: unknown rival {unknown[0]!r}; there are {', '.join(RIVALS)}, all and none")
    return names


@contextlib.contextmanager
def quiet():
    """Transformers' and Inductor's advice about a model that is only measured is not printed."""
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
