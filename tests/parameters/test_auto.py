"""Only as much of a model waits as memory lacks: the bits of plain training, and nothing at all where all fits."""

import logging

import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.errors import BudgetError, ConfigError
from lightning_ssd.parameters.residents import Needs
from lightning_ssd.planning.update_memory import subgroup_bytes
from tests.parameters.test_device_weights import away, eventually
from tests.support.opened import offloader_in
from tests.support.pairs import pairwise
from tests.support.residency import (
    ALL_BYTES,
    BLOCK_BYTES,
    COMING_BYTES,
    GIB,
    NUM_WEIGHTS,
    TRAINED,
    blocks_of,
    in_update,
    small_bytes,
)
from tests.support.weight_loops import NUM_BLOCKS, WIDTH, Loop, Net, built, equal_weights, same, train

# -- where all fits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, TRAINED], ids=["frozen", "trained"])
def test_with_room_for_all_nothing_moves_or_is_stood_in_for(options, place):
    plain, model = built(), built()
    before = [(parameter.data_ptr(), type(parameter)) for parameter in model.parameters()]
    offloader = place.open(model, **options)
    offloader.expect_no_optimizer()
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)
    assert [(parameter.data_ptr(), type(parameter)) for parameter in model.parameters()] == before
    assert place.waiting(model) == []
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(getattr(parameter, place.hooks) for parameter in model.parameters())
    stats = offloader.stats
    assert (stats.weights_bytes, stats.bytes_written) == (0, 0)
    assert stats.weights_kept_bytes == ALL_BYTES + (NUM_BLOCKS * 4 * WIDTH * WIDTH if options else 0)
    if place.is_late:
        assert offloader._parts.parameters.weights.stats.bytes_written == 0
    else:
        assert stats.stall_s == 0


@pytest.mark.parametrize("room", [1000 * GIB, 3 * BLOCK_BYTES])
def test_passes_need_no_hooks_only_where_nothing_waits(room, host):
    model = built()
    host.has_room(room)
    offloader = host.open(model)
    for _ in range(3):
        with offloader.saved_tensors(signature="one kind"):
            loss = model(torch.zeros(1, 3, dtype=torch.long)).sum()
        loss.backward()
        offloader.end_backward()
    assert (offloader.stats.num_plain_passes > 0) is (host.waiting(model) == [])


# -- where it does not -----------------------------------------------------------------------------------------------


@pairwise(
    "place, num_staying, activations",
    ["host", "device"],
    [0, 1, 2],
    ["keep", "offload", "auto", "recompute"],
    indirect=["place"],
)
def test_frozen_blocks_wait_as_far_as_memory_lacks(place, num_staying, activations):
    plain, model = built(), built()
    place.has_room((2 + num_staying) * BLOCK_BYTES, others=small_bytes(model))
    offloader = place.open(model, activations=activations)
    assert offloader.stats.weights_kept_bytes == num_staying * BLOCK_BYTES
    assert offloader.stats.weights_bytes == ALL_BYTES - num_staying * BLOCK_BYTES
    waiting = place.waiting(model)
    assert NUM_BLOCKS - len(blocks_of(waiting)) == num_staying
    assert not place.is_late or away(model) == waiting
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)
    assert place.is_late or offloader.stats.weights_resident_peak_bytes <= 2 * BLOCK_BYTES
    stays = [parameter for name, parameter in model.named_parameters() if name not in waiting]
    assert all(type(parameter) is nn.Parameter for parameter in stays)


