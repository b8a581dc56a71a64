"""A device without a device: its streams do what they are told late and in any order, and every race is a fault.

The operations of PyTorch run at once, on the CPU. Whether a real device could have run them in another order is decided
as race detectors do: each stream knows how far it has waited for the others, and each access to memory must come after
those that it conflicts with. What a missing wait would have read is poisoned, too, so that the bits tell.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_ssd.common.tensors import Region, StorageKey
from tests.support.patience import PATIENCE_S

POISON = 0xFF
Clock = dict[str, int]
"""How much of each stream's work is known to have passed."""


def poison(region):
    """Nobody may read this any more."""
    ctypes.memset(region.address, POISON, region.nbytes)


def _where_it_is(address):
    return address


def _join(clock, other):
    for stream, position in other.items():
        clock[stream] = max(clock.get(stream, 0), position)


def _overlap(one, other):
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


class PretendedMark:
    """A point in a stream's work."""

    def __init__(self, device, clock):
        self._device = device
        self.clock = clock
        self.stream = ""
        self.passed = False
        self.passed_s = 0.0

    def synchronize(self):
        """The host waits, and so knows."""
        self._device.reach(self)
        self._device.known_to_host(self)

    def query(self):
        """The host knows, if it has passed. Now and then it is told so later than it could be."""
        if not self.passed or self._device.is_slow_to_tell():
            return False
        self._device.known_to_host(self)
        return True

    def again(self):
        """The stream's present end."""
        return self._device.mark(self.stream)


@dataclass(eq=False)
class _Item:
    """What a stream does when it gets there; without memory, only to be marked."""

    mark: PretendedMark
    after: PretendedMark | None = None
    storage: StorageKey | None = None
    """Held weakly: the device does not keep memory alive for a copy."""
    offset: int = 0
    host: Region | None = None
    is_out: bool = False
    is_valid: bool = True

    def position(self, stream):
        return self.mark.clock[stream]


@dataclass(eq=False)
class _Memory:
    """Memory of the device: who has used it up to where."""

    key: StorageKey
    region: Region
    stream: str
    """That it was allocated on."""
    written: tuple[str, int]
    reads: Clock = field(default_factory=dict)
    users: set[str] = field(default_factory=set)
    protected: set[str] = field(default_factory=set)
    is_moved: bool = False


