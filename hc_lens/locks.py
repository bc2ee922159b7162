"""One writer at a time: a lock on a folder that ends with the process that holds it.

1. The lock is the system's own lock on an open file: it is gone when its process ends, however that
   happens. The file says who holds it: the host, the process and since when.
2. Where a file system has no such locks, a second file that one process alone can create stands for
   it. That of a process of this machine which has died is removed.
3. Whoever comes second gets an HcLensError that names the first.
4. A step that takes an instant (`in_turn`) is waited for instead: its lock is on the folder itself,
   and where a file system has none, the step goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hc_lens.errors import HcLensError

FAR = 2**30
"""The byte that is locked on Windows, where nobody can read a locked one: far behind the text."""
_open: set[int] = set()
"""The locks that this process holds, by their open files."""
_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is not there, during a ``with`` block."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _open.add(handle)
    made = None
    try:
        try:
            lock(handle)
        except OSError as error:
            if error.errno in _HELD:
                raise _refusal(path) from error
            if error.errno not in _NO_LOCKS:
                raise
            made = _create(path)
        os.ftruncate(handle, 0)
        os.write(handle, _me().encode())
        yield
    finally:
        if handle in _open:  # not in a forked child that leaves the block too
            _open.discard(handle)
            os.close(handle)  # which unlocks it
            if made is not None:
                made.unlink(missing_ok=True)


def _leave_to_parent() -> None:
    """Close a parent's locks in its forked child, which might outlive it and keep them held."""
    for handle in _open:
        os.close(handle)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until nobody else is in such a block of this folder, where that can be known."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)  # which unlocks it
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def lock(handle: int) -> None:
    """The system's lock on an open file; an OSError if another holds it or there are none."""
    if os.name == "nt":
        import msvcrt

        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    if os.name == "nt":  # there the call below would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to somebody else
        pass
    with contextlib.suppress(OSError):
        # A process that has ended can be called until its parent has looked at it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return True


def _create(path: Path) -> Path:
    """Make the file that stands for the lock, unless a living process has."""
    made = path.with_name(f"{path.name}-held")
    for _ in range(2):
        try:
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            host, pid = (*made.read_text().split(" ", 2), "", "")[:2]
            if host != socket.gethostname() or not pid.isdigit() or alive(int(pid)):
                break
            made.unlink(missing_ok=True)
        else:
            os.write(handle, _me().encode())
            os.close(handle)
            return made
    raise _refusal(path)


def _me() -> str:
    """This process as the file of a lock names it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"{socket.gethostname()} {os.getpid()} {since}"


def _refusal(path: Path) -> HcLensError:
    host, pid, since = (*path.read_text().split(" ", 2), "?", "?", "?")[:3]
    return HcLensError(
        f"expected to be the only one that writes to {path.parent.parent}, got another: process "
        f"{pid} on {host}, since {since}; wait until it has ended, or name another folder"
    )
