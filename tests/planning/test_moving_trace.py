"""Plans from the trace of a pass that moved: what its moves cost is no part of the pass to compare with."""

from __future__ import annotations

import pytest

from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.trace import Trace, TracedStorage

NBYTES = 20 << 20
COUNT = 60


def trace(end_s: float, moved_bytes: int) -> Trace:
    unit = end_s / (2 * COUNT)
    storages = tuple(
        TracedStorage(
            nbytes=NBYTES,
            packed_s=i * unit,
            last_used_s=(i + 0.5) * unit,
            wanted_s=(2 * COUNT - 1 - i) * unit,
            freed_s=(2 * COUNT - 0.1 - i) * unit,
        )
        for i in range(COUNT)
    )
    order = tuple(reversed(range(COUNT)))
    return Trace(storages=storages, order=order, forward_end_s=end_s / 2, end_s=end_s, moved_bytes=moved_bytes)


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.2, 0.5])
def test_a_pass_that_moved_is_planned_like_one_that_kept(cost: float) -> None:
    """``cost``: of moving everything, relative to a pass of a second."""
    rates = TierRates(write_bytes_per_s=2e9, read_bytes_per_s=2e9)
    machine = Machine(ssd=rates, cost_s_per_byte=cost / (COUNT * NBYTES))
    goal = PlanObjective(max_slowdown=1.05)
    kept = make_plan(trace(1.0, 0), machine, goal)
    moved = make_plan(trace(1.0 + cost, COUNT * NBYTES), machine, goal)
    assert kept.moves
    assert moved.keep_step_s == pytest.approx(kept.keep_step_s) == 1.0
    assert moved.prediction.peak_bytes <= 1.05 * kept.prediction.peak_bytes
    assert moved.prediction.step_s <= 1.05 * moved.keep_step_s * (1 + 1e-9)
    assert moved.moves
