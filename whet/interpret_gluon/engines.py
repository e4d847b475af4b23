"""A model of what Hopper's engines do beside its warps: copies, products and barriers that end when they end.

The warps of a program are threads of the host, of which one runs at a time. Between any two steps that others can see, another
may go on, and what is under way may end or not: a schedule decides. What a GPU leaves open is open here too, so a kernel that
is right only by luck is wrong under some schedule: a tile read before it came, overwritten while it is being read, a barrier
waited for in the wrong phase, a fence that is missing.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class Hazard(RuntimeError):
    """What a GPU would answer with wrong values, a fault or silence."""


class Cancelled(BaseException):
    """Another thread failed: this one ends, whatever it was doing."""


EXTREMES = {  # whether copies into shared memory end at once; whether products and copies out of it do
    "early": (True, True), "late": (False, False), "late copies": (False, True), "late products": (True, False),
}


@dataclass
class Interleaving:
    """When things under way end and who goes on: one of the extremes, or "random" by a seed."""

    kind: str = "random"
    seed: int = 0
    resident: int = 1  # programs that run at one time

    def __post_init__(self):
        if self.kind != "random" and self.kind not in EXTREMES:
            raise ValueError(f"an interleaving is random or one of {', '.join(EXTREMES)}, got {self.kind!r}")
        self.random = random.Random(self.seed)

    def copies_at_once(self) -> bool:
        return self.random.random() < 0.5 if self.kind == "random" else EXTREMES[self.kind][0]

    def products_at_once(self) -> bool:
        return self.random.random() < 0.5 if self.kind == "random" else EXTREMES[self.kind][1]


@dataclass
class Program:
    """One program of a grid, its place in it, and what the copy engine still does for it."""

    place: tuple[int, int, int]
    copies: int = 0


class Barrier:
    """An mbarrier: a phase ends when everyone expected has arrived and every byte expected has come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.alive = False

    def init(self, count: int) -> None:
        if self.alive:
            raise Hazard("an mbarrier is initialised twice")
        self.count = self.pending = count
        self.bytes, self.phase, self.alive = 0, 0, True

    def __str__(self) -> str:
        return f"an mbarrier whose phase {self.phase} lacks {self.pending} of {self.count} arrivals and {self.bytes} bytes"

    def check(self) -> None:
        if not self.alive:
            raise Hazard("an mbarrier is used before it is initialised, or after it was invalidated")

    def arrive(self, count: int, expected: int = 0) -> None:
        self.check()
        if count > self.pending:
            raise Hazard(f"an mbarrier of {self.count} has one arrival too many in a phase")
        self.pending -= count
        self.bytes += expected
        self.turn()

    def arrived(self, size: int) -> None:
        self.check()
        self.bytes -= size
        self.turn()

    def turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def passed(self, parity: int) -> bool:
        self.check()
        return self.phase != parity


class SharedTile:
    """A tensor in shared memory as threads see it, and as copies and tensor cores do: the two differ until a fence."""

    def __init__(self, threads: torch.Tensor, engines: torch.Tensor):
        self.threads, self.engines = threads, engines

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype) -> "SharedTile":
        new = torch.empty(tuple(shape), dtype=dtype)
        new.view(torch.uint8).fill_(0xFF)  # a NaN of every float
        return cls(new, new.clone())

    @property
    def nbytes(self) -> int:
        return self.threads.numel() * self.threads.element_size()

    def of(self, view: Callable[[torch.Tensor], torch.Tensor]) -> "SharedTile":
        return SharedTile(view(self.threads), view(self.engines))


class PendingProduct:
    """A product on its way, and its value once it has been made."""

    def __init__(self, run: Callable[[], torch.Tensor] | None = None, made: torch.Tensor | None = None):
        self.run, self.made = run, made

    def finish(self) -> None:
        if self.run is not None:
            self.made, self.run = self.run(), None

    @property
    def value(self) -> torch.Tensor:
        if self.made is None:
            raise Hazard("a product that is on its way is read: wait for it with warpgroup_mma_wait")
        return self.made


@dataclass(eq=False)
class Warps:
    """Warps that run one function of a program: a thread, and what it has asked for and not waited for."""

    program: Program
    run: Callable[[], Any]
    ready: Callable[[], bool] | None = None  # what it waits for; None where it can go on
    waits_for: "Barrier | str" = ""
    idles: bool = False  # until what it asked for ends by itself, which may take as long as the others can go on
    ended: bool = False
    thread: threading.Thread = field(default_factory=threading.Thread)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    unfenced: list[SharedTile] = field(default_factory=list)
    products: list[PendingProduct] = field(default_factory=list)
    stores: list[Callable[[], None]] = field(default_factory=list)

    def drain(self, left: int) -> None:
        """Make all products but the last `left`."""
        while len(self.products) > left:
            self.products.pop(0).finish()

    def stored(self, left: int) -> None:
        while len(self.stores) > left:
            self.stores.pop(0)()


