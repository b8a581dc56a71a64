"""Moves units of weights of a device: memory is taken on the stream that trains, a thread reads, writes give it back.

Note [who keeps a weight]: a unit in use has users, a saved weight that backward has asked for is held by the tensor
that it got, what is touched outside of its unit stays until something else needs the room or a backward is over.

Note [who has to write]: what was changed leaves when it has been written. One unit may be on its way while the next is
changed; before a second one goes, the first has gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.parameters.pager import Pager, Phase, Unit, Weight

__all__ = ["DeviceMoves"]


class DeviceMoves(Pager[DeviceMemory]):
    """Moves weights of a device. Who asks for a weight, and why: ``device_pager.py``."""

    def __init__(self) -> None:
        super().__init__()
        self._touched: list[Unit[DeviceMemory]] = []
        self._going: list[Unit[DeviceMemory]] = []
        """Units that are being written."""
        self._lingering: set[Unit[DeviceMemory]] = set()
        """Units of which something could not leave when it should have."""
        self._staying: set[int] = set()
        """Units of which the program may know an address until the backward is over."""

    def _hold(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        """Bring a weight back if it is away, and begin to use it. One whose last tensor has gone needs no bytes."""
        while True:
            with self._lock:
                if weight.memory.is_here or not weight.memory.key.alive():
                    weight.memory.begin_use()
                    return
                if self.is_closed:
                    raise _lost(weight)
                unit.resident_bytes = None
            self._await(unit)

    def _await(self, unit: Unit[DeviceMemory]) -> None:
        try:
            with self._lock:
                latch = self._request(unit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._await_all_written():
                raise
            with self._lock:
                latch = self._request(unit)
        self._wait(unit, latch)

    def _use(self, unit: Unit[DeviceMemory], phase: Phase) -> None:
        with self._lock:
            for other in list(self._lingering):
                if other not in (unit, self._ahead, self._in_backward):
                    self._send_out(other, strays=True)
        try:
            super()._use(unit, phase)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._await_all_written():
                raise
            self._await(unit)
        with self._lock:
            for weight in list(unit.weights):
                if weight.memory.is_here:
                    weight.memory.wait_for_copy()

    def _was_touched(self, unit: Unit[DeviceMemory]) -> None:
        """It stays while there are few like it: it may be used again at once."""
        if unit in self._touched:
            self._touched.remove(unit)
        self._touched.append(unit)
        while len(self._touched) > 2:
            oldest = self._touched.pop(0)
            if oldest is not self._ahead and oldest is not self._in_backward:
                self._send_out(oldest, strays=True)
                if oldest in self._lingering and oldest not in self._going:
                    self._going.append(oldest)

    def _let_go(self, units: Sequence[Unit[DeviceMemory]], *, except_for: Sequence[Unit[DeviceMemory]]) -> None:
        with self._lock:
            for unit in [*units, *(self._lingering - {*units, *except_for})]:
                self._send_out(unit, strays=True)
            self._going += [unit for unit in units if unit in self._lingering and unit not in self._going]
        self._await_written()

    def _await_written(self) -> None:
        """Until no more than one unit is being written. The caller holds no lock."""
        while len(self._going) > 1:
            unit = self._going.pop(0)
            for weight in list(unit.weights):
                if (ended := weight.memory.writing) is not None:
                    ended.wait()
            if unit is not self._ahead and unit is not self._in_backward:
                with self._lock:
                    self._send_out(unit, strays=True)

    def _await_all_written(self) -> bool:
        """Until nothing is being written; whether anything was. The caller holds no lock."""
        under_way = [ended for weight in self.weights if (ended := weight.memory.writing) is not None]
        for ended in under_way:
            ended.wait()
        return bool(under_way)

    def _request(self, unit: Unit[DeviceMemory]) -> Latch | None:
        if not self._finds_memory(unit):
            self._make_room(except_for=unit)
            self._take_memory(unit)
        return super()._request(unit)

    def _request_ahead(self, unit: Unit[DeviceMemory]) -> None:
        if self._finds_memory(unit):
            super()._request(unit)
        else:
            self._send_out(unit, strays=True)  # what it has taken so far

    def _finds_memory(self, unit: Unit[DeviceMemory]) -> bool:
        """Take memory for a unit; whether there was enough."""
        try:
            self._take_memory(unit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _take_memory(self, unit: Unit[DeviceMemory]) -> None:
        is_coming = unit.coming is not None and not unit.coming.is_open
        if unit.resident_bytes is None and not is_coming and not self.is_closed:
            for weight in list(unit.weights):
                weight.memory.make_room()

    def _make_room(self, *, except_for: Unit[DeviceMemory] | None) -> None:
        """Send out what is not used now."""
        with self._lock:
            for unit in list(self.units):
                if unit is not except_for:
                    self._send_out(unit, strays=True)
            device = next((t.device for u in self.units for w in u.weights for t in w.memory.tensors), None)
        accelerator = None if device is None else accelerator_of(device)
        if accelerator is not None:
            accelerator.empty_cache()

    def _send_out(self, unit: Unit[DeviceMemory], *, strays: bool = False) -> None:
        if not self._is_idle(unit) or unit.number in self._staying or (unit.resident_bytes is None and not strays):
            return
        for weight in list(unit.weights):
            if weight.memory.send_out():
                self._count(-weight.memory.nbytes)
        unit.resident_bytes = unit.coming = None
        if any(weight.memory.is_here for weight in unit.weights):
            self._lingering.add(unit)
        else:
            self._lingering.discard(unit)

    def _bring_in(self, unit: Unit[DeviceMemory]) -> None:
        for weight in list(unit.weights):
            try:
                has_come = weight.memory.bring_in()
            except StorageError as refusal:
                refusal.add_note(
                    f"This was weight {', '.join(weight.names)} ({weight.memory.nbytes:,} bytes), without which "
                    "training cannot go on. Go on from a checkpoint, with another drive."
                )
                raise
            if has_come:
                with self._lock:
                    self._count(weight.memory.nbytes)

    def _has_come(self, unit: Unit[DeviceMemory]) -> None:
        unit.resident_bytes = sum(weight.memory.nbytes for weight in list(unit.weights) if weight.memory.is_here)


def _lost(weight: Weight[DeviceMemory]) -> OffloaderClosedError:
    return OffloaderClosedError(
        f"weight {', '.join(weight.names)} did not come back when the offloader was closed; go on from a checkpoint"
    )
