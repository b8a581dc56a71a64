"""The phases of a search: its table, and a search that is driven by chance."""

from __future__ import annotations

import random

import pytest

from lightning_ssd.scheduling.move_search import MoveSearch
from lightning_ssd.scheduling.search_phase import TRANSITIONS, Phase, PhaseEvent, State

LIMIT = 1.02


def leads_to(phase: Phase) -> set[Phase]:
    return {after for (before, _), after in TRANSITIONS.items() if before is phase}


def test_a_plan_is_awaited_before_it_is_tried_and_tried_before_it_is_settled() -> None:
    assert leads_to(Phase.MEASURING) == {Phase.AWAITING}
    assert leads_to(Phase.AWAITING) == {Phase.TRYING}
    assert leads_to(Phase.TRYING) == {Phase.SETTLED, Phase.MEASURING}
    assert leads_to(Phase.SETTLED) == {Phase.TRYING, Phase.MEASURING}


def test_every_event_leads_somewhere_and_none_to_where_it_came_from() -> None:
    assert {event for _, event in TRANSITIONS} == set(PhaseEvent)
    assert all(before is not after for (before, _), after in TRANSITIONS.items())


@pytest.mark.parametrize("seed", range(20))
def test_a_search_goes_through_its_phases_alone(seed: int) -> None:
    """Whatever comes, in whatever order: threads end their passes as they like."""
    dice, search, plan = random.Random(seed), MoveSearch(LIMIT, 1e-3, is_guess=True), object()
    seen = set()
    for _ in range(1000):
        before, kept_before = search._phase, search.keeps
        event = dice.choice(["kept", "submitted", "planned", "moved", "moved", "moved", "replan", "another"])
        if event == "kept":
            search.kept(dice.choice([None, 1.0, 1.01]))
        elif event == "submitted":
            search.submitted()
        elif event == "planned":
            search.planned(dice.choice([None, 0, 100, 1000]))
        elif event == "moved":
            told = search.moved(plan, dice.choice([0, 1000]), dice.choice([1.0, 1.05, 1.5]), 0.0)
            assert told is None or search._phase is Phase.MEASURING, "a reason to plan again"
        elif event == "replan" and dice.random() < 0.2:
            search.replan()
            assert search._phase is Phase.MEASURING or kept_before
        else:
            plan = object()
        after = search._phase
        seen.add((before, after))
        if after in (Phase.MEASURING, Phase.AWAITING):
            assert search.keeps
        assert not search.wants_trace or after is Phase.MEASURING
        keeping = (State.KEEPING, State.RESTING)
        assert (search.state in keeping) is search.keeps
        assert search.keeps or search.state is (State.SETTLED if after is Phase.SETTLED else State.TRYING)
    assert {after for _, after in seen} == set(Phase)
