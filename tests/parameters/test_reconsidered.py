"""What waits is decided again when steps have shown what they take: between steps, with the bits of plain training."""

import errno
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.parameters.files.mapped_storage import unreadable
from lightning_ssd.parameters.units import shared_weights, why_it_stays
from tests.support.faults import FaultyBackend, eio
from tests.support.residency import ALL_BYTES, BLOCK_BYTES, GIB, NUM_WEIGHTS, TRAINED, blocks_of
from tests.support.weight_loops import Loop, batches, built, equal_weights, same, train

# -- the bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute"])
def test_a_run_that_gets_scarce_has_the_bits_of_plain_training(activations, running_place):
    plain, model, seen = built(), built(), []

    def between(model, step):
        seen.append(blocks_of(running_place.waiting(model)))
        lacking = {1: BLOCK_BYTES // 2, 5: GIB, 8: -GIB}
        if step in lacking:
            running_place.lack(lacking[step])

    offloader = running_place.open(model, activations=activations)
    assert same(train(model, offloader, steps=16, between=between), train(plain, steps=16))
    assert equal_weights(model, plain)
    assert seen[:3] == [[]] * 3, "the third step shows it"
    assert 0 < len(seen[3]) <= len(seen[6]) < 4, "one more at most: on a device some may be there beyond their use"
    assert running_place.is_late or seen[3] == seen[6]
    assert seen[7] == [0, 1, 2, 3]
    assert seen[9:12] == [[0, 1, 2, 3]] * 3, "three steps have to show that much is left"
    assert seen[-1] == running_place.waiting(model) == []
    assert offloader.stats.weights_bytes == 0


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"set_to_none": False}], ids=["plain", "twice", "zeros"])
def test_trained_weights_leave_and_come_back_with_their_gradients(options, running_place):
    """The loss of the last step lives on, and with it a graph that has been used."""
    seen = []

    def look(model, optimizer, step):
        weights, gradients = running_place.waiting(model), running_place.gradients(model)
        assert set(weights) >= set(gradients) or (options and not running_place.is_late)
        seen.append((len(weights), len(gradients)))
        lacking = {2: BLOCK_BYTES // 2, 4: GIB, 7: -GIB, 13: BLOCK_BYTES // 2, 16: -GIB}
        if step in lacking:
            running_place.lack(lacking[step])

    expected = Loop(**options).run(28).result()
    loop = running_place.loop(running_place.open(**TRAINED), before_step=look, **options)
    assert same(loop.run(28).result(), expected)
    numbers = [waits for waits, _ in seen]
    assert numbers[:3] == [0] * 3
    assert 0 < numbers[4] < numbers[7] == 13
    assert numbers[12:14] == [0] * 2
    assert 0 < numbers[16] < 13
    assert numbers[-1] == 0
    if running_place.is_late:
        assert seen[-1] == (0, 0)
    else:
        assert numbers[16] == numbers[4]
        assert options or all(weights == gradients for weights, gradients in seen)


def test_what_comes_back_is_not_counted_twice(running_card):
    """There is room for it, and for half of it besides: it stays."""
    plain, model, seen = built(), built(), []

    def between(model, step):
        seen.append(blocks_of(running_card.waiting(model)))
        lacking = {1: GIB, 4: -ALL_BYTES // 2}
        if step in lacking:
            running_card.lack(lacking[step])

    offloader = running_card.open(model)
    assert same(train(model, offloader, steps=14, between=between), train(plain, steps=14))
    assert seen[4] == [0, 1, 2, 3]
    assert seen[9:] == [[]] * 5


# -- when, and what not ----------------------------------------------------------------------------------------------


def test_nothing_moves_while_a_graph_is_alive(running_place):
    plain, model = built(), built()
    expected, found, seen = [], [], []
    offloader = running_place.open(model)
    for lacking in (None, GIB):
        if lacking is not None:
            running_place.lack(lacking)
        train(model, offloader, steps=1)
        train(plain, steps=1)
    ids = next(batches(1))
    for one, losses in ((plain, expected), (model, found)):
        graphs = []
        for _ in range(8):
            with offloader.saved_tensors() if one is model else nullcontext():
                graphs.append(one(ids).logsumexp(-1).mean())
            if one is model:
                seen.append(len(running_place.waiting(model)))
                running_place.lack(-GIB)
        for graph in graphs:
            graph.backward()
        losses += [*graphs, *(p.grad for p in one.parameters() if p.grad is not None)]
    assert same(found, expected)
    assert seen == [NUM_WEIGHTS] * 8
    offloader.end_backward()


def test_room_that_no_pause_lets_anybody_make_is_not_waited_for(running_host):
    """Each forward begins before the last backward: the planner is to refuse its budget in the end."""
    model, ids = built(), next(batches(1))
    running_host.lack(-GIB)
    offloader = running_host.open(model)
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
    assert running_host.waiting(model) == []
    graphs.pop().backward()
    offloader.end_backward()
    with offloader.saved_tensors():
        model(ids)
    assert running_host.waiting(model) != []
    assert decides.ask_for(1)


def test_a_weight_that_somebody_holds_stays(running_place):
    plain, model = built(), built()
    held = model.blocks[1].up.weight.detach()[1:]
    array = None if running_place.is_late else model.blocks[2].up.weight.detach().numpy()

    def between(one, step):
        for weight in (one.blocks[1].up.weight, one.blocks[2].up.weight):
            weight.data.mul_(1.01)  # whoever holds them sees it
        if one is model:
            assert torch.equal(held, model.blocks[1].up.weight[1:])
            assert array is None or torch.equal(model.blocks[2].up.weight, torch.from_numpy(array))
            running_place.lack(GIB)

    expected = train(plain, steps=8, between=between)
    assert same(train(model, running_place.open(model), steps=8, between=between), expected)
    assert equal_weights(model, plain)
    stays = {"blocks.1.up.weight"} | (set() if running_place.is_late else {"blocks.2.up.weight"})
    assert len(running_place.waiting(model)) == NUM_WEIGHTS - len(stays)
    assert not stays & {*running_place.waiting(model)}


def _full(patch):
    def refuse(*_, **__):
        raise OutOfSpaceError(errno.ENOSPC, "the drive is full")

    patch.setattr("lightning_ssd.parameters.files.weight_files.WeightFiles.check_room", refuse)
    return {}


def _unmapped(patch):
    def refuse(*_, **__):
        raise MemoryError("the system cannot map so much")

    patch.setattr("lightning_ssd.parameters.files.weight_files._shown", refuse)
    return {}


def _unwritten(patch):
    return {"_wrap_backend": lambda inner: FaultyBackend(inner, fail_write=lambda call: eio())}


@pytest.mark.parametrize(
    ("running_place", "refuses", "told"),
    [
        ("host", _full, "drive is full"),
        ("host", _unmapped, "cannot map so much"),
        ("device", _unwritten, "could not be written"),
    ],
    indirect=["running_place"],
)
def test_what_refuses_to_take_weights_is_told_of_once_and_they_stay(running_place, refuses, told, monkeypatch):
    plain, model = built(), built()
    with monkeypatch.context() as patched:
        offloader = running_place.open(model, **refuses(patched) if running_place.is_late else {})
        if not running_place.is_late:  # registering a model asks for room, too
            refuses(patched)
        running_place.lack(GIB)
        with pytest.warns(UserWarning, match=f"wait on drives cannot be changed any more .*{told}") as warned:
            assert same(train(model, offloader, steps=6), train(plain, steps=6))
    assert sum("cannot be changed any more" in str(one.message) for one in warned) == 1
    assert running_place.waiting(model) == []
    if not running_place.is_late:
        assert not offloader._parts.parameters.weights.residents.ask_for(1), "nor does the planner hope for them"


def test_what_cannot_come_back_goes_on_waiting(running_place, monkeypatch):
    """A drive that fails, and a device without memory for what would come back."""

    def refuse(*_):  # not where a weight is used
        if running_place.is_late:
            raise torch.OutOfMemoryError("injected")
        raise unreadable(["it"], 1, OSError(errno.EIO, "the drive fails"))

    plain, model = built(), built()
    offloader = running_place.open(model)
    expected = train(plain, steps=4) + train(plain, steps=8)
    running_place.lack(GIB)
    found = train(model, offloader, steps=4)
    assert len(running_place.waiting(model)) == NUM_WEIGHTS
    running_place.lack(-GIB)
    with monkeypatch.context() as patched:
        if running_place.is_late:
            patched.setattr(type(offloader._parts.parameters.pager), "release", refuse)
        else:
            patched.setattr("lightning_ssd.parameters.mapped_weights.bring_in", refuse)
        with pytest.warns(UserWarning, match=r"cannot be changed any more .*(injected|could not be read)") as told:
            found += train(model, offloader, steps=8)
    assert same(found, expected)
    assert sum("cannot be changed any more" in str(one.message) for one in told) == 1
    assert len(running_place.waiting(model)) == NUM_WEIGHTS


def test_what_moves_is_told(running_place, caplog):
    model = built()
    caplog.set_level(logging.INFO, "lightning_ssd")
    offloader = running_place.open(model)
    assert "no weights wait on drives: memory has room for " in caplog.text
    caplog.clear()
    running_place.lack(BLOCK_BYTES // 2)
    train(model, offloader, steps=3)
    size = "1.3" if running_place.is_late else "0.8"
    assert f"steps have shown that memory lacks 0.2 MiB: {size} MiB more of weights wait" in caplog.text
    if not running_place.is_late:
        running_place.lack(-GIB)
        train(model, offloader, steps=8)
        assert "steps have left 1.00 GiB of memory: <0.01 GiB of weights come back to stay, 0.00 GiB w" in caplog.text
        assert len(caplog.records) == 2


# -- who else may hold a weight --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_used", [True, False])
def test_a_graph_that_has_been_used_holds_no_weight(is_used):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss = (model(torch.ones(1, 8)) * model[0].weight.sin().sum()).sum()
    if is_used:
        loss.backward()
    for mode in (nullcontext, torch.inference_mode):
        with mode():
            reasons = [why_it_stays(weights) for weights in shared_weights(model, 256)]
        assert [reason is None for reason in reasons] == [is_used] * 2
    assert loss.grad_fn is not None
