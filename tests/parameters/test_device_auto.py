"""What only a device has where weights leave it: graphs that know addresses, streams, and its gauge."""

import logging
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ssd.memory import gauge
from lightning_ssd.memory.gauge import DeviceGauge
from lightning_ssd.parameters.device_pager import DevicePager
from tests.support.interrupted_points import Checkpoint, PointsIn
from tests.support.late import late_copies
from tests.support.opened import offloader_in
from tests.support.pairs import each_once
from tests.support.races import assert_no_race
from tests.support.residency import (
    BLOCK_BYTES,
    GIB,
    NUM_WEIGHTS,
    TRAINED,
    blocks_of,
    register,
    small_bytes,
)
from tests.support.weight_loops import MIN_TENSOR, NUM_BLOCKS, WIDTH, Loop, batches, built, passed, same, train

AUTO = {"parameters": "auto", "activations": "keep", "min_tensor_bytes": MIN_TENSOR}


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
    assert asked.num_waits == NUM_WEIGHTS, "streams that nobody has told of may use each"


# -- interrupts --------------------------------------------------------------------------------------------------------


def alternating(card, offloader, model, run):
    """Have all weights wait, and come back the next time, by registering the model again."""
    turn = [0]

    def one():
        turn[0] += 1
        card.capacity_bytes = 0 if turn[0] % 2 else 1000 * GIB
        offloader.register_module(model)
        run(2)

    return one


@pytest.fixture
def without_delay(spill_dir):
    with late_copies(max_delay_s=0) as copies, ExitStack() as stack:
        settings = AUTO | {"_copies": copies}
        yield lambda **more: stack.enter_context(offloader_in(spill_dir, **settings | more))


def test_an_interrupt_at_each_point_costs_no_bit(card, without_delay):
    """Of registering a model whose weights leave, and whose weights come back."""
    names = ("paged_weights", "device_weights", "device_memory", "residents")
    points = PointsIn(*(f"parameters/{name}.py" for name in names))
    num, ids, model, offloader = 0, next(batches(1)), built(), without_delay()
    card.models.append(model)
    offloader.register_module(model)
    expected = model(ids).detach().clone()

    def run(steps):
        for _ in range(steps):
            passed(offloader, lambda: model(ids).sum())
            model.zero_grad()

    one = alternating(card, offloader, model, run)
    one()
    assert len(card.waiting(model)) == NUM_WEIGHTS
    while (where := points.interrupt(one)) is not None:
        num += 1
        model.zero_grad()
        assert torch.equal(model(ids), expected), where
    one()
    one()
    assert torch.equal(model(ids), expected)
    assert num > 50
    offloader.close()
    assert card.waiting(model) == []


@pytest.mark.exhaustive
def test_an_interrupt_while_trained_weights_move_costs_no_bit(card, without_delay):
    """After it the last checkpoint is loaded, and the steps repeated."""
    points, num = PointsIn(*(f"parameters/{name}.py" for name in ("paged_parameters", "device_gradients"))), 0
    offloader = without_delay(**TRAINED)
    loop = card.loop(offloader).run(1)
    checkpoint = Checkpoint(loop)
    expected = checkpoint.load(Loop()).run(1).result()
    one = alternating(card, offloader, loop.model, loop.run)
    while (where := points.interrupt(one)) is not None:
        num += 1
        assert same(checkpoint.load(loop).run(1).result(), expected), where
        checkpoint.load(loop)
    assert num > 20


# -- what is read ------------------------------------------------------------------------------------------------------


def test_weights_in_use_are_available_and_not_held(card):
    card.capacity_bytes, card.others_bytes = 1000, 300
    device = DeviceGauge(torch.device("cpu"))
    assert (device.held_bytes(), device.available_bytes(0)) == (300, 700)
    pager = DevicePager()
    device.count_out(lambda: pager.passing_bytes)
    pager._window_bytes, pager.resident_bytes = 100, 40
    assert (device.held_bytes(), device.available_bytes(0)) == (260, 740)
    pager.resident_bytes = 140
    assert (device.held_bytes(), device.available_bytes(0)) == (200, 800), "what is there beyond its use is held"
    assert device.fixed_bytes(7) == 0
    pager.close()


@pytest.mark.parametrize(("is_capturing", "stats"), [(True, {"reserved": 1}), (False, {})])
def test_a_device_that_cannot_be_asked_has_unknown_memory(is_capturing, stats, card, monkeypatch):
    accelerator = SimpleNamespace(is_capturing=lambda: is_capturing, memory_stats=lambda: stats)
    monkeypatch.setattr(gauge, "accelerator_of", lambda device: accelerator)
    assert DeviceGauge(torch.device("cpu")).available_bytes(0) is None


# -- the order of copies -----------------------------------------------------------------------------------------------


@each_once("activations, seed", ["keep", "offload"], range(2))
def test_no_race(activations, seed, card, spill_dir):
    def trained(offloader, _):
        seen.clear()

        def between(model, optimizer, step):
            seen.append(len(card.waiting(model)))
            if offloader is not None and step in (1, 3):
                card.capacity_bytes = 0 if step == 1 else 1000 * GIB
                offloader.register_module(model)

        loop = Loop(None, after_step=between)
        card.models[:] = [loop.model]
        if offloader is not None:
            register(loop, offloader)
        return loop.run(10).result()

    seen = []
    assert_no_race(trained, spill_dir, seed=seed, host_memory="1MiB", **AUTO | TRAINED | {"activations": activations})
    assert seen[1] == seen[-1] == 0
    assert seen[3] == 13


def test_streams_that_nobody_tells_of_may_use_what_came_back(card, spill_dir):
    """They waited once, when the model was made, as suffices for weights that nobody changes."""
    x = torch.ones(4, WIDTH)

    def used_aside(offloader, device):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
        card.models[:] = [model]
        with device.stream("side"):
            device.wait_stream("main")
        for capacity_bytes in (1000 * GIB, 0, 1000 * GIB) if offloader is not None else ():
            card.capacity_bytes = capacity_bytes
            offloader.register_module(model)
            assert bool(card.waiting(model)) is (capacity_bytes == 0)
            if capacity_bytes == 0:
                passed(offloader, lambda: model(x.clone().requires_grad_()).sum())
        with device.stream("side"), torch.no_grad():
            found = model(x)
            for parameter in model.parameters():
                device.protect(parameter)  # who has the weights freed later is up to the user
        device.wait_stream("side")
        return [found]

    assert_no_race(used_aside, spill_dir, lag_s=0.02, host_memory="1MiB", **AUTO)
