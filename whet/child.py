"""A child process that answers one JSON object per line. If it dies or hangs, the caller gets the reason within its limit."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable

from whet.isolation import descendants

START_LIMIT_S = 120.0
LINE_LIMIT = 1 << 20  # bytes; an answer is a few hundred
TAIL = 4096  # bytes of what it printed last, for the reason


class Lost(Exception):
    """The child died, was stopped or answered what is no answer; the message says how.

    hung  it took longer than its limit: that was its turn, and another would cost as much again
    """

    def __init__(self, reason: str, hung: bool = False):
        super().__init__(reason)
        self.hung = hung


class Child:
    """A process in a session of its own, of which nothing is left when it is stopped.

    Threads read what it says, so that a line without an end, an endless one, or a pipe that a process it started holds open
    delays nobody: whoever asks waits on a queue, for as long as was granted.
    """

    def __init__(self, command: list[str], env: dict[str, str]):
        pipe = subprocess.PIPE
        # In a session of its own Ctrl-C is the parent's to handle, and all that it starts can be ended with it.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        self.tail = b""
        self.asked = 0
        self.ready = False
        self.reader, self.listener = self._thread(self._read_lines), self._thread(self._keep_tail)
        self._thread(self._end_group)

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        return thread

    def _read_lines(self) -> None:
        """Whole lines into the queue, and None when no more can come."""
        assert self.process.stdout
        rest = b""
        while (chunk := os.read(self.process.stdout.fileno(), 1 << 16)) and self.lines.qsize() < 64:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.lines.put(line)
            if len(rest) > LINE_LIMIT:
                break
        self.lines.put(None)

    def _keep_tail(self) -> None:
        assert self.process.stderr
        while chunk := os.read(self.process.stderr.fileno(), 1 << 16):
            self.tail = (self.tail + chunk)[-TAIL:]

    def _end_group(self) -> None:
        """When the process is over, so is what it started, before its number can belong to another."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self._kill()
        self.reader.join(1.0)  # what it printed last counts, unless a process that got away holds the pipe
        self.lines.put(None)

    def _kill(self) -> None:
        for pid in descendants(self.process.pid):  # those that left the group
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, limit_s: float, request: dict) -> dict:
        """The child's answer to a request. Raises Lost if it dies, takes longer than limit_s, or says what is no answer."""
        assert self.process.stdin
        if not self.ready:
            if self._line(START_LIMIT_S, f"did not start within {START_LIMIT_S:.0f} s", hung=False) != {"ready": True}:
                raise self._no_answer()
            self.ready = True
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps(request | {"id": self.asked}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._over() from None
        answer = self._line(limit_s, f"took longer than {limit_s:g} s", hung=True)
        if not isinstance(answer, dict) or answer.pop("id", None) != self.asked:
            raise self._no_answer()
        return answer

    def _line(self, limit_s: float, late: str, hung: bool) -> object:
        """The next thing that the child says; None for what is not JSON."""
        try:
            line = self.lines.get(timeout=limit_s)
        except queue.Empty:
            self.stop()
            raise Lost(late, hung) from None
        if line is None:
            raise self._over()
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    def _no_answer(self) -> Lost:
        self.stop()
        return Lost("wrote something else between the answers")

    def _over(self) -> Lost:
        """Why nothing more comes."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.stop()
            return Lost("closed the pipe of its answers, or wrote without an end")
        self.stop()
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if line.strip()] or ["no message"]
        return Lost(f"the process died ({f'signal {-code}' if code < 0 else f'exit {code}'}): {lines[-1][:200]}")

    def stop(self) -> None:
        """End the process and whatever it started."""
        if self.process.returncode is None:
            self._kill()
            self.process.wait()
        for thread, pipe in ((self.reader, self.process.stdout), (self.listener, self.process.stderr)):
            thread.join(1.0)
            if pipe and not thread.is_alive():
                pipe.close()
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
