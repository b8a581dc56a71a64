"""Streams and drives of a pretended device: nothing races, and each guard of the package, once removed, is missed."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn

from lightning_ssd.activations.hooks import SavedTensorHooks
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import AWAY, State
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.pools import SlabPool, StagingPool
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers import jobs
from lightning_ssd.tiers.copy_paths import ArenaMover, StagedMover
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.tier import Tier
from tests.parity import models
from tests.support.helpers import DRAINED, EAGER, assert_identical, assert_parity
from tests.support.host_traffic import wait_until
from tests.support.opened import offloader_in
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.pretended import PretendedMark
from tests.support.pretended_training import WatchedBackend, on, poisoned_memory, pretended_device
from tests.support.sines import sines
from tests.support.ssd_tiers import ssd_tier
from tests.support.state_stores import CPU, put

pytestmark = pytest.mark.usefixtures("small_subgroups")

_DESCHEDULED_S = 0.2


@contextmanager
def opened(directory, device, **policy):
    """Open an offloader; without a directory there is none, and a scenario computes what is expected."""
    if directory is None:
        yield None
        return
    settings = {"activations": "offload", "min_tensor_bytes": 0, "host_memory": 0, **policy}
    with offloader_in(directory, **settings, **on(device)) as offloader:
        yield offloader


@contextmanager
def forward(offloader):
    """Everything goes to the drive before it is wanted back."""
    with nullcontext() if offloader is None else offloader.saved_tensors():
        yield
    if offloader is not None:
        offloader.flush()


@contextmanager
def held_copies():
    """Workers wait for no copy of what they have read, and let go of nothing, until the end."""
    may_settle, settle = threading.Event(), jobs.Read._settle

    def late(read, *args):
        assert may_settle.wait(PATIENCE_S)
        return settle(read, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Read, "_settle", late)
        yield
        may_settle.set()


def leaf(num=4096):
    return torch.linspace(-1, 1, num).requires_grad_()


# -- scenarios ---------------------------------------------------------------------------------------------------------


def perceptron(directory, device, **policy):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(320, 320), nn.GELU()) for _ in range(4)))
    batch, gradients = torch.randn(64, 320), []
    with opened(directory, device, **policy) as offloader:
        for _ in range(2):
            with forward(offloader):
                loss = module(batch).square().mean()
            loss.backward()
            if offloader is not None:
                offloader.end_backward()
            gradients += [parameter.grad.clone() for parameter in module.parameters()]
    return gradients


def states(directory, device):
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(128, 150, generator=generator)) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    with opened(directory, device, activations="keep", optimizer_states="offload") as offloader:
        if offloader is not None:
            optimizer = offloader.offload_optimizer(optimizer)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def two_streams(directory, device):
    """What one stream has made another one saves; what that one has brought up the first one uses."""
    x = leaf(256 * 256)
    with opened(directory, device) as offloader:
        with forward(offloader):
            y = (x * 2).exp()
            with device.stream("side"):
                device.wait_stream("main")
                z = (y * y).sin().sin()
            device.wait_stream("side")
            loss = (z * z).cos().sum()
            del y, z
        loss.backward()
    return [x.grad]


def two_backwards(directory, device):
    """What one stream has read ahead another one uses."""
    x = leaf(256 * 256)
    with opened(directory, device) as offloader:
        with forward(offloader):
            y = (x * 2).exp().sin().sin().sin()
            loss = (y * y).cos().sum()
        with device.stream("side"):
            device.wait_stream("main")
            (gradient,) = torch.autograd.grad(loss, y, retain_graph=True)
        device.wait_stream("side")
        y.backward(gradient)
    return [x.grad]


def saved_in_parts(directory, device):
    """Half of a buffer is made after the other was saved, on another stream, by a kernel that bumps no version."""
    x = leaf()
    with opened(directory, device) as offloader:
        with forward(offloader):
            buffer = torch.zeros(2, 4096)
            first = x * buffer[0]
            with device.stream("side"):
                device.wait_stream("main")
                buffer[1].data.add_(3.0)
                loss = (first * buffer[1]).sum()
            del buffer
        device.wait_stream("side")
        loss.backward()
    return [x.grad]


def filled_after_saving(directory, device):
    """An operation saves its noise before its kernel makes it."""
    x = leaf()
    torch.manual_seed(0)
    with opened(directory, device) as offloader:
        with forward(offloader):
            loss = nn.functional.rrelu(x * -2, training=True).sum()
        loss.backward()
    return [x.grad]


def read_in_chunks(directory, device, *, is_late=False):
    """The last copy of several stands for all, also where the worker that queues the first one loses the processor."""
    copy_in, numbers, x = device.copy_in, itertools.count(), leaf(64 << 10)

    def late(*args):
        mark = copy_in(*args)
        time.sleep(_DESCHEDULED_S if next(numbers) == 0 else 0)
        return mark

    if is_late:
        device.copy_in = late
    with opened(directory, device) as offloader:
        if offloader is not None:
            offloader._opened()._tiers.ssd._chunk_bytes = 64 << 10
        with forward(offloader):
            loss = (x * 2).exp().sum()
        loss.backward()
    return [x.grad]


def read_twice(directory, device):
    """A graph is kept: its second backward reads again."""
    x = leaf()
    with opened(directory, device) as offloader:
        with forward(offloader):
            loss = sines(x, 24).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    return [x.grad]


def dropped_and_found(directory, device):
    """What was read ahead is dropped while its copy is queued, and found alive when it is wanted."""
    x = leaf()
    with opened(directory, device) as offloader:
        with forward(offloader):
            loss = (x * 2).exp().sum()
        if offloader is None:
            loss.backward()
            return [x.grad]
        cache = offloader._opened()
        (record,) = (r for r in cache.accounting.by_storage.values() if r.state in AWAY)
        with held_copies():
            with cache.accounting.lock:
                record.start_reads([record], CPU, urgent=False)
            wait_until(lambda: record.state is State.RELOADED)
            with cache.accounting.lock:
                record.drop_copy()
            loss.backward()
    return [x.grad]


def read_for_nobody(directory, device):
    """States are read ahead, and let go of unused."""
    with tier_of("ssd", directory, device) as tier, ExitStack() as stack:
        store = StateStore(tier, device=CPU, num_slots=2, copies=device)
        stack.callback(store.close)
        store.add(1)
        put(store, 0, 1)
        store.wait_for_writes()
        with held_copies():
            store.prefetch([0])
            wait_until(lambda: bool(store.in_memory()) and store._homes[0].mark is not None)
            store.evict([0])


def slabs(nbytes, register):
    """Made in another thread, which the device does not watch."""
    with ThreadPoolExecutor(1) as maker:
        return maker.submit(SlabPool, CPU, nbytes, 4, register).result()


@contextmanager
def tier_of(name, directory, device):
    if name == "host":
        yield (host := HostTier(8 << 20, device, pin=False, events=EventLog()))
        host.close()
        return
    registered = []

    def register(slab):
        registered.append(slab)
        return lambda: registered.remove(slab)

    # As with GPUDirect Storage: the drive reads and writes slabs.
    staging = slabs(1 << 20, register) if name == "direct" else StagingPool()
    with closing(staging):
        backend = WatchedBackend(PosixBackend([directory], direct=False), device)
        with ssd_tier(backend, directory, mover=StagedMover(backend, staging, device)) as ssd:
            yield ssd
        assert bool(registered) == (name == "direct")
    assert not registered


class Hasty(Owner):
    """Drops and frees all that it has as soon as it is told, as a graph that dies meanwhile."""

    tier: Tier

    def write_ended(self, stored, error):
        self.storage = None
        super().write_ended(stored, error)

    def read_ended(self, storage, mark, error):
        assert error is None
        self.tier.free(self.place)
        super().read_ended(None, None, None)


def through(name):
    def there_and_back(directory, device):
        with tier_of(name, directory, device) as tier:
            for seed in range(3):
                owner = Hasty(random_storage(256 << 10, seed))
                owner.tier = tier
                assert tier.write(owner, 256 << 10, device.mark(), label=f"storage {seed}")
                owner.wait()
                tier.read(owner, owner.place, CPU, urgent=False)
                owner.wait()

    return there_and_back


def through_slabs(directory, device):
    """As with GPUDirect Storage."""

    def open_staging(backend, on, *, nbytes, count):
        return slabs(nbytes, lambda slab: lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ssd._assembly.open_staging", open_staging)
        return perceptron(directory, device)


SCENARIOS = {
    "activations": perceptron,
    "slabs": through_slabs,
    "verified": lambda directory, device: perceptron(directory, device, verify="full"),
    "states": states,
    "streams": two_streams,
    "backwards": two_backwards,
    "parts": saved_in_parts,
    "filled": filled_after_saving,
    "chunks": read_in_chunks,
    "turns": lambda directory, device: read_in_chunks(directory, device, is_late=True),
    "twice": read_twice,
    "dropped": dropped_and_found,
    "unused": read_for_nobody,
    **{name: through(name) for name in ("ssd", "host", "direct")},
}
WITHOUT_RESULT = ("unused", "ssd", "host", "direct")


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name, spill_dir):
    with pretended_device(lag_s=PATIENCE_S) as device:  # its streams get on only while somebody waits
        expected = None if name in WITHOUT_RESULT else SCENARIOS[name](None, device)
        got = SCENARIOS[name](spill_dir, device)
        device.close()
    assert device.faults == []
    assert device.num_copies > 0
    assert_identical(got, expected)


# -- guards ------------------------------------------------------------------------------------------------------------


class Passed:
    """A mark for which nobody waits: it says that it has passed, and the streams still know where it is."""

    stream = None

    def __init__(self, mark):
        self.clock, self._mark = mark.clock, mark

    @property
    def passed(self):
        return bool(self._mark.passed)

    def synchronize(self):
        """Not at all."""

    def query(self):
        return False


def always(value):
    return lambda *_: value


def passed(make):
    return lambda *args: Passed(make(*args))


def old_mark(owner):
    """Copies into memory begin while kernels of its former owner are queued."""

    def remove(patch, device):
        first, allocate = device.mark(), owner.allocate
        patch.setattr(owner, "allocate", lambda *args: (allocate(*args)[0], first))

    return remove


def without_protection_of_reloads(patch, device):
    protect = device.protect

    def of_saved(tensor):
        if device._memory(tensor.untyped_storage()).written[0] != "in":
            protect(tensor)

    patch.setattr(device, "protect", of_saved)


def without_mark_of_last_copy(patch, device):
    bring = jobs.Read._bring

    def first(read, incoming, *args):
        before, settle = incoming.mark, bring(read, incoming, *args)
        incoming.mark = before or incoming.mark
        return settle

    patch.setattr(jobs.Read, "_bring", first)


def unordered(patch, device):
    """The last one to tell of its copy need not be the last one to queue it."""
    init = jobs.Read.__init__

    def without(read, *args, **kwargs):
        init(read, *args, **kwargs)
        read._order = nullcontext()

    patch.setattr(jobs.Read, "__init__", without)


def without_mark_of_second_read(patch, device):
    ended = SavedStorage.all_read

    def stale(ends):
        first = [record.mark for record, *_ in ends]
        ended([(record, got, old or new, error) for (record, got, new, error), old in zip(ends, first, strict=True)])

    patch.setattr(SavedStorage, "all_read", stale)


def without_mark_of_dropped(patch, device):
    drop = SavedStorage.drop_copy

    def and_forget(record):
        drop(record)
        record.mark = None

    patch.setattr(SavedStorage, "drop_copy", and_forget)


def without_wait_for_unused(patch, device):
    came_up = StateStore._came_up
    patch.setattr(
        StateStore, "_came_up", lambda store, read, got, mark, error: came_up(store, read, got, Passed(mark), error)
    )


def without_mark_of_slots(patch, device):
    first, read = device.mark(), SsdTier.read
    patch.setattr(SsdTier, "read", lambda *args, **options: read(*args, **options | {"after": first}))


def without_hold_of_extents(patch, device):
    def free_all(tier, places):
        for stored in places:
            if not stored.is_freed:
                stored.is_freed = True
                stored.readers = (tier,)
                tier.free_parts(stored.parts)

    patch.setattr(HostTier, "free_all", free_all)


def without(name):
    """A worker lets go of what it has, when the copy is only queued."""
    return lambda patch, device: patch.setattr(device, name, passed(getattr(device, name)))


OUT, IN = without("copy_out"), without("copy_in")


def no_wait(patch, device):
    patch.setattr(device, "wait_on_current_stream", always(None))


GUARDS = {
    "copy-out waits for the producer": (
        "activations",
        lambda patch, device: patch.setattr(SavedTensorHooks, "_mark", always(device.mark())),
        "out uses memory before main has written it",
    ),
    "write of states waits for the update": (
        "states",
        lambda patch, device: patch.setattr(device, "mark", always(device.mark())),
        "before main has written it",
    ),
    "slabs: file waits for copy-out": ("slabs", OUT, "the file got a buffer while a copy uses"),
    "slabs: staging is held until copy-in": ("slabs", IN, "a staging buffer was given back while"),
    "file waits for copy-out": ("activations", OUT, "the file got a buffer while a copy uses"),
    "checksum waits for copy-out": ("verified", OUT, "a checksum was computed while"),
    "staging is held until copy-out": ("activations", OUT, "a staging buffer was given back while"),
    "tensor is held until copy-out": ("activations", OUT, "freed before its copy out had passed"),
    "slot is held until copy-out": ("states", OUT, "a slot was given back while"),
    "copy-in waits for the allocation": (
        "activations",
        old_mark(StagedMover),
        "in uses memory before main has written",
    ),
    "consumer waits for copy-in": ("activations", no_wait, "main uses memory before in has written it"),
    "update waits for copy-in": ("states", no_wait, "main uses memory before in has written it"),
    "staging is held until copy-in": ("activations", IN, "a staging buffer was given back while"),
    "users are recorded": (
        "streams",
        lambda patch, device: patch.setattr(device, "protect", always(None)),
        "memory could be lent again",
    ),
    "users of reloads are recorded": ("backwards", without_protection_of_reloads, "memory could be lent again"),
    "a later part takes a new mark": (
        "parts",
        lambda patch, device: patch.setattr(SavedStorage, "shares_with_others", always(True)),
        "out uses memory before side has",
    ),
    "a mark is taken again when the operation is over": (
        "filled",
        lambda patch, device: patch.setattr(PretendedMark, "again", lambda mark: mark),
        "out uses memory before main has",
    ),
    "the last mark stands for all": ("chunks", without_mark_of_last_copy, "main uses memory before in has"),
    "copies are queued and told of in one order": ("turns", unordered, "main uses memory before in has"),
    "a second read has a mark of its own": ("twice", without_mark_of_second_read, "main uses memory before in has"),
    "a dropped copy keeps its mark": ("dropped", without_mark_of_dropped, "main uses memory before in has"),
    "an unused slot waits for its read": ("unused", without_wait_for_unused, "a slot was given back while"),
    "a slot's read waits for the allocation": ("unused", without_mark_of_slots, "in uses memory before main has"),
    "ssd: tensor is held until copy-out": ("ssd", OUT, "freed before its copy out"),
    "ssd: tensor is held until copy-in": ("ssd", IN, "freed before its copy in"),
    "host: tensor is held until copy-out": ("host", OUT, "freed before its copy out"),
    "host: tensor is held until copy-in": ("host", IN, "freed before its copy in"),
    "host: memory is held until copy-in": ("host", IN, "host memory was given back while"),
    "host: copy-in waits for the allocation": ("host", old_mark(ArenaMover), "in uses memory before main has"),
    "host: extents are held": ("host", without_hold_of_extents, "host memory was given back while"),
    "direct: file waits for copy-out": ("direct", OUT, "the file got a buffer while a copy uses"),
    "direct: slab is held until copy-out": ("direct", OUT, "a staging buffer was given back while"),
    "direct: slab is held until copy-in": ("direct", IN, "a staging buffer was given back while"),
    "direct: copy-in waits for the allocation": ("direct", old_mark(StagedMover), "in uses memory before main has"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_that_is_removed_is_missed(name, tmp_path, monkeypatch):
    """In one of a few attempts: on a busy machine workers may come by in the one order that needs no guard."""
    scenario, remove, fault = GUARDS[name]
    faults = set()
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with pretended_device(lag_s=PATIENCE_S) as device, monkeypatch.context() as patch:
            remove(patch, device)
            with suppress(*(StorageError,) * (scenario in ("verified", "states"))):  # wrong checksums
                SCENARIOS[scenario](directory, device)
            device.close()
        faults.update(device.faults)
        if any(fault in text for text in faults):
            return
    pytest.fail(f"nobody has missed it; faults: {faults}")


def test_a_host_that_touches_memory_of_the_device_is_seen():
    with pretended_device(lag_s=PATIENCE_S) as device:
        x = torch.ones(4096) + 1
        device.host_used(Region.of(x.untyped_storage()), what="a checksum was computed", is_write=False)
        assert [fault.split(" (")[0] for fault in device.faults] == [
            "a checksum was computed: this is memory of the device"
        ]


def test_training_in_poisoned_host_memory_is_exact(spill_dir):
    """Without streams: reloads on a CPU go to memory of a pool."""
    with poisoned_memory() as poisoned:
        assert_parity(models.checkpointed("alternate"), spill_dir, setups=[DRAINED, EAGER])
        assert_parity(models.FAMILIES["convolutions-channels-last"](), spill_dir, setups=[DRAINED])
    assert poisoned, "no memory came back"
