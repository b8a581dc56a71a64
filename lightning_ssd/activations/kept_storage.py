"""A large storage that stays in memory for certain: counted, found again, and nothing else.

It needs no probe, no description and no event, because nothing ever rebuilds or moves it. Autograd holds the tensor
itself (``kept_tensor.py``) and a :class:`Share`, whose death says that the memory has gone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_ssd.activations.kept_tensor import Kept
from lightning_ssd.activations.storage_state import State
from lightning_ssd.common.inplace_edits import Origin, inplace_error, owner_of, resized_error
from lightning_ssd.common.tensors import required_nbytes

if TYPE_CHECKING:
    from lightning_ssd.activations.accounting import MemoryAccounting
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["KeptLarge", "KeptStorage", "Share"]


class KeptStorage:
    """Count one storage that stays until its graph lets go. The accounting lock guards it.

    Args:
        accounting: of all saved storages.
        nbytes: of the storage.
        tensor: the first one over it that is saved, in its present version.
        index: in the pack order of its pass.
    """

    __slots__ = ("_owner", "_version", "accounting", "home", "index", "nbytes", "share", "state")

    ahead = is_on_host = False
    tier = None
    share: weakref.ref[Share]

    def __init__(self, accounting: MemoryAccounting, nbytes: int, tensor: torch.Tensor, *, index: int) -> None:
        self.accounting = accounting
        self.nbytes = nbytes
        self.index = index
        self.state = State.KEPT
        self.home: SavedPass | None = None
        self._owner = weakref.ref(owner_of(tensor))
        self._version = tensor._version

    @property
    def is_resident(self) -> bool:
        """Whether its memory counts."""
        return self.state is State.KEPT

    def is_same_value(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor over this storage has the bytes that were saved."""
        return self._version == tensor._version and self._owner() is owner_of(tensor)

    def free(self) -> None:
        """Stop counting the memory: the graph has let go. Again after an interrupt: does the rest."""
        self.home = None
        if self.is_resident:
            self.accounting.vacate(self)
        self.state = State.FREED


class Share:
    """Is held by every saved tensor over one kept storage."""

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: KeptStorage) -> None:
        self.record = record
        record.share = weakref.ref(self)
        record.accounting.watch(self, record)


class KeptLarge(NamedTuple):
    """What autograd holds in place of a tensor over such a storage."""

    kept: Kept
    share: Share
    origin: Origin | None
    """Who made the tensor, for PyTorch's error text."""

    def give_back(self) -> torch.Tensor:
        """Return the tensor, with the values that it was kept with.

        Raises:
            RuntimeError: it was edited in place since, or its memory is gone.
        """
        tensor, saved = self.kept[:2]
        if (version := tensor._version) != saved:
            description = tensor.dtype, tensor.device, tensor.size()
            raise inplace_error(description, self.origin, version=version, expected=saved)
        nbytes, before = tensor.untyped_storage().nbytes(), self.share.record.nbytes
        if nbytes < before and nbytes < required_nbytes(tensor):
            raise resized_error(before, nbytes)
        kept: torch.Tensor = tensor
        return kept
