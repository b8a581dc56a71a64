"""Plans as the scheduler keeps them, with as much in them as a test looks at, and who makes them."""

from lightning_ssd.planning.plan import Plan, PlanObjective, Prediction, TierRates
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling import plan_maker
from lightning_ssd.scheduling.plan_cursor import StoredPlan

PREDICTION = Prediction(step_s=1.0, stall_s=0.01, peak_bytes=100, written_bytes=50, read_bytes=50)


def stored_plan(*placements, sizes=(1,), storages=(), goal=None, rates=None, prediction=PREDICTION, keep_step_s=1.0):
    """Make the plan of a pass of a second.

    Args:
        placements: one for each of its storages.
        sizes: of what it saves.
        storages: of its trace, wanted in reverse.
        goal: that it was made for; by default none in particular.
        rates: that it was made with; by default one byte per second.
        prediction: of it.
        keep_step_s: seconds of the pass without it.
    """
    order = tuple(reversed(range(len(storages))))
    return StoredPlan(
        sizes=sizes,
        trace=Trace(storages=storages, order=order, forward_end_s=0.5, end_s=1.0),
        goal=goal or PlanObjective(),
        rates=rates or TierRates(write_bytes_per_s=1.0, read_bytes_per_s=1.0),
        plan=Plan(
            placements=placements, limit_bytes=100, ahead_bytes=0, prediction=prediction, keep_step_s=keep_step_s
        ),
    )


def plan_by(patch, make_plan):
    """Have plans made by this function, in whatever process."""
    for name in ("make_plan", "make_plan_apart"):
        patch.setattr(plan_maker, name, make_plan)
