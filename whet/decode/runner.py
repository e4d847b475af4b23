"""A model, its cache and the state of the sequences in it, all on the device: prompts go in, tokens come out in bursts.

A step feeds each row's token at its position, chooses the next one and moves on; nothing of that is read by the host. On a
GPU a step is captured as a graph, one for each number of rows, context bucket and way of choosing, and replayed. What a
burst of steps chose is copied to pinned memory after it, and read when its mark is reached, while the next burst runs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from whet import graphs
from whet.decode import persistent
from whet.decode.cache import BLOCK, Cache
from whet.decode.chunks import Chunks
from whet.decode.note import note
from whet.decode.sampling import Sampling, sample
from whet.ops._pdl import pdl
from whet.ops._rows import power_of_two

RING = 64  # tokens of each row that a burst can choose at most
PATHS = ("auto", "graph", "persistent")  # how one sequence is decoded greedily


def check_path(path: str) -> None:
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")


def mode_of(sampling: Sampling) -> str:
    return "greedy" if sampling.greedy else "filtered" if sampling.filtered else "sampled"


@dataclass
class Burst:
    """Tokens on their way to the host. A token whose logits were not finite reads -1."""

    tokens: torch.Tensor  # (rows, n)
    logits: torch.Tensor | None  # of the same shape, where the tokens were chosen greedily
    tally: torch.Tensor | None  # tokens made, drafted and accepted, where the host cannot know them
    begin: graphs.Mark
    end: graphs.Mark
    failed: torch.Tensor | None = None  # not 0 where a persistent kernel gave up

    def read(self) -> list[list[int]]:
        """Waits for the burst."""
        self.end.wait()
        if self.failed is not None and self.failed.item():
            raise RuntimeError("the persistent kernel gave up polling for a block's result; decode with path='graph'")
        if self.logits is None:
            return self.tokens.tolist()
        return torch.where(self.logits.isfinite(), self.tokens, -1).tolist()

    @property
    def seconds(self) -> float:
        return self.end.since(self.begin)


class DecodeRunner:
    """The state of up to `rows` sequences. Row b of the state goes with row b of the cache.

    token       (rows,) the token that is fed next
    position    (rows,) where it is fed
    advance     (rows,) what a step adds to position: 1, or 0 for an idle row, which is fed at one place again and again
    out_tokens  (rows, RING) what a burst chose; logit: the logits of these
    column      (1,) the column of out_tokens that comes next
    tally       (3,) of a burst with drafts: column, and how many tokens were drafted and how many of these accepted
    capture     how a step becomes a graph; None where steps are plain calls, as on a CPU
    kernels     whether whet's kernels decode, or by what was measured and stock calls: where they were not verified
    extends     whether one row's step is model.extend; not beside speculation, whose drafts are checked by model.step
    persistent  the kernel that decodes one sequence greedily; None where it does not fit
    """

    one_pass = True  # see verify

    def __init__(self, model: Any, cache: Cache, rows: int, path: str = "auto", kernels: bool = True):
        check_path(path)
        self.model, self.cache, self.rows, self.path = model, cache, rows, path
        self.device = cache.device
        self.kernels = kernels and self.device.type == "cuda"
        self.extends = self.device.type == "cpu"
        self.capture: Callable | None = graphs.Graph if self.device.type == "cuda" else None
        self.token, self.top_k, self.seed = (self._zeros(rows) for _ in range(3))
        self.temperature, self.top_p = (self._zeros(rows, dtype=torch.float32) for _ in range(2))
        self._counters, self._increments = self._zeros(rows + 3), self._zeros(rows + 3)  # a step adds the one to the other
        self.position, self.advance = self._counters[:rows], self._increments[:rows]
        self.column, self.tally = self._counters[rows : rows + 1], self._counters[rows:]
        self._increments[rows] = 1
        self.out_tokens, self.logit = self._zeros(rows, RING), self._zeros(rows, RING, dtype=torch.float32)
        self.graphs: dict[tuple, Callable] = {}
        self.chunks = Chunks(self)
        self.persistent = persistent.kernel_for(model, path)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def context(self, tokens: int) -> int:
        """The bucket of a context: a power of two from BLOCK on, or all that the cache holds."""
        return min(max(BLOCK, power_of_two(tokens)), self.cache.capacity)

    def bucket(self, rows: int) -> int:
        return min(power_of_two(rows), self.rows)

    def hold(self, rows: int, tokens: int) -> None:
        """Room in the cache; graphs of the memory that was given up go with it."""
        if rows > self.cache.rows or tokens > self.cache.capacity:
            self.drop_graphs()
            self.cache.hold(rows, tokens)

    def drop_graphs(self) -> None:
        """Drop the graphs, once no replay of them is under way."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.graphs.clear()
        self.chunks.graphs.clear()

    def place(self, slot: int, position: int, live: bool) -> None:
        """Where a row stands, and whether steps move it."""
        self.position[slot].fill_(position)
        self.advance[slot].fill_(int(live))

    def place_all(self, positions: list[int], live: bool) -> None:
        """The same of the first rows, and no other runs."""
        self.advance.zero_()
        self.position[: len(positions)] = self.upload(positions)
        self.advance[: len(positions)] = int(live)

    def count(self, made: torch.Tensor, drafted: torch.Tensor, accepted: torch.Tensor) -> None:
        """A step with drafts made so many tokens of row 0; nothing moves while a graph is warmed up."""
        self.tally.add_(torch.cat([made, drafted, accepted]) * self._increments[self.rows])
        self.position[:1].add_(made * self.advance[0])

    def upload(self, tokens: list[int]) -> torch.Tensor:
        """Tokens on the device; the host does not wait."""
        pinned = torch.tensor(tokens, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return pinned.to(self.device, non_blocking=True)

    @torch.no_grad()
    def prefill(self, slot: int, tokens: list[int], start: int, sampling: Sampling) -> Burst:
        """Feed tokens[start:] to a row whose cache holds those before, and choose the first new one. The row is then live."""
        with self.on_device():
            begin, end = graphs.Mark(self.device), len(tokens)
            hidden = self.chunks.feed(slot, tokens, start)
            self._set(slot, sampling)
            self.place(slot, end - 1, live=True)
            row = slice(slot, slot + 1)
            token, logit = self._choose(hidden, row, mode_of(sampling))
            self.place(slot, end, live=True)
            self.token[row] = token.clamp(min=0)
            return self.sent(token[:, None], None if logit is None else logit[:, None], begin)

    @torch.no_grad()
    def steps(self, n: int, rows: int, context: int, mode: str) -> Burst:
        """n steps of the first `rows` rows, none of which passes `context` tokens."""
        if n > RING:
            raise ValueError(f"steps: n must be at most {RING}, got {n}")
        if self.persistent_serves(rows, mode):
            self.persistent = persistent.loaded(self.persistent, self.path)
        if self.persistent_serves(rows, mode):
            return self.persistent_steps(n)
        with self.on_device():
            self.column.zero_()  # before a capture too: its warm-up writes there
            run = self.graph(("step", rows, context, mode), functools.partial(self._step, rows, context, mode))
            begin = graphs.Mark(self.device)
            for _ in range(n):
                run()
            return self.sent(self.out_tokens[:rows, :n], self.logit[:rows, :n] if mode == "greedy" else None, begin)

    def persistent_serves(self, rows: int, mode: str) -> bool:
        """Whether the persistent kernel decodes these."""
        return self.persistent is not None and rows == 1 and mode == "greedy"

    def persistent_steps(self, n: int, logits: torch.Tensor | None = None) -> Burst:
        """n tokens of row 0 in one launch; it must be live. logits (n, V): where all of them go."""
        assert self.persistent is not None
        with self.on_device():
            begin, row = graphs.Mark(self.device), slice(0, 1)
            cache = [t[:, 0] for t in self.cache.kv]
            self.persistent.steps(n, cache, self.token[row], self.position[row], self.out_tokens[0], self.logit[0], logits)
            failed = self._to_host(self.persistent.failed)
            burst = self.sent(self.out_tokens[:1, :n], self.logit[:1, :n], begin)
            burst.failed = failed
            return burst

    def ready(self, key: tuple) -> bool:
        """Whether a burst can be enqueued at once: capturing a graph makes the host wait for all that is under way, and the
        persistent kernel for its compiler."""
        if key[0] == "step" and self.persistent is not None and self.persistent_serves(key[1], key[3]):
            return self.persistent.kernel is not None
        return self.capture is None or key in self.graphs

    def graph(self, key: tuple, run: Callable) -> Callable:
        """The run, captured where there is a GPU. Its warm-up is undone: nothing advances."""
        if self.capture is None:
            return run
        if key not in self.graphs:
            with self.frozen():
                self.graphs[key] = self.capture(run)
        return self.graphs[key]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        token, increments = self.token.clone(), self._increments.clone()
        self._increments.zero_()
        try:
            yield
        finally:
            self.token.copy_(token)
            self._increments.copy_(increments)

    def verify(self, tokens: torch.Tensor, context: int) -> torch.Tensor:
        """Hidden states (T, K) of T tokens (T,) fed to row 0 from its position on.

        One pass gives the bits of single steps where the kernels of model.step give a token the same bits whatever T is.
        With one_pass False every token goes through its own step: the same bits with any kernels, and nothing is gained.
        """
        k, v = self._cut(1, context)
        at = self.position[:1]
        if self.one_pass:
            return self.model.step(tokens[None], k, v, at, context=context)[0]
        each = (self.model.step(t[None, None], k, v, at + i, context=context)[0] for i, t in enumerate(tokens.unbind()))
        return torch.cat(list(each))

    def _cut(self, rows: int, context: int) -> list[torch.Tensor]:
        """The cache's rows, without kernels up to the context: plain formulas read all they are given."""
        return [t[:, :rows] if self.kernels else t[:, :rows, :, :context] for t in self.cache.kv]

    def _step(self, rows: int, context: int, mode: str) -> None:
        with pdl():
            hidden = self._hidden(rows, context)
            token, logit = self._choose(hidden[:, 0], slice(0, rows), mode)
            if logit is not None and self.kernels:
                return note(token, logit, self.token, self.out_tokens, self.logit, self._counters, self._increments, self.rows)
        self.out_tokens[:rows].index_copy_(1, self.column, token[:, None])
        if logit is None:
            token = token.clamp(min=0)
        else:
            self.logit[:rows].index_copy_(1, self.column, logit[:, None])
        self.token[:rows] = token
        self._counters.add_(self._increments)

    def _hidden(self, rows: int, context: int) -> torch.Tensor:
        """The hidden state after each row's token. On a CPU the host reads a row's position at no cost, and extend reads no
        more keys than there are, where step reads its whole bucket."""
        k, v = self._cut(rows, context)
        if rows == 1 and self.extends and self.capture is None:
            return self.model.extend(self.token[:1, None], k, v, self.position[:1], start=int(self.position[0]))
        return self.model.step(self.token[:rows, None], k, v, self.position[:rows], context=context)

    def _choose(self, hidden: torch.Tensor, rows: slice, mode: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if mode == "greedy":
            return self.model.choose(hidden)
        return sample(
            self.model.logits(hidden), self.temperature[rows], self.top_k[rows], self.top_p[rows], self.seed[rows],
            self.position[rows], filtered=mode == "filtered",
        ), None

    def _set(self, slot: int, s: Sampling) -> None:
        self.temperature[slot].fill_(s.temperature)
        self.top_p[slot].fill_(s.top_p)
        self.top_k[slot].fill_(s.top_k)
        self.seed[slot].fill_(s.seed)

    def sent(self, tokens, logits, begin: graphs.Mark, tally: torch.Tensor | None = None) -> Burst:
        tokens, logits, tally = (None if t is None else self._to_host(t) for t in (tokens, logits, tally))
        return Burst(tokens, logits, tally, begin, graphs.Mark(self.device))

    def _to_host(self, t: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(t.shape, dtype=t.dtype, pin_memory=self.device.type == "cuda")
        return pinned.copy_(t, non_blocking=True)

    def on_device(self) -> contextlib.AbstractContextManager:
        """graphs.Graph and Mark work on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
