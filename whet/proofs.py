"""Every candidate of many calls proved, and none timed: which are right here, and which trial stops the others.

It is the calibration of the verifier as well: a candidate that is known to be right and is rejected is a fault of the verifier.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch

from whet.measure import now
from whet.op import DTYPES, Call, base, discover, tensors
from whet.prove import KEPT
from whet.tune import LIMIT_S
from whet.worker import Hands, Lost, Worker


class Stopped(KeyboardInterrupt):
    """Ctrl-C; rows: what was proved until then."""

    def __init__(self, rows: list[dict]):
        self.rows = rows


OUTCOMES = ("right", "refused", "rejected", "failed")


def calls_of(names: Iterable[str], dtypes: Iterable[str], shapes: bool = True, cases: bool = True) -> list[Call]:
    """The ops' shapes, as they are benchmarked, and the cases of their tests."""
    ops = discover()
    if unknown := [n for n in names if n not in ops]:
        raise ValueError(f"prove: unknown op {unknown[0]!r}; there are {', '.join(ops)}")
    found = {}
    for op in (ops[n] for n in names or ops):
        for dtype in dtypes:
            for case in [*(op.shapes.values() if shapes else ()), *(op.cases if cases else ())]:
                call = Call(op.name, case, dtype, bool(op.grads))
                found[call.key] = call
    return list(found.values())


def prove_all(
    calls: list[Call],
    impls: Iterable[str] = (),
    without: Iterable[str] = (),
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    preload: str | None = None,
    limit_s: float = LIMIT_S,
    jobs: int | None = None,
) -> list[dict]:
    """One row for each candidate of each call: its outcome, the trial that stopped it, why, and how long it took.

    impls, without   only these impls, or all but these
    jobs             processes side by side
    """
    todo = _candidates(calls, set(impls), set(without))
    proving = Proving(preload, limit_s, progress, todo)
    hands = Hands([[item] for item in todo], proving.work, jobs)
    try:
        hands.wait()
        if proving.later:
            proving.work(proving.later, False)
    except KeyboardInterrupt:
        hands.stop()
        raise Stopped(in_order(proving.rows)) from None
    return in_order(proving.rows)


class Proving:
    """What hands share that prove candidates side by side."""

    def __init__(self, preload: str | None, limit_s: float, progress: Callable, todo: list[tuple[Call, list[str]]]):
        self.preload, self.limit_s, self.progress = preload, limit_s, progress
        self.total = sum(len(names) for _, names in todo)
        self.rows: list[dict] = []
        self.later: list[tuple[Call, list[str]]] = []  # what failed beside others, maybe for memory, gets a turn alone

    def work(self, items: Iterable, shared: bool) -> None:
        with Worker(interpret=not torch.cuda.is_available(), preload=self.preload) as worker:
            for call, names in items:
                for name in names:
                    self.prove(worker, call, name, shared)

    def prove(self, worker: Worker, call: Call, name: str, shared: bool) -> None:
        started = now()
        try:
            answer = worker.ask(self.limit_s, what="verify", call=asdict(call), impl=name)
        except Lost as e:
            answer = {"error": str(e)}
        if shared and "out of memory" in answer.get("error", ""):
            self.later.append((call, [name]))
            return
        self.rows.append(row(call, name, answer, now() - started))
        self.progress(f"proving {call.op}/{name}", len(self.rows), self.total)


def in_order(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda r: (r["op"], r["dtype"], str(r["case"]), r["impl"]))


def _candidates(calls: list[Call], wanted: set[str], left_out: set[str]) -> list[tuple[Call, list[str]]]:
    """(call, candidates), the largest calls first: all, or those of the impls that are wanted and not left out.

    Candidates of a small call stay together, since a child keeps its oracle for the next of them.
    """
    ops, found = discover(), []
    for call in calls:
        op = ops[call.op]
        args = op.inputs(dtype=DTYPES[call.dtype], device="meta", **call.case)
        names = [n for n in op.candidates(args) if base(n) not in left_out and (not wanted or base(n) in wanted)]
        size = sum(t.numel() for t in tensors(args))
        found += [(size, call, names)] if size <= KEPT else [(size, call, [name]) for name in names]
    return [(call, names) for _, call, names in sorted(found, key=lambda f: -f[0]) if names]


def row(call: Call, name: str, answer: dict, seconds: float) -> dict:
    why = answer.get("error", answer.get("why", ""))
    ok, refused = answer.get("ok"), why.startswith("refused")
    outcome = "failed" if "error" in answer else "right" if ok else "refused" if refused else "rejected"
    found = dict(op=call.op, case=dict(call.case), dtype=call.dtype, impl=name, outcome=outcome, why=why)
    return found | dict(rule=answer.get("rule", ""), share=answer.get("share", 0.0), seconds=round(seconds, 2))
