"""The file under the lock: one writer at a time, replaced whole, a symlink followed, a broken file set aside.

Nothing here knows what the file holds. A writer holds an advisory lock (flock) on the folder, so that no second file is needed
for it. The new content goes to a file without a name (O_TMPFILE), which gets one only to be renamed over the old file. So a
writer that is killed leaves nothing behind but, within those microseconds, that name, and the next writer removes it.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

LEFTOVER = re.compile(r"\.whet-lock-[0-9a-f]{16}\.tmp")
TRIES, PAUSE_S = 1000, 0.01  # a writer that another one has kept waiting for this long, maybe stopped for good, goes on without

KINDS = {
    stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}


def refuse_other_kinds(path: Path) -> None:
    """ValueError for what is there and no regular file, a symlink followed. It is not opened: a FIFO would hang."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except OSError:
        return
    if kind != stat.S_IFREG:
        what = KINDS.get(kind, "special file")
        raise ValueError(f"the lock must be a file, got the {what} {path}; name a file by WHET_LOCK or --lock")


def read(path: Path) -> bytes | None:
    """The whole content; None where there is no file. OSError where it may not be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
            return f.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def only_writer(target: Path) -> Iterator[bool]:
    """The block runs while no other writer is at this file. False where that cannot be had: the caller does without."""
    fd = _locked(target)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # at once, also where a forked process has a copy of fd
            os.close(fd)


def _locked(target: Path) -> int | None:
    """A descriptor that holds the lock: the folder's, or the file's own where folders cannot be locked, as on NFS."""
    places = [(target.parent, os.O_RDONLY | os.O_DIRECTORY), (target, os.O_RDWR | os.O_NONBLOCK)]
    for _ in range(TRIES):
        fd = None
        try:
            fd = os.open(*places[0])
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(places[0][0])):
                return fd  # else the file was replaced before its lock was had
        except BlockingIOError:
            threading.Event().wait(PAUSE_S)
        except OSError:
            del places[0]
        if fd is not None:
            os.close(fd)
        if not places:
            return None
    return None


def remove_leftovers(folder: Path) -> None:
    """What killed writers left. Only for a writer that is alone: another's file would look the same."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if LEFTOVER.fullmatch(name):
                os.unlink(folder / name)


def replace(target: Path, content: bytes, keep_old: bool = False) -> Path | None:
    """Put the content in the target's place; a reader meets the old file or the new one, whole. OSError if it cannot be done.

    keep_old: the old file stays, set aside under the name that is returned.
    """
    if target.exists() and not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, "it is write-protected")
    aside = None
    for last in (False, False, True):
        temporary = _write_beside(target, content)
        try:
            if keep_old and aside is None:
                aside = _set_aside(target)
            os.replace(temporary, target)
            return aside
        except FileNotFoundError:  # taken for a leftover by another writer: possible only where there is no flock
            if last:
                raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return aside


def _write_beside(target: Path, content: bytes) -> Path:
    """A new file in the target's folder that holds the content; it has no name before it is complete, where possible."""
    path = target.with_name(f".whet-lock-{secrets.token_hex(8)}.tmp")
    with contextlib.suppress(OSError, AttributeError):  # no O_TMPFILE, or no /proc to name the file by
        fd = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _fill(fd, content, target)
            # With src_dir_fd Python calls linkat, which follows the symlink in /proc; without, link, which does not.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        finally:
            os.close(fd)
        return path
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        _fill(fd, content, target)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def _fill(fd: int, content: bytes, like: Path) -> None:
    """Content, and owner and permissions of the file that is replaced, on the disk."""
    with open(fd, "wb", closefd=False) as f:
        f.write(content)
    with contextlib.suppress(OSError):
        old = os.stat(like)
        with contextlib.suppress(OSError):
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
    os.fsync(fd)


def _set_aside(target: Path) -> Path:
    """A second name for the file, never one that is taken: .bad, .bad.1, .bad.2, ..."""
    numbers = itertools.count(1)
    bad = target.with_name(f"{target.name}.bad")
    while True:
        try:
            os.link(target, bad)
            return bad
        except OSError:  # the name is taken, or there are no hard links here
            if not os.path.lexists(bad):
                os.rename(target, bad)
                return bad
        bad = target.with_name(f"{target.name}.bad.{next(numbers)}")
