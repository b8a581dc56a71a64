"""Weights of a CPU that wait in files between their uses.

A weight's memory is a part of a file, whose pages leave after a use and come back ahead of the next one. Code that
touches a weight in between, by whatever way, finds its bytes: that costs page faults and never a number.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.task import Task
from lightning_ssd.common.tensors import TensorSpec
from lightning_ssd.errors import forget_frames
from lightning_ssd.memory.file_mapping import FileView, page_out
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.mmap import PAGE_BYTES, VECTOR_BYTES
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, is_mapped
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.mapped_pager import MappedPager, bring_in
from lightning_ssd.parameters.paged_weights import PagedWeights
from lightning_ssd.parameters.pager import Place, Weight
from lightning_ssd.parameters.residents import MovableWeights
from lightning_ssd.parameters.units import SharedWeights, shared_weights, why_it_stays

__all__ = ["MappedWeights"]

_TRIM_BYTES = 64 << 20
"""After so many bytes malloc is told to give back what the weights had: it would keep it for tensors to come."""


class MappedWeights(PagedWeights[MappedStorage]):
    """On a CPU.

    Note [exactness]: a weight is taken over only if its parameters alone hold its memory; then the parameters are given
    other memory with the same bytes, which shows a file that is known to us alone. Nothing that is done to it later can
    be lost: the mapping is shared with the file, so that the kernel keeps what is written through any view. A fork
    would see what its parent writes later, and so sees nothing at all.
    """

    def __init__(self, files: WeightFiles, **options: Any) -> None:
        super().__init__(MappedPager(num_drives=files.num_drives), **options)
        self._files = files
        self._taken_bytes = 0

    def _must_move(self, weight: Weight[MappedStorage], weights: SharedWeights, *, beside_frozen: bool) -> bool:
        """Whether it is trained, and so has no place among what is frozen."""
        return not weights.is_frozen and beside_frozen and self._files.is_still(weight.memory)

    def _check_room(self, new: Sequence[SharedWeights]) -> None:
        for changes in (False, True):
            written = [one for one in new if one.is_frozen is not changes]
            self._files.check_room([self._files.size_of(weights.storage) for weights in written], changes=changes)

    def _take_over(self, new: list[SharedWeights], places: Sequence[Place], trained: list[SharedWeights]) -> None:
        """Their old memory goes one by one, as each has its new one. An interrupt comes between two of them."""
        sizes = [weights.storage.nbytes() for weights in new]
        done, doing = 0, f"Writing {format_sizes(sum(sizes))[0]} of weights" if sizes else None
        try:
            with StatusLine(doing) as line:
                for place, nbytes in zip(places, sizes, strict=True):
                    line.update(done, sum(sizes))
                    self._take(place, new.pop(0))
                    done += nbytes
                while trained:
                    self._release(trained.pop(0))
                written = Task(self._files.sync, "lightning_ssd-sync")  # a wait that an interrupt ends
                written.start()
                written.result()
        except BaseException as error:
            forget_frames(error)  # they hold the storages, which would count as held when it is tried again
            raise

    def move_in(self, module: nn.Module) -> None:
        """Bring back what was taken over while the model was built, and is trained, before
        ``DistributedDataParallel`` holds it, since its memory could not be exchanged then.
        """
        found = shared_weights(module, self._min_nbytes, self._device)
        trained = [w for w in found if self.pager.find(w.storage) is not None and not self._may_wait(w)]
        del found
        if trained:
            self._take_over([], [], trained)

    def _put_away(self, weight: Weight[MappedStorage]) -> None:
        weight.memory.send_out()

    def _movable(self, weights: SharedWeights, place: Place) -> MovableWeights:
        waits, nbytes = is_mapped(weights.storage), weights.storage.nbytes()
        shows_file = waits or weights.shows_file
        return MovableWeights.of(
            weights,
            place,
            nbytes=nbytes,
            waits=waits,
            is_held=not shows_file,
            comes_ahead=not weights.is_frozen,  # else to the page cache
            shown_bytes=_shown_bytes(weights.storage) if shows_file else 0,
        )

    @property
    def _on_drives(self) -> tuple[int, int]:
        return sum(self._files.written_bytes()), self._files.disk_bytes

    def _take(self, place: Place, weights: SharedWeights) -> None:
        """Write one storage to a file, and give its weights memory that shows it."""
        with deferring_interrupts():
            # While a model is built it is unknown what of it will be trained.
            mapped = self._files.write(weights.storage, changes=not self._builders and not weights.is_frozen)
        storage = mapped.show()
        with deferring_interrupts():  # of its own: it ends before a further Ctrl-C would be obeyed
            if why_it_stays(weights) is not None:  # another thread has taken hold of it meanwhile
                del storage
                mapped.forget()
                return
            self.pager.add(place, Weight(weights.names, mapped))
            _show(weights, storage)
            if weights.shows_file:  # else what was read would stay until no tensor shows the file any more
                page_out(weights.storage.data_ptr(), weights.storage.nbytes())
        self._taken_bytes += mapped.nbytes
        if self._taken_bytes >= _TRIM_BYTES:
            self._taken_bytes = 0
            trim()

    def _release(self, weights: SharedWeights) -> None:
        """Give weights ordinary memory, such as those that are trained: each update would be written to the drive."""
        weight = self.pager.find(weights.storage)
        with deferring_interrupts():
            if weight is not None:
                bring_in(weight)  # else a drive that fails would end the process
            ordinary = _copied(weights.storage)
        with deferring_interrupts():
            if why_it_stays(weights) is None:
                _show(weights, ordinary)

    def close(self) -> None:
        """Nothing is brought in or sent out any more. Weights stay what they are: memory that the system fills from the
        files when it is touched, and takes when it needs the room. The files go with the last weight. Idempotent.

        Raises:
            StorageError: the drive has lost what was written to a weight in place.
        """
        if self.pager.is_closed:
            return

        def let_go() -> None:
            for weight in self.pager.weights:
                weight.memory.send_out()
                weight.memory.make_private()
            for unit in self.pager.units:
                unit.weights.clear()  # graphs may hold the unit, and it would hold the memory of a model that is gone

        with ExitStack() as closing:  # each of these, whatever another one raises; the last one first
            closing.callback(let_go)
            closing.callback(self._files.sync)
            closing.callback(self.pager.close)
            closing.callback(self._remove_windows)


def _shown_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes of pages of a file that are in memory; 0 where the system does not tell."""
    first = storage.data_ptr() // PAGE_BYTES
    count = -(-(storage.data_ptr() + storage.nbytes()) // PAGE_BYTES) - first
    try:
        with io.FileIO("/proc/self/pagemap") as table:
            entries = os.pread(table.fileno(), 8 * count, 8 * first)
    except OSError:
        return 0
    flags = entries[7::8]  # the highest byte of each: in memory, and a page of a file or of memory that is shared
    return PAGE_BYTES * sum(flags.count(one) for one in set(flags) if one & 0b1010_0000 == 0b1010_0000)


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return these bytes in memory that is aligned as it was; PyTorch's own begins with a whole vector."""
    tensor, start = torch.empty(0, dtype=torch.uint8).set_(storage), storage.data_ptr() % VECTOR_BYTES
    if not start:
        return tensor.clone().untyped_storage()
    copy = FileView(start + tensor.nbytes).tensor(start, torch.uint8, tensor.shape, (1,))
    return copy.copy_(tensor).untyped_storage()


def _show(weights: SharedWeights, storage: torch.UntypedStorage) -> None:
    """Exchange the memory of weights. Those made in inference mode take none but of their kind."""
    for tensor in weights.tensors:
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = TensorSpec.of(tensor).view(storage)
