"""Speculation by n-gram lookup: what followed the last tokens earlier in the text is guessed again and checked in one step.

Drafting, checking and accepting happen on the device; the host only learns how many tokens a burst gave. A draft that is
wrong costs time, never a token: each token that counts is the likeliest one after those before it. Its keys and values
stay in the cache; those of rejected tokens are overwritten by the next step.
"""

import functools
import itertools
from collections import deque

import torch

from whet import graphs
from whet.decode.runner import RING, Burst, DecodeRunner
from whet.op import base, discover
from whet.ops._gemv import batch_invariant
from whet.ops._pdl import pdl
from whet.ops._weights import columns, quant_of

DRAFT = 7  # tokens guessed: with the one that is known a step takes 8, the most that the decode kernels take at once
WINDOW = 16  # steps over which speculation is compared with plain decoding


def draft(history: torch.Tensor, position: torch.Tensor, count: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What followed the latest earlier place with the same last three tokens, else two; and whether there was one.

    history    tokens of the row; the last known one stands at position (1,)
    context    more than position: tokens after it are not looked at
    A place so near the end that fewer than `count` tokens follow it is a loop: they are repeated.
    """
    h, last = history[:context], history[(position - torch.arange(2, -1, -1, device=history.device)).clamp(min=0)]
    start = torch.arange(3, context + 1, device=history.device)  # of the tokens that follow a place
    two = (h[1:-1] == last[1]) & (h[2:] == last[2]) & (start <= position)
    three = two & (h[:-2] == last[0])
    best = torch.where(two, start + three * context, 0).amax(0, keepdim=True)
    found = best > 0
    begin = torch.where(found, best - (best > context) * context, position)
    i = torch.arange(count, device=history.device)
    return history[begin + i % (position + 1 - begin)], found


def agreed(drafted: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """How many drafted tokens, from the first on, are those that the model chose in their place; shape (1,)."""
    return (drafted == chosen[: len(drafted)]).long().cumprod(0).sum(0, keepdim=True)


class Speculator:
    """Row 0 of a runner, decoded greedily with drafts. history holds its tokens up to the one that is fed next."""

    def __init__(self, runner: DecodeRunner):
        self.runner = runner
        runner.extends = False
        if runner.device.type == "cuda":
            runner.one_pass = batch_invariant_in_one_pass(runner.model)
        self.history = torch.zeros(0, dtype=torch.int64, device=runner.device)

    def hold(self) -> None:
        """As long as the cache, and a draft after it. It moves after the cache has, when no graph is left that knows it."""
        size = self.runner.cache.capacity + DRAFT + 1
        if size > len(self.history):
            self.history = torch.cat([self.history, self.history.new_zeros(size - len(self.history))])

    def begin(self, tokens: list[int]) -> None:
        """The runner has prefilled this prompt."""
        self.hold()
        self.history[: len(tokens)] = self.runner.upload(tokens)
        self.history[len(tokens)] = self.runner.token[0]

    def follow(self, position: int, n: int) -> None:
        """The runner has taken n plain steps from a position."""
        self.history[position + 1 : position + 1 + n] = self.runner.out_tokens[0, :n]

    @torch.no_grad()
    def steps(self, n: int, context: int) -> Burst:
        """n steps, each of 1 to DRAFT + 1 tokens. Its tally says how many tokens, drafted tokens and accepted ones."""
        r, width = self.runner, n * (DRAFT + 1)
        if width > RING:
            raise ValueError(f"speculation: n must be at most {RING // (DRAFT + 1)} steps, got {n}")
        with r.on_device():
            r.tally.zero_()  # before a capture too: its warm-up writes there
            run = r.graph(("speculate", context), functools.partial(self._step, context))
            begin = graphs.Mark(r.device)
            for _ in range(n):
                run()
            return r.sent(r.out_tokens[:1, :width], r.logit[:1, :width], begin, r.tally)

    def _step(self, context: int) -> None:
        r, i = self.runner, torch.arange(DRAFT + 1, device=self.runner.device)
        position = r.position[:1]
        guess, found = draft(self.history, position, DRAFT, context)
        tokens = torch.cat([r.token[:1], guess])
        with pdl(), batch_invariant():
            hidden = r.verify(tokens, context)
            if r.one_pass:
                chosen, logit = r.model.choose(hidden)
            else:
                chosen, logit = map(torch.cat, zip(*(r.model.choose(h) for h in hidden.split(1))))
        right = agreed(guess, chosen)
        self.history.index_copy_(0, position + 1 + i, chosen)
        r.out_tokens[0].index_copy_(0, r.column + i, chosen)
        r.logit[0].index_copy_(0, r.column + i, logit)
        r.token[:1] = chosen[right]
        r.count(right + 1, found * DRAFT, found * right)


def batch_invariant_in_one_pass(model) -> bool:
    """Whether every product of a step, of one row and of a whole draft, is by kernels that take rows one by one."""
    layer, ops = model.layers[0], discover()
    products = {"norm_linear": [layer.qkv], "linear_add": [layer.o, layer.down], "norm_swiglu": [layer.gate_up]}
    for name, weights in (*products.items(), ("norm_argmax", [model.head])):
        for w, M in itertools.product(weights, (1, DRAFT + 1)):
            rows = w.data.shape[0] // (2 if name == "norm_swiglu" else 1)
            size = {"F" if name == "norm_swiglu" else "N": rows, "K": columns(w.data), "M": M, "quant": quant_of(w.data)}
            args = ops[name].inputs(dtype=model.embed.dtype, device="meta", **size)
            if base(model.ops.pick(ops[name], ops[name].call(args))) != "triton" or ops[name].impls["triton"].refuses(**args):
                return False
    return True


class Contest:
    """Tokens a second with speculation against those without, of one generation while it runs."""

    def __init__(self):
        self.plain = 0.0  # tokens a second
        self.drafted = self.agreed = 0
        self.recent: deque[tuple[int, int, float]] = deque()
        self.off: str | None = None

    def saw_plain(self, tokens: int, seconds: float) -> None:
        self.plain = tokens / seconds if seconds > 0 else 0.0

    def saw(self, steps: int, tokens: int, seconds: float, drafted: int, agreed: int, so_far: int) -> None:
        """A burst with drafts; so_far: tokens of the generation. Once WINDOW steps in a row are slower it is off for good."""
        self.drafted, self.agreed = self.drafted + drafted, self.agreed + agreed
        self.recent.append((steps, tokens, seconds))
        while sum(s for s, _, _ in self.recent) - self.recent[0][0] >= WINDOW:
            self.recent.popleft()
        total_steps, total, spent = (sum(column) for column in zip(*self.recent))
        if self.off is None and total_steps >= WINDOW and total < self.plain * spent:
            self.off = f"off after {so_far} tokens: {total / spent:.0f} tokens/s with it, {self.plain:.0f} without"

    @property
    def accepted(self) -> float | None:
        """Share of the drafted tokens that the model chose too; None where nothing was drafted."""
        return self.agreed / self.drafted if self.drafted else None
