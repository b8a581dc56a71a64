"""Who writes to a tier and reads from it, in tests."""

import threading

import torch

from tests.support.patience import PATIENCE_S


def random_storage(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def as_bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Owner:
    """One storage on its way down and up; remembers what it was told."""

    def __init__(self, storage):
        self.storage = storage
        self.content = None if storage is None else as_bytes(storage).clone().cpu()
        self.stored = None
        self.reloaded = None
        self.mark = None
        self.error = None
        self.calls = []
        self.told = threading.Event()

    @staticmethod
    def all_begin(owners):
        return [owner.write_begins() for owner in owners]

    @staticmethod
    def all_written(ends):
        for owner, *end in ends:
            owner.write_ended(*end)

    @staticmethod
    def all_read(ends):
        for owner, *end in ends:
            owner.read_ended(*end)

    def write_begins(self):
        self.calls.append("begins")
        return self.storage

    def is_wanted(self):
        return True

    def write_ended(self, stored, error):
        self.calls.append("written")
        self.stored, self.error = stored, error
        self.told.set()

    def read_ended(self, storage, mark, error):
        self.calls.append("read")
        self.reloaded, self.mark, self.error = storage, mark, error
        self.told.set()

    def wait(self):
        """Until the next answer."""
        assert self.told.wait(PATIENCE_S), "the owner was never told"
        self.told.clear()

    @property
    def place(self):
        assert self.error is None, self.error
        return self.stored

    def is_right(self):
        """Whether the reloaded bytes are those that were written."""
        assert self.error is None, self.error
        return torch.equal(as_bytes(self.reloaded).cpu(), self.content)
