"""Host memory as a tier: exactness with late copies, room, reuse, numbers."""

import random
import signal
import threading
import time
from functools import partial

import pytest
import torch

from lightning_ssd.common.accelerators import Accelerator
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog, TransferEvent
from lightning_ssd.tiers.base import WriteRequest
from lightning_ssd.tiers.copy_paths import host_bytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.streams import StreamCopies
from tests.support.host_traffic import CPU, KIB, MIB, stored, wait_until
from tests.support.late import late_copies
from tests.support.owners import Owner, as_bytes, random_storage
from tests.support.ssd_tiers import ssd_tier
from tests.support.threads import at_once
from tests.support.weight_loops import in_a_fork


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["while room is taken", "when room is taken", "before the job is queued"])
def test_an_interrupt_takes_no_room(where, make_tier, monkeypatch):
    tier = make_tier()
    requests = [WriteRequest(Owner(random_storage(MIB, i)), MIB, None, "") for i in range(4)]
    with monkeypatch.context() as patches:
        if where == "while room is taken":
            room = [*(tier.arena.allocate(MIB) for _ in range(3)), None]
            patches.setattr(tier.arena, "allocate", lambda nbytes: room.pop(0) or _interrupt())
        elif where == "when room is taken":
            patches.setattr(tier.arena, "_say", _interrupt)
        else:
            patches.setattr(tier._writes, "submit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.write_all(requests)
    assert tier.used_bytes == 0
    assert tier.write_all(requests) == [True] * 4


def test_an_interrupt_while_bytes_are_freed_is_no_second_try(make_tier, monkeypatch):
    tier = make_tier()
    owner = stored(tier, MIB)
    with monkeypatch.context() as patches:
        patches.setattr(tier, "free_parts", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.free(owner.place)
    assert owner.place.is_freed  # so that no one frees it again


class TestExact:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1000 * KIB + 3, 5 * MIB])
    def test_on_cpu(self, make_tier, nbytes):
        tier = make_tier(chunk_bytes=256 * KIB)
        owner = stored(tier, nbytes)
        for urgent in (False, True):
            tier.read(owner, owner.place, CPU, urgent=urgent).wait()
            assert owner.mark is None
            assert owner.is_right()
        tier.free(owner.place)
        assert tier.used_bytes == 0

    def test_many_threads_with_late_copies(self, make_tier):
        with late_copies(max_delay_s=0.001) as copies:
            tier = make_tier(copies, chunk_bytes=256 * KIB)
            run_traffic(tier, wait=lambda owner: copies.wait_on_current_stream(owner.mark), turns=12)
            tier.close()
            assert tier.used_bytes == 0
            assert copies.waited_on


def run_traffic(tier, *, wait, turns=60):
    """Threads that write, read, and free at random, in less room than they want."""

    def work(seed):
        choose, held = random.Random(seed), list[Owner]()
        for turn in range(turns):
            nbytes = choose.randrange(1, MIB)
            owner = Owner(random_storage(nbytes, seed * 1000 + turn))
            if tier.write(owner, nbytes, tier.copies.mark(), label=""):
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
                assert one.is_right(), f"thread {seed}, turn {turn}: other bytes"
                one.reloaded = None
        for one in held:
            tier.free(one.place)

    at_once(*(partial(work, seed) for seed in range(4)))


class TestRoom:
    def test_a_full_tier_says_so_and_touches_nobody(self, make_tier):
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

    def test_of_a_job_each_storage_has_room_or_not(self, make_tier):
        tier = make_tier(capacity=4 * MIB)
        owners = [Owner(random_storage(num * MIB, num)) for num in (3, 2, 1)]
        requests = [WriteRequest(owner, num * MIB, None, "") for owner, num in zip(owners, (3, 2, 1), strict=True)]
        assert tier.write_all(requests) == [True, False, True]
        tier.flush()
        assert [owner.calls for owner in owners] == [["begins", "written"], [], ["begins", "written"]]
        for owner in (owners[0], owners[2]):
            tier.read(owner, owner.place, CPU, urgent=True).wait()
            assert owner.is_right()

    def test_without_capacity_there_is_never_room(self, make_tier):
        tier = make_tier(capacity=100)
        assert tier.capacity_bytes == 0
        assert not tier.write(Owner(random_storage(1)), 1, None, label="")

    def test_room_is_taken_at_submission(self, make_tier, held):
        tier = make_tier(held, capacity=4 * MIB, num_workers=1)
        owners = [Owner(random_storage(MIB, seed)) for seed in range(5)]
        assert [tier.write(owner, MIB, None, label="") for owner in owners] == [True] * 4 + [False]
        held.free_run()
        tier.flush()
        assert [owner.calls for owner in owners] == [["begins", "written"]] * 4 + [[]]

    def test_discarded_writes_give_their_room_back(self, make_tier, held):
        tier = make_tier(held, num_workers=1)
        owners = [Owner(random_storage(MIB, seed)) for seed in range(4)]
        for owner in owners:
            assert tier.write(owner, MIB, None, label="")
        held.wait_queued(1)
        threading.Timer(0.05, held.free_run).start()
        tier.close()
        assert [owner.calls for owner in owners] == [["begins", "written"], [], [], []]
        assert tier.used_bytes == MIB

    def test_a_resized_storage_is_refused(self, make_tier):
        tier = make_tier()
        owner = Owner(random_storage(MIB))
        owner.storage = random_storage(2 * MIB)
        assert tier.write(owner, MIB, None, label="saved storage 7")
        owner.wait()
        assert isinstance(owner.error, StorageError)
        assert "saved storage 7 has 2,097,152 bytes, and had 1,048,576" in str(owner.error)
        assert tier.used_bytes == 0


