"""Only as much of a model leaves a device as its memory lacks, when it is registered and between steps: the bits of
plain training, with copies that end late.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.errors import BudgetError, ConfigError
from lightning_ssd.memory import gauge
from lightning_ssd.memory.gauge import DeviceGauge
from lightning_ssd.parameters import step_memory
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.parameters.step_memory import StepMemory
from lightning_ssd.planning import residency, update_memory
from tests.parameters.test_auto import BLOCK_BYTES, COMING_BYTES, TRAINED, blocks_of, in_update, policy
from tests.parameters.test_device_weights import NUM_WEIGHTS, away, eventually
from tests.parameters.test_everything_away import Loop
from tests.parameters.test_paged_weights import NUM_BLOCKS, WIDTH, Net, batches, built, equal_weights, same, train
from tests.support.faults import FaultyBackend, eio
from tests.support.interrupted_points import PointsIn
from tests.support.late import late_copies
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import on, pretended_device
from tests.support.pretended_weights import weights_of

GIB = 1 << 30
ALL_BYTES = NUM_BLOCKS * BLOCK_BYTES + built().embedding.weight.nbytes
"""What is frozen and large."""
Opened = Callable[..., Offloader]


class Card:
    """A device's memory, and what is said to lie there: the weights of some models, as far as they have memory."""

    def __init__(self) -> None:
        self.capacity_bytes: int | None = 1000 * GIB
        self.models: list[nn.Module] = []
        self.on_host: list[StorageKey] = []
        """Storages that have not been moved there."""
        self.others_bytes = 0
        self.peak_bytes = 0

    def stays_on_host(self, model: nn.Module) -> None:
        """Until it is moved."""
        self.models.append(model)
        self.on_host += [StorageKey(storage_of(p)) for p in model.parameters()]

    def held_bytes(self, *_: object) -> int:
        """What the allocator has handed out."""
        found = {storage_of(p)._cdata: storage_of(p).nbytes() for m in self.models for p in m.parameters()}
        on_host = {key.cdata for key in self.on_host}
        return self.others_bytes + sum(nbytes for cdata, nbytes in found.items() if cdata not in on_host)

    def available_bytes(self, *_: object) -> int | None:
        """What it could still hand out."""
        return None if self.capacity_bytes is None else max(self.capacity_bytes - self.held_bytes(), 0)

    def has_room(self, nbytes: int, *, coming: int = 0, others: int = 0) -> None:
        """For weights that may wait. As much is left for activations."""
        self.capacity_bytes = math.ceil((2 * nbytes + coming + others) / 0.9)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    said = Card()
    monkeypatch.setattr(gauge, "level_bytes", said.held_bytes)
    monkeypatch.setattr(gauge, "available_bytes", said.available_bytes)
    monkeypatch.setattr(gauge, "peak_bytes", lambda device: said.peak_bytes)
    return said


@pytest.fixture
def steps_tell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is watched, and counts alone."""
    monkeypatch.setattr(step_memory, "_REST_S", 0.0)
    monkeypatch.setattr(step_memory, "_NUM_STEPS", 1)
    monkeypatch.setattr(residency, "_TOLERANCE", 0.0)
    monkeypatch.setattr(residency, "_AMPLE_SHARE", 0.0)
    monkeypatch.setattr(residency, "_PATIENCE", 3)


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in many parts."""
    monkeypatch.setattr(update_memory, "_MIN_SUBGROUP_BYTES", 1 << 17)


@pytest.fixture
def opened(spill_dir: Path, card: Card) -> Iterator[Opened]:
    """Makes offloaders for a device whose copies end late; they are closed at the end."""
    made = []
    with late_copies(max_delay_s=0.001) as copies:

        def make(*modules: nn.Module, **options: Any) -> Offloader:
            card.models += modules
            hardware = HardwareProfile(paths=[spill_dir], host_memory=options.pop("host_memory", 0))
            named = {name: options.pop(name) for name in ("_wrap_backend", "agree") if name in options}
            made.append(Offloader(policy=policy(**options), hardware=hardware, _copies=copies, **named))
            return made[-1].open(*modules)

        yield make
        for offloader in made:
            offloader.close()


