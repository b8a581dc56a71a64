"""How much of a GPT of eight blocks is in memory at a time, and how much a step changes in files."""

import pytest
import torch

from lightning_ssd.memory.file_mapping import READ_BYTES
from tests.parity.models import adapted, gpt2, hugging_face_loss, tokens
from tests.support.everything_away import all_away, large, storage_bytes
from tests.support.process_memory import dirtied_bytes, frozen_changed_at, shown_bytes

NUM_BLOCKS, NUM_SLOTS = 8, 4
MARGIN = 1.1


@pytest.fixture(autouse=True)
def _subgroups(monkeypatch):
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 1 << 20)
    monkeypatch.setattr("lightning_ssd.optimizer.step.subgroups.GRANULE", 16 << 10)


def short_batch(step):
    """Activations are nothing beside weights then."""
    ids = tokens(step, 1, 8)
    return {"input_ids": ids, "labels": ids}


class Watched:
    """A training that looks at memory wherever Python comes by.

    Args:
        offloader: it.
        directory: of its files.
        prepare: what becomes of the model before it is registered.
    """

    def __init__(self, offloader, directory, prepare=lambda model: model):
        torch.manual_seed(0)
        self._directory, self._offloader = directory, offloader
        self.model = prepare(gpt2(layers=NUM_BLOCKS))
        self.peaks = {"forward": 0, "after": 0}
        self.is_watching = False
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._watch()
        offloader.register_module(self.model)
        self.optimizer = offloader.offload_optimizer(torch.optim.AdamW(self.trained, lr=1e-3))

    def _watch(self):
        for module in self.model.modules():
            if large(module) and not list(module.children()):
                module.register_forward_hook(lambda *_: self.look("forward"))
        for parameter in large(self.model, trained=True):
            parameter.register_hook(lambda gradient: self.look("after", gradient.nbytes))
            parameter.register_post_accumulate_grad_hook(lambda _: self.look("after"))

    def look(self, when, made=0):
        if self.is_watching:
            self.peaks[when] = max(self.peaks[when], shown_bytes(self._directory) + made)

    def step(self, number, *, set_to_none=True):
        with self._offloader.saved_tensors():
            loss = hugging_face_loss(self.model, short_batch(number))
        self.look("forward")
        loss.backward()
        self.look("after")
        self._offloader.end_backward()
        self.look("after")
        self.optimizer.step()
        self.look("after")
        self.optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize(
    "activations", ["recompute", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("keep", "offload"))]
)
def test_two_units_of_weights_and_of_gradients_are_in_memory_at_a_time(activations, spill_dir):
    with all_away(spill_dir, activations=activations) as offloader:
        watched = Watched(offloader, spill_dir)
        unit = max(storage_bytes(large(block)) for block in watched.model.transformer.h)
        watched.step(0)  # what comes next is not known yet
        watched.step(1)
        watched.is_watching = True
        offloader.reset_peaks()
        watched.step(2, set_to_none=False)
        states = offloader.optimizer_stats[0]
        assert offloader.stats.weights_resident_peak_bytes <= 2 * unit * MARGIN
        assert states.resident_peak_bytes <= NUM_SLOTS * states.subgroup_bytes * MARGIN
        # There are no gradients in forward. Later, no more of them than of weights.
        assert unit < watched.peaks["forward"] <= 2 * unit * MARGIN
        assert unit < watched.peaks["after"] <= (2 + 2) * unit * MARGIN
        watched.peaks["forward"] = 0
        watched.step(3)
        assert unit < watched.peaks["forward"] <= 2 * unit * MARGIN, "nor such that are zeros"


@pytest.mark.parametrize("others", ["keep", "offload"])
def test_frozen_weights_are_not_written_by_a_step(others, spill_dir):
    """Adapters are smaller than what waits. Their states are written by themselves."""
    policy = {"gradients": others, "optimizer_states": others, "min_tensor_bytes": "64KiB"}
    with all_away(spill_dir, **policy) as offloader:
        watched = Watched(offloader, spill_dir, adapted)
        assert max(parameter.nbytes for parameter in watched.trained) < 64 << 10
        assert offloader.stats.weights_bytes > 30 << 20
        for number in range(3):
            before = frozen_changed_at(offloader)
            watched.step(number)
            assert before, "no file of frozen weights was looked at"
            assert frozen_changed_at(offloader) == before, number


def test_frozen_neighbours_of_trained_weights_that_wait_are_not_written(spill_dir):
    """The system writes pieces of up to 2 MiB as a whole: what is trained must not share one with what is frozen."""
    with all_away(spill_dir) as offloader:
        watched = Watched(offloader, spill_dir, adapted)
        trained = storage_bytes(large(watched.model, trained=True))
        assert 1 << 20 < trained < offloader.stats.weights_bytes / 10
        files = offloader._parts.parameters.files
        for number in range(3):
            files.sync()
            before, states = dirtied_bytes(), _states_written(offloader)
            watched.step(number)
        dirtied = dirtied_bytes() - before - (_states_written(offloader) - states)
        # Weights and gradients, and what lies between them.
        assert 2 * trained <= dirtied <= 2 * trained * 1.25


def _states_written(offloader):
    return sum(one.written_bytes for one in offloader.optimizer_stats)


def test_of_frozen_weights_one_unit_is_in_memory_at_a_time(spill_dir):
    """The next ones are in the page cache."""
    with all_away(spill_dir, min_tensor_bytes="64KiB") as offloader:
        watched = Watched(offloader, spill_dir, adapted)
        pager = offloader._parts.parameters.pager
        assert all(weight.is_frozen for weight in pager.weights), "adapters are smaller than what waits"
        unit = max(storage_bytes(large(block)) for block in watched.model.transformer.h)
        for number in range(3):
            watched.is_watching = number == 2
            watched.step(number)
        readers = 2 * READ_BYTES  # show what they read
        assert unit / MARGIN < max(watched.peaks.values()) <= unit * MARGIN + readers