@pytest.mark.parametrize("num_staying", [0, 2])
@pytest.mark.parametrize(
    ("place", "gradients"),
    [("host", "auto"), ("device", "keep"), ("device", "auto"), ("device", "offload")],
    indirect=["place"],
)
def test_trained_blocks_wait_with_their_gradients(place, gradients, num_staying):
    seen = []

    def look(model, *_):
        seen.append((place.waiting(model), place.gradients(model)))

    trained = 4 * 9 * WIDTH * WIDTH  # the adapter, too
    biases = sum(parameter.nbytes for parameter in Net().parameters() if parameter.nbytes < 16 << 10)
    coming = in_update(Net()) + biases
    coming += sum(p.nbytes for p in Net().parameters()) - biases if gradients == "keep" else 0
    with_gradient = 2 if gradients == "auto" else 1  # beside what stays
    place.has_room(2 * trained + num_staying * with_gradient * trained, coming=coming, others=biases)
    expected = Loop().run().result()
    offloader = place.open(optimizer_states="offload", gradients=gradients)
    assert same(place.loop(offloader, before_step=look).run().result(), expected)
    for weights, found in seen[: 1 if place.is_late else None]:
        assert NUM_BLOCKS - len(blocks_of(weights)) == num_staying
        assert (found == weights) is (gradients == "auto" or (gradients == "offload" and num_staying == 0))
        assert bool(found) is (gradients != "keep")


@pytest.mark.parametrize(("room", "trained_wait"), [(4 * BLOCK_BYTES, False), (2 * BLOCK_BYTES + 8 * WIDTH, True)])
def test_of_a_unit_that_is_partly_frozen_the_frozen_part_waits_first(room, trained_wait, host):
    plain, model = built(), built()
    expected = train(plain)
    host.has_room(room, coming=in_update(model))
    offloader = host.open(model, **TRAINED)
    offloader.expect_no_optimizer()
    assert any("adapter" in name for name in host.waiting(model)) is trained_wait
    assert any("up" in name for name in host.waiting(model))
    assert same(train(model, offloader), expected)
    assert equal_weights(model, plain)


def test_with_an_unknown_amount_of_memory_all_wait(place):
    place.has(None)
    model = built()
    offloader = place.open(model)
    assert offloader.stats.weights_kept_bytes == 0
    assert len(place.waiting(model)) == NUM_WEIGHTS
    assert same(train(model, offloader), train(built()))


def test_memory_budget_and_activation_budget_count(host):
    activations = 64 << 20
    kept = []
    for budgets in (
        {},
        {"memory_budget": COMING_BYTES + 2 * ALL_BYTES},
        {"memory_budget": COMING_BYTES + 2 * ALL_BYTES - 2},
        {"memory_budget": COMING_BYTES + ALL_BYTES + activations, "activation_budget": activations},
        {"memory_budget": COMING_BYTES + ALL_BYTES + activations - 1, "activation_budget": activations},
    ):
        kept.append(host.open(built(), activations="auto", **budgets).stats.weights_kept_bytes == ALL_BYTES)
    assert kept == [True, True, False, True, False]


def test_a_budget_is_one_of_the_device_and_refused_without_room_for_what_cannot_wait(card, monkeypatch):
    monkeypatch.setattr("lightning_ssd.activations.tensor_cache.level_bytes", card.held_bytes)
    model = built()
    budget = small_bytes(model) + COMING_BYTES + 2 * 4 * BLOCK_BYTES
    offloader = card.open(model, activations="auto", memory_budget=max(budget, 1 << 20))
    assert 0 < offloader.stats.weights_kept_bytes < ALL_BYTES
    assert same(train(model, offloader, steps=2), train(built(), steps=2))
    card.others_bytes = GIB
    other = built()
    card.models[:] = [other]
    offloader = card.open(activations="auto", memory_budget=GIB + BLOCK_BYTES)
    with pytest.raises(
        BudgetError, match=r"even if all weights leave that can: this model needs more than .* of weights in use"
    ):
        offloader.register_module(other)
    assert card.waiting(other) == []
    card.others_bytes = 0
    offloader.register_module(other)
    assert card.waiting(other) == []