def guarded(model: nn.Module) -> list[str]:
    """Names of the weights that wait, or are brought in to be used."""
    return [name for name, parameter in model.named_parameters() if is_guarded(parameter)]


def small_bytes(model: nn.Module) -> int:
    """Of weights that cannot wait."""
    return sum(p.nbytes for p in model.parameters()) - ALL_BYTES


# -- when a model is registered --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, TRAINED], ids=["frozen", "trained"])
def test_with_room_for_all_nothing_moves(options: dict[str, Any], opened: Opened) -> None:
    plain, model = built(), built()
    before = [(parameter.data_ptr(), type(parameter)) for parameter in model.parameters()]
    offloader = opened(model, **options)
    offloader.expect_no_optimizer()
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)
    assert [(parameter.data_ptr(), type(parameter)) for parameter in model.parameters()] == before
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    parts = offloader._parts.parameters
    assert parts.weights.stats.bytes_written == parts.weights.stats.weights_bytes == 0
    assert offloader.stats.weights_kept_bytes == ALL_BYTES + (NUM_BLOCKS * 4 * WIDTH * WIDTH if options else 0)


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute"])
@pytest.mark.parametrize("num_staying", [0, 1, 2])
def test_frozen_blocks_wait_as_far_as_memory_lacks(
    num_staying: int, activations: str, opened: Opened, card: Card
) -> None:
    plain, model = built(), built()
    card.has_room((2 + num_staying) * BLOCK_BYTES, coming=COMING_BYTES, others=small_bytes(model))
    offloader = opened(model, activations=activations)
    assert offloader.stats.weights_kept_bytes == num_staying * BLOCK_BYTES
    assert offloader.stats.weights_bytes == ALL_BYTES - num_staying * BLOCK_BYTES
    waiting = set(guarded(model))
    assert set(away(model)) == waiting
    assert NUM_BLOCKS - len(blocks_of(list(waiting))) == num_staying
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)
    stays = [parameter for name, parameter in model.named_parameters() if name not in waiting]
    assert all(type(parameter) is nn.Parameter for parameter in stays)


@pytest.mark.parametrize("num_staying", [0, 2])
@pytest.mark.parametrize("gradients", ["keep", "auto", "offload"])
def test_trained_blocks_wait_with_their_gradients(gradients: str, num_staying: int, opened: Opened, card: Card) -> None:
    seen = []

    def look(model: nn.Module, *_: object) -> None:
        found = [n for n, p in model.named_parameters() if p.grad is not None and is_guarded(p.grad)]
        seen.append((guarded(model), found))

    trained = 4 * 9 * WIDTH * WIDTH
    biases = sum(parameter.nbytes for parameter in Net().parameters() if parameter.nbytes < 16 << 10)
    coming = in_update(Net()) + biases
    coming += sum(p.nbytes for p in Net().parameters()) - biases if gradients == "keep" else 0
    with_gradient = 2 if gradients == "auto" else 1
    card.has_room(2 * trained + num_staying * with_gradient * trained, coming=coming, others=biases)
    expected = Loop().run().result()
    offloader = opened(optimizer_states="offload", gradients=gradients)
    loop = Loop(None, before_step=look)
    card.models.append(loop.model)
    register(loop, offloader)
    assert same(loop.run().result(), expected)
    weights, found = seen[0]
    assert NUM_BLOCKS - len(blocks_of(weights)) == num_staying
    assert (set(found) == set(weights)) is (gradients == "auto" or (gradients == "offload" and num_staying == 0))
    assert bool(found) is (gradients != "keep")


def register(loop: Loop, offloader: Offloader) -> None:
    """As :class:`Loop` does where it makes the model."""
    offloader.register_module(loop.model)
    loop.offloader = offloader
    loop.optimizer = offloader.offload_optimizer(torch.optim.AdamW(loop.model.parameters(), lr=1e-2))


def test_where_nobody_tells_of_memory_all_wait(opened: Opened, card: Card) -> None:
    card.capacity_bytes = None
    model = built()
    offloader = opened(model)
    assert len(away(model)) == NUM_WEIGHTS
    assert offloader.stats.weights_kept_bytes == 0
    assert same(train(model, offloader), train(built()))


