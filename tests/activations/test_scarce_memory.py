"""Where not everything fits: memory itself is planned as a budget, and a budget for all memory holds for all of it."""

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import level_bytes
from tests.parity.models import Perceptrons
from tests.support.helpers import AUTO, Session, assert_identical, assert_released, open_offloader, outcome
from tests.support.opened import offloader_in
from tests.support.plan_trainings import loss_of, trains

MIB = 1 << 20
SAVED = 2_200_000
"""By one pass of :func:`trains`."""
LITTLE = 1_000_000
ENOUGH = 100 * SAVED
ROWS, WIDTH = 8192, 128


@pytest.fixture
def little_memory(monkeypatch):
    available = [LITTLE]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: available[0])
    monkeypatch.setattr(tensor_cache, "level_bytes", lambda device: 0)
    monkeypatch.setattr(HeapPolicy, "free_bytes", lambda self: 0)
    return available


def settle(offloader):
    offloader.flush()
    offloader.wait_for_plan()


def test_what_does_not_fit_is_planned_and_stays_exact(little_memory, tmp_path):
    peaks = []

    def look(step, session):
        if session.offloader is not None:
            settle(session.offloader)
            peaks.append(session.offloader.stats.resident_peak_bytes)
            session.offloader.reset_peaks()

    expected = outcome(trains(8), Session())
    with open_offloader(tmp_path, AUTO) as offloader:
        assert_identical(outcome(trains(8, look), Session.of(offloader, AUTO)), expected)
        assert_released(offloader)
        report = offloader.plan_report
        assert report is not None, "it goes by a plan"
        assert report.num_plans >= 1
    assert max(peaks) <= LITTLE, peaks
    assert min(peaks[-3:]) > 0.5 * LITTLE, "and uses what there is, since less would be no faster"


def test_memory_that_runs_out_in_mid_run(little_memory, tmp_path):
    """Somebody else takes it, and gives it back."""

    def change(step, session):
        if session.offloader is not None:
            settle(session.offloader)
            little_memory[0] = LITTLE if 5 <= step < 10 else ENOUGH
            if step in (7, 8, 9):
                assert session.offloader.stats.resident_peak_bytes <= LITTLE
            session.offloader.reset_peaks()

    little_memory[0] = ENOUGH
    expected = outcome(trains(14), Session())
    with open_offloader(tmp_path, AUTO) as offloader:
        assert_identical(outcome(trains(14, change), Session.of(offloader, AUTO)), expected)
        assert_released(offloader)


def train_with_adam(directory, budget):
    """A training whose optimizer states come with the first step; weights, levels in forward, the report."""
    torch.manual_seed(3)
    model = Perceptrons(width=WIDTH, num_blocks=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settings = {"activations": "auto" if budget else "keep", "memory_budget": budget, "min_tensor_bytes": 4096}
    levels = []
    with offloader_in(directory, **settings) as offloader:
        offloader.register_module(model)
        for step in range(5):
            with offloader.saved_tensors():
                loss = loss_of(model, step, ROWS, WIDTH)
            levels.append(level_bytes(torch.device("cpu")))
            loss.backward()
            offloader.end_backward()
            optimizer.step()
            optimizer.zero_grad()
            settle(offloader)
        report = offloader.plan_report
    return [p.detach().clone() for p in model.parameters()], levels, report


def test_a_memory_budget_trains_exactly_and_holds_for_everything(tmp_path):
    """Weights, gradients, Adam's states, the interpreter and saved activations are all in it."""
    expected, kept, _ = train_with_adam(tmp_path, None)
    trim()  # what the first training has left behind would count
    budget = level_bytes(torch.device("cpu")) + 150 * MIB
    assert max(kept) > budget, "it has to do something for it"
    weights, levels, report = train_with_adam(tmp_path, budget)
    assert all(map(torch.equal, weights, expected))
    assert report.measured_written_bytes > 0
    assert max(levels) <= budget, [level // MIB for level in (*levels, budget)]
