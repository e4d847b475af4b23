"""The keys and values of the sequences being decoded: one allocation that grows with them, up to a limit in bytes.

    cache = Cache(model.c, torch.bfloat16, torch.device("cuda"), memory="8GiB", max_tokens=40960)
    cache.hold(rows=1, tokens=300)     # k, v: (layers, 1, kv_heads, 512, head_dim)
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from whet.ops._rows import power_of_two

BLOCK = 256  # tokens: the least that is allocated for a row, and the step of a row that cannot be doubled any more
HEADROOM = 0.1  # share of the free memory that is left to activations and graphs
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def bytes_of(memory: int | float | str) -> int:
    """'8GiB' -> 8589934592, '8GB' -> 8000000000; a number is bytes."""
    if isinstance(memory, str) and (found := SIZE.fullmatch(memory)):
        number, letter, binary = found.groups()
        memory = float(number) * (1024 if binary else 1000) ** " KMGT".index(letter.upper() or " ")
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 1 <= memory < math.inf:
        raise ValueError(f"memory must be bytes or a size such as '8GiB', got {memory!r}")
    return int(memory)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on a GPU also what PyTorch keeps for reuse; on a CPU what the system calls available."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Cache:
    """k, v (layers, rows, kv_heads, capacity, head_dim). What lies after a row's tokens may be anything.

    limit     tokens that the memory holds, all rows together
    longest   tokens that one sequence can have when it is alone: the memory's limit or max_tokens
    """

    def __init__(
        self, c: Any, dtype: torch.dtype, device: torch.device, memory: int | float | str | None = None, max_tokens: int = 2**31
    ):
        self.shape = (c.layers, c.kv_heads, c.head_dim)
        self.dtype, self.device, self.max_tokens = dtype, device, max_tokens
        self.bytes_per_token = 2 * c.layers * c.kv_heads * c.head_dim * dtype.itemsize
        self.memory = int((1 - HEADROOM) * free_bytes(device)) if memory is None else bytes_of(memory)
        self.limit = self.memory // self.bytes_per_token
        self.longest = min(self.limit, max_tokens)
        self.drop()

    def drop(self) -> None:
        """Hold nothing."""
        self.kv = [self._zeros(0, 0), self._zeros(0, 0)]

    @property
    def k(self) -> torch.Tensor:
        return self.kv[0]

    @property
    def v(self) -> torch.Tensor:
        return self.kv[1]

    @property
    def rows(self) -> int:
        return self.kv[0].shape[1]

    @property
    def capacity(self) -> int:
        return self.kv[0].shape[3]

    def fits(self, tokens: int, rows: int = 1) -> bool:
        """Whether that many rows of that many tokens can be held, if need be after growing."""
        return tokens <= self.max_tokens and rows * tokens <= self.limit

    def require(self, tokens: int) -> None:
        """One-line error where a sequence of that many tokens can never be held."""
        if tokens <= self.longest:
            return
        if self.limit < self.max_tokens:
            size = f"{self.memory / 2**20:,.0f} MiB at {self.bytes_per_token} bytes a token"
            raise ValueError(f"cache: {tokens} tokens do not fit; {self.longest} would ({size}): give it more memory")
        raise ValueError(f"cache: {tokens} tokens do not fit; {self.longest} would: that is the longest context")

    def hold(self, rows: int, tokens: int) -> bool:
        """Make room. True when the memory has moved, and with it what a graph was captured on; what was held is copied.

        Both sides grow by doubling. Where that passes the limit, rows and tokens beyond those asked for are given up.
        """
        if rows <= self.rows and tokens <= self.capacity:
            return False
        self.require(tokens)
        if not self.fits(tokens, rows):
            raise ValueError(f"cache: {rows} rows of {tokens} tokens do not fit; {self.limit // rows} tokens would")
        doubled = min(max(BLOCK, power_of_two(tokens)), self.max_tokens)
        exact = min(-(-tokens // BLOCK) * BLOCK, self.limit // rows, self.max_tokens)
        capacity = max(self.capacity, doubled)
        wanted = ((max(rows, self.rows), capacity), (rows, capacity), (rows, doubled), (rows, exact))
        self._move(*next(shape for shape in wanted if self.fits(shape[1], shape[0])))
        return True

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of one row into another."""
        if source != target:
            for t in self.kv:
                t[:, target, :, :tokens] = t[:, source, :, :tokens]

    def clear(self, row: int) -> None:
        """Zeros, so that no NaN of a broken sequence stays behind."""
        for t in self.kv:
            t[:, row].zero_()

    def _zeros(self, rows: int, tokens: int) -> torch.Tensor:
        layers, heads, width = self.shape
        return torch.zeros(layers, rows, heads, tokens, width, dtype=self.dtype, device=self.device)

    def _move(self, rows: int, tokens: int) -> None:
        """One of k and v at a time, through the host where the device has no room for the old beside the new."""
        kept_rows, kept_tokens = min(rows, self.rows), min(tokens, self.capacity)
        new_bytes = rows * tokens * self.bytes_per_token // 2
        try:
            for i in range(2):
                kept = self.kv[i][:, :kept_rows, :, :kept_tokens]
                if self.device.type == "cuda" and new_bytes > free_bytes(self.device):
                    kept = kept.cpu()
                self.kv[i] = self._zeros(0, 0)
                moved = self._zeros(rows, tokens)
                moved[:, :kept_rows, :, :kept_tokens] = kept
                self.kv[i] = moved
        except BaseException as e:
            self.drop()
            if not isinstance(e, torch.OutOfMemoryError):
                raise
            what = f"{rows} rows of {tokens} tokens ({2 * new_bytes / 2**20:,.0f} MiB)"
            raise ValueError(f"cache: there is no memory for {what}; lower memory or max_batch") from None
