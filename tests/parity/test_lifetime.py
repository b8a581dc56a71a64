"""Memory and disk are given back when the graph lets go, without the garbage collector and without clean-up calls."""

import gc
import os
import weakref

import pytest
import torch
from torch import Tensor

from lightning_ssd.memory.malloc import _HeldHoles
from tests.parity.models import Perceptrons, floats, gpt2, sines
from tests.support.helpers import (
    DRAINED,
    EAGER,
    PLANNED,
    PLANNING,
    SETUPS,
    Session,
    assert_released,
    assert_same,
    disk_used_bytes,
    open_offloader,
)


def num_objects():
    """Tensors, and objects of our own classes."""
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    # malloc's holes are held while passes follow each other closely, and let go where they do not: by the clock.
    assert kinds.count(_HeldHoles) <= 1
    kinds = [kind for kind in kinds if kind is not _HeldHoles]
    # Some extension types (mypyc's) show a descriptor for the name of their module.
    ours = sum(str(kind.__module__).startswith("lightning_ssd") for kind in kinds)
    return sum(issubclass(kind, Tensor) for kind in kinds), ours


def train(session, model, steps):
    for step in range(steps):
        with session.saved():
            # An input that wants gradients is a leaf, as a parameter is, but a new one in each step.
            loss = model(floats(step, 9, 17, 40).requires_grad_()).square().mean()
        session.backward(loss)
        model.zero_grad()


@pytest.mark.parametrize("setup", [DRAINED, EAGER], ids=["drained", "eager"])
def test_fifty_steps_leave_nothing(setup, tmp_path):
    """Tensors, files and disk use are the same after 5 steps and after 50."""
    with open_offloader(tmp_path, setup) as offloader:
        session = Session.of(offloader, setup)
        model = Perceptrons(num_blocks=3)
        session.register(model)
        counted = []
        for steps in (5, 45):
            train(session, model, steps)
            assert_released(offloader)
            offloader.drain_metrics()  # the event log is bounded, but larger than this test
            counted.append((num_objects(), offloader.stats.disk_bytes, len(os.listdir("/proc/self/fd"))))
        assert counted[0] == counted[1]
        assert not gc.garbage


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("setup", [DRAINED, EAGER, PLANNED, PLANNING], ids=["drained", "eager", "planned", "planning"])
def test_backward_frees_without_the_collector(setup, tmp_path):
    """No reference cycle holds a saved tensor; everything is free as soon as backward has ended."""
    with open_offloader(tmp_path, setup) as offloader:
        x = floats(0, 64, 64).requires_grad_()
        for _ in range(3 if setup.activations == "auto" else 0):  # until a plan is followed
            with offloader.saved_tensors():
                loss = (x * 2).sin().exp().square().sum()
            loss.backward()
            Session.of(offloader, setup).end()
        with offloader.saved_tensors():
            loss = (x * 2).sin().exp().square().sum()
        if setup.drained:
            offloader.flush()
            assert disk_used_bytes(offloader) > 0 or setup is PLANNED, "a plan may keep as little as this"
        loss.backward()
        offloader.flush()
        assert offloader.stats.resident_bytes == 0
        assert disk_used_bytes(offloader) == 0
        for _ in range(3):  # a graph that is dropped
            with offloader.saved_tensors():
                loss = (x * 2).sin().exp().square().sum()
            if setup.drained:
                offloader.flush()
            del loss
            offloader.flush()
            assert offloader.stats.resident_bytes == 0
            assert disk_used_bytes(offloader) == 0


@pytest.mark.usefixtures("no_collector")
def test_activations_die_when_they_are_on_disk(tmp_path):
    """Neither the cache nor an idle worker holds what has been written."""
    with open_offloader(tmp_path) as offloader:
        x = floats(0, 64, 64).requires_grad_()
        watched = []
        with offloader.saved_tensors():
            y = x
            for _ in range(6):
                y = y.sin()
                watched.append(weakref.ref(y.untyped_storage()))
            loss = y.sum()
        objects = [weakref.ref(y)]
        del y
        offloader.flush()
        assert [ref() for ref in objects] == [None]
        stats = offloader.stats
        assert stats.bytes_written >= 5 * (64 * 64 * 4 - 8192)  # up to a block at each end stays in memory
        assert stats.resident_bytes <= 64 * 64 * 4 + x.untyped_storage().nbytes()
        loss.backward()
        expected = x.grad
        x.grad = None
        sines(x, 6).sum().backward()
        assert torch.equal(expected, x.grad)


