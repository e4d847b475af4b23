"""Verified and fastest -> Choices. Each candidate is tried in a child process; each result is saved as soon as it is known."""

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from whet import machine
from whet.choices import Choices, evidence_of
from whet.lock import Lock
from whet.measure import MODES, now
from whet.op import DTYPES, Call, Op, Rank, base, discover
from whet.race import Timing, apart_outcome, leanest, outcome
from whet.source import fingerprint
from whet.worker import Crew, Hands, Lost, Worker, in_shares

KERNEL = "triton"  # whet's own, where an op has one
LIMIT_S = 120.0  # a candidate that takes longer to compile and verify is given up
DECIDED = ("chosen", "untimed", "why", "ms", "vs_eager", "rival", "vs_rival", "floor_ms", "bound", "bytes", "flops", "busy")


def modes_here() -> tuple[str, ...]:
    return MODES if torch.cuda.is_available() else ("eager",)


@dataclass(frozen=True)
class Tuned:
    """choices: by mode, for "compile" and for "compile + graph"; entries: the lock's, by key, of the calls asked for."""

    choices: dict[str, Choices]
    entries: dict[str, dict]


def tune(
    calls: Iterable[tuple[Call, int]],
    lock: Lock,
    modes: tuple[str, ...] | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    seconds: float = 0.25,
    limit_s: float = LIMIT_S,
    preload: str | None = None,
    bucket: bool = True,
    reach: float | None = None,
    crew: Crew | None = None,
) -> Tuned:
    """Choices for these calls: what the lock knows is kept, the rest verified, measured, saved.

    calls     (call, how often) pairs, as Recorder collects them
    seconds   measuring time per candidate and call
    limit_s   time after which a candidate is given up
    preload   a Python file the child process runs first, for ops of your own
    bucket    round sizes that vary up to powers of two; a bench times exactly what it was asked
    reach     a candidate that a quick look finds so many times as slow as a rival in every mode is not verified, nor a Triton
              kernel without a GPU, which is not chosen either; None: all are
    crew      children that were started ahead, for whoever verifies first
    Under torch.distributed rank 0 decides and the others receive what it chose.
    """
    with Tuning(calls, lock, modes, progress, limit_s, preload, bucket, reach, crew) as tuning:
        return tuning.finish(seconds)


def entries_of(lock: Lock, calls: Iterable[Call], modes: tuple[str, ...] | None = None) -> dict[str, dict]:
    """The lock's entries for these calls, as they are bucketed, in each mode."""
    ops = discover()
    return _found(lock, [call.bucketed(ops[call.op]).key for call in calls], modes or modes_here())


def _found(lock: Lock, keys: Iterable[str], modes: tuple[str, ...]) -> dict[str, dict]:
    """The lock's entries of these calls' keys, in each mode that it has."""
    there = [f"{key} @ {mode}" for key in keys for mode in modes]
    return {key: lock.calls[key] for key in there if key in lock.calls}


class Tuning:
    """Tuning in two parts: from the start candidates are verified by children; finish() waits for them, then times.

    Between the two the caller may do what does not disturb children, such as compiling. Takes tune's arguments.
    """

    def __init__(
        self, calls: Iterable[tuple[Call, int]], lock: Lock, modes: tuple[str, ...] | None = None,
        progress: Callable[[str, int, int], None] = lambda text, done, total: None, limit_s: float = LIMIT_S,
        preload: str | None = None, bucket: bool = True, reach: float | None = None, crew: Crew | None = None,
    ):
        self.lock, self.modes = lock, modes or modes_here()
        self.work = Work(calls, lock, self.modes, progress, limit_s, preload, bucket, reach, crew) if leader() else None

    def __enter__(self) -> "Tuning":
        if self.work is not None:
            self.work.start()
        return self

    def __exit__(self, *_) -> None:
        if self.work is not None:
            self.work.hands.stop()
            self.work.timer.stop()

    def finish(self, seconds: float = 0.25) -> Tuned:
        """Wait until all is verified, time it, and choose."""
        if self.work is None:
            return Tuned(_broadcast(None), {})
        self.work.verify_rest()
        self.work.measure_all(seconds)
        tables = {mode: self.lock.table(mode) for mode in self.modes}
        # Liger's functions are not registered with torch.library: torch.compile breaks its graph at them, or fails.
        tables["compile + graph"] = self.lock.table(self.modes[-1], without=("liger",))
        tables["compile"] = self.lock.worth_launching(tables["compile + graph"], self.modes[-1])
        measured_in = {mode: mode if mode in self.modes else self.modes[-1] for mode in tables}
        made = {m: (table, evidence_of(self.lock.calls, measured_in[m], table)) for m, table in tables.items()}
        return Tuned(_broadcast(made), _found(self.lock, self.work.calls, self.modes))


