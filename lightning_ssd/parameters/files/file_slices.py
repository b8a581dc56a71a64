"""Weights whose memory is a part of a file that PyTorch has mapped, as `safetensors` and ``torch.load(mmap=True)`` do.

Each has a storage of its own, and these are slices of one storage that shows the whole file. Who else refers to the
memory is told by the count of that one's holders: each slice is one, and so is the handle that slices are made by.

Note [private layout]: PyTorch does not tell what a storage is a slice of. It is read out of the storage's own memory,
where a trial in each process has shown it to be. That a storage is a slice, and of mapped memory, is known by the
functions that will free both: they are the trial's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightning_ssd.common.tensors import StorageKey, use_count

__all__ = ["FileSlices", "file_slices"]

_NUM_WORDS = 5
"""Number of words of a storage's memory that are looked at: it has more."""


class _Layout(NamedTuple):
    """Where in a storage's memory is what."""

    parent: int
    """Address of a slice's parent."""
    free: int
    """Address of the function that frees it."""
    free_slice: int
    free_mapping: int
    held: tuple[int, int]
    """References to a mapping that nothing but its slices holds, without these: in C++, and in Python."""


class FileSlices:
    """All slices of one mapped file that a module's parameters and buffers lie in."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._known: list[tuple[StorageKey, int, int]] = []

    def add(self, storage: torch.UntypedStorage) -> None:
        """A slice that is one of the module's."""
        if all(key.cdata != storage._cdata for key, _, _ in self._known):
            start = storage.data_ptr()
            self._known.append((StorageKey(storage), start, start + storage.nbytes()))

    def why_it_stays(self, storage: torch.UntypedStorage) -> str | None:
        """Why a slice cannot be exchanged for other memory with the same bytes; ``None``: it can."""
        alive = [known for known in self._known if known[0].alive()]
        layout = _layout()
        if layout is None or _held(self._whole, len(alive)) != layout.held:
            return "something else may hold memory of the file that it shows (a tensor, or the handle of the open file)"
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if any(key.cdata != storage._cdata and begin < stop and start < end for key, begin, end in alive):
            return "another weight lies in the same bytes of the file that it shows"
        return None


def file_slices(storages: Iterable[torch.UntypedStorage]) -> dict[int, FileSlices]:
    """For those of the storages that are slices of mapped files, by their address: all slices of the same file."""
    by_whole: dict[int, FileSlices] = {}
    found: dict[int, FileSlices] = {}
    for storage in storages:
        whole = _whole_of(storage)
        if whole is not None:
            found[storage._cdata] = by_whole.setdefault(whole, FileSlices(whole))
            found[storage._cdata].add(storage)
    return found


def _whole_of(storage: torch.UntypedStorage) -> int | None:
    """Address of the storage that has mapped a file of which this one is a slice."""
    if storage.device.type != "cpu" or storage.resizable() or (layout := _layout()) is None:
        return None
    words = _words(storage._cdata)
    if words[layout.free] != layout.free_slice:
        return None
    whole = words[layout.parent]
    return whole if _words(whole)[layout.free] == layout.free_mapping else None


@functools.cache
def _layout() -> _Layout | None:
    """Learnt from a slice of a file in memory; ``None``: this PyTorch has another one."""
    fd = os.memfd_create("lightning_ssd", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, 4096)
        whole = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, 4096)
    finally:
        os.close(fd)
    one, two, ordinary = whole[64:128], whole[128:192], torch.empty(8).untyped_storage()
    of_one, of_two, of_whole, of_ordinary = (_words(storage._cdata) for storage in (one, two, whole, ordinary))
    parents = [place for place, word in enumerate(of_one) if word == whole._cdata]
    common = [place for place, (left, right) in enumerate(zip(of_one, of_two, strict=True)) if left == right]
    differs = [place for place in common if len({of_one[place], of_whole[place], of_ordinary[place]}) == 3]
    frees = [place for place in differs if place not in parents]
    if len(parents) != 1 or len(frees) != 1:
        return None
    cdata = whole._cdata
    del whole  # the slices keep it
    return _Layout(parents[0], frees[0], of_one[frees[0]], of_whole[frees[0]], _held(cdata, 2))


def _held(whole: int, num_slices: int) -> tuple[int, int]:
    """Count references by others than its slices. The object of Python is there from here on, if it was not before."""
    storage = torch.UntypedStorage._new_with_weak_ptr(whole)
    return use_count(whole) - num_slices, sys.getrefcount(storage)


def _words(address: int) -> tuple[int, ...]:
    return struct.unpack(f"{_NUM_WORDS}Q", ctypes.string_at(address, 8 * _NUM_WORDS))
