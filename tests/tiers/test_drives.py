"""Several directories of one tier: each worker that is free writes the next chunk to its own."""

import errno
import os
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager

import pytest
import torch

from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from lightning_ssd.tiers.checksum import Sampler
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.support.faults import eio
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.ssd_tiers import ssd_tier

CHUNK = 64 << 10
MIB = 1 << 20
CPU = torch.device("cpu")


class Drives(WrappedBackend):
    """Directories that take a time of their own for each chunk, refuse writes, or are full."""

    def __init__(self, directories, seconds=None):
        super().__init__(PosixBackend(directories, direct=False))
        self.seconds = seconds or {}
        self.refusing = set()
        self.full = set()
        self.writes = Counter()
        self.reads = Counter()
        self.names = {}

    def open_arena(self, directory):
        arena = super().open_arena(directory)
        allocate, name = arena.allocate, directory.name
        self.names[id(arena)] = name

        def allocated(nbytes):
            if name in self.full:
                raise OutOfSpaceError(f"{name} is full")
            return allocate(nbytes)

        arena.allocate = allocated
        return arena

    def write(self, arena, region, offset):
        name = self.names[id(arena)]
        self.writes[name] += 1
        if name in self.refusing:
            raise eio()
        time.sleep(self.seconds.get(name, 0.0))
        super().write(arena, region, offset)

    def read(self, arena, region, offset):
        name = self.names[id(arena)]
        self.reads[name] += 1
        time.sleep(self.seconds.get(name, 0.0))
        super().read(arena, region, offset)


@contextmanager
def tier_on(tmp_path, names, seconds=None, **settings):
    directories = [tmp_path / name for name in names]
    for directory in directories:
        directory.mkdir()
    drives = Drives(directories, seconds)
    with ssd_tier(drives, *directories, **{"sampler": Sampler("full"), "chunk_bytes": CHUNK} | settings) as tier:
        yield tier, drives


def write_all(tier, sizes):
    owners = [Owner(random_storage(nbytes, seed)) for seed, nbytes in enumerate(sizes)]
    for owner in owners:
        assert tier.write(owner, owner.storage.nbytes(), None, label="one")
    tier.flush()
    return owners


def read_all(tier, owners):
    reads = [tier.read(owner, owner.place, CPU, urgent=False) for owner in owners]
    for read, owner in zip(reads, owners, strict=True):
        read.wait()
        assert owner.is_right()
        tier.free(owner.place)


SIZES = [CHUNK, 7 * CHUNK + 4097, 3, 4096, 40 * CHUNK, CHUNK - 1, 0, 12 * CHUNK + 17]


def test_bytes_come_back_whatever_drives_they_lie_on(tmp_path):
    with tier_on(tmp_path, "abc") as (tier, drives):
        for _ in range(3):  # room that was freed is used again
            read_all(tier, write_all(tier, SIZES))
        assert set(drives.writes) == {"a", "b", "c"}
        assert all(arena.used_bytes == 0 for arena in tier._arenas)


def test_one_storage_is_spread_over_all_drives(tmp_path):
    with tier_on(tmp_path, "abcd", dict.fromkeys("abcd", 0.01)) as (tier, drives):
        read_all(tier, write_all(tier, [32 * CHUNK + 4096]))
        assert min(drives.writes.values()) >= 4
        assert drives.reads == drives.writes


def test_a_slow_drive_gets_less_and_slows_no_other(tmp_path):
    with tier_on(tmp_path, "ab", {"a": 0.004, "b": 0.04}) as (tier, drives):
        owners = write_all(tier, [4 * CHUNK + 4096] * 20)
        assert drives.writes["a"] > 3 * drives.writes["b"] > 0
        read_all(tier, owners)


def test_a_drive_that_becomes_slow_gets_less_from_then_on(tmp_path):
    with tier_on(tmp_path, "ab", {"a": 0.004, "b": 0.004}) as (tier, drives):
        write_all(tier, [4 * CHUNK + 4096] * 10)
        assert min(drives.writes.values()) > 10
        drives.seconds["b"], before = 0.08, drives.writes.copy()
        read_all(tier, write_all(tier, [4 * CHUNK + 4096] * 10))
        assert drives.writes["b"] - before["b"] < (drives.writes["a"] - before["a"]) / 2


def test_a_drive_that_refuses_writes_gets_no_more(tmp_path, caplog):
    with tier_on(tmp_path, "abc", dict.fromkeys("abc", 0.001)) as (tier, drives):
        before = write_all(tier, [8 * CHUNK + 4096] * 2)
        drives.refusing.add("b")
        drives.writes.clear()
        after = write_all(tier, [8 * CHUNK + 4096] * 4)
        assert 1 <= drives.writes["b"] <= 2, "one for each of its workers, which may both be at it"
        assert "is written to no more, after" in caplog.text
        read_all(tier, before + after)  # it still gives what it has
        assert all(arena.used_bytes == 0 for arena in tier._arenas)