class Work:
    """Everything one tuning has to do: first verify, side by side where there are cores, then time, alone on the GPU."""

    def __init__(
        self, calls, lock: Lock, modes, progress, limit_s: float, preload: str | None, bucket: bool,
        reach: float | None = None, crew: Crew | None = None,
    ):
        self.lock, self.modes, self.progress, self.limit_s, self.preload = lock, modes, progress, limit_s, preload
        self.reach, self.crew = reach, crew or Crew(0)
        self.ops = discover()
        self.calls: dict[str, Call] = {}
        counts: dict[str, int] = {}
        for call, count in calls:
            call = call.bucketed(self.ops[call.op]) if bucket else call
            self.calls[call.key] = call
            counts[call.key] = counts.get(call.key, 0) + count
        for key, call in self.calls.items():
            for mode in modes:
                self.entry(call, mode)["count"] = counts[key]
                self.drop_edited(call, mode)
        self.timer = Worker(preload=preload, warm=True)
        self.saving = threading.Lock()
        self.done = 0
        self.names = {key: self.candidates(call) for key, call in self.calls.items() if self.open(call)}
        self.total = sum(len(self.open(self.calls[key])) * (1 + len(names)) for key, names in self.names.items())
        self.todo = [(self.calls[key], name) for key, names in self.names.items() for name in names]

    def entry(self, call: Call, mode: str) -> dict:
        return self.lock.calls.setdefault(f"{call.key} @ {mode}", {"call": asdict(call), "mode": mode, "candidates": {}})

    def candidates(self, call: Call) -> list[str]:
        """What is to be tried for a call, simplest first."""
        op = self.ops[call.op]
        return op.candidates(op.inputs(dtype=DTYPES[call.dtype], device="meta", **call.case))

    def open(self, call: Call) -> list[str]:
        """The modes in which this call's choice is still to be made."""
        return [mode for mode in self.modes if not self.entry(call, mode).get("chosen")]

    def drop_edited(self, call: Call, mode: str) -> None:
        """What was proved from another source is proved again, and the choice made again."""
        entry, op = self.entry(call, mode), self.ops[call.op]
        edited = [n for n, c in entry["candidates"].items() if base(n) in op.impls and not self._holds(c, fingerprint(op, n))]
        screened = [n for n, c in entry["candidates"].items() if edited and "screened" in c]  # beside what is no more, perhaps
        _forget(entry, list(dict.fromkeys([*edited, *screened])))

    def _holds(self, candidate: dict, source: str) -> bool:
        """Whether a verdict is of this source; one that was left out by a quick look counts only where that is asked for."""
        return candidate.get("source") == source and (self.reach is not None or "screened" not in candidate)

    def tick(self, text: str, done: int = 1) -> None:
        self.done += done
        self.progress(text, self.done, self.total)

    def start(self) -> None:
        """Children begin to verify what is still open."""
        self.hands = Hands(in_shares(self.todo), self._verify_some)
        if self.todo:
            self.timer.start()  # ready by the time there is something to time

    def verify_rest(self) -> None:
        self.hands.wait()
        self._verify_some(self.todo, False)  # what failed beside others, maybe for memory, gets a turn alone
        if self.reach is not None:
            self.reach = None
            self._verify_again((call, mode) for call in map(self.calls.__getitem__, self.names) for mode in self.open(call))

    def _verify_again(self, entries: Iterable[tuple[Call, str]]) -> bool:
        """Whether there was a candidate to be verified after all."""
        items = [item for call, mode in entries for item in self._screened_in_vain(call, mode)]
        if items:
            self._verify_some(items, False)
        return bool(items)

    def _screened_in_vain(self, call: Call, mode: str) -> list[tuple[Call, str]]:
        """Candidates that were left out for another that turned out not to be right: they are forgotten, and to be verified."""
        entry = self.entry(call, mode)
        stock, kernel = (entry["candidates"].get(other, {}) for other in (self.ops[call.op].stock, KERNEL))
        spared = "screened" in kernel or kernel.get("why", "").startswith("refused")
        if stock.get("ok") and (kernel.get("ok", True) or spared):
            return []
        return [(call, name) for name in _forget(entry, [n for n, c in entry["candidates"].items() if "screened" in c])]

    def _verify_some(self, items: Iterable, shared: bool) -> None:
        with self.crew.take(self.preload) as worker, Worker(interpret=True, preload=self.preload) as interpreter:
            for call, name in items:
                entries = [self.entry(call, mode) for mode in self.open(call)]
                missing = [e for e in entries if name not in e["candidates"]]
                if not missing:
                    continue
                result = self._known(call, name) or self._verify(call, name, worker, interpreter)
                if result.pop("raised", False) and shared:
                    continue
                with self.saving:
                    for e in missing:
                        e["candidates"][name] = dict(result)
                    self.lock.save()
                    self.tick(f"verifying {call.op}/{name}", len(missing))

    def _known(self, call: Call, name: str) -> dict | None:
        """What the lock says of this candidate's correctness, learned for any mode; not that it was left out."""
        twins = (e["candidates"] for e in self.lock.calls.values() if e["call"] == asdict(call))
        source = fingerprint(self.ops[call.op], name)
        known = (candidates[name] for candidates in twins if "screened" not in candidates.get(name, {"screened": 0}))
        return next((_verdict(c) for c in known if self._holds(c, source)), None)

    def _verify(self, call: Call, name: str, worker: Worker, interpreter: Worker) -> dict:
        op = self.ops[call.op]
        proved_from = {"source": fingerprint(op, name)}
        if op.impl(name).needs == "triton" and not torch.cuda.is_available():
            if self.reach is not None:
                why = "not verified: Triton's kernels are not chosen without a GPU"
                return {"ok": False, "share": 0.0, "why": why, "screened": 0.0, "took_s": 0.0} | proved_from
            reduced = {k: min(v, op.tiny[k]) if k in op.tiny and isinstance(v, int) else v for k, v in call.case.items()}
            small = Call(call.op, reduced, call.dtype, call.grad)
            return _ask_verify(interpreter, small, name, self.limit_s) | proved_from | {"interpreted": small.key}
        return _ask_verify(worker, call, name, self.limit_s, **self._look(call, name)) | proved_from

    def _look(self, call: Call, name: str) -> dict:
        """Which others a quick look compares a candidate with before it is proved: the stock call, and whet's own kernel.

        The kernel only where a candidate is slow to prove, compiled or another package's: each child compiles it anew.
        """
        op = self.ops[call.op]
        if self.reach is None or base(name) in ("eager", op.stock):
            return {}
        slow = op.impl(name).rank in (Rank.COMPILED, Rank.PACKAGE) and KERNEL in self.names[call.key]
        return {"beside": [op.stock, *([KERNEL] if slow else [])], "modes": self.open(call), "reach": self.reach}

    def measure_all(self, seconds: float) -> None:
        for key, names in self.names.items():
            call, op = self.calls[key], self.ops[self.calls[key].op]
            for mode in self.open(call):
                entry = self.entry(call, mode)
                for name in names:
                    candidate = entry["candidates"][name]
                    if mode == "graph" and candidate["ok"] and (reason := op.impl(name).no_graph):
                        candidate |= {"ok": False, "why": f"cannot be captured as a CUDA graph: {reason}"}
                self.progress(f"timing {call.op} {mode}", self.done, self.total)
                timed = functools.partial(self._time, call, mode, seconds)
                _choose(entry, op, names, timed)
                if self._verify_again([(call, mode)]):  # what others were left out for was found wrong as it was timed
                    _choose(entry, op, names, timed)
                self.lock.save()
                self.tick(f"timed {call.op} {mode}")

    def _time(self, call: Call, mode: str, seconds: float, names: list[str]) -> dict:
        request = dict(call=asdict(call), impls=names, mode=mode, seconds=seconds, threads=machine.this_machine().threads)
        try:
            return self.timer.ask(self.limit_s * len(names), what="measure", **request)
        except Lost as e:
            return {"error": str(e)}


