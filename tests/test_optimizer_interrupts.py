"""Ctrl-C at each point of what happens to states between steps: nothing of it is lost, or the loss is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.interrupted_points import PointsIn
from tests.optimizer_pairs import Pair, adamw, offloaded

pytestmark = pytest.mark.usefixtures("small_subgroups")

_STATES = ("live_states.py", "paged_states.py", "partition.py", "state_layout.py", "state_store.py", "slots.py")


def _momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _zero(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p]["exp_avg"].zero_()


def _restart(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p]["momentum_buffer"] = None


def _replace(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p] = {"momentum_buffer": torch.ones_like(p)}


@pytest.mark.parametrize(("make", "edit"), [(adamw, _zero), (_momentum, _restart), (_momentum, _replace)])
@pytest.mark.parametrize("is_cut_short", [False, True], ids=["its way down", "the edit"])
def test_an_edited_state_outlives_an_interrupt_before_the_step(
    is_cut_short: bool,
    make: Callable[[Any], Optimizer],
    edit: Callable[[Optimizer, torch.Tensor], None],
    spill_dir: Path,
) -> None:
    """It goes back to its drive then, with other parameters' states in the same memory."""
    pair = Pair(make, ((128, 150), (64, 40), (64, 40), (64, 40), (300, 200), (128, 150), (128, 150), (128, 150)))
    points, num = PointsIn(*_STATES), 0
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        while True:
            pair.set_gradients()
            mine, plain = pair.mine[num % 8], pair.plain[num % 8]
            if is_cut_short:
                where = points.interrupt(partial(edit, optimizer, mine))
            edit(optimizer, mine)
            if not is_cut_short:
                where = points.interrupt(optimizer.step)
            if where is None or optimizer._broken is not None:  # the step has begun
                break
            num += 1
            optimizer.step()
            edit(pair.twin, plain)
            pair.twin.step()
            try:
                pair.check(optimizer)
            except AssertionError as error:
                raise AssertionError(where) from error
    assert num > (3 if is_cut_short else 50)
