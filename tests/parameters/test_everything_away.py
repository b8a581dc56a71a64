"""Trained weights, gradients and optimizer states on a drive, all at once: the bits of plain training."""

import gc
import signal
from functools import cache, partial

import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import OutOfSpaceError, StorageError
from lightning_ssd.parameters.files import mapped_storage, weight_files
from lightning_ssd.planning import update_memory
from tests.support.offloaders import offloaders
from tests.support.pairs import some_of_each
from tests.support.threads import at_once
from tests.support.weight_loops import (
    MIN_TENSOR,
    PLAIN,
    PROGRAMS,
    Loop,
    Net,
    batches,
    equal_weights,
    in_a_fork,
    passed,
    same,
    taken_over,
)

EVERYTHING = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}


def policy(**options):
    return OffloadPolicy(**EVERYTHING | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


STATES = {"optimizer_states": "offload"}
AWAY = {
    "files": EVERYTHING,
    "weights of a device": STATES | {"parameters": "offload", "gradients": "keep"},
    "gradients of a device": STATES | {"parameters": "keep", "gradients": "offload"},
    "all of a device": EVERYTHING,
}


@cache
def expected_of(program):
    return Loop(**PROGRAMS[program]).run().result()


@some_of_each("program, away, activations", PROGRAMS, AWAY, ["keep", "offload", "recompute"])
def test_bits(program, away, activations, spill_dir, monkeypatch):
    is_late = "device" in away
    if is_late:  # an update in many parts, of which some are slices of a weight
        monkeypatch.setattr(update_memory, "_MIN_SUBGROUP_BYTES", 1 << 17)
    with offloaders(spill_dir, policy, is_late=is_late) as opened:
        offloader = opened(activations=activations, **AWAY[away])
        assert same(Loop(offloader, **PROGRAMS[program]).run().result(), expected_of(program))
        assert (offloader.stats.weights_bytes > 0) is (AWAY[away]["parameters"] == "offload")


def test_gradients_wait_in_the_files(opened):
    seen = []

    def look(model, *_):
        seen.append([mapped_storage.is_mapped(p.grad.untyped_storage()) for p in model.parameters() if p.dim() > 1])

    Loop(opened(), before_step=look).run(2)
    assert seen == [[True] * 13] * 2


def gradient_twice(hold, offloader):
    torch.manual_seed(4)
    layer = nn.Linear(128, 128, bias=False)
    held = hold(layer.weight)
    taken_over(offloader, layer)
    for scale in (1.0, 2.0):
        (layer(torch.ones(2, 128)) * scale).square().sum().backward()
    seen = held() if callable(held) else held
    gradient = layer.weight.grad
    return [torch.as_tensor(seen).clone(), gradient.clone()]


def _set(parameter, gradient):
    parameter.grad = gradient
    return gradient


def _array(parameter):
    array = torch.zeros(128, 128).numpy()
    parameter.grad = torch.from_numpy(array)
    return array


def _hooked(parameter):
    kept = []
    parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    return lambda: kept[0]


HOLDERS = {
    "a buffer of one's own": lambda p: _set(p, torch.zeros(128, 128)),
    "an array": _array,
    "shared memory": lambda p: _set(p, torch.zeros(128, 128).share_memory_()),
    "a view": lambda p: _set(p, torch.zeros(128, 128))[1:],
    "another hook": _hooked,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_has_is_not_exchanged(holder, opened):
    assert same(gradient_twice(HOLDERS[holder], opened()), gradient_twice(HOLDERS[holder], PLAIN))


def test_a_gradient_or_storage_object_that_somebody_keeps_is_not_written_over(opened):
    kept = []

    def keep(model, *_):
        gradient, storage = model.blocks[0].up.weight.grad[1:], model.blocks[1].up.weight.grad.untyped_storage()
        kept.append((gradient, gradient.clone(), storage, bytes(storage[:64])))

    Loop(opened(), before_step=keep).run(4)
    for gradient, copied, storage, seen in kept:
        assert torch.equal(gradient, copied)
        assert bytes(storage[:64]) == seen
    assert len({gradient.data_ptr() for gradient, *_ in kept}) == 4


def test_a_fork_does_not_reach_gradients_that_were_kept(opened):
    kept = []

    def keep(model, *_):
        gradient = model.blocks[0].up.weight.grad
        assert gradient is not None
        kept.append(gradient)

    Loop(opened(), before_step=keep).run(3)
    before = [gradient.clone() for gradient in kept]
    assert in_a_fork(lambda: kept[0].zero_()) == signal.SIGSEGV
    assert same(kept, before)


def test_tensors_can_be_swapped_once_their_gradients_are_offloaded_no_more(opened):
    """A swap leaves a dictionary of hooks whose hooks never run; one of ours would swallow the user's."""
    offloader, called = opened(), []
    loop = Loop(offloader).run(1)
    weight = loop.model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
        torch.utils.swap_tensors(weight, nn.Parameter(torch.ones_like(weight)))
    offloader.close()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones_like(weight)))
    weight.register_post_accumulate_grad_hook(called.append)
    loop._loss(next(batches(1))).backward()
    assert len(called) == 1


