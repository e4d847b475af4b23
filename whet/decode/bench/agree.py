"""Does a system that decodes compute the model's function? What it must show before it is timed.

Its logits on given tokens, and the tokens it chooses by itself, against the model in a wider dtype by plain formulas. The
budget follows from the error of the same formulas in the model's own dtype, as everywhere else (whet/verify.py).
"""

from typing import Any

import torch

from whet.decode.bench.contender import Contender, column
from whet.decode.chunks import CHUNK
from whet.decode.oracle import by_formulas, full_float32, widened
from whet.models.qwen3 import Qwen3
from whet.verify import VALUE_FACTOR, Verdict, judge

CHECKED = 8  # tokens compared
MAX_ROWS = 3  # of a batch: its first, one within and its last


class Prompt:
    """A model that has read a prompt (1, C), for continuations of up to CHECKED tokens, one row after another."""

    @torch.no_grad()
    def __init__(self, model: Qwen3, prompt: torch.Tensor):
        c, self.model, self.length = model.c, model, prompt.shape[1]
        where: dict[str, Any] = dict(device=model.embed.device, dtype=model.embed.dtype)
        shape = (c.layers, 1, c.kv_heads, self.length + CHECKED, c.head_dim)
        self.cache = [torch.zeros(shape, **where) for _ in range(2)]
        for start in range(0, self.length, CHUNK):
            self.extend(prompt[:, start : start + CHUNK], start)

    def extend(self, tokens, start: int) -> torch.Tensor:
        at = torch.full((tokens.shape[0],), start, dtype=torch.int64, device=tokens.device)
        with by_formulas(self.model), full_float32():
            return self.model.extend(tokens, self.cache[0], self.cache[1], at, start=start)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, T, V) of tokens (rows, T) after the prompt."""
        hidden = torch.cat([self.extend(row, self.length) for row in tokens.split(1)])
        with by_formulas(self.model), full_float32():
            return self.model.logits(hidden)


class Truth:
    """What every system with these weights must give after one prompt, and by how much it may differ."""

    def __init__(self, model: Qwen3, prompt: torch.Tensor, forced: torch.Tensor):
        """prompt (1, C); forced (B, CHECKED): the tokens that each row of the batch is then given."""
        batch = forced.shape[0]
        self.prompt, self.forced = prompt, forced
        self.rows = sorted({0, batch // 2, batch - 1})[:MAX_ROWS]
        self.step = torch.finfo(model.embed.dtype).eps
        wider = torch.float64 if model.embed.dtype == torch.float32 else torch.float32
        self.oracle = Prompt(widened(model, wider), prompt)
        self.wanted = self.oracle.logits(forced[self.rows])
        self.eager = Prompt(model, prompt).logits(forced[self.rows])

    def judge(self, contender: Contender) -> Verdict:
        """Its logits on the forced tokens, then the tokens it chooses after the first of them."""
        contender.feed(self.prompt, column(self.forced, 0))
        given = contender.forced(self.forced)[self.rows]
        verdict = judge({"logits": given}, {"logits": self.eager}, {"logits": self.wanted}, self.step)
        return self.chosen(contender.chain(CHECKED)[self.rows], verdict) if verdict.ok else verdict

    def chosen(self, chain: torch.Tensor, verdict: Verdict) -> Verdict:
        """Each token it chose must be the likeliest, or so near to it that two logits within their budgets change places."""
        worst = (self.eager - self.wanted).abs().max().item() + self.step * self.wanted.abs().max().item()
        logits = self.oracle.logits(torch.cat([self.forced[self.rows, :1], chain[:, :-1]], 1))
        gap = (logits.amax(-1) - logits.gather(-1, chain[..., None]).squeeze(-1)).max().item()
        budget = 2 * VALUE_FACTOR * worst
        if gap <= budget:
            return verdict
        return Verdict(False, gap, budget, f"a chosen token's logit is {gap:.2e} below the likeliest's, more than {budget:.2e}")
