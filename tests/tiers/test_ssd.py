"""The SSD tier: who goes first on the drives, what it counts. Its exactness is tested through the offloader."""

import ctypes
import random
import signal
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest
import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from lightning_ssd.telemetry.events import EventLog, TransferEvent
from lightning_ssd.tiers.base import ReadRequest, WriteRequest
from lightning_ssd.tiers.copy_paths import StagedMover
from lightning_ssd.tiers.read_priority import patience_s
from tests.support.faults import FaultyBackend, eio
from tests.support.host_traffic import wait_until
from tests.support.late import HeldCopies, HeldMark
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.ssd_tiers import ssd_tier

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
CHUNK = 64 * KIB
LONG_S = 60.0
"""As patience: nothing that is late, only what has waited for it takes as long."""


class Drive(FaultyBackend):
    """Blocks calls while the test wants it; knows their order."""

    def __init__(self, directory):
        super().__init__(PosixBackend([directory], direct=False), fail_write=self._write, fail_read=self._read)
        self.order = []
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.fails = False

    def _write(self, index):
        self.order.append("write")
        assert self.may_write.wait(PATIENCE_S)
        return

    def _read(self, index):
        self.order.append("read")
        assert self.may_read.wait(PATIENCE_S)
        return eio() if self.fails else None

    def wait_calls(self, number):
        wait_until(lambda: len(self.order) >= number)


@contextmanager
def tier_on(drive, directory, **settings):
    with ssd_tier(drive, directory, chunk_bytes=CHUNK, num_workers=1, **settings) as tier:
        try:
            yield tier
        finally:
            drive.may_write.set()
            drive.may_read.set()


def stored(tier, nbytes, seed=0):
    owner = Owner(random_storage(nbytes + 4096, seed))  # an unaligned edge stays in memory
    assert tier.write(owner, nbytes + 4096, None, label="")
    owner.wait()
    tier.flush()
    return owner


@pytest.fixture
def drive(tmp_path):
    return Drive(tmp_path)


def test_a_read_goes_where_it_is_told(drive, tmp_path):
    """With the edges, whatever the address."""
    with tier_on(drive, tmp_path) as tier:
        owner = stored(tier, CHUNK + 5)
        for seed in range(3):
            mine = random_storage(CHUNK + 5 + 4096, seed + 1)
            tier.read(owner, owner.place, CPU, urgent=False, into=mine).wait()
            assert owner.reloaded is mine
            assert owner.is_right()
        with pytest.raises(ValueError, match=r"was to be read into 1$"):
            tier.read(owner, owner.place, CPU, urgent=False, into=random_storage(1))


@pytest.mark.parametrize("offset", [0, 4, 36, 60, 64])
@pytest.mark.parametrize("nbytes", [CHUNK, 3 * CHUNK + 17])
def test_memory_that_comes_back_is_aligned_as_before_to_vectors(drive, tmp_path, offset, nbytes):
    """The last bits of a product may depend on it, also where the drive takes any address."""
    assert drive.memory_alignment == 1
    with tier_on(drive, tmp_path) as tier:
        memory = bytearray(random.Random(0).randbytes(nbytes + 128))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = (offset - address) % 64 + offset // 64 * 64
        storage = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes).untyped_storage()
        assert storage.data_ptr() % 64 == offset % 64
        owner = Owner(storage)
        assert tier.write(owner, nbytes, None, label="")
        owner.wait()
        tier.flush()
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.reloaded.data_ptr() % 64 == offset % 64
        assert owner.is_right()