def test_threads_train_side_by_side(opened):
    def train(offloader):
        model = nn.Linear(128, 128, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        taken_over(offloader, model)
        for _ in range(20):
            model(torch.ones(2, 128)).sum().backward()
            offloader.send_out_weights()
        found.append(model.weight.grad.clone())

    offloader, found = opened(), list[torch.Tensor]()
    train(PLAIN)
    at_once(*[partial(train, offloader)] * 4)
    assert same(found, found[:1] * 5)


def test_the_place_of_gradients_that_were_kept_comes_back(opened):
    kept = []

    def keep(model, *_):
        kept[:] = [p.grad for p in model.parameters() if p.grad is not None]

    offloader = opened()
    loop = Loop(offloader, before_step=keep).run(3)
    used = sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas)
    loop.run(6)
    assert sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas) == used


def test_gradients_of_models_that_are_gone_give_their_place_back(opened):
    offloader = opened()
    used = []
    for _ in range(4):
        model = taken_over(offloader, Net())
        passed(offloader, lambda model=model: model(next(batches(1))).sum())
        del model
        gc.collect()
        offloader.send_out_weights()
        used.append(sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas))
    assert used[1:] == used[:1] * 3


def test_a_gradient_without_a_place_stays_in_memory(opened, monkeypatch):
    def refuse(*_):
        raise OutOfSpaceError(28, "full")

    expected = Loop().run().result()
    loop = Loop(opened())
    monkeypatch.setattr(weight_files.WeightFiles, "map_new", refuse)
    with pytest.warns(UserWarning, match=r"a gradient has no place to wait in .*stays in memory") as told:
        loop.run()
    assert len(told) == 1
    assert same(loop.result(), expected)


def test_resuming_from_state_dicts(opened):
    plain = Loop().run(4)
    first = Loop(opened()).run(2)
    saved = {name: value.clone() for name, value in first.model.state_dict().items()}, first.optimizer.state_dict()
    second = Loop(opened())
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    again = Loop().run(2)
    third = Loop()
    third.model.load_state_dict(again.model.state_dict())
    third.optimizer.load_state_dict(again.optimizer.state_dict())
    assert same(second.run(2).result(), third.run(2).result())
    assert equal_weights(first.model, again.model)
    assert not equal_weights(plain.model, again.model)


def test_after_closing_training_goes_on_in_memory(opened):
    offloader = opened()
    loop = Loop(offloader, make=torch.optim.SGD).run(2)
    model = loop.model
    offloader.close()
    plain = Loop(make=torch.optim.SGD).run(2)
    for one in (plain, loop):
        one.offloader = None
        one.optimizer = torch.optim.SGD(one.model.parameters(), lr=1e-2)
        one.found.clear()
    assert same(loop.run(2).result(), plain.run(2).result())
    assert not any(mapped_storage.is_mapped(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None)


def test_what_the_drive_has_lost_ends_training(opened, monkeypatch):
    loop = Loop(opened())
    monkeypatch.setattr(mapped_storage, "_sync_file_range", lambda *_: -1)
    with pytest.raises(StorageError, match="weights or gradients that were changed could not be written"):
        loop.run(200)  # a thread looks, which a busy machine may keep from it for some steps
