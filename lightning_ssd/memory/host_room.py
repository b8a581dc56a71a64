"""Whether the machine has memory for what waits in the system's page cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from lightning_ssd.memory.readings import host_available_bytes

__all__ = ["HostRoom"]

_LOOK_S = 1.0


class HostRoom:
    """Memory of the machine, or of the control group, that this process may fill.

    Args:
        num_sharing: processes of this run that share it.
        times: what waits, that there has to be room for: as much again may be needed that was not seen yet.
    """

    def __init__(self, num_sharing: int = 1, *, times: int = 2) -> None:
        self._num_sharing, self._times = num_sharing, times
        self._is_enough = False
        self._next_look_s = 0.0

    def is_enough(self, waiting_bytes: Callable[[], int]) -> bool:
        """Whether there is room for the bytes of files that wait; as it was a second ago, or when last known."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            nbytes = waiting_bytes()
            with suppress(OSError):  # too many open files, say: it is asked again a second later
                available_bytes = host_available_bytes(nbytes) or 0
                self._is_enough = available_bytes / self._num_sharing >= self._times * nbytes
        return self._is_enough
