"""Host memory from malloc, for reloads, where a malloc is in use that hands the same pages out again."""

from __future__ import annotations

import ctypes
import os
import re
import sys

import torch

from lightning_ssd.malloc import preloaded_malloc
from lightning_ssd.storage.mapped import PAGE_BYTES, MappedBlock, array_type

__all__ = ["Block", "HeapBlock", "reload_block_kind"]

_FIRST_SAFE_KERNEL = (6, 3)
"""See Note [fork] in ``storage/mapped.py``."""


class HeapBlock:
    """Memory of PyTorch's CPU allocator, freed with its last reference.

    Fresh pages cost more than the read that fills them (a virtual machine may have to ask its host for each), and at
    the start of backward malloc has warm ones: those of forward's temporaries.

    Args:
        nbytes: how much.
        alignment: of the address; at least a page.

    Raises:
        MemoryError: the system has no such memory left.
    """

    __slots__ = ("_memory", "address", "locked", "nbytes")

    def __init__(self, nbytes: int, alignment: int = PAGE_BYTES) -> None:
        alignment = max(alignment, PAGE_BYTES)
        try:  # not torch.empty: no mode and no default of the user's reaches a storage
            self._memory = torch.UntypedStorage(nbytes + alignment, device="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # PyTorch's way to say so on a CPU
            raise MemoryError(f"malloc has no {nbytes:,} bytes for a reload: {error}") from error
        address = self._memory.data_ptr()
        self.address = address + -address % alignment
        self.nbytes = nbytes
        self.locked = False

    def export(self) -> ctypes.Array[ctypes.c_char]:
        """The memory as an object that keeps it and can be watched by a weak reference."""
        array = array_type(self.nbytes).from_address(self.address)
        array.block = self  # type: ignore[attr-defined]
        return array


Block = MappedBlock | HeapBlock


def reload_block_kind() -> type[Block]:
    """Where memory for reloads should come from in this process.

    glibc, once it has freed what was saved between others, seldom hands the same pages out again, so that pages of our
    own are recycled there. So they are where a fork could spoil a read: children must not inherit the memory then.
    """
    return HeapBlock if preloaded_malloc() and _forks_safely(sys.platform, os.uname().release) else MappedBlock


def _forks_safely(platform: str, release: str) -> bool:
    version = re.match(r"(\d+)\.(\d+)", release)
    return platform == "linux" and version is not None and tuple(map(int, version.groups())) >= _FIRST_SAFE_KERNEL
