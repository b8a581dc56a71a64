"""Copies from and to the host tier that are in flight, fail, or are closed upon."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog, TransferEvent
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover
from lightning_ssd.tiers.ssd import SsdTier
from tests.support.host_traffic import CPU, KIB, MIB, MakeTier, stored, wait_until
from tests.support.late import HeldCopies
from tests.support.owners import Owner, random_storage


class TestMemoryInFlight:
    def test_an_extent_is_not_reused_before_the_last_of_two_reads(self, make_tier: MakeTier, held: HeldCopies) -> None:
        tier = make_tier(held, capacity=MIB)
        owner, other = stored(tier, MIB), Owner(random_storage(MIB, 9))
        for _ in range(2):
            tier.read(owner, owner.place, CPU, urgent=True).wait()
        assert owner.reloaded is not None
        assert not owner.mark.passed.is_set(), "it is handed over before its copy has run"  # type: ignore[union-attr]
        tier.free(owner.place)
        held.let_through(1)
        time.sleep(0.02)
        assert not tier.write(other, MIB, None, label=""), "the second copy out of it has not run"
        held.let_through(1)
        wait_until(lambda: tier.used_bytes == 0)
        assert owner.is_right()
        assert tier.write(other, MIB, None, label="")

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
                    tier.arena.free(owner.place.parts[0].extent)
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
