"""What only a device has where weights leave it between steps: graphs that know addresses, streams, and its gauge."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.memory import gauge
from lightning_ssd.memory.gauge import DeviceGauge
from lightning_ssd.parameters.step_memory import StepMemory
from tests.support.interrupted_points import Checkpoint, PointsIn
from tests.support.late import late_copies
from tests.support.pairs import each_once
from tests.support.pretended_training import on, pretended_device
from tests.support.pretended_weights import weights_of
from tests.support.residency import (
    BLOCK_BYTES,
    GIB,
    NUM_WEIGHTS,
    TRAINED,
    blocks_of,
    policy,
    register,
    small_bytes,
)
from tests.support.weight_loops import NUM_BLOCKS, WIDTH, Loop, batches, built, same, train


class Asked:
    stream = None

    def __init__(self):
        self.is_in_capture = self.has_graph = False
        self.num_waits = 0

    def is_capturing(self):
        return self.is_in_capture

    def may_have_graphs(self):
        return self.has_graph

    def synchronize(self):
        self.num_waits += 1


@pytest.fixture
def asked(monkeypatch):
    made = Asked()
    monkeypatch.setattr("lightning_ssd.parameters.device_weights.accelerator_of", lambda device: made)
    return made


@pytest.mark.parametrize("name", ["is_in_capture", "has_graph"])
def test_where_a_graph_may_know_addresses_nothing_begins_to_wait(name, running_card, asked):
    """One that was captured while all weights stayed reads them past every door."""
    model = built()
    offloader = running_card.open(model)
    setattr(asked, name, True)
    running_card.lack(GIB)
    train(model, offloader)
    assert running_card.waiting(model) == []
    setattr(asked, name, False)
    assert asked.num_waits == 0
    train(model, offloader)
    assert len(running_card.waiting(model)) == NUM_WEIGHTS
    assert asked.num_waits == NUM_WEIGHTS, "streams that nobody has told of may use each"


def test_saved_activations_that_need_room_get_it(card):
    model = built()
    offloader = card.open(model, activations="auto")
    scheduler = offloader._parts.scheduler
    assert scheduler.make_room(BLOCK_BYTES // 2)
    expected = train(built())
    assert same(train(model, offloader), expected)
    assert 0 < len(blocks_of(card.waiting(model))) < NUM_BLOCKS


# -- interrupts --------------------------------------------------------------------------------------------------------


def alternating(running_card, run):
    turn = [0]

    def one():
        turn[0] += 1
        running_card.lack(GIB if turn[0] % 2 else -GIB)
        run(2 if turn[0] % 2 else 5)

    return one


@pytest.fixture
def without_delay(spill_dir):
    with late_copies(max_delay_s=0) as copies:
        made = []

        def make(**options):
            hardware = HardwareProfile(paths=[spill_dir])
            made.append(Offloader(policy=policy(**options), hardware=hardware, _copies=copies).open())
            return made[-1]

        yield make
        for offloader in made:
            offloader.close()


def test_an_interrupt_at_each_point_costs_no_bit(running_card, without_delay):
    """Of a forward before which weights leave, and of one before which they come back."""
    names = ("paged_weights", "device_weights", "device_memory", "residents")
    points = PointsIn(*(f"parameters/{name}.py" for name in names))
    num, ids, model, offloader = 0, next(batches(1)), built(), without_delay()
    running_card.models.append(model)
    offloader.register_module(model)
    expected = model(ids).detach().clone()

    def run(steps):
        for _ in range(steps):
            with offloader.saved_tensors():
                loss = model(ids).sum()
            loss.backward()
            offloader.end_backward()
            model.zero_grad()

    one = alternating(running_card, run)
    one()
    assert len(running_card.waiting(model)) == NUM_WEIGHTS
    while (where := points.interrupt(one)) is not None:
        num += 1
        model.zero_grad()
        assert torch.equal(model(ids), expected), where
    one()
    one()
    assert torch.equal(model(ids), expected)
    assert num > 50
    offloader.close()
    assert running_card.waiting(model) == []


@pytest.mark.exhaustive
def test_an_interrupt_while_trained_weights_move_costs_no_bit(running_card, without_delay):
    """After it the last checkpoint is loaded, and the steps repeated."""
    points, num = PointsIn(*(f"parameters/{name}.py" for name in ("paged_parameters", "device_gradients"))), 0
    loop = running_card.loop(without_delay(**TRAINED)).run(1)
    checkpoint = Checkpoint(loop)
    expected = checkpoint.load(Loop()).run(1).result()
    while (where := points.interrupt(alternating(running_card, loop.run))) is not None:
        num += 1
        assert same(checkpoint.load(loop).run(1).result(), expected), where
        checkpoint.load(loop)
    assert num > 20


# -- what is read ------------------------------------------------------------------------------------------------------


class Waiting(SimpleNamespace):
    present_bytes: int
    window_bytes: int


def test_weights_in_use_are_available_and_not_held(card):
    card.capacity_bytes, card.others_bytes = 1000, 300
    device = DeviceGauge(torch.device("cpu"))
    assert (device.held_bytes(), device.available_bytes(0), device.window_bytes()) == (300, 700, 0)
    device.count_out(Waiting(present_bytes=40, window_bytes=100))
    assert (device.held_bytes(), device.needed_bytes(), device.available_bytes(0)) == (260, 260, 740)
    device.count_out(Waiting(present_bytes=140, window_bytes=100))
    assert (device.held_bytes(), device.available_bytes(0)) == (200, 800), "what is there beyond its use is held"
    assert device.fixed_bytes(7) == 0


@pytest.mark.parametrize(("is_capturing", "stats"), [(True, {"reserved": 1}), (False, {})])
def test_a_device_that_cannot_be_asked_has_unknown_memory(is_capturing, stats, card, monkeypatch):
    accelerator = SimpleNamespace(is_capturing=lambda: is_capturing, memory_stats=lambda: stats)
    monkeypatch.setattr(gauge, "accelerator_of", lambda device: accelerator)
    assert DeviceGauge(torch.device("cpu")).available_bytes(0) is None


def test_a_peak_that_rises_in_a_step_shows_temporaries(running_card):
    device = DeviceGauge(torch.device("cpu"))
    device.count_out(Waiting(present_bytes=0, window_bytes=50))
    watched = StepMemory(device)
    running_card.others_bytes, running_card.peak_bytes = 100, 900
    assert watched.begin() is None
    watched.end(is_seen=True)
    assert watched.begin() == 100, "the peak may be of any time before"
    running_card.peak_bytes = 950
    watched.end(is_seen=False)
    assert watched.begin() == 950 - 50, "of the peak, so much may be weights that wait"
    watched.end(is_seen=False)
    assert watched.begin() == 900, "a step that nobody has seen tells nothing"
    running_card.peak_bytes = 10  # somebody has begun it anew
    running_card.others_bytes = 130
    watched.look()
    watched.end(is_seen=True)
    assert watched.begin() == 130 + 30


# -- the order of copies -----------------------------------------------------------------------------------------------


@pytest.fixture
def racing(spill_dir):
    """Opens offloaders of a device whose streams run in any order, and whose races are faults."""
    made = []

    def make(device, *modules, **options):
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True, host_memory="1MiB")
        made.append(Offloader(policy=policy(**options), hardware=hardware, **on(device)).open(*modules))
        return made[-1]

    yield make
    for offloader in made:
        assert not offloader.is_open


@each_once("activations, seed", ["keep", "offload"], range(2))
def test_no_race(activations, seed, running_card, racing):
    def trained(offloader):
        def between(model, optimizer, step):
            seen.append(len(running_card.waiting(model)))
            if step in (1, 3):
                running_card.lack(BLOCK_BYTES // 2 if step == 1 else -GIB)

        loop = Loop(None, after_step=between)
        running_card.models[:] = [loop.model]
        if offloader is not None:
            register(loop, offloader)
        return loop.run(10).result()

    seen = []
    with pretended_device(seed=seed, lag_s=0.001) as device, weights_of(device):
        expected = trained(None)
        seen.clear()
        with racing(device, activations=activations, **TRAINED) as offloader:
            found = trained(offloader)
        assert same(found, expected)
    assert device.faults == []
    assert seen[1] == seen[-1] == 0
    assert 0 < seen[3] < 13


def linears():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)


def one_step(model, offloader, x):
    with offloader.saved_tensors():
        loss = model(x.clone().requires_grad_()).sum()
    loss.backward()
    offloader.end_backward()


def test_streams_that_nobody_tells_of_may_use_what_came_back(running_card, racing):
    """They waited once, when the model was made, as suffices for weights that nobody changes."""
    x = torch.ones(4, WIDTH)
    with pretended_device(lag_s=0.02) as device, weights_of(device):
        model = linears()
        running_card.models.append(model)
        with device.stream("side"), torch.no_grad():
            device.wait_stream("main")
            expected = model(x)
        device.wait_stream("side")
        with racing(device, model) as offloader:
            for lacking, num_steps in ((GIB, 2), (-GIB, 5)):
                running_card.lack(lacking)
                for _ in range(num_steps):
                    one_step(model, offloader, x)
                    if lacking < 0 and not running_card.waiting(model):
                        break
                assert bool(running_card.waiting(model)) is (lacking > 0)
            with device.stream("side"), torch.no_grad():
                assert torch.equal(model(x), expected)
                for parameter in model.parameters():
                    device.protect(parameter)  # who has the weights freed later is up to the user
    assert device.faults == []


def test_what_another_thread_uses_meanwhile_leaves_after_that(running_card, asked, racing, monkeypatch):
    """On a stream of its own, as an evaluation does, while others are being written."""
    x = torch.ones(4, WIDTH)
    with pretended_device(lag_s=0.005) as device, weights_of(device):

        def synchronize():
            for stream in ("main", "side"):
                device.mark(stream).synchronize()

        monkeypatch.setattr(asked, "synchronize", synchronize)
        model = linears()
        running_card.models.append(model)
        synchronize()
        with racing(device, model) as offloader:
            pager = offloader._parts.parameters.weights.pager
            put_away = pager.put_away

            def used_meanwhile(weight):
                put_away(weight)
                with device.stream("side"), torch.no_grad():
                    model[3](x)

            monkeypatch.setattr(pager, "put_away", used_meanwhile)
            running_card.lack(GIB)
            for _ in range(2):
                one_step(model, offloader, x)
            assert len(running_card.waiting(model)) == 4
    assert device.faults == []


@pytest.mark.parametrize("num_staying", [1, NUM_BLOCKS])
def test_registered_again_where_a_graph_may_know_addresses_as_many_wait_as_before(num_staying, card, asked, caplog):
    plain, model = built(), built()
    if num_staying < NUM_BLOCKS:
        card.has_room((2 + num_staying) * BLOCK_BYTES, others=small_bytes(model))
    offloader = card.open(model)
    before, kept = card.waiting(model), offloader.stats.weights_kept_bytes
    assert NUM_BLOCKS - len(blocks_of(before)) == num_staying
    asked.has_graph, card.capacity_bytes = True, 0
    caplog.set_level(logging.INFO, "lightning_ssd")
    offloader.register_module(model)
    assert card.waiting(model) == before
    assert offloader.stats.weights_kept_bytes == kept
    assert "as before, " in caplog.text
    assert same(train(model, offloader), train(plain))
    asked.has_graph = False
    offloader.register_module(model)
    assert len(card.waiting(model)) == NUM_WEIGHTS
