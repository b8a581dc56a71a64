"""The threads that train with one cache."""

from __future__ import annotations

import threading

__all__ = ["TrainingThreads"]


class TrainingThreads:
    """Threads that have begun a pass, by their numbers."""

    def __init__(self) -> None:
        self._known: dict[int, threading.Thread] = {}

    def note(self) -> None:
        """Note that this thread begins a pass."""
        self._known[threading.get_ident()] = threading.current_thread()

    @property
    def alive(self) -> list[threading.Thread]:
        """Those that have begun a pass, and live."""
        return [thread for thread in list(self._known.values()) if thread.is_alive()]
