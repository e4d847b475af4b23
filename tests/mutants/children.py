"""Mutated copies of whet, and child processes that ask them what the tuner asks.

A child is forked from a process that has imported torch and Triton but not whet: it starts in a fraction of a second, imports
the copy it is given, and runs whet.worker.main, the very loop that the tuner talks to.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mutants.listing import PACKAGE, Mutant

TESTS = Path(__file__).parent.parent
WALLS = (  # of an answer that names no rule, by its words
    ("in place", "inputs kept"), ("non-finite or unwritten", "unwritten"), ("the graph is cut", "graph"), ("must be", "shape"),
    ("returns", "shape"), ("expected none", "graph"), ("error", "values"), ("differ", "values"),
)


@dataclass(frozen=True)
class Question:
    """A call and a candidate of it, asked of a mutant or, with none, of whet as it is."""

    mutant: Mutant | None
    call: dict  # op, case, dtype, grad
    impl: str
    path: str = ""
    target: str = ""

    @property
    def of_whet(self) -> "Question":
        """The same question to whet as it is."""
        return replace(self, mutant=None)

    @property
    def key(self) -> str:
        return json.dumps([self.call, self.impl, self.path, self.target], sort_keys=True)


def wall(answer: dict) -> str | None:
    """What stopped it: a rule of the verifier, an exception, the child's end; None where nothing did."""
    if "lost" in answer:
        return "the child"
    if "error" in answer:
        return "raises"
    if answer["ok"]:
        return None
    return answer.get("rule") or next((rule for words, rule in WALLS if words in answer["why"]), "other")


def overlay(folder: str, mutant: Mutant | None, package: Path = PACKAGE) -> None:
    """A copy of the package in the folder, the mutant's fault in it; compiled files come along, and stay valid but for one."""
    shutil.copytree(package, Path(folder) / "whet")
    if mutant is not None:
        target = Path(folder) / "whet" / mutant.file
        text = mutant.patched(package)
        target.unlink()
        target.write_text(text)
        os.utime(target, ns=(time.time_ns(), time.time_ns() + 10**9))


class Child:
    """One forked process with one question; `answer` is filled in when it has ended."""

    def __init__(self, question: Question, limit_s: float, package: Path, serve: Callable[[Question], None]):
        self.question, self.began, self.limit_s = question, time.monotonic(), limit_s
        self.folder = tempfile.TemporaryDirectory(prefix="whet-mutant-")
        overlay(self.folder.name, question.mutant, package)
        self.output, written = os.pipe()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the child)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(written, 1)
                os.dup2(self.errors.fileno(), 2)
                sys.path.insert(0, self.folder.name)
                os.chdir(self.folder.name)
                serve(question)
            except BaseException as e:
                print(json.dumps({"error": f"{type(e).__name__}: {str(e)[:200]}"}), flush=True)
            os._exit(0)
        os.close(written)
        self.text = b""

    def read(self) -> bool:
        """Takes what has arrived. Returns whether that was the end."""
        piece = os.read(self.output, 65536)
        self.text += piece
        return not piece

    def ended(self, late: bool) -> dict:
        """The answer, or how the child was lost; it and all it started are gone then."""
        seconds = round(time.monotonic() - self.began, 2)
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.output)
        self.folder.cleanup()
        self.errors.seek(0)
        tail = ([line.strip() for line in self.errors.read().splitlines() if line.strip()] or ["no message"])[-1]
        self.errors.close()
        said = self.text.decode(errors="replace").splitlines()
        lines = [line for line in said if line.startswith("{") and not line.startswith('{"ready"')]  # which is no answer yet
        if late:
            return {"lost": f"took longer than {self.limit_s:.0f} s", "seconds": seconds}
        if not lines:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
            return {"lost": f"the process died ({how}): {tail[:200]}", "seconds": seconds}
        return json.loads(lines[-1]) | {"seconds": seconds}


def ask_worker(question: Question) -> None:
    """In the child: the tuner's own loop, given one request."""
    source, sink = os.pipe()
    os.write(sink, (json.dumps({"id": 0, "what": "verify", "call": question.call, "impl": question.impl}) + "\n").encode())
    os.close(sink)
    os.dup2(source, 0)
    sys.stdin, sys.argv = os.fdopen(0), ["whet-worker"]
    from whet.aot import pretended
    from whet.worker import main

    with pretended(question.target, sms=2) if question.target else contextlib.nullcontext():
        main()


def ask_decoder(question: Question) -> None:
    """In the child: the decode kernel, by whet's own proof on a GPU, else in the emulator that runs its source on a CPU."""
    sys.path.insert(1, str(TESTS))
    import torch

    if torch.cuda.is_available():
        from mutants.decoding import on_gpu as judge
    else:
        from mutants.decoding import on_cpu as judge
    print(json.dumps(judge(question.call["case"])), flush=True)


def serve(question: Question) -> None:
    (ask_decoder if question.path else ask_worker)(question)


def run(
    questions: Iterable[Question], jobs: int, limit_s: float, package: Path = PACKAGE,
    serve: Callable[[Question], None] = serve,
) -> Iterator[tuple[Question, dict]]:
    """Asks all, `jobs` at a time; answers come as they are ready."""
    waiting, selector = list(questions)[::-1], selectors.DefaultSelector()
    running: dict[int, Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = Child(waiting.pop(), limit_s, package, serve)
                running[child.output] = child
                selector.register(child.output, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(0.2)}
            for fd, child in list(running.items()):
                late = time.monotonic() - child.began > limit_s
                if late or (fd in ready and child.read()):
                    selector.unregister(fd)
                    del running[fd]
                    yield child.question, child.ended(late)
    finally:
        for child in running.values():
            child.ended(late=True)
