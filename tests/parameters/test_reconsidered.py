"""What waits is decided again when steps have shown what they take: between steps, with the bits of plain training."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import Offloader
from lightning_ssd.errors import OutOfSpaceError, StorageError
from lightning_ssd.memory import gauge
from lightning_ssd.parameters import residents, step_memory
from lightning_ssd.parameters.files.mapped_storage import is_mapped, unreadable
from lightning_ssd.parameters.units import shared_weights, why_it_stays
from lightning_ssd.planning import residency
from tests.parameters.test_auto import BLOCK_BYTES, TRAINED, blocks_of, policy, waiting
from tests.parameters.test_everything_away import Loop
from tests.parameters.test_paged_weights import batches, built, equal_weights, same, train
from tests.support.offloaders import offloaders

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
    held = lambda *_: said.held_bytes + said.rise_bytes  # noqa: E731  # as in the middle of a step, also when one begins
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: 10 * GIB - held())
    monkeypatch.setattr(gauge, "anonymous_bytes", held)
    monkeypatch.setattr(gauge, "level_bytes", held)
    monkeypatch.setattr(gauge, "free_heap_bytes", lambda: said.rise_bytes)
    monkeypatch.setattr(step_memory, "_REST_S", 0.0)
    monkeypatch.setattr(step_memory, "_NUM_STEPS", 1)
    monkeypatch.setattr(residency, "_TOLERANCE", 0.0)
    monkeypatch.setattr(residency, "_AMPLE_SHARE", 0.0)
    monkeypatch.setattr(residency, "_PATIENCE", 3)
    return said


@pytest.fixture
def opened(spill_dir: Path, machine: Machine) -> Iterator[Callable[..., Offloader]]:
    with offloaders(spill_dir, policy) as make:
        yield make


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


# -- when, and what not ----------------------------------------------------------------------------------------------


def test_nothing_moves_while_a_graph_is_alive(opened: Callable[..., Offloader], machine: Machine) -> None:
    plain, model = built(), built()
    machine.models.append(model)
    expected, found, seen = [], [], []
    offloader = opened(model)
    train(model, offloader, steps=1)
    train(plain, steps=1)
    machine.lacks(GIB)
    train(model, offloader, steps=1)
    train(plain, steps=1)
    ids = next(batches(1))
    for one, losses in ((plain, expected), (model, found)):
        graphs = []
        for _ in range(3):
            with offloader.saved_tensors() if one is model else nullcontext():
                graphs.append(one(ids).logsumexp(-1).mean())
            seen.append(len(waiting(model)))
            if len(graphs) == 1:
                machine.lacks(GIB if one is plain else -GIB)
        for graph in graphs:
            graph.backward()
        losses += [*graphs, *(p.grad for p in one.parameters() if p.grad is not None)]
    assert same(found, expected)
    assert seen == [0, 0, 0, 9, 9, 9]


def test_room_that_no_pause_lets_anybody_make_is_not_waited_for(
    opened: Callable[..., Offloader], machine: Machine
) -> None:
    """Each forward begins before the last backward: the planner is to refuse its budget in the end."""
    model, ids = built(), next(batches(1))
    machine.models.append(model)
    machine.lacks(-GIB)
    offloader = opened(model)
    decides = offloader._parts.parameters.weights.residents
    answers, graphs = [], []
    for step in range(12):
        with offloader.saved_tensors():
            graphs.append(model(ids).sum())
        if step:
            graphs.pop(0).backward()
            offloader.end_backward()
            answers.append(decides.ask_for(1))
    assert answers == [True] * 8 + [False] * 3
    assert waiting(model) == []
    graphs.pop().backward()
    offloader.end_backward()
    with offloader.saved_tensors():
        model(ids)
    assert waiting(model) != []
    assert decides.ask_for(1)


def test_a_weight_that_somebody_holds_stays(opened: Callable[..., Offloader], machine: Machine) -> None:
    plain, model, seen = built(), built(), []
    machine.models.append(model)
    held = model.blocks[1].up.weight.detach()[1:]
    array = model.blocks[2].up.weight.detach().numpy()

    def between(one: nn.Module, step: int) -> None:
        for weight in (one.blocks[1].up.weight, one.blocks[2].up.weight):
            weight.data.mul_(1.01)  # both of them see it
        if one is model:
            seen.append(waiting(model))
            assert torch.equal(model.blocks[2].up.weight, torch.from_numpy(array))
            assert torch.equal(held, model.blocks[1].up.weight[1:])
            machine.lacks(GIB)

    expected = train(plain, steps=8, between=between)
    assert same(train(model, opened(model), steps=8, between=between), expected)
    assert equal_weights(model, plain)
    assert len(seen[-1]) == 7
    assert not {"blocks.1.up.weight", "blocks.2.up.weight"} & {*seen[-1]}


@pytest.mark.parametrize(
    ("refuses", "error", "told"),
    [
        ("WeightFiles.check_room", OutOfSpaceError(errno.ENOSPC, "the drive is full"), "drive is full"),
        ("_shown", MemoryError("the system cannot map so much"), "cannot map so much"),
    ],
    ids=["a full drive", "memory"],
)
def test_what_refuses_to_take_weights_is_told_of_once_and_they_stay(
    refuses: str,
    error: Exception,
    told: str,
    opened: Callable[..., Offloader],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    plain, model = built(), built()
    machine.models.append(model)
    offloader = opened(model)
    monkeypatch.setattr(f"lightning_ssd.parameters.files.weight_files.{refuses}", refuse)
    machine.lacks(GIB)
    with pytest.warns(UserWarning, match=f"wait on drives cannot be changed any more .*{told}") as warned:
        assert same(train(model, offloader, steps=6), train(plain, steps=6))
    assert len(warned) == 1
    assert waiting(model) == []
    assert not offloader._parts.parameters.weights.residents.ask_for(1), "nor does the planner hope for them"


def test_a_weight_that_cannot_be_read_does_not_come_back(
    opened: Callable[..., Offloader], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring_in(weight: object) -> None:  # not where it is used
        raise unreadable(["it"], 1, OSError(errno.EIO, "the drive fails"))

    plain, model = built(), built()
    machine.models.append(model)
    offloader = opened(model)
    machine.lacks(GIB)
    expected, found = train(plain, steps=4), train(model, offloader, steps=4)
    monkeypatch.setattr("lightning_ssd.parameters.mapped_weights.bring_in", bring_in)
    machine.lacks(-GIB)
    with pytest.warns(UserWarning, match="cannot be changed any more .*could not be read") as told:
        assert same(found + train(model, offloader, steps=8), expected + train(plain, steps=8))
    assert len(told) == 1
    assert len(waiting(model)) == 9


def test_what_the_drive_has_lost_is_no_reason_to_go_on(
    opened: Callable[..., Offloader], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells once, of whatever was written before, and it is a move that hears it."""
    asked = []

    def tell_once(fd: int) -> None:
        asked.append(fd)
        if len(asked) == 1:
            raise OSError(errno.EIO, "Input/output error")

    model = built()
    machine.models.append(model)
    offloader = opened(model)
    monkeypatch.setattr("os.fdatasync", tell_once)
    machine.lacks(GIB)
    with pytest.raises(StorageError, match="weights or gradients that were changed could not be written"):
        train(model, offloader, steps=4)


