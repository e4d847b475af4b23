"""A child that misbehaves as it is asked to, in plain Python: it starts in no time."""

import json
import os
import signal
import subprocess
import sys
import time

notes = sys.argv[1]  # where the ids of the processes that it starts are written


def say(text: bytes) -> None:
    os.write(1, text)


def started(leave: bool = False) -> None:
    """A child that hangs, and holds the pipes open."""
    if (pid := os.fork()) == 0:
        if leave:
            os.setsid()
        time.sleep(3600)
    with open(notes, "a") as f:
        f.write(f"{pid}\n")


def program() -> None:
    pid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid
    with open(notes, "a") as f:
        f.write(f"{pid}\n")


def forks_and_hangs() -> None:
    started()
    started(leave=True)
    program()
    time.sleep(3600)


def forks_and_crashes() -> None:
    started()
    program()
    os.abort()


def half_a_line() -> None:
    say(b'{"ok": ')
    time.sleep(3600)


def endless_line() -> None:
    while True:
        say(b"x" * (1 << 19))


def many_lines() -> None:
    while True:
        say(b'{"id": 7}\n' * 10_000)


def prints_and_dies() -> None:
    for _ in range(200):
        os.write(2, b"a word\n" * 10_000)
    os.write(2, b"and the last\n")
    os._exit(3)


WAYS = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV), "exit": lambda: os._exit(0), "hang": lambda: time.sleep(3600),
    "close": lambda: (os.close(1), time.sleep(3600)), "close all": lambda: (os.closerange(0, 99), time.sleep(3600)),
    "garbage": lambda: say(b"\xff\x00 no answer\n"), "brackets": lambda: say(b"[" * 200_000 + b"\n"),
    "list": lambda: say(b"[]\n"), "another id": lambda: say(b'{"ok": true, "id": -1}\n'), "forks and hangs": forks_and_hangs,
    "forks and crashes": forks_and_crashes, "half a line": half_a_line, "endless line": endless_line, "many lines": many_lines,
    "prints and dies": prints_and_dies,
}

if "does not start" in sys.argv:
    sys.exit("no such module")
say(b'{"ready": true}\n')
for line in sys.stdin:
    request = json.loads(line)
    if request["how"] in WAYS:
        WAYS[request["how"]]()
    say(json.dumps({"answer": request["how"], "id": request["id"]}).encode() + b"\n")
