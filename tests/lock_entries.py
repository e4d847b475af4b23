"""Entries of a lock for tests: of real calls, put into a file by whet or from outside."""

import json
from dataclasses import asdict
from pathlib import Path

from whet import machine
from whet.lock import Lock, checksum
from whet.op import Call

HERE = machine.this_machine().key


def call(rows: int = 8) -> Call:
    return Call("rms_norm", {"M": rows, "N": 32, "layout": "contiguous"}, "float32", True)


def key(rows: int = 8, mode: str = "eager") -> str:
    return f"{call(rows).key} @ {mode}"


def entry(rows: int = 8, chosen: str | None = "eager", mode: str = "eager") -> dict:
    timed = {"ok": True, "share": 0.25, "why": "", "ms": 0.5, "low": 0.4, "high": 0.6, "samples": 9, "source": "5f0c"}
    candidates = {
        "eager": dict(timed), "torch": timed | {"ms": 0.7}, "compile": {"ok": False, "share": 0.0, "why": "exceeds"},
        "triton": {"ok": True, "share": 0.3, "why": "", "interpreted": "rms_norm M=4"},
    }
    done = {"chosen": chosen, "why": "fastest of the verified", "ms": 0.5} if chosen else {}
    return {"call": asdict(call(rows)), "mode": mode, "candidates": candidates, "count": 3, "rule": {"new": [1]}} | done


def saved(path: Path, *rows: int) -> Path:
    lock = Lock(path)
    for n in rows or (8,):
        lock.calls[key(n)] = entry(n)
    lock.save()
    return path


def part(path: Path) -> dict:
    """This machine's part of the file, as it is written there."""
    return json.loads(path.read_text())["machines"][HERE]


def put(path: Path, section: str, name: str, value, summed: bool = True) -> None:
    """Write an entry into a file from outside; with a right checksum, so that it is its content that is judged."""
    data = json.loads(path.read_text())
    if summed and isinstance(value, dict):
        value = value | {"checksum": checksum((HERE, section, name), value)}
    data["machines"].setdefault(HERE, {}).setdefault(section, {})[name] = value
    path.write_text(json.dumps(data))
