"""One prompt on its way: what was asked, the tokens so far, their text up to a stop, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whet import measure
from whet.decode.sampling import Sampling
from whet.decode.speculate import Contest


@dataclass
class Completion:
    """What came of a prompt.

    text, tokens       what was generated; the token that ended it is among the tokens, a stop is not in the text
    reason             "stop": an end token or a stop string; "length": max_new_tokens or a full context; "error"
    error              one line, where reason is "error"
    prompt_tokens      of which reused_tokens were still in the cache from an earlier turn
    first_token_s      seconds from the call to the first token, waiting for others included
    decode_s           seconds from the first token to the last
    accepted           share of the drafted tokens that the model chose too; None where none were drafted
    speculation        "on", or why it went off; None without
    bytes_per_token    what a step at batch 1 must read; None on a CPU and where prompts shared steps
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str = "error"
    error: str | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0
    first_token_s: float | None = None
    decode_s: float | None = None
    accepted: float | None = None
    speculation: str | None = None
    bytes_per_token: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second once the first is there."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s else None

    @property
    def floor_share(self) -> float | None:
        """The time that reading the bytes takes at this GPU's measured copy rate, as a share of the time a token took.

        None where the rate was not measured yet: that is a benchmark of its own, which `whet machine` runs and keeps.
        """
        if self.bytes_per_token is None or self.tokens_per_s is None or (roof := measure.known_ceilings()) is None:
            return None
        return self.tokens_per_s * self.bytes_per_token / (roof.copy_gbs * 1e9)


class Writer:
    """Tokens to text, up to the first stop string. What might be the beginning of one is held back until it is not."""

    def __init__(self, text: Any, stops: Sequence[str]):
        self.stream, self.stops = text.stream(), tuple(stops)
        self.shown, self.pending = "", ""
        self.stopped = False

    def push(self, token: int) -> str:
        return self._show(self.stream.push(token), last=False)

    def end(self) -> str:
        """The rest, where no more tokens come."""
        return "" if self.stopped else self._show(self.stream.end(), last=True)

    def _show(self, fresh: str, last: bool) -> str:
        self.pending += fresh
        found = [at for stop in self.stops if (at := self.pending.find(stop)) >= 0]
        if found:
            self.stopped, self.pending = True, self.pending[: min(found)]
        keep = 0 if self.stopped or last else max((overlap(self.pending, stop) for stop in self.stops), default=0)
        out, self.pending = self.pending[: len(self.pending) - keep], self.pending[len(self.pending) - keep :]
        self.shown += out
        return out


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin the stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Request:
    """limit: new tokens at most. ends: tokens that end it. contest: with speculation, how it fares."""

    tokens: list[int]
    sampling: Sampling
    limit: int
    writer: Writer
    ends: frozenset[int]
    reuse: bool
    contest: Contest | None = None
    began: float = field(default_factory=measure.now)
    new: list[int] = field(default_factory=list)
    reused: int = 0
    alone: bool = True
    first_at: float | None = None
    last_at: float | None = None
    busy: float = 0.0  # seconds that its tokens after the first took to make
    reason: str | None = None
    error: str | None = None

    @property
    def total(self) -> int:
        """The most tokens it can come to."""
        return len(self.tokens) + self.limit

    def take(self, token: int, now: float) -> str:
        """One more token: the text that is now certain. reason is set once it was the last."""
        if token < 0:
            where = f"after {len(self.new)} new tokens" if self.new else "of the prompt"
            self.fail(f"the logits {where} are not finite: the weights or their dtype are at fault")
            return self.writer.end()
        self.new.append(token)
        self.first_at, self.last_at = self.first_at or now, now
        text = ""
        if token in self.ends:
            self.reason = "stop"
        else:
            text = self.writer.push(token)
            self.reason = "stop" if self.writer.stopped else "length" if len(self.new) == self.limit else None
        return text + self.writer.end() if self.reason else text

    def fail(self, error: str) -> None:
        self.reason, self.error = "error", error

    def completion(self) -> Completion:
        made = Completion(self.writer.shown, self.new, self.reason or "error", self.error, len(self.tokens), self.reused)
        if self.first_at is not None and self.last_at is not None:
            # Tokens of one burst are read at one moment: what they took to make is the least that decoding took.
            made.first_token_s, made.decode_s = self.first_at - self.began, max(self.last_at - self.first_at, self.busy)
        if self.contest is not None:
            made.accepted, made.speculation = self.contest.accepted, self.contest.off or "on"
        return made
