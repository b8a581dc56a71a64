"""A large storage that stays in memory for certain: counted, found again, and nothing else.

It needs no probe, no description and no event, because nothing ever rebuilds or moves it. Autograd holds the tensor
itself (``kept_tensor.py``) and a :class:`Share`, whose death says that the graph has let go.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_ssd.activations.accounting import Watched
from lightning_ssd.activations.storage_state import FREED, KEPT, State
from lightning_ssd.common.inplace_edits import owner_of, resized_error
from lightning_ssd.common.tensors import required_nbytes

if TYPE_CHECKING:
    from lightning_ssd.activations.accounting import MemoryAccounting
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["KeptStorage", "Share", "check_not_resized", "open_kept"]


@dataclass(init=False, repr=False, eq=False, slots=True)
class KeptStorage(Watched):
    """One storage that stays until its graph lets go of its share. :func:`open_kept` makes it."""

    ahead = is_on_host = False
    stays = True
    tier = None
    accounting: MemoryAccounting
    cdata: int
    """The storage's number."""
    home: SavedPass | None
    index: int
    """In the pack order of its pass."""
    nbytes: int
    owner: weakref.ref[torch.Tensor]
    """Whose version counter the saved tensors have."""
    state: State
    version: int

    @property
    def is_resident(self) -> bool:
        """Whether its memory counts."""
        return self.state is KEPT

    def is_same_value(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor over this storage has the bytes that were saved."""
        return self.version == tensor._version and self.owner() is owner_of(tensor)

    def free(self) -> bool:
        """Let go of the pass, once the graph has let go; return whether the memory counts. Again after an interrupt."""
        home, self.home = self.home, None
        if home is not None:
            home.num_freed += 1
        is_resident, self.state = self.state is KEPT, FREED
        return is_resident


class Share:
    """Is held by every saved tensor over one kept storage."""

    __slots__ = ("__weakref__", "record")

    record: KeptStorage


def open_kept(
    accounting: MemoryAccounting, current: SavedPass, owner: torch.Tensor, cdata: int, nbytes: int, packed_s: float
) -> Share:
    """Begin to watch a storage that stays, and add it to its pass. Takes no lock: settling counts it.

    Args:
        accounting: of all saved storages.
        current: the pass that saves it.
        owner: the tensor whose version counter the saved one has.
        cdata: of the storage.
        nbytes: of the storage.
        packed_s: by ``time.perf_counter``.
    """
    share = Share()  # without methods of their own to begin them: this is the hot path
    share.record = record = KeptStorage(share, accounting.note)
    record.accounting = accounting
    record.cdata = cdata
    record.nbytes = nbytes
    record.index = len(current.records)
    record.owner = weakref.ref(owner)
    record.version = owner._version
    record.home = current
    record.state = KEPT  # right before: no interrupt comes in between
    current.records.append(record)
    current.sizes.append(nbytes)
    current.packed_s.append(packed_s)  # last of three: a pass with lists of several lengths was interrupted
    accounting.by_storage[cdata] = record
    accounting.notes.append(record)
    return share


def check_not_resized(tensor: torch.Tensor, before: int) -> None:
    """Check that a kept tensor, whose storage has shrunk, still lies within it.

    Args:
        tensor: kept.
        before: bytes that the storage had.

    Raises:
        RuntimeError: it does not.
    """
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes < required_nbytes(tensor):
        raise resized_error(before, nbytes)