class Engines:
    """The programs that run at one time: their threads, of which one has the turn, and the copies under way."""

    def __init__(self, schedule: Interleaving):
        self.schedule = schedule
        self.warps: list[Warps] = []
        self.copies: list[tuple[Barrier, Callable[[], None]]] = []
        self.error: BaseException | None = None
        self.favoured: Program | None = None
        self.polls = 0  # in turn, while no other warps did anything
        self.done = threading.Semaphore(0)
        self.local = threading.local()

    @property
    def current(self) -> Warps:
        return self.local.warps

    def run(self, programs: Sequence[tuple[Program, Callable[[], Any]]]) -> None:
        """Run these programs to their end; the first error of any is raised here."""
        self.warps, self.copies, self.error, self.done = [], [], None, threading.Semaphore(0)
        for program, run in programs:
            self.start(program, run)
        self.pick().turn.release()
        self.done.acquire()
        for w in self.warps:
            w.turn.release()
            w.thread.join()
        if self.error:
            raise self.error

    def start(self, program: Program, run: Callable[[], Any]) -> Warps:
        warps = Warps(program, run)
        self.warps.append(warps)
        warps.thread = threading.Thread(target=self.live, args=(warps,), daemon=True)
        warps.thread.start()
        return warps

    def live(self, warps: Warps) -> None:
        self.local.warps = warps
        warps.turn.acquire()
        try:
            if self.error is None:
                warps.run()
                self.left_behind(warps)
        except Cancelled:
            return
        except BaseException as e:
            self.error = self.error or e
        warps.ended = True
        self.pass_on()

    def left_behind(self, warps: Warps) -> None:
        if warps.stores:
            raise Hazard("warps end while a copy out of shared memory is on its way: wait for it with tma.store_wait(0)")
        alone = all(w.ended or w is warps for w in self.warps if w.program is warps.program)
        if alone and warps.program.copies:
            raise Hazard("a program ends while a copy into its shared memory is on its way: wait at its barrier")

    def pass_on(self) -> None:
        """The turn goes to another, after the one that has it has ended."""
        try:
            chosen = None if self.error or all(w.ended for w in self.warps) else self.pick()
        except BaseException as e:
            self.error, chosen = e, None
        (chosen.turn if chosen else self.done).release()

    def pick(self) -> Warps:
        """Who goes on. What is under way ends here, as the schedule has it."""
        while True:
            able = [w for w in self.warps if not w.ended and (w.ready is None or w.ready())]
            if self.schedule.kind == "random":
                able = self.favour(able)
                n = self.schedule.random.randrange(len(able) + len(self.copies)) if able or self.copies else 0
                if n < len(able):
                    return able[n]
            elif able:
                return next((w for w in able if not w.idles), able[0])
            if not self.copies:
                raise Hazard("no warps can go on: " + "; ".join(str(w.waits_for) for w in self.warps if not w.ended))
            self.end_copy()

    def favour(self, able: list[Warps]) -> list[Warps]:
        """Those of one program, as long as it can go on, and another now and then: so programs draw far ahead of each other."""
        if able and self.schedule.random.random() < 0.02:
            self.favoured = self.schedule.random.choice(able).program
        return [w for w in able if w.program is self.favoured] or able

    def end_copy(self) -> None:
        """A copy ends: any, or where all is late one that is waited for, so that the rest stay on their way."""
        wanted = [w.waits_for for w in self.warps if w.ready is not None and not w.ended]
        late = [i for i, (barrier, _) in enumerate(self.copies) if any(barrier is w for w in wanted)]
        among = late if late and self.schedule.kind != "random" else range(len(self.copies))
        self.copies.pop(among[self.schedule.random.randrange(len(among))])[1]()

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: "Barrier | str" = "") -> None:
        """A point at which others may go on; with `ready`, until that holds."""
        me, self.polls = self.current, 0
        if self.schedule.kind == "random" or ready is not None and not ready():
            me.ready, me.waits_for = ready, waits_for
            self.give_way(me)

    def idle(self) -> None:
        """As pause, for warps that wait for what they asked for: it may not end before the others can go no further."""
        self.current.idles = True
        self.give_way(self.current)
        self.current.idles = False

    def give_way(self, me: Warps) -> None:
        self.warps.remove(me)  # to the end: of those that can go on, the first does
        self.warps.append(me)
        chosen = self.pick()
        if chosen is not me:
            chosen.turn.release()
            me.turn.acquire()
            if self.error is not None:
                raise Cancelled
        me.ready = None

    def poll(self) -> None:
        """As idle, for warps that ask again and again until another has answered."""
        self.polls += 1
        if self.polls > 1000:
            raise Hazard("warps ask again and again, and nobody else can go on")
        if self.copies:
            self.end_copy()
        self.idle()

    def copy(self, barrier: Barrier, run: Callable[[], None]) -> None:
        """Bring a tile into shared memory, now or at some time to come."""
        if self.schedule.copies_at_once():
            run()
        else:
            program = self.current.program
            program.copies += 1

            def ended() -> None:
                program.copies -= 1
                run()

            self.copies.append((barrier, ended))

    def store(self, run: Callable[[], None]) -> None:
        """Take a tile out of shared memory, now or when it is waited for at the latest."""
        self.current.stores.append(run)
        if self.schedule.products_at_once():
            self.current.stores[:] = [finished(s) for s in self.current.stores]

    def product(self, product: PendingProduct) -> None:
        self.current.products.append(product)
        if self.schedule.products_at_once():
            for p in self.current.products:
                p.finish()

    def specialize(self, runs: Sequence[Callable[[], Any]]) -> None:
        """The first function in these warps, the others each in warps of its own; back when all have ended."""
        started = [self.start(self.current.program, run) for run in runs[1:]]
        runs[0]()
        self.pause(lambda: all(w.ended for w in started), "the other warps of its program")


def finished(store: Callable[[], None]) -> Callable[[], None]:
    """What is left of a copy that has been made: something to wait for."""
    store()
    return lambda: None
