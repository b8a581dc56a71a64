"""Counts the calls of Python that the package makes."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """Yield the names of the package's functions that this thread calls meanwhile."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and "lightning_ssd" in code.co_filename and "tests" not in code.co_filename:
            calls.append(code.co_qualname)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def calls_by_thread() -> Iterator[Counter[str]]:
    """Yield numbers of the package's functions that each thread calls which begins meanwhile, by its name."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        filename = frame.f_code.co_filename
        if event == "call" and "lightning_ssd" in filename and "tests" not in filename:
            calls[threading.current_thread().name] += 1

    threading.setprofile(count)
    try:
        yield calls
    finally:
        threading.setprofile(None)