class TestWritesGiveWay:
    @pytest.mark.parametrize("promoted", [False, True])
    @pytest.mark.parametrize("fails", [False, True])
    def test_no_write_begins_while_an_urgent_read_runs(self, drive, tmp_path, monkeypatch, promoted, fails):
        monkeypatch.setattr("lightning_ssd.tiers.transfer_queue.patience_s", lambda chunk_s: PATIENCE_S)
        with tier_on(drive, tmp_path) as tier:
            owner = stored(tier, CHUNK)
            drive.order.clear()
            drive.may_write.clear()
            drive.may_read.clear()
            drive.fails = fails
            late = Owner(random_storage(5 * CHUNK, 1))
            tier.write(late, 5 * CHUNK, None, label="")
            drive.wait_calls(1)
            read = tier.read(owner, owner.place, CPU, urgent=not promoted)
            drive.wait_calls(2)
            if promoted:
                tier.promote(read)
            drive.may_write.set()  # the chunk under way ends; no further one may begin
            other = Owner(random_storage(CHUNK, 2))
            tier.write(other, CHUNK, None, label="")
            time.sleep(0.15)
            assert drive.order == ["write", "read"]
            drive.may_read.set()
            read.wait()
            assert (owner.error is not None) == fails
            tier.flush()
            assert drive.order.count("write") >= 6
            for each in (late, other):
                drive.fails = False
                tier.read(each, each.place, CPU, urgent=False).wait()
                assert each.is_right()

    def test_writes_cannot_starve(self, drive, tmp_path):
        """The urgent read never ends, and all is written and flushed the same."""
        with tier_on(drive, tmp_path) as tier:
            owner = stored(tier, CHUNK)
            drive.order.clear()
            drive.may_read.clear()
            read = tier.read(owner, owner.place, CPU, urgent=True)
            drive.wait_calls(1)
            start = time.perf_counter()
            late = stored(tier, 3 * CHUNK, 1)
            assert time.perf_counter() - start >= 3 * patience_s(0)
            assert not read.ended
            assert late.place.body_nbytes > 0

    def test_close_does_not_wait_for_the_gate(self, drive, tmp_path, monkeypatch):
        """Chunks of a write that has begun are finished at once, though the urgent read goes on."""
        monkeypatch.setattr("lightning_ssd.tiers.transfer_queue.patience_s", lambda chunk_s: LONG_S)
        with tier_on(drive, tmp_path) as tier:
            owner = stored(tier, CHUNK)
            drive.order.clear()
            drive.may_write.clear()
            drive.may_read.clear()
            late = Owner(random_storage(30 * CHUNK, 1))
            tier.write(late, 30 * CHUNK, None, label="")
            drive.wait_calls(1)
            read = tier.read(owner, owner.place, CPU, urgent=True)
            drive.wait_calls(2)
            closing = threading.Thread(target=tier.close)
            closing.start()
            wait_until(lambda: tier._writes._closed)  # or a chunk that ends before waits for its turn, as it may
            start = time.perf_counter()
            drive.may_write.set()
            late.wait()
            assert time.perf_counter() - start < LONG_S, "a chunk waited"
            drive.may_read.set()
            closing.join()
            assert read.ended
            assert late.error is None


def test_urgent_reads_overtake_at_chunk_borders(drive, tmp_path):
    ended = []
    with tier_on(drive, tmp_path) as tier:
        large, small = stored(tier, 8 * CHUNK), stored(tier, CHUNK, 1)
        drive.order.clear()
        drive.may_read.clear()
        slow = tier.read(large, large.place, CPU, urgent=False)
        drive.wait_calls(1)
        queued = tier.read(small, small.place, CPU, urgent=True)
        threads = [
            threading.Thread(target=lambda name=name, move=move: (move.wait(), ended.append(name)))
            for name, move in (("slow", slow), ("urgent", queued))
        ]
        for thread in threads:
            thread.start()
        drive.may_read.set()
        for thread in threads:
            thread.join()
        assert queued._seq > slow._seq
        assert ended == ["urgent", "slow"]
        assert large.is_right()
        assert small.is_right()


class _Capricious(Owner):
    """Gives its write up when the test says so."""

    wants = True

    def is_wanted(self):
        return self.wants


