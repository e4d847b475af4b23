"""A system that decodes, whoever's: one interface for whet's own runners and for those it is measured against."""

import functools
from collections.abc import Callable

import torch

from whet.decode import persistent
from whet.decode.cache import Cache
from whet.decode.runner import DecodeRunner
from whet.decode.sampling import Sampling
from whet.models.qwen3 import Qwen3, kernels
from whet.ops._pdl import pdl


def column(tokens: torch.Tensor, i: int) -> torch.Tensor:
    """(B, 1) with the strides of any other such tensor: a compiled step meets one layout only."""
    return tokens[:, i : i + 1].clone(memory_format=torch.contiguous_format)


class Contender:
    """Decodes `batch` rows, at one length of context.

    feed(prompt, first)   (1, C), (B, 1): every row has read the prompt, and is given its first token next
    step(token)           (B, 1) -> the next greedy token (B, 1) and logits (B, V)
    rewind()              as feed left it
    close()               give back what it holds
    """

    first: torch.Tensor

    def __init__(self, model, batch: int, length: int):
        """length: tokens that a row will come to at most."""
        raise NotImplementedError

    @classmethod
    def refused(cls, model, batch: int) -> str | None:
        """Why it is not made for this, or nothing: then it is no contender here."""
        return None

    def feed(self, prompt: torch.Tensor, first: torch.Tensor) -> None:
        raise NotImplementedError

    def step(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def rewind(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing, unless there is something."""

    def reading(self, prompt: torch.Tensor, first: torch.Tensor) -> Callable[[], object]:
        """What is timed for a prompt: reading it."""
        return functools.partial(self.feed, prompt, first)

    def forced(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 logits (B, T, V) of tokens (B, T) given one by one, whatever the system itself would have chosen."""
        self.rewind()
        return torch.stack([self.step(column(tokens, i))[1].float().clone() for i in range(tokens.shape[1])], 1)

    def chain(self, tokens: int) -> torch.Tensor:
        """(B, tokens): what it chooses after the first token."""
        self.rewind()
        token, found = self.first, []
        for _ in range(tokens):
            token = self.step(token)[0].clone()  # a compiled step gives the same memory each time
            found.append(token)
        return torch.cat(found, 1)

    def run(self, tokens: int) -> None:
        """What is timed: as many greedy tokens for each row after the first; the host waits for none of them."""
        self.rewind()
        token = self.first
        for _ in range(tokens):
            token = self.step(token)[0].clone()


class GraphContender(Contender):
    """whet's runner: one captured graph replayed for each token; on a CPU, plain calls."""

    path = "graph"

    def __init__(self, model: Qwen3, batch: int, length: int):
        cache = Cache(model.c, model.embed.dtype, model.embed.device, max_tokens=model.c.max_positions)
        self.model, self.batch, self.cached_tokens = model, batch, 0
        if cache.device.type == "cuda" and not model.own_ops:
            model.ops = kernels()  # a contender is verified before it is timed
        self.runner = DecodeRunner(model, cache, batch, self.path)
        self.runner.hold(batch, length)
        self.context = self.runner.context(length)

    def feed(self, prompt, first):
        self.runner.prefill(0, prompt[0].tolist(), 0, Sampling()).read()
        for row in range(1, self.batch):
            self.runner.cache.copy(0, row, prompt.shape[1])
        self.runner.advance[: self.batch].fill_(1)
        self.cached_tokens, self.first = prompt.shape[1], first

    def reading(self, prompt, first):
        tokens = prompt[0].tolist()
        return lambda: self.runner.prefill(0, tokens, 0, Sampling())

    def rewind(self):
        self.runner.position[: self.batch].fill_(self.cached_tokens)
        self.runner.token[: self.batch] = self.first[:, 0]

    @torch.no_grad()
    def step(self, token):
        """What the graph holds, with another token than the one it chose."""
        at, (k, v) = self.runner.position[: self.batch], (t[:, : self.batch] for t in self.runner.cache.kv)
        with pdl():
            hidden = self.model.step(token, k, v, at, context=self.context)
        at += 1
        logits = self.model.logits(hidden[:, -1])
        return logits.argmax(-1, keepdim=True), logits

    def chain(self, tokens):
        self.rewind()
        found = self.runner.steps(tokens, self.batch, self.context, "greedy").read()
        return torch.tensor(found, device=self.first.device)

    def run(self, tokens):
        self.rewind()
        self.runner.steps(tokens, self.batch, self.context, "greedy")

    def close(self):
        self.runner.drop_graphs()
        self.runner.cache.drop()


class PersistentContender(GraphContender):
    """whet's persistent kernel: one launch for all tokens of one sequence."""

    path = "persistent"

    @classmethod
    def refused(cls, model: Qwen3, batch: int) -> str | None:
        if batch > 1:
            return "it decodes one sequence"
        return persistent.model_refused(model) or persistent.device_refused(model.embed.device)

    def step(self, token):
        """One launch for one given token; its logits are those that the kernel compares."""
        self.runner.token[:1] = token[:, 0]
        logits = torch.empty(1, self.model.c.vocab, dtype=torch.float32, device=token.device)
        self.runner.persistent_steps(1, logits)
        return self.runner.token[:1, None], logits


OURS: dict[str, type[Contender]] = {"whet graph": GraphContender, "whet persistent": PersistentContender}
