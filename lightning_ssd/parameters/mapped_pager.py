"""Which weights are in memory where they are parts of files, on a CPU."""

from __future__ import annotations

from lightning_ssd.errors import StorageError
from lightning_ssd.parameters.cache_reader import CacheReader
from lightning_ssd.parameters.pager import Pager, Unit
from lightning_ssd.parameters.weight_files import MappedStorage, unreadable

__all__ = ["MappedPager"]


class MappedPager(Pager[MappedStorage]):
    """On a CPU, where weights are parts of files: pages come and go, and whoever touches one finds its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._further = CacheReader()

    def _request_further(self, unit: Unit[MappedStorage] | None) -> None:
        """It comes to the page cache, and not to the memory of this process: a second reader keeps the drive busy.

        Of trained weights so much in the page cache would drive out what is used and written sooner.
        """
        is_away = unit is not None and unit.resident_bytes is None and unit.coming is None
        wanted = unit.weights if unit is not None and is_away else ()
        self._further.ask([weight.memory.read for weight in wanted if weight.is_frozen])

    def close(self) -> None:
        super().close()
        self._further.close()

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
