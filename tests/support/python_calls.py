"""Counts the calls of Python that the package makes."""

import sys
import threading
from collections import Counter
from contextlib import contextmanager


@contextmanager
def python_calls():
    """Yield the names of the package's functions that this thread calls meanwhile."""
    calls = []

    def count(frame, event, argument):
        code = frame.f_code
        if event == "call" and "lightning_ssd" in code.co_filename and "tests" not in code.co_filename:
            calls.append(code.co_qualname)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def calls_by_thread():
    """Yield numbers of the package's functions that each thread calls which begins meanwhile, by its name."""
    calls = Counter()

    def count(frame, event, argument):
        filename = frame.f_code.co_filename
        if event == "call" and "lightning_ssd" in filename and "tests" not in filename:
            calls[threading.current_thread().name] += 1

    threading.setprofile(count)
    try:
        yield calls
    finally:
        threading.setprofile(None)
