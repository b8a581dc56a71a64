"""The answer of ``plan``, as arithmetic: the fastest that fits, else the smallest; and the largest that fits."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_ssd.planning.plan import Prediction, TierRates
from lightning_ssd.planning.what_fits import Choice, Fit, choose, largest

DRIVES = TierRates(write_bytes_per_s=1.0, read_bytes_per_s=2.0)


def prediction(step_s: float, peak_bytes: int, **more: int) -> Prediction:
    return Prediction(step_s=step_s, stall_s=0.0, peak_bytes=peak_bytes, read_bytes=0, **{"written_bytes": 0, **more})


def held(device_bytes: float, moved_bytes: float = 0) -> Fit:
    return Fit(
        plain_bytes=9, device_bytes=device_bytes, waiting_bytes=0, read_bytes=moved_bytes, written_bytes=moved_bytes
    )


MODES = {"keep": prediction(10, 50), "offload": prediction(11, 20, written_bytes=7), "recompute": prediction(13, 10)}
WAITS = {"nothing": held(40), "states": held(20, 4), "all": held(5, 20)}


@pytest.mark.parametrize(
    ("room", "mode", "waits", "step_s", "held_bytes", "written"),
    [
        (90, "keep", "nothing", 10, 90, 0),
        (89, "offload", "nothing", 11, 60, 7),
        (59, "recompute", "nothing", 13, 50, 0),
        (49, "offload", "states", 17, 40, 11),
        (25, "offload", "all", 41, 25, 27),
        (15, "recompute", "all", 43, 15, 20),
    ],
)
def test_the_fastest_that_fits(
    room: int, mode: str, waits: str, step_s: float, held_bytes: float, written: float
) -> None:
    assert choose(MODES, WAITS, room_bytes=room, drives=DRIVES) == Choice(
        mode=mode,
        waits=waits,
        fits=True,
        held_bytes=held_bytes,
        step_s=step_s,
        written_bytes=written,
        limit="the drive" if waits == "all" else "compute",
    )


def test_where_nothing_fits_the_smallest_is_told() -> None:
    found = choose(MODES, WAITS, room_bytes=14, drives=DRIVES)
    assert (found.fits, found.mode, found.waits, found.held_bytes) == (False, "recompute", "all", 15)


def test_the_largest_is_found_from_anywhere() -> None:
    for limit, start in product([0, 1, 2, 7, 16, 17, 1000], [1, 3, 8, 100, 5000]):
        tried: list[int] = []
        found = largest(lambda number: tried.append(number) or number <= limit, start)  # type: ignore[func-returns-value]  # noqa: B023
        assert found <= limit <= (found if limit <= 16 else 1.0625 * found), (limit, start)
        assert len(tried) == len(set(tried)) <= 24
