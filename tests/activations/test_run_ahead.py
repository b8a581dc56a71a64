"""Python does not fill memory with what a device has yet to compute; where writes pile up, forward waits for room."""

from contextlib import closing

import pytest
import torch

from lightning_ssd.activations import run_ahead, tensor_cache
from lightning_ssd.activations.run_ahead import RunAhead
from tests.support.late import LateCopies, LateMark, late_copies
from tests.support.opened import offloader_in
from tests.support.weight_loops import passed, same

MIB = 1 << 20
NUM_LAYERS, WIDTH, BATCH = 12, 256, 512
SAVED = BATCH * WIDTH * 4
FAR_BEHIND_S = 0.1
"""So late, a device is behind Python on every machine, however busy."""


def marks(number):
    return [LateMark() for _ in range(number)]


class TestBound:
    def test_small_models_never_wait(self):
        ahead = RunAhead()
        for mark in marks(64):
            ahead.add(mark, MIB, 64 * MIB)
        assert not ahead.late

    @pytest.mark.parametrize(
        ("sizes", "saved_peak"),
        [([30, 32, 3], 0), ([100, 100, 100], 0), ([32, 32, 32, 32, 32], 2048)],
        ids=["64 MiB", "two of the largest", "a sixteenth"],
    )
    def test_the_oldest_is_waited_for_when_more_are_left(self, sizes, saved_peak):
        ahead, made = RunAhead(), marks(len(sizes))
        for mark, size in zip(made[:-1], sizes[:-1], strict=True):
            ahead.add(mark, size * MIB, saved_peak * MIB)
        assert not ahead.late
        ahead.add(made[-1], sizes[-1] * MIB, saved_peak * MIB)
        assert list(ahead.late) == made[:1]
        made[0].passed.set()
        ahead.wait()
        assert not ahead.late


class Counted(LateCopies):
    """Knows how many bytes of saved tensors the compute stream still had to compute when the next one was saved."""

    def __init__(self):
        super().__init__(seed=0, max_delay_s=0.004)
        self.made = []
        self.worst = 0

    def mark(self):
        self.worst = max(self.worst, sum(not mark.passed.is_set() for mark in self.made))
        self.made.append(super().mark())
        return self.made[-1]


@pytest.fixture
def counted():
    with closing(Counted()) as copies:
        yield copies


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(NUM_LAYERS)))


def gradients(offloader, steps=2):
    module, found = network(), []
    for step in range(steps):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        passed(offloader, lambda batch=batch: module(batch).square().sum())
        found.append(batch.grad)
    return found


def offloader(directory, copies):
    return offloader_in(directory, activations="offload", min_tensor_bytes=0, host_memory=0, _copies=copies)


def test_saving_waits_for_the_device(spill_dir, counted, monkeypatch):
    monkeypatch.setattr(run_ahead, "_MIN_BYTES", 3 * SAVED)
    with offloader(spill_dir, counted) as opened:
        got = gradients(opened)
    assert same(got, gradients(None))
    assert 1 <= counted.worst <= 6  # marks are made for reloads, too; without a bound it is all twelve


@pytest.mark.parametrize("room", [8, None], ids=["little", "unknown"])
def test_what_moves_does_not_pile_up_beyond_the_memory_there_is(spill_dir, monkeypatch, room):
    """Moving everything, with a device that is far behind: half of what is available is the limit."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: None if room is None else room * SAVED)
    with late_copies(max_delay_s=FAR_BEHIND_S) as copies, offloader(spill_dir, copies) as opened:
        got = gradients(opened)
        peak_bytes = opened.stats.resident_peak_bytes
    assert same(got, gradients(None))
    if room is None:
        assert peak_bytes > 8 * SAVED, "with nothing to wait for, this test could not fail"
    else:
        assert peak_bytes <= 5 * SAVED
