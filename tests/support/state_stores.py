"""A store of optimizer states by itself, on drives that stop, fail and lie when the test says so."""

import threading
from contextlib import ExitStack, contextmanager

import torch

from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import HostCopies
from tests.support.faults import FaultyBackend
from tests.support.helpers import within
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")
NBYTES = 16 << 10


class Drive(FaultyBackend):
    """A directory whose moves wait while the test wants it."""

    def __init__(self, directory):
        super().__init__(PosixBackend([directory], direct=False))
        self.may_move = threading.Event()
        self.may_move.set()

    def _stumble(self, fail, index):
        assert self.may_move.wait(PATIENCE_S)
        super()._stumble(fail, index)


@contextmanager
def store_on(drive, *directories, num_slots=2, num=6):
    """A store of ``num`` subgroups in these directories."""
    with ExitStack() as stack:
        mover, events = HostMover(drive, None), EventLog()
        tier = SsdTier(drive, mover, directories, events=events, sampler=Sampler("full"), chunk_bytes=4096)
        stack.callback(tier.close)
        stack.callback(drive.may_move.set)
        store = StateStore(tier, device=CPU, num_slots=num_slots, copies=HostCopies())
        store.add(num)
        yield store
        store.close()


def whole(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def put(store, index, value, *, keep=False):
    store.take(index)
    storage = store.allocate(NBYTES)
    whole(storage).fill_(value)
    store.give(index, storage, is_dirty=True, keep=keep)


def assert_holds(store, index, value):
    """Looks at it and gives it back unchanged."""
    storage = store.take(index)
    assert bool((whole(storage) == value).all()), f"subgroup {index}"
    store.give(index, storage, is_dirty=False, keep=False)


def put_all(store, indices, value=None):
    """The same value, or their own numbers."""
    for index in indices:
        put(store, index, index if value is None else value)


def assert_all_hold(store, indices, value=None):
    """The same value, or their own numbers."""
    for index in indices:
        assert_holds(store, index, index if value is None else value)


def used_bytes(store):
    with store._lock:
        store._returned.give_back()
    return sum(arena.used_bytes for arena in store.tier._arenas)


def mapped_bytes(store):
    """Memory of the slots, lent or spare."""
    return sum(map(len, (*store.slots._spare, *store.slots._lent.values())))


def within_patience(what):
    """A hang is a failure of this test alone."""
    within(PATIENCE_S, what)
