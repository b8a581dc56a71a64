"""How tensors of optimizer states lie in the memory of a subgroup."""

from __future__ import annotations

import torch

from lightning_ssd.optimizer.step.layout import Layout
from lightning_ssd.optimizer.step.types import State


def test_states_that_change_places_do_not_overwrite_each_other() -> None:
    """An optimizer may swap two of its tensors, or keep one as a part of another."""
    states: list[State] = [{"a": torch.arange(2048.0), "b": -torch.arange(2048.0)}]
    layout = Layout.of(states, torch.device("cpu"), 4096, [False])
    storage = torch.empty(layout.nbytes, dtype=torch.uint8).untyped_storage()
    layout.collect(states, storage)
    filled = layout.fill(layout.templates(states), storage)
    filled[0]["a"], filled[0]["b"] = filled[0]["b"], filled[0]["a"]
    layout.collect(filled, storage)
    swapped = layout.fill(layout.templates(filled), storage)
    assert torch.equal(swapped[0]["a"], -torch.arange(2048.0))
    assert torch.equal(swapped[0]["b"], torch.arange(2048.0))