def _forget(entry: dict, names: list[str]) -> list[str]:
    """These candidates are to be verified again, and then the choice made again."""
    for name in names:
        del entry["candidates"][name]
    for fact in DECIDED if names else ():
        entry.pop(fact, None)
    return names


def _verdict(candidate: dict) -> dict:
    """The verdict of verification on a candidate, less what timing added."""
    facts = ("ok", "share", "why", "rule", "source", "interpreted", "proved", "screened", "took_s")
    return {k: v for k, v in candidate.items() if k in facts}


def _ask_verify(worker: Worker, call: Call, name: str, limit_s: float, **screen) -> dict:
    began = now()
    try:
        answer = worker.ask(limit_s, what="verify", call=asdict(call), impl=name, **screen)
    except Lost as e:
        answer = {"error": str(e), "hung": e.hung}
    answer["took_s"] = round(now() - began, 1)
    # What hung has had its turn: another, alone, would cost its limit again.
    if "ok" in answer:
        return answer
    return {"ok": False, "share": 0.0, "why": answer["error"], "raised": not answer.get("hung"), "took_s": answer["took_s"]}


def _choose(entry: dict, op: Op, names: list[str], timed: Callable[[list[str]], dict]) -> None:
    """Time what was verified and enter the choice. `names` in the order in which a tie is settled."""
    found = entry["candidates"]
    entry["candidates"] = found = {n: found[n] for n in names} | found
    able = [n for n in names if found[n]["ok"] and "interpreted" not in found[n]]
    eager_error = f"eager: {found['eager']['why']}"
    if not able and all("refused" not in c["why"] for c in found.values() if not c["ok"]):
        raise ValueError(f"{op.name}: no candidate could run; {eager_error}")
    if not able:
        entry |= {"chosen": op.stock, "untimed": True, "why": f"nothing to time: no candidate was verified; {eager_error}"}
        return
    answer = timed(able)
    if "error" in answer:  # together they fail: find who, each alone
        together, alone = answer["error"], {name: timed([name]) for name in able}
        for name in able:
            if "error" in alone[name]:
                found[name] |= {"ok": False, "why": alone[name]["error"]}
        able = [n for n in able if found[n]["ok"]]
        answer = timed(able) if able else {"error": together}
        if "error" in answer and able:  # they fit one at a time only
            how = f", timed one after another since together they failed: {together}"
            answer = alone[able[0]] | {"timings": {n: alone[n]["timings"][n] for n in able}, "outcome": None, "how": how}
    if wrong := answer.pop("wrong", {}):  # right at first, wrong on a later call: raced again without them
        for name, why in wrong.items():
            found[name] |= {"ok": False, "why": why, "rule": "after timing"}
        return _choose(entry, op, names, timed)
    if "error" in answer:
        entry |= {"chosen": op.stock, "untimed": True, "why": f"nothing could be timed: {answer['error']}"}
        return
    _conclude(entry, answer, op.stock)


