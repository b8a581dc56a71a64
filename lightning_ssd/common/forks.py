"""Tell a process from its forks, which have neither its threads nor the right to its locks and files.

``os.getpid`` tells, too, but is a call of the kernel: hooks would make two for each tensor.
"""

from __future__ import annotations

import os
from functools import partial

from lightning_ssd.errors import OffloaderClosedError

__all__ = ["FORKS", "OwnProcess"]

FORKS: list[int] = []
"""One entry for each fork on the way from the first process to this one. Its length names a process: what was made when
it was shorter belongs to a parent."""

os.register_at_fork(after_in_child=partial(FORKS.append, 0))  # in C: an interrupt that came into Python would be lost


class OwnProcess:
    """The process that has made this object."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._num_forks = len(FORKS)

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in it, and in no fork of it."""
        return len(FORKS) == self._num_forks

    def check(self) -> None:
        """Check before any lock: in a forked child no worker runs, and a lock may be held for ever.

        Raises:
            OffloaderClosedError: the caller runs in a fork.
        """
        if not self.is_here:
            raise OffloaderClosedError(
                f"this offloader was opened in process {self.pid}, and this is its fork {os.getpid()}; "
                "open one after forking"
            )
