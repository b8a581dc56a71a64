"""What is brought up ahead takes a share of what is free, and when memory runs out, all that can be given back is."""

import pytest
import torch

from lightning_ssd.activations import fetcher, tensor_cache
from lightning_ssd.activations.fetcher import Fetcher
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import State
from lightning_ssd.scheduling.pass_profile import PrefetchBudget
from tests.activations.test_saved_storage import LEASES, record_of
from tests.support.helpers import open_offloader
from tests.support.sines import gradient_of_sines, sines

NBYTES = 256 * 1024


def assert_trains_exactly(directory):
    """All is written before backward begins."""
    x = torch.rand(NBYTES // 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with open_offloader(directory) as opened:
        with opened.saved_tensors():
            loss = sines(x, 32).sum()
        opened.flush()
        loss.backward()
        opened.end_backward()
    assert torch.equal(x.grad, gradient_of_sines(x, 32))


@pytest.mark.parametrize(("available", "most"), [(16 * NBYTES, 4 * NBYTES), (8 * NBYTES, 2 * NBYTES), (None, None)])
def test_looking_ahead_takes_a_quarter_of_what_is_free(available, most, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: available)
    seen = []
    hold = SavedStorage.hold_ahead

    def counted(records):
        hold(records)
        seen.extend(record.accounting.ahead_bytes for record in records)

    monkeypatch.setattr(SavedStorage, "hold_ahead", staticmethod(counted))
    always = property(lambda budget: 16 * NBYTES, lambda budget, nbytes: None)
    monkeypatch.setattr(PrefetchBudget, "nbytes", always, raising=False)
    assert_trains_exactly(tmp_path)
    assert max(seen) == (16 * NBYTES if most is None else most)


class LateMark:
    """A copy that gets to its end when somebody waits for it; a worker holds its memory until then."""

    stream = None

    def __init__(self, held):
        self._held = held

    def query(self):
        return not self._held

    def synchronize(self):
        self._held.clear()


class OnePass:
    def __init__(self, record):
        self.records = [record]

    def step_back(self, record):
        """Nobody looks ahead here."""


def test_what_is_given_up_has_gone_before_memory_is_asked_for_again():
    record = record_of(torch.arange(16.0))
    LEASES.clear()  # as if it had been written
    reloaded = [torch.arange(16.0).untyped_storage()]
    record.storage, record.state = reloaded[0], State.RELOADED
    record.key = type(record.key)(reloaded[0])
    record.mark = LateMark(reloaded)
    SavedStorage.hold_ahead([record])
    passes = [OnePass(record)]
    looks = {"budget": PrefetchBudget(), "device": torch.device("cpu"), "tier": None}
    has_dropped, reads = Fetcher(record.accounting, passes, stalls=None, clock=None, copies=None, **looks)._give_up()
    assert (has_dropped, reads) == (True, [])
    assert not record.key.alive()


def test_the_last_that_is_tried_is_pytorchs_cache(tmp_path, monkeypatch):
    class Accelerator:
        is_empty = False

        def empty_cache(self):
            self.is_empty = True

    accelerator, start = Accelerator(), SavedStorage.start_reads

    def full(records, device, *, urgent):
        if not accelerator.is_empty:
            raise torch.OutOfMemoryError("injected")
        start(records, device, urgent=urgent)

    monkeypatch.setattr(fetcher, "accelerator_of", lambda device: accelerator)
    monkeypatch.setattr(SavedStorage, "start_reads", staticmethod(full))
    assert_trains_exactly(tmp_path)
    assert accelerator.is_empty
