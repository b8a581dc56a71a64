"""The memory of one weight on a device: it goes and comes back in place, and its bytes wait on a tier.

A weight keeps its identity, its storage object and its version: only the memory under the storage is given back
(``resize_(0)``), as FSDP2 does with what it has gathered. So code that comes by a door finds the weight that it knows.
What no door sees would find no memory at all. Hence the rule of :meth:`DeviceMemory.send_out`: bytes leave only if
the model's own parameters alone hold the storage.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ssd.common.sent_storages import is_in_other_processes
from lightning_ssd.common.tensors import StorageKey, TensorSpec, holders, storage_of
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import StorageError, forget_frames
from lightning_ssd.parameters.guard.guard import Door, forget_door, guard, own_class
from lightning_ssd.parameters.units import is_held_in_c
from lightning_ssd.tiers.base import ReadEnd, StoredBytes, WriteEnd
from lightning_ssd.tiers.copy_paths import storage_bytes
from lightning_ssd.tiers.streams import CopyEngine, StreamEvent
from lightning_ssd.tiers.tier import Tier

__all__ = ["DeviceMemory"]

_Stamp = tuple[int, ...]
"""Versions of the parameters in a storage: bytes have not changed as long as it has not, but for what is exposed."""


class DeviceMemory:
    """One storage of weights on a device.

    The pager's lock guards all of it. ``resize_``, marks and changes of class are the training thread's: they belong to
    its stream.

    Args:
        storage: whose memory it is. Held weakly.
        tensors: all parameters that lie in it. Held weakly.
        tiers: that take the bytes; the first one with room does.
        copies: between the device and the host.
        lock: the pager's.
        door: what brings the weight back for those who use it outside of its unit.
        label: for messages.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        tensors: Sequence[torch.Tensor],
        *,
        tiers: Sequence[Tier],
        copies: CopyEngine,
        lock: AbstractContextManager[Any],
        door: Door,
        label: str,
    ) -> None:
        self.key = StorageKey(storage)
        self.nbytes = storage.nbytes()
        self.label = label
        self.num_users = 0
        """Windows and uses under way."""
        self.is_here = True
        self.error: str | None = None
        """Why it could not be written: it stays in memory."""
        self.is_updated_here = False
        """Whether an optimizer that tells us of its updates has it."""
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._tiers, self._copies, self._lock, self._door = tiers, copies, lock, door
        self._copy: StoredBytes | None = None
        self._copy_stamp: _Stamp = ()
        self._writer: _Write | None = None
        self._arrived: StreamEvent | None = None
        self._room: StreamEvent | None = None
        self._exposed: torch.Tensor | None = None
        self._is_exposed = self._is_released = self._has_trained = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters that are alive and still lie in this storage."""
        found = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        return [tensor for tensor in found if storage_of(tensor)._cdata == self.key.cdata]

    @property
    def is_trained(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(tensor.requires_grad for tensor in self.tensors)

    @property
    def may_change_unseen(self) -> bool:
        """Whether an unknown optimizer may update it, which may write past its version."""
        if self.is_updated_here:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return self._has_trained or any(tensor.grad is not None for tensor in self.tensors)

    def _stamp(self) -> _Stamp:
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(tensor._version for tensor in self.tensors)

    # -- in use ----------------------------------------------------------------------------------------------------

    def begin_use(self) -> None:
        """The bytes are here: let the current stream wait for them, and the parameters have their own class."""
        self.num_users += 1
        self.wait_for_copy()
        for tensor in self.tensors:
            own_class(tensor)

    def wait_for_copy(self) -> None:
        """Let the current stream wait for the bytes, and the allocator know that it uses them."""
        storage = self.key.resolve()
        if storage is None:
            return
        if self._arrived is not None:
            self._copies.wait_on_current_stream(self._arrived)
        with _disable_current_modes():  # of a program that traces, or fakes, what it does with the weight
            self._copies.protect(storage_bytes(storage, 0, self.nbytes))

    def await_copy(self) -> None:
        """Block until the bytes are here: streams may use them that are not known."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def end_use(self) -> None:
        self.num_users = max(self.num_users - 1, 0)
        self.close_door()

    def close_door(self) -> None:
        """Have the door asked before each use, unless one is under way."""
        if self.num_users == 0 and not self._is_released:
            for tensor in self.tensors:
                guard(tensor, self._door)

    def expose(self) -> None:
        """Before a program gets hold of the bytes that may change them without a sign: keep them, to compare.

        Where there is no memory for that they count as changed.
        """
        storage = self.key.resolve()
        if self._is_exposed or storage is None:
            return
        self._is_exposed = True
        if self.is_stored and self.is_here:
            try:
                self._exposed = storage_bytes(storage, 0, self.nbytes).clone()
            except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is the former
                self._exposed = None

    def note_training(self) -> None:
        """It is used by what may be differentiated: if it is trained, an optimizer is going to update it."""
        self._has_trained = self._has_trained or self.is_trained

    def will_change(self) -> None:
        """In use by an optimizer, which may change the bytes without a sign in the version. From now on the memory has
        the only copy, until it is written anew.
        """
        self.is_updated_here = True
        self._forget_copy()

    def _forget_copy(self) -> None:
        """Forget what a tier has, or what is being written: it is not wanted."""
        self._writer = None
        former, self._copy = self._copy, None
        if former is not None:
            former.tier.free(former)

    # -- down ------------------------------------------------------------------------------------------------------

    def send_out(self) -> bool:
        """Give the memory back if that is proved to change no number; return whether it was.

        Where no tier has the present bytes their write begins, and a later call gives the memory back.
        """
        storage = self.key.resolve()
        if storage is None or self.num_users or self._is_released or not self._is_alone(storage):
            return False
        if self.may_change_unseen and self.is_here:
            return False
        if not self.is_here:
            storage.resize_(0)  # an interrupt, or the drive, has kept the bytes from coming
            return False
        if self._is_exposed:  # bytes may have been changed that a program had got hold of, and can change no more
            before, self._exposed = self._exposed, None
            if before is None or not torch.equal(before, storage_bytes(storage, 0, self.nbytes)):
                self._forget_copy()
            self._is_exposed = False
        if not self.is_stored:
            self.begin_write()
            return False
        self.close_door()
        if self._arrived is not None:  # what came was not used: the copy may be under way still
            self._copies.wait_on_current_stream(self._arrived)
        self.is_here = False
        self._arrived = None
        storage.resize_(0)
        return True

    @property
    def is_stored(self) -> bool:
        """Whether a tier has the present bytes, as far as versions tell."""
        return self._copy is not None and self._copy_stamp == self._stamp()

    def _is_alone(self, storage: torch.UntypedStorage) -> bool:
        """Whether the parameters alone hold the storage: no view, no graph, no object of Python, no process."""
        tensors = self.tensors
        num_alive = sum(reference() is not None for reference in self._tensors)
        return (
            len(tensors) == num_alive > 0  # the others have got other storages
            and storage.nbytes() in (0, self.nbytes)
            and storage.resizable()  # else NumPy has seen it
            and holders(storage) == len(tensors)
            and not is_in_other_processes(storage)  # sent since it began to wait
            and all(map(self._is_held_by_owners_alone, tensors))
            and _references(storage) <= _references_of_one()
        )

    def _is_held_by_owners_alone(self, tensor: torch.Tensor) -> bool:
        return not is_held_in_c(tensor)

    def begin_write(self) -> Latch | None:
        """Have the present bytes written; return what opens when that has ended. ``None``: there is nothing to do.

        What a tier has of earlier is given back before: it will never be wanted, and its place may be needed.
        """
        if self._writer is not None and self._writer.stamp == self._stamp():
            return self._writer.ended
        if self.is_stored or self.error is not None or self.key.resolve() is None:
            return None
        self._forget_copy()
        self._exposed = None  # what there is to compare with is of earlier, too
        after = self._copies.mark()
        for tier in self._tiers:
            writer = _Write(self, self._stamp())
            self._writer = writer  # before it is submitted: it may end at once
            try:
                if tier.write(writer, self.nbytes, after, label=self.label):
                    return writer.ended
            except BaseException:  # an interrupt: no thread may wait for what was not submitted
                self._writer = None
                raise
            self._writer = None
        return None

    @property
    def writing(self) -> Latch | None:
        """Opens when the write under way has ended."""
        return None if self._writer is None else self._writer.ended

    def written(self, writer: _Write, stored: StoredBytes | None, error: BaseException | None) -> None:
        """In a worker: a write has ended."""
        with self._lock:
            is_current = self._writer is writer
            if is_current:
                self._writer = None
            if stored is not None and is_current and writer.stamp == self._stamp():
                self._copy, self._copy_stamp = stored, writer.stamp
            elif stored is not None:
                stored.tier.free(stored)
            elif is_current and error is not None:
                self.error = str(error) or repr(error)

    # -- up --------------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Take memory for the bytes, on the current stream. It must not be used before they are there.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        storage = self.key.resolve()
        if storage is None or self.is_here:
            return
        if storage.nbytes() != self.nbytes:  # else PyTorch would take it a second time, and copy what is in it
            self._room = None
            storage.resize_(self.nbytes)
        if self._room is None:
            self._room = self._copies.mark()

    def bring_in(self) -> bool:
        """In the reader, without the lock: block until the copy of the bytes has been queued; whether it had to."""
        storage, copy = self.key.resolve(), self._copy
        if storage is None or self.is_here or copy is None or storage.nbytes() != self.nbytes:
            return False
        self._arrived = _read(copy, into=storage, after=self._room)
        self.is_here = True
        return True

    def lend(self, write: _Write) -> torch.UntypedStorage | None:
        """In a worker: what to write, if that is still wanted."""
        with self._lock:
            return self.key.resolve() if self._writer is write and self.is_here else None

    def move_to_host(self) -> None:
        """Give the parameters memory of the host, with the bytes that a tier has; they are away now."""
        storage, copy = self.key.resolve(), self._copy
        if storage is None or copy is None:
            return
        host = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        mark = _read(copy, into=host, after=None)
        if mark is not None:
            mark.synchronize()
        storage.resize_(0)
        tensors = self.tensors
        self.release()
        for tensor in tensors:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = TensorSpec.of(tensor).view(host)
            tensor.grad = None if gradient is None else gradient.to(host.device)

    def release(self) -> None:
        """It stays in memory for good: the bytes are here, or the host has them."""
        self._is_released = True
        for tensor in self.tensors:
            own_class(tensor)
        self._tensors.clear()  # a write under way may have this object yet
        forget_door(self.key.cdata)
        self._exposed = None
        self._forget_copy()

    def forget(self) -> None:
        """Let go: the storage is held no more."""
        forget_door(self.key.cdata)
        self._forget_copy()


