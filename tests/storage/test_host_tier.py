"""Host memory as a tier: exactness with late copies, room, reuse, cancelling, failing, closing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.events import EventLog, TransferEvent
from lightning_ssd.storage.host_tier import HostTier
from lightning_ssd.storage.integrity import Sampler
from lightning_ssd.storage.movers import HostMover, host_bytes
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.staging import ReloadPool
from lightning_ssd.storage.streams import Copies, CudaCopies
from lightning_ssd.storage.tiers import SsdTier
from lightning_ssd.tensors import StorageKey
from tests.storage.late import HeldCopies, late_copies
from tests.storage.owners import Owner, as_bytes, random_storage

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
MakeTier = Callable[..., HostTier]


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    tiers: list[HostTier] = []

    def make(
        copies: Copies | None = None, *, capacity: int = 8 * MIB, events: EventLog | None = None, **extra: int
    ) -> HostTier:
        tier = HostTier(capacity, copies, pin=False, events=events or EventLog(), **extra)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        if isinstance(tier.copies, HeldCopies):
            tier.copies.free_run()
        tier.close()


@pytest.fixture
def held() -> HeldCopies:
    return HeldCopies()


def stored(tier: HostTier, nbytes: int, seed: int = 0) -> Owner:
    """One storage that is down already."""
    owner = Owner(random_storage(nbytes, seed))
    copies = tier.copies
    if isinstance(copies, HeldCopies):
        copies.free_run()
    assert tier.write(owner, nbytes, None, label=f"storage {seed}")
    owner.wait()
    if isinstance(copies, HeldCopies):
        copies.held = True
    assert owner.place.body_nbytes == nbytes
    owner.storage = None
    return owner


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)


class TestExact:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1000 * KIB + 3, 5 * MIB])
    def test_on_cpu(self, make_tier: MakeTier, nbytes: int) -> None:
        tier = make_tier(chunk_bytes=256 * KIB)
        owner = stored(tier, nbytes)
        for urgent in (False, True):
            tier.read(owner, owner.place, CPU, urgent=urgent).wait()
            assert owner.mark is None
            assert owner.is_right()
        tier.free(owner.place)
        assert tier.used_bytes == 0

    def test_many_threads(self, make_tier: MakeTier) -> None:
        tier = make_tier(chunk_bytes=64 * KIB)
        run_traffic(tier, wait=lambda owner: None)
        assert tier.used_bytes == 0
        assert tier.memory_bytes <= tier.capacity_bytes

    def test_many_threads_with_late_copies(self, make_tier: MakeTier) -> None:
        with late_copies(max_delay_s=0.001) as copies:
            tier = make_tier(copies, chunk_bytes=256 * KIB)
            run_traffic(tier, wait=lambda owner: copies.wait_on_current_stream(owner.mark), turns=12)
            tier.close()
            assert tier.used_bytes == 0
            assert copies.waited_on

    @pytest.mark.parametrize("honest", [True, False])
    def test_a_missing_wait_would_be_seen(self, make_tier: MakeTier, honest: bool) -> None:
        """Owners destroy what was written once they are told; with marks that lie, that is too early."""
        with late_copies(max_delay_s=0.02, honest=honest) as copies:
            tier = make_tier(copies, chunk_bytes=128 * KIB)
            owners = [Owner(random_storage(MIB, seed)) for seed in range(6)]
            for owner in owners:
                assert tier.write(owner, MIB, copies.mark(), label="")
                owner.wait()
                assert owner.storage is not None
                as_bytes(owner.storage).zero_()
            right = []
            for owner in owners:
                tier.read(owner, owner.place, CPU, urgent=False).wait()
                copies.wait_on_current_stream(owner.mark)  # type: ignore[arg-type]
                right.append(owner.is_right())
                tier.free(owner.place)
            copies.mark().passed.wait(10)
            wait_until(lambda: all(not stream.qsize() for stream in copies._streams.values()))
            time.sleep(0.05)  # the last copies of those that lied end before their memory goes
        assert all(right) == honest

    def test_writes_wait_for_the_producer(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held)
        owner, produced = Owner(random_storage(KIB)), held.mark()
        produced.passed.clear()
        assert tier.write(owner, KIB, produced, label="")
        time.sleep(0.05)
        assert owner.calls == []
        assert tier.progress().write_busy_s < 0.02, "waiting for the producer is not busy"
        produced.passed.set()
        held.free_run()
        tier.flush()
        assert owner.calls == ["begins", "written"]

    def test_the_owner_lets_go_only_after_the_copy(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held)
        owner = Owner(random_storage(MIB))
        assert tier.write(owner, MIB, held.mark(), label="")
        held.wait_queued(1)
        time.sleep(0.02)
        assert owner.calls == ["begins"]
        held.let_through(1)
        owner.wait()
        assert owner.place.body_nbytes == MIB


def run_traffic(tier: HostTier, *, wait: Callable[[Owner], None], turns: int = 60) -> None:
    """Threads that write, read, and free at random, in less room than they want."""
    failures: list[str | BaseException] = []

    def work(seed: int) -> None:
        choose, held = random.Random(seed), list[Owner]()
        try:
            for turn in range(turns):
                nbytes = choose.randrange(1, MIB)
                owner = Owner(random_storage(nbytes, seed * 1000 + turn))
                after = None if tier.copies is None else tier.copies.mark()
                if tier.write(owner, nbytes, after, label=""):
                    owner.wait()
                    owner.storage = None
                    held.append(owner)
                if held and choose.random() < 0.7:
                    one = choose.choice(held)
                    transfer = tier.read(one, one.place, CPU, urgent=choose.random() < 0.5)
                    transfer.wait()
                    if choose.random() < 0.5:  # while the copy may still run
                        held.remove(one)
                        tier.free(one.place)
                    wait(one)
                    if not one.is_right():
                        failures.append(f"thread {seed}, turn {turn}: other bytes")
                    one.reloaded = None
            for one in held:
                tier.free(one.place)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class TestRoom:
    def test_a_full_tier_says_so_and_touches_nobody(self, make_tier: MakeTier) -> None:
        tier = make_tier(capacity=4 * MIB)
        first = stored(tier, 3 * MIB)
        refused = Owner(random_storage(2 * MIB))
        assert not tier.write(refused, 2 * MIB, None, label="")
        assert tier.write(Owner(None), MIB, None, label="")
        tier.flush()
        assert refused.calls == []
        tier.free(first.place)
        assert tier.write(refused, 2 * MIB, None, label="")
        refused.wait()
        assert tier.memory_bytes <= 4 * MIB

    def test_without_capacity_there_is_never_room(self, make_tier: MakeTier) -> None:
        tier = make_tier(capacity=100)
        assert tier.capacity_bytes == 0
        assert not tier.write(Owner(random_storage(1)), 1, None, label="")

    def test_room_is_taken_at_submission(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, capacity=4 * MIB, num_workers=1)
        owners = [Owner(random_storage(MIB, seed)) for seed in range(5)]
        assert [tier.write(owner, MIB, None, label="") for owner in owners] == [True] * 4 + [False]
        held.free_run()
        tier.flush()
        assert [owner.calls for owner in owners] == [["begins", "written"]] * 4 + [[]]

    def test_a_cancelled_write_gives_its_room_back(self, make_tier: MakeTier) -> None:
        tier = make_tier(capacity=MIB)
        owner = Owner(None)
        for _ in range(3):
            assert tier.write(owner, MIB, None, label="")
            tier.flush()
        assert owner.calls == ["begins"] * 3
        assert tier.used_bytes == 0

    def test_discarded_writes_give_their_room_back(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, num_workers=1)
        owners = [Owner(random_storage(MIB, seed)) for seed in range(4)]
        for owner in owners:
            assert tier.write(owner, MIB, None, label="")
        held.wait_queued(1)
        threading.Timer(0.05, held.free_run).start()
        tier.close()
        assert [owner.calls for owner in owners] == [["begins", "written"], [], [], []]
        assert tier.used_bytes == MIB

    def test_a_resized_storage_is_refused(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        owner = Owner(random_storage(MIB))
        owner.storage = random_storage(2 * MIB)
        assert tier.write(owner, MIB, None, label="saved storage 7")
        owner.wait()
        assert isinstance(owner.error, StorageError)
        assert "saved storage 7 has 2,097,152 bytes, and had 1,048,576" in str(owner.error)
        assert tier.used_bytes == 0


class TestMemoryInFlight:
    def test_a_read_is_handed_over_before_its_copy_has_run(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held)
        owner = stored(tier, MIB)
        transfer = tier.read(owner, owner.place, CPU, urgent=True)
        transfer.wait()
        assert owner.reloaded is not None
        assert not owner.mark.passed.is_set()  # type: ignore[union-attr]
        held.let_through(1)
        assert owner.is_right()

    def test_an_extent_is_not_reused_while_it_is_read(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, capacity=MIB)
        owner, other = stored(tier, MIB), Owner(random_storage(MIB, 9))
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        tier.free(owner.place)
        assert not tier.write(other, MIB, None, label=""), "the copy out of it has not run"
        held.let_through(1)
        wait_until(lambda: tier.used_bytes == 0)
        assert owner.is_right()
        assert tier.write(other, MIB, None, label="")

    def test_not_before_the_last_of_two_reads(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, capacity=MIB)
        owner = stored(tier, MIB)
        for _ in range(2):
            tier.read(owner, owner.place, CPU, urgent=False).wait()
        tier.free(owner.place)
        held.let_through(1)
        time.sleep(0.02)
        assert tier.used_bytes == MIB
        held.let_through(1)
        wait_until(lambda: tier.used_bytes == 0)

    def test_the_new_storage_lives_until_the_copy_has_run(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, chunk_bytes=256 * KIB)
        owner = stored(tier, MIB)
        before = held.num_queued
        transfer = tier.read(owner, owner.place, CPU, urgent=True)
        for done in range(3):
            held.wait_queued(before + done + 1)
            held.let_through(1)
        transfer.wait()
        assert owner.reloaded is not None
        key = StorageKey(owner.reloaded)
        owner.reloaded = None
        time.sleep(0.02)
        assert key.alive(), "a copy into it has yet to run"
        held.let_through(1)
        wait_until(lambda: not key.alive())
        assert transfer.ended, "whoever keeps the transfer does not keep the memory"

    def test_one_read_never_queues_all_its_copies_at_once(self, make_tier: MakeTier, held: HeldCopies) -> None:
        """Else an urgent read could not overtake: streams run in order."""
        tier = make_tier(held, chunk_bytes=MIB, num_workers=1)
        large, small = stored(tier, 4 * MIB), stored(tier, 100 * KIB, 1)
        before = held.num_queued
        slow = tier.read(large, large.place, CPU, urgent=False)
        held.wait_queued(before + 1)
        waiting = tier.read(small, small.place, CPU, urgent=False)
        tier.promote(waiting)
        held.copied.clear()
        held.let_through(1)
        held.wait_queued(before + 2)
        held.free_run()
        slow.wait()
        waiting.wait()
        assert held.copied == [("in", n) for n in (MIB, 100 * KIB, MIB, MIB, MIB)]
        wait_until(lambda: tier.progress().read_bytes == 4 * MIB + 100 * KIB)
        assert large.is_right()
        assert small.is_right()


class TestFailures:
    def test_a_copy_out_that_cannot_be_queued(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, chunk_bytes=256 * KIB)
        held.held, held.fail = False, {2: RuntimeError("injected: no stream")}
        owner = Owner(random_storage(MIB))
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        assert owner.stored is None
        assert str(owner.error) == "injected: no stream"
        assert tier.used_bytes == 0
        assert tier.write(owner, MIB, None, label="")  # the next one works
        owner.wait()
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.is_right()

    def test_a_copy_in_that_cannot_be_queued_leaves_the_bytes_stored(
        self, make_tier: MakeTier, held: HeldCopies
    ) -> None:
        events = EventLog()
        tier = make_tier(held, chunk_bytes=256 * KIB, events=events)
        owner = stored(tier, MIB)
        held.held, held.fail = False, {held.num_queued + 1: RuntimeError("injected: no stream")}
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert str(owner.error) == "injected: no stream"
        assert owner.reloaded is None
        owner.error = None
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.is_right()
        tier.free(owner.place)
        wait_until(lambda: tier.used_bytes == 0)
        tier.close()
        read = [event for event in events.drain() if isinstance(event, TransferEvent) and event.direction == "read"]
        assert [event.failed for event in read] == [True, False]

    def test_a_copy_out_that_fails_late_loses_its_place(self, make_tier: MakeTier, held: HeldCopies) -> None:
        """Nobody knows whether that copy has ended, so that its memory must not be lent again."""
        tier = make_tier(held)
        held.held, held.fail_late = False, {0: RuntimeError("injected: device lost")}
        owner = Owner(random_storage(MIB))
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        assert str(owner.error) == "injected: device lost"
        assert tier.used_bytes == MIB

    @pytest.mark.parametrize("num_chunks", [1, 4])
    def test_a_copy_in_that_fails_late_is_told(
        self, make_tier: MakeTier, held: HeldCopies, num_chunks: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        events = EventLog()
        tier = make_tier(held, chunk_bytes=MIB // num_chunks, num_workers=1, events=events)
        owner = stored(tier, MIB)
        held.held = False
        held.fail_late = {held.num_queued + num_chunks - 1: RuntimeError("injected: device lost")}
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.error is None, "it was handed over before"
        tier.free(owner.place)
        with pytest.raises(RuntimeError, match="device lost"):
            tier.close()
        tier.close()
        assert tier.used_bytes == MIB
        assert "failed after it was handed over: injected: device lost" in caplog.text
        assert [event.failed for event in events.drain() if event.direction == "read"] == [True]  # type: ignore[union-attr]

    def test_an_early_chunk_that_fails_late_reaches_the_one_who_waits(
        self, make_tier: MakeTier, held: HeldCopies
    ) -> None:
        tier = make_tier(held, chunk_bytes=256 * KIB)
        owner = stored(tier, MIB)
        held.held, held.fail_late = False, {held.num_queued: RuntimeError("injected: device lost")}
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert str(owner.error) == "injected: device lost"
        owner.error = None
        tier.free(owner.place)
        tier.close()
        assert tier.used_bytes == MIB

    def test_freed_bytes_are_not_read(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        owner = stored(tier, MIB, 3)
        tier.free(owner.place)
        with pytest.raises(ValueError, match="storage 3 was freed twice"):
            tier.free(owner.place)
        with pytest.raises(ValueError, match="storage 3 was freed; its bytes may be gone"):
            tier.read(owner, owner.place, CPU, urgent=True)

    def test_each_tier_takes_its_own(self, make_tier: MakeTier, tmp_path: Path) -> None:
        one, other = make_tier(), make_tier()
        backend, reload = PosixBackend([tmp_path], direct=False), ReloadPool(0)
        ssd = SsdTier(backend, HostMover(backend, reload), [tmp_path], events=EventLog(), sampler=Sampler("off"))
        owner, below = stored(one, MIB), Owner(random_storage(MIB))
        assert ssd.write(below, MIB, None, label="")
        below.wait()
        for tier, place in ((other, owner.place), (ssd, owner.place), (one, below.place)):
            with pytest.raises(TypeError, match="to the one that did"):
                tier.free(place)
            with pytest.raises(TypeError, match="to the one that did"):
                tier.read(owner, place, CPU, urgent=True)
        ssd.close()
        backend.close()


class TestClosing:
    def test_close_waits_for_copies_and_discards_the_rest(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, num_workers=1)
        owners = [stored(tier, MIB, seed) for seed in range(3)]
        before = held.num_queued
        transfers = [tier.read(owner, owner.place, CPU, urgent=False) for owner in owners]
        held.wait_queued(before + 1)
        threading.Timer(0.05, held.free_run).start()
        tier.close()
        tier.close()
        assert all(transfer.ended for transfer in transfers)
        assert owners[0].is_right()
        assert all(isinstance(owner.error, OffloaderClosedError) for owner in owners[1:])
        for owner in owners:
            tier.free(owner.stored)  # type: ignore[arg-type]
        with pytest.raises(OffloaderClosedError, match="open"):
            tier.write(owners[0], MIB, None, label="")
        with pytest.raises(ValueError, match="was freed"):
            tier.read(owners[0], owners[0].stored, CPU, urgent=True)  # type: ignore[arg-type]

    def test_reads_after_close_are_refused(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        owner = stored(tier, MIB)
        tier.close()
        with pytest.raises(OffloaderClosedError, match="open it again"):
            tier.read(owner, owner.place, CPU, urgent=True)

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_has_no_tier(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        owner = stored(tier, MIB)
        with tier._lock, tier.arena._lock:  # as if other threads held them at the fork
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a child that waits for a lock must not stay
                code = 1
                try:
                    tier.free(owner.place)
                    tier.arena.free(owner.place.extent)  # type: ignore[attr-defined]
                    tier.arena.close()
                    tier.write(owner, MIB, None, label="")
                except StorageError:
                    code = 0
                finally:
                    os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.is_right()


class TestNumbers:
    def test_events_and_progress(self, make_tier: MakeTier) -> None:
        events = EventLog()
        tier = make_tier(events=events)
        assert tier.name == "host"
        assert tier.progress() == (0, 0.0, 0, 0.0)
        owner = stored(tier, 3 * MIB)
        tier.flush()
        transfer = tier.read(owner, owner.place, CPU, urgent=True)
        transfer.wait()
        wrote, read = events.drain()
        assert isinstance(wrote, TransferEvent)
        assert isinstance(read, TransferEvent)
        assert (wrote.tier, wrote.direction, wrote.nbytes, wrote.failed) == ("host", "write", 3 * MIB, False)
        assert (read.tier, read.direction, read.nbytes, read.urgent) == ("host", "read", 3 * MIB, True)
        tier.close()
        progress = tier.progress()
        assert (progress.written_bytes, progress.read_bytes) == (3 * MIB, 3 * MIB)
        assert progress.write_busy_s > 0
        assert progress.read_busy_s > 0

    def test_a_read_is_busy_until_its_copy_has_run(self, make_tier: MakeTier, held: HeldCopies) -> None:
        """Else the tier would seem as fast as copies can be queued."""
        events = EventLog()
        tier = make_tier(held, events=events)
        owner = stored(tier, MIB)
        tier.flush()
        events.drain()
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        time.sleep(0.05)
        assert events.drain() == []
        held.let_through(1)
        tier.close()
        assert tier.progress().read_busy_s >= 0.05
        (event,) = events.drain()
        assert isinstance(event, TransferEvent)
        assert event.end_s - event.start_s >= 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_exact_behind_a_busy_stream(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        copies = CudaCopies(device)
        tier = HostTier(512 * MIB, copies, pin=True, events=EventLog())
        owners = []
        for seed in range(8):
            torch.cuda._sleep(20_000_000)  # the producer is late
            tensor = as_bytes(random_storage(40 * MIB + seed, seed)).to(device, non_blocking=True)
            storage = tensor.untyped_storage()
            owner = Owner(storage)
            assert tier.write(owner, storage.nbytes(), copies.mark(), label=f"storage {seed}")
            owners.append(owner)
        tier.flush()
        for owner in owners:
            assert owner.storage is not None
            as_bytes(owner.storage).zero_()
        for owner in reversed(owners):
            torch.cuda._sleep(20_000_000)
            tier.read(owner, owner.place, device, urgent=True).wait()
            assert owner.mark is not None
            copies.wait_on_current_stream(owner.mark)
            assert owner.is_right()
            tier.free(owner.place)
        wait_until(lambda: tier.used_bytes == 0)
        tier.close()

    def test_memory_is_pinned(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        tier = HostTier(64 * MIB, CudaCopies(device), pin=True, events=EventLog())
        owner = Owner(torch.ones(MIB, dtype=torch.uint8, device=device).untyped_storage())
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        ((_, address, nbytes),) = tier.arena.pieces(owner.place.extent, MIB, MIB)  # type: ignore[attr-defined]
        assert host_bytes(address, nbytes).is_pinned()
        tier.close()