def test_processes_share_the_memory_of_a_machine(host, spill_dir):
    found = []
    host.has_room(ALL_BYTES)
    assert host.available_bytes is not None
    host.available_bytes *= 3
    for number in (3, 4):
        model, settings = built(), {"parameters": "auto", "activations": "keep", "min_tensor_bytes": "16KiB"}
        with offloader_in(spill_dir, **settings, num_local_processes=number) as offloader:
            offloader.register_module(model)
            found.append(bool(host.waiting(model)))
    assert found == [False, True]


def test_the_decision_is_told(host, caplog):
    caplog.set_level(logging.INFO, "lightning_ssd")
    host.open(built())
    assert "no weights wait on drives: memory has room for " in caplog.text
    caplog.clear()
    host.has_room(4 * BLOCK_BYTES)
    host.open(built())
    assert "3 of 5 units (1.3 MiB of 2.3 MiB) wait on drives: memory has room for 2.0 MiB" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("capacity", [0, 1000 * GIB])
def test_what_is_compiled_as_a_whole_is_not_counted_on(capacity, card):
    model = built()
    model.compile(backend="aot_eager")
    card.has(capacity)
    offloader = card.open(model)
    assert card.waiting(model) == []
    assert offloader.stats.weights_kept_bytes == 0, "it could not wait"


# -- while a model is built or moved, and again ------------------------------------------------------------------------


@pytest.mark.parametrize("is_short", [False, True])
def test_what_is_built_leaves_only_while_memory_is_short(is_short, place):
    place.is_used(GIB, available=GIB // 2 if is_short else 9 * GIB)
    offloader = place.open()
    with offloader.streamed_init():
        model = built()
    assert (place.waiting(model) != []) is is_short
    assert not place.is_late or (away(model) != []) is is_short
    place.has(1000 * GIB)
    offloader.register_module(model)  # now there is room
    assert place.waiting(model) == away(model) == []
    assert same(train(model, offloader), train(built()))


def test_registered_again_it_is_decided_again(host):
    plain, model = built(), built()
    expected = train(plain, steps=2) + train(plain, steps=2) + train(plain, steps=2)
    offloader = host.open(model)
    found = train(model, offloader, steps=2)
    for available, num_waiting in ((0, NUM_WEIGHTS), (1000 * GIB, 0)):
        host.has(available)
        offloader.register_module(model)
        assert len(host.waiting(model)) == num_waiting
        found += train(model, offloader, steps=2)
    assert same(found, expected)


def test_registered_again_as_many_wait_as_before(card):
    """What is away is neither held nor lost sight of, and no gradient comes back to be counted."""
    offloader = card.open(**TRAINED)
    trained = 4 * 9 * WIDTH * WIDTH
    small = sum(parameter.nbytes for parameter in Net().parameters() if parameter.nbytes < 16 << 10)
    card.others_bytes = 4 * trained
    card.has_room(6 * trained, coming=in_update(Net()) + small, others=small + card.others_bytes)
    loop = card.loop(offloader)
    before = card.waiting(loop.model)
    assert NUM_BLOCKS - len(blocks_of(before)) == 2
    loop.backward()
    gradients = [parameter.grad for name, parameter in loop.model.named_parameters() if name in before]

    def have_left():
        return all(storage_of(gradient).nbytes() == 0 for gradient in gradients if gradient is not None)

    assert eventually(offloader, have_left)
    tier = offloader._parts.parameters.weights._tiers.ssd
    read_bytes = tier.progress().read_bytes
    offloader.register_module(loop.model)
    assert card.waiting(loop.model) == before
    assert have_left()
    assert tier.progress().read_bytes == read_bytes


def test_another_model_s_gradients_and_states_are_counted_until_it_is_gone(host):
    first = nn.Linear(512, 512, bias=False)  # 1 MiB: with its gradient and AdamW's states 3 more to come
    host.has_room(4 << 20, coming=0)
    offloader = host.open()
    offloader.register_module(first)
    for num_mib, name in ((2, []), (3, ["weight"])):
        other = nn.Linear(512, 512 * num_mib, bias=False).requires_grad_(False)
        offloader.register_module(other)
        assert host.waiting(other) == name
    del first
    offloader.register_module(other)
    assert host.waiting(other) == []


def test_a_model_larger_than_the_device_moves_in(card):
    """What half of the device has room for stays, the others leave as they come."""
    plain, model = built(), built()
    card.stays_on_host(model)
    card.has(int(ALL_BYTES / 0.9))
    highest = []
    offloader = card.open()
    take_over = offloader._parts.parameters.weights._take_over
    offloader._parts.parameters.weights._take_over = lambda *args: highest.append(card.held_bytes()) or take_over(*args)
    offloader.move_in(model)
    assert 0 < len(away(model)) < NUM_WEIGHTS
    assert away(model) == card.waiting(model)
    assert card.held_bytes() <= ALL_BYTES / 2
    assert max(highest) <= ALL_BYTES / 2 + BLOCK_BYTES
    model.to("cpu")
    card.on_host.clear()
    offloader.register_module(model)
    assert card.waiting(model)
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)


