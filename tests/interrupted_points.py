"""Ctrl-C at each point of some files, one at a time, in the process of the test itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.interrupt_script import Points


class PointsIn(Points):
    """Those of files of the package by their names, where Python would look for signals.

    Args:
        names: of the files.
    """

    def __init__(self, *names: str) -> None:
        super().__init__((0, 1))
        self._names = names

    def look(self, frame: FrameType, event: str, arg: Any) -> None:
        """As a profiler is called."""
        if Path(frame.f_code.co_filename).name in self._names:
            super().look(frame, event, arg)

    def interrupt(self, call: Callable[[], object]) -> str | None:
        """Call it with an interrupt at a point that no call has met yet, and tell where that was; ``None``: there is
        none.
        """
        self.start()
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            where = self.stop()
        return where
