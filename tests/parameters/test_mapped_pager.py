"""What is read ahead into the page cache is what is wanted now, and not what was wanted before."""

import threading
from contextlib import contextmanager

import pytest
import torch

from lightning_ssd.memory import host_room
from lightning_ssd.memory.file_mapping import READ_BYTES
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.mapped_pager import MappedPager
from lightning_ssd.parameters.pager import Weight
from lightning_ssd.storage.posix import PosixBackend
from tests.support.host_traffic import wait_until
from tests.support.patience import PATIENCE_S

NUM_PARTS = 3
"""Of each weight, in which it is read."""


@contextmanager
def opened_pager(spill_dir, opened):
    backend = PosixBackend([spill_dir])
    files = WeightFiles(backend, [spill_dir])
    storages = []
    for number in range(5):
        memory = files.write(torch.zeros(NUM_PARTS * READ_BYTES, dtype=torch.uint8).untyped_storage(), changes=False)
        storages.append(memory.show())
        opened.add((f"unit {number}", None), Weight([f"weight {number}"], memory, is_frozen=True))
    try:
        yield opened
    finally:
        opened.close()
        files.close()
        backend.close()


def use(pager, unit):
    with torch.no_grad():
        pager.enter(unit)
        pager.leave(unit)


class Room:
    def __init__(self, patch):
        self.nbytes = None
        patch.setattr(host_room, "host_available_bytes", self.ask)
        patch.setattr(host_room, "_LOOK_S", 0.0)

    def ask(self, cached_bytes):
        return self.nbytes


UNIT = NUM_PARTS * READ_BYTES
AMPLE = 2 * 5 * UNIT


@pytest.mark.parametrize(
    ("num_sharing", "room", "comes"),
    [
        (1, AMPLE, True),
        (1, AMPLE - 1, False),
        (1, None, False),
        (2, AMPLE, False),
        (2, 2 * AMPLE, True),
        (None, 100 * AMPLE, False),
    ],
)
def test_what_comes_next_is_mapped_where_memory_is_ample(spill_dir, monkeypatch, num_sharing, room, comes):
    memory = Room(monkeypatch)
    memory.nbytes = room
    with opened_pager(spill_dir, MappedPager(None if num_sharing is None else HostRoom(num_sharing))) as pager:
        for unit in (*pager.units[:3], pager.units[0]):  # then comes 1
            use(pager, unit)
        latch = pager.units[1].coming
        assert (latch is not None) is comes
        assert pager.window_bytes == (2 if comes else 1) * UNIT
        if latch is not None:
            latch.wait()
        assert pager.resident_bytes == (UNIT if comes else 0)


@pytest.mark.parametrize("has_come", [False, True])
def test_what_was_mapped_ahead_and_is_not_used_leaves(spill_dir, monkeypatch, has_come):
    """Also where it comes when it is expected no more."""
    Room(monkeypatch).nbytes = AMPLE
    with opened_pager(spill_dir, MappedPager(HostRoom())) as pager:
        for unit in pager.units[:3]:
            use(pager, unit)
        may_come = threading.Event()
        if has_come:
            may_come.set()
        real = pager._bring_in
        first = pager.units[1]
        monkeypatch.setattr(
            pager, "_bring_in", lambda unit: (unit is not first or may_come.wait(PATIENCE_S)) and real(unit)
        )
        use(pager, pager.units[0])  # then comes 1
        latch = first.coming
        if has_come:
            latch.wait()
            assert first.resident_bytes
        else:
            threading.Timer(0.2, may_come.set).start()
        use(pager, pager.units[4])  # what comes after it is not known
        latch.wait()
        wait_until(lambda: not pager.resident_bytes)  # the reader is done with it
        assert first.resident_bytes is None
