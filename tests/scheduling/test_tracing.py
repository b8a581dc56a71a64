"""Which passes of a kind are traced: the table, and a kind that follows it."""

from __future__ import annotations

import random
from itertools import product

import pytest

from lightning_ssd.scheduling.pass_kind import PassKind
from lightning_ssd.scheduling.tracing import TRANSITIONS, Tracing, TracingEvent

PATIENCE = 8


def test_every_event_is_known_in_every_state() -> None:
    assert set(TRANSITIONS) == set(product(Tracing, TracingEvent))


@pytest.mark.parametrize("event", TracingEvent)
def test_an_event_that_comes_twice_says_nothing_new(event: TracingEvent) -> None:
    for state in Tracing:
        once = TRANSITIONS[state, event]
        assert TRANSITIONS[once, event] is once


def test_a_due_trace_stays_due_until_it_is_taken() -> None:
    due = {Tracing.NEXT, Tracing.CERTAIN}
    for (before, event), after in TRANSITIONS.items():
        if event is TracingEvent.TRACED:
            assert after is Tracing.NONE
        else:
            assert (after in due) is (before in due or event is TracingEvent.ASKED)


def test_a_certain_pass_is_waited_for_until_it_has_come_or_too_many_others_have() -> None:
    waiting = {Tracing.CERTAIN, Tracing.SEARCHED}
    for (before, event), after in TRANSITIONS.items():
        if event in (TracingEvent.GIVEN_UP, TracingEvent.TRACED):
            assert after not in waiting
        else:
            assert (after in waiting) is (before in waiting or event is TracingEvent.WANTED)


class TwoFacts:
    """The same, told as the two facts behind it: whether a trace is due, and how long a certain pass is waited for."""

    def __init__(self) -> None:
        self.is_due, self.num_to_pass_over = True, 0

    def ask_for_trace(self) -> None:
        self.is_due = True

    def wait_for_trace(self) -> None:
        self.num_to_pass_over = PATIENCE

    def passes_over(self) -> bool:
        was_waiting = self.num_to_pass_over > 0
        self.num_to_pass_over -= was_waiting
        return was_waiting

    def traced(self, is_searched_for: bool) -> None:
        self.is_due, self.num_to_pass_over = False, PATIENCE * is_searched_for

    def wants_trace(self, is_searched_for: bool) -> bool:
        return self.is_due or (self.num_to_pass_over > 0 and is_searched_for)


@pytest.mark.parametrize("seed", range(20))
def test_a_kind_does_what_the_two_facts_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, kind, facts = random.Random(seed), PassKind(), TwoFacts()
    searched = [False]
    monkeypatch.setattr(PassKind, "_is_searched_for", property(lambda self: searched[0]))
    seen = set()
    for _ in range(2000):
        searched[0] = dice.random() < 0.3
        event = dice.choice(["ask", "miss", *["pass over"] * 6, "trace"])
        if event == "ask":
            kind.ask_for_trace()
            facts.ask_for_trace()
        elif event == "miss":
            kind.wait_for_trace()
            facts.wait_for_trace()
        elif event == "pass over":
            assert kind.passes_over() is facts.passes_over()
        else:
            kind.traced()
            facts.traced(searched[0])
        seen.add(kind.tracing)
        assert kind.wants_trace is facts.wants_trace(searched[0])
        assert (kind.tracing in (Tracing.NEXT, Tracing.CERTAIN)) is facts.is_due
        assert (kind.tracing in (Tracing.CERTAIN, Tracing.SEARCHED)) is (facts.num_to_pass_over > 0)
    assert seen == set(Tracing)
