"""Which limit of memory holds: budgets, and scarce memory without one."""

import pytest

from lightning_ssd.common.formatting import as_setting
from lightning_ssd.errors import BudgetError
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.planner import BudgetTooSmall, smallest_budget
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.memory_limits import Limits, MemoryConstraints, NonActivationMemory
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.support.fake_passes import (
    COUNT,
    FAST,
    NBYTES,
    SLOW,
    LateClock,
    machine_of,
    make_trace,
    opened,
    planned,
    refusal,
    run_pass,
)
from tests.support.named_budget import named_budget
from tests.support.stored_plans import plan_by

# -- limits -----------------------------------------------------------------------------------------------------------


def test_without_a_budget_there_is_no_limit_until_two_fifths_of_the_memory_are_used():
    with opened() as made:
        cursor, _ = made.cursor("a", level_bytes=123, available_bytes=10 * NBYTES)
        assert cursor.limit_bytes is None
        assert [cursor.place(NBYTES) for _ in range(4)] == [Placement.HOST] * 4
        assert cursor.limit_bytes is None
        assert cursor.place(NBYTES) is Placement.HOST
        assert cursor.limit_bytes == 5 * NBYTES, "the drive is waited for"


def test_under_a_budget_the_first_pass_has_no_other_limit():
    with opened(activation_budget=5 * NBYTES) as made:
        cursor, _ = made.cursor("a", level_bytes=0, available_bytes=NBYTES)
        assert [cursor.place(NBYTES) for _ in range(9)] == [Placement.HOST] * 9
        assert (cursor.limit_bytes, cursor.ran_out) == (5 * NBYTES, False)


def test_a_memory_budget_leaves_room_for_everything_else():
    with opened(memory_budget=20 * NBYTES) as made:
        # Unknown yet: half of what is free is for saved activations.
        assert made.cursor("a", level_bytes=4 * NBYTES, available_bytes=None)[0].limit_bytes == 8 * NBYTES
        planned(made, make_trace(other=11 * NBYTES))
        assert made.cursor("a", level_bytes=4 * NBYTES, available_bytes=None)[0].limit_bytes == 9 * NBYTES


def test_the_smaller_one_of_two_budgets_holds():
    for memory, activations, limit in ((20, 3, 3), (10, 30, 5)):
        with opened(memory_budget=memory * NBYTES, activation_budget=activations * NBYTES) as made:
            assert made.cursor("a", level_bytes=0, available_bytes=None)[0].limit_bytes == limit * NBYTES


def test_a_budget_that_was_kept_is_not_refused(monkeypatch):
    """Whatever the planner knows: the pass that it was asked about has stayed under the budget."""
    num_calls = 0

    def refuse(*_):
        nonlocal num_calls
        num_calls += 1
        raise BudgetTooSmall(5 * NBYTES, 6 * NBYTES)

    plan_by(monkeypatch, refuse)
    with opened(activation_budget=5 * NBYTES) as made:
        for _ in range(4):
            cursor, _ = planned(made, make_trace())
            assert cursor.limit_bytes == 5 * NBYTES
            assert cursor.followed is None
        assert num_calls == 1, "it is not asked again for passes like this one"
        planned(made, make_trace(COUNT + 1))
        assert num_calls == 1, "nobody traced the first pass of other sizes"
        planned(made, make_trace(COUNT + 1))
        assert num_calls == 2


