"""Verified and fastest -> Choices. Each candidate is tried in a child process; each result is saved as soon as it is known."""

from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch

from whet import machine
from whet.choices import Choices
from whet.lock import Lock
from whet.measure import MODES, Timing, fastest
from whet.op import SIMPLICITY, Call, Op, discover
from whet.worker import Lost, Worker

LIMIT_S = 120.0  # a candidate that takes longer to compile and verify is given up


def modes_here() -> tuple[str, ...]:
    return MODES if torch.cuda.is_available() else ("eager",)


def tune(
    calls: Iterable[tuple[Call, int]],
    lock: Lock,
    modes: tuple[str, ...] | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    seconds: float = 0.25,
    limit_s: float = LIMIT_S,
    preload: str | None = None,
    bucket: bool = True,
) -> dict[str, Choices]:
    """Choices per mode for these calls: what the lock knows is kept, the rest is verified, measured and saved.

    calls     (call, how often) pairs, as Recorder collects them
    seconds   measuring time per candidate and call
    limit_s   time after which a candidate is given up
    preload   a Python file the child process runs first, for ops of your own
    bucket    round sizes that vary up to powers of two; a bench times exactly what it was asked
    Under torch.distributed rank 0 decides and the others receive what it chose.
    """
    modes = modes or modes_here()
    if not _leader():
        return _broadcast(None, modes)
    ops = discover()
    wanted = {}
    for call, count in calls:
        call = call.bucketed(ops[call.op]) if bucket else call
        wanted[call.key] = (call, wanted.get(call.key, (call, 0))[1] + count)
    total = sum(len(ops[call.op].impls) for call, _ in wanted.values()) * len(modes)
    done = 0
    with Worker(preload=preload) as worker, Worker(interpret=True, preload=preload) as interpreter:
        for call, count in wanted.values():
            op = ops[call.op]
            for mode in modes:
                entry = lock.calls.setdefault(f"{call.key} @ {mode}", {"call": asdict(call), "mode": mode, "candidates": {}})
                entry["count"] = count
                if not entry.get("chosen"):
                    for name in op.impls:
                        progress(f"{op.name}/{name} {mode}", done, total)
                        _candidate(lock, entry, op, call, mode, name, worker, interpreter, limit_s)
                        done += 1
                    progress(f"{op.name} {mode}: timing", done, total)
                    _choose(lock, entry, op, call, mode, worker, seconds, limit_s)
                else:
                    done += len(op.impls)
    progress("done", total, total)
    return _broadcast({mode: lock.table(mode) for mode in modes}, modes)


def _candidate(lock, entry, op: Op, call: Call, mode: str, name: str, worker: Worker, interpreter: Worker, limit_s: float) -> None:
    """Verify one candidate unless the lock already says how that went, in this mode or another."""
    if name in entry["candidates"]:
        return
    twin = next((e["candidates"][name] for e in lock.calls.values() if e["call"] == entry["call"] and name in e["candidates"]), None)
    if twin is not None:
        result = {k: v for k, v in twin.items() if k in ("ok", "share", "why", "interpreted")}
    elif op.impls[name].needs == "triton" and not torch.cuda.is_available():
        reduced = {k: min(v, op.tiny[k]) if k in op.tiny and isinstance(v, int) else v for k, v in call.case.items()}
        small = Call(call.op, reduced, call.dtype, call.grad)
        result = _ask_verify(interpreter, small, name, limit_s) | {"interpreted": small.key}
    else:
        result = _ask_verify(worker, call, name, limit_s)
    if result["ok"] and mode == "graph":
        result |= _ask_capture(worker, call, name, limit_s)
    entry["candidates"][name] = result
    lock.save()


def _ask_verify(worker: Worker, call: Call, name: str, limit_s: float) -> dict:
    try:
        answer = worker.ask(limit_s, what="verify", call=asdict(call), impl=name)
    except Lost as e:
        answer = {"error": str(e)}
    return answer if "ok" in answer else {"ok": False, "share": 0.0, "why": answer["error"]}


def _ask_capture(worker: Worker, call: Call, name: str, limit_s: float) -> dict:
    try:
        answer = worker.ask(limit_s, what="capture", call=asdict(call), impl=name)
    except Lost as e:
        answer = {"error": str(e)}
    return {"ok": False, "why": f"cannot be captured as a CUDA graph: {answer['error']}"} if "error" in answer else {}


def _choose(lock: Lock, entry: dict, op: Op, call: Call, mode: str, worker: Worker, seconds: float, limit_s: float) -> None:
    able = [n for n, c in entry["candidates"].items() if c["ok"] and "interpreted" not in c]
    answer = _ask_measure(worker, call, able, mode, seconds, limit_s)
    if "error" in answer:  # together they fail: find who, by timing each beside eager
        for name in [n for n in able if n != "eager"]:
            alone = _ask_measure(worker, call, ["eager", name], mode, seconds, limit_s)
            if "error" in alone:
                entry["candidates"][name] |= {"ok": False, "why": alone["error"]}
        able = [n for n in able if entry["candidates"][n]["ok"]]
        answer = _ask_measure(worker, call, able, mode, seconds, limit_s)
    if "error" in answer:
        entry |= {"chosen": op.stock, "why": f"nothing could be timed: {answer['error']}"}
    else:
        _conclude(entry, op, answer)
    lock.save()


def _ask_measure(worker: Worker, call: Call, impls: list[str], mode: str, seconds: float, limit_s: float) -> dict:
    try:
        return worker.ask(limit_s * max(1, len(impls)), what="measure", call=asdict(call), impls=impls, mode=mode, seconds=seconds)
    except Lost as e:
        return {"error": str(e)}


def _conclude(entry: dict, op: Op, answer: dict) -> None:
    timings = {n: Timing(**t) for n, t in answer.pop("timings").items()}
    for name, t in timings.items():
        entry["candidates"][name] |= t.as_dict()
    chosen, tied = fastest(timings, SIMPLICITY)
    others = {n: t.ms for n, t in timings.items() if n not in (chosen, "eager")}
    entry |= answer | {"chosen": chosen, "ms": timings[chosen].ms, "vs_eager": round(timings["eager"].ms / timings[chosen].ms, 4)}
    if others:
        rival = min(others, key=lambda n: others[n])
        entry |= {"rival": rival, "vs_rival": round(others[rival] / timings[chosen].ms, 4)}
    entry["why"] = "a tie: the simplest is kept" if tied else "fastest of the verified"


def save_plans(lock: Lock, target: str, result: dict) -> None:
    lock.plans[target] = result
    lock.save()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _leader() -> bool:
    return not _distributed() or torch.distributed.get_rank() == 0


def _broadcast(tables: dict[str, dict] | None, modes: tuple[str, ...]) -> dict[str, Choices]:
    if _distributed():
        box = [tables]
        torch.distributed.broadcast_object_list(box, src=0)
        tables = box[0]
    assert tables is not None
    return {mode: Choices(tables[mode]) for mode in modes}


def reduced_note() -> str:
    """What was and was not done with Triton kernels here, said plainly."""
    if torch.cuda.is_available():
        return "Triton kernels were verified and timed on this GPU."
    if machine.has("triton"):
        return "No GPU: Triton kernels were checked in the interpreter at reduced sizes and not timed; stock candidates were timed on the CPU."
    return "No GPU and no Triton: only stock candidates were verified and timed, on the CPU."
