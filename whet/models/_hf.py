"""Models as Transformers has them: the names and the config of Llama and its relatives, of which a model file makes its own."""

from collections.abc import Mapping
from typing import Any

import torch

LLAMA_NAMES = {"embed": "embed_tokens", "blocks": "layers", "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
LLAMA_NAMES |= {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}


def config_of(arch: str, kind: str, vocab: int, tied: bool) -> dict[str, Any]:
    """What every config.json has; kind: the class of the model, less the architecture's name."""
    eos = 50256 if vocab == 50257 else None
    config = dict(architectures=[f"{arch}{kind}"], model_type=arch.lower(), vocab_size=vocab, tie_word_embeddings=tied)
    return config | dict(bos_token_id=eos, eos_token_id=eos, pad_token_id=None)


def llama_config(arch: str, c: Any, width: int, hidden: int, act: str, tied: bool, bias: bool) -> dict[str, Any]:
    """config.json of Llama or a relative; c: a model's configuration, hidden: the width inside the MLP."""
    config = config_of(arch, "ForCausalLM", c.vocab, tied)
    config |= dict(hidden_size=width, num_hidden_layers=c.layers, num_attention_heads=c.heads, head_dim=c.head_dim)
    config |= dict(num_key_value_heads=c.kv_heads, intermediate_size=hidden, hidden_act=act, rms_norm_eps=c.eps)
    config |= dict(max_position_embeddings=c.max_positions, attention_bias=bias, mlp_bias=bias)
    return config | dict(rope_theta=c.theta, rope_parameters=dict(rope_type="default", rope_theta=c.theta))


def renamed(state: Mapping[str, torch.Tensor], names: Mapping[str, str], prefix: str = "model") -> dict[str, torch.Tensor]:
    """Copies of the parameters under Transformers' names: each part of a name by the table, the head beside the model."""
    out = {}
    for name, t in state.items():
        path = ".".join([prefix, *(names.get(part, part) for part in name.split("."))])
        out["lm_head.weight" if name == "head.weight" else path] = t.detach().clone(memory_format=torch.contiguous_format)
    return out
