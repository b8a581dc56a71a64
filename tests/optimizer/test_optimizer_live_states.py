"""``state`` of an offloaded optimizer: what is read is the state, what nobody holds goes back to its drive."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_ssd.errors import ConfigError
from tests.support.optimizer_pairs import (
    Pair,
    adamw,
    assert_same_states,
    lent_of,
    offloaded_pair,
    opened,
    partition_of,
    used_bytes,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("small_subgroups")


def test_steps_update_the_very_tensors_that_somebody_holds(spill_dir):
    pair = Pair(adamw, ((128, 150),) * 6 + ((300, 200), (7,)))  # one that is cut, one that is small
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        for number in (2, 6, 7):
            mine, plain = optimizer.state[pair.mine[number]], pair.twin.state[pair.plain[number]]
            view = mine["exp_avg_sq"].view(-1)
            step = mine["step"]
            for _ in range(3):
                pair.step(optimizer)
                assert optimizer.state[pair.mine[number]] is mine
                assert torch.equal(mine["exp_avg"], plain["exp_avg"])
                assert torch.equal(view, plain["exp_avg_sq"].view(-1))
                assert torch.equal(step, plain["step"])
        pair.check(optimizer)
        del mine, view, step
        pair.step(optimizer)
        assert not lent_of(optimizer), "nobody holds one any more"
        pair.check(optimizer)


def test_reading_all_states_leaves_none_in_memory_and_writes_each_once(spill_dir):
    with offloaded_pair(adamw, spill_dir, ((128, 150),) * 40, steps=1) as (pair, optimizer):
        optimizer.flush()
        written_bytes = optimizer.stats.written_bytes
        most = 0
        for state, plain in zip(optimizer.state.values(), pair.twin.state.values(), strict=True):
            assert torch.equal(state["exp_avg"], plain["exp_avg"])
            most = max(most, len(lent_of(optimizer)))
        del state
        assert most < 25, "of 40"
        optimizer.flush()
        assert 0 < optimizer.stats.written_bytes - written_bytes <= optimizer.stats.state_bytes
        pair.step(optimizer)
        assert not lent_of(optimizer)
        pair.check(optimizer)


def test_states_that_were_read_before_there_were_any_are_made_on_their_way_down(spill_dir):
    def sgd(parameters):
        return torch.optim.SGD([{"params": parameters[:39], "momentum": 0.9}, {"params": parameters[39:]}], lr=1e-2)

    for make in (adamw, sgd):
        pair = Pair(make, (*[(128, 150)] * 38, (300, 200), (128, 150)))
        with wrapped(pair.inner, spill_dir) as optimizer:
            held = optimizer.state[pair.mine[3]], pair.twin.state[pair.plain[3]]
            for mine, plain in zip(pair.mine, pair.plain, strict=True):
                assert optimizer.state[mine] == pair.twin.state[plain] == {}
            pair.step(optimizer, [*range(36), 38, 39])
            in_memory = {number for number, mine in enumerate(pair.mine) if lent_of(optimizer).get(mine)}
            assert in_memory == {3}, "by who holds it"
            assert held[0].keys() == held[1].keys()
            pair.check(optimizer)
            pair.step(optimizer)
            pair.check(optimizer)


def test_surgery_leaves_nothing_of_the_old_parameters(spill_dir):
    """Densification, a hundred times in a training: neither memory nor drives fill with what was replaced."""
    pair = Pair(adamw, ((40, 60),) * 12)
    sizes = []
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(6):
            pair.step(optimizer)
            for each in (optimizer, pair.twin):
                group = each.param_groups[0]
                old = group["params"][3]
                group["params"][3] = nn.Parameter(old.detach().clone())
                each.state[group["params"][3]] = each.state.pop(old)
                del old
            pair.mine[3], pair.plain[3] = optimizer.param_groups[0]["params"][3], pair.twin.param_groups[0]["params"][3]
            optimizer.flush()
            sizes.append(used_bytes(optimizer))
        known = [p for p in partition_of(optimizer).parameters if partition_of(optimizer).places_of(p)]
        assert len(known) <= 13
        assert max(sizes[2:]) <= sizes[1]
        pair.check(optimizer)


def test_copies_and_pickles_of_the_inner_optimizer_are_plain(spill_dir):
    with offloaded_pair(adamw, spill_dir, steps=1) as (pair, optimizer):
        for made in (copy.deepcopy(pair.inner), pickle.loads(pickle.dumps(pair.inner))):
            assert_same_states(made.state_dict(), pair.twin.state_dict())
        pair.step(optimizer)
        pair.check(optimizer)


def test_a_state_that_something_else_holds_is_refused(spill_dir):
    """A wrapper that shares it would go on with an empty one."""
    pair = Pair(adamw)
    held = pair.inner.state
    with opened(spill_dir) as offloader:
        with pytest.raises(ConfigError, match="nothing else to hold"):
            offloader.offload_optimizer(pair.inner)
        del held
        pair.step(offloader.offload_optimizer(pair.inner))
        pair.check()


def test_a_state_dict_that_a_hook_edits_is_refused(spill_dir):
    """Plain training would go on with what it makes of it."""
    pair = Pair(adamw)

    def spoil(_, saved):
        saved["state"][0]["exp_avg"].zero_()

    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        handle = optimizer.register_state_dict_post_hook(spoil)
        with pytest.raises(RuntimeError, match="is a copy"):
            optimizer.state_dict()
        handle.remove()
        pair.check(optimizer)


def test_after_close_a_state_dict_has_what_was_edited(spill_dir):
    with offloaded_pair(adamw, spill_dir, steps=2) as (pair, optimizer):
        held = optimizer.state[pair.mine[7]], pair.twin.state[pair.plain[7]]
    for state in held:
        state["exp_avg_sq"].mul_(2)
    for each, params in ((optimizer, pair.mine), (pair.twin, pair.plain)):
        each.state[params[2]]["exp_avg"] = torch.full((128, 150), 3.0)
        each.state[params[3]]["more"] = torch.ones(2)
        each.state[params[4]] = {"step": torch.tensor(9.0)}
        each.state[params[5]]["exp_avg"].zero_()
        del each.state[params[6]]
    pair.check(optimizer)
    pair.step(pair.inner, [0, 1, 2, 3, 5, 7, 8, 9])
    pair.check(optimizer)
    saved = copy.deepcopy(pair.twin.state_dict())
    for state in saved["state"].values():
        state["step"].add_(1)
    for each in (pair.inner, pair.twin):
        each.load_state_dict(copy.deepcopy(saved))
    pair.check(optimizer)
