"""Single transitions of one saved storage that no ordinary pass goes through in a fixed order."""

import random
import sys
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.operation import Operation
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.activations.saved_storage import Lease, SavedStorage, open_saved
from lightning_ssd.activations.storage_state import AWAY, READY, State
from lightning_ssd.common.inplace_edits import probed
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.streams import HostCopies
from tests.support.patience import PATIENCE_S
from tests.support.ssd_tiers import ssd_tier
from tests.support.threads import at_once


class _Stored:
    body_nbytes = 64
    missing_nbytes = 0
    is_freed = False

    def __init__(self, tier):
        self.tier = tier


class HooksThatKeepNothing:
    def enter(self, current):
        """Nobody counts."""

    def leave(self, current):
        """Nobody counts."""

    @property
    def hooks(self):
        return self

    def of(self, current):
        return lambda tensor: None, lambda packed: None


def record_of(tensor, cls=SavedStorage):
    storage, accounting = tensor.untyped_storage(), MemoryAccounting()
    home = SavedPass(HooksThatKeepNothing())
    lease = Lease()
    lease.record = cls(lease, accounting.note)
    lease.record.alias, lease.record.owner, lease.record.saved = probed(tensor)
    record = open_saved(accounting, home, lease, storage, storage.nbytes(), is_whole=True)
    LEASES.append(lease)
    record.home = None
    accounting.settle()
    return record


def queue(record, tier):
    with record.accounting.lock:
        SavedStorage.queue_writes([record], tier)


def begun(record):
    return SavedStorage.all_begin([record])[0]


def written(record, stored, error):
    SavedStorage.all_written([(record, stored, error)])


def came(record, storage, error):
    SavedStorage.all_read([(record, storage, None, error)])


LEASES = []
"""What a graph would hold."""


@pytest.fixture(autouse=True)
def no_leases():
    yield
    LEASES.clear()


def test_a_write_is_wanted_until_it_is_taken_back_or_nobody_can_ask_again():
    for is_freed in (False, True):
        tensor, tier = torch.arange(16.0), _Roomy()
        record = record_of(tensor)
        queue(record, tier)
        assert begun(record) is not None
        assert record.is_wanted()
        if is_freed:
            LEASES.clear()
        with record.accounting.lock:
            record.accounting.settle() if is_freed else record.forward()
        assert not record.is_wanted()
        written(record, _Stored(tier), None)
        assert (tier.freed, len(record.accounting.writes)) == (1, 0)


# -- somebody else comes in the middle of a step ----------------------------------------------------------------------


class _Interrupted(SavedStorage):
    """Once, right after its state was looked at, another thread does ``meanwhile`` if the accounting lock lets it.

    This thread plays the other one, so that it comes at this very moment on every machine.
    """

    __slots__ = ("meanwhile",)

    meanwhile: Callable[[], object] | None

    @property
    def state(self):
        value = SavedStorage.state.__get__(self)
        meanwhile = getattr(self, "meanwhile", None)
        if meanwhile is not None and self.accounting.lock.acquire(blocking=False):
            self.meanwhile = None
            try:
                meanwhile()
            finally:
                self.accounting.lock.release()
        return value

    @state.setter
    def state(self, value):
        SavedStorage.state.__set__(self, value)


class _Roomy:
    name = "ssd"
    freed = 0

    def write_all(self, requests):
        return [True] * len(requests)

    def read_all(self, *args, **kwargs):
        return object()

    def free_all(self, places):
        self.freed += len(places)


def test_nobody_takes_a_storage_back_while_its_write_begins():
    """Else the worker would take the memory from whoever has just been given it."""
    tensor, tier = torch.arange(16.0), _Roomy()
    record = record_of(tensor, _Interrupted)
    queue(record, tier)
    taken = []
    record.meanwhile = lambda: taken.append(record.forward())
    storage = begun(record)
    record.meanwhile = None
    assert storage is not None
    assert record.state is State.WRITING
    if not taken:  # it had to wait for the lock, and comes now
        with record.accounting.lock:
            taken.append(record.forward())
    written(record, _Stored(tier), None)
    assert taken == [True]
    assert record.state is State.TAKEN_BACK
    assert record.storage is not None, "what was handed out has gone"
    assert (tier.freed, len(record.accounting.writes)) == (1, 0)


