"""What is predicted of passes, on machines where moving is cheaper than keeping, as cheap, or dearer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Plan, Prediction
from lightning_ssd.scheduling.step_model import StepModel

COUNT = 24
WITHIN = 0.1


def plan_of(moved: int, *, simulated_s: float = 1.0, keep_s: float = 1.0, stall_s: float = 0.0, peak: int = 0) -> Plan:
    """It moves so many storages of one byte each."""
    return Plan(
        placements=(Placement.SSD,) * moved + (Placement.KEEP,) * (COUNT - moved),
        limit_bytes=COUNT,
        ahead_bytes=2,
        prediction=Prediction(
            step_s=simulated_s,
            stall_s=stall_s,
            peak_bytes=peak or COUNT - moved + 2,
            written_bytes=moved,
            read_bytes=moved,
        ),
        keep_step_s=keep_s,
    )


class Machine:
    """Passes of one second that take longer, or less long, where they move, and where something disturbs them."""

    def __init__(self, extra_s: Callable[[float], float], *, noise: float = 0.0, seed: int = 0) -> None:
        self.model = StepModel()
        self.dice = random.Random(seed)
        self.extra_s, self.noise = extra_s, noise

    def true_s(self, moved: int) -> float:
        return 1 + self.extra_s(moved / COUNT)

    def clocked(self, seconds: float, number: int) -> float:
        disturbed = self.noise and self.dice.random() < 0.05
        noise = abs(self.dice.gauss(0, self.noise)) + (0.5 * self.dice.random() if disturbed else 0)
        return seconds * (1 + noise) * (1.3 if number == 0 else 1)  # the first one maps memory

    def keep(self, passes: int) -> None:
        for number in range(passes):
            self.model.kept(self.clocked(1.0, number))

    def follow(self, plan: Plan, passes: int) -> None:
        moved = plan.placements.count(Placement.SSD)
        for number in range(passes):
            peak = round(0.9 * plan.prediction.peak_bytes)
            self.model.passed(plan, moved, self.clocked(self.true_s(moved), number), peak)

    def expected(self, plan: Plan) -> Prediction:
        return self.model.expected(plan, plan.placements.count(Placement.SSD))


MACHINES = [
    lambda share: -0.4 * share,
    lambda share: -0.3 * share**0.5,
    lambda share: 0.0,
    lambda share: 0.05 * share,
    lambda share: 0.5 * share,
    lambda share: 0.1 * (share > 0) + 0.2 * share,
    lambda share: 0.6 * share**2,
]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("extra_s", MACHINES)
@pytest.mark.parametrize("keeps", [True, False], ids=["keeps first", "moves first"])
def test_from_the_third_plan_on_predictions_are_within_a_tenth(
    extra_s: Callable[[float], float], noise: float, keeps: bool
) -> None:
    """Before any of its passes has run. The simulator knows nothing: to it all plans take two seconds."""
    off = []
    for seed in range(20):
        machine = Machine(extra_s, noise=noise, seed=seed)
        if keeps:
            machine.keep(4)
        for moved in (24, 8) if keeps else (24, 8, 14):
            machine.follow(plan_of(moved, simulated_s=2.0, keep_s=2.0), 6)
            machine.keep(3 * keeps)
        for moved in (16, 12, 20, 10):
            plan = plan_of(moved, simulated_s=2.0, keep_s=2.0)
            typical_s = machine.true_s(moved) * (1 + 0.6745 * noise)  # the median of passes like its own
            off.append(machine.expected(plan).step_s / typical_s - 1)
            machine.follow(plan, 4)
            promise = machine.model.promised(plan)
            assert promise is not None
            assert off[-1] == pytest.approx(promise.step_s / typical_s - 1), "it is what was said before"
    assert max(map(abs, off)) <= (WITHIN if noise < 0.05 else 1.5 * WITHIN)
    assert sum(abs(one) <= WITHIN for one in off) >= 0.95 * len(off)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("extra_s", MACHINES)
def test_the_only_plan_of_a_run_leans_on_its_own_passes(extra_s: Callable[[float], float], noise: float) -> None:
    """As where moving everything is fastest, and nothing else is tried."""
    for seed in range(20):
        machine = Machine(extra_s, noise=noise, seed=seed)
        machine.keep(4)
        plan = plan_of(24, simulated_s=3.0, keep_s=2.0)
        machine.follow(plan, 6)
        assert machine.expected(plan).step_s == pytest.approx(machine.true_s(24), rel=WITHIN)


def test_peaks_are_set_right_by_those_of_other_plans_and_by_their_own() -> None:
    machine = Machine(lambda share: 0.0)
    first, second = plan_of(4, peak=1000), plan_of(8, peak=600)
    assert machine.expected(first).peak_bytes == 1000
    machine.follow(first, 4)
    assert machine.expected(first).peak_bytes == pytest.approx(900, rel=0.01)
    assert machine.expected(second).peak_bytes == pytest.approx(540, rel=0.01)


def test_one_disturbed_pass_says_nothing() -> None:
    machine = Machine(lambda share: 0.1 * share)
    machine.keep(4)
    machine.follow(plan_of(8), 4)
    machine.model.passed(plan_of(8), 8, 9.0, 1)
    machine.follow(plan_of(24), 2)
    assert machine.expected(plan_of(8)).step_s == pytest.approx(machine.true_s(8), rel=0.02)
    assert machine.model.cost_s_per_byte == pytest.approx(0.1 / COUNT, rel=0.2)


def test_the_cost_of_moving_may_be_below_nothing() -> None:
    machine = Machine(lambda share: -0.4 * share)
    assert machine.model.cost_s_per_byte is None
    machine.keep(4)
    assert machine.model.cost_s_per_byte is None
    machine.follow(plan_of(24), 4)
    assert machine.model.cost_s_per_byte == pytest.approx(-0.4 / COUNT)


def test_stalls_that_are_predicted_come_on_top() -> None:
    machine = Machine(lambda share: 0.0)
    machine.keep(4)
    for moved, stall_s in ((24, 0.5), (8, 0.1)):
        plan = plan_of(moved, stall_s=stall_s)
        for number in range(4):
            machine.model.passed(plan, moved, machine.clocked(1 + stall_s, number), 1)
    assert machine.expected(plan_of(16, stall_s=0.3)).step_s == pytest.approx(1.3)


steps = st.floats(1e-3, 1e3, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, COUNT), steps, st.integers(1, 4)), max_size=12), st.integers(0, COUNT), steps)
def test_whatever_was_measured_predicted_times_are_above_nothing(
    passes: list[tuple[int, float, int]], moved: int, simulated_s: float
) -> None:
    model = StepModel()
    for amount, step_s, count in passes:
        for _ in range(count):
            model.kept(step_s) if not amount else model.passed(plan_of(amount), amount, step_s, 1)
    plan = plan_of(moved, simulated_s=simulated_s, stall_s=simulated_s / 2)
    expected = model.expected(plan, moved)
    assert 0 < expected.step_s < 1e6
    assert expected.step_s >= min([simulated_s / 2, *(step_s for _, step_s, _ in passes)]) / 4
    assert replace(expected, step_s=0.0, peak_bytes=0) == replace(plan.prediction, step_s=0.0, peak_bytes=0)
    again = [model.expected(plan, moved) for _ in range(2)]
    assert again == [expected, expected], "asking changes nothing"


def test_what_is_known_is_bounded() -> None:
    model = StepModel()
    for number in range(200):
        plan = replace(plan_of(8), ahead_bytes=number)
        for _ in range(3):
            model.passed(plan, 8, 1.0, 1)
    assert len(model._followed) <= 16


def test_keeping_for_the_first_time_and_passes_without_a_clock_do_not_count() -> None:
    model = StepModel()
    model.kept(9.0)
    model.kept(None)
    assert model.expected(plan_of(0, simulated_s=2.0), 0).step_s == 2.0
    model.kept(1.0)
    assert model.expected(plan_of(8, simulated_s=2.0, keep_s=2.0), 8).step_s == 1.0