class TestNumbers:
    def test_a_read_is_busy_until_its_copy_has_run(self, make_tier, held):
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
        assert event.end_s - event.start_s >= 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_exact_behind_a_busy_stream(self):
        device = torch.device("cuda", torch.cuda.current_device())
        accelerator = Accelerator(device)
        copies = StreamCopies(accelerator)
        tier = HostTier(512 * MIB, copies, pin=accelerator.locks_host_memory, events=EventLog())
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

    @pytest.mark.parametrize("is_ahead", [False, True])
    def test_memory_is_pinned(self, is_ahead):
        device = torch.device("cuda", torch.cuda.current_device())
        copies, ahead = StreamCopies(Accelerator(device)), device if is_ahead else None
        tier = HostTier(64 * MIB, copies, pin=True, ahead=ahead, events=EventLog())
        tier.lock_ahead(8 * MIB)
        wait_until(lambda: tier.capacity_bytes >= 8 * MIB)
        owner = Owner(torch.ones(MIB, dtype=torch.uint8, device=device).untyped_storage())
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        ((_, address, nbytes),) = tier.arena.pieces(owner.place.parts[0].extent, MIB, MIB)
        assert host_bytes(address, nbytes).is_pinned()
        tier.close()


class TestMemoryInFlight:
    def test_one_read_never_queues_all_its_copies_at_once(self, make_tier, held):
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
    def test_a_copy_out_that_cannot_be_queued(self, make_tier, held):
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

    def test_a_copy_in_that_cannot_be_queued_leaves_the_bytes_stored(self, make_tier, held):
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

    def test_a_copy_out_that_fails_late_loses_its_place(self, make_tier, held):
        """Nobody knows whether that copy has ended, so that its memory must not be lent again."""
        tier = make_tier(held)
        held.held, held.fail_late = False, {0: RuntimeError("injected: device lost")}
        owner = Owner(random_storage(MIB))
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        assert str(owner.error) == "injected: device lost"
        assert tier.used_bytes == MIB

    @pytest.mark.parametrize("num_chunks", [1, 4])
    def test_a_copy_in_that_fails_late_is_told(self, make_tier, held, num_chunks, caplog):
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
        assert [event.failed for event in events.drain() if event.direction == "read"] == [True]

    def test_an_early_chunk_that_fails_late_reaches_the_one_who_waits(self, make_tier, held):
        tier = make_tier(held, chunk_bytes=256 * KIB)
        owner = stored(tier, MIB)
        held.held, held.fail_late = False, {held.num_queued: RuntimeError("injected: device lost")}
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert str(owner.error) == "injected: device lost"
        owner.error = None
        tier.free(owner.place)
        tier.close()
        assert tier.used_bytes == MIB

    def test_freed_bytes_are_not_read(self, make_tier):
        tier = make_tier()
        owner = stored(tier, MIB, 3)
        tier.free(owner.place)
        with pytest.raises(ValueError, match="storage 3 was freed twice"):
            tier.free(owner.place)
        with pytest.raises(ValueError, match="storage 3 was freed; its bytes may be gone"):
            tier.read(owner, owner.place, CPU, urgent=True)

    def test_each_tier_takes_its_own(self, make_tier, tmp_path):
        one, other = make_tier(), make_tier()
        owner, below = stored(one, MIB), Owner(random_storage(MIB))
        with ssd_tier(PosixBackend([tmp_path], direct=False), tmp_path) as ssd:
            assert ssd.write(below, MIB, None, label="")
            below.wait()
            for tier, place in ((other, owner.place), (ssd, owner.place), (one, below.place)):
                with pytest.raises(TypeError, match="to the one that did"):
                    tier.free(place)
                with pytest.raises(TypeError, match="to the one that did"):
                    tier.read(owner, place, CPU, urgent=True)


class TestClosing:
    def test_close_waits_for_copies_and_discards_the_rest(self, make_tier, held):
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
            tier.free(owner.stored)
        with pytest.raises(OffloaderClosedError, match="open"):
            tier.write(owners[0], MIB, None, label="")
        with pytest.raises(ValueError, match="was freed"):
            tier.read(owners[0], owners[0].stored, CPU, urgent=True)

    def test_a_forked_child_has_no_tier(self, make_tier):
        tier = make_tier()
        owner = stored(tier, MIB)

        def use():
            signal.alarm(20)  # a child that waits for a lock must not stay
            tier.free(owner.place)
            tier.arena.free(owner.place.parts[0].extent)
            tier.arena.close()
            with pytest.raises(StorageError):
                tier.write(owner, MIB, None, label="")

        with tier._lock, tier.arena._lock:  # as if other threads held them at the fork
            assert in_a_fork(use) == 0
        tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.is_right()
