"""Keeps Python from running so far ahead of a device that memory fills with tensors that are not computed yet.

A CUDA device works through its queue long after Python has. Memory is taken when an operation is queued, and a saved
tensor can leave only when it has been computed: without a bound, the memory of a whole forward may be taken before
the first of its tensors can go. A device with enough in its queue loses nothing by the wait.
"""

from __future__ import annotations

from collections import deque

from lightning_ssd.tiers.streams import PASSED, StreamEvent

__all__ = ["RunAhead"]

_MIN_BYTES = 64 << 20
_SHARE = 16
"""One part in so many of all that is saved."""


class RunAhead:
    """Saved storages that the device may still have to compute. The accounting lock guards all but :meth:`wait`."""

    def __init__(self) -> None:
        self.late: deque[StreamEvent] = deque()
        """To be waited for before more is queued."""
        self._marks: deque[tuple[StreamEvent, int]] = deque()
        self._nbytes = 0
        self._largest_bytes = 0

    def add(self, mark: StreamEvent, nbytes: int, most_saved_bytes: int) -> None:
        """A storage was saved. Of those before it a sixteenth of all that is saved, 64 MiB, or two of the largest size,
        whichever is most, may be yet to be computed; the rest is late.

        Args:
            mark: the end of the work that computes it.
            nbytes: of the storage.
            most_saved_bytes: of all that was saved at the worst moment of the run so far.
        """
        if mark is PASSED:
            return
        self._marks.append((mark, nbytes))
        self._nbytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)
        most_bytes = max(_MIN_BYTES, most_saved_bytes // _SHARE, 2 * self._largest_bytes)
        while self._nbytes > most_bytes:
            mark, nbytes = self._marks.popleft()
            self._nbytes -= nbytes
            self.late.append(mark)

    def wait(self) -> None:
        """Block until the device has computed what is late."""
        while True:
            try:
                mark = self.late.popleft()
            except IndexError:  # all done; or another thread waits for the last one
                return
            mark.synchronize()
