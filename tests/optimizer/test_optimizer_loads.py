"""What an offloaded optimizer makes of odd checkpoints: the same as the plain one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, offloaded, offloaded_pair, partition_of

pytestmark = pytest.mark.usefixtures("small_subgroups")

CUT = ((300, 200), (7,), (300, 200))
"""Two of these are cut into slices."""


def _into_all_groups(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """As in PyTorch's tutorial: a checkpoint with fewer parameters goes into an optimizer with more of them."""
    adapted = copy.deepcopy(optimizer.state_dict())
    for number, state in saved["state"].items():
        adapted["state"][2 - number] = state
    return adapted


def test_a_hook_may_load_a_checkpoint_of_fewer_parameters(spill_dir: Path) -> None:
    smaller, pair = Pair(adamw, shapes=CUT[:2]), Pair(adamw, shapes=(CUT[0], CUT[1], CUT[0]))
    for _ in range(2):
        smaller.set_gradients()
        smaller.twin.step()
    saved = smaller.twin.state_dict()
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        for each in (optimizer, pair.twin):
            each.register_load_state_dict_pre_hook(_into_all_groups)
            each.load_state_dict(copy.deepcopy(saved))
        assert_same_states(optimizer.state_dict(), pair.twin.state_dict())
        pair.step(optimizer)
        pair.check(optimizer)


def test_loaded_states_that_slices_cannot_share_come_back_as_they_were(spill_dir: Path) -> None:
    with offloaded_pair(adamw, spill_dir, shapes=CUT, steps=1) as (pair, optimizer):
        saved = pair.twin.state_dict()
        as_long_as_a_slice = partition_of(optimizer).subgroups[0].parts[0].num_elements
        saved["state"][0]["past"] = [torch.ones(3), 2]
        saved["state"][2]["row"] = torch.arange(as_long_as_a_slice, dtype=torch.float32)
        for each in (optimizer, pair.twin):
            each.load_state_dict(copy.deepcopy(saved))
        assert_same_states(optimizer.state_dict(), pair.twin.state_dict())
        pair.train(optimizer, 2)
        pair.check(optimizer)


def test_loaded_states_may_be_empty_and_keep_their_order(spill_dir: Path) -> None:
    """A state that somebody has looked at before there was one is saved as an empty one."""
    with offloaded_pair(adamw, spill_dir, shapes=CUT) as (pair, optimizer):
        pair.step(optimizer, [2])
        for parameters, each in ((pair.mine, optimizer), (pair.plain, pair.twin)):
            assert not each.state[parameters[0]]
            each.load_state_dict(copy.deepcopy(each.state_dict()))
        assert list(optimizer.state_dict()["state"]) == list(pair.twin.state_dict()["state"]) == [2, 0]
        for active in (None, [1, 2], None):
            pair.step(optimizer, active)
            pair.check(optimizer)
