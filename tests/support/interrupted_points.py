"""Ctrl-C at each point of some files, one at a time, in the process of the test itself."""

import copy
from pathlib import Path

from tests.support.interrupt_script import PACKAGE, Points


class PointsIn(Points):
    """Those of files of the package, where Python would look for signals.

    Args:
        names: of the files, below the package; without any, all files are meant.
        one_in: of so many points outside of deferred sections, one is interrupted.
    """

    def __init__(self, *names, one_in=1):
        super().__init__((0, one_in))
        self._paths = {str(Path(PACKAGE, name)) for name in names}
        assert all(Path(path).is_file() for path in self._paths)

    def look(self, frame, event, arg):
        """As a profiler is called."""
        if not self._paths or frame.f_code.co_filename in self._paths:
            super().look(frame, event, arg)

    def interrupt(self, call):
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


class Checkpoint:
    """What a training was, for whoever goes on from there after an interrupt."""

    def __init__(self, loop):
        self._weights = {name: value.clone() for name, value in loop.model.state_dict().items()}
        self._states = copy.deepcopy(loop.optimizer.state_dict())

    def load(self, loop):
        loop.optimizer.zero_grad()
        loop.model.load_state_dict(self._weights)
        loop.optimizer.load_state_dict(copy.deepcopy(self._states))
        loop.found.clear()
        return loop
