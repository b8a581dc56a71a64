"""Whether the machine has memory for what waits in the system's page cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from lightning_ssd.memory.readings import host_available_bytes

__all__ = ["AMPLE", "HostRoom"]

AMPLE = 2
"""Times what waits: as much again may be needed that was not seen yet."""
_LOOK_S = 1.0


class HostRoom:
    """Memory of the machine, or of the control group, that this process may fill.

    Args:
        num_sharing: processes of this run that share it.
        times: so many times what waits is enough (:meth:`is_enough`).
    """

    def __init__(self, num_sharing: int = 1, *, times: int = AMPLE) -> None:
        self._num_sharing, self._times = num_sharing, times
        self._is_enough = False
        self._next_look_s = 0.0

    def available_bytes(self, waiting_bytes: int) -> float:
        """Return what can still be had, with so many bytes of files that may be in the page cache; 0: unknown.

        Raises:
            OSError: the system does not let itself be asked, such as with too many open files.
        """
        available = host_available_bytes(waiting_bytes)
        return 0 if available is None else available / self._num_sharing

    def is_enough(self, waiting_bytes: Callable[[], int]) -> bool:
        """Whether there is room for the bytes of files that wait; as it was a second ago, or when last known."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            nbytes = waiting_bytes()
            with suppress(OSError):  # it is asked again a second later
                self._is_enough = self.available_bytes(nbytes) >= self._times * nbytes
        return self._is_enough
