"""Whether freed memory leaves the process while what waits is in the system's page cache."""

from __future__ import annotations

import time
from contextlib import suppress

from lightning_ssd.memory.host_room import AMPLE, HostRoom
from lightning_ssd.memory.malloc import MallocThreshold, has_whole_pages, trim

__all__ = ["FreedMemory"]

_LOOK_S = 0.1
_STAY_S = 60.0
"""For so long freed memory stays that no step takes again. To map all of it anew takes a second for a large model."""


class FreedMemory:
    """Has glibc give back after each backward what is free, where memory is short.

    Its heap keeps what activations and gradients have left, all through the update, so that the page cache has less
    room for weights and gradients that wait. But what leaves is mapped anew in the next forward, which costs page
    faults. Where there is room for both, freed memory stays: by itself glibc would give back the end of its heap after
    each backward, which gradients hold otherwise. Only where tensors have whole pages: else the heap seldom reuses what
    it has, and glibc is left as it is without us. It gives back once a minute what stays, or one large batch would
    leave its memory to the end. Once memory was short, freed memory leaves to the end.

    Args:
        is_limited: whether the user has asked for less memory: then it counts as short.
        num_processes: that share the machine's memory.
    """

    def __init__(self, *, is_limited: bool = False, num_processes: int = 1) -> None:
        self._threshold, self._room = MallocThreshold(), HostRoom(num_processes)
        self._is_short = is_limited
        self._waiting_bytes = 0
        self._next_look_s = 0.0
        self._next_trim_s = time.monotonic() + _STAY_S

    def expect(self, waiting_bytes: int) -> None:
        """So many bytes of weights and gradients will wait, from the next forward on; 0: none will."""
        self._waiting_bytes = waiting_bytes
        self._notice_shortage(AMPLE * waiting_bytes)
        if waiting_bytes and not self._is_short and has_whole_pages():
            self._threshold.reuse()
        else:
            self._threshold.restore()

    def _notice_shortage(self, nbytes: int) -> None:
        """Count memory as short from now on if less than this is available."""
        with suppress(OSError):  # out of file descriptors, say: the next look may tell
            if nbytes and not self._is_short and self._room.available_bytes(self._waiting_bytes) < nbytes:
                self._is_short = True
                self._threshold.restore()

    def look(self) -> None:
        """A backward is over."""
        if not self._waiting_bytes or (now_s := time.monotonic()) < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        self._notice_shortage(self._waiting_bytes)
        if self._is_short or (has_whole_pages() and now_s >= self._next_trim_s):
            self._next_trim_s = now_s + _STAY_S
            trim()

    def close(self) -> None:
        """Leave glibc as it is without us."""
        self._threshold.restore()
        trim()
