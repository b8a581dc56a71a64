"""Which of the coming passes of a kind are traced: four states, and a table of what leads from one to another. Pure."""

from __future__ import annotations

import enum

__all__ = ["TRANSITIONS", "Tracing", "TracingEvent"]


class Tracing(enum.Enum):
    """What is wanted of the coming passes of one kind."""

    NONE = "none"
    """No trace: there are plans, and they keep their promises."""
    NEXT = "next"
    """A trace of the next pass, whichever it is."""
    CERTAIN = "certain"
    """A trace is due, and a certain pass is waited for: one without a plan, or from which a search wants to plan."""
    SEARCHED = "searched"
    """A pass from which a search wants to plan is waited for; until one does, none is traced."""


class TracingEvent(enum.Enum):
    """What happens to a kind of pass."""

    ASKED = "asked"
    """A plan is missing, was made for other limits, or has broken its promise: any pass will do."""
    WANTED = "wanted"
    """A certain pass is wanted: one without a plan has come, or a search wants to plan and has no trace yet."""
    GIVEN_UP = "given up"
    """So many others have come meanwhile that it is waited for no longer."""
    TRACED = "traced"
    """A trace has been taken."""


TRANSITIONS = {
    (Tracing.NONE, TracingEvent.ASKED): Tracing.NEXT,
    (Tracing.NONE, TracingEvent.WANTED): Tracing.SEARCHED,
    (Tracing.NONE, TracingEvent.GIVEN_UP): Tracing.NONE,
    (Tracing.NONE, TracingEvent.TRACED): Tracing.NONE,
    (Tracing.NEXT, TracingEvent.ASKED): Tracing.NEXT,
    (Tracing.NEXT, TracingEvent.WANTED): Tracing.CERTAIN,
    (Tracing.NEXT, TracingEvent.GIVEN_UP): Tracing.NEXT,
    (Tracing.NEXT, TracingEvent.TRACED): Tracing.NONE,
    (Tracing.CERTAIN, TracingEvent.ASKED): Tracing.CERTAIN,
    (Tracing.CERTAIN, TracingEvent.WANTED): Tracing.CERTAIN,
    (Tracing.CERTAIN, TracingEvent.GIVEN_UP): Tracing.NEXT,
    (Tracing.CERTAIN, TracingEvent.TRACED): Tracing.NONE,
    (Tracing.SEARCHED, TracingEvent.ASKED): Tracing.CERTAIN,
    (Tracing.SEARCHED, TracingEvent.WANTED): Tracing.SEARCHED,
    (Tracing.SEARCHED, TracingEvent.GIVEN_UP): Tracing.NONE,
    (Tracing.SEARCHED, TracingEvent.TRACED): Tracing.NONE,
}
"""Complete: nothing that happens is an error in any state, since passes of several threads end in any order. After
TRACED follows WANTED at once where another search wants a trace."""
