"""whet.lock: what was verified, measured and chosen, per machine. Readable, committable JSON.

{"format": 1, "machines": {machine key: {"calls": {"<call> @ <mode>": entry}, "plans": {target: result}}}}
A result is found by GPU name and versions, so nothing stale is ever reused. Anyone may read; only tune.py saves.
"""

import json
import os
import sys
from pathlib import Path

from whet import machine
from whet.op import base

FORMAT = 1


def lock_path(path: str | Path | None = None) -> Path:
    """Where the lock is: the path given, else $WHET_LOCK, else ./whet.lock."""
    return Path(path or os.environ.get("WHET_LOCK", "whet.lock"))


def say(line: str) -> None:
    print(f"whet: {line}", file=sys.stderr)


class Lock:
    def __init__(self, path: Path | None = None, data: dict | None = None):
        """path None: kept in memory only."""
        self.path = path
        self.data = data or {"format": FORMAT, "machines": {}}
        self._warned = False

    @classmethod
    def read(cls, path: str | Path | None = None) -> "Lock":
        """The lock at path (default $WHET_LOCK, else ./whet.lock). One that cannot be read is set aside, and said."""
        path = lock_path(path)
        if path.is_dir():
            raise ValueError(f"the lock must be a file, got the directory {path}")
        if not path.exists():
            return cls(path)
        try:
            data = json.loads(path.read_text())
            if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("machines"), dict):
                raise ValueError(f"not a whet lock of format {FORMAT}")
            for m in data["machines"].values():
                if not all(isinstance(m[part], dict) for part in ("calls", "plans")):
                    raise ValueError("its machines have no calls and plans")
        except (ValueError, TypeError, KeyError, OSError) as e:
            return cls(path)._set_aside(e)
        return cls(path, data)

    def _set_aside(self, cause: Exception) -> "Lock":
        assert self.path
        bad = self.path.with_name(self.path.name + ".bad")
        try:
            os.replace(self.path, bad)
            say(f"{self.path} cannot be used ({cause}); set aside as {bad.name}, tuning starts over")
        except OSError as e:
            say(f"{self.path} cannot be used ({cause}) nor set aside ({e}); ignored, tuning starts over")
        return self

    @property
    def mine(self) -> dict:
        """This machine's part."""
        return self.data["machines"].setdefault(machine.this_machine().key, {"calls": {}, "plans": {}})

    @property
    def calls(self) -> dict:
        return self.mine["calls"]

    @property
    def plans(self) -> dict:
        return self.mine["plans"]

    def table(self, mode: str = "eager", without: tuple[str, ...] = ()) -> dict[str, str]:
        """{call key: chosen candidate} for Choices; only calls whose tuning was finished.

        without: impls not to use; a call that chose one gets the fastest of its other verified candidates, if there is one.
        """
        end, found = f" @ {mode}", {}
        for key, entry in self.calls.items():
            if key.endswith(end) and (chosen := entry.get("chosen")):
                if base(chosen) in without:
                    timed = {n: c["ms"] for n, c in entry["candidates"].items() if c["ok"] and "ms" in c}
                    chosen = min((n for n in timed if base(n) not in without), key=lambda n: timed[n], default=None)
                if chosen:
                    found[key.removesuffix(end)] = chosen
        return found

    def save(self) -> None:
        """Whole or not at all. A directory that cannot be written costs the file, not the run."""
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(temporary, self.path)
        except OSError as e:
            if not self._warned:
                say(f"{self.path} cannot be written ({e.strerror}); going on without it, so the next run tunes again")
            self._warned = True