def test_a_write_that_nobody_wants_ends_with_the_chunk_under_way(drive, tmp_path):
    """It would hold the memory, and keep the drive busy, as long as all of it takes."""
    events = EventLog()
    with tier_on(drive, tmp_path, events=events) as tier:
        drive.may_write.clear()
        owner = _Capricious(random_storage(5 * CHUNK))
        tier.write(owner, owner.storage.nbytes(), None, label="given up")
        drive.wait_calls(1)
        owner.wants = False
        drive.may_write.set()
        owner.wait()
        tier.flush()
        assert drive.order == ["write"]
        assert owner.place.missing_nbytes
        assert owner.place.body_nbytes == CHUNK == tier.progress().written_bytes
        assert [event.nbytes for event in events.drain()] == [CHUNK]
        with pytest.raises(ValueError, match="given up was not written to its end"):
            tier.read(owner, owner.place, CPU, urgent=False)
        tier.free(owner.place)
        assert sum(arena.used_bytes for arena in tier._arenas) == 0


def test_progress_and_events(drive, tmp_path):
    events = EventLog()
    with tier_on(drive, tmp_path, events=events) as tier:
        assert tier.name == "ssd"
        assert tier.progress() == (0, 0.0, 0, 0.0)
        owner = stored(tier, 8 * CHUNK)
        read = tier.read(owner, owner.place, CPU, urgent=False)
        read.wait()
        tier.close()
        body = owner.place.body_nbytes
        progress = tier.progress()
        assert (progress.written_bytes, progress.read_bytes) == (body, body)
        assert min(progress.write_busy_s, progress.read_busy_s) > 0
        assert owner.is_right()
        assert {event.tier for event in events.drain() if isinstance(event, TransferEvent)} == {"ssd"}


class LateEnd(HeldMark):
    """Passes so many seconds after somebody has begun to wait."""

    stream = None

    def __init__(self, late_s, now_s):
        super().__init__()
        self._late_s, self._now_s = late_s, now_s

    def synchronize(self):
        self._now_s[0] += self._late_s


class Behind(HeldCopies):
    """Of a device that gets to its present end after so many seconds."""

    def __init__(self, late_s, now_s):
        super().__init__(held=False)
        self._late_s, self._now_s = late_s, now_s

    def mark(self):
        return LateEnd(self._late_s, self._now_s)


@pytest.mark.parametrize("late_s", [0.0, 100.0])
def test_what_the_device_has_left_to_do_says_nothing_of_the_drive(drive, tmp_path, late_s, worker_clock):
    """A read into memory that the device still uses waits for the device after it has read."""
    events = EventLog()
    with staged(drive, tmp_path, Behind(late_s, worker_clock), events=events, num_workers=1) as (tier, _):
        owner = Owner(random_storage(CHUNK))
        assert tier.write(owner, CHUNK, None, label="")
        owner.wait()
        tier.read(owner, owner.place, CPU, urgent=False).wait()
        assert owner.is_right()
        assert tier.progress().read_busy_s == 0
    (read,) = [event for event in events.drain() if isinstance(event, TransferEvent) and event.direction == "read"]
    assert read.end_s - read.start_s == 0, "nor is it part of the move"


@contextmanager
def staged(drive, directory, copies, **settings):
    with closing(StagingPool()) as staging:
        mover = StagedMover(drive, staging, copies)
        with ssd_tier(drive, directory, mover=mover, chunk_bytes=CHUNK, **settings) as tier:
            try:
                yield tier, staging
            finally:
                copies.free_run()


