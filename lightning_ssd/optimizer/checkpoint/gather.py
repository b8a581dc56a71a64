"""Collect the optimizer states of a sharded model as whole tensors, one after the other.

PyTorch's own way holds the full states of the whole model in the memory of one process. Here each process gathers one
whole tensor at a time. The process that receives the states writes each tensor to its drive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_ssd.common.dtensor import is_shard, local_of, spec_of, wrap
from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.files import StateFiles
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.tiers.copy_paths import storage_bytes

__all__ = ["TensorSpool", "full_nbytes", "full_states"]

Put = Callable[[torch.Tensor], torch.Tensor]
States = Mapping[int, Mapping[Any, Any]]


def full_states(states: States, put: Put | None) -> dict[int, dict[Any, Any]]:
    """Gather the states of sharded parameters as whole tensors; return none without ``put``. All processes call it."""
    found: dict[int, dict[Any, Any]] = {}
    with StatusLine("Collecting optimizer states") as line:
        for number in line.over(sorted(states), lambda number: full_nbytes({number: states[number]})):
            state = {key: _whole(value, put) for key, value in states[number].items()}
            if put is not None:
                found[number] = state
    return found


def full_nbytes(states: States) -> int:
    """Return the bytes of all sharded tensors together, as whole tensors."""
    sharded = [value for state in states.values() for value in state.values() if is_shard(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in sharded)


def _whole(value: Any, put: Put | None) -> Any:
    if not is_shard(value):
        return value
    spec = spec_of(value)
    # Parts are mapped from a file, into host memory; the processes meet on the mesh's device.
    tensor: Any = wrap(local_of(value).to(spec.mesh.device_type), spec)
    whole = tensor.full_tensor()
    return whole if put is None else put(whole)


class TensorSpool:
    """Writes tensors beside the states of an optimizer, and returns them as mapped memory, which is read on access.

    It is a store of subgroups with one slot, in which each tensor is a subgroup. The space in the files is free again,
    for the next collection, when the last of the tensors is dropped.

    If the drives have no room, tensors stay in memory. An error would make the other processes wait for ever.

    Args:
        files: the drives.
        store: the store of the optimizer's states; it gives space back.
        nbytes: space to reserve in addition to that of the states.
    """

    def __init__(self, files: StateFiles, store: StateStore, nbytes: int) -> None:
        self._files = files
        self._store = StateStore(
            files.tier, device=files.device, num_slots=1, copies=files.copies, block_bytes=files.block_bytes
        )
        self._held: list[StoredCopy] = []
        self._hold = CopyPin()
        store.release_with(self._hold, self._held)
        store.settle()  # give back the space of earlier collections
        self._refusal: Exception | None = None
        self._refused_bytes = 0
        try:
            files.reserve(0, beside=files.tier.used_bytes - store.drive_bytes + nbytes)
        except (StorageError, OffloaderClosedError) as error:
            self._refusal = error

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write a tensor to a drive, and return it mapped from there: contiguous, on the CPU. Waits for the write.

        A tensor that is smaller than a block of a file stays in memory.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self._files.block_bytes:
            return tensor.to("cpu", copy=True)
        if self._refusal is None:
            try:
                return self._put(tensor, nbytes)
            except (StorageError, OffloaderClosedError) as error:
                self._refusal = error
        self._refused_bytes += nbytes
        return tensor.to("cpu", copy=True)

    def take_warning(self) -> str | None:
        """Return a warning about tensors that had to stay in memory, once; ``None``: there are none."""
        nbytes, self._refused_bytes = self._refused_bytes, 0
        if nbytes == 0 or isinstance(self._refusal, OffloaderClosedError):
            return None
        return f"{nbytes:,} bytes of full optimizer states are in memory, because no drive takes them: {self._refusal}"

    def _put(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        index = len(self._store)
        self._store.add(1)
        storage = self._store.allocate(round_up(nbytes, self._files.block_bytes))
        room = storage_bytes(storage, 0, nbytes).view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        self._store.give(index, storage, is_dirty=True, keep=False)
        try:
            self._store.wait_for_writes()
            if self._store.write_error is not None:
                raise StorageError(self._store.write_error)
            copy = self._store.hold(index)
            if not isinstance(copy, StoredCopy):
                raise StorageError("a collected tensor was not written")
            self._held.append(copy)
        finally:
            self._store.forget(index)  # what an interrupt leaves on the drive goes, too
        view = FileView(copy.stored.body_nbytes, keeps=self._hold)
        copy.show(view, 0, 0, copy.stored.body_nbytes)
        return view.tensor(0, tensor.dtype, tuple(room.shape), room.stride())
