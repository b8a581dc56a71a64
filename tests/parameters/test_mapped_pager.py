"""What is read ahead into the page cache is what is wanted now, and not what was wanted before."""

import threading
from contextlib import contextmanager

import pytest
import torch

from lightning_ssd.memory.file_mapping import READ_BYTES
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.mapped_pager import MappedPager
from lightning_ssd.parameters.pager import Weight
from lightning_ssd.storage.posix import PosixBackend
from tests.support.host_traffic import wait_until
from tests.support.patience import PATIENCE_S

NUM_PARTS = 3
"""Of each weight, in which it is read."""
UNIT_BYTES = NUM_PARTS * READ_BYTES


@contextmanager
def opened_pager(spill_dir, opened, *, is_frozen=False):
    backend = PosixBackend([spill_dir])
    files = WeightFiles(backend, [spill_dir])
    storages = []
    for number in range(5):
        memory = files.write(torch.zeros(UNIT_BYTES, dtype=torch.uint8).untyped_storage(), changes=not is_frozen)
        storages.append(memory.show())
        opened.add((f"unit {number}", None), Weight([f"weight {number}"], memory, is_frozen=is_frozen))
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


@pytest.mark.parametrize("is_frozen", [False, True])
def test_only_trained_weights_are_mapped_ahead(spill_dir, is_frozen):
    with opened_pager(spill_dir, MappedPager(), is_frozen=is_frozen) as pager:
        for unit in (*pager.units[:3], pager.units[0]):  # then comes 1
            use(pager, unit)
        latch = pager.units[1].coming
        assert (latch is None) is is_frozen
        assert pager.window_bytes == (1 if is_frozen else 2) * UNIT_BYTES
        if latch is not None:
            latch.wait()
        assert pager.resident_bytes == (0 if is_frozen else UNIT_BYTES)


@pytest.mark.parametrize("has_come", [False, True])
def test_what_was_mapped_ahead_and_is_not_used_leaves(spill_dir, monkeypatch, has_come):
    """Also where it comes when it is expected no more."""
    with opened_pager(spill_dir, MappedPager()) as pager:
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
