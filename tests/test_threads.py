"""Threads of tests: what goes wrong in one of them is seen."""

from __future__ import annotations

import threading

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once(lambda: None, lambda: 1 // 0)


def test_they_run_beside_each_other() -> None:
    met = threading.Barrier(3, timeout=PATIENCE_S)
    at_once(*[met.wait] * 3)
