"""Memory for subgroups of optimizer states, lent again and again."""

from __future__ import annotations

import torch

from lightning_ssd.optimizer.store.buffers import BufferPool


def test_a_larger_piece_takes_the_place_of_a_smaller_one() -> None:
    slots = BufferPool(torch.device("cpu"))
    for nbytes, expected in ((4096, 4096), (8192, 8192), (4096, 8192)):
        slots.give_back(slots.take(nbytes))
        assert [len(array) for array in slots._spare] == [expected]
