"""How glibc allocates while a pass runs, and between passes."""

from __future__ import annotations

import time

from lightning_ssd.memory import MallocThreshold, trim

__all__ = ["Allocation"]

_MIN_RELAXED_S = 0.2
"""Between borders that are closer than this, changing to and fro would cost more than it saves."""


class Allocation:
    """Lets freed activations leave the process, in passes that free any.

    For those glibc maps each tensor on its own (:class:`~lightning_ssd.memory.MallocThreshold`), which costs page
    faults. A pass that keeps everything needs none of that, nor does the optimizer, whose temporaries are not ours.

    Args:
        is_ours: whether activations live in memory of glibc; False does nothing.
    """

    def __init__(self, *, is_ours: bool = False) -> None:
        self._threshold = MallocThreshold() if is_ours else None
        self._last_border_s = 0.0

    def enter(self, may_move: bool) -> None:
        """A pass begins, in which memory is to return or not; or one that expected not to finds that it has to."""
        if self._threshold is not None:
            if may_move:
                self._threshold.fix()
            else:
                self._threshold.restore()

    def border(self) -> None:
        """A backward is over."""
        now_s = time.perf_counter()
        if self._threshold is not None and now_s - self._last_border_s > _MIN_RELAXED_S:
            self._threshold.restore()
        self._last_border_s = now_s

    def close(self) -> None:
        """Leave malloc as it was, without our holes."""
        if self._threshold is not None:
            self._threshold.restore()
            trim()