class TestStagedReads:
    def test_one_is_handed_over_when_its_last_copy_is_queued(self, drive, tmp_path):
        copies = HeldCopies(held=False)
        with staged(drive, tmp_path, copies) as (tier, staging):
            owner = stored(tier, CHUNK - 4096)
            copies.held = True
            tier.read(owner, owner.place, CPU, urgent=True).wait()
            assert not owner.mark.query()
            assert staging.lent_bytes > 0, "the copy has yet to leave the buffer"
            key = StorageKey(owner.reloaded)
            owner.reloaded = None
            time.sleep(0.02)
            assert key.alive(), "the copy has yet to run"
            copies.free_run()
            wait_until(lambda: not key.alive() and not staging.lent_bytes)

    def test_a_copy_that_fails_late_is_told_at_close(self, drive, tmp_path):
        copies = HeldCopies(held=False)
        with staged(drive, tmp_path, copies) as (tier, staging):
            owner = stored(tier, CHUNK - 4096)
            copies.fail_late[copies.num_queued] = RuntimeError("the device is lost")
            tier.read(owner, owner.place, CPU, urgent=True).wait()
            assert owner.error is None
            with pytest.raises(RuntimeError, match="the device is lost"):
                tier.close()
            assert staging.lent_bytes > 0, "the copy may still use the buffer"

    def test_storages_of_one_job_share_staging_buffers(self, drive, tmp_path):
        """A worker holds one at a time, and a copy that fails behind a hand-over is told at close."""
        copies = HeldCopies(held=False)
        with staged(drive, tmp_path, copies) as (tier, staging):
            owners = [stored(tier, 12 * KIB, seed) for seed in range(6)]
            copies.held = True
            begin = copies.num_queued
            copies.fail_late[begin] = RuntimeError("the device is lost")
            read = tier.read_all([ReadRequest(owner, owner.place) for owner in owners], CPU, urgent=False)
            for index in range(2):
                read.wait_for(owners[3 * index])  # one of each worker
            assert copies.num_queued == begin + 2
            assert staging.lent_bytes == 2 * 16 * KIB
            copies.free_run()
            read_all_told(read, owners)
            assert all(owner.error is None for owner in owners)
            with pytest.raises(RuntimeError, match="the device is lost"):
                tier.close()


def read_all_told(read, owners):
    for owner in owners:
        with suppress(RuntimeError):  # of a copy that has failed
            read.wait_for(owner)


def test_writes_wait_for_the_producer_without_being_busy(drive, tmp_path, worker_clock):
    produced = HeldCopies().mark()
    produced.passed.clear()
    with tier_on(drive, tmp_path) as tier:
        owner = Owner(random_storage(CHUNK))
        assert tier.write(owner, CHUNK, produced, label="")
        assert produced.asked.wait(PATIENCE_S)
        worker_clock[0] += 100
        assert owner.calls == drive.order == []
        assert tier.progress().write_busy_s == 0
        produced.passed.set()
        tier.flush()
        assert owner.calls == ["begins", "written"]


def test_storages_of_one_job_end_and_fail_each_by_itself(tmp_path):
    """Of three, the second one's write fails, and the last one is no longer wanted when it would begin."""
    failing = []

    class Second(Drive):
        def _write(self, index):
            super()._write(index)
            return eio() if index in failing else None

    drive = Second(tmp_path)
    events = EventLog()
    with tier_on(drive, tmp_path, events=events) as tier:
        owners = [Owner(random_storage(16 * KIB, seed)) for seed in range(4)]
        owners[3].storage = None
        failing.append(1)
        tier.write_all([WriteRequest(owner, 16 * KIB, None, f"number {i}") for i, owner in enumerate(owners)])
        tier.flush()
        assert [owner.error is None for owner in owners] == [True, False, True, True]
        assert [owner.calls for owner in owners] == [["begins", "written"]] * 3 + [["begins"]]
        assert owners[1].stored is None
        assert tier.disk_bytes >= 2 * 12 * KIB
        for owner in (owners[0], owners[2]):
            owner.told.clear()
            tier.read(owner, owner.place, CPU, urgent=True).wait()
            assert owner.is_right()
    written = [event for event in events.drain() if isinstance(event, TransferEvent) and event.direction == "write"]
    assert sorted((event.failed, event.nbytes) for event in written) == [(False, 32 * KIB), (True, 16 * KIB)]


