"""Drives that fail while a test wants it."""

from functools import partial

from tests.support.faults import FaultyBackend


class Switch:
    """Wraps backends, and has them fail while it is on.

    Args:
        fails: by the argument of a faulty backend, what is raised.
    """

    def __init__(self, **fails):
        self.is_on = False
        self._fails = {name: partial(self._fail, error) for name, error in fails.items()}

    def _fail(self, error, call):
        return error() if self.is_on else None

    def wrap(self, backend):
        """Put it around a backend."""
        return FaultyBackend(backend, **self._fails)
