"""Offloaded optimizers under failing drives, interruptions and loads: exact, or refused; never silently wrong."""

import copy
import gc
import warnings

import pytest
import torch

from lightning_ssd.errors import CorruptionError, StorageError
from tests.support.faults import always, eio, enospc, on_calls
from tests.support.optimizer_pairs import (
    Pair,
    adamw,
    assert_same_states,
    lent_of,
    offloaded,
    offloaded_pair,
    store_of,
    used_bytes,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("small_subgroups")


# -- drives that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param(on_calls({3}, eio), id="once"),
        pytest.param(always(eio), id="always"),
        pytest.param(on_calls(range(7, 10**9), enospc), id="full after a while"),
    ],
)
def test_failed_writes_cost_nothing_but_memory(fail, spill_dir):
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        drive.fail_write = fail
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                pair.step(optimizer)
                pair.check()
            saved = optimizer.state_dict()
            assert_same_states(saved, pair.twin.state_dict())
            expected = copy.deepcopy(saved)
            pair.step(optimizer)
            assert_same_states(saved, expected)
        mine = [str(w.message) for w in caught if "optimizer states could not be written" in str(w.message)]
        assert len(mine) == 1
    pair.check(optimizer)


def test_memory_returns_when_the_drive_does(spill_dir):
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        slots = store_of(optimizer).num_slots
        drive.fail_write = always(enospc)
        with pytest.warns(UserWarning, match="stay in memory"):
            pair.step(optimizer)
        pair.train(optimizer, 2)
        assert optimizer.stats.resident_bytes == optimizer.stats.state_bytes
        drive.fail_write = None
        optimizer.flush()
        pair.step(optimizer)
        assert store_of(optimizer).num_slots == slots
        assert optimizer.stats.resident_bytes <= slots * (128 << 10) + optimizer.stats.state_bytes // 4
        pair.check(optimizer)


def test_a_read_that_fails_once_is_tried_again(spill_dir):
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        # Far apart: the second try of one must not be a call that fails by itself.
        drive.fail_read = on_calls({2, 42}, eio)
        drive.corrupt_read = lambda index: index == 22
        pair.train(optimizer, 4)
        assert drive.num_reads > 45
        assert store_of(optimizer).tier.num_retries == 3
        pair.check(optimizer)


def checkpoint(pair, optimizer):
    """Return what loads the states and weights of now."""
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in pair.mine]

    def load():
        optimizer.load_state_dict(saved)
        torch._foreach_copy_([p.data for p in pair.mine], weights)

    return load


@pytest.mark.parametrize("kind", ["eio", "corrupt"])
def test_states_that_cannot_be_read_end_training_until_a_checkpoint_is_loaded(kind, spill_dir):
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        pair.train(optimizer, 2)
        load = checkpoint(pair, optimizer)
        if kind == "eio":
            drive.fail_read = always(eio)
        else:
            drive.corrupt_read = lambda index: True
        pair.set_gradients()
        with pytest.raises(StorageError if kind == "eio" else CorruptionError) as caught:
            optimizer.step()
        assert "optimizer states of subgroup" in caught.value.__notes__[0]
        drive.fail_read = drive.corrupt_read = None
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="incomplete"):
                refused()
        with pytest.raises(ValueError, match="groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()  # what could not be loaded has repaired nothing
        load()
        pair.check(optimizer)
        pair.train(optimizer, 3)
        pair.check(optimizer)
        optimizer.flush()
        assert used_bytes(optimizer) == pytest.approx(optimizer.stats.state_bytes, rel=0.05)


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_closure_that_fails_touches_nothing(error, spill_dir):
    with offloaded_pair(adamw, spill_dir, steps=1) as (pair, optimizer):

        def closure():
            raise error("in the model")

        with pytest.raises(error):
            optimizer.step(closure)
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


class Stumbling(torch.optim.AdamW):
    error: type[BaseException] | None = None

    def _init_group(self, *args):
        if self.error is not None and args[0]["params"][0].shape == (77, 77):
            raise self.error
        return super()._init_group(*args)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_is_not_trained_on(error, spill_dir):
    pair = Pair(lambda p: Stumbling(p, lr=1e-2), shapes=((128, 150),) * 5 + ((77, 77),) + ((128, 150),) * 5)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 1)
        load = checkpoint(pair, optimizer)
        for _ in range(10):  # what a lost slot would be seen by
            Stumbling.error = error
            pair.set_gradients()
            with pytest.raises(error):
                optimizer.step()
            Stumbling.error = None
            with pytest.raises(RuntimeError, match=error.__name__):
                optimizer.step()
            load()
        pair.check(optimizer)
        pair.train(optimizer, 3)
        pair.check(optimizer)
        optimizer.flush()
        store_of(optimizer).evict(range(len(store_of(optimizer))))
        assert optimizer.stats.resident_bytes == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_state_dict_may_be_loaded_again_and_again(spill_dir):
    """Not even its small tensors, which stay in memory, may follow the training that was loaded from it."""
    with offloaded_pair(adamw, spill_dir, shapes=((128, 150),) * 3 + ((5,), (300, 200)), steps=1) as (pair, optimizer):
        saved = optimizer.state_dict()
        expected = copy.deepcopy(saved)
        for _ in range(3):
            optimizer.load_state_dict(saved)
            assert_same_states(optimizer.state_dict(), expected)
            pair.set_gradients()
            optimizer.step()
            assert_same_states(saved, expected)


def test_a_state_dict_while_writes_are_under_way_outlives_everything(spill_dir):
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        drive.delay_s = 0.005
        pair.train(optimizer, 2)
        saved = optimizer.state_dict()
        expected = copy.deepcopy(pair.twin.state_dict())
        pair.train(optimizer, 3)
        assert_same_states(saved, expected)
    assert_same_states(saved, expected)
    del optimizer
    gc.collect()
    assert_same_states(saved, expected)
    saved["state"][0]["exp_avg"].zero_()  # private, and writable as a plain one


def test_the_inner_optimizer_may_be_stepped_and_loaded(spill_dir):
    """It has the same states, wherever they are."""
    with offloaded_pair(adamw, spill_dir, steps=1) as (pair, optimizer):
        pair.step(pair.inner)
        pair.check(optimizer)
        saved = copy.deepcopy(pair.twin.state_dict())
        for step in range(4):
            pair.step(optimizer)
            if step == 1:
                pair.inner.load_state_dict(copy.deepcopy(saved))
                pair.twin.load_state_dict(copy.deepcopy(saved))
        pair.check(optimizer)
        assert not lent_of(optimizer), "they went back to their drive"
