"""More guards of the package, each removed once: those that a training meets by chance are brought about here."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.activations.saved_parts import SavedParts
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import AWAY, State
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers import jobs
from lightning_ssd.tiers.base import StoredBytes
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import ArenaMover, DeviceMover, StagedMover
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.tier import Tier
from tests.storage.test_pretended import Passed, offloader
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.pretended import PretendedDevice, PretendedMark
from tests.support.pretended_training import DriveOfDevice, pretended_device
from tests.support.state_stores import CPU, put

_DESCHEDULED_S = 0.2

Remove = Callable[[pytest.MonkeyPatch, PretendedDevice], None]
Scenario = Callable[[Path, PretendedDevice], None]


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """Whose streams get on only while somebody waits."""
    with pretended_device(lag_s=PATIENCE_S) as made:
        yield made


@contextmanager
def held_copies() -> Iterator[None]:
    """Workers wait for no copy of what they have read, and let go of nothing, until the end."""
    may_settle, settle = threading.Event(), jobs.Read._settle

    def late(read: Any, *args: Any) -> Any:
        assert may_settle.wait(PATIENCE_S)
        return settle(read, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Read, "_settle", late)
        yield
        may_settle.set()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came about"
        time.sleep(0.001)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def saved_in_parts(directory: Path, device: PretendedDevice) -> None:
    """Half of a buffer is made after the other was saved, on another stream, by a kernel that bumps no version."""
    x = torch.ones(4096, requires_grad=True)
    with offloader(directory, device) as opened:
        with opened.saved_tensors():
            buffer = torch.zeros(2, 4096)
            first = x * buffer[0]
            with device.stream("side"):
                device.wait_stream("main")
                buffer[1].data.add_(3.0)
                loss = (first * buffer[1]).sum()
            del buffer
        device.wait_stream("side")
        opened.flush()
        loss.backward()


def filled_after_saving(directory: Path, device: PretendedDevice) -> None:
    """An operation saves its noise before its kernel makes it."""
    x = torch.ones(4096, requires_grad=True)
    with offloader(directory, device) as opened:
        with opened.saved_tensors():
            loss = torch.nn.functional.rrelu(x * -2, training=True).sum()
        opened.flush()
        loss.backward()


def read_in_chunks(directory: Path, device: PretendedDevice) -> None:
    """The last copy of several stands for all."""
    x = torch.ones(64 << 10, requires_grad=True)
    with offloader(directory, device) as opened:
        tier = opened._opened()._tiers.ssd
        assert isinstance(tier, SsdTier)
        tier._chunk_bytes = 64 << 10
        with opened.saved_tensors():
            loss = (x * 2).exp().sum()
        opened.flush()
        loss.backward()


def make_late(device: PretendedDevice) -> None:
    """Whoever queues the first copy loses the processor then."""
    copy_in, numbers = device.copy_in, itertools.count()

    def late(*args: Any) -> Any:
        mark = copy_in(*args)
        if next(numbers) == 0:
            time.sleep(_DESCHEDULED_S)
        return mark

    device.copy_in = late  # type: ignore[method-assign]


def read_by_turns(directory: Path, device: PretendedDevice) -> None:
    """One of two workers is late to tell of the copy that it has queued first."""
    make_late(device)
    read_in_chunks(directory, device)


def read_twice(directory: Path, device: PretendedDevice) -> None:
    """A graph is kept: its second backward reads again."""
    x = torch.ones(4096, requires_grad=True)
    with offloader(directory, device) as opened:
        with opened.saved_tensors():
            y = x * 2
            for _ in range(24):
                y = y.sin()
            loss = y.sum()
        opened.flush()
        loss.backward(retain_graph=True)
        loss.backward()


def dropped_and_found(directory: Path, device: PretendedDevice) -> None:
    """What was read ahead is dropped while its copy is queued, and found alive when it is wanted."""
    x = torch.ones(4096, requires_grad=True)
    with offloader(directory, device) as opened:
        with opened.saved_tensors():
            loss = (x * 2).exp().sum()
        opened.flush()
        cache = opened._opened()
        (record,) = (r for r in cache.by_storage.values() if r.state in AWAY)
        with held_copies():
            with cache.accounting.lock:
                record.start_read(CPU, urgent=False)
            wait_until(lambda: record.state is State.RELOADED)
            with cache.accounting.lock:
                record.drop_copy()
            loss.backward()


@contextmanager
def opened_store(directory: Path, device: PretendedDevice) -> Iterator[StateStore]:
    """Of states on the device, with one subgroup."""
    backend, staging = PosixBackend([directory], direct=False), StagingPool()
    mover = StagedMover(backend, staging, device)
    tier = SsdTier(backend, mover, [directory], events=EventLog(), sampler=Sampler("off"))
    store = StateStore([tier], device=CPU, num_slots=2, copies=device)
    store.add([0])
    put(store, 0, 1)
    store.wait_for_writes()
    yield store
    store.close()
    tier.close()
    staging.close()
    backend.close()


def read_for_nobody(directory: Path, device: PretendedDevice) -> None:
    """States are read ahead, and let go of unused."""
    with opened_store(directory, device) as store, held_copies():
        store.prefetch([0])
        wait_until(lambda: bool(store.in_memory()) and store._homes[0].mark is not None)
        store.evict([0])


class Impatient(Owner):
    """Frees what it has read as soon as it is told."""

    tier: Tier

    def read_ended(self, *args: Any) -> None:
        self.tier.free(self.place)
        super().read_ended(*args)


def there_and_back(owner: Impatient, tier: Tier, device: PretendedDevice) -> None:
    owner.tier = tier
    assert tier.write(owner, 256 << 10, device.mark(), label="a storage")
    owner.wait()
    tier.read(owner, owner.place, CPU, urgent=False)
    owner.wait()
    tier.close()


def through_host_memory(directory: Path, device: PretendedDevice) -> None:
    there_and_back(
        Impatient(random_storage(256 << 10)), HostTier(8 << 20, device, pin=False, events=EventLog()), device
    )


def past_the_host(directory: Path, device: PretendedDevice) -> None:
    """As with GPUDirect Storage: the drive reads and writes memory of the device, outside of any stream."""
    backend = DriveOfDevice(PosixBackend([directory], direct=False), device)
    tier = SsdTier(backend, DeviceMover(backend, device), [directory], events=EventLog(), sampler=Sampler("off"))
    there_and_back(Impatient(random_storage(256 << 10)), tier, device)
    backend.close()


SCENARIOS: dict[str, Scenario] = {
    "parts": saved_in_parts,
    "filled": filled_after_saving,
    "chunks": read_in_chunks,
    "turns": read_by_turns,
    "twice": read_twice,
    "dropped": dropped_and_found,
    "unused": read_for_nobody,
    "host": through_host_memory,
    "direct": past_the_host,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name: str, tmp_path: Path, device: PretendedDevice) -> None:
    SCENARIOS[name](tmp_path, device)
    device.close()
    assert device.faults == []


# -- guards ------------------------------------------------------------------------------------------------------------


def without_mark_of_later_parts(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """All of a storage is taken for ready with its first part."""
    patch.setattr(SavedParts, "covers", lambda parts, tensor: True)


def without_mark_taken_again(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """What an operation saves is taken for made."""
    patch.setattr(PretendedMark, "again", lambda mark: mark)


def without_mark_of_last_copy(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """That of the first one is handed over."""
    bring = jobs.Read._bring

    def first(read: Any, *args: Any) -> Any:
        before, settle = read._mark, bring(read, *args)
        read._mark = before or read._mark
        return settle

    patch.setattr(jobs.Read, "_bring", first)


def unordered(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """The last one to tell of its copy need not be the last one to queue it."""
    init = jobs.Read.__init__

    def without(read: Any, *args: Any, **kwargs: Any) -> None:
        init(read, *args, **kwargs)
        read._order = nullcontext()

    patch.setattr(jobs.Read, "__init__", without)


def without_mark_of_second_read(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """That of the first one is taken for all."""
    ended = SavedStorage.read_ended

    def stale(record: SavedStorage, storage: Any, mark: Any, error: Any) -> None:
        first = None if record.copy is None else record.copy.mark
        ended(record, storage, mark if first is None else first, error)

    patch.setattr(SavedStorage, "read_ended", stale)


def without_mark_of_dropped(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """The mark goes with the memory."""
    drop = SavedStorage.drop_copy

    def and_forget(record: SavedStorage) -> None:
        drop(record)
        if record.copy is not None:
            record.copy.mark = None

    patch.setattr(SavedStorage, "drop_copy", and_forget)


def without_wait_for_unused(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A slot is lent again while it is being read into."""
    came_up = StateStore._came_up

    def passed(store: Any, read: Any, storage: Any, mark: Any, error: Any) -> None:
        came_up(store, read, storage, Passed(mark), error)

    patch.setattr(StateStore, "_came_up", passed)


