"""One process at a time per drive and direction, where several processes of a machine share a drive.

Processes that read (or write) one drive at once may get less from it together than one alone. MLP-Offload (arXiv
2509.02480, section on design principles, tier-exclusive concurrency control) lets one process of a machine at a time
use a tier per direction. The locks of its published code have fixed names in shared memory, so that unrelated jobs
meet in them; here they are named by the drive and lie in a private directory of the user.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from lightning_ssd.errors import OffloaderClosedError, StorageError, as_storage_error
from lightning_ssd.storage.directories import open_private

__all__ = ["DriveLock"]

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""Seconds to wait for other processes. Eight that move a GiB each through a drive of 250 MB/s are through in half of
that; who holds a turn for longer has been stopped (Ctrl-Z), and may hold it for ever."""
_ADVICE = "so that nobody else can hold our locks. Remove it or set XDG_RUNTIME_DIR"


class DriveLock:
    """Takes turns with other processes of this user on the drive of a directory: one reads, one writes.

    All threads of a process, and all its arbiters for a drive, share its turn: the first one in waits for the other
    processes, the last one out lets them go on. A process whose threads overlap without a pause keeps its turn, so hold
    it for one subgroup or one burst, not for a whole run. The lock is an ``flock``: the kernel frees it however the
    process ends, and nothing is cleaned up. It is about speed only; nothing is wrong where it excludes nobody (other
    users, other machines, another ``TMPDIR``). So nobody waits for ever for a process that was stopped inside: after a
    minute we go in beside it, with one warning, and at once from then on until it has left.

    Note [never two at once]: a thread inside :meth:`reading` must not enter :meth:`writing`, of whatever drive, nor the
    other way round. Of two processes that do so in different orders each would wait for the other for ever.

    Note [files stay]: the lock files are never removed. Who opened one just before it went would hold a lock that
    nobody else sees.

    Args:
        directory: on the drive. Drives are told apart by ``st_dev``, so that two partitions count as two drives.
        enabled: otherwise nothing is opened, and nobody waits.

    Raises:
        StorageError: if the directory cannot be read, or the private directory for the locks is not safely ours.
    """

    def __init__(self, directory: Path, *, enabled: bool = True) -> None:
        self._locks: dict[str, _SharedLock] | None = {} if enabled else None
        # So that two closings do not give one lock back twice. Order: this one, then the table's, then a lock file's.
        self._closing = threading.Lock()
        if self._locks is None:
            return
        try:
            device = os.stat(directory).st_dev
        except OSError as error:
            raise as_storage_error(error, f"cannot find the drive of {directory}") from error
        try:
            for direction in ("read", "write"):
                path = _lock_directory() / f"{os.major(device)}_{os.minor(device)}.{direction}"
                self._locks[direction] = _share(path)
        except BaseException:
            self.close()
            raise

    def reading(self) -> AbstractContextManager[None]:
        """Inside, no other process that asks too reads from the drive. Waits a minute at most for those that do.

        Raises:
            OffloaderClosedError: after :meth:`close`.
            StorageError: if the file system of the locks has none.
        """
        return self._turn("read")

    def writing(self) -> AbstractContextManager[None]:
        """The same for writes; see the note on never holding two."""
        return self._turn("write")

    def _turn(self, direction: str) -> AbstractContextManager[None]:
        if self._locks is None:
            return nullcontext()
        lock = self._locks.get(direction)
        if lock is None:
            raise OffloaderClosedError("this arbiter is closed; open the offloader again")
        return lock.held()

    def close(self) -> None:
        """Give the locks back, once threads that are inside have left. Harmless when repeated."""
        with self._closing:
            while self._locks:
                _unshare(self._locks.popitem()[1])


