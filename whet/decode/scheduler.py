"""Many prompts through one runner: places in the batch, prefixes that are still in the cache, bursts enqueued and read.

A burst is enqueued before the one ahead of it is read, so that a GPU never waits for the host. A row that turns out to have
ended has then run a few steps too many: their tokens are dropped, and its place goes to the next prompt.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from whet import measure
from whet.decode.request import Request
from whet.decode.runner import Burst, DecodeRunner, mode_of
from whet.decode.speculate import DRAFT, Speculator

BURST = 8  # tokens of a row between two looks of the host, on a GPU
RESERVE = 1024  # new tokens that a prompt gets room for at once; a longer answer grows the cache on its way


@dataclass
class Slot:
    """A row of the runner, as the host knows it.

    cached_tokens   those whose keys and values are in the cache
    position        where the row stands once all that is enqueued has run; with speculation, at most
    enqueued        new tokens that will then have been chosen; with speculation, at least
    uncertain       bursts enqueued and not read of which the host does not know how far they go
    idle_position   the place that an idle row writes to again and again; None while it runs
    """

    cached_tokens: list[int] = field(default_factory=list)
    request: Request | None = None
    position: int = 0
    enqueued: int = 0
    uncertain: int = 0
    idle_position: int | None = 0

    @property
    def live(self) -> bool:
        return self.request is not None and self.request.reason is None and self.enqueued < self.request.limit

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens need not be fed again. The last one must: it gives the first new token."""
        limit = min(len(self.cached_tokens), len(tokens) - 1)
        return next((i for i in range(limit) if self.cached_tokens[i] != tokens[i]), limit)


@dataclass
class BurstInFlight:
    """A burst under way, whose it is, and how many speculative steps it has, if it has."""

    burst: Burst
    rows: dict[int, Request]  # row of the burst -> request
    first_slot: int = 0
    drafted_steps: int = 0