class PretendedDevice:
    """Takes the place of ``CudaCopies``. A stream's work is done only when somebody waits, or after ``lag_s``.

    Args:
        seed: of the order in which the streams get on.
        lag_s: how long each piece of work is late when nobody waits.
        real: where the bytes at an address can be reached, if not there.
    """

    is_asynchronous = True

    def __init__(self, *, seed=0, lag_s=0.002, real=_where_it_is):
        self.faults = []
        self.num_copies = 0
        self.copy_streams = {"in", "out"}
        """Whoever copies holds the memory himself."""
        self._real = real
        self._lag_s = lag_s
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._queues = {}
        self._clocks = {}
        self._host = {}
        self._under_way = []
        self._memories = {}
        self._local = threading.local()
        self._awaited = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pretended-device", daemon=True)
        self._thread.start()

    def close(self):
        """Do what is left. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a stream waits for ever"
        for memory in self._memories.values():
            if memory.is_moved and memory.users - memory.protected - {memory.stream}:
                self._fault("memory could be lent again that another stream uses")

    # -- as the package sees it ------------------------------------------------------------------------------------

    def mark(self, stream=None):
        with self._changed:
            return self._queue(stream or self.current, _Item(PretendedMark(self, {})))

    def copy_out(self, host, device, after):
        return self.copy("out", host, device, after, is_out=True)

    def copy_in(self, device, host, after):
        return self.copy("in", host, device, after, is_out=False)

    def wait_on_current_stream(self, mark):
        self.wait_for(mark, self.current)

    def is_capturing(self):
        return False

    def protect(self, tensor):
        self.protect_on(self.current, tensor)

    # -- the same of any stream ------------------------------------------------------------------------------------

    def wait_for(self, mark, stream):
        with self._changed:
            if stream in self.copy_streams:
                self._queue(stream, _Item(PretendedMark(self, {}), mark))
                return
            _join(self._clock(stream), mark.clock)
        self.reach(mark)  # operations run at once; the host must not rely on it

    def protect_on(self, stream, tensor):
        with self._changed:
            self._memory(tensor.untyped_storage()).protected.add(stream)

    # -- as the user sees it ---------------------------------------------------------------------------------------

    @property
    def current(self):
        """This thread's stream."""
        return getattr(self._local, "stream", "main")

    @contextmanager
    def stream(self, name):
        """Another one is current."""
        before = self.current
        self.set_stream(name)
        try:
            yield
        finally:
            self.set_stream(before)

    def set_stream(self, name):
        """Make it the current one of this thread."""
        self._local.stream = name

    def wait_stream(self, name):
        """The current stream waits for all that has been queued on another one."""
        with self._changed:
            _join(self._clock(self.current), self._clock(name))

    def launched(self, reads, writes):
        """An operation was queued on the current stream."""
        with self._changed:
            stream = self.current
            clock = self._clock(stream)
            _join(clock, self._seen)
            clock[stream] += 1
            for tensor in reads:
                self._used(self._memory(tensor.untyped_storage()), stream, clock, is_write=False)
            for tensor in writes:
                self._used(self._memory(tensor.untyped_storage()), stream, clock, is_write=True)

    # -- host memory -----------------------------------------------------------------------------------------------

    def host_used(self, region, *, what, is_write, is_end=False):
        """The host, or a drive, reads, writes or frees host memory: no copy may be under way there."""
        with self._changed:
            self._under_way = [(s, item) for s, item in self._under_way if self._host.get(s, 0) < item.position(s)]
            for _, item in self._under_way:
                if item.host is not None and (is_write or item.is_out) and _overlap(item.host, region):
                    self._fault(f"{what} while a copy uses the buffer")
                    item.is_valid = item.is_valid and not is_end
            if not is_end and any(m.key.alive() and _overlap(m.region, region) for m in self._memories.values()):
                self._fault(f"{what}: this is memory of the device")

    def freed(self, region, what):
        """Host memory goes back to its pool."""
        self.host_used(region, what=f"{what} was given back", is_write=True, is_end=True)
        poison(region)

    def given_back(self, storage):
        """Memory of the device goes back to its pool; its next user comes after what the current stream waited for."""
        with self._changed:
            clock = self._clock(self.current)
            for stream, item in self._under_way:
                is_over = max(self._host.get(stream, 0), clock.get(stream, 0)) >= item.position(stream)
                if not is_over and item.storage is not None and item.storage.cdata == storage._cdata:
                    self._fault("a slot was given back while a copy uses it")
                    item.is_valid = False
        self._poison(Region.of(storage))

    def _poison(self, region):
        poison(Region(self._real(region.address), region.nbytes))

    # -- everything below is called with the lock held, but for what the device's thread does -------------------------

    def known_to_host(self, mark):
        """This thread has seen that the mark has passed. What it queues from now on comes after it."""
        with self._changed:
            _join(self._host, mark.clock)
            _join(self._seen, mark.clock)

    def knowledge(self):
        """What this thread knows to have passed; it may tell another one."""
        return dict(self._seen)

    def learn(self, clock):
        """This thread has been told."""
        _join(self._seen, clock)

    def is_slow_to_tell(self):
        """Every other time."""
        with self._changed:
            return self._random.random() < 0.5

    @property
    def _seen(self):
        """What this very thread knows to have passed."""
        if not hasattr(self._local, "seen"):
            self._local.seen = Clock()
        return self._local.seen

    def reach(self, mark):
        """Hurry until the mark has passed."""
        with self._changed:
            self._awaited.append(mark)
            self._changed.notify_all()
            try:
                assert self._changed.wait_for(lambda: mark.passed, PATIENCE_S), "a stream waits for ever"
            finally:
                self._awaited.remove(mark)

    def _fault(self, text):
        self.faults.append(f"{text} (in {threading.current_thread().name})")

    def _clock(self, stream):
        return self._clocks.setdefault(stream, {stream: 0})

    def _memory(self, storage):
        found = self._memories.get(storage._cdata)
        if found is None:
            if len(self._memories) > 4096:
                self._memories = {cdata: m for cdata, m in self._memories.items() if m.is_moved or m.key.alive()}
            found = _Memory(StorageKey(storage), Region.of(storage), self.current, (self.current, 0))
            self._memories[storage._cdata] = found
        found.region = Region.of(storage)
        return found

    def _used(self, memory, stream, clock, *, is_write):
        self._check_written(memory, stream, clock)
        if stream not in self.copy_streams:
            memory.users.add(stream)
        if is_write:
            self._check_reads(memory, stream, clock)
            memory.reads.clear()
            memory.written = stream, clock[stream]
        else:
            memory.reads[stream] = clock[stream]

    def _check_written(self, memory, stream, clock):
        writer, position = memory.written
        if clock.get(writer, 0) < position:
            self._fault(f"{stream} uses memory before {writer} has written it")

    def _check_reads(self, memory, stream, clock):
        for reader, read in memory.reads.items():
            if clock.get(reader, 0) < read:
                self._fault(f"{stream} writes memory that {reader} still reads")

    def _queue(self, stream, item):
        clock = self._clock(stream)
        _join(clock, self._seen)
        if item.after is not None:
            _join(clock, item.after.clock)
        clock[stream] += 1
        item.mark.clock = dict(clock)
        item.mark.stream = stream
        self._queues.setdefault(stream, deque()).append(item)
        self._changed.notify_all()
        return item.mark

    def copy(self, stream, host, device, after, *, is_out):
        """Queue one, of bytes that lie side by side."""
        storage = device.untyped_storage()
        region = Region(host.data_ptr(), host.nbytes)
        offset = device.storage_offset() * device.element_size()
        with self._changed:
            self.num_copies += 1
            num_faults = len(self.faults)
            memory = self._memory(storage)
            item = _Item(PretendedMark(self, {}), after, memory.key, offset, region, is_out)
            self._queue(stream, item)
            self._under_way.append((stream, item))
            memory.is_moved = True
            # Pieces of one storage are written by one stream, so that the last stands for all.
            self._used(memory, stream, item.mark.clock, is_write=not is_out)
            self._poison(region if is_out else Region(storage.data_ptr() + offset, device.nbytes))
            if len(self.faults) > num_faults:
                item.is_valid = False  # the poison stays
        return item.mark

    def _run(self):
        while (found := self._next()) is not None:
            self._do(found)
            with self._changed:
                found.mark.passed, found.mark.passed_s = True, time.perf_counter()
                self._changed.notify_all()
            del found

    def _next(self):
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or (self._is_closed and not any(self._queues.values())))
            if self._ready():
                self._changed.wait_for(self._is_in_a_hurry, self._lag_s)
            ready = self._ready()
            return self._queues[self._random.choice(ready)].popleft() if ready else None

    def _is_in_a_hurry(self):
        return self._is_closed or any(not mark.passed for mark in self._awaited)

    def _ready(self):
        return [name for name, q in self._queues.items() if q and (q[0].after is None or q[0].after.passed)]

    def _do(self, item):
        if item.storage is None or item.host is None:
            return
        storage = item.storage.resolve()
        if storage is None:
            self._fault(f"the tensor was freed before its copy {'out' if item.is_out else 'in'} had passed")
        if storage is None or not item.is_valid:
            return
        address = self._real(storage.data_ptr() + item.offset)
        target, source = (item.host.address, address) if item.is_out else (address, item.host.address)
        ctypes.memmove(target, source, item.host.nbytes)
