"""Every exception that lightning_ssd raises on purpose.

::

    OffloadError
    |-- ConfigError (also ValueError)        a setting is wrong; nothing was opened or changed
    |-- StorageError (also OSError)          a directory, file or drive refused
    |   |-- UnsuitablePathError              tmpfs, network file system, not writable
    |   |-- OutOfSpaceError                  the file system is full (ENOSPC, EDQUOT)
    |   |-- ShortTransferError               fewer bytes moved than asked for
    |   `-- CorruptionError                  what was read back differs from what was written
    |-- BudgetError (also ValueError)        no plan keeps the memory budget; names the smallest possible one
    |-- RecomputeError (also RuntimeError)   a block cannot run again as it ran in forward; it is kept from then on
    |-- HooksRefusedError (also RuntimeError) a transform of torch.func was called in an offloaded forward
    |-- BackendUnavailableError              a backend was asked for by name and cannot work here
    `-- OffloaderClosedError                 used before it was opened or after it was closed

An in-place edit of a saved tensor raises plain ``RuntimeError`` with PyTorch's own text, because that is what
the same program raises without us.
"""

from __future__ import annotations

import copy
import errno
import os
import traceback
from typing import TypeVar

__all__ = [
    "FULL_ERRNOS",
    "BackendUnavailableError",
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "HooksRefusedError",
    "OffloadError",
    "OffloaderClosedError",
    "OutOfSpaceError",
    "RecomputeError",
    "ShortTransferError",
    "StorageError",
    "UnsuitablePathError",
    "as_storage_error",
    "copy_of",
    "forget_frames",
]

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error codes of a file system, or a user's part of it, that is full."""


_Error = TypeVar("_Error", bound=BaseException)


class OffloadError(Exception):
    """Base of all errors of this package."""


class ConfigError(OffloadError, ValueError):
    """A setting is wrong. The message gives the dotted name, the value and what is allowed."""


class BudgetError(OffloadError, ValueError):
    """A budget that was asked for cannot be kept. The message names what is needed."""


class StorageError(OffloadError, OSError):
    """A directory, file or drive refused. ``errno`` is kept where the system gave one."""


class UnsuitablePathError(StorageError):
    """The directory cannot serve as a tier (tmpfs, network file system, not writable)."""

    def __str__(self) -> str:
        # "[Errno 22]" in front would tell the user nothing: most often it is our own judgement, not the system's.
        return self.strerror or super().__str__()


class OutOfSpaceError(StorageError):
    """The file system has no room. The message names the path, the need and the free space."""


class ShortTransferError(StorageError):
    """Fewer bytes moved than were asked for, and trying again did not help."""


class CorruptionError(StorageError):
    """Two reads returned other bytes than were written. The message names tensor, path and offset."""


class RecomputeError(OffloadError, RuntimeError):
    """A block cannot run again in backward as it ran in forward. The message names the block, and what has changed.

    Raised before any gradient of the block is used. From then on the block is kept.
    """


class HooksRefusedError(OffloadError, RuntimeError):
    """A transform of ``torch.func`` refuses the saved-tensor hooks of a forward. The message says what to call."""


class BackendUnavailableError(OffloadError):
    """A backend was asked for by name and cannot work on this machine. The message says why."""


class OffloaderClosedError(OffloadError, RuntimeError):
    """The offloader was used before ``open`` or after ``close``."""


def as_storage_error(error: OSError, what: str) -> StorageError:
    """Turn a system error into ours; ``what`` says what was tried, on which path, offset and length."""
    kind = OutOfSpaceError if error.errno in FULL_ERRNOS else StorageError
    return kind(error.errno, f"{what}: {error.strerror or os.strerror(error.errno or 0)}")


def copy_of(error: _Error) -> _Error:
    """Return the same error, to be raised while a longer-lived object holds the first one.

    What is raised collects the frames that it passes, and their tensors. The first one collects none.
    """
    try:
        copied = copy.copy(error)
    except TypeError:  # its constructor wants other arguments than it keeps
        copied = type(error).__new__(type(error), *error.args)
        vars(copied).update(vars(error))
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def forget_frames(error: BaseException) -> None:
    """For an error that outlives its handler: let go of its frames, which keep tensors alive, and of its causes'.

    Where it was raised stays readable, as a note, unless the error is our own and says all there is to say.
    """
    known: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in known:
        known.add(id(following))
        if following.__traceback__ is not None and not isinstance(following, OffloadError):
            following.add_note("".join(traceback.format_tb(following.__traceback__)))
        # Clearing the frames is not enough: each of them holds the one that called it, which may still run.
        following.__traceback__ = None
        following = following.__cause__ or following.__context__
