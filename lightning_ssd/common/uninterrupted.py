"""Work that no Ctrl-C divides: it runs in a thread of its own, since signals are handled in the main thread."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_ssd.common.accelerators import current_device, set_current_device
from lightning_ssd.common.status_line import DELAY_S, StatusLine
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import copy_of

__all__ = ["Task", "undisturbed"]

T = TypeVar("T")

_PATIENCE_S = 3.0
"""For so long the end of the work is waited for when an interrupt has come: then there is nothing half-done."""


class Task(Generic[T]):
    """One call in a thread of its own.

    Not ``Thread.start`` and ``Thread.join``: an interrupt in these may leave a thread that never begins, or is taken
    for one that has ended. Here a thread of C starts the thread of Python.

    Args:
        work: what to call.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._name = name
        self._ended = Latch()
        self.value: T | None = None
        """What it has returned."""
        self.error: BaseException | None = None
        """What it has raised."""
        self.is_begun = False

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: there can be no more threads, or the interpreter is going.
        """
        self.is_begun = True
        try:
            _thread.start_new_thread(self._launch, ())
        except RuntimeError:
            self.is_begun = False
            raise

    def _launch(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except BaseException as error:  # raised where the result is asked for
            self.error = error
            self._ended.open()

    def _run(self) -> None:
        try:
            self.value = self._work()
        except BaseException as error:  # raised where the result is asked for
            self.error = error
        del self._work
        self._ended.open()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, however."""
        return self._ended.is_open

    def wait(self, doing: str | None = None) -> None:
        """Block until it has ended. Nothing to wait for where it was never started.

        Args:
            doing: what a terminal is told meanwhile, if it takes long.
        """
        if not self.is_begun:
            return
        if doing is not None:
            with StatusLine(doing) as line:
                if line.is_wanted and not self._ended.wait_for(DELAY_S):
                    line.draw()
                    self._ended.wait()
        self._ended.wait()

    def wait_for(self, timeout_s: float) -> bool:
        """The same, but no longer than this; return whether it has ended. For one thread at a time."""
        return not self.is_begun or self._ended.wait_for(timeout_s)

    def result(self) -> T:
        """What it has returned, once it has ended. Raises what it has raised."""
        self.wait()
        if self.error is not None:
            raise copy_of(self.error)
        return self.value  # type: ignore[return-value]


class _Once(Generic[T]):
    """Work whose result is undone, by whoever comes last, if nobody gets it."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object]) -> None:
        self._work, self._undo = work, undo
        # Each thread has a current device of its own, which is the first one at the beginning.
        self._device = current_device()
        # A leaf lock: guards what is lost, and by whom it is undone.
        self._lock = threading.Lock()
        self._is_lost = False
        self.values: list[T] = []

    def __call__(self) -> T:
        if self._device is not None:
            set_current_device(self._device)
        result = self._work()
        with self._lock:
            self.values.append(result)
            is_lost = self._is_lost
        if is_lost:
            self._undo(result)
        return result

    def lose(self) -> None:
        """The caller has gone."""
        with self._lock:
            self._is_lost = True
            results = list(self.values)
        for result in results:
            self._undo(result)


def undisturbed(
    work: Callable[[], T],
    name: str,
    undo: Callable[[T], object] = lambda result: None,
    *,
    doing: str | None = None,
) -> T:
    """Call ``work`` where no interrupt can come, and wait for its end.

    An interrupt meanwhile is raised when the work has ended, or after some seconds; then the work goes on without us.

    Args:
        work: what to call. From the main thread it runs in another one, on the same device, with gradients on.
        name: of that thread.
        undo: given what the work has returned if an interrupt takes it from the caller.
        doing: what a terminal is told meanwhile, if it takes long.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    once = _Once(work, undo)
    task = Task(once, name)
    try:
        try:
            task.start()
        except RuntimeError:  # the interpreter is going, or there can be no more threads
            return work()
        task.wait(doing)
        if task.error is None:
            return task.value  # type: ignore[return-value]
    except BaseException:
        loss = Task(once.lose, name)
        loss.start()
        loss.wait_for(_PATIENCE_S)
        task.wait_for(_PATIENCE_S)
        raise
    raise task.error
