"""Kernels are compiled once per run and once per source; children are shared in good health alone."""

import json
import subprocess
import sys
import time

import compiling
import pytest
from compiling import Compiling
from sharing import POOL

from whet.worker import Worker

ROWS = [{"kernel": "_some_kernel", "problem": ""}]
COMPILER = """
import pathlib, sys, time
with open({runs!r}, "a") as f: f.write("run\\n")
time.sleep({seconds})
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text({text!r})
"""


@pytest.fixture
def job(tmp_path):
    """Jobs of one key as several workers have them, with a compiler that counts its runs."""
    def made(rows=ROWS, seconds: float = 0.0) -> Compiling:
        code = COMPILER.format(runs=str(tmp_path / "runs"), seconds=seconds, text=json.dumps(rows))
        return Compiling(tmp_path / "aot", "key", [sys.executable, "-S", "-c", code])

    yield made


def runs(tmp_path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def test_two_workers_compile_once_and_both_get_the_rows(job, tmp_path):
    first, second = job(seconds=0.3), job(seconds=0.3)
    first.start()
    second.start()
    assert first.process and second.process is None
    assert second.rows() == first.rows() == ROWS and runs(tmp_path) == 1


def test_a_second_run_compiles_nothing_unless_a_row_has_a_problem(job, tmp_path):
    job().start()
    assert job().rows() == ROWS
    again = job()
    again.start()
    assert again.process is None and again.rows() == ROWS and runs(tmp_path) == 1
    bad = [{"kernel": "_some_kernel", "problem": "does not compile"}]
    again.rows_at.write_text(json.dumps(bad))
    again.start()
    assert again.process and again.rows() == ROWS and runs(tmp_path) == 2


def test_a_compiler_that_ended_with_its_worker_is_started_by_another(job, tmp_path):
    first, second = job(seconds=3600), job()
    first.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.process.kill()
    assert second.rows() == ROWS and runs(tmp_path) == 2


def test_a_compiler_that_writes_nothing_is_named_with_what_it_said(tmp_path):
    silent = Compiling(tmp_path / "aot", "key", [sys.executable, "-S", "-c", "print('no ptxas here')"])
    silent.start()
    with pytest.raises(AssertionError, match="nothing was compiled: no ptxas here"):
        silent.rows()


def test_the_key_covers_every_source_that_compiling_reads():
    listed = "*(m.__file__ for n, m in sys.modules.items() if n.startswith('whet'))"
    script = f"import sys; from whet import aot; aot.discover(); print({listed})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=compiling.ROOT)
    read = {path for path in done.stdout.split() if path.startswith(str(compiling.ROOT))}
    assert len(read) > 20 and read <= {str(path) for path in compiling.sources()}


class Standing:
    """A child that does nothing."""

    def __init__(self):
        self.process, self.stopped = self, False

    def poll(self):
        return 1 if self.stopped else None

    def stop(self):
        self.stopped = True


@pytest.fixture
def started(monkeypatch):
    """The children that were started, in order."""
    made: list[Standing] = []
    monkeypatch.setattr("whet.worker.Child", lambda *_: made.append(Standing()) or made[-1])
    monkeypatch.setattr(POOL, "idle", type(POOL.idle)())
    return made


def test_a_healthy_child_serves_the_next_worker_of_its_kind_alone(started, monkeypatch):
    kinds = ({}, {}, {"interpret": True}, {"warm": True}, {"preload": "planted.py"}, {"preload": "planted.py"}, {})
    for kind in kinds:
        with Worker(**kind) as worker:
            worker.start()
    assert [child.stopped for child in started] == [False, False, False, True, True], "what holds a fault is not shared"
    monkeypatch.setenv("WHET_PLANT", "wrong")
    with Worker() as worker:
        worker.start()
    assert len(started) == 6


def test_a_child_that_was_stopped_or_left_by_an_error_is_not_used_again(started):
    with Worker() as worker:
        worker.start()
        worker.stop()
    with pytest.raises(KeyError), Worker() as worker:
        worker.start()
        raise KeyError
    with Worker() as worker:
        worker.start()
    started[2].stopped = True  # it died while it waited
    with Worker() as worker:
        worker.start()
    assert len(started) == 4 and [child.stopped for child in started] == [True, True, True, False]


@pytest.mark.usefixtures("fresh_children")
def test_a_test_can_have_children_of_its_own(started):
    for _ in range(2):
        with Worker() as worker:
            worker.start()
    assert len(started) == 2 and all(child.stopped for child in started)
