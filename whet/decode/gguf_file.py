"""GGUF, llama.cpp's file of weights: its metadata, its tensors as ordinary numbers, and the Qwen3Config that it describes.

The commonest formats are unpacked here, on the device; the rest by the gguf package, which is optional.
"""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.models.qwen3 import Qwen3Config

ARCHITECTURES: dict[str, dict] = {  # llama.cpp's name: the family; it calls Mistral llama
    "llama": dict(name="llama", qk_norm=False),
    "qwen2": dict(name="qwen2", qk_norm=False),
    "qwen3": dict(name="qwen3", qk_norm=True),
}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def _halves(b, scales):
    """What a block of the simple formats holds: its float16 numbers, and its 32 nibbles, the low halves first."""
    d, q = b[:, : 2 * scales].contiguous().view(torch.float16).float(), b[:, 2 * scales :]
    return d, torch.cat([q & 15, q >> 4], dim=1).float()


def _q4_0(b):
    d, q = _halves(b, 1)
    return (q - 8) * d


def _q4_1(b):
    d, q = _halves(b, 2)
    return q * d[:, :1] + d[:, 1:]


def _q8_0(b):
    return b[:, 2:].contiguous().view(torch.int8).float() * b[:, :2].contiguous().view(torch.float16).float()


FORMATS: dict[int, tuple] = {  # numbers in a block, bytes in a block, how blocks (n, bytes) become numbers
    0: (1, 4, lambda b: b.view(torch.float32)),
    1: (1, 2, lambda b: b.view(torch.float16)),
    30: (1, 2, lambda b: b.view(torch.bfloat16)),
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}


def _package():
    try:
        import gguf
    except ImportError:
        raise ValueError("this GGUF file's format needs the gguf package: pip install 'whet[gguf]'") from None
    return gguf


class GGUF:
    """meta: the metadata by key. shapes: the tensors by name, rows first."""

    def __init__(self, file: Path):
        self.file = Path(file)
        self.bytes: Any = np.memmap(self.file, mode="c") if self.file.stat().st_size else np.empty(0, np.uint8)
        self.at = 0
        if self.bytes[:4].tobytes() != b"GGUF":
            raise ValueError(f"{file}: a model must be a Hugging Face folder or a GGUF file, and this file is not GGUF")
        self.at = 4
        try:
            version, tensors, keys = self._unpack("IQQ")
            if version not in (2, 3):
                raise ValueError(f"{file}: GGUF version must be 2 or 3, got {version}")
            self.meta: dict[str, Any] = {self._string(): self._value(*self._unpack("I")) for _ in range(keys)}
            self.shapes: dict[str, tuple[int, ...]] = {}
            self._where: dict[str, tuple[int, int]] = {}
            for _ in range(tensors):
                name, (dims,) = self._string(), self._unpack("I")
                self.shapes[name] = tuple(reversed(self._unpack(f"{dims}Q")))
                self._where[name] = self._unpack("IQ")
        except (struct.error, KeyError, MemoryError):
            raise ValueError(f"{file}: the file is damaged or cut short in its metadata") from None
        step = self.meta.get("general.alignment", 32)
        self.start = -(-self.at // step) * step

    def _unpack(self, layout: str) -> tuple:
        found = struct.unpack_from("<" + layout, self.bytes, self.at)
        self.at += struct.calcsize("<" + layout)
        return found

    def _string(self) -> str:
        (n,) = self._unpack("Q")
        self.at += n
        return self.bytes[self.at - n : self.at].tobytes().decode("utf-8", errors="replace")

    def _value(self, kind: int):
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._unpack(NUMBERS[kind])[0]
        item, n = self._unpack("IQ")
        return list(self._unpack(f"{n}{NUMBERS[item]}")) if item in NUMBERS else [self._value(item) for _ in range(n)]

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """The tensor as ordinary numbers, its heads' rows in the order of Hugging Face."""
        shape, (kind, offset) = self.shapes[name], self._where[name]
        if kind in FORMATS:
            block, size, unpack = FORMATS[kind]
        else:
            gguf = _package()
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        first = self.start + offset
        raw = self.bytes[first : first + math.prod(shape) // block * size]
        if len(raw) * block != math.prod(shape) * size:
            raise ValueError(f"{self.file}: the file is cut short: it ends before the end of {name}")
        if kind in FORMATS:
            t = unpack(torch.from_numpy(raw).to(device).view(-1, size)).view(shape)
        else:
            numbers = gguf.dequantize(raw.reshape(shape[0], -1), gguf.GGMLQuantizationType(kind))
            t = torch.from_numpy(numbers).to(device).view(shape)
        part = name.split(".")[-2]
        if self.meta["general.architecture"] == "llama" and part in ("attn_q", "attn_k"):
            t = pairs_apart(t, self._number("attention.head_count" if part == "attn_q" else "attention.head_count_kv"))
        return t

    def _number(self, key: str, default: Any = None) -> Any:
        """A value of this architecture; one that llama.cpp gives for each layer must be the same for all."""
        full = f"{self.meta['general.architecture']}.{key}"
        found = self.meta.get(full, default)
        if isinstance(found, list):
            if len(set(found)) != 1:
                raise ValueError(f"{self.file}: {full} must be the same for all layers, got {sorted(set(found))}")
            found = found[0]
        if found is None:
            raise ValueError(f"{self.file}: {full} is missing")
        return found

    def config(self) -> Qwen3Config:
        arch, number = str(self.meta.get("general.architecture")), self._number
        if arch not in ARCHITECTURES:
            raise ValueError(f"{self.file}: architecture {arch} is not supported; there are {', '.join(ARCHITECTURES)}")
        if number("expert_count", 0):
            raise ValueError(f"{self.file}: mixtures of experts are not supported, got {number('expert_count')} experts")
        if lost := [n for n in ("token_embd.weight", "output_norm.weight") if n not in self.shapes]:
            raise ValueError(f"{self.file}: {lost[0]} is missing")
        heads, hidden = number("attention.head_count"), number("embedding_length")
        bos = self.meta.get("tokenizer.ggml.bos_token_id")
        return Qwen3Config(
            **ARCHITECTURES[arch], vocab=self.shapes["token_embd.weight"][0], hidden=hidden, layers=number("block_count"),
            heads=heads, kv_heads=number("attention.head_count_kv", heads),
            head_dim=number("attention.key_length", hidden // heads), ffn=number("feed_forward_length"),
            theta=number("rope.freq_base", 10000.0), rope_scaling=self._scaling(),
            eps=number("attention.layer_norm_rms_epsilon"), tied="output.weight" not in self.shapes,
            qkv_bias="blk.0.attn_q.bias" in self.shapes, o_bias="blk.0.attn_output.bias" in self.shapes,
            window=number("attention.sliding_window", 0) or None, max_positions=number("context_length"), bos=bos,
        )

    def _scaling(self) -> dict | None:
        """llama.cpp names linear and yarn as Transformers does, and stores llama3 as a divisor for each frequency."""
        number, kind = self._number, self._number("rope.scaling.type", "none")
        if "rope_freqs.weight" in self.shapes:
            divisors = self.read("rope_freqs.weight", torch.device("cpu"))
            return dict(rope_type="divisors", divisors=divisors.tolist())
        if kind == "none":
            return None
        trained = number("rope.scaling.original_context_length", number("context_length"))
        return dict(rope_type=kind, factor=number("rope.scaling.factor"), original_max_position_embeddings=trained)


def pairs_apart(t: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k, whose rotated pairs llama.cpp lays side by side, with each pair half a head apart again."""
    return t.view(heads, t.shape[0] // heads // 2, 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape)