class Server:
    """burst: tokens of a row between two looks of the host; ahead: bursts that are enqueued before one is read."""

    def __init__(self, runner: DecodeRunner, speculator: Speculator | None = None):
        self.runner, self.speculator = runner, speculator
        self.burst, self.ahead = (BURST, 1) if runner.device.type == "cuda" else (1, 0)
        self.slots = [Slot() for _ in range(runner.rows)]

    def serve(self, requests: Sequence[Request]) -> Generator[tuple[Request, int, str], None, None]:
        """Each token with the text it makes certain, as they come. Ended early, all is left ready for the next call."""
        waiting, in_flight = deque(requests), deque[BurstInFlight]()
        self._rest()
        try:
            while waiting or in_flight or any(s.request for s in self.slots):
                self._admit(waiting, in_flight)
                while in_flight and not self.ahead:  # where a burst is done when it is enqueued, first tokens wait for none
                    yield from self._read(in_flight.popleft())
                if more := self._enqueue(idle=not in_flight):
                    in_flight.append(more)
                while len(in_flight) > (self.ahead if more else 0):
                    yield from self._read(in_flight.popleft())
        finally:
            self._rest()

    def _rest(self) -> None:
        """No row runs; each is positioned after its cached tokens. Whatever was interrupted, this is a state to go on from."""
        cache = self.runner.cache
        for i, s in enumerate(self.slots):
            if s.request is not None and s.request.reason is None:
                s.request.fail("interrupted")
            self._free(s)
            s.cached_tokens = s.cached_tokens[: cache.capacity - 1] if i < cache.rows else []
            s.idle_position = len(s.cached_tokens)
        self.runner.place_all([len(s.cached_tokens) for s in self.slots], live=False)

    @staticmethod
    def _free(s: Slot) -> None:
        """The cache holds what was read, less the last token, which was perhaps never fed, and what an idle row wrote over."""
        if s.request is not None:
            s.cached_tokens = [*s.request.tokens, *s.request.new[:-1]][: s.idle_position]
        s.request, s.uncertain = None, 0

    def _idle(self, i: int, context: int) -> None:
        """An idle row inside a burst writes to one place: after its cached tokens, where that lies within the context."""
        s = self.slots[i]
        after = s.position if s.request is not None else len(s.cached_tokens)
        place = min(after, context - 1) if s.idle_position is None else min(s.idle_position, context - 1)
        if place != s.idle_position:
            self.runner.place(i, place, live=False)
            s.idle_position, s.cached_tokens = place, s.cached_tokens[:place]

    def _hold(self, rows: int, tokens: int) -> None:
        """Room in the cache. A cache that had to give some up holds less of what came before."""
        self.runner.hold(rows, tokens)
        cache = self.runner.cache
        for i, s in enumerate(self.slots):
            if s.request is None:
                s.cached_tokens = s.cached_tokens[: cache.capacity - 1] if i < cache.rows else []

    def _rows(self, *slots: int) -> int:
        """How many rows a step has that reaches these places."""
        return self.runner.bucket(max(slots) + 1)

    def _taken(self) -> list[int]:
        return [i for i, s in enumerate(self.slots) if s.request is not None]

    def _admit(self, waiting: deque[Request], in_flight: deque[BurstInFlight]) -> None:
        """Prompts into free places, as long as all in the batch could come to their full length together."""
        while waiting:
            free = [i for i, s in enumerate(self.slots) if s.request is None]
            if not free:
                return
            request, taken = waiting[0], self._taken()
            best = max(free, key=lambda i: self.slots[i].shared_prefix(request.tokens)) if request.reuse else free[0]
            # A place further up would make every step as wide as that place.
            slot = best if self._rows(best, *taken) == self._rows(free[0], *taken) else free[0]
            longest = max([request.total, *(r.total for i in taken if (r := self.slots[i].request))])
            if not self.runner.cache.fits(longest, self._rows(slot, *taken)):
                return
            waiting.popleft()
            try:
                in_flight.append(self._start(slot, best, request))
            except (ValueError, torch.OutOfMemoryError) as e:
                request.fail(str(e).splitlines()[0])
                if not self.runner.cache.rows:
                    self._lost()
                self._settle(slot)

    def _lost(self) -> None:
        """The cache could not grow and gave up its memory: what every sequence held went with it."""
        for i, s in enumerate(self.slots):
            if s.request is not None:
                s.request.fail("the cache lost its memory when it could not grow for another prompt; lower max_batch")
                self._free(s)
            s.cached_tokens = []
            self._settle(i)

    def _start(self, slot: int, source: int, request: Request) -> BurstInFlight:
        s, taken = self.slots[slot], self._taken()
        now = [len(request.tokens) + min(request.limit, RESERVE), *(self.slots[i].position + 1 for i in taken)]
        self._hold(self._rows(slot, *taken), max(now))
        reused = self.slots[source].shared_prefix(request.tokens) if request.reuse else 0
        s.cached_tokens = []
        self.runner.cache.copy(source, slot, reused)
        s.cached_tokens, request.reused = request.tokens[:reused], reused
        burst = self.runner.prefill(slot, request.tokens, reused, request.sampling)
        s.cached_tokens, s.request = list(request.tokens), request
        s.position, s.enqueued, s.uncertain, s.idle_position = len(request.tokens), 1, 0, None
        if self.speculator is not None and request.contest is not None:
            self.speculator.begin(request.tokens)
        for i in self._taken():
            if (other := self.slots[i].request) is not None:
                other.alone &= len(taken) == 0
        return BurstInFlight(burst, {0: request}, slot)

    def _enqueue(self, idle: bool) -> BurstInFlight | None:
        """The next burst; None where there is none, or where what is under way should be read first, unless nothing is."""
        live = {i: s for i, s in enumerate(self.slots) if s.live}
        if not live:
            return None
        if self.speculator is not None and (steps := self._draft_steps(live[0])) > 0:
            return self._speculate(self.speculator, live[0], steps, idle)
        if any(s.uncertain for s in live.values()):
            return None
        top, rows = max(s.position for s in live.values()), self._rows(*live)
        self._hold(self._rows(*self._taken()), top + 1)
        context = self.runner.context(top + 1)
        requests = {i: s.request for i, s in live.items() if s.request}
        drafting = any(r.contest and not r.contest.off for r in requests.values())
        n = min(BURST if drafting else self.burst, context - top, *(r.limit - live[i].enqueued for i, r in requests.items()))
        for i in range(rows):
            if i not in live:
                self._idle(i, context)
        modes = {mode_of(r.sampling) for r in requests.values()}
        mode = modes.pop() if len(modes) == 1 else "filtered"
        if not idle and not self.runner.ready(("step", rows, context, mode)):
            return None
        burst = self.runner.steps(n, rows, context, mode)
        if self.speculator is not None and drafting:
            self.speculator.follow(top, n)
        for s in live.values():
            s.position, s.enqueued = s.position + n, s.enqueued + n
        return BurstInFlight(burst, requests)

    def _draft_steps(self, s: Slot) -> int:
        """Steps with drafts to enqueue next: none before the first plain burst, once they lost, or without room for a draft."""
        r = s.request
        if r is None or r.contest is None or r.contest.off or s.enqueued == 1:
            return 0
        room = (self.runner.cache.longest - s.position) // (DRAFT + 1)
        return min(max(1, self.burst // 2), r.limit - s.enqueued, room)

    def _speculate(self, speculator: Speculator, s: Slot, n: int, idle: bool) -> BurstInFlight | None:
        end = s.position + n * (DRAFT + 1)
        self._hold(1, end)
        speculator.hold()
        context = self.runner.context(end)
        if s.request is None or not (idle or self.runner.ready(("speculate", context))):
            return None
        burst = speculator.steps(n, context)
        s.position, s.enqueued, s.uncertain = end, s.enqueued + n, s.uncertain + 1
        return BurstInFlight(burst, {0: s.request}, drafted_steps=n)

    def _read(self, in_flight: BurstInFlight) -> Iterator[tuple[Request, int, str]]:
        rows, now = in_flight.burst.read(), measure.now()
        for row, request in in_flight.rows.items():
            s, tokens = self.slots[in_flight.first_slot + row], rows[row]
            if request.reason is not None:
                continue
            if request.contest is not None:
                tokens = self._tally(in_flight, s, request, tokens)
            each = in_flight.burst.seconds / max(1, len(tokens)) if request.new else 0.0
            for token in tokens:
                request.busy += each
                text = request.take(token, now)
                if request.reason is not None:
                    self._end(in_flight.first_slot + row)
                yield request, token, text
                if request.reason is not None:
                    break

    def _tally(self, in_flight: BurstInFlight, s: Slot, request: Request, tokens: list[int]) -> list[int]:
        """Those of the tokens that count; and the contest learns what the burst took."""
        contest, n = request.contest, in_flight.drafted_steps
        if contest is None or in_flight.burst.tally is None:
            if contest is not None and request.new:
                contest.saw_plain(len(tokens), in_flight.burst.seconds)
            return tokens
        count, drafted, agreed = in_flight.burst.tally.tolist()
        s.position, s.enqueued, s.uncertain = s.position - (n * (DRAFT + 1) - count), s.enqueued + count - n, s.uncertain - 1
        contest.saw(n, count, in_flight.burst.seconds, drafted, agreed, len(request.new) + count)
        return tokens[:count]

    def _end(self, i: int) -> None:
        """The place is free again. What a broken sequence left is wiped, lest it spread to whoever comes next."""
        s = self.slots[i]
        broken = s.request is not None and s.request.reason == "error"
        self._free(s)
        if broken:
            s.cached_tokens = []
            self.runner.cache.clear(i)
        self._settle(i)

    def _settle(self, i: int) -> None:
        """An idle row is positioned after its cached tokens."""
        s, cache = self.slots[i], self.runner.cache
        s.cached_tokens = s.cached_tokens[: cache.capacity - 1] if i < cache.rows else []
        s.idle_position = len(s.cached_tokens)
        self.runner.place(i, s.idle_position, live=False)
