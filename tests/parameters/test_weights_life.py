"""Frozen weights on a drive from the building of a model to the end: forks, closing, and drives that fail."""

import gc
import os
import signal
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_ssd.errors import OffloaderClosedError, OutOfSpaceError, StorageError
from lightning_ssd.parameters.units import shared_weights, why_it_stays
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.parameters.test_paged_weights import policy  # noqa: F401  # that of ``opened``
from tests.support.weight_loops import (
    NUM_BLOCKS,
    VOCABULARY,
    WIDTH,
    Block,
    batches,
    built,
    equal_weights,
    frozen,
    in_a_fork,
    same,
    train,
)

# -- a model that is never whole in memory ---------------------------------------------------------------------------


def test_a_model_built_inside_has_the_same_weights_from_the_same_random_numbers(opened):
    plain = built()
    state = torch.get_rng_state()
    offloader = opened()
    with offloader.streamed_init():
        model = built()
        assert offloader.stats.weights_bytes > 0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.bias) if module.bias is not None else None
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.bias) if module.bias is not None else None
    assert equal_weights(model, plain)
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))


def test_weights_that_turn_out_to_be_trained_come_back(opened):
    offloader = opened()
    with offloader.streamed_init():
        model = built()
    model.blocks[0].requires_grad_(True)
    offloader.register_module(model)
    offloader.send_out_weights()
    assert offloader.stats.weights_bytes == 4 * ((NUM_BLOCKS - 1) * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    plain = built()
    plain.blocks[0].requires_grad_(True)
    assert same(train(model, offloader), train(plain))


# -- the end, and what goes wrong ------------------------------------------------------------------------------------


def test_a_weight_that_is_gone_gives_its_place_back(opened):
    model = built()
    offloader = opened(model)
    used = offloader.stats.weights_bytes
    del model.blocks[3]
    gc.collect()
    offloader.send_out_weights()
    assert offloader.stats.weights_bytes == used - 4 * 8 * WIDTH * WIDTH
    size = offloader.stats.disk_bytes
    offloader.register_module(frozen(Block()))
    assert offloader.stats.disk_bytes == size


def test_after_closing_weights_are_there_and_a_second_opening_takes_them_over_again(opened, spill_dir):
    plain, model = built(), built()
    expected = train(plain) + train(plain)
    offloader = opened(model)
    found = train(model, offloader)
    offloader.close()
    assert not list(spill_dir.iterdir()), "no name is left"
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.0)
    assert equal_weights(model, built()) is False
    again = opened(model)
    assert again.stats.weights_bytes == 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    assert same(found + train(model, again), expected)


def test_a_fork_is_refused_what_the_parent_may_change(opened):
    """It would see later values. An error where a forward asks; the end of the fork where something else does."""
    model = built()
    offloader = opened(model)
    train(model, offloader, steps=2)
    expected = [weight.detach().clone() for weight in model.parameters()]

    def forward():
        with pytest.raises(OffloaderClosedError, match=r"wait on a drive for process \d+, and this is its fork"):
            model(next(batches(1)))

    assert in_a_fork(forward) == 0
    assert in_a_fork(lambda: model.blocks[0].up.weight.sum()) == signal.SIGSEGV
    assert same(list(model.parameters()), expected)
    assert same(train(model, offloader), train(resumed(expected)))


def resumed(weights):
    model = built()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return model


def test_a_drive_without_room_is_an_error_before_anything_moves(opened, monkeypatch):
    model = built()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    offloader = opened()
    monkeypatch.setattr(Arena, "_preallocate", lambda self, nbytes: False)
    with pytest.raises(OutOfSpaceError, match=r"weights need [\d,]+ bytes; .*is full"):
        offloader.register_module(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


class FailsAtThird(WrappedBackend):
    num_writes = 0

    def write(self, *args):
        self.num_writes += 1
        if self.num_writes == 3:
            raise StorageError(5, "refused")
        super().write(*args)


def test_a_write_that_fails_leaves_every_weight_good(opened):
    plain, model = built(), built()
    offloader = opened(_wrap_backend=FailsAtThird)
    with pytest.raises(StorageError, match="refused"):
        offloader.register_module(model)
    assert equal_weights(model, plain)
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))


def test_a_read_that_fails_is_an_error_that_names_the_weight(opened, monkeypatch):
    model = built()
    offloader = opened(model)
    train(model, offloader, steps=2)

    def refuse(self, start, nbytes, **_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("lightning_ssd.memory.file_mapping.FileView.bring_in", refuse)
        with pytest.raises(StorageError, match=r"weight .*weight \([\d,]+ bytes\) could not be read from its drive"):
            train(model, offloader, steps=2)
    for _ in range(2):  # the drive is well again; a read ahead that has failed meanwhile is tried anew
        assert model(next(batches(1))).isfinite().all()


def test_edits_that_the_drive_has_lost_are_told_at_close(opened, monkeypatch):
    model = built()
    offloader = opened(model)

    def refuse(fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", refuse)
        with pytest.raises(StorageError, match="weights or gradients that were changed could not be written"):
            offloader.close()
    assert equal_weights(model, built())


def test_an_interrupt_ends_the_wait_for_the_drive(opened, monkeypatch):
    """And what has been taken over by then waits, and is right."""
    go_on = threading.Event()
    plain, model = built(), built()
    offloader = opened()
    timer = threading.Timer(0.2, os.kill, args=(os.getpid(), signal.SIGINT))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lambda fd: go_on.wait(60))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            offloader.register_module(model)
        assert not go_on.is_set()
        go_on.set()
        timer.join()
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))
    assert offloader.stats.weights_bytes > 0


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


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)], ids=["built", "asked", "both"])
def test_trained_weights_can_wait_in_inference_mode(modes):
    with torch.inference_mode(modes[0]):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.inference_mode(modes[1]):
        assert [why_it_stays(weights) for weights in shared_weights(model, 256)] == [None] * 2
