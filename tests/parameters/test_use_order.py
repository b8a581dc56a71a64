"""What is expected next follows what came next the last time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_ssd.parameters.use_order import Phase, Use, UseOrder


def step(num_units: int) -> list[Use]:
    """Forward through all units, and back."""
    forward = [Use(n, Phase.FORWARD) for n in range(num_units)]
    return forward + [Use(n, Phase.BACKWARD) for n in reversed(range(num_units))]


def mistakes(order: UseOrder, uses: Sequence[Use]) -> Iterator[Use]:
    """Uses that the one before did not lead to expect."""
    expected = None
    for number, use in enumerate(uses):
        if number and use != expected:
            yield use
        expected = order.visit(use)


def test_nothing_is_expected_at_first() -> None:
    order = UseOrder()
    assert [order.visit(use) for use in step(3)] == [None] * 6


def test_the_second_step_is_foreseen() -> None:
    order = UseOrder()
    assert len(list(mistakes(order, step(5)))) == 9
    assert not list(mistakes(order, step(5) * 3))


def test_the_turn_keeps_the_last_unit() -> None:
    order = UseOrder()
    for use in step(3):
        order.visit(use)
    for use in step(3)[:2]:
        order.visit(use)
    assert order.visit(Use(2, Phase.FORWARD)) == Use(2, Phase.BACKWARD)


def test_evaluation_does_not_disturb_training() -> None:
    order = UseOrder()
    evaluation = [Use(n, Phase.EVALUATION) for n in range(4)]
    list(mistakes(order, step(4) * 2 + evaluation * 2 + step(4)))
    missed = list(mistakes(order, step(4) + evaluation * 3 + step(4) * 2))
    assert {use.unit for use in missed} == {0}, "only where one follows the other"


def test_a_new_order_is_learnt_at_once() -> None:
    order = UseOrder()
    list(mistakes(order, step(4) * 3))
    shorter = [use for use in step(4) if use.unit != 2]
    assert len(list(mistakes(order, shorter))) == 2
    assert not list(mistakes(order, shorter))


def test_what_comes_after_the_next_one_is_known_without_a_use() -> None:
    order = UseOrder()
    list(mistakes(order, step(3) * 2))
    assert order.after(Use(0, Phase.FORWARD)) == Use(1, Phase.FORWARD)
    assert order.after(Use(2, Phase.FORWARD)) == Use(2, Phase.BACKWARD)
    assert order.after(Use(0, Phase.EVALUATION)) is None
    assert order.visit(Use(0, Phase.FORWARD)) == Use(1, Phase.FORWARD), "asking is no use"