def test_storages_read_in_one_job_come_back_and_fail_each_by_itself(tmp_path):
    """Of four, the second one's reads fail, and the drive is stuck at the third one."""
    failing = []

    class Some(Drive):
        def _read(self, index):
            if len(self.order) - self.order.count("write") >= 3:
                super()._read(index)
            else:
                self.order.append("read")
            return eio() if index in failing else None

    drive = Some(tmp_path)
    events = EventLog()
    with tier_on(drive, tmp_path, events=events) as tier:
        owners = [stored(tier, CHUNK - 4096, seed) for seed in range(4)]
        places = [owner.place for owner in owners]
        drive.may_read.clear()
        failing += [1, 2]  # the second one, and once more
        read = tier.read_all([ReadRequest(owner, owner.place) for owner in owners], CPU, urgent=False)
        read.wait_for(owners[0])
        assert owners[0].is_right()
        read.wait_for(owners[1])
        assert isinstance(owners[1].error, StorageError)
        key = StorageKey(owners[0].reloaded)
        owners[0].reloaded = None
        assert not key.alive(), "the job holds what it has handed over"
        used_bytes = [arena.used_bytes for arena in tier._arenas]
        tier.free(places[0])
        tier.free(places[3])  # nobody wants it any more; its place stays until it was read
        assert [arena.used_bytes for arena in tier._arenas] == [used_bytes[0] - places[0].parts[0].extent.nbytes]
        assert not read.ended
        assert owners[2].reloaded is owners[3].reloaded is None
        drive.may_read.set()
        read.wait_for(owners[2])
        assert owners[2].is_right()
        read.wait()
        assert owners[3].is_right()
        read.wait_for(owners[3])
        tier.free(places[2])
        tier.free(places[1])
        assert tier._arenas[0].used_bytes == 0
    came = [event for event in events.drain() if isinstance(event, TransferEvent) and event.direction == "read"]
    assert sorted((event.failed, event.nbytes // CHUNK) for event in came) == [(False, 3), (True, 1)]


def test_a_group_that_has_not_begun_is_told_at_close(drive, tmp_path):
    with tier_on(drive, tmp_path) as tier:
        owners = [stored(tier, CHUNK - 4096, seed) for seed in range(3)]
        drive.may_read.clear()
        drive.order.clear()
        first = tier.read(owners[0], owners[0].place, CPU, urgent=False)
        drive.wait_calls(1)
        group = tier.read_all([ReadRequest(owner, owner.place) for owner in owners[1:]], CPU, urgent=False)
        closing = threading.Thread(target=tier.close)
        closing.start()
        for owner in owners[1:]:
            group.wait_for(owner)
            assert isinstance(owner.error, OffloaderClosedError)
        drive.may_read.set()
        closing.join()
        first.wait()
        assert owners[0].is_right()


def test_a_job_holds_the_memory_of_what_it_writes_and_no_other(drive, tmp_path):
    with tier_on(drive, tmp_path) as tier:
        owners = [Owner(random_storage(CHUNK, seed)) for seed in range(3)]
        keys = [StorageKey(owner.storage) for owner in owners if owner.storage is not None]

        drive.may_write.clear()
        tier.write_all([WriteRequest(owner, CHUNK, None, "") for owner in owners])
        drive.wait_calls(1)
        for owner in owners:
            owner.storage = None
        assert [key.alive() for key in keys] == [True, False, False]
        drive.may_write.set()
        owners[0].wait()
        assert not keys[0].alive(), "its owner was told while the job still held its memory"
        tier.flush()
        assert [owner.calls for owner in owners] == [["begins", "written"], ["begins"], ["begins"]]


def test_a_job_whose_producer_is_lost_tells_every_owner(drive, tmp_path):
    class Lost:
        stream = "lost"

        def synchronize(self):
            raise RuntimeError("the device is lost")

        def query(self):
            return False

        def again(self):
            return self

    with tier_on(drive, tmp_path) as tier:
        owners = [Owner(random_storage(CHUNK, seed)) for seed in range(2)]
        tier.write_all([WriteRequest(owner, CHUNK, Lost(), "") for owner in owners])
        tier.flush()
        assert [str(owner.error) for owner in owners] == ["the device is lost"] * 2


def test_ctrl_c_loses_none_of_the_places_that_are_given_back_together(drive, tmp_path, monkeypatch):
    free = Arena.free

    def interrupted(arena, *extents):
        signal.raise_signal(signal.SIGINT)
        free(arena, *extents)

    with ssd_tier(drive, tmp_path) as tier:
        owners = [Owner(random_storage(8192, seed)) for seed in range(4)]
        tier.write_all([WriteRequest(owner, 8192, None, "storage") for owner in owners])
        tier.flush()
        assert tier.used_bytes
        monkeypatch.setattr(Arena, "free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.free_all([owner.stored for owner in owners])
        assert tier.used_bytes == 0
