"""The lock's file: replaced whole, writers lose nothing, a killed one leaves nothing behind, a symlink stays one."""

import errno
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
from lock_entries import call, entry, key, saved

from whet import lock_file
from whet.lock import Lock


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_a_symlink_stays_a_symlink(there, lock_path, tmp_path):
    target = tmp_path / "elsewhere" / "kept.lock"
    target.parent.mkdir()
    if there:
        saved(target, 16)
        target.chmod(0o640)
    lock_path.symlink_to(target)
    saved(lock_path)
    assert lock_path.is_symlink() and os.listdir(target.parent) == ["kept.lock"] and key() in Lock.read(target).calls
    assert not there or (key(16) in Lock.read(lock_path).calls and target.stat().st_mode & 0o777 == 0o640)


def test_a_path_that_becomes_a_fifo_costs_a_line(lock_path, warnings):
    lock = Lock(lock_path)
    os.mkfifo(lock_path)
    lock.save()
    assert lock_path.is_fifo() and len(warnings()) == 1


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path, warnings):
    lock = Lock(tmp_path / "no" / "such" / "whet.lock")
    lock.save()
    lock.save()
    assert len(lines := warnings()) == 1 and "cannot be written" in lines[0]


def forked(work) -> int:
    """A process that does this and nothing else."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def add_one_by_one(lock_path: Path, rows: range) -> None:
    lock = Lock.read(lock_path)
    for n in rows:
        lock.calls[key(n)] = entry(n)
        lock.save()


@pytest.mark.parametrize("filesystem, each", [("local", 40), ("folders cannot be locked", 10)])
def test_two_writers_lose_nothing_and_a_reader_never_meets_half_a_file(filesystem, each, lock_path, warnings, monkeypatch):
    def only_files(fd, how, flock=lock_file.fcntl.flock):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "as on NFS")
        flock(fd, how)

    if filesystem != "local":
        monkeypatch.setattr(lock_file.fcntl, "flock", only_files)
    saved(lock_path)
    children = [forked(lambda first=first: add_one_by_one(lock_path, range(first, first + each))) for first in (100, 200)]
    running, sizes = set(children), [1]
    while running:
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        sizes.append(len(Lock.read(lock_path).calls))
        time.sleep(0.002)
    assert sizes == sorted(sizes) and sizes[-1] == 1 + 2 * each and not warnings()
    assert set(Lock.read(lock_path).calls) == {key(n) for n in (8, *range(100, 100 + each), *range(200, 200 + each))}


@pytest.mark.parametrize("without", ["flock", "O_TMPFILE", "hard links"])
def test_a_filesystem_without_it_will_do(without, lock_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOLCK, "no locks available")

    if without == "O_TMPFILE":
        monkeypatch.delattr(os, "O_TMPFILE")
    else:
        monkeypatch.setattr(*((lock_file.fcntl, "flock") if without == "flock" else (os, "link")), fail)
    saved(lock_path)
    saved(lock_path, 16)
    assert set(Lock.read(lock_path).calls) == {key(), key(16)} and os.listdir(lock_path.parent) == ["whet.lock"]
    lock_path.write_text("{")
    saved(lock_path)
    assert sorted(os.listdir(lock_path.parent)) == ["whet.lock", "whet.lock.bad"]
    assert Lock.read(lock_path).calls == {key(): entry()}


def test_a_writer_that_holds_the_folder_for_good_is_not_waited_for(lock_path, monkeypatch):
    monkeypatch.setattr(lock_file, "TRIES", 3)
    with lock_file.only_writer(lock_path) as alone:
        assert alone
        saved(lock_path)
    assert Lock.read(lock_path).calls == {key(): entry()}


def test_killed_writers_leave_nothing_behind(lock_path, warnings):
    saved(lock_path, *range(300, 400))
    chance = random.Random(0)
    for n in range(12):
        child = forked(lambda n=n: [add_one_by_one(lock_path, range(n, n + 1)) for _ in range(10_000)])
        time.sleep(chance.uniform(0.005, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (lock_path.parent / ".whet-lock-0123456789abcdef.tmp").write_text("of one killed between two system calls")
    saved(lock_path)
    assert os.listdir(lock_path.parent) == ["whet.lock"] and len(Lock.read(lock_path).calls) >= 101 and not warnings()


def test_ours_wins_where_we_changed_it_else_the_file(lock_path):
    a, b = Lock.read(saved(lock_path, 8, 16, 32)), Lock.read(lock_path)
    a.calls[key(8)]["count"], b.calls[key(16)]["count"] = 10, 20
    a.save()
    b.save()
    a.save()
    assert [Lock.read(lock_path).calls[key(n)]["count"] for n in (8, 16, 32)] == [10, 20, 3]


def test_what_was_dropped_does_not_come_back(lock_path):
    a, b, c = (Lock.read(saved(lock_path, 8, 16, 32)) for _ in range(3))
    b.calls[key(8)]["count"] = 10
    b.save()
    a.drop(key(8))
    del a.calls[key(16)]
    a.save()
    b.calls[key(32)]["count"] = 10
    b.save()
    c.calls[key(64)] = entry(64)
    c.save()
    a.save()
    assert set(Lock.read(lock_path).calls) == {key(32), key(64)}
    a.drop(key(32))
    a.calls[key(32)] = entry(32, chosen=None)
    a.save()
    assert Lock.read(lock_path).table() == {call(64).key: "eager"}, "dropped to be tuned again"


def test_of_two_that_tune_the_same_call_a_finished_tuning_stays_and_what_either_verified_is_kept(lock_path):
    a, b = Lock.read(lock_path), Lock.read(lock_path)
    a.calls[key()], b.calls[key()] = entry(chosen=None), entry(chosen=None)
    a.calls[key()]["candidates"] = {n: c for n, c in entry()["candidates"].items() if n in ("eager", "torch")}
    b.calls[key()]["candidates"] = {n: c for n, c in entry()["candidates"].items() if n in ("torch", "triton")}
    a.save()
    b.save()
    assert set(Lock.read(lock_path).calls[key()]["candidates"]) == {"eager", "torch", "triton"}
    a.calls[key()] = entry()
    a.save()
    b.calls[key()]["candidates"]["compile"] = entry()["candidates"]["compile"]
    b.save()
    assert Lock.read(lock_path).table() == {call().key: "eager"}
    b.calls[key()] = entry(chosen="torch")
    b.save()
    assert Lock.read(lock_path).table() == {call().key: "torch"}


def test_an_entry_damaged_in_the_file_is_written_anew_by_who_knows_it(lock_path):
    lock = Lock.read(saved(lock_path, 8, 16))
    lock_path.write_text(lock_path.read_text().replace('"M": 8,', '"M": 9,'))
    lock.calls[key(32)] = entry(32)
    lock.save()
    assert set(Lock.read(lock_path).calls) == {key(8), key(16), key(32)}


def test_a_file_that_was_deleted_is_written_whole(lock_path):
    lock = Lock.read(saved(lock_path, 8, 16))
    lock_path.unlink()
    lock.save()
    assert set(Lock.read(lock_path).calls) == {key(8), key(16)}
