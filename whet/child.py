"""Other processes: one that answers questions, one JSON object per line each way, and a command that runs to its end.

Whatever becomes of them, the caller learns of it in time, in one line, and nothing of them is left.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from whet.isolation import descendants

START_LIMIT_S = 120.0
LINE_LIMIT = 1 << 20  # bytes; an answer is a few hundred
TAIL = 4096  # bytes of what it printed last, for the reason


class Lost(Exception):
    """The child died, was stopped or answered what is no answer; the message says how.

    hung    it took longer than its limit: that was its turn, and another would cost as much again
    on_gpu  what hung is a kernel, and no slow compiler
    """

    def __init__(self, reason: str, hung: bool = False, on_gpu: bool = False):
        super().__init__(reason)
        self.hung, self.on_gpu = hung, on_gpu


def kill_group(pid: int) -> None:
    """End the process that leads a session of its own, and whatever it started."""
    for child in descendants(pid):  # those that left the group
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """The last line that says something, cut where it is long."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1][:300]


def how_it_ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit {code}"


@dataclass(frozen=True)
class Ended:
    """A command that ran to its end: its exit code, negative for a signal, and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def fault(self) -> str:
        """Nothing, or what went wrong in one line: the last that it said."""
        return (last_line(self.stderr) or how_it_ended(self.code)) if self.code else ""


running: set[subprocess.Popen] = set()


def run_to_end(
    command: list[str], limit_s: float | None = None, given: str = "", env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Ended:
    """Run a command to its end. Raises Lost if it cannot be started or takes longer than limit_s.

    given   what it reads on standard input
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=env, cwd=cwd, start_new_session=True
        )
    except OSError as e:
        raise Lost(f"{command[0]} cannot be started ({e.strerror})") from None
    with process:
        running.add(process)
        try:
            stdout, stderr = process.communicate(given, limit_s)
        except BaseException as e:  # it is late, or Ctrl-C: then it is the parent's to end it
            kill_group(process.pid)
            if isinstance(e, subprocess.TimeoutExpired):
                raise Lost(f"took longer than {limit_s:g} s", hung=True) from None
            raise
        finally:
            running.discard(process)
    return Ended(process.returncode, stdout, stderr)


def stop_running() -> None:
    """End every command that other threads are running: Ctrl-C reaches only the main one."""
    for process in list(running):
        kill_group(process.pid)


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
            kill_group(self.process.pid)
        self.reader.join(1.0)  # what it printed last counts, unless a process that got away holds the pipe
        self.lines.put(None)

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
        if code == -signal.SIGALRM:
            return Lost("a kernel hangs: the GPU did not finish what was launched", hung=True, on_gpu=True)
        return Lost(f"the process died ({how_it_ended(code)}): {last_line(self.tail.decode(errors='replace')) or 'no message'}")

    def stop(self) -> None:
        """End the process and whatever it started."""
        if self.process.returncode is None:
            kill_group(self.process.pid)
            self.process.wait()
        for thread, pipe in ((self.reader, self.process.stdout), (self.listener, self.process.stderr)):
            thread.join(1.0)
            if pipe and not thread.is_alive():
                pipe.close()
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
