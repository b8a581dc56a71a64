"""malloc's threshold is fixed exactly while a pass runs that frees memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import allocation as module
from lightning_ssd.allocation import Allocation
from lightning_ssd.memory import MallocThreshold
from tests.helpers import Setup, open_offloader

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")


@pytest.fixture
def allocation() -> Iterator[Allocation]:
    made = Allocation(is_ours=True)
    yield made
    made.close()


def is_fixed(of: Allocation) -> bool:
    return of._threshold in MallocThreshold._users


def test_only_a_pass_that_moves_fixes_it(allocation: Allocation) -> None:
    assert not is_fixed(allocation)
    allocation.enter(True)
    assert is_fixed(allocation)
    allocation.enter(False)
    assert not is_fixed(allocation)


def test_it_is_relaxed_for_the_optimizer_unless_passes_are_short(
    allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 0.0)
    allocation.enter(True)
    allocation.border()
    assert not is_fixed(allocation)
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 3600.0)
    allocation.enter(True)
    allocation.border()
    assert is_fixed(allocation)


def test_closing_leaves_malloc_to_itself(allocation: Allocation) -> None:
    allocation.enter(True)
    allocation.close()
    assert not is_fixed(allocation)


def test_where_memory_is_not_of_malloc_nothing_happens() -> None:
    before = set(MallocThreshold._users)
    elsewhere = Allocation()
    elsewhere.enter(True)
    elsewhere.border()
    elsewhere.close()
    assert before == MallocThreshold._users


@pytest.mark.parametrize(("activations", "fixed"), [("offload", True), ("auto", False), ("recompute_offload", True)])
def test_what_the_first_pass_of_a_policy_does(activations: str, fixed: bool, tmp_path: Path) -> None:
    """The first pass of "auto" keeps everything, and is what planned passes are held against."""
    with open_offloader(tmp_path, Setup(activations=activations)) as offloader:
        with offloader.saved_tensors():
            assert is_fixed(offloader._parts.allocation) == fixed
            loss = torch.ones(4, requires_grad=True).exp().sum()
        loss.backward()
        offloader.end_backward()
    assert not is_fixed(offloader._parts.allocation)
