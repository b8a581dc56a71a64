"""Who writes to a tier and reads from it, in tests."""

from __future__ import annotations

import threading

import torch

from lightning_ssd.tiers.base import OneByOne, StoredBytes
from lightning_ssd.tiers.streams import StreamEvent
from tests.support.patience import PATIENCE_S


def random_storage(nbytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Owner(OneByOne):
    """One storage on its way down and up; remembers what it was told."""

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self.storage = storage
        self.content = None if storage is None else as_bytes(storage).clone().cpu()
        self.stored: StoredBytes | None = None
        self.reloaded: torch.UntypedStorage | None = None
        self.mark: StreamEvent | None = None
        self.error: BaseException | None = None
        self.calls: list[str] = []
        self.told = threading.Event()

    def write_begins(self) -> torch.UntypedStorage | None:
        self.calls.append("begins")
        return self.storage

    def is_wanted(self) -> bool:
        return True

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        self.calls.append("written")
        self.stored, self.error = stored, error
        self.told.set()

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        self.calls.append("read")
        self.reloaded, self.mark, self.error = storage, mark, error
        self.told.set()

    def wait(self) -> None:
        """Until the next answer."""
        assert self.told.wait(PATIENCE_S), "the owner was never told"
        self.told.clear()

    @property
    def place(self) -> StoredBytes:
        assert self.error is None, self.error
        assert self.stored is not None
        return self.stored

    def is_right(self) -> bool:
        """Whether the reloaded bytes are those that were written."""
        assert self.error is None, self.error
        assert self.reloaded is not None
        assert self.content is not None
        return torch.equal(as_bytes(self.reloaded).cpu(), self.content)