class _SharedLock:
    """One lock file, opened once per process: two openings would exclude each other within it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_users = 1
        """Drive locks that have it. Guarded by the lock of the table."""
        self._num_inside = 0
        self._retired = False
        self._fd: int | None = _open(path)
        self._waiting: _Waiting | None = None
        self._has_warned = False
        # Guards the five above. Held while waiting for other processes: then nobody is inside who would want it to
        # leave, and all others wait for the same. Nothing is locked under it.
        self._mutex = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._enter()
        pid = os.getpid()
        try:
            yield
        finally:
            # A child that was forked inside leaves too, but the turn is its parent's.
            if os.getpid() == pid:
                self._leave()

    def _enter(self) -> None:
        with self._mutex:
            if self._num_inside == 0:
                if self._fd is None:
                    self._fd = _open(self.path)
                try:
                    self._take_turn(self._fd)
                except OSError as error:
                    raise as_storage_error(error, f"cannot lock {self.path}") from error
            self._num_inside += 1

    def _take_turn(self, fd: int) -> None:
        """Wait for the turn, but for no process that was stopped while it had it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if self._waiting is not None:  # for the same process still, in vain so far
            return
        # A lock of the kernel is waited for without an end: not here.
        self._waiting = waiting = _Waiting()
        threading.Thread(target=self._wait, args=(fd, waiting), name="lightning_ssd-turn", daemon=True).start()
        if not waiting.over.wait(_PATIENCE_S):
            self._warn()
            return
        self._waiting = None  # its thread may take its time to end; the next turn is not to be taken for this one
        if waiting.error is not None:
            raise waiting.error

    def _wait(self, fd: int, waiting: _Waiting) -> None:
        """Runs in a thread of its own, whoever waits for it or no longer does."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            waiting.error = error
        waiting.over.set()
        with self._mutex:
            if self._waiting is not waiting:  # it came in time
                return
            self._waiting = None
            if self._num_inside == 0:  # it came too late; else whoever is inside has it now, and gives it back
                fcntl.flock(fd, fcntl.LOCK_UN)
            self._close_if_unused()

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "another process of yours has had the turn on a drive for %.0f s (%s); was it stopped (Ctrl-Z)? "
                "This one goes on without turns, which changes no result but may be slower. `lslocks` names that "
                "process: let it go on (`fg`, `kill -CONT`), or end it",
                _PATIENCE_S,
                self.path,
            )

    def _leave(self) -> None:
        with self._mutex:
            self._num_inside -= 1
            if self._num_inside == 0 and self._fd is not None:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._close_if_unused()

    def retire(self) -> None:
        """Nobody will enter any more; the last one to leave closes the file."""
        with self._mutex:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        # Not under a thread that waits for it: the number may be another file's by the time that it asks.
        if self._retired and self._num_inside == 0 and self._waiting is None and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's opening, which would carry the lock on after the parent's death.

        Closing it does not free the parent's lock. The child's own turns begin with an opening of its own.
        """
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._num_inside = 0
        self._waiting = None  # its thread is the parent's
        # The old one may be held by a thread that the child does not have. Order: as that of the old one.
        self._mutex = threading.Lock()


class _Waiting:
    """For one lock, by a thread of its own."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: OSError | None = None


# All locks that this process has open, by the path of their file.
_shared: dict[Path, _SharedLock] = {}
# Guards the table and the counts of users. A leaf lock, but for a lock file's own, which nobody has when it is new.
_shared_lock = threading.Lock()


def _share(path: Path) -> _SharedLock:
    with _shared_lock:
        lock = _shared.get(path)
        if lock is None:
            lock = _shared[path] = _SharedLock(path)
        else:
            lock.num_users += 1
        return lock


def _unshare(lock: _SharedLock) -> None:
    with _shared_lock:
        lock.num_users -= 1
        if lock.num_users:
            return
        del _shared[lock.path]
    lock.retire()


def _after_fork() -> None:
    global _shared_lock
    # Order: as that of the old one, which a thread that the child does not have may hold.
    _shared_lock = threading.Lock()
    for lock in _shared.values():
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _open(path: Path) -> int:
    """Open (make) a lock file by way of its private directory, which is made when missing."""
    try:
        parent = os.open(path.parent.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            folder = open_private(parent, path.parent, advice=_ADVICE)
        finally:
            os.close(parent)
        try:
            return _open_plain(folder, path)
        finally:
            os.close(folder)
    except StorageError:
        raise
    except OSError as error:
        raise as_storage_error(error, f"cannot open the lock file {path}") from error


def _open_plain(folder: int, path: Path) -> int:
    """A file that has no other name. Does not wait where somebody has put a pipe in its place."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path.name, flags, 0o600, dir_fd=folder)
    facts = os.fstat(lock)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1:
        return lock
    os.close(lock)
    raise StorageError(
        errno.EPERM,
        f"{path} belongs to user {facts.st_uid}, with {facts.st_nlink} names and mode {facts.st_mode:06o}; allowed: a "
        f"plain file of user {os.geteuid()} with one name. Remove it",
    )


def _lock_directory() -> Path:
    """Where this user's locks lie (0700). Once it is ours, nobody else can put links into it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_ours(runtime):
        return Path(runtime) / "lightning_ssd"
    return Path(tempfile.gettempdir()) / f"lightning_ssd-{os.geteuid()}"


def _is_ours(directory: str) -> bool:
    """Whether a runtime directory is there and of this user; after ``su`` it may be that of another."""
    try:
        return os.stat(directory).st_uid == os.geteuid()
    except OSError:
        return False
