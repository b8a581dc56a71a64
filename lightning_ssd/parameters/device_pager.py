"""Brings weights of a device back before any code gets to them, and gives their memory back behind it.

They come by five doors: the forward of their unit, the saved tensor that backward asks for, the update by an offloaded
optimizer, any other use (``guard.py``), and the end, when all come back. Memory is taken on the stream that trains, a
thread reads, and writes give memory back.

Note [who keeps a weight]: a unit in use has users, a saved weight that backward has asked for is held by the tensor
that it got, what is touched outside of its unit stays until something else needs the room or a backward is over.

Note [who has to write]: what was changed leaves when it has been written. One unit may be on its way while the next is
changed; before a second one goes, the first has gone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lightning_ssd.common.accelerators import accelerator_of, is_capturing
from lightning_ssd.common.inplace_edits import VersionProbe, inplace_error
from lightning_ssd.common.tensors import TensorSpec, storage_of
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import ConfigError, OffloaderClosedError, StorageError
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.parameters.pager import Pager, Phase, Place, Unit, Weight

__all__ = ["DevicePager", "SavedDeviceWeight", "is_in_backward"]


def is_in_backward() -> bool:
    """Whether a hook of a backward calls: what autograd is about to use must not leave."""
    return torch._C._current_graph_task_id() != -1


class DevicePager(Pager[DeviceMemory]):
    """On a device."""

    def __init__(self, *, takes_trained: bool = False) -> None:
        super().__init__()
        self._takes_trained = takes_trained
        self._updated: list[Unit[DeviceMemory]] = []
        """Units that an optimizer may go on with."""
        self._shows_host_copies = self._has_warned = False
        self._touched: list[Unit[DeviceMemory]] = []
        self._going: list[Unit[DeviceMemory]] = []
        """Units that are being written."""
        self._lingering: set[Unit[DeviceMemory]] = set()
        """Units of which something could not leave when it should have."""
        self._staying: set[int] = set()
        """Units of which the program may know an address until the backward is over."""

    # -- doors -----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit[DeviceMemory]) -> None:
        if unit.weights and not self.is_closed and is_capturing():
            raise ConfigError(
                f"a CUDA graph captures the forward of {unit.name or 'the model'}, whose weights wait between "
                "their uses and come back to other addresses; set OffloadPolicy.parameters='keep', or capture no graph"
            )
        super().enter(unit)
        if self.is_closed:
            return
        for weight in list(unit.weights):
            self._hold(unit, weight)
            if self._takes_trained and torch.is_grad_enabled():
                weight.memory.note_training()

    def is_traced(self, unit: Unit[DeviceMemory]) -> None:
        if unit.weights and not self.is_closed:
            raise ConfigError(
                f"the forward of {unit.name or 'the model'} is compiled together with what is around it, and its "
                "weights wait elsewhere between their uses; compile each block by itself (block.compile()), or set "
                "OffloadPolicy.parameters='keep'"
            )

    def leave(self, unit: Unit[DeviceMemory]) -> None:
        if self.is_closed:
            return
        with self._lock:
            for weight in list(unit.weights):
                weight.memory.end_use()
        super().leave(unit)

    @contextmanager
    def using(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        exposes: bool = False,
        pins: bool = False,
    ) -> Iterator[None]:
        used = []
        try:
            for tensor in tensors:
                found = self._weight_of(tensor)
                if found is not None:
                    if pins:
                        self._staying.add(found[0].number)
                    self._hold(*found)
                    used.append(found)
                    if exposes:
                        found[1].memory.expose()
            yield
        finally:
            with self._lock:
                for unit, weight in used:
                    weight.memory.end_use()
                    self._was_touched(unit)
        self._await_written()

    def will_be_updated(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in filter(self.waits, parameters):
            if (found := self._weight_of(parameter)) is not None:
                found[1].memory.is_updated_here = True

    @contextmanager
    def updating(self, parameters: Sequence[torch.Tensor], following: Sequence[torch.Tensor]) -> Iterator[None]:
        used: list[tuple[Unit[DeviceMemory], Weight[DeviceMemory]]] = []
        try:
            for parameter in filter(self.waits, parameters):
                if (found := self._weight_of(parameter)) is not None:
                    self._hold(*found)
                    used.append(found)
                    with self._lock:
                        self._will_be_used_in_update(found[1])
            with self._lock:
                for unit in self._units_of(following):
                    self._request_ahead(unit)
            yield
        finally:
            with self._lock:
                for _, weight in used:
                    weight.memory.end_use()
        self._updated = [*dict.fromkeys([*self._updated, *self._units_of(parameters)])]
        wanted = self._units_of(following)
        if wanted or not following:  # else small ones follow, and then perhaps more of the same unit
            done = [unit for unit in self._updated if unit not in wanted]
            self._updated = [unit for unit in self._updated if unit in wanted]
            self._let_go(done, except_for=wanted)

    def _will_be_used_in_update(self, weight: Weight[DeviceMemory]) -> None:
        weight.memory.will_change()

    def exposed(self, tensor: torch.Tensor) -> None:
        if (found := self._weight_of(tensor)) is not None:
            found[1].memory.expose()

    def will_be_array(self, tensor: torch.Tensor) -> None:
        if not self.is_closed and (found := self._weight_of(tensor)) is not None:
            self.release(*found)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor | None:
        found = self._weight_of(tensor)
        if not self._shows_host_copies or found is None:
            return None
        with self.using([tensor]):
            copy = tensor.detach().to("cpu", copy=True)
        self._make_room(except_for=None)
        return copy

    @contextmanager
    def host_copies(self) -> Iterator[None]:
        """While it is entered, ``detach()`` of a weight that waits gives a copy in memory of the host: all weights
        together need not fit on the device to be saved.
        """
        self._shows_host_copies = True
        try:
            yield
        finally:
            self._shows_host_copies = False

    def save(self, tensor: torch.Tensor, unit: Unit[DeviceMemory]) -> SavedDeviceWeight | None:
        weight = self.find(storage_of(tensor))
        if weight is None:
            return None
        if self._takes_trained:
            weight.memory.note_training()
        return SavedDeviceWeight(self, unit, weight, tensor)

    def follow_stream(self) -> None:
        with self._lock:
            for unit in list(self.units):
                for weight in list(unit.weights):
                    if weight.memory.num_users:
                        weight.memory.wait_for_copy()

    def _weight_of(self, tensor: torch.Tensor) -> tuple[Unit[DeviceMemory], Weight[DeviceMemory]] | None:
        if not self.waits(tensor):  # a sparse one has no storage
            return None
        storage = storage_of(tensor)
        unit, weight = self.by_storage.get(storage._cdata), self.find(storage)
        return None if unit is None or weight is None else (unit, weight)

    # -- moves -----------------------------------------------------------------------------------------------------

    def _hold(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        """Bring a weight back if it is away, and begin to use it. One whose last tensor has gone needs no bytes."""
        while True:
            with self._lock:
                if weight.memory.is_here or not weight.memory.key.alive():
                    weight.memory.begin_use()
                    return
                if self.is_closed:
                    raise OffloaderClosedError(
                        f"weight {', '.join(weight.names)} did not come back when the offloader was closed; go on from "
                        "a checkpoint"
                    )
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

    # -- the beginning and the end ---------------------------------------------------------------------------------

    def border(self) -> None:
        if self.is_closed or is_in_backward():
            return
        with self._lock:
            self._staying.clear()
            self._touched.clear()
            places = [(unit, weight) for unit in list(self.units) for weight in list(unit.weights)]
            for unit, weight in places:
                weight.memory.num_users = 0
                weight.memory.close_door()
                if weight.memory.key.alive() and not weight.memory.tensors:
                    # They have other storages, and the copy is not needed: a graph that has saved this storage holds
                    # it.
                    weight.memory.release()
                    self._drop(unit, weight)
        for unit, weight in places:
            if weight.memory.is_trained and not self._takes_trained:
                self.release(unit, weight)
            elif weight.memory.error is not None:
                self._warn(weight, f"was changed and cannot be written ({weight.memory.error})")
            elif weight.memory.is_trained and weight.memory.may_change_unseen:
                self._warn(weight, "has a gradient, and is in no optimizer that offload_optimizer() has returned")
        super().border()

    def _warn(self, weight: Weight[DeviceMemory], reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"weight {', '.join(weight.names)} {reason}; it stays in memory, as do others like it, and results are "
                "not affected",
                stacklevel=5,
            )

    def add(self, place: Place, weight: Weight[DeviceMemory]) -> None:
        is_new = weight.memory.key.cdata not in self.by_storage
        super().add(place, weight)
        if is_new:
            with self._lock:
                self._count(weight.memory.nbytes)
                weight.memory.close_door()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._lock

    def bring_back_all(self) -> None:
        """Release all weights; those for which the device has no memory become tensors of the host.

        Raises:
            StorageError: a drive refuses; its weights raise when they are used.
        """
        refusal: StorageError | None = None
        num_on_host = 0
        for unit in list(self.units):
            for weight in list(unit.weights):
                try:
                    if weight.memory.key.alive():
                        self.release(unit, weight)
                except StorageError as error:
                    refusal = refusal or error
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    try:
                        self._move_to_host(unit, weight)
                        num_on_host += 1
                    except StorageError as error:
                        refusal = refusal or error
        if num_on_host:
            warnings.warn(self._too_many(num_on_host), stacklevel=4)
        if refusal is not None:
            raise refusal

    def _too_many(self, num: int) -> str:
        """Return what has become of those for which the device has no memory."""
        return f"{num} weights do not fit on the device together with the others, and are on the CPU now"

    def close(self) -> None:
        super().close()
        left = {w.memory.key.cdata: unit for unit in self.units for w in unit.weights if w.memory.key.alive()}
        if left:
            self.by_storage = left
            _guarding_lost_weights.append(self)

    def release(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        """Bring a weight back for good."""
        if (ended := weight.memory.writing) is not None:
            ended.wait()  # its copy is waited for nowhere else, and the program may write to the weight at once
        self._hold(unit, weight)
        weight.memory.await_copy()
        with self._lock:
            weight.memory.end_use()
            weight.memory.release()
            self._drop(unit, weight)

    def _move_to_host(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        with self._lock:
            weight.memory.move_to_host()
            self._drop(unit, weight)

    def _drop(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        if weight in unit.weights and weight.memory.is_here:
            self._count(-weight.memory.nbytes)
        super()._drop(unit, weight)

    def put_away(self, weight: Weight[DeviceMemory]) -> None:
        """Write a weight if need be, wait for that, and give its memory back if it is not needed.

        Raises:
            StorageError: no tier takes it. It stays in memory, and waits no more.
        """
        with self._lock:
            ended = weight.memory.begin_write()
        if ended is not None:
            ended.wait()
        if weight.memory.error is not None:
            self.release(self.by_storage[weight.memory.key.cdata], weight)
            raise StorageError(f"weight {', '.join(weight.names)} could not be written: {weight.memory.error}")
        with self._lock:
            if weight.memory.send_out():
                self._count(-weight.memory.nbytes)


_guarding_lost_weights: list[DevicePager] = []
"""Closed without some weights: who uses these is refused as long as the process lives."""


class SavedDeviceWeight:
    """Stands in autograd for a saved weight: which it is, and which view of it. It holds none of the memory.

    It holds the parameters, without which the storage would be gone. It also refers to them weakly, so that PyTorch
    refuses to swap them, as it does what a graph has saved itself.
    """

    __slots__ = (
        *("_device", "_pager", "_parameters", "_probe", "_references", "_saved", "_spec", "_unit"),
        "_weight",
    )

    def __init__(
        self, pager: DevicePager, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory], tensor: torch.Tensor
    ) -> None:
        self._pager, self._unit, self._weight = pager, unit, weight
        self._parameters = weight.memory.tensors
        self._references = [weakref.ref(parameter) for parameter in self._parameters]
        self._saved = next((parameter for parameter in self._parameters if parameter is tensor), None)
        self._device = tensor.device
        self._spec = TensorSpec.of(tensor)
        self._probe = VersionProbe(tensor)

    def tensor(self) -> torch.Tensor:
        if self._probe.version != self._probe.saved:
            description = self._spec.dtype, self._device, self._spec.size
            raise inplace_error(description, version=self._probe.version, expected=self._probe.saved)
        if self._saved is not None and storage_of(self._saved)._cdata != self._weight.memory.key.cdata:
            return self._saved.detach()  # by ``.data``: a graph that holds a parameter itself sees what it has now
        self._pager._hold(self._unit, self._weight)
        try:
            storage = self._weight.memory.key.resolve()
            if storage is None:
                raise RuntimeError(
                    f"weight {', '.join(self._weight.names)} was given other memory (weight.data = ..., set_() or the "
                    "like) between forward and backward, and backward needs the old one, which was offloaded and is "
                    "gone. Give it after backward, or set OffloadPolicy.parameters='keep'"
                )
            return self._probe.rebuild(self._spec, storage)
        finally:
            with self._pager._lock:
                self._weight.memory.end_use()
