"""Which weights are in memory where they are parts of files, on a CPU."""

from __future__ import annotations

from lightning_ssd.common.waiting import Latch
from lightning_ssd.parameters.files.cache_reader import CacheReader, Read
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, reading
from lightning_ssd.parameters.pager import Pager, Unit, Weight

__all__ = ["MappedPager", "bring_in"]


class MappedPager(Pager[MappedStorage]):
    """On a CPU, where weights are parts of files: pages come and go, and a touch of one finds its bytes."""

    def __init__(self, *, num_drives: int = 1) -> None:
        super().__init__()
        self._num_drives = num_drives
        self._next, self._further = (CacheReader(num_drives) for _ in range(2))

    def _request_ahead(self, unit: Unit[MappedStorage]) -> None:
        """Read what is frozen into the page cache alone; it is mapped at its use.

        A reader that maps has to be woken, on cores that the model keeps busy. Trained units are mapped ahead:
        gradients that wait to be written would drive them out of the page cache.
        """
        self._next.ask(self._reads(unit))
        if self._comes_ahead(unit):
            super()._request_ahead(unit)

    def _reads(self, ahead: Unit[MappedStorage] | None) -> list[Read]:
        """Return what is read into the page cache until another unit is used.

        Of several drives all is read: what maps a unit, in one thread, waits for one of them after the other.
        """
        if self._num_drives == 1:
            return [] if ahead is None else _frozen(ahead)
        away = [unit for unit in self.units if unit.coming is not None and not unit.coming.is_open]
        if ahead is not None and ahead.resident_bytes is None and ahead not in away:
            away.append(ahead)
        return [weight.memory.read for unit in away for weight in list(unit.weights)]

    def _comes_ahead(self, unit: Unit[MappedStorage]) -> bool:
        return not all(weight.is_frozen for weight in list(unit.weights))

    def _look_ahead(self, ahead: Unit[MappedStorage] | None, further: Unit[MappedStorage] | None) -> None:
        """Two readers keep a drive busy. So many trained weights in the page cache would drive out what is used and
        written sooner.
        """
        if ahead is None:
            self._next.ask(self._reads(None))
        super()._look_ahead(ahead, further)
        self._further.ask(() if further is None or further is ahead else _frozen(further))

    def close(self) -> None:
        super().close()
        self._next.close()
        self._further.close()

    def _read(self, unit: Unit[MappedStorage], latch: Latch) -> None:
        """Read a unit. It leaves again if it is no longer expected when it has come."""
        super()._read(unit, latch)
        with self._lock:
            if unit is not self._ahead and unit is not self._in_backward:
                self._send_out(unit)

    def _send_out(self, unit: Unit[MappedStorage], *, strays: bool = False) -> None:
        if not self._is_idle(unit) or (unit.resident_bytes is None and not strays):
            return
        for weight in list(unit.weights):
            weight.memory.send_out()
        self.resident_bytes -= unit.resident_bytes or 0
        unit.resident_bytes = unit.coming = None

    def _bring_in(self, unit: Unit[MappedStorage]) -> None:
        """Bring in a unit, trained weights to stay: else gradients that wait to be written drive them out unused."""
        for weight in list(unit.weights):
            bring_in(weight, to_stay=not weight.is_frozen)


def bring_in(weight: Weight[MappedStorage], *, to_stay: bool = False) -> None:
    """Block until a weight is in memory."""
    with reading(f"weight {', '.join(weight.names)}", weight.memory.nbytes):
        weight.memory.bring_in(to_stay=to_stay)


def _frozen(unit: Unit[MappedStorage]) -> list[Read]:
    """Return what reads the frozen weights of a unit that is neither in memory nor on its way there."""
    is_away = unit.resident_bytes is None and unit.coming is None
    return [weight.memory.read for weight in unit.weights if is_away and weight.is_frozen]
