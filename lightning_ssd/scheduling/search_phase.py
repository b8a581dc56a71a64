"""The phases of a search for how much may be moved, and a table of what leads from one to another. Pure."""

from __future__ import annotations

import enum

__all__ = ["TRANSITIONS", "Phase", "PhaseEvent", "State"]


class State(enum.StrEnum):
    """What a search is doing, for metrics; see ``move_search.py``. Told by the phase and by what the next pass does."""

    KEEPING = "keeping"
    TRYING = "trying"
    SETTLED = "settled"
    RESTING = "resting"


class Phase(enum.Enum):
    """What a search is about.

    In the first two, passes keep everything. In the others they follow a plan, but for a number of passes in between,
    whose time the plan is compared with.
    """

    MEASURING = "measuring"
    """Keeping is timed, for a few passes or for a long rest; the last of them is traced for the next plan."""
    AWAITING = "awaiting"
    """That plan is being made."""
    TRYING = "trying"
    """Passes follow a plan until their time is known well enough."""
    SETTLED = "settled"
    """The plan keeps its promise, or no other one would be better."""


class PhaseEvent(enum.Enum):
    """What happens to a search."""

    SUBMITTED = "submitted"
    """A plan is being made from the trace of the last pass that was to keep."""
    PLANNED = "planned"
    """A plan has been made."""
    BEGUN = "begun"
    """A pass has followed another plan than the one before it."""
    CONVINCED = "convinced"
    """The plan keeps its promise; or there is no cost of moving to be found."""
    DOUBTED = "doubted"
    """Keeping is to be measured again, and the same plan to be tried again."""
    REPLANNED = "replanned"
    """Another plan is wanted: the cost of moving is known better, nothing is worth moving, or trying costs too much."""


TRANSITIONS = {
    (Phase.MEASURING, PhaseEvent.SUBMITTED): Phase.AWAITING,
    (Phase.AWAITING, PhaseEvent.PLANNED): Phase.TRYING,
    (Phase.TRYING, PhaseEvent.CONVINCED): Phase.SETTLED,
    (Phase.TRYING, PhaseEvent.REPLANNED): Phase.MEASURING,
    (Phase.SETTLED, PhaseEvent.BEGUN): Phase.TRYING,
    (Phase.SETTLED, PhaseEvent.DOUBTED): Phase.TRYING,
    (Phase.SETTLED, PhaseEvent.REPLANNED): Phase.MEASURING,
}
"""What is not here changes nothing: a plan may be made that the search has not asked for, say."""