def without_mark_of_slots(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A read of states begins while kernels of the memory's former owner are queued."""
    first, read = device.mark(), SsdTier.read
    patch.setattr(SsdTier, "read", lambda *args, **options: read(*args, **options | {"after": first}))


def without_mark_of_host_reads(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """The same of reads from host memory."""
    first, allocate = device.mark(), ArenaMover.allocate
    patch.setattr(ArenaMover, "allocate", lambda *args: (allocate(*args)[0], first))


def without_hold_of_extents(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Host memory is free when its owner says so, whoever reads it."""

    def free(tier: Any, stored: StoredBytes) -> None:
        if not stored.is_freed:
            stored.is_freed = True
            stored.readers.add(tier)
            tier.free_parts(stored.parts)

    patch.setattr(HostTier, "free", free)


def without_wait_of_drive(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A drive reads memory that has not been written yet."""
    mark = device.mark
    patch.setattr(device, "mark", lambda: Passed(mark()))


def without_wait_of_direct_reads(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A drive fills memory that kernels of its former owner still use."""
    allocate = DeviceMover.allocate

    def passed(*args: Any) -> Any:
        storage, mark = allocate(*args)
        return storage, Passed(mark)

    patch.setattr(DeviceMover, "allocate", passed)


GUARDS: dict[str, tuple[str, Remove, str]] = {
    "a later part takes a new mark": ("parts", without_mark_of_later_parts, "out uses memory before side has"),
    "a mark is taken again when the operation is over": (
        "filled",
        without_mark_taken_again,
        "out uses memory before main has",
    ),
    "the last mark stands for all": ("chunks", without_mark_of_last_copy, "main uses memory before in has"),
    "copies are queued and told of in one order": ("turns", unordered, "main uses memory before in has"),
    "a second read has a mark of its own": ("twice", without_mark_of_second_read, "main uses memory before in has"),
    "a dropped copy keeps its mark": ("dropped", without_mark_of_dropped, "main uses memory before in has"),
    "an unused slot waits for its read": ("unused", without_wait_for_unused, "a slot was given back while"),
    "a slot's read waits for the allocation": ("unused", without_mark_of_slots, "in uses memory before main has"),
    "host: copy-in waits for the allocation": ("host", without_mark_of_host_reads, "in uses memory before main has"),
    "host: extents are held": ("host", without_hold_of_extents, "host memory was given back while"),
    "direct: a write waits for the producer": ("direct", without_wait_of_drive, "the drive uses memory before main"),
    "direct: a read waits for the allocation": (
        "direct",
        without_wait_of_direct_reads,
        "the drive uses memory before main",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_that_is_removed_is_missed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of a few attempts: on a busy machine workers may come by in the one order that needs no guard."""
    scenario, remove, fault = GUARDS[name]
    faults: set[str] = set()
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with pretended_device(lag_s=PATIENCE_S) as device, monkeypatch.context() as patch:
            remove(patch, device)
            SCENARIOS[scenario](directory, device)
            device.close()
        faults.update(device.faults)
        if any(fault in text for text in faults):
            return
    pytest.fail(f"nobody has missed it; faults: {faults}")