class _Write:
    """One write; the owner that its tier calls."""

    def __init__(self, memory: DeviceMemory, stamp: _Stamp) -> None:
        self.stamp = stamp
        self.ended = Latch()
        self._memory = memory

    @staticmethod
    def all_begin(writes: Sequence[_Write]) -> list[torch.UntypedStorage | None]:
        storages = [write._memory.lend(write) for write in writes]
        for write, storage in zip(writes, storages, strict=True):
            if storage is None:
                write.ended.open()
        return storages

    def is_wanted(self) -> bool:
        return True

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        for write, stored, error in ends:
            if error is not None:
                forget_frames(error)
            write._memory.written(write, stored, error)
            write.ended.open()


class _Read:
    """One read; the owner that its tier calls."""

    def __init__(self) -> None:
        self.ended = Latch()
        self.mark: StreamEvent | None = None
        self.error: BaseException | None = None

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        for read, storage, mark, error in ends:
            read.mark = mark
            if storage is None:
                read.error = error or StorageError("a read ended with neither bytes nor an error")
            read.ended.open()


def _read(stored: StoredBytes, *, into: torch.UntypedStorage, after: StreamEvent | None) -> StreamEvent | None:
    """Block until the last copy has been queued; return its mark."""
    read = _Read()
    stored.tier.read(read, stored, into.device, urgent=True, into=into, after=after)
    read.ended.wait()
    if read.error is not None:
        raise read.error
    return read.mark


def _references(storage: torch.UntypedStorage) -> int:
    return sys.getrefcount(storage)


@cache
def _references_of_one() -> int:
    """To a storage object that nothing else refers to, seen as in :meth:`DeviceMemory.send_out`."""

    def is_alone(storage: torch.UntypedStorage) -> int:
        return _references(storage)

    tensor = torch.empty(1)
    storage = StorageKey(tensor.untyped_storage()).resolve()
    assert storage is not None
    return is_alone(storage)