def _conclude(entry: dict, answer: dict, stock: str) -> None:
    """Enter each candidate's times, its ratio to the fastest, and the choice that these ratios gave."""
    timings = {n: Timing(**t) for n, t in answer.pop("timings").items()}
    raced, how = answer.pop("outcome", None), answer.pop("how", "")
    found = leanest(outcome(**raced) if raced else apart_outcome(timings, stock), timings)
    for name, t in timings.items():
        entry["candidates"][name] |= t.as_dict() | found.ratios[name].as_dict()
    entry.pop("untimed", None)
    entry |= answer | {"chosen": found.chosen, "ms": timings[found.chosen].ms, "why": found.why + how}
    if "eager" in timings:
        entry["vs_eager"] = round(found.over("eager"), 4)
    if others := [n for n in timings if base(n) not in (base(found.chosen), "eager")]:
        rival = min(others, key=found.over)
        entry |= {"rival": rival, "vs_rival": round(found.over(rival), 4)}


def forget(lock: Lock, keys: Iterable[str]) -> None:
    """Take entries out of the lock, so that they steer no call any more."""
    for key in keys:
        lock.drop(key)
    lock.save()


def save_plans(lock: Lock, target: str, result: dict) -> None:
    lock.plans[target] = result
    lock.save()


def save_decoder(lock: Lock, key: str, verdict: dict) -> None:
    """The verdict of verification on a way to decode: {"ok": bool, "why": str, ...}."""
    lock.decoders[key] = verdict
    lock.save()


def save_swaps(lock: Lock, made: dict[str, dict]) -> None:
    """What optimize() decided of groups of like modules and of whole models, by their keys in the lock."""
    if leader():
        lock.swaps.update(made)
        lock.save()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leader() -> bool:
    return not _distributed() or torch.distributed.get_rank() == 0


def _broadcast(tables: dict[str, tuple[dict, dict]] | None) -> dict[str, Choices]:
    if _distributed():
        box = [tables]
        torch.distributed.broadcast_object_list(box, src=0)
        tables = box[0]
    assert tables is not None
    return {mode: Choices(table, evidence=evidence) for mode, (table, evidence) in tables.items()}


def reduced_note() -> str:
    """What was and was not done with Triton kernels here, in one line."""
    if torch.cuda.is_available():
        return "Triton kernels were verified and timed on this GPU."
    if machine.has("triton"):
        return (
            "No GPU: Triton kernels were checked in the interpreter at reduced sizes and not timed; "
            "stock candidates were timed on the CPU."
        )
    return "No GPU and no Triton: only stock candidates were verified and timed, on the CPU."