def test_a_budget_that_recomputing_might_keep_names_the_line_to_add():
    trace = make_trace(blocks=True)
    nowhere = Machine()  # to move to
    without, with_it = (
        smallest_budget(trace, nowhere, PlanObjective(recompute=recompute)) for recompute in (False, True)
    )
    assert with_it < without
    held = {"peak_bytes": COUNT * NBYTES}
    text = str(refusal(trace, options=held, machine=machine_of(nowhere), activation_budget=with_it))
    assert named_budget(text) == without
    assert 'let repeated blocks, if there are any, run again in backward (recompute_modules="blocks"), make the' in text
    with opened(machine=machine_of(nowhere), activation_budget=with_it, recompute=True) as made:
        planned(made, trace, peak_bytes=COUNT * NBYTES)
        assert made.cursor("a", level_bytes=0, available_bytes=None)[0].recompute
    settings = {"machine": machine_of(nowhere), "activation_budget": with_it // 2, "recompute": True}
    text = str(refusal(trace, options=held, **settings))
    assert "recompute_modules" not in text, "they may be recomputed already"


def test_an_impossible_memory_budget_names_what_else_is_in_memory():
    other = 7 * NBYTES
    match = r'memory_budget="7680KiB" is too small .*: the smallest .* \(7\.0 MiB of it are not'
    refusal(make_trace(other=other), match=match, memory_budget=other + NBYTES // 2)


@pytest.mark.parametrize(
    ("budget", "stays", "is_advised"),
    [("memory_budget", True, True), ("memory_budget", False, False), ("activation_budget", True, False)],
)
def test_what_could_leave_is_named_where_it_is_in_the_way(budget, stays, is_advised):
    limit = NBYTES // 2 + (7 * NBYTES if budget == "memory_budget" else 0)
    options = {budget: limit, "have_states_stay": stays, "weights_may_leave": stays}
    error = str(refusal(make_trace(other=7 * NBYTES), **options))
    smallest = as_setting(smallest_budget(make_trace(), FAST, PlanObjective()))
    weights = f"or set activation_budget={smallest}, for which weights leave when a model is registered"
    assert ('optimizer_states="offload"' in error) is (weights in error) is is_advised


@pytest.mark.parametrize("other", [7 * NBYTES, 4000 * NBYTES])
def test_the_memory_budget_that_is_named_has_room_for_a_run_that_needs_a_little_more(other):
    """What else is in memory differs by a few MiB from run to run."""
    match = r'that works is "\d+MiB" \([\d.,]+ [GM]iB of it are not'
    smallest = named_budget(refusal(make_trace(other=other), match=match, memory_budget=other + NBYTES // 2))
    more = other + max(12 * NBYTES, other // 60)
    with opened(memory_budget=smallest) as made:
        planned(made, make_trace(other=more))
        assert run_pass(made, make_trace(other=more))[0].completed() is not None
    with opened(memory_budget=smallest) as made:
        run_pass(made, make_trace(other=more + other // 10 + 10 * NBYTES))
        with pytest.raises(BudgetError):
            made.wait()


def test_a_budget_that_only_wear_forbids_says_so():
    for wear, is_named in ((1, True), (None, False)):
        error = refusal(make_trace(), activation_budget=NBYTES // 2, wear_bytes_per_day=wear)
        assert ("raise wear_budget" in str(error)) is is_named


def test_a_pass_that_kept_its_budget_by_writing_more_than_wear_allows_was_not_possible():
    held = {"peak_bytes": NBYTES // 4}
    refusal(make_trace(), match="raise wear_budget", options=held, activation_budget=NBYTES // 2, wear_bytes_per_day=1)
    with opened(activation_budget=NBYTES // 2) as made:
        planned(made, make_trace(), peak_bytes=NBYTES // 4)
    with opened(activation_budget=NBYTES // 2, wear_bytes_per_day=1) as made:
        run_pass(made, make_trace(), peak_bytes=NBYTES // 4, written_bytes=0)  # all of it went to host memory
        made.wait()


# -- scarce memory ----------------------------------------------------------------------------------------------------


def train_in(made, available, *, level=0, other=0, passes=1):
    for _ in range(passes):
        trace = make_trace(other=other)
        cursor, _ = planned(made, trace, available_bytes=available, level_bytes=level)
    return cursor


def test_where_not_everything_fits_memory_itself_is_the_budget():
    available = 10 * NBYTES
    with opened() as made:
        first = train_in(made, available)
        assert first.ran_out
        assert made.num_plans == 0, "it was traced while memory did not return"
        second = train_in(made, available)
        assert second.limit_bytes == 4.5 * NBYTES, "of nine tenths half, as long as nobody knows what else comes"
        assert second.may_move
        third = train_in(made, available, other=2 * NBYTES)
        known = third.completed()
        assert known is not None, "it goes by a plan from now on"
        assert third.limit_bytes == 9 * NBYTES
        assert known.plan.prediction.peak_bytes <= 9 * NBYTES
        assert 0 < known.plan.prediction.written_bytes < COUNT * NBYTES, "no more moves than has to"


def test_without_room_nothing_is_given_up_however_slow_the_drive():
    """Keeping everything is no choice then."""
    with opened(machine=machine_of(SLOW)) as made:
        last = train_in(made, 10 * NBYTES, passes=8)
        known = last.completed()
        assert known.plan.moves


def test_memory_is_scarce_no_longer_than_it_is():
    """Another process takes memory for a while; afterwards nothing is limited, and a plan without a limit is made."""
    ample, saved = 10 * COUNT * NBYTES, COUNT * NBYTES
    with opened(machine=machine_of(Machine(ssd=TierRates(write_bytes_per_s=1e7, read_bytes_per_s=1e7)))) as made:
        assert train_in(made, saved).ran_out
        assert train_in(made, saved, passes=3).limit_bytes is not None
        assert train_in(made, 3 * saved).limit_bytes is not None, (
            "of which 0.4 are less than what was wanted, and a little"
        )
        after = train_in(made, ample, passes=8)
        known = after.completed()
        assert (after.limit_bytes, known.goal.budget_bytes) == (None, None)
        assert train_in(made, saved // 4, passes=3).limit_bytes is not None, "and it may come back"


def test_scarce_memory_never_raises():
    with opened() as made:
        for other in (0, 0, 9 * NBYTES, 40 * NBYTES):
            cursor = train_in(made, 10 * NBYTES, other=other, passes=2)
        assert cursor.limit_bytes is not None


def test_plans_outlive_small_changes_of_what_is_available_and_not_large_ones():
    with opened() as made:
        assert train_in(made, 10 * NBYTES, passes=3).completed() is not None
        assert train_in(made, int(9.8 * NBYTES)).completed() is not None
        less = train_in(made, 5 * NBYTES)
        assert less.completed() is None, "the plan needs more than there is now"
        assert less.limit_bytes == int(4.5 * NBYTES)
        train_in(made, 5 * NBYTES)
        after = train_in(made, 5 * NBYTES).completed()
        assert after.plan.prediction.peak_bytes <= 4.5 * NBYTES


def test_processes_that_share_the_memory_share_the_room():
    made = Scheduler(MemoryConstraints(max_slowdown=1.02), machine_of(FAST), num_sharing=3)
    cursor, _ = made.cursor("a", level_bytes=0, available_bytes=15 * NBYTES)
    assert [(cursor.place(NBYTES), cursor.ran_out)[1] for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("clock", [HostClock, LateClock])
def test_a_memory_budget_makes_room_for_optimizer_states_that_come_with_the_first_step(clock):
    """They are not there while the first pass is traced."""
    mib, states = 64 * NBYTES, 20 * 64 * NBYTES
    with opened(memory_budget=40 * mib) as made:
        for level, other in ((4 * mib, 6 * mib), (4 * mib + states, 6 * mib + states)):
            for _ in range(4):
                cursor, _ = run_pass(made, make_trace(other=other), level_bytes=level, clock=clock)
                assert cursor.limit_bytes is not None
                if level > states:
                    assert cursor.limit_bytes <= 40 * mib - states - 6 * mib
                made.wait()
        assert cursor.limit_bytes == 40 * mib - states - 6 * mib
        assert cursor.completed() is not None


def test_growth_that_the_trace_has_seen_already_refuses_nothing():
    """On CUDA a trace is read when the next pass has begun: its gradients may be in both numbers."""
    mib = 64 * NBYTES
    with opened(memory_budget=20 * mib) as made:
        for level in (4 * mib, 16 * mib):  # the states and gradients of the first step
            planned(made, make_trace(other=16 * mib), level_bytes=level, clock=LateClock)
        for _ in range(3):
            cursor, _ = planned(made, make_trace(other=16 * mib), level_bytes=16 * mib, clock=LateClock)
        assert cursor.limit_bytes == 4 * mib
        assert cursor.completed() is not None


def test_who_exceeds_a_memory_budget_gets_less():
    """What no trace has shown, and a hundredth, is taken off what saved activations may have."""
    with opened(memory_budget=100 * NBYTES) as made:
        trace = make_trace(100, other=30 * NBYTES)
        planned(made, trace)
        for highest, limit in ((100, 70), (101, 70), (0, 68), (0, 68)):
            cursor, _ = run_pass(made, trace, peak_bytes=70 * NBYTES, highest_bytes=highest * NBYTES)
            assert cursor.limit_bytes == limit * NBYTES
            made.wait()
        known = cursor.completed()
        assert known.plan.prediction.peak_bytes <= 68 * NBYTES


def test_what_a_trace_sees_later_is_not_taken_off_twice():
    others = NonActivationMemory()
    others.traced(600, 400)
    limits = Limits(MemoryConstraints(max_slowdown=1.02, memory_budget=1000))
    assert limits.exceeded(others, highest_bytes=1040, peak_bytes=400, largest_bytes=100)
    assert (others.unseen_bytes, limits.of(others)) == (50, 350)
    others.traced(630, 400)
    assert (others.unseen_bytes, limits.of(others)) == (20, 350)
    others.traced(730, 500)  # something else has come
    assert (others.unseen_bytes, limits.of(others)) == (20, 250)
    others.traced(700, 500)
    assert others.unseen_bytes == 20
    assert limits.own(others) == 300, "what nothing is refused for is not agreed on with other processes"


@pytest.mark.parametrize("highest", [21, 40, 4000])
def test_no_budget_is_refused_for_what_no_trace_has_shown(highest):
    """Saved activations get as little as a plan can do with, and passes go on."""
    with opened(memory_budget=9 * NBYTES) as made:
        trace = make_trace(20, other=6 * NBYTES)
        smallest = smallest_budget(trace, FAST, PlanObjective(budget_bytes=0))
        assert 0 < smallest < 3 * NBYTES
        for number in range(8):
            cursor, _ = run_pass(
                made, trace, peak_bytes=3 * NBYTES, highest_bytes=highest * NBYTES if number == 2 else 0
            )
            made.wait()
        assert cursor.limit_bytes == smallest
        assert cursor.completed() is not None


def test_saved_tensors_of_living_passes_are_not_taken_for_something_else():
    with opened(memory_budget=2000 * NBYTES) as made:
        planned(made, make_trace(other=900 * NBYTES), level_bytes=800 * NBYTES)
        cursor, _ = made.cursor("a", level_bytes=800 * NBYTES, resident_bytes=700 * NBYTES, available_bytes=None)
        assert cursor.limit_bytes == 1100 * NBYTES


def test_a_small_batch_is_not_judged_by_what_a_large_one_needed():
    with opened(memory_budget=100 * NBYTES) as made:
        for signature, other in (("large", 95 * NBYTES), ("small", 5 * NBYTES)):
            for _ in range(2):
                cursor, _ = planned(made, make_trace(3, other=other), signature=signature)
        assert cursor.limit_bytes == 95 * NBYTES
