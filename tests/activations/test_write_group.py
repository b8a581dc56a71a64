"""Storages that leave together: when a job begins, and what stays out of it."""

import threading
from functools import partial

import pytest
import torch

from lightning_ssd.activations.hooks import SavedTensorHooks
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import State
from lightning_ssd.activations.write_group import WriteGroup
from lightning_ssd.planning.placement import Placement
from lightning_ssd.scheduling.plan_cursor import PassProgram
from lightning_ssd.tiers.ssd import SsdTier
from tests.support.faults import FaultyBackend
from tests.support.helpers import EAGER, open_offloader
from tests.support.host_traffic import wait_until
from tests.support.opened import offloader_in
from tests.support.patience import PATIENCE_S
from tests.support.sines import gradient_of_sines, sines

SIDE = 64
NBYTES = SIDE * SIDE * 4
MIB = 1 << 20


@pytest.fixture
def all_moves(monkeypatch):
    """Have passes follow a program by which everything moves."""
    program = PassProgram((NBYTES,) * 80, bytes(80))
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)


class Record:
    can_be_evicted = True
    operation = None
    is_whole = True

    def __init__(self, nbytes):
        self.nbytes = nbytes


@pytest.mark.parametrize(
    ("nbytes", "most_saved_bytes", "number"),
    [(MIB // 2, 1 << 40, 64), (40 * MIB, 1 << 40, 2), (MIB, 200 * MIB, 4), (MIB // 4, 0, 4)],
    ids=["64 storages", "64 MiB", "a sixty-fourth of what is saved", "nothing known"],
)
def test_a_job_is_large_enough_and_no_larger(nbytes, most_saved_bytes, number):
    group = WriteGroup()
    records = [Record(nbytes) for _ in range(number)]
    told = [group.add(record, Placement.SSD, most_saved_bytes) for record in records]
    assert told == [False] * (number - 1) + [True]
    assert [record for record, _ in group.taken()] == records
    assert not list(group.taken())


def test_what_is_in_use_or_dead_stays_out_of_it():
    group, records = WriteGroup(), [Record(1) for _ in range(3)]
    for record in records:
        group.add(record, Placement.SSD, 1 << 40)
    records[1].can_be_evicted = False
    assert [record for record, _ in group.taken()] == [records[0], records[2]]


def test_a_flush_in_a_signal_handler_takes_what_a_hook_looks_at():
    """The hook holds no lock, so that the flush is not refused."""
    flushed = []

    class Held(Record):
        operation = "may run"
        is_saved_whole = True

        def is_filled(self):
            if not flushed:
                flushed.append(self)
                flushed.extend(record for record, _ in group.taken(is_over=True))
            return True

    group, records = WriteGroup(), [Held(1) for _ in range(3)]
    group._held.extend((record, Placement.SSD) for record in records[:2])
    group.add(records[2], Placement.SSD, 1 << 40)
    assert flushed == records
    assert [record for record, _ in group.taken()] == records[:1]


@pytest.mark.parametrize("ends", ["forward", "flush"])
@pytest.mark.usefixtures("all_moves")
def test_the_last_ones_of_a_forward_leave(ends, tmp_path, monkeypatch):
    jobs = []
    real = SsdTier.write_all
    monkeypatch.setattr(SsdTier, "write_all", lambda self, requests: jobs.append(len(requests)) or real(self, requests))
    with open_offloader(tmp_path, EAGER) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            y = sines(x, 70)
            if ends == "flush":
                offloader.flush()
                assert sum(jobs) == 70
            else:
                assert jobs == [64]
        offloader.flush()
        assert jobs == [64, 6]
        stats = offloader.stats
        assert (stats.num_saved, stats.bytes_kept) == (70, 0)
        y.backward(torch.ones_like(y))
        offloader.end_backward()
        assert torch.equal(x.grad, gradient_of_sines(x, 70))


@pytest.mark.usefixtures("all_moves")
def test_host_memory_gets_a_group_as_far_as_it_has_room_and_drives_the_rest(tmp_path):
    settings = {"activations": "offload", "min_tensor_bytes": 1, "host_memory": 5 * NBYTES}
    with offloader_in(tmp_path, **settings) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            y = sines(x, 16)
        offloader.flush()
        stats = offloader.stats
        assert (stats.bytes_host, stats.bytes_kept) == (5 * NBYTES, 0)
        assert stats.bytes_written > 0
        y.sum().backward()
        offloader.end_backward()
        assert torch.equal(x.grad, gradient_of_sines(x, 16))


@pytest.mark.usefixtures("all_moves")
def test_an_edit_after_it_was_saved_is_an_error(tmp_path):
    with open_offloader(tmp_path, EAGER) as offloader:
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            y = (x * 1).sin()
            saved = y
            y = y.exp().sin()
            saved.add_(1)
        y.backward(torch.ones_like(y))  # sin and exp save others
        with offloader.saved_tensors():
            y = (x * 1).sin()
            saved = y
            y = y.square().sin()
            saved.add_(1)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            y.backward(torch.ones_like(y))


@pytest.mark.usefixtures("all_moves")
def test_a_failed_step_takes_back_what_has_not_begun(tmp_path):
    """Of a job that waits for the drive: its memory returns with the graph, whatever the drive does."""
    may_write = threading.Event()

    def stuck(index):
        assert may_write.wait(PATIENCE_S)

    with open_offloader(tmp_path, EAGER, _wrap_backend=partial(FaultyBackend, fail_write=stuck)) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        offloader._cache._tiers.ssd._chunk_bytes = NBYTES  # what begins together
        x = torch.rand(SIDE, SIDE).requires_grad_()
        try:
            with offloader.saved_tensors():
                y = sines(x, 16)
            records = list(offloader._cache.accounting.by_storage.values())
            wait_until(lambda: any(record.state is State.WRITING for record in records))
            keys = [record.identity for record in records if isinstance(record, SavedStorage)]
            offloader.abort()
            assert sum(record.state is State.WRITING for record in records) <= 2, "one for each worker"
            assert offloader.stats.writes_cancelled_bytes >= 13 * NBYTES
            del y
            assert sum(key.alive() for key in keys) <= 2
        finally:
            may_write.set()
