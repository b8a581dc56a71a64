"""What keeping everything would hold, read off a trace."""

from __future__ import annotations

import random

import pytest

from lightning_ssd.planning.trace import Trace, TracedStorage


def saved(nbytes: int, packed_s: float, freed_s: float) -> TracedStorage:
    return TracedStorage(nbytes=nbytes, packed_s=packed_s, last_used_s=packed_s, wanted_s=freed_s, freed_s=freed_s)


def peak(*storages: TracedStorage) -> int:
    return Trace(storages=storages, order=(), forward_end_s=5.0, end_s=10.0).saved_peak_bytes


def test_the_peak_of_a_pass() -> None:
    assert peak() == 0
    assert peak(saved(3, 0, 9), saved(4, 1, 8), saved(5, 2, 7)) == 12
    assert peak(saved(3, 0, 1), saved(4, 2, 3)) == 4


def test_what_goes_when_the_next_comes_is_not_held_with_it() -> None:
    assert peak(saved(3, 0, 5), saved(4, 5, 9)) == 4


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_some_moment(seed: int) -> None:
    rng = random.Random(seed)
    storages = []
    for _ in range(50):
        begin, end = sorted((rng.randrange(100), rng.randrange(100)))
        storages.append(saved(rng.randrange(1, 9), begin, end))
    held = (sum(s.nbytes for s in storages if s.packed_s <= now < s.freed_s) for now in range(101))
    assert peak(*storages) == max(held)