@pytest.mark.parametrize("error", [None, OSError("gone")])
def test_an_extent_that_is_read_is_free_when_the_read_has_ended(error):
    """Else another storage would be written there, and read in its place."""
    record, tier = record_of(torch.arange(16.0)), _Roomy()
    queue(record, tier)
    storage = begun(record)
    written(record, _Stored(tier), None)
    assert record.state in AWAY
    with record.accounting.lock:
        record.start_reads([record], torch.device("cpu"), urgent=True)
        record.free()
    assert tier.freed == 0
    came(record, None if error else storage, error)
    assert tier.freed == 1
    assert record.state is State.FREED


def test_what_an_interrupt_may_have_left_in_a_queue_goes_to_no_other_tier():
    """Its worker would begin the write that the other tier was asked for, and fill in where its own bytes are."""

    class Interrupted(_Roomy):
        def write_all(self, requests):
            raise KeyboardInterrupt

    record = record_of(torch.arange(16.0))
    with record.accounting.lock:
        assert record.can_be_evicted
        with pytest.raises(KeyboardInterrupt):
            SavedStorage.queue_writes([record], Interrupted())
        assert not record.can_be_evicted
    assert begun(record) is None
    written(record, None, None)
    assert record.state is State.TAKEN_BACK
    assert record.storage is not None
    assert len(record.accounting.writes) == 0


# -- states ------------------------------------------------------------------------------------------------------------


def test_the_state_alone_tells_what_there_is():
    """Whatever happens in whatever order: a copy, a read under way, memory that counts."""
    for seed in range(40):
        check_random_events(seed)


def check_random_events(seed):
    dice, tier = random.Random(seed), _Roomy()
    held = [torch.arange(16.0)]  # by somebody else, until he lets go
    record = record_of(held[0])
    accounting, is_written = record.accounting, False
    for _ in range(40):
        event = dice.choice(["send", "begin", "end", "forward", "read", "came", "drop", "sweep", "let go"])
        if event == "begin":
            is_written = begun(record) is not None or is_written
        elif event == "end" and is_written:
            is_written, error = False, OSError("gone") if dice.random() < 0.2 else None
            written(record, None if error else _Stored(tier), error)
        elif event == "came" and record.state is State.READING:
            error = OSError("gone") if dice.random() < 0.2 else None
            came(record, None if error else torch.arange(16.0).untyped_storage(), error)
            assert (record.error is None) is (error is None)
        elif event == "let go":
            held.clear()
        else:
            with accounting.lock:
                if event == "send" and record.can_be_evicted:
                    SavedStorage.queue_writes([record], tier)
                elif event == "forward" and dice.random() < 0.3:
                    assert record.forward() is (record.state in READY)
                elif event == "read" and record.state in AWAY:
                    record.start_reads([record], torch.device("cpu"), urgent=True)
                elif event == "drop":
                    record.drop_copy()
                elif event == "sweep":
                    accounting.sweep_all()
        with_copy = (*AWAY, State.READING, State.RELOADED)
        assert (record.stored is not None) is (record.state in with_copy)
        assert (record.read is not None) is (record.state is State.READING)
        assert (record.storage is not None) is (record.state not in (*AWAY, State.READING))
        assert accounting.counters.resident_bytes == (record.nbytes if record.is_resident else 0)
        assert len(accounting.writes) == (record.state in (State.QUEUED, State.WRITING) or is_written)
    LEASES.clear()
    with accounting.lock:
        accounting.settle()
    assert accounting.counters.resident_bytes == 0
    assert record.state is State.FREED


# -- Ctrl-C while a lease dies -----------------------------------------------------------------------------------------