# -- what else needs memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "there", "coming"),
    [
        (Needs(), 0, 100 + 200),
        (Needs(), 30, 70 + 200),
        (Needs(num_gradients=2), 0, 200 + 200),
        (Needs(gradients="auto"), 0, 60 + 200),
        (Needs(gradients="offload"), 30, 200),
        (Needs(keeps_states=False), 0, 100 + 200),
        (Needs(keeps_states=False, state_bytes=7), 0, 100 + 200 + 7),
    ],
)
def test_gradients_and_states_to_come_beside_those_that_are_there(needs, there, coming):
    assert needs.coming_bytes(100, 40, there) == coming
    assert needs.coming_bytes(0, 0, 0) == 0


def test_states_in_an_update_are_counted_as_the_optimizer_has_them():
    for num_directories in (1, 2, 3):
        for num_gib in (0.01, 1, 3, 16, 100, 1000):
            trained = int(num_gib * GIB) // 2
            slots = 4 * num_directories * subgroup_bytes(2 * trained, num_directories)
            needs = Needs(keeps_states=False, gradients="offload", num_directories=num_directories)
            assert needs.coming_bytes(trained, 0, 0) == min(slots, 2 * trained)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parameters": "some"},
            r"OffloadPolicy.parameters='some' is not possible\. Write one of 'keep', 'offload', 'auto'$",
        ),
        (
            {"gradients": "some"},
            r"OffloadPolicy.gradients='some' is not possible\. Write one of 'keep', 'offload', 'auto'$",
        ),
        (
            {"gradients": "auto", "optimizer_states": "offload"},
            r"gradients='auto' with parameters='keep' would be ignored, .*\. Write parameters='auto' or 'offload'",
        ),
        (
            {"gradients": "auto", "parameters": "auto"},
            r"gradients='auto' needs optimizer_states='offload'; without it the update brings all gradients back",
        ),
        ({"gradients": "offload"}, "gradients='offload' needs optimizer_states='offload'; without it"),
    ],
)
def test_settings_that_would_be_ignored(settings, message):
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(**settings)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ({"parameters": "auto"}, {"device": "meta"}, r"device='meta': nothing would be moved from there"),
        ({"parameters": "offload"}, {"device": "meta"}, "Use another device"),
        ({"parameters": "auto", "gradients": "auto"}, {"agree": list}, "gradients='auto' got several processes"),
        ({"gradients": "offload"}, {"agree": list}, "gradients='offload' got several processes"),
    ],
)
def test_where_it_cannot_work_yet(policy, options, message, spill_dir):
    chosen = {"activations": "keep", "optimizer_states": "offload"} | policy | options
    with pytest.raises(ConfigError, match=message):
        offloader_in(spill_dir, **chosen).open()


def test_several_processes_of_a_device_are_refused(card):
    with pytest.raises(ConfigError, match=r"OffloadPolicy.parameters='auto' got several processes on 'cpu'"):
        card.open(agree=list)
