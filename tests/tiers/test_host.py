"""Host memory as a tier: exactness with late copies, room, reuse, numbers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lightning_ssd.common.accelerators import CudaAccelerator, GenericAccelerator
from lightning_ssd.errors import StorageError
from lightning_ssd.telemetry.events import EventLog, TransferEvent
from lightning_ssd.tiers.base import WriteRequest
from lightning_ssd.tiers.copy_paths import host_bytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.streams import StreamCopies
from tests.support.host_traffic import CPU, KIB, MIB, MakeTier, stored, wait_until
from tests.support.late import HeldCopies, late_copies
from tests.support.owners import Owner, as_bytes, random_storage
from tests.support.threads import at_once


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_job_is_queued_takes_no_room(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    requests = [WriteRequest(Owner(random_storage(MIB, i)), MIB, None, "") for i in range(4)]
    with monkeypatch.context() as patches:
        patches.setattr(tier._writes, "submit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.write_all(requests)
    assert tier.used_bytes == 0
    assert tier.write_all(requests) == [True] * 4


def test_an_interrupt_while_bytes_are_freed_is_no_second_try(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    owner = stored(tier, MIB)
    with monkeypatch.context() as patches:
        patches.setattr(tier, "free_parts", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.free(owner.place)
    assert owner.place.is_freed  # type: ignore[union-attr]  # so that no one frees it again


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

    def test_a_read_goes_where_it_is_told(self, make_tier: MakeTier) -> None:
        tier, mine = make_tier(), random_storage(5000, 1)
        owner = stored(tier, 5000)
        tier.read(owner, owner.place, CPU, urgent=False, into=mine).wait()
        assert owner.reloaded is mine
        assert owner.is_right()
        with pytest.raises(ValueError, match="has 5,000 bytes, and was to be read into 4,999"):
            tier.read(owner, owner.place, CPU, urgent=False, into=random_storage(4999))
        tier.free(owner.place)
        assert tier.used_bytes == 0

    def test_many_threads_with_late_copies(self, make_tier: MakeTier) -> None:
        with late_copies(max_delay_s=0.001) as copies:
            tier = make_tier(copies, chunk_bytes=256 * KIB)
            run_traffic(tier, wait=lambda owner: copies.wait_on_current_stream(owner.mark), turns=12)
            tier.close()
            assert tier.used_bytes == 0
            assert copies.waited_on

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

    def work(seed: int) -> None:
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

    def test_of_a_job_each_storage_has_room_or_not(self, make_tier: MakeTier) -> None:
        tier = make_tier(capacity=4 * MIB)
        owners = [Owner(random_storage(num * MIB, num)) for num in (3, 2, 1)]
        requests = [WriteRequest(owner, num * MIB, None, "") for owner, num in zip(owners, (3, 2, 1), strict=True)]
        assert tier.write_all(requests) == [True, False, True]
        tier.flush()
        assert [owner.calls for owner in owners] == [["begins", "written"], [], ["begins", "written"]]
        for owner in (owners[0], owners[2]):
            tier.read(owner, owner.place, CPU, urgent=True).wait()
            assert owner.is_right()

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
    @pytest.mark.parametrize("kind", [CudaAccelerator, GenericAccelerator])
    def test_exact_behind_a_busy_stream(self, kind: type[CudaAccelerator | GenericAccelerator]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        accelerator = kind(device)
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
        tier = HostTier(64 * MIB, StreamCopies(CudaAccelerator(device)), pin=True, events=EventLog())
        owner = Owner(torch.ones(MIB, dtype=torch.uint8, device=device).untyped_storage())
        assert tier.write(owner, MIB, None, label="")
        owner.wait()
        ((_, address, nbytes),) = tier.arena.pieces(owner.place.parts[0].extent, MIB, MIB)
        assert host_bytes(address, nbytes).is_pinned()
        tier.close()
