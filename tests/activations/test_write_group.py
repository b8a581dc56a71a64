"""Storages that leave together: when a job begins, and what stays out of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import State
from lightning_ssd.activations.tensor_cache import TensorCache
from lightning_ssd.activations.write_group import WriteGroup
from lightning_ssd.planning.placement import Placement
from lightning_ssd.scheduling.plan_cursor import PassProgram
from lightning_ssd.storage.backend import Backend
from lightning_ssd.tiers.ssd import SsdTier
from tests.support.faults import FaultyBackend
from tests.support.helpers import EAGER, open_offloader
from tests.support.patience import PATIENCE_S

SIDE = 64
NBYTES = SIDE * SIDE * 4
MIB = 1 << 20


@pytest.fixture
def all_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have passes follow a program by which everything moves."""
    program = PassProgram((NBYTES,) * 40, bytes(40))
    monkeypatch.setattr(TensorCache, "_known_of", lambda self, current: program)


class Record:
    can_be_evicted = True
    operation = None
    is_whole = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@pytest.mark.parametrize(
    ("nbytes", "most_saved_bytes", "number"),
    [(MIB, 1 << 40, 16), (40 * MIB, 1 << 40, 2), (MIB, 200 * MIB, 4), (MIB // 4, 0, 4)],
    ids=["16 storages", "64 MiB", "a sixty-fourth of what is saved", "nothing known"],
)
def test_a_job_is_large_enough_and_no_larger(nbytes: int, most_saved_bytes: int, number: int) -> None:
    group = WriteGroup()
    records = [Record(nbytes) for _ in range(number)]
    told = [group.add(record, Placement.SSD, most_saved_bytes) for record in records]  # type: ignore[arg-type]
    assert told == [False] * (number - 1) + [True]
    assert [record for record, _ in group.taken()] == records
    assert not list(group.taken())


def test_what_is_in_use_or_dead_stays_out_of_it() -> None:
    group, records = WriteGroup(), [Record(1) for _ in range(3)]
    for record in records:
        group.add(record, Placement.SSD, 1 << 40)  # type: ignore[arg-type]
    records[1].can_be_evicted = False
    assert [record for record, _ in group.taken()] == [records[0], records[2]]


def test_a_flush_in_a_signal_handler_takes_what_a_hook_looks_at() -> None:
    """The hook holds no lock, so that the flush is not refused."""
    flushed: list[object] = []

    class Held(Record):
        operation = cast(Any, "may run")
        is_saved_whole = True

        def is_filled(self) -> bool:
            if not flushed:
                flushed.append(self)
                flushed.extend(record for record, _ in group.taken(is_over=True))
            return True

    group, records = WriteGroup(), [Held(1) for _ in range(3)]
    group._held.extend((record, Placement.SSD) for record in records[:2])  # type: ignore[misc]
    group.add(records[2], Placement.SSD, 1 << 40)  # type: ignore[arg-type]
    assert flushed == records
    assert [record for record, _ in group.taken()] == records[:1]


@pytest.mark.parametrize("ends", ["forward", "flush"])
@pytest.mark.usefixtures("all_moves")
def test_the_last_ones_of_a_forward_leave(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []
    real = SsdTier.write_all
    monkeypatch.setattr(SsdTier, "write_all", lambda self, requests: jobs.append(len(requests)) or real(self, requests))
    with open_offloader(tmp_path, EAGER) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            y = x * 1
            for _ in range(20):
                y = y.sin()
            if ends == "flush":
                offloader.flush()
                assert sum(jobs) == 20
            else:
                assert jobs == [16]
        offloader.flush()
        assert jobs == [16, 4]
        stats = offloader.stats
        assert (stats.num_saved, stats.bytes_kept) == (20, 0)
        y.backward(torch.ones_like(y))
        offloader.end_backward()
        expected = x.detach().clone().requires_grad_()
        z = expected * 1
        for _ in range(20):
            z = z.sin()
        z.backward(torch.ones_like(z))
        assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("all_moves")
def test_host_memory_gets_a_group_as_far_as_it_has_room_and_drives_the_rest(tmp_path: Path) -> None:
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=1)
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True, host_memory=5 * NBYTES)
    with Offloader(policy=policy, hardware=hardware) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        x = torch.rand(SIDE, SIDE).requires_grad_()
        expected = x.detach().clone().requires_grad_()
        with offloader.saved_tensors():
            y = x * 1
            for _ in range(16):
                y = y.sin()
        offloader.flush()
        stats = offloader.stats
        assert (stats.bytes_host, stats.bytes_kept) == (5 * NBYTES, 0)
        assert stats.bytes_written > 0
        y.sum().backward()
        offloader.end_backward()
        z = expected * 1
        for _ in range(16):
            z = z.sin()
        z.sum().backward()
        assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("all_moves")
def test_an_edit_after_it_was_saved_is_an_error(tmp_path: Path) -> None:
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
def test_a_failed_step_takes_back_what_has_not_begun(tmp_path: Path) -> None:
    """Of a job that waits for the drive: its memory returns with the graph, whatever the drive does."""
    may_write = threading.Event()

    def stuck(index: int) -> None:
        assert may_write.wait(PATIENCE_S)

    def wrap(inner: Backend) -> Backend:
        return FaultyBackend(inner, fail_write=stuck)

    policy = OffloadPolicy(activations="offload", min_tensor_bytes=1)
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap) as offloader:
        offloader._cache.accounting.most_saved_bytes = 1 << 40
        offloader._cache._tiers.ssd._chunk_bytes = NBYTES  # what begins together
        x = torch.rand(SIDE, SIDE).requires_grad_()
        try:
            with offloader.saved_tensors():
                y = x * 1
                for _ in range(16):
                    y = y.sin()
            records = list(offloader._cache.accounting.by_storage.values())
            deadline_s = time.monotonic() + PATIENCE_S
            while not any(record.state is State.WRITING for record in records):
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            keys = [record.identity for record in records if isinstance(record, SavedStorage)]
            offloader.abort()
            assert sum(record.state is State.WRITING for record in records) <= 2, "one for each worker"
            assert offloader.stats.writes_cancelled_bytes >= 13 * NBYTES
            del y
            assert sum(key.alive() for key in keys) <= 2
        finally:
            may_write.set()
