"""A trace tells how long the pass takes that nobody records, on a device that is late and on one that is not."""

import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.pass_kind import FinishedPass
from lightning_ssd.scheduling.recorder import Recorder
from tests.support.fake_passes import machine_of, opened
from tests.support.opened import offloader_in
from tests.support.python_calls import python_calls
from tests.support.recorded_passes import saved
from tests.support.sines import sines

NUM_BLOCKS, PER_BLOCK, NBYTES = 24, 13, 20_000_000
NUM_KERNELS = 3 * NUM_BLOCKS * PER_BLOCK
STEP_S = 0.05


@dataclass
class SimulatedDevice:
    """Work is queued by a host that takes time for each launch, and done in order. Also the clock of a recorder."""

    launch_s: float
    kernel_s: float
    is_host: bool = False
    """Its memory and its work are the host's: a launch returns when the work is done."""
    stamp_s: float = 4e-6
    event_s: float = 2e-6
    """That a stamp takes from the device."""
    now_s: float = 0.1e-6
    released_s: float = 25e-6
    """For asking who holds a storage: far more than it takes, so that what is not taken off shows."""
    level_s: float = 40e-6
    lag: int = 0
    noise_s: float = 20e-6
    host_s: float = 5.0
    done_s: float = 5.0
    num_stamps: int = 0

    def python(self, seconds):
        self.host_s += seconds

    def launch(self, factor=1.0):
        self.host_s += self.launch_s
        self._queue(self.kernel_s * factor)

    def _queue(self, seconds):
        self.done_s = max(self.done_s, self.host_s) + seconds
        if self.is_host:
            self.host_s = self.done_s

    def wait(self):
        self.host_s = max(self.host_s, self.done_s)

    @property
    def is_idle(self):
        return self.done_s <= self.host_s

    def now(self):
        self.host_s += self.now_s
        return self.host_s

    def stamp(self):
        self.num_stamps += 1
        self.host_s += self.stamp_s
        self._queue(self.event_s)
        return self.done_s

    def has_passed(self, stamp):
        return True

    def seconds(self, start, end):
        return end - start

    def level(self):
        self.host_s += self.level_s
        return 10 * NBYTES

    def is_released(self, key):
        self.host_s += self.released_s
        return True


def late():
    """Python is far ahead of it, as at GPT-2's size on a card."""
    return SimulatedDevice(launch_s=8e-6, kernel_s=STEP_S / NUM_KERNELS)


def waiting():
    """It waits for Python before each kernel."""
    return SimulatedDevice(launch_s=STEP_S / NUM_KERNELS, kernel_s=5e-6)


def cpu():
    return SimulatedDevice(launch_s=5e-6, kernel_s=STEP_S / NUM_KERNELS, is_host=True, stamp_s=0.0, event_s=0.0)


def in_turns():
    return SimulatedDevice(launch_s=0.3 * STEP_S / NUM_KERNELS, kernel_s=0.6 * STEP_S / NUM_KERNELS)


DEVICES = {"late": late, "waits for Python": waiting, "a CPU": cpu, "both": in_turns}


class Unrecorded:
    """In the place of a recorder."""

    def timed(self, hook):
        return hook

    def __getattr__(self, name):
        return lambda *args, **options: None


