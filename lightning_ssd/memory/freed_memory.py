"""Whether freed memory leaves the process while what waits is in the system's page cache."""

from __future__ import annotations

import time
from contextlib import suppress

from lightning_ssd.memory.host_room import AMPLE, HostRoom
from lightning_ssd.memory.malloc import MallocThreshold, has_whole_pages, trim

__all__ = ["FreedMemory"]

_MAPPED_BYTES = 1 << 20
"""Where freed memory leaves, tensors from this size on are mapped one by one."""
_LOOK_S = 0.1
_STAY_S = 60.0
"""For so long freed memory stays that no step takes again. To map all of it anew takes a second for a large model."""


class FreedMemory:
    """Has glibc give back what is freed, where memory is short.

    Its heap keeps what activations and gradients have left, all through the update, so that the page cache has less
    room for weights and gradients that wait. But what leaves is mapped anew in each forward, which costs page faults.
    Where there is room for both, freed memory stays: of itself glibc would give back the end of its heap after each
    backward, which gradients hold otherwise. Only where tensors have whole pages: else the heap seldom reuses what it
    has, and glibc is left as it is without us. Once a minute what stays is given back all the same: one large batch
    would leave its memory to the end. Once memory was short, freed memory leaves to the end.

    Args:
        is_limited: whether the user has asked for less memory: then freed memory always leaves.
        num_processes: that share the machine's memory.
    """

    def __init__(self, *, is_limited: bool = False, num_processes: int = 1) -> None:
        self._threshold = MallocThreshold(_MAPPED_BYTES)
        self._room, self._is_limited = HostRoom(num_processes), is_limited
        self._waiting_bytes = 0
        self._next_look_s = 0.0
        self._next_trim_s = time.monotonic() + _STAY_S
        self._leaves = self._was_short = self._stays = False

    def leaves(self) -> None:
        """From now on freed memory leaves, as long as nothing is known of what will wait."""
        self._leaves, self._stays = True, False
        self._threshold.fix()

    def expect(self, waiting_bytes: int) -> None:
        """So many bytes of weights and gradients will wait, from the next forward on; 0: none will."""
        self._waiting_bytes = waiting_bytes
        self._was_short = self._was_short or bool(waiting_bytes and (self._is_limited or self._is_short()))
        if self._was_short:
            self.leaves()
        elif not self._is_limited:
            self._leaves, self._stays = False, bool(waiting_bytes) and has_whole_pages()
            if self._stays:
                self._threshold.reuse()
            else:
                self._threshold.restore()

    def _is_short(self) -> bool:
        with suppress(OSError):  # out of file descriptors, say: memory that lacks is seen by the next look
            return self._room.available_bytes(self._waiting_bytes) < AMPLE * self._waiting_bytes
        return False

    def look(self) -> None:
        """A backward is over."""
        if self._leaves or not self._waiting_bytes or (now_s := time.monotonic()) < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        with suppress(OSError):  # out of file descriptors, say: the next look may tell
            if self._room.available_bytes(self._waiting_bytes) < self._waiting_bytes:
                self._was_short = True
                self.leaves()
                trim()
            elif self._stays and now_s >= self._next_trim_s:
                self._next_trim_s = now_s + _STAY_S
                trim()

    def close(self) -> None:
        """Leave glibc as it is without us."""
        self._threshold.restore()
        trim()