@pytest.mark.usefixtures("no_collector")
def test_saved_tensors_die_one_by_one_in_backward(tmp_path):
    """Reloaded storages go as soon as their node has run, not at the end of backward."""
    nbytes = 256 * 256 * 4
    with open_offloader(tmp_path) as offloader:
        x = floats(0, 256, 256).requires_grad_()
        with offloader.saved_tensors():
            loss = sines(x * 1, 24).sum()
        offloader.flush()
        offloader.reset_peaks()
        loss.backward()
        assert offloader.stats.resident_peak_bytes <= 12 * nbytes
        assert offloader.stats.bytes_read >= 12 * nbytes


def test_the_collector_runs_anywhere(tmp_path):
    """Graphs die inside the garbage collector, in whatever thread and under whatever lock it happens to run."""

    class Holder:
        def __init__(self, loss):
            self.loss, self.cycle = loss, self

    def program(session):
        model = Perceptrons(num_blocks=2)
        session.register(model)
        x = floats(0, 60, 40)
        for _ in range(15):
            with session.saved():
                Holder(model(x).square().mean())
                loss = model(x).square().mean()
            loss.backward()
            session.end()
        return [parameter.grad for parameter in model.parameters()]

    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        assert_same(program, tmp_path, setups=[*SETUPS[:2], PLANNED, PLANNING])
    finally:
        gc.set_threshold(*before)


def test_reloaded_memory_outlives_the_offloader(tmp_path):
    """A saved tensor that the user has taken out of the graph stays his, whatever is closed or reloaded after."""
    with open_offloader(tmp_path) as offloader:
        x = floats(0, 64, 64).requires_grad_()
        with offloader.saved_tensors():
            y = (x * 2).sin()
        offloader.flush()
        taken = y.grad_fn._saved_self
        y.sum().backward()
        del y
        for _ in range(3):
            with offloader.saved_tensors():
                loss = (x * 3).sin().exp().sum()
            offloader.flush()
            loss.backward()
    gc.collect()
    assert torch.equal(taken, x * 2)


def test_recycled_addresses(tmp_path):
    """A thousand storages live and die within one forward, most at an address that another had before."""

    def program(session):
        weight = torch.full((40, 25), 0.5).requires_grad_()
        total = torch.zeros(())
        addresses = set()
        with session.saved():
            for number in range(1000):
                saved = torch.full((40, 25), float(number))
                addresses.add(saved.data_ptr())
                total = total + (weight * saved).sum()
                if number % 3 == 0:
                    scratch = torch.full((40, 25), -1.0)  # takes the place of one that has been written
                    (scratch.detach() * 2).add_(1)
                if number % 500 == 499:
                    session.drain()
        total.backward()
        session.end()
        return weight.grad

    assert_same(program, tmp_path, setups=SETUPS[:2])


def test_identity_of_a_reloaded_storage(tmp_path):
    """A graph that is used again keeps its storages, not the addresses at which they were first seen."""

    def program(session):
        weight = torch.rand(64, 64).requires_grad_()
        with session.saved():
            old = sum((weight * torch.full((64, 64), float(number))).sum() for number in range(20))
        session.drain()
        old.backward(retain_graph=True)
        session.end()
        with session.saved():
            new = sum((weight * torch.full((64, 64), float(-number))).sum() for number in range(200))
        session.drain()
        new.backward()
        old.backward()
        session.end()
        return weight.grad

    assert_same(program, tmp_path)


def test_storages_that_change_hands(tmp_path):
    """`set_`, `resize_` and swapped data on tensors that share or leave a storage that was saved."""

    def program(session):
        a = floats(0, 40, 50).requires_grad_()
        with session.saved():
            x = a.detach() * 2
            y = a * x
            other = torch.empty(0)
            other.set_(x.untyped_storage())
            x = torch.zeros(40, 50)
            z = y * other.view(40, 50)
            del other
            z = z * x.add(1)
        session.backward(z.sum())
        return a.grad

    assert_same(program, tmp_path)


def test_closing_before_backward(tmp_path):
    """What is only on disk is gone with its file: backward raises, it does not return other bytes."""
    x = floats(0, 64, 64).requires_grad_()
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            loss = (x * 2).sin().sum()
        offloader.flush()
    with pytest.raises(RuntimeError, match="closed"):
        loss.backward()


def test_model_on_the_way_out_of_scope(tmp_path):
    """A registered model is not kept alive by being registered."""
    with open_offloader(tmp_path) as offloader:
        model = gpt2(layers=1)
        offloader.register_module(model)
        weight = weakref.ref(next(model.parameters()))
        del model
        gc.collect()
        assert weight() is None
        # Another tensor may now have the address, even the storage identity, of a dead parameter: it is no parameter.
        x = floats(0, 300, 320).requires_grad_()
        with offloader.saved_tensors():
            loss = sum(((x * 2).sin()).sum() for _ in range(20))
        offloader.flush()
        assert offloader.stats.bytes_saved >= 20 * 300 * 320 * 4
        loss.backward()
