"""A prompt on its way into the cache, in chunks. On a GPU a chunk that comes again is captured as a graph, and replayed.

A chunk is several hundred launches whatever its length, and issuing them takes the host longer than most chunks take a GPU.
So that chunks do come again, they are fed at a few lengths, filled up with tokens that nobody sees: what such a one writes
lies after the prompt, where the cache may hold anything.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from whet.ops._rows import power_of_two

CHUNK = 2048  # tokens of a prompt fed at once
LEAST, COARSE = 32, 256  # lengths: powers of two from LEAST to COARSE, where weights take the time; then four to an octave
MAX_GRAPHS = 64  # graphs kept: those used last


def length(tokens: int) -> int:
    """What a chunk of so many tokens is filled up to."""
    whole = max(LEAST, power_of_two(tokens))
    step = whole if whole <= COARSE else whole // 8
    return -(-tokens // step) * step


class Chunks:
    """Feeds rows of a runner's cache.

    ids      (1, CHUNK) the tokens that a chunk reads
    hidden   (1, CHUNK, K) the residual stream after the last layer that it writes
    graphs   by what is baked in: row, first position, length
    met      the chunks that came once: what they need is compiled
    """

    def __init__(self, runner: Any):
        self.runner = runner
        like = runner.model.embed
        self.ids = torch.zeros(1, CHUNK, dtype=torch.int64, device=like.device)
        self.hidden = torch.empty(1, CHUNK, like.shape[1], dtype=like.dtype, device=like.device)
        self.graphs: dict[tuple[int, int, int], Callable] = {}
        self.met: set[tuple[int, int, int]] = set()

    def feed(self, row: int, tokens: list[int], start: int) -> torch.Tensor:
        """Feed tokens[start:] to a row whose cache holds those before. The residual stream (1, K) of the last one."""
        for at in range(start, len(tokens), CHUNK):
            part = tokens[at : at + CHUNK]
            size = self.size(len(part), at)
            self.ids[0, :size] = self.runner.upload(part + [0] * (size - len(part)))
            self.run(row, at, size)
        return self.hidden[:, len(part) - 1]

    def size(self, tokens: int, start: int) -> int:
        """The length that a chunk is fed at; as it is where there are no graphs."""
        if self.runner.capture is None:
            return tokens
        room = min(self.runner.cache.capacity, self.runner.model.c.max_positions) - start
        return min(length(tokens), CHUNK, max(tokens, room))

    def run(self, row: int, start: int, size: int) -> None:
        key, plain = (row, start, size), functools.partial(self._extend, row, start, size)
        if self.runner.capture is None or (key not in self.met and key not in self.graphs):
            if len(self.met) > 4096:  # first positions need not repeat
                self.met.clear()
            self.met.add(key)
            return plain()
        if key not in self.graphs:
            beside = next(iter(self.graphs.values()), None)
            self.graphs[key] = self.runner.capture(plain, warm_up=0, beside=beside)
            while len(self.graphs) > MAX_GRAPHS:  # none of them runs: a capture waits for all that is under way
                del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = replay = self.graphs.pop(key)  # now the one used last
        replay()

    def _extend(self, row: int, start: int, size: int) -> None:
        runner = self.runner
        k, v = (t[:, row : row + 1] for t in runner.cache.kv)
        hidden = runner.model.extend(self.ids[:, :size], k, v, runner.position[row : row + 1], start=start)
        self.hidden[:, :size] = hidden