def test_a_budget_is_one_of_the_device(opened: Opened) -> None:
    model = built()
    budget = small_bytes(model) + COMING_BYTES + 2 * 4 * BLOCK_BYTES
    offloader = opened(model, activations="auto", memory_budget=max(budget, 1 << 20))
    assert 0 < offloader.stats.weights_kept_bytes < ALL_BYTES
    assert same(train(model, offloader, steps=2), train(built(), steps=2))


def test_a_budget_without_room_for_what_cannot_wait_is_refused(opened: Opened, card: Card) -> None:
    card.others_bytes = GIB
    model = built()
    card.models.append(model)
    offloader = opened(activations="auto", memory_budget=GIB + BLOCK_BYTES)
    with pytest.raises(
        BudgetError, match=r"even if all weights leave that can: this model needs more than .* of weights in use"
    ):
        offloader.register_module(model)
    assert guarded(model) == []
    card.others_bytes = 0
    offloader.register_module(model)
    assert guarded(model) == []


def test_several_processes_are_refused(opened: Opened) -> None:
    with pytest.raises(ConfigError, match=r"OffloadPolicy.parameters='auto' got several processes on 'cpu'"):
        opened(agree=list)


@pytest.mark.parametrize("capacity", [0, 1000 * GIB])
def test_what_is_compiled_as_a_whole_is_not_counted_on(capacity: int, opened: Opened, card: Card) -> None:
    model = built()
    model.compile(backend="aot_eager")
    card.capacity_bytes = capacity
    offloader = opened(model)
    assert guarded(model) == []
    assert offloader.stats.weights_kept_bytes == 0, "it could not wait"


def test_registered_again_as_many_wait_as_before(opened: Opened, card: Card) -> None:
    """What is away is neither held nor lost sight of, and no gradient comes back to be counted."""
    offloader, loop = opened(**TRAINED), Loop(None)
    card.models.append(loop.model)
    trained = 4 * 9 * WIDTH * WIDTH
    small = sum(parameter.nbytes for parameter in loop.model.parameters() if parameter.nbytes < 16 << 10)
    card.others_bytes = 4 * trained
    card.has_room(6 * trained, coming=in_update(loop.model) + small, others=small + card.others_bytes)
    register(loop, offloader)
    before = guarded(loop.model)
    assert NUM_BLOCKS - len(blocks_of(before)) == 2
    with offloader.saved_tensors():
        loss = loop._loss(next(batches(1)))
    loss.backward()
    del loss
    offloader.end_backward()
    gradients = [parameter.grad for name, parameter in loop.model.named_parameters() if name in before]

    def have_left() -> bool:
        return all(storage_of(gradient).nbytes() == 0 for gradient in gradients if gradient is not None)

    assert eventually(offloader, have_left)
    tier = offloader._parts.parameters.weights._tiers.ssd
    read_bytes = tier.progress().read_bytes
    offloader.register_module(loop.model)
    assert guarded(loop.model) == before
    assert have_left()
    assert tier.progress().read_bytes == read_bytes


# -- while a model is built, or moved ----------------------------------------------------------------------------------


def test_a_model_larger_than_the_device_moves_in(opened: Opened, card: Card) -> None:
    """What half of the device has room for stays, the others leave as they come."""
    plain, model = built(), built()
    card.stays_on_host(model)
    card.capacity_bytes = int(ALL_BYTES / 0.9)
    highest = []
    offloader = opened()
    take_over = offloader._parts.parameters.weights._take_over
    offloader._parts.parameters.weights._take_over = lambda *args: highest.append(card.held_bytes()) or take_over(*args)
    offloader.move_in(model)
    assert 0 < len(away(model)) < NUM_WEIGHTS
    assert set(away(model)) == set(guarded(model))
    assert card.held_bytes() <= ALL_BYTES / 2
    assert max(highest) <= ALL_BYTES / 2 + BLOCK_BYTES
    model.to("cpu")
    card.on_host.clear()
    offloader.register_module(model)
    assert guarded(model)
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)


