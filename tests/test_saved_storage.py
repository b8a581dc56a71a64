"""Single transitions of one saved storage that no ordinary pass goes through in a fixed order."""

from __future__ import annotations

import torch

from lightning_ssd.inplace import VersionProbe
from lightning_ssd.ledger import Ledger
from lightning_ssd.saved_storage import SavedStorage, State
from lightning_ssd.tensors import StorageKey


class _Mark:
    def synchronize(self) -> None:
        """Nothing is under way."""


class _Stored:
    body_nbytes = 64


def record_of(tensor: torch.Tensor) -> SavedStorage:
    storage = tensor.untyped_storage()
    record = SavedStorage(Ledger(), storage, storage.nbytes(), VersionProbe(tensor), index=0)
    record.ledger.opened(record)
    return record


def test_memory_that_is_handed_out_again_still_has_its_mark() -> None:
    """A reload whose copy may still run is dropped, found alive and handed out: the consumer must wait for the copy."""
    record = record_of(torch.arange(16.0))
    reloaded, mark = torch.arange(16.0).untyped_storage(), _Mark()
    record.stored = _Stored()
    record.storage, record.key, record.mark = reloaded, StorageKey(reloaded), mark
    record.drop_copy()
    assert record.state is State.ON_DISK
    assert record.storage is None
    assert record.forward()  # `reloaded` stands for the tier that still holds it
    assert record.storage is not None
    assert record.storage.data_ptr() == reloaded.data_ptr()
    assert record.mark is mark
