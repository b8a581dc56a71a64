"""What waits is decided again when steps have shown what they take: between steps, with the bits of plain training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.parameters import residents, step_memory
from lightning_ssd.parameters.weight_files import is_mapped
from lightning_ssd.planning import residency
from tests.parameters.test_auto import BLOCK_BYTES, TRAINED, blocks_of, waiting
from tests.parameters.test_everything_away import Loop
from tests.parameters.test_paged_weights import MIN_TENSOR, built, equal_weights, same, train

GIB = 1 << 30


class Machine:
    """Ten GiB, of which nine are usable, and what a step is said to take."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.rise_bytes = 0
        """From the beginning of a step to its worst moment."""

    @property
    def waiting_bytes(self) -> int:
        return sum(p.nbytes for m in self.models for p in m.parameters() if is_mapped(p.untyped_storage()))

    @property
    def held_bytes(self) -> int:
        return GIB - self.waiting_bytes

    def lacks(self, nbytes: int) -> None:
        """From the next step on, so much more is taken than is usable where no weight waits."""
        self.rise_bytes = 8 * GIB + nbytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    said = Machine()
    monkeypatch.setattr(residents, "host_available_bytes", lambda: 10 * GIB - said.held_bytes)
    monkeypatch.setattr(residents, "anonymous_bytes", lambda: said.held_bytes)
    monkeypatch.setattr(residents, "level_bytes", lambda device: said.held_bytes)
    monkeypatch.setattr(step_memory, "anonymous_bytes", lambda: said.held_bytes + said.rise_bytes)
    monkeypatch.setattr(step_memory, "free_heap_bytes", lambda: said.rise_bytes)
    monkeypatch.setattr(step_memory, "_REST_S", 0.0)
    monkeypatch.setattr(step_memory, "_NUM_STEPS", 1)
    monkeypatch.setattr(residency, "_TOLERANCE", 0.0)
    monkeypatch.setattr(residency, "_AMPLE_SHARE", 0.0)
    monkeypatch.setattr(residency, "_PATIENCE", 3)
    return said


@pytest.fixture
def opened(spill_dir: Path, machine: Machine) -> Iterator[Callable[..., Offloader]]:
    made = []

    def make(*modules: nn.Module, **options: Any) -> Offloader:
        policy = OffloadPolicy(
            **{"parameters": "auto", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options
        )
        made.append(Offloader(policy=policy, hardware=HardwareProfile(paths=[spill_dir])))
        return made[-1].open(*modules)

    yield make
    for offloader in made:
        offloader.close()


# -- the bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute"])
def test_a_run_that_gets_scarce_has_the_bits_of_plain_training(
    activations: str, opened: Callable[..., Offloader], machine: Machine
) -> None:
    plain, model, seen = built(), built(), []
    machine.models.append(model)

    def between(model: nn.Module, step: int) -> None:
        seen.append(blocks_of(waiting(model)))
        if step == 1:
            machine.lacks(BLOCK_BYTES // 2)
        elif step == 5:
            machine.lacks(GIB)
        elif step == 8:
            machine.lacks(-GIB)

    expected = train(plain, steps=16)
    offloader = opened(model, activations=activations)
    assert same(train(model, offloader, steps=16, between=between), expected)
    assert equal_weights(model, plain)
    assert seen[:3] == [[]] * 3, "the third step shows it"
    assert seen[3] == seen[4] == seen[5] == seen[6]
    assert 0 < len(seen[3]) < 4
    assert seen[7] == [0, 1, 2, 3]
    assert seen[9:12] == [[0, 1, 2, 3]] * 3, "three steps have to show that much is left"
    assert seen[-1] == []
    assert offloader.stats.weights_bytes == 0


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"set_to_none": False}], ids=["plain", "twice", "zeros"])
def test_trained_weights_leave_and_come_back_with_their_gradients(
    options: dict[str, Any], opened: Callable[..., Offloader], machine: Machine
) -> None:
    """The loss of the last step lives on, and with it a graph that has been used."""
    seen = []

    def look(model: nn.Module, optimizer: object, step: int) -> None:
        gradients = [
            n for n, p in model.named_parameters() if p.grad is not None and is_mapped(p.grad.untyped_storage())
        ]
        assert set(waiting(model)) >= set(gradients) or options
        seen.append((len(waiting(model)), len(gradients)))
        lacking = {2: BLOCK_BYTES // 2, 4: GIB, 7: -GIB, 13: BLOCK_BYTES // 2, 16: -GIB}
        if step in lacking:
            machine.lacks(lacking[step])

    expected = Loop(**options).run(28).result()
    offloader = opened(**TRAINED)
    loop = Loop(offloader, before_step=look, **options)
    machine.models.append(loop.model)
    assert same(loop.run(28).result(), expected)
    numbers = [waits for waits, _ in seen]
    assert numbers[:3] == [0] * 3
    assert 0 < numbers[4] < numbers[7] == 13
    assert numbers[12:14] == [0] * 2
    assert numbers[16] == numbers[4]
    assert numbers[-1] == 0
    assert options or all(weights == gradients for weights, gradients in seen)