class Step:
    """One pass.

    Args:
        device: that it runs on.
        recorder: of the pass.
        hook_s: Python's time for a storage that moves, each way.
        places: what moves.
        is_uneven: every other block has kernels of three times the length, and those between of a tenth.
    """

    def __init__(self, device, recorder=None, *, hook_s=0.0, places=lambda nbytes: Placement.KEEP, is_uneven=False):
        self._device = device
        self._is_recorded, self._recorder = recorder is not None, recorder or Unrecorded()
        self._hook_s = hook_s
        self._places = places
        self._is_uneven = is_uneven
        self._moved = set()
        self._held = []
        self.packed_s = []
        self.counted_hook_s = 0.0
        self.moved_bytes = 0
        self.begin = device.stamp()
        self._run()
        self.end = device.stamp()
        self._recorder.backward_ended()
        device.wait()
        self.step_s = self.end - self.begin

    def _run(self):
        recorder, device = self._recorder, self._device
        pack, unpack = recorder.timed(self._pack), recorder.timed(self._unpack)
        for block in range(NUM_BLOCKS):
            recorder.block_enters(str(block), recompute=False)
            for _ in range(PER_BLOCK):
                device.launch(self._factor(block))
                pack(NBYTES)
            recorder.block_leaves()
        recorder.forward_ended()
        for index in reversed(range(NUM_BLOCKS * PER_BLOCK)):
            unpack(index)
            for _ in range(2):
                device.launch(self._factor(index // PER_BLOCK))
            recorder.freed(index)

    def _factor(self, block):
        return (3.0 if block % 2 else 0.1) if self._is_uneven else 1.0

    def _pack(self, nbytes):
        begin_s, index = self._device.host_s, len(self.packed_s)
        self.packed_s.append(self._device.done_s - self.begin)
        if self._places(nbytes) is not Placement.KEEP:
            self._moved.add(index)
            self.moved_bytes += nbytes
            self._device.python(self._hook_s)
        if self._is_recorded:
            self._held.append(saved(1))
            self._recorder.packed(nbytes, self._held[-1].key)
        self._count(begin_s, is_hidden=not self._device.is_idle)

    def _unpack(self, index):
        begin_s = self._device.host_s
        if index in self._moved:
            self._device.python(self._hook_s)
        self._recorder.wanted(index)
        self._count(begin_s, is_hidden=False)

    def _count(self, begin_s, *, is_hidden):
        if not is_hidden and (self._moved or self._is_recorded):
            self.counted_hook_s += self._device.host_s - begin_s


def begun(device):
    return Recorder(device, device.level, released=device.is_released, now=device.now)


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_recorded_pass_tells_of_the_one_that_is_not(kind, is_uneven):
    plain, device = Step(DEVICES[kind](), is_uneven=is_uneven), DEVICES[kind]()
    recorder = begun(device)
    recorded = Step(device, recorder, is_uneven=is_uneven)
    trace = recorder.trace(recorded.end)
    if kind in ("waits for Python", "a CPU"):
        assert recorded.step_s > plain.step_s + 0.1 * STEP_S, "recording costs nothing here, and nothing is shown"
    assert trace.end_s == pytest.approx(plain.step_s, rel=0.1)
    assert device.num_stamps <= 4 * NUM_BLOCKS + 5, "two per block and direction"
    block_s = max(b - a for a, b in zip(plain.packed_s, plain.packed_s[PER_BLOCK:], strict=False))
    for told, really_s in zip(trace.storages, plain.packed_s, strict=True):
        assert abs(told.packed_s - really_s) <= block_s + 0.05 * plain.step_s
    assert_ordered(trace)


def assert_ordered(trace):
    count = NUM_BLOCKS * PER_BLOCK
    assert trace.order == tuple(reversed(range(count)))
    packed = [storage.packed_s for storage in trace.storages]
    wanted = [trace.storages[index].wanted_s or 0.0 for index in trace.order]
    moments = [0.0, *packed, trace.forward_end_s, *wanted, trace.end_s]
    assert moments == sorted(moments)
    for storage in trace.storages:
        assert storage.wanted_s is not None
        assert storage.packed_s <= storage.last_used_s <= storage.wanted_s <= storage.freed_s


@pytest.mark.parametrize("hook_us", [20, 150])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_plan_from_a_traced_step_predicts_the_next_plain_one(kind, hook_us):
    """50 ms a step. In the first pass everything moves; a late device hides the shorter hooks, and not the longer."""
    rates = TierRates(write_bytes_per_s=2e8, read_bytes_per_s=2e8)  # nothing can be hidden: the plan keeps everything
    plain_s, predicted = Step(DEVICES[kind]()).step_s, []
    with opened(machine=machine_of(Machine(ssd=rates)), max_slowdown=1.05) as made:
        for _ in range(6):
            device = replace(DEVICES[kind](), released_s=2e-6)
            cursor, wants_trace = made.cursor("a", level_bytes=0, available_bytes=1 << 40)
            recorder = begun(device) if wants_trace else None
            step = Step(device, recorder, hook_s=hook_us * 1e-6, places=cursor.place)
            known = cursor.completed()
            if known is not None:
                predicted.append((known.plan.keep_step_s, known.plan.prediction.step_s, step.step_s))
            made.observe(
                FinishedPass(
                    signature="a",
                    sizes=(NBYTES,) * (NUM_BLOCKS * PER_BLOCK),
                    cursor=cursor,
                    recorder=recorder,
                    clock=device,
                    begin=step.begin,
                    end=step.end,
                    level_bytes=0,
                    stalls=(),
                    hook_s=step.counted_hook_s,
                    peak_bytes=NUM_BLOCKS * PER_BLOCK * NBYTES,
                    written_bytes=step.moved_bytes,
                    read_bytes=step.moved_bytes,
                    moved_bytes=step.moved_bytes,
                )
            )
            made.border()
            made.wait()
    assert predicted
    for keep_s, predicted_s, measured_s in predicted:
        assert keep_s == pytest.approx(plain_s, rel=0.1)
        assert predicted_s == pytest.approx(measured_s, rel=0.1)


def test_recording_a_storage_takes_few_python_calls_and_stamps(tmp_path, monkeypatch):
    """Of a real pass. It took three stamps and up to 34 questions of who holds what for each storage."""
    num_stamps = 0
    length = 320

    class Counting(HostClock):
        @staticmethod
        def stamp():
            nonlocal num_stamps
            num_stamps += 1
            return time.perf_counter()

    monkeypatch.setattr(tensor_cache, "clock_of", lambda device: Counting())
    with offloader_in(tmp_path, min_tensor_bytes=4096) as offloader:
        x = torch.full((32, 32), 0.5, requires_grad=True)
        with python_calls() as calls:
            with offloader.saved_tensors():
                y = sines(x, length)
            y.backward(torch.ones_like(y))
        offloader.end_backward()
        trace = offloader.trace
    assert len(trace.storages) == length
    assert trace.order == tuple(reversed(range(length)))
    asked = ("is_released", "_level_bytes")
    recorded = Counter(name for name in calls if name.startswith("Recorder.") or name.rpartition(".")[2] in asked)
    assert recorded["Recorder.packed"] == recorded["Recorder.wanted"] == length, "the pass was not recorded"
    assert recorded.total() <= 12 * length, recorded
    # Pairs for one hook in 16 in either direction; on a busy machine a wait for a read takes two more.
    assert 0 < num_stamps <= length / 2, num_stamps