@pytest.mark.parametrize(("refusing", "full"), [("ab", ""), ("", "ab"), ("b", "a")])
def test_where_all_refuse_or_are_full_the_owner_keeps_what_it_has(refusing, full, tmp_path):
    with tier_on(tmp_path, "ab") as (tier, drives):
        drives.refusing |= set(refusing)
        drives.full |= set(full)
        (owner,) = write_all(tier, [CHUNK + 4096])
        assert isinstance(owner.error, OSError if refusing else OutOfSpaceError)
        assert drives.writes["b"] <= 2, "once for each chunk, not without end"
        assert all(arena.used_bytes == 0 for arena in tier._arenas)


def test_a_full_drive_is_passed_over_until_it_has_room(tmp_path):
    with tier_on(tmp_path, "ab", dict.fromkeys("ab", 0.001)) as (tier, drives):
        drives.full.add("a")
        read_all(tier, write_all(tier, [8 * CHUNK + 4096] * 2))
        assert set(drives.writes) == {"b"}
        drives.full.clear()
        read_all(tier, write_all(tier, [8 * CHUNK + 4096] * 2))
        assert drives.writes["a"] > 0


def test_a_tier_begins_with_the_directory_that_is_preferred_and_uses_all(tmp_path):
    with tier_on(tmp_path, "abcd", dict.fromkeys("abcd", 0.01), order=[2, 0, 3, 1]) as (tier, drives):
        write_all(tier, [CHUNK])
        assert set(drives.writes) == {"c"}
        write_all(tier, [32 * CHUNK])
        assert min(drives.writes[name] for name in "abcd") >= 4


def test_where_the_preferred_directory_is_full_the_next_one_gets_what_it_refuses(tmp_path):
    with tier_on(tmp_path, "abcd", order=[2, 0, 3, 1]) as (tier, drives):
        drives.full.add("c")
        write_all(tier, [CHUNK])
        assert set(drives.writes) == {"a"}


def test_room_is_taken_wherever_it_is(small_disk):
    directories = [small_disk(mebibytes) for mebibytes in (20, 28, 64)]
    with ssd_tier(PosixBackend(directories), *directories, chunk_bytes=MIB) as tier:
        free = [facts.f_bavail * facts.f_frsize for facts in map(os.statvfs, directories)]
        need = sum(free) - 3 * MIB
        assert need / 3 > free[1], "an equal part fits two of them"
        assert free[2] < need, "what these two refuse fits the third"
        tier.reserve(need, "states")
        assert need <= tier.disk_bytes < need + 3 * MIB
        owners = write_all(tier, [MIB] * (need // MIB - 3))
        assert tier.disk_bytes < need + 3 * MIB, "a file had to grow"
        read_all(tier, owners)
        with pytest.raises(OutOfSpaceError, match=r"states need [\d,]+ bytes; [\d,]+ of them have no place"):
            tier.reserve(need + 8 * MIB, "states")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_drive_whose_file_cannot_grow_gets_no_more(number, tmp_path):
    with tier_on(tmp_path, "ab") as (tier, drives):

        def refuse(nbytes):
            raise OSError(number, "no")

        tier._arenas[0].allocate = refuse
        read_all(tier, write_all(tier, [8 * CHUNK + 4096] * 3))
        assert set(drives.writes) == {"b"}
        assert tier._refusing == {0}


def test_events_tell_what_each_drive_has_moved(tmp_path):
    events = EventLog()
    with tier_on(tmp_path, "ab", dict.fromkeys("ab", 0.002), events=events) as (tier, _):
        owners = write_all(tier, [16 * CHUNK + 4096])
        moved = events.drain()
        assert {event.drive for event in moved} == {0, 1}
        body = owners[0].place.body_nbytes
        assert sum(event.nbytes for event in moved) == body == tier.progress().written_bytes


def test_closing_drains_what_has_begun_on_every_drive(tmp_path):
    with tier_on(tmp_path, "abc", dict.fromkeys("abc", 0.01)) as (tier, _):
        owners = [Owner(random_storage(12 * CHUNK, seed)) for seed in range(6)]
        for owner in owners:
            tier.write(owner, 12 * CHUNK, None, label="one")
        time.sleep(0.02)
        tier.close()
        for owner in owners:
            assert owner.error is None or not isinstance(owner.error, OSError)


def test_the_probe_uses_all_drives_at_once_by_their_speed(tmp_path, monkeypatch):
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    drives = Drives(directories, {"a": 0.005, "b": 0.05})
    has_begun, write = {name: threading.Event() for name in "ab"}, drives.write

    def write_together(arena, region, offset):
        has_begun[arena.directory.name].set()
        assert all(event.wait(PATIENCE_S) for event in has_begun.values()), "one drive after the other"
        write(arena, region, offset)

    monkeypatch.setattr(drives, "write", write_together)
    with closing(drives):
        drives.full.add("c")
        rates = measure_rates(drives, directories)
        assert min(rates.write_per_s, rates.read_per_s) > 0
        assert drives.writes["a"] > drives.writes["b"] > drives.writes["c"] == drives.reads["c"] == 0
        assert drives.reads["a"] > drives.reads["b"]  # the slow one may have left all of the second round to the other
        drives.full |= {"a", "b"}
        with pytest.raises(OutOfSpaceError):
            measure_rates(drives, directories)
