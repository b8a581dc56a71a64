"""Which weights are in memory where they are parts of files, on a CPU."""

from __future__ import annotations

import _thread
import queue
from contextlib import suppress

from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.parameters.pager import Pager, Unit
from lightning_ssd.parameters.weight_files import MappedStorage, unreadable

__all__ = ["MappedPager"]


class MappedPager(Pager[MappedStorage]):
    """On a CPU, where weights are parts of files: pages come and go, and whoever touches one finds its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._further: queue.SimpleQueue[Unit[MappedStorage] | None] = queue.SimpleQueue()
        self._further_has_ended = Latch()
        _thread.start_new_thread(self._serve_further, ())

    def _request_further(self, unit: Unit[MappedStorage]) -> None:
        """It comes to the page cache, and not to the memory of this process: a second reader keeps the drive busy."""
        if unit.resident_bytes is None:
            self._further.put(unit)

    def _serve_further(self) -> None:
        try:
            scratch = FileView(READ_BYTES)
            while (unit := self._further.get()) is not None:
                self._read_further(unit, scratch)
        finally:
            self._further_has_ended.open()

    def _read_further(self, unit: Unit[MappedStorage], scratch: FileView) -> None:
        """Of trained weights so much in the page cache would drive out what is used and written sooner."""
        for weight in list(unit.weights):
            if weight.is_frozen and not self.is_closed:
                with suppress(OSError, MemoryError):  # whoever uses it is told
                    weight.memory.read(scratch)

    def close(self) -> None:
        super().close()
        self._further.put(None)
        self._further_has_ended.wait()

    def _send_out(self, unit: Unit[MappedStorage], *, strays: bool = False) -> None:
        if not self._is_idle(unit) or (unit.resident_bytes is None and not strays):
            return
        for weight in list(unit.weights):
            weight.memory.send_out()
        self.resident_bytes -= unit.resident_bytes or 0
        unit.resident_bytes = unit.coming = None

    def _bring_in(self, unit: Unit[MappedStorage]) -> None:
        for weight in list(unit.weights):
            try:
                weight.memory.bring_in()
            except StorageError:  # it says all
                raise
            except OSError as refusal:
                raise unreadable(weight.names, weight.memory.nbytes, refusal) from refusal
