"""Parameters are cut only where no later change of the optimizer's options can give a slice other bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.elementwise import UpdateProbe
from lightning_ssd.optimizer.step.stepper import SubgroupStepper
from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, equal, offloaded, partition_of, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")

SHAPE = (2049, 70)
"""Its halves, one for each thread, and its slices end within a vector."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CHANGES: dict[str, tuple[Callable[[Any], Optimizer], dict[str, Any]]] = {
    "rate of SGD": (lambda p: optim.SGD(p, lr=1.0), {"lr": 0.0123}),
    "decay of Adam": (lambda p: optim.Adam(p, lr=1e-2), {"weight_decay": 0.1}),
}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("change", CHANGES)
def test_options_that_change_later_give_the_same_bits(change: str, dtype: torch.dtype, spill_dir: Path) -> None:
    make, edit = CHANGES[change]
    generator = torch.Generator().manual_seed(1)
    mine = nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
    plain = nn.Parameter(mine.detach().clone())
    twin = make([plain])
    with offloaded(make([mine]), spill_dir) as (optimizer, _):
        for step in range(6):
            mine.grad = torch.randn(SHAPE, generator=generator).to(dtype)
            plain.grad = mine.grad.clone()
            if step == 1:
                optimizer.param_groups[0].update(edit)
                twin.param_groups[0].update(edit)
            optimizer.step()
            twin.step()
        assert equal(mine, plain)
        assert_same_states(optimizer.state_dict(), twin.state_dict())


@pytest.mark.parametrize(
    ("dtype", "has_master", "fused", "may"),
    [
        (torch.float32, False, False, True),
        (torch.float64, False, False, True),
        (torch.bfloat16, False, False, False),
        (torch.float16, False, False, False),
        (torch.bfloat16, True, False, True),
        (torch.float32, False, True, False),
    ],
)
def test_what_is_cut(dtype: torch.dtype, has_master: bool, fused: bool, may: bool) -> None:
    """SGD with a rate of 1 multiplies by nothing else: no trial with these options tells slices from the whole."""
    parameter = nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = optim.SGD([parameter], lr=1.0, fused=fused)
    probe = UpdateProbe(
        SubgroupStepper(optimizer),
        optimizer,
        is_elementwise=True,
        has_master=lambda p: has_master,
        state_of=lambda p: {},
    )
    assert probe.may_slice(parameter, 0) is may


def test_fused_steps_that_begin_later_are_refused_where_parameters_are_cut(spill_dir: Path) -> None:
    """As a checkpoint of a fused optimizer makes them begin."""
    mine = nn.Parameter(torch.randn(SHAPE))
    before = mine.detach().clone()
    with offloaded(optim.AdamW([mine]), spill_dir) as (optimizer, _):
        assert len(partition_of(optimizer).places[0]) > 1
        optimizer.param_groups[0]["fused"] = True
        mine.grad = torch.ones(SHAPE)
        with pytest.raises(ConfigError, match="fused"):
            optimizer.step()
        assert torch.equal(mine, before)
        optimizer.param_groups[0]["fused"] = False
        optimizer.step()
        assert not torch.equal(mine, before)


def test_parameters_that_get_another_group_are_updated_once(spill_dir: Path) -> None:
    """In a group whose slices were not tried yet, or that has another number, since one before it has gone."""
    pair = Pair(lambda p: adamw([{"params": p[:1]}, {"params": p[1:]}]), shapes=((5,), (2049, 70), (2049, 70)))
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)  # the next one visits the last slices first
        for each in (optimizer, pair.twin):
            first = each.param_groups.pop(0)
            each.param_groups[0]["params"].extend(first["params"])
        pair.train(optimizer, 2)
        pair.check()