def test_what_has_left_on_the_way_and_has_room_comes_back(opened: Opened, card: Card) -> None:
    plain, model = built(), built()
    card.stays_on_host(model)
    card.capacity_bytes = 0
    offloader = opened()
    offloader.move_in(model)
    assert len(away(model)) == NUM_WEIGHTS
    card.capacity_bytes = 1000 * GIB
    offloader.register_module(model)
    assert away(model) == guarded(model) == []
    assert same(train(model, offloader), train(plain))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("is_short", [False, True])
def test_what_is_built_leaves_only_while_memory_is_short(is_short: bool, opened: Opened, card: Card) -> None:
    card.others_bytes = GIB
    card.capacity_bytes = 10 * GIB if not is_short else GIB * 3 // 2
    offloader = opened()
    with offloader.streamed_init():
        model = built()
    assert (away(model) != []) is (guarded(model) != []) is is_short
    card.capacity_bytes = 1000 * GIB
    offloader.register_module(model)
    assert away(model) == guarded(model) == []
    assert same(train(model, offloader), train(built()))


# -- between steps -----------------------------------------------------------------------------------------------------


class Steps:
    """What a step is said to take besides the weights, from its beginning to its worst moment."""

    def __init__(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        self._card = card
        self.rise_bytes = 0
        real = StepMemory.end

        def end(memory: StepMemory, *, is_seen: bool) -> None:
            """As if it had been seen while the step ran."""
            card.others_bytes += self.rise_bytes
            memory._next_look_s = 0.0
            memory.look()
            card.others_bytes -= self.rise_bytes
            real(memory, is_seen=is_seen)

        monkeypatch.setattr(StepMemory, "end", end)

    def lack(self, nbytes: int) -> None:
        """From the next step on, so much more than the card has, where all weights stay."""
        assert self._card.capacity_bytes is not None
        everything = sum({storage_of(p)._cdata: p.nbytes for m in self._card.models for p in m.parameters()}.values())
        self.rise_bytes = int(0.9 * self._card.capacity_bytes) - everything + nbytes


@pytest.fixture
def steps(card: Card, monkeypatch: pytest.MonkeyPatch, steps_tell_at_once: None) -> Steps:
    card.capacity_bytes = 10 * GIB
    return Steps(card, monkeypatch)


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute"])
def test_a_run_that_gets_scarce_has_the_bits_of_plain_training(activations: str, opened: Opened, steps: Steps) -> None:
    plain, model, seen = built(), built(), []

    def between(model: nn.Module, step: int) -> None:
        seen.append(blocks_of(guarded(model)))
        lacking = {1: BLOCK_BYTES // 2, 5: GIB, 8: -GIB}
        if step in lacking:
            steps.lack(lacking[step])

    offloader = opened(model, activations=activations)
    assert same(train(model, offloader, steps=16, between=between), train(plain, steps=16))
    assert equal_weights(model, plain)
    assert seen[:3] == [[]] * 3, "the third step shows it"
    assert 0 < len(seen[3]) <= len(seen[6]) < 4, "one more at most: some may be there beyond their use"
    assert seen[7] == [0, 1, 2, 3]
    assert seen[9:12] == [[0, 1, 2, 3]] * 3, "three steps have to show that much is left"
    assert seen[-1] == []
    assert guarded(model) == []
    assert offloader.stats.weights_bytes == 0


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"set_to_none": False}], ids=["plain", "twice", "zeros"])
def test_trained_weights_leave_and_come_back_with_their_gradients(
    options: dict[str, Any], opened: Opened, card: Card, steps: Steps
) -> None:
    seen = []

    def look(model: nn.Module, optimizer: object, step: int) -> None:
        gradients = [n for n, p in model.named_parameters() if p.grad is not None and is_guarded(p.grad)]
        assert set(guarded(model)) >= set(gradients)
        seen.append((len(guarded(model)), len(gradients)))
        lacking = {2: BLOCK_BYTES // 2, 4: GIB, 7: -GIB, 13: BLOCK_BYTES // 2, 16: -GIB}
        if step in lacking:
            steps.lack(lacking[step])

    expected = Loop(**options).run(28).result()
    offloader = opened(**TRAINED)
    loop = Loop(None, before_step=look, **options)
    card.models.append(loop.model)
    register(loop, offloader)
    assert same(loop.run(28).result(), expected)
    numbers = [waits for waits, _ in seen]
    assert numbers[:3] == [0] * 3
    assert 0 < numbers[4] < numbers[7] == 13
    assert numbers[12:14] == [0] * 2
    assert 0 < numbers[16] < 13
    assert seen[-1] == (0, 0)


def test_what_comes_back_is_not_counted_twice(opened: Opened, steps: Steps) -> None:
    """There is room for it, and for half of it besides: it stays."""
    plain, model, seen = built(), built(), []

    def between(model: nn.Module, step: int) -> None:
        seen.append(blocks_of(guarded(model)))
        lacking = {1: GIB, 4: -ALL_BYTES // 2}
        if step in lacking:
            steps.lack(lacking[step])

    offloader = opened(model, activations="keep")
    assert same(train(model, offloader, steps=14, between=between), train(plain, steps=14))
    assert seen[4] == [0, 1, 2, 3]
    assert seen[9:] == [[]] * 5


def test_nothing_moves_while_a_graph_is_alive(opened: Opened, steps: Steps) -> None:
    model, ids = built(), next(batches(1))
    offloader = opened(model)
    train(model, offloader, steps=1)
    steps.lack(GIB)
    train(model, offloader, steps=1)
    with offloader.saved_tensors():
        first = model(ids).logsumexp(-1).mean()
    assert len(guarded(model)) == NUM_WEIGHTS
    steps.lack(-GIB)
    for _ in range(8):
        with offloader.saved_tensors():
            model(ids).logsumexp(-1).mean()
    assert len(guarded(model)) == NUM_WEIGHTS
    first.backward()
    offloader.end_backward()


def test_a_weight_that_somebody_holds_stays(opened: Opened, steps: Steps) -> None:
    plain, model = built(), built()
    held = model.blocks[1].up.weight.detach()[1:]
    offloader = opened(model)
    steps.lack(GIB)
    assert same(train(model, offloader), train(plain))
    assert len(guarded(model)) == NUM_WEIGHTS - 1
    assert "blocks.1.up.weight" not in guarded(model)
    assert torch.equal(held, model.blocks[1].up.weight[1:])


class Asked:
    """In the place of an accelerator, whose streams may be behind, and which may have graphs."""

    stream = None

    def __init__(self) -> None:
        self.is_in_capture = self.has_graph = False
        self.num_waits = 0

    def is_capturing(self) -> bool:
        return self.is_in_capture

    def may_have_graphs(self) -> bool:
        return self.has_graph

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("name", ["is_in_capture", "has_graph"])
def test_where_a_graph_may_know_addresses_nothing_begins_to_wait(
    name: str, opened: Opened, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was captured while all weights stayed reads them past every door."""
    model, asked = built(), Asked()
    monkeypatch.setattr("lightning_ssd.parameters.device_weights.accelerator_of", lambda device: asked)
    offloader = opened(model)
    setattr(asked, name, True)
    steps.lack(GIB)
    train(model, offloader)
    assert guarded(model) == []
    setattr(asked, name, False)
    assert asked.num_waits == 0
    train(model, offloader)
    assert len(guarded(model)) == NUM_WEIGHTS
    assert asked.num_waits == NUM_WEIGHTS, "streams that nobody has told of may use each"


@pytest.mark.parametrize("num_staying", [1, NUM_BLOCKS])
def test_registered_again_where_a_graph_may_know_addresses_as_many_wait_as_before(
    num_staying: int, opened: Opened, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, asked = built(), built(), Asked()
    monkeypatch.setattr("lightning_ssd.parameters.device_weights.accelerator_of", lambda device: asked)
    if num_staying < NUM_BLOCKS:
        card.has_room((2 + num_staying) * BLOCK_BYTES, coming=COMING_BYTES, others=small_bytes(model))
    offloader = opened(model)
    before, kept = guarded(model), offloader.stats.weights_kept_bytes
    assert NUM_BLOCKS - len(blocks_of(before)) == num_staying
    asked.has_graph, card.capacity_bytes = True, 0
    caplog.set_level(logging.INFO, "lightning_ssd")
    offloader.register_module(model)
    assert guarded(model) == before
    assert offloader.stats.weights_kept_bytes == kept
    assert "as before, " in caplog.text
    assert same(train(model, offloader), train(plain))
    asked.has_graph = False
    offloader.register_module(model)
    assert len(guarded(model)) == NUM_WEIGHTS


def test_saved_activations_that_need_room_get_it(opened: Opened, card: Card) -> None:
    model = built()
    offloader = opened(model, activations="auto")
    scheduler = offloader._parts.scheduler
    assert scheduler is not None
    assert scheduler.make_room(BLOCK_BYTES // 2)
    expected = train(built())
    assert same(train(model, offloader), expected)
    assert 0 < len(blocks_of(guarded(model))) < NUM_BLOCKS


def test_a_drive_that_refuses_is_told_of_once_and_weights_stay(opened: Opened, steps: Steps) -> None:
    failing = [False]
    backend = lambda inner: FaultyBackend(inner, fail_write=lambda call: eio() if failing[0] else None)  # noqa: E731
    plain, model = built(), built()
    offloader = opened(model, _wrap_backend=backend)
    failing[0] = True
    steps.lack(GIB)
    with pytest.warns(UserWarning, match="wait on drives cannot be changed any more .*could not be written") as told:
        assert same(train(model, offloader, steps=6), train(plain, steps=6))
    assert sum("cannot be changed any more" in str(one.message) for one in told) == 1
    assert away(model) == []
    failing[0] = False


def test_a_device_without_memory_for_what_would_come_back_goes_on(
    opened: Opened, card: Card, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    expected, found = train(plain, steps=8), []
    steps.lack(GIB)
    found += train(model, offloader, steps=2)
    assert len(guarded(model)) == NUM_WEIGHTS
    steps.lack(-GIB)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(type(offloader._parts.parameters.pager), "release", refuse)
        with pytest.warns(UserWarning, match=r"cannot be changed any more \(injected\)"):
            train(model, offloader, steps=8)
    assert len(guarded(model)) == NUM_WEIGHTS
    model.load_state_dict(built().state_dict())
    assert same(train(model, offloader, steps=8), expected)


def test_a_checkpoint_and_the_end(opened: Opened, card: Card) -> None:
    plain, model = built(), built()
    card.has_room(4 * BLOCK_BYTES, coming=COMING_BYTES, others=small_bytes(model))
    offloader = opened(model)
    train(plain, steps=2)
    train(model, offloader, steps=2)
    with offloader.host_copies():
        state = model.state_dict()
    assert same(list(state.values()), list(plain.state_dict().values()))
    assert guarded(model)
    offloader.close()
    assert away(model) == guarded(model) == []
    assert equal_weights(model, plain)
    assert same(train(model), train(plain))


def test_what_moves_is_told(opened: Opened, steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    model = built()
    caplog.set_level(logging.INFO, "lightning_ssd")
    offloader = opened(model)
    assert "no weights wait on drives: memory has room for " in caplog.text
    steps.lack(BLOCK_BYTES // 2)
    train(model, offloader, steps=3)
    assert "steps have shown that memory lacks 0.2 MiB: 1.3 MiB more of weights wait" in caplog.text


def test_an_interrupt_at_each_point_costs_no_bit(spill_dir: Path, card: Card, steps: Steps) -> None:
    """Of a forward before which weights leave, and of one before which they come back."""
    points = PointsIn(*(f"parameters/{name}.py" for name in ("paged_weights", "device_weights", "device_memory")))
    num, ids = 0, next(batches(1))
    with (
        late_copies(max_delay_s=0) as copies,
        Offloader(policy=policy(), hardware=HardwareProfile(paths=[spill_dir]), _copies=copies) as offloader,
    ):
        model = built()
        card.models.append(model)
        offloader.register_module(model)
        expected = model(ids).detach().clone()
        turn = [0]

        def one() -> None:
            turn[0] += 1
            steps.lack(GIB if turn[0] % 2 else -GIB)
            for _ in range(2 if turn[0] % 2 else 5):
                with offloader.saved_tensors():
                    loss = model(ids).sum()
                loss.backward()
                offloader.end_backward()
                model.zero_grad()

        one()
        assert len(guarded(model)) == NUM_WEIGHTS
        while (where := points.interrupt(one)) is not None:
            num += 1
            model.zero_grad()
            assert torch.equal(model(ids), expected), where
        one()
        one()
        assert torch.equal(model(ids), expected)
    assert num > 50
    assert guarded(model) == []


@pytest.mark.exhaustive
def test_an_interrupt_while_trained_weights_move_costs_no_bit(spill_dir: Path, card: Card, steps: Steps) -> None:
    """After it the last checkpoint is loaded, and the steps repeated."""
    points, num = PointsIn(*(f"parameters/{name}.py" for name in ("paged_parameters", "device_gradients"))), 0
    with (
        late_copies(max_delay_s=0) as copies,
        Offloader(policy=policy(**TRAINED), hardware=HardwareProfile(paths=[spill_dir]), _copies=copies) as offloader,
    ):
        loop, plain, turn = Loop(None), Loop(), [0]
        card.models.append(loop.model)
        register(loop, offloader)
        loop.run(1)
        weights = {name: value.clone() for name, value in loop.model.state_dict().items()}
        states = copy.deepcopy(loop.optimizer.state_dict())

        def load(one: Loop) -> None:
            one.optimizer.zero_grad()
            one.model.load_state_dict(weights)
            one.optimizer.load_state_dict(copy.deepcopy(states))
            one.found.clear()

        def move() -> None:
            turn[0] += 1
            steps.lack(GIB if turn[0] % 2 else -GIB)
            loop.run(2 if turn[0] % 2 else 5)

        load(plain)
        expected = plain.run(1).result()
        while (where := points.interrupt(move)) is not None:
            num += 1
            load(loop)
            assert same(loop.run(1).result(), expected), where
            load(loop)
    assert num > 20


# -- what is read ------------------------------------------------------------------------------------------------------


class Waiting(SimpleNamespace):
    """Weights that wait, as a gauge sees them."""

    present_bytes: int
    window_bytes: int


def test_weights_in_use_are_available_and_not_held(card: Card) -> None:
    card.capacity_bytes, card.others_bytes = 1000, 300
    device = DeviceGauge(torch.device("cpu"))
    assert (device.held_bytes(), device.available_bytes(0), device.window_bytes()) == (300, 700, 0)
    device.count_out(Waiting(present_bytes=40, window_bytes=100))
    assert (device.held_bytes(), device.needed_bytes(), device.available_bytes(0)) == (260, 260, 740)
    device.count_out(Waiting(present_bytes=140, window_bytes=100))
    assert (device.held_bytes(), device.available_bytes(0)) == (200, 800), "what is there beyond its use is held"
    assert device.fixed_bytes(7) == 0


@pytest.mark.parametrize(("is_capturing", "stats"), [(True, {"reserved": 1}), (False, {})])
def test_a_device_that_cannot_be_asked_has_unknown_memory(
    is_capturing: bool, stats: dict[str, int], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = SimpleNamespace(is_capturing=lambda: is_capturing, memory_stats=lambda: stats)
    monkeypatch.setattr(gauge, "accelerator_of", lambda device: accelerator)
    assert DeviceGauge(torch.device("cpu")).available_bytes(0) is None


def test_a_peak_that_rises_in_a_step_shows_temporaries(card: Card, steps_tell_at_once: None) -> None:
    device = DeviceGauge(torch.device("cpu"))
    device.count_out(Waiting(present_bytes=0, window_bytes=50))
    watched = StepMemory(device)
    card.others_bytes, card.peak_bytes = 100, 900
    assert watched.begin() is None
    watched.end(is_seen=True)
    assert watched.begin() == 100, "the peak may be of any time before"
    card.peak_bytes = 950
    watched.end(is_seen=False)
    assert watched.begin() == 950 - 50, "of the peak, so much may be weights that wait"
    watched.end(is_seen=False)
    assert watched.begin() == 900, "a step that nobody has seen tells nothing"
    card.peak_bytes = 10  # somebody has begun it anew
    card.others_bytes = 130
    watched.look()
    watched.end(is_seen=True)
    assert watched.begin() == 130 + 30


# -- the order of copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_no_race(activations: str, seed: int, spill_dir: Path, card: Card, steps: Steps) -> None:
    """On a device whose streams run in any order, and whose races are faults."""

    def trained(offloader: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
        def between(model: nn.Module, optimizer: object, step: int) -> None:
            seen.append(len(guarded(model)))
            if step in (1, 3):
                steps.lack(BLOCK_BYTES // 2 if step == 1 else -GIB)

        loop = Loop(None, after_step=between)
        card.models[:] = [loop.model]
        if offloader is not None:
            register(loop, offloader)
        return loop.run(10).result()

    seen: list[int] = []
    with pretended_device(seed=seed, lag_s=0.001) as device, weights_of(device):
        expected = trained(None, device)
        seen.clear()
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True, host_memory="1MiB")
        chosen = policy(activations=activations, **TRAINED)
        with Offloader(policy=chosen, hardware=hardware, **on(device)).open() as offloader:
            found = trained(offloader, device)
        assert same(found, expected)
    assert device.faults == []
    assert seen[1] == seen[-1] == 0
    assert 0 < seen[3] < 13


def test_streams_that_nobody_tells_of_may_use_what_came_back(spill_dir: Path, card: Card, steps: Steps) -> None:
    """They waited once, when the model was made, as suffices for weights that nobody changes."""
    x = torch.ones(4, WIDTH)
    with pretended_device(lag_s=0.02) as device, weights_of(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
        card.models.append(model)
        with device.stream("side"), torch.no_grad():
            device.wait_stream("main")
            expected = model(x)
        device.wait_stream("side")
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True, host_memory="1MiB")
        with Offloader(policy=policy(), hardware=hardware, **on(device)).open(model) as offloader:
            for lacking, num_steps in ((GIB, 2), (-GIB, 5)):
                steps.lack(lacking)
                for _ in range(num_steps):
                    trained = x.clone().requires_grad_()
                    with offloader.saved_tensors():
                        loss = model(trained).sum()
                    loss.backward()
                    offloader.end_backward()
                    if lacking < 0 and not guarded(model):
                        break
                assert bool(guarded(model)) is (lacking > 0)
            with device.stream("side"), torch.no_grad():
                assert torch.equal(model(x), expected)
                for parameter in model.parameters():
                    device.protect(parameter)  # who has the weights freed later is up to the user
    assert device.faults == []


def test_what_another_thread_uses_meanwhile_leaves_after_that(
    spill_dir: Path, card: Card, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own, as an evaluation does, while others are being written."""
    x = torch.ones(4, WIDTH)
    with pretended_device(lag_s=0.005) as device, weights_of(device):
        asked = Asked()

        def synchronize() -> None:
            for stream in ("main", "side"):
                device.mark(stream).synchronize()

        monkeypatch.setattr(asked, "synchronize", synchronize)
        monkeypatch.setattr("lightning_ssd.parameters.device_weights.accelerator_of", lambda device: asked)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
        card.models.append(model)
        synchronize()
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True, host_memory="1MiB")
        with Offloader(policy=policy(), hardware=hardware, **on(device)).open(model) as offloader:
            pager = offloader._parts.parameters.weights.pager
            put_away = pager.put_away

            def used_meanwhile(weight: Any) -> None:
                put_away(weight)
                with device.stream("side"), torch.no_grad():
                    model[3](x)

            monkeypatch.setattr(pager, "put_away", used_meanwhile)
            steps.lack(GIB)
            for _ in range(2):
                with offloader.saved_tensors():
                    loss = model(x.clone().requires_grad_()).sum()
                loss.backward()
                offloader.end_backward()
            assert len(guarded(model)) == 4
    assert device.faults == []
