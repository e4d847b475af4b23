"""The child process in which candidates are tried: what crashes, hangs or poisons the GPU there costs only its candidacy.

One JSON object per line each way: `main` answers, `Worker` asks.
"""

import collections
import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from whet import graphs, machine
from whet.child import Child, Lost
from whet.figures import error_line
from whet.isolation import Leftovers, isolated
from whet.measure import ceilings, race, slower_by, stepper
from whet.op import DTYPES, Call, Op, Rank, base, discover
from whet.prove import forget_evidence, provable, prove, run_once, wrong_now

HEAVY = 2 * 10**12  # flops of a call whose float64 oracle takes longer than starting a candidate: 50 TFLOP/s of float64
VERIFIERS = 8  # children that verify side by side: verifying is mostly compiling, which is the host's work
HUNG: dict[tuple[str, str], str] = {}  # op and name of the candidates of which a kernel hung: why they are not run again
SHAPES: dict[str, dict] = {  # of an answer that is no error
    "verify": {"ok": bool, "share": (int, float), "why": str}, "measure": {"timings": dict},
}


class Worker:
    """A handle on one child process, started at first use and again after each loss.

    warm  the child starts the GPU and the compiler before its first request, for one that is started ahead of its work
    """

    def __init__(self, interpret: bool = False, preload: str | None = None, warm: bool = False):
        self.interpret, self.preload, self.warm = interpret, preload, warm
        self.child: Child | None = None

    def start(self) -> None:
        if self.child is not None:
            return
        # One compile thread: an op is two or three kernels, and a pool of compilers per child costs more than it compiles.
        env = os.environ | {"TRITON_INTERPRET": "1" if self.interpret else "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        # The child imports the whet that runs here, whatever lies in the folder it is started from.
        root = str(Path(__file__).resolve().parent.parent)
        start = f"import sys; sys.path[0] = {root!r}; from whet.worker import main; main()"
        options = [*(["--preload", self.preload] if self.preload else []), *(["--warm"] if self.warm else [])]
        self.child = Child([sys.executable, "-c", start, *options], env)

    def alive(self) -> bool:
        return self.child is not None and self.child.process.poll() is None

    def ask(self, limit_s: float, **request) -> dict:
        """The child's answer. Raises Lost if it dies, takes longer than limit_s, or says what is no answer.

        A candidate that hung the GPU once is not run again by this process, for whatever call.
        """
        names = request.get("impls", [request.get("impl")])
        candidates = [(request["call"]["op"], name) for name in names] if request["what"] in SHAPES else []
        for candidate in candidates:
            if candidate in HUNG:
                raise Lost(HUNG[candidate], hung=True)
        self.start()
        assert self.child
        try:
            answer = self.child.ask(limit_s, request)
        except Lost as e:
            self.child = None
            if e.on_gpu and len(candidates) == 1:
                HUNG[candidates[0]] = f"not run again, since at {Call(**request['call']).key} {e}"
            raise
        if answer.pop("poisoned", False):
            self.stop()
        if not well_formed(request["what"], answer):
            self.stop()
            raise Lost("answered in another form than was asked for")
        return answer

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()
            self.child = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Crew:
    """Children that are started ahead of their work: they take as long to begin as the work takes to be found."""

    def __init__(self, count: int):
        self.idle = [Worker(warm=True) for _ in range(count)]

    def take(self, preload: str | None = None) -> Worker:
        """One that waits, or a new one where none does; it is the taker's to stop."""
        with contextlib.suppress(IndexError):  # another took the last
            while preload is None:
                worker = self.idle.pop()
                if worker.alive():
                    return worker
                worker.stop()
        return Worker(preload=preload)

    def stop(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.idle.pop().stop()

    def __enter__(self) -> "Crew":
        try:
            for worker in self.idle:
                worker.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()


def hands_here() -> int:
    """How many children verify side by side on this machine."""
    return min(VERIFIERS, max(1, (os.cpu_count() or 1) // 2))


class Hands:
    """Threads that take shares of work off one queue, each with children of its own.

    shares   lists of items; the items of one share are one hand's
    work     work(items, shared) does what it is handed; shared is whether there are several hands
    jobs     how many at most
    """

    def __init__(self, shares: Iterable[Iterable], work: Callable[[Iterable, bool], None], jobs: int | None = None):
        self.queue, self.stopped = collections.deque(shares), False
        count = min(jobs or hands_here(), len(self.queue))
        given = [(self._taken(), count > 1) for _ in range(count)]
        self.threads = [threading.Thread(target=work, args=args, daemon=True) for args in given]
        for thread in self.threads:
            thread.start()

    def _taken(self) -> Iterator:
        with contextlib.suppress(IndexError):  # another hand took the last
            while self.queue:
                for item in self.queue.popleft():
                    if self.stopped:
                        return
                    yield item

    def wait(self) -> None:
        for thread in self.threads:
            while thread.is_alive():
                thread.join(0.2)  # short, so that Ctrl-C is heard

    def stop(self) -> None:
        """No hand takes another item."""
        self.stopped = True
        self.queue.clear()


def in_shares(todo: Iterable[tuple[Call, str]]) -> list[list[tuple[Call, str]]]:
    """Candidates of calls as the shares of hands, the slowest first, so that none is left to one hand at the end.

    Those of a call with large products stay together: there the oracle is the work, and a child keeps its results.
    """
    ops, flops = discover(), dict[str, int]()

    def slowest(item: tuple[Call, str]) -> tuple:
        call, name = item
        if call.key not in flops:
            flops[call.key] = flops_of(ops[call.op], call)
        return flops[call.key] < HEAVY, ops[call.op].impl(name).rank != Rank.COMPILED, -flops[call.key]

    found: dict[str, list[tuple[Call, str]]] = {}
    for call, name in sorted(todo, key=slowest):
        found.setdefault(call.key if flops[call.key] >= HEAVY else f"{call.key} {name}", []).append((call, name))
    return list(found.values())


def flops_of(op: Op, call: Call) -> int:
    """By the op's own count; 0 where that needs the values of its arguments."""
    try:
        return op.cost(**op.inputs(dtype=DTYPES[call.dtype], device="meta", **call.case)).of(call.grad)[1]
    except Exception:
        return 0


def well_formed(what: str, answer: dict) -> bool:
    """Whether an answer is an error in words, or holds what its kind of question asks for."""
    if "error" in answer:
        return isinstance(answer["error"], str)
    return all(isinstance(answer.get(name), kind) for name, kind in SHAPES.get(what, {}).items())


@torch.no_grad()
def _args(op: Op, call: Call) -> dict:
    torch.manual_seed(0)
    return op.inputs(dtype=DTYPES[call.dtype], device=machine.this_machine().device, **call.case)


def far_slower(
    op: Op, args: dict, grad: bool, impl: str, beside: Sequence[str], modes: Sequence[str], reach: float
) -> tuple[float, str] | None:
    """(the least of the ratios, all in words) where a quick look finds it slower in each mode than one of the others."""
    found: dict[str, tuple[float, str]] = {}
    beside = [other for other in beside if not op.why_not(base(other), args)]  # what refuses is not chosen either
    for mode in (m for m in modes if m != "graph" or not op.impl(impl).no_graph):  # what is not captured is not chosen there
        for other in beside:
            if (over := slower_by(op, impl, other, args, grad, mode)) > reach:
                found[mode] = over, other
                break
        else:
            return None
    where = {"graph": " in a CUDA graph"}
    words = " and ".join(f"{over:.1f} times as slow as {other}{where.get(mode, '')}" for mode, (over, other) in found.items())
    return (min(over for over, _ in found.values()), words) if found else None


def answer_verify(call: Call, impl: str, beside: Sequence[str] = (), modes: Sequence[str] = (), reach: float = 0.0) -> dict:
    """The verdict on a candidate; "proved" is the key of the call that was proved in full where it is not the call itself.

    beside, modes, reach   where a quick look finds it so many times as slow as one of these other candidates, in each of
                           these modes, it is not proved: "screened"
    """
    op, device = discover()[call.op], machine.this_machine().device
    args = _args(op, call)
    if reason := op.why_not(base(impl), args):
        return {"ok": False, "share": 0.0, "why": f"refused: {reason}"}
    if beside and (found := far_slower(op, args, call.grad, impl, beside, modes, reach)):
        why = f"not verified: {found[1]} at a quick look, so it cannot be chosen"
        return {"ok": False, "share": 0.0, "why": why, "screened": round(found[0], 2)}
    del args  # a proof makes its own
    proof = replace(call, case=provable(op, dict(call.case), call.dtype))
    verdict = prove(op, impl, call, device)
    answer = {"ok": verdict.ok, "share": round(verdict.share, 4), "why": verdict.why}
    return answer | ({"rule": verdict.rule} if verdict.rule else {}) | ({} if proof == call else {"proved": proof.key})


def answer_measure(call: Call, impls: list[str], mode: str, seconds: float) -> dict:
    """The race of a call's verified candidates, simplest first, and the call's floor."""
    op = discover()[call.op]
    args = _args(op, call)
    steps = {name: stepper(op, op.candidate(name).run, args, call.grad) for name in impls}
    found = race(steps, keep=op.stock, mode=mode, seconds=seconds)
    cost, roof = op.cost(**args), ceilings()
    floor = roof.floor_ms(cost, call.grad, call.dtype)
    moved, flops = cost.of(call.grad)
    del args, steps
    return {
        "wrong": wrong_now(op, impls, call, machine.this_machine().device),
        "timings": {name: t.as_dict() for name, t in found.timings.items()}, "outcome": found.outcome.as_dict(),
        "floor_ms": round(floor, 6), "bound": roof.bound(cost, call.grad, call.dtype), "bytes": moved, "flops": flops,
    } | ({"busy": found.busy} if found.busy else {})


def answer_once(call: Call, impl: str) -> dict:
    """A candidate run once more, for what it leaves behind."""
    run_once(discover()[call.op], impl, call, machine.this_machine().device)
    return {}


ANSWERS: dict[str, Callable[..., dict]] = {"verify": answer_verify, "measure": answer_measure, "once": answer_once}
AGAIN = {"verify": "once"}  # what is asked the second time in place of it, where that is enough to see what is left behind


def _answer(request: dict) -> dict:
    """The answer to a request. What a candidate leaves behind counts if it does so twice: a first use may keep files open."""
    streams, before = _streams(), Leftovers.now()
    answer = _attempt(dict(request))
    left = Leftovers.now().since(before)
    if _streams() != streams:
        return {"error": "closes or replaces the standard streams", "poisoned": True}
    if "error" in answer or not left or request["what"] == "measure":
        return answer | ({"poisoned": True} if "error" in answer and left else {})
    before = Leftovers.now()
    once = _attempt(dict(request) | {"what": AGAIN.get(request["what"], request["what"])})
    if "error" in once or (left := Leftovers.now().since(before)):
        return {"error": once.get("error") or f"leaves {left} after each turn", "poisoned": True}
    return answer


def _streams() -> list[tuple[int, int] | None]:
    """Which files are standard input, output and error."""
    found: list[tuple[int, int] | None] = []
    for fd in range(3):
        try:
            found.append((os.fstat(fd).st_dev, os.fstat(fd).st_ino))
        except OSError:
            found.append(None)
    return found


def _attempt(request: dict) -> dict:
    what = request.pop("what")
    changed: list[str] = []
    if threads := request.pop("threads", None):  # the parent's number of them; set here, where no candidate is to blame
        torch.set_num_threads(threads)
    try:
        call = Call(**request.pop("call"))
        with isolated() as changed:
            answer = ANSWERS[what](call, **request)
    except torch.cuda.OutOfMemoryError as e:
        torch.cuda.empty_cache()
        return {"error": f"out of memory: {str(e).split('.')[0]}"}
    except BaseException as e:  # a candidate may fail in any way, by exiting too; the reason goes to the report
        poisoned = torch.cuda.is_available() and "CUDA error" in str(e)
        also = f"; leaves {', '.join(changed)} changed" if changed else ""
        return {"error": f"{error_line(e)}{also}", "poisoned": poisoned}
    return {"error": f"leaves {', '.join(changed)} changed"} if changed else answer


def _end_with_parent() -> None:
    """A parent that was killed outright cannot stop its child, so the child watches for it, even in a hung kernel."""
    parent = os.getppid()
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os.killpg(0, signal.SIGKILL)


def _warm(compiler: bool) -> None:
    """What the first candidate would wait for and leave open: a CUDA context; the first compiled one dynamo and inductor."""
    with contextlib.suppress(Exception):  # whatever is wrong shows again, with a reason, at the first request
        x = torch.ones(8, device="cuda", requires_grad=True)
        if compiler:
            torch.compile(lambda t: t.sin().square())(x).sum().backward()
            torch._dynamo.reset()


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the parent was started with it ignored, too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # whoever reads standard input reads nothing, never a request
    os.dup2(2, 1)  # whatever candidates print goes to stderr, never between the answers
    if "--preload" in sys.argv:
        spec = importlib.util.spec_from_file_location("whet_preload", sys.argv[sys.argv.index("--preload") + 1])
        assert spec and spec.loader
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if torch.cuda.is_available():
        _warm("--warm" in sys.argv)
    graphs.hang_s = graphs.hang_s or graphs.HANG_S
    print(json.dumps({"ready": True}), file=replies, flush=True)
    seen: collections.deque = collections.deque(maxlen=1)
    for line in requests:
        request = json.loads(line)
        number = request.pop("id")
        if request["call"] not in seen:  # another call: guards of the last one's compiled graphs would only slow this one
            forget_evidence()
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()
            gc.freeze()  # every CUDA graph and every reading of memory collects garbage: from here on among new objects alone
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # for the children beside this one
            seen.append(request["call"])
        print(json.dumps(_answer(request) | {"id": number}), file=replies, flush=True)
