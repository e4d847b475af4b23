"""Tensors in a safetensors file: its bytes, made one tensor after the other, and read back when asked for."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}


class CheckpointError(ValueError):
    """A checkpoint could not be written, or may not be loaded; the message is one line."""


def packed(tensors: Mapping[str, Tensor], elsewhere: "StoredTensors | None" = None, file: str = "") -> Iterator[Any]:
    """The bytes of a safetensors file, one tensor after the other: hashed as they are written, and an OSError stays one.

    elsewhere   has the values of those that are sharded over processes, each as file/name
    """
    header, at = {}, 0
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each at a multiple of its size
    for name in order:
        t = tensors[name]
        if t.dtype not in DTYPES:
            raise CheckpointError(f"checkpoint: {name} is in {t.dtype}, which safetensors does not hold")
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        key = f"{file}/{name}"
        t = elsewhere.file.get_tensor(key) if elsewhere is not None and key in elsewhere.facts else tensors[name]
        array: Any = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(array)


class StoredTensors:
    """The tensors of one safetensors file, read when asked for."""

    def __init__(self, path: Path):
        self.name, self.file = path.name, safe_open(path, framework="pt")
        self.facts = {k: (s.get_shape(), s.get_dtype()) for k in self.file.keys() for s in [self.file.get_slice(k)]}  # noqa: SIM118

    def misfit(self, wanted: Mapping[str, Tensor], what: str) -> str:
        """The first difference from what is wanted, in words; empty where there is none."""
        if more := [k for k in self.facts if k not in wanted]:
            return f"{self.name} has {sorted(more)[0]}, which {what} does not have"
        for name, t in wanted.items():
            shape, dtype = self.facts.get(name, (None, ""))
            if shape is None:
                return f"{what} has {name}, which {self.name} does not have"
            if shape != list(t.shape):
                return f"{name} has shape {tuple(shape)} in {self.name} and {tuple(t.shape)} in {what}"
            if dtype != DTYPES.get(t.dtype):
                return f"{name} is {dtype} in {self.name} and {DTYPES.get(t.dtype)} in {what}"
        return ""

    def but(self, names: Collection[str] = ()) -> dict[str, Tensor]:
        """All of them but these."""
        return {name: self.file.get_tensor(name) for name in self.facts if name not in names}

    def into(self, wanted: Mapping[str, Tensor], but: Collection[str] = ()) -> None:
        for name, t in wanted.items():
            if name not in but:
                t.copy_(self.file.get_tensor(name))
