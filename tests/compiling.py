"""A pytest plugin: every kernel compiled ahead of time, beside the tests, by one process however many workers run them.

What was compiled before, from the same sources by the same Triton, is in compiled_kernels.json beside this file. The rows are
kept in the user's cache under a hash of all they depend on, so that the next run need not even look. Rows with a
problem are not reused: a compiler may have been killed or a disk full.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from whet import machine

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "tests" / "compiled_kernels.json"  # `make compiled` writes it; what it lacks is compiled
KEPT = 4  # results: of a few branches
FOLDER = machine.cache_dir() / "aot"  # the user's: read before the tests are given a cache of their own


def sources() -> list[Path]:
    """What whet.aot may import: the ops and the modules beside it."""
    whet = ROOT / "whet"
    return sorted([*whet.glob("*.py"), *(whet / "ops").rglob("*.py"), *(whet / "report").glob("*.py")])


def key() -> str:
    versions = [platform.python_version(), *(f"{name} {machine.version(name)}" for name in ("triton", "torch"))]
    versions.append(KNOWN.read_text() if KNOWN.exists() else "")
    digest = hashlib.sha256("\n".join(versions).encode())
    for path in sources():
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def end_with_parent() -> None:
    """In the child, before it becomes Python: a run that is cut short leaves no compiler behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Compiling:
    """The rows of `python -m whet.aot`, from the cache or from a process that holds a lock for as long as it runs."""

    def __init__(self, folder: Path, name: str, command: list[str]):
        self.rows_at, self.log, self.lock = (folder / f"{name}.{end}" for end in ("json", "log", "lock"))
        self.command = command
        self.process: subprocess.Popen | None = None

    def read(self) -> list[dict] | None:
        try:
            return json.loads(self.rows_at.read_text())
        except (OSError, ValueError):  # not there, or cut short
            return None

    def start(self) -> None:
        """Compile, unless that is done or another process is at it."""
        self.rows_at.parent.mkdir(parents=True, exist_ok=True)
        with open(self.lock, "w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            rows = self.read()
            if rows is not None and not any(row["problem"] for row in rows):
                return
            self.rows_at.unlink(missing_ok=True)
            env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
            with open(self.log, "w") as log:
                self.process = subprocess.Popen(
                    [*self.command, "--out", str(self.rows_at)], env=env, stdout=log, stderr=log, cwd=ROOT,
                    pass_fds=[held.fileno()], preexec_fn=end_with_parent,
                )
        self.prune()

    def prune(self) -> None:
        """Forget all but the last few results."""
        found = sorted(self.rows_at.parent.glob("*.lock"), key=lambda path: path.stat().st_mtime)
        for path in (p for p in found[:-KEPT] if time.time() - p.stat().st_mtime > 3600):
            for end in ("json", "log", "lock"):
                path.with_suffix(f".{end}").unlink(missing_ok=True)

    def rows(self) -> list[dict]:
        """Waits for them. A worker that ends takes its compiler with it: then this one compiles what is left."""
        for last in (False, True):
            with open(self.lock, "a") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
            if self.process:
                self.process.wait()
            if (rows := self.read()) is not None:
                return rows
            if not last:
                self.start()
        raise AssertionError(f"nothing was compiled: {self.log.read_text()}")


COMPILING = pytest.StashKey[Compiling]()


def needs_rows(item: pytest.Item) -> bool:
    return "compiled_rows" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the compiler comes last."""
    items.sort(key=needs_rows)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(needs_rows, session.items)) and not session.config.option.collectonly:
        try:
            FOLDER.mkdir(parents=True, exist_ok=True)
            folder = FOLDER
        except OSError:  # a home that cannot be written: each worker compiles for itself
            folder = Path(tempfile.mkdtemp(prefix="whet-aot-"))
        job = Compiling(folder, key(), [sys.executable, "-m", "whet.aot", "--json", "--known", str(KNOWN)])
        session.config.stash[COMPILING] = job
        job.start()


@pytest.fixture(scope="session")
def compiled_rows(request: pytest.FixtureRequest) -> list[dict]:
    """The rows of `python -m whet.aot`: every kernel on every target."""
    return request.config.stash[COMPILING].rows()