def test_what_an_interrupt_has_kept_from_moving_moves_in_the_next_step(
    opened: Callable[..., Offloader], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    plain, model = built(), built()
    machine.models.append(model)
    offloader = opened(model)
    kept_bytes = offloader.stats.weights_kept_bytes
    machine.lacks(GIB)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_ssd.parameters.mapped_weights.MappedWeights._take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, offloader, steps=2)
    train(plain, steps=1)  # the first step shows it
    assert waiting(model) == []
    assert offloader.stats.weights_kept_bytes == kept_bytes > 0
    assert same(train(model, offloader, steps=2), train(plain, steps=2))
    assert len(waiting(model)) == 9


def test_what_moves_is_told(
    opened: Callable[..., Offloader], machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    model = built()
    machine.models.append(model)
    offloader = opened(model)
    caplog.set_level(logging.INFO, "lightning_ssd")
    caplog.clear()
    machine.lacks(BLOCK_BYTES // 2)
    train(model, offloader, steps=3)
    assert "steps have shown that memory lacks 0.2 MiB: 0.8 MiB more of weights wait on drives, 0.8 MiB" in caplog.text
    machine.lacks(-GIB)
    train(model, offloader, steps=8)
    assert "steps have left 1.00 GiB of memory: <0.01 GiB of weights come back to stay, 0.00 GiB wait" in caplog.text
    assert len(caplog.records) == 2


def test_where_nothing_more_can_move_the_model_is_left_alone(
    opened: Callable[..., Offloader], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, looks = built(), []
    machine.models.append(model)
    offloader = opened(model)
    real = residents.Residents.reconsider
    monkeypatch.setattr(
        residents.Residents, "reconsider", lambda *args, **options: looks.append(1) or real(*args, **options)
    )
    machine.lacks(GIB)
    train(model, offloader, steps=8)
    machine.lacks(-GIB)
    train(model, offloader, steps=16)
    assert waiting(model) == []
    assert len(looks) == 2


def test_in_memory_that_is_not_short_nothing_moves_and_no_pass_has_hooks(
    opened: Callable[..., Offloader], machine: Machine
) -> None:
    model = built()
    machine.models.append(model)
    offloader = opened(model)
    machine.lacks(0)
    for _ in range(20):
        with offloader.saved_tensors(signature="one kind"):
            loss = model(next(batches(1))).sum()
        loss.backward()
        offloader.end_backward()
    assert waiting(model) == []
    assert offloader.stats.num_plain_passes == 19
    assert all("forward" not in vars(module) for module in model.modules())


# -- who else may hold a weight --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_used", [True, False])
def test_a_graph_that_has_been_used_holds_no_weight(is_used: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss = (model(torch.ones(1, 8)) * model[0].weight.sin().sum()).sum()
    if is_used:
        loss.backward()
    reasons = [why_it_stays(weights) for weights in shared_weights(model, 256)]
    assert [reason is None for reason in reasons] == [is_used] * 2
    assert loss.grad_fn is not None


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)], ids=["built", "asked", "both"])
def test_trained_weights_can_wait_in_inference_mode(modes: tuple[bool, bool]) -> None:
    with torch.inference_mode(modes[0]):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.inference_mode(modes[1]):
        assert [why_it_stays(weights) for weights in shared_weights(model, 256)] == [None] * 2


def test_a_graph_holds_its_weights_in_inference_mode_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss = (model(torch.ones(1, 8)) * model[0].weight.sin().sum()).sum()
    with torch.inference_mode():
        assert all(why_it_stays(weights) is not None for weights in shared_weights(model, 256))
    loss.backward()