def test_a_death_runs_no_python_and_is_noted_all_the_same():
    """A ``KeyboardInterrupt`` in Python code that runs when something dies would be lost."""
    tier = _Roomy()
    record = record_of(torch.arange(16.0))
    queue(record, tier)
    assert begun(record) is not None
    written(record, _Stored(tier), None)
    assert record.state in AWAY
    calls = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: calls.append((event, frame.f_code.co_qualname)))
    try:
        del LEASES[0]
    finally:
        sys.setprofile(before)
    assert [call for call in calls if call[0] == "call"] == []
    with record.accounting.lock:
        record.accounting.settle()
    assert record.state is State.FREED
    assert (tier.freed, record.accounting.saved_bytes) == (1, 0)
    assert not record.accounting.watched


def test_counts_are_right_again_after_an_interrupt():
    record = record_of(torch.arange(16.0))
    accounting = record.accounting
    accounting.counters.resident_bytes, accounting.saved_bytes, accounting.ahead_bytes = 7, 8, 9
    with accounting.lock:
        accounting.recount()
    assert (accounting.counters.resident_bytes, accounting.saved_bytes, accounting.ahead_bytes) == (64, 64, 0)


# -- a device that fails before a write begins -------------------------------------------------------------------------


class _LostDevice:
    """A mark that is waited for until the test says so, and then raises."""

    stream = None

    def __init__(self):
        self.asked, self.lost = threading.Event(), threading.Event()

    def synchronize(self):
        self.asked.set()
        assert self.lost.wait(PATIENCE_S)
        raise RuntimeError("injected: the device is lost")


@pytest.fixture(params=["ssd", "host"])
def tier(request, spill_dir):
    if request.param == "host":
        with closing(HostTier(1 << 20, HostCopies(), pin=False, events=EventLog())) as host:
            yield host
        return
    with ssd_tier(PosixBackend([spill_dir]), spill_dir) as ssd:
        yield ssd


@pytest.mark.parametrize("meanwhile", ["nothing", "forwarded", "freed"])
def test_a_write_that_never_began_is_counted_down_once(meanwhile, tier):
    """By whoever takes it back, or by the worker; twice, and a budget would not wait for the next write."""
    tensor, mark = torch.arange(4096.0), _LostDevice()
    record = record_of(tensor)
    accounting = record.accounting
    with accounting.lock:
        record.produced = mark
        SavedStorage.queue_writes([record], tier)
        assert len(accounting.writes) == 1
    assert mark.asked.wait(PATIENCE_S)
    with accounting.lock:
        if meanwhile == "forwarded":
            assert record.forward()
        elif meanwhile == "freed":
            record.free()
        assert len(accounting.writes) == (meanwhile == "nothing")
    mark.lost.set()
    tier.flush()
    with accounting.lock:
        assert len(accounting.writes) == 0
        assert accounting.counters.failures == 1
        assert record.state is (State.FREED if meanwhile == "freed" else State.TAKEN_BACK)
        if meanwhile != "freed":
            assert record.forward()
            assert record.storage.data_ptr() == tensor.data_ptr()
            record.free()
        assert len(accounting.writes) == 0


def test_what_an_operation_may_still_fill_does_not_leave():
    record = record_of(torch.arange(16.0))
    record.home = SavedPass(HooksThatKeepNothing())
    with record.home:
        record.operation = Operation.current()
        at_once(lambda: (torch.ones(1, requires_grad=True) * 2, check(not record.can_be_evicted)))
        assert not record.can_be_evicted
        torch.ones(1, requires_grad=True) * 2
        assert record.can_be_evicted
        record.operation = Operation.current()
    assert record.can_be_evicted


def check(is_so):
    assert is_so


def test_the_settled_peak_is_that_of_the_second_half_of_the_passes():
    accounting = MemoryAccounting()
    settled = []
    for peak_bytes in (9, 5, 3, 4, 3, 3):
        accounting.pass_ended(peak_bytes)
        settled.append(accounting.counters.settled_peak_bytes)
    assert settled == [9, 5, 5, 4, 4, 4]
    for _ in range(200):
        accounting.pass_ended(2)
    assert accounting.counters.settled_peak_bytes == 2, "of the last 64 at most"
    accounting.reset_peaks()
    assert accounting.counters.settled_peak_bytes == 0
