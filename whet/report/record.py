"""A record: one JSON file of measurements with machine, versions, commit and command. Every published figure comes from one."""

import datetime
import json
import re
from pathlib import Path

from whet import machine
from whet.lock import say


def make(command: str, measured: dict | list) -> dict:
    return {
        "command": command,
        "machine": machine.this_machine().as_dict(),
        "rivals": {"liger-kernel": machine.version("liger-kernel")},
        "commit": machine.commit(),
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "measured": measured,
    }


def place(record: dict, folder: str | Path, name: str) -> Path:
    """folder/name.json, CPU records marked by their name."""
    prefix = "" if record["machine"]["device"] == "cuda" else "cpu-"
    return Path(folder) / f"{prefix}{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"


def write(record: dict, folder: str | Path, name: str) -> Path | None:
    """Saves the record and returns its path; None, and one line printed, where it cannot be written."""
    path = place(record, folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as e:
        say(f"the record {path} cannot be written ({e.strerror}); --json prints it")
        return None
    return path


def read_all(folder: str | Path) -> dict[str, dict]:
    return {p.stem: json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))}
