"""What the scheduler decides: when it traces and plans, which limit holds, what ranks agree on, what it raises."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_ssd import scheduler as module
from lightning_ssd.clock import Clock, HostClock
from lightning_ssd.errors import BudgetError
from lightning_ssd.planning import worth
from lightning_ssd.planning.guide import Guide
from lightning_ssd.planning.limits import Wishes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.planner import BudgetTooSmall, smallest_budget
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage
from lightning_ssd.scheduler import Agree, FinishedPass, Scheduler

NBYTES = 1 << 20
COUNT = 12
TIMEOUT_S = 30
FAST = Machine(ssd=TierRates(write_bytes_per_s=1e9, read_bytes_per_s=1e9))
SLOW = Machine(ssd=TierRates(write_bytes_per_s=1e6, read_bytes_per_s=1e6))


def make_trace(count: int = COUNT, *, step_s: float = 1.0, other: int = 0, blocks: bool = False) -> Trace:
    """Storages packed one after the other, wanted back in reverse."""
    unit = step_s / (2 * count)
    storages = tuple(
        TracedStorage(
            nbytes=NBYTES,
            packed_s=i * unit,
            last_used_s=(i + 0.5) * unit,
            wanted_s=(2 * count - 1 - i) * unit,
            freed_s=(2 * count - 1 - i + 0.9) * unit,
            block=i // 3 if blocks else -1,
        )
        for i in range(count)
    )
    calls = tuple(
        TracedBlock(
            name=f"block {b}",
            forward_start_s=3 * b * unit,
            forward_end_s=(3 * b + 3) * unit,
            backward_start_s=(2 * count - 3 * b - 3) * unit,
            backward_end_s=(2 * count - 3 * b) * unit,
            input_nbytes=NBYTES // 8,
        )
        for b in range(count // 3 if blocks else 0)
    )
    return Trace(
        storages=storages,
        order=tuple(reversed(range(count))),
        blocks=calls,
        forward_end_s=step_s / 2,
        end_s=step_s,
        other_peak_bytes=other,
    )


class FakeRecorder:
    """Gives a trace that the test made."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def trace(self, end: float, refused: frozenset[str] = frozenset()) -> Trace:
        return self._trace


class LateClock(HostClock):
    """As on CUDA: a pass can only be read when the next one has been run."""

    lag = 1


def run_pass(
    made: Scheduler,
    trace: Trace,
    *,
    signature: str = "a",
    step_s: float | None = None,
    clock: type[Clock] = HostClock,
    stall_s: float = 0.0,
    available_bytes: int | None = None,
    level_bytes: int = 0,
) -> tuple[Guide, bool]:
    """One pass that saves what the trace says."""
    guide, wants_trace = made.guide(signature, level_bytes=level_bytes, available_bytes=available_bytes)
    sizes = tuple(storage.nbytes for storage in trace.storages)
    for nbytes in sizes:
        guide.place(nbytes)
    followed = guide.followed
    predicted = trace.end_s if followed is None else followed.plan.prediction.step_s
    made.observe(
        FinishedPass(
            signature=signature,
            sizes=sizes,
            guide=guide,
            recorder=FakeRecorder(trace) if wants_trace else None,  # type: ignore[arg-type]
            clock=clock(),
            begin=0.0,
            end=predicted if step_s is None else step_s,
            level_bytes=level_bytes,
            stall_s=stall_s,
            peak_bytes=max(sizes, default=0),
            written_bytes=NBYTES,
            read_bytes=NBYTES,
        )
    )
    made.border()
    return guide, wants_trace


def machine_of(machine: Machine) -> Callable[[], Machine]:
    return lambda: machine


@contextmanager
def opened(
    *,
    machine: Callable[[], Machine] = lambda: FAST,
    agree: Agree | None = None,
    max_slowdown: float = 1.02,
    **wishes: Any,
) -> Iterator[Scheduler]:
    made = Scheduler(Wishes(max_slowdown=max_slowdown, **wishes), machine, agree=agree)
    try:
        yield made
    finally:
        made.close()


# -- tracing and planning ---------------------------------------------------------------------------------------------


def test_the_first_pass_is_traced_and_planned_and_the_next_one_follows() -> None:
    trace = make_trace()
    with opened() as made:
        guide, wants_trace = run_pass(made, trace)
        assert wants_trace
        assert guide.followed is None
        made.wait()
        guide, wants_trace = run_pass(made, trace)
        assert not wants_trace
        known = guide.completed()
        assert known is not None
        assert known.trace is trace is made.trace
        assert Placement.SSD in known.plan.placements
        assert made.num_plans == 1


def test_moving_that_does_not_pay_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes keep, three follow the plan and take twice as long, and from then on everything is kept again."""
    monkeypatch.setattr(worth, "_SCATTER", 0.05)
    trace, followed = make_trace(), []
    with opened() as made:
        for step_s in (9.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0):
            guide, _ = run_pass(made, trace, step_s=step_s, available_bytes=1 << 40)
            followed.append(guide.followed is not None)
            made.wait()
            assert made.readings() is None or followed[-1]
    assert followed == [False, False, False, True, True, True, False, False]
    report = made.comparison.report(made.num_plans, made.given_up_at)
    assert report is not None
    assert "given up for a while, because passes took 2.00 times as long" in report.text()


def test_each_signature_and_each_sequence_of_sizes_has_its_plan() -> None:
    with opened() as made:
        for count, signature in ((12, "a"), (8, "a"), (6, "b")):
            for _ in range(2):
                run_pass(made, make_trace(count), signature=signature)
                made.wait()
        for count, signature in ((12, "a"), (6, "b"), (8, "a")):
            guide, wants_trace = run_pass(made, make_trace(count), signature=signature)
            assert not wants_trace
            known = guide.completed()
            assert known is not None
            assert len(known.sizes) == count
        assert made.num_plans == 3


def test_one_pass_that_hiccups_changes_nothing_and_two_do() -> None:
    trace = make_trace()
    with opened() as made:
        run_pass(made, trace)
        made.wait()
        wants = [run_pass(made, trace, step_s=step_s)[1] for step_s in (1.0, 5.0, 1.0, 5.0, 1.0)]
        assert wants == [False] * 5
        run_pass(made, trace, step_s=5.0)
        run_pass(made, trace, step_s=5.0)
        assert made.guide("a", level_bytes=0, available_bytes=None)[1], "the next pass was to be traced"


def test_a_drive_that_has_become_slow_is_given_less() -> None:
    trace, now = make_trace(), [FAST]
    with opened(machine=lambda: now[0]) as made:
        run_pass(made, trace)
        made.wait()
        before = made.guide("a", level_bytes=0, available_bytes=None)[0]
        # Ten storages per second. (One per second would not slow the pass down: nearly all writes would be taken back.)
        now[0] = Machine(ssd=TierRates(write_bytes_per_s=1e7, read_bytes_per_s=1e7))
        for _ in range(6):
            run_pass(made, trace)
            made.wait()
        after = made.guide("a", level_bytes=0, available_bytes=None)[0]
        placed = [[guide.place(NBYTES) for _ in range(COUNT)] for guide in (before, after)]
        assert placed[0].count(Placement.SSD) > placed[1].count(Placement.SSD) + 2
        assert made.num_plans == 2


def test_what_the_device_has_not_finished_is_not_read() -> None:
    with opened() as made:
        run_pass(made, make_trace(), clock=LateClock)
        made.wait()
        assert made.trace is None
        run_pass(made, make_trace(), clock=LateClock)
        assert made.trace is not None


def test_training_does_not_wait_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, make_plan = threading.Event(), module.make_plan

    def slow(*args: Any) -> Any:
        assert go_on.wait(TIMEOUT_S)
        return make_plan(*args)

    monkeypatch.setattr(module, "make_plan", slow)
    with opened() as made:
        for _ in range(5):
            assert run_pass(made, make_trace())[0].followed is None
        go_on.set()
        made.wait()
        assert run_pass(made, make_trace())[0].followed is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]


def test_a_plan_that_recomputes_is_traced_again() -> None:
    """Its pass saves other things: until it has been seen, nothing is known of it."""
    trace = make_trace(blocks=True)
    floor = smallest_budget(trace, SLOW, module.Goal(recompute=True))
    with opened(machine=machine_of(SLOW), activation_budget=max(floor, 6 * NBYTES)) as made:
        run_pass(made, trace)
        made.wait()
        guide, wants_trace = made.guide("a", level_bytes=0, available_bytes=None)
        assert guide.recompute, "on a drive as slow as this, recomputing was expected"
        assert wants_trace
        assert guide.followed is None
        assert all(guide.block(b) == (b in guide.recompute) for b in range(4))


def test_an_error_of_the_planner_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(module, "make_plan", broken)
    with opened() as made:
        run_pass(made, make_trace())
        with pytest.raises(ZeroDivisionError, match="injected"):
            made.wait()


# -- limits -----------------------------------------------------------------------------------------------------------


def test_without_a_budget_there_is_no_limit_until_two_fifths_of_the_memory_are_used() -> None:
    with opened() as made:
        guide, _ = made.guide("a", level_bytes=123, available_bytes=10 * NBYTES)
        assert guide.limit_bytes is None
        assert [guide.place(NBYTES) for _ in range(4)] == [Placement.KEEP] * 4
        assert guide.limit_bytes is None
        assert [guide.place(NBYTES) for _ in range(2)] == [Placement.SSD] * 2
        assert guide.limit_bytes == 5 * NBYTES, "the drive is waited for"


def test_memory_that_nobody_can_tell_is_not_used() -> None:
    with opened() as made:
        assert made.guide("a", level_bytes=0, available_bytes=None)[0].place(1) is Placement.SSD


def test_under_a_budget_the_first_pass_moves_everything() -> None:
    with opened(activation_budget=5 * NBYTES) as made:
        guide, _ = made.guide("a", level_bytes=0, available_bytes=1 << 40)
        assert guide.limit_bytes == 5 * NBYTES
        assert guide.place(NBYTES) is Placement.SSD


def test_a_memory_budget_leaves_room_for_everything_else() -> None:
    with opened(memory_budget=20 * NBYTES) as made:
        # Unknown yet: half of what is free is for saved activations.
        assert made.guide("a", level_bytes=4 * NBYTES, available_bytes=None)[0].limit_bytes == 8 * NBYTES
        run_pass(made, make_trace(other=11 * NBYTES))
        made.wait()
        assert made.guide("a", level_bytes=4 * NBYTES, available_bytes=None)[0].limit_bytes == 9 * NBYTES


def test_the_smaller_one_of_two_budgets_holds() -> None:
    for memory, activations, limit in ((20, 3, 3), (10, 30, 5)):
        with opened(memory_budget=memory * NBYTES, activation_budget=activations * NBYTES) as made:
            assert made.guide("a", level_bytes=0, available_bytes=None)[0].limit_bytes == limit * NBYTES


def test_an_impossible_budget_names_the_smallest_one() -> None:
    trace = make_trace()
    with opened(activation_budget=NBYTES // 2) as made:
        run_pass(made, trace)
        with pytest.raises(BudgetError, match=rf"activation_budget={NBYTES // 2} bytes \(512 KiB\) cannot") as raised:
            made.wait()
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    smallest = int(str(raised.value).split("smallest possible is ")[1].split(" bytes")[0])
    with opened(activation_budget=smallest) as made:
        run_pass(made, trace)
        made.wait()
        known = run_pass(made, trace)[0].completed()
        assert known is not None
        assert known.plan.prediction.peak_bytes <= smallest


def test_a_budget_that_was_kept_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the planner knows: the pass that it was asked about has stayed under the budget."""
    num_calls = 0

    def refuse(*_: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise BudgetTooSmall(5 * NBYTES, 6 * NBYTES)

    monkeypatch.setattr(module, "make_plan", refuse)
    with opened(activation_budget=5 * NBYTES) as made:
        for _ in range(4):
            guide, _ = run_pass(made, make_trace())
            made.wait()
            assert guide.limit_bytes == 5 * NBYTES
            assert guide.followed is None
        assert num_calls == 1, "it is not asked again for passes like this one"
        run_pass(made, make_trace(COUNT + 1))
        made.wait()
        assert num_calls == 1, "nobody traced the first pass of other sizes"
        run_pass(made, make_trace(COUNT + 1))
        made.wait()
        assert num_calls == 2


def test_an_impossible_memory_budget_names_what_else_is_in_memory() -> None:
    other = 7 * NBYTES
    with opened(memory_budget=other + NBYTES // 2) as made:
        run_pass(made, make_trace(other=other))
        with pytest.raises(
            BudgetError, match=r"memory_budget=7864320 bytes \(7.5 MiB\).* of which 7340032 bytes \(7 MiB\) are not"
        ):
            made.wait()


def named(error: BaseException) -> int:
    """The smallest budget in a message."""
    return int(str(error).split("smallest possible is about ")[1].split(" bytes")[0])


@pytest.mark.parametrize("other", [7 * NBYTES, 4000 * NBYTES])
def test_the_memory_budget_that_is_named_has_room_for_a_run_that_needs_a_little_more(other: int) -> None:
    """What else is in memory differs by a few MiB from run to run."""
    with opened(memory_budget=other + NBYTES // 2) as made:
        run_pass(made, make_trace(other=other))
        with pytest.raises(BudgetError, match=r"smallest possible is about \d+ bytes \(\d+ MiB\), of which") as raised:
            made.wait()
    more = other + max(12 * NBYTES, other // 60)
    with opened(memory_budget=named(raised.value)) as made:
        run_pass(made, make_trace(other=more))
        made.wait()
        assert run_pass(made, make_trace(other=more))[0].completed() is not None
    with opened(memory_budget=named(raised.value)) as made:
        run_pass(made, make_trace(other=more + other // 10 + 10 * NBYTES))
        with pytest.raises(BudgetError):
            made.wait()


def test_a_budget_that_only_wear_forbids_says_so() -> None:
    for wear, is_named in ((1, True), (None, False)):
        with opened(activation_budget=NBYTES // 2, wear_bytes_per_day=wear) as made:
            run_pass(made, make_trace())
            with pytest.raises(BudgetError) as raised:
                made.wait()
        assert ("raise wear_budget" in str(raised.value)) is is_named


# -- scarce memory ----------------------------------------------------------------------------------------------------


def train_in(made: Scheduler, available: int, *, level: int = 0, other: int = 0, passes: int = 1) -> Guide:
    """Passes in so much memory; the guide of the last one."""
    for _ in range(passes):
        trace = make_trace(other=other)
        guide, _ = run_pass(made, trace, available_bytes=available, level_bytes=level)
        made.wait()
    return guide


def test_where_not_everything_fits_memory_itself_is_the_budget() -> None:
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


def test_without_room_nothing_is_given_up_however_slow_the_drive() -> None:
    """Keeping everything is no choice then."""
    with opened(machine=machine_of(SLOW)) as made:
        last = train_in(made, 10 * NBYTES, passes=8)
        known = last.completed()
        assert known is not None
        assert known.plan.moves
        assert made.given_up_at is None


def test_scarce_memory_never_raises() -> None:
    with opened() as made:
        for other in (0, 0, 9 * NBYTES, 40 * NBYTES):
            guide = train_in(made, 10 * NBYTES, other=other, passes=2)
        assert guide.limit_bytes is not None


def test_a_kind_that_fits_in_scarce_memory_keeps_everything() -> None:
    with opened() as made:
        train_in(made, 10 * NBYTES, passes=3)
        small = make_trace(2)
        for _ in range(3):
            run_pass(made, small, signature="small", available_bytes=10 * NBYTES)
            made.wait()
        known = run_pass(made, small, signature="small", available_bytes=10 * NBYTES)[0].completed()
        assert known is not None
        assert not known.plan.moves


def test_plans_outlive_small_changes_of_what_is_available_and_not_large_ones() -> None:
    with opened() as made:
        assert train_in(made, 10 * NBYTES, passes=3).completed() is not None
        assert train_in(made, int(9.8 * NBYTES)).completed() is not None
        less = train_in(made, 5 * NBYTES)
        assert less.completed() is None, "the plan needs more than there is now"
        assert less.limit_bytes == int(4.5 * NBYTES)
        train_in(made, 5 * NBYTES)
        after = train_in(made, 5 * NBYTES).completed()
        assert after is not None
        assert after.plan.prediction.peak_bytes <= 4.5 * NBYTES


def test_processes_that_share_the_memory_share_the_room() -> None:
    made = Scheduler(Wishes(max_slowdown=1.02), machine_of(FAST), num_sharing=3)
    guide, _ = made.guide("a", level_bytes=0, available_bytes=15 * NBYTES)
    assert [guide.place(NBYTES) for _ in range(3)] == [Placement.KEEP] * 2 + [Placement.SSD]


@pytest.mark.parametrize("clock", [HostClock, LateClock])
def test_a_memory_budget_makes_room_for_optimizer_states_that_come_with_the_first_step(clock: type[Clock]) -> None:
    """They are not there while the first pass is traced."""
    mib, states = 64 * NBYTES, 20 * 64 * NBYTES
    with opened(memory_budget=40 * mib) as made:
        for level, other in ((4 * mib, 6 * mib), (4 * mib + states, 6 * mib + states)):
            for _ in range(4):
                guide, _ = run_pass(made, make_trace(other=other), level_bytes=level, clock=clock)
                assert guide.limit_bytes is not None
                if level > states:
                    assert guide.limit_bytes <= 40 * mib - states - 6 * mib
                made.wait()
        assert guide.limit_bytes == 40 * mib - states - 6 * mib
        assert guide.completed() is not None


def test_growth_that_the_trace_has_seen_already_refuses_nothing() -> None:
    """On CUDA a trace is read when the next pass has begun: its gradients may be in both numbers."""
    mib = 64 * NBYTES
    with opened(memory_budget=20 * mib) as made:
        for level in (4 * mib, 16 * mib):  # the states and gradients of the first step
            run_pass(made, make_trace(other=16 * mib), level_bytes=level, clock=LateClock)
            made.wait()
        for _ in range(3):
            guide, _ = run_pass(made, make_trace(other=16 * mib), level_bytes=16 * mib, clock=LateClock)
            made.wait()
        assert guide.limit_bytes == 4 * mib
        assert guide.completed() is not None


def test_saved_tensors_of_living_passes_are_not_taken_for_something_else() -> None:
    with opened(memory_budget=2000 * NBYTES) as made:
        run_pass(made, make_trace(other=900 * NBYTES), level_bytes=800 * NBYTES)
        made.wait()
        guide, _ = made.guide("a", level_bytes=800 * NBYTES, resident_bytes=700 * NBYTES, available_bytes=None)
        assert guide.limit_bytes == 1100 * NBYTES


def test_two_passes_of_a_kind_in_one_backward_are_planned_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0

    def counted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return make(*args)

    make = module.make_plan
    monkeypatch.setattr(module, "make_plan", counted)
    with opened() as made:
        guides = [made.guide("a", level_bytes=0, available_bytes=None) for _ in range(2)]
        for guide, _ in guides:
            trace = make_trace()
            made.observe(
                FinishedPass(
                    signature="a",
                    sizes=(NBYTES,) * COUNT,
                    guide=guide,
                    recorder=FakeRecorder(trace),  # type: ignore[arg-type]
                    clock=HostClock(),
                    begin=0.0,
                    end=1.0,
                    level_bytes=0,
                    stall_s=0.0,
                    peak_bytes=NBYTES,
                    written_bytes=0,
                    read_bytes=0,
                )
            )
            made._kinds["a"].wants_trace = True
        made.border()
        made.wait()
        assert num_calls == 1
        assert made.num_plans == 1


def test_a_small_batch_is_not_judged_by_what_a_large_one_needed() -> None:
    with opened(memory_budget=100 * NBYTES) as made:
        for signature, other in (("large", 95 * NBYTES), ("small", 5 * NBYTES)):
            for _ in range(2):
                guide, _ = run_pass(made, make_trace(3, other=other), signature=signature)
                made.wait()
        assert guide.limit_bytes == 95 * NBYTES


# -- several processes ------------------------------------------------------------------------------------------------


class Group:
    """Processes as threads: each number is the smallest that any of them has."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._given: list[list[float]] = []
        self.num_calls = 0

    def agree(self, values: Sequence[float]) -> list[float]:
        self._given.append(list(values))
        if self._barrier.wait() == 0:
            self.num_calls += 1
        result = [min(column) for column in zip(*self._given, strict=True)]
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return result


def on_ranks(works: Sequence[Callable[[Agree], Any]]) -> tuple[list[Any], Group]:
    """Run each in a thread; returns what they returned or raised. A rank that waits for ever fails the test."""
    group, results = Group(len(works)), [None] * len(works)

    def run(rank: int) -> None:
        try:
            results[rank] = works[rank](group.agree)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits for the other one"
    return results, group


def rank(machine: Machine, trace: Trace, budget: int | None, passes: int = 9) -> Callable[[Agree], Any]:
    def work(agree: Agree) -> Any:
        with opened(machine=machine_of(machine), agree=agree, activation_budget=budget) as made:
            for _ in range(passes):
                guide, _ = run_pass(made, trace)
                made.wait()
            return made.machine, guide.limit_bytes

    return work


def test_ranks_agree_on_rates_and_limit() -> None:
    one = Machine(ssd=TierRates(write_bytes_per_s=3e9, read_bytes_per_s=1e9))
    two = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=4e9))
    results, group = on_ranks([rank(one, make_trace(), 8 * NBYTES), rank(two, make_trace(10), 9 * NBYTES)])
    expected = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=1e9))
    assert results == [(expected, 8 * NBYTES)] * 2
    assert group.num_calls == 4, "with the 1st, 2nd, 4th and 8th backward"


def test_ranks_say_whose_drive_cannot_be_used() -> None:
    nothing = Machine(ssd=TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0, unusable="the directory /x is full"))
    traces = make_trace(), make_trace()
    mine, others = on_ranks([rank(nothing, traces[0], NBYTES // 2), rank(FAST, traces[1], NBYTES // 2)])[0]
    assert isinstance(mine, BudgetError)
    assert "because no drive could be used: the directory /x is full. Without one the smallest possible" in str(mine)
    assert isinstance(others, BudgetError)
    assert "no drive could be used: another process of this run has none that could be measured" in str(others)


def test_ranks_agree_on_a_host_tier_that_all_have() -> None:
    def host(capacity: int) -> Machine:
        rates = TierRates(write_bytes_per_s=9e9, read_bytes_per_s=9e9, capacity_bytes=capacity)
        return Machine(ssd=FAST.ssd, host=rates)

    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(host(3), make_trace(), None)])
    assert [machine.host.capacity_bytes for machine, _ in results] == [3, 3]
    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(FAST, make_trace(), None)])
    assert [machine.host for machine, _ in results] == [None, None]
    assert [limit for _, limit in results] == [None, None]


def test_a_budget_that_one_rank_cannot_keep_raises_on_all() -> None:
    """The second one saves storages so large that the budget of the first one is too small for it."""
    large = make_trace()
    storages = tuple(
        TracedStorage(
            nbytes=8 * s.nbytes,
            packed_s=s.packed_s,
            last_used_s=s.last_used_s,
            wanted_s=s.wanted_s,
            freed_s=s.freed_s,
        )
        for s in large.storages
    )
    large = Trace(storages=storages, order=large.order, forward_end_s=0.5, end_s=1.0)
    results, _ = on_ranks([rank(FAST, make_trace(), 6 * NBYTES), rank(FAST, large, 6 * NBYTES)])
    assert [type(result) for result in results] == [BudgetError] * 2
    assert str(results[0]) == str(results[1])


def test_a_limit_that_was_low_for_a_while_recovers() -> None:
    """Also where processes agree: what was agreed earlier is not part of what is agreed now."""
    mib = 64 * NBYTES
    with opened(memory_budget=20 * mib, agree=lambda values: list(values)) as made:
        for level, other in ((4, 6), (4, 6), (14, 16), (14, 16), (4, 6), (4, 6), (4, 6), (4, 6), (4, 6)):
            made._kinds.clear()  # each is traced
            guide, _ = run_pass(made, make_trace(other=other * mib), level_bytes=level * mib)
            made.wait()
        guide, _ = run_pass(made, make_trace(other=6 * mib), level_bytes=4 * mib)
        assert guide.limit_bytes == 14 * mib


def test_without_others_nothing_is_agreed() -> None:
    now = [FAST]
    with opened(machine=lambda: now[0]) as made:
        run_pass(made, make_trace())
        now[0] = SLOW
        assert made.machine is SLOW


# -- bounds and numbers -----------------------------------------------------------------------------------------------


def test_kinds_and_plans_are_bounded() -> None:
    with opened() as made:
        for number in range(100):
            run_pass(made, make_trace(3), signature=str(number))
            made.wait()
        for count in range(1, 21):
            run_pass(made, make_trace(count), signature="x")
            made.wait()
        assert len(made._kinds) == 64
        assert max(len(kind.plans) for kind in made._kinds.values()) == 8


def test_readings_are_those_of_the_last_pass() -> None:
    trace = make_trace()
    with opened() as made:
        run_pass(made, trace)
        assert made.readings() is None
        made.wait()
        guide, _ = run_pass(made, trace, step_s=1.25)
        known, readings = guide.completed(), made.readings()
        assert known is not None
        assert readings is not None
        assert readings.predicted_step_s == known.plan.prediction.step_s
        assert readings.predicted_peak_bytes == known.plan.prediction.peak_bytes
        assert (readings.measured_step_s, readings.measured_peak_bytes, readings.num_plans) == (1.25, NBYTES, 1)


def test_the_limit_of_wear_is_that_of_one_pass() -> None:
    per_day = 86_400 * 4 * NBYTES  # four storages per second, and a pass takes one
    with opened(wear_bytes_per_day=per_day, max_slowdown=9.0) as made:
        run_pass(made, make_trace())
        made.wait()
        known = run_pass(made, make_trace())[0].completed()
        assert known is not None
        assert known.goal.written_bytes == 4 * NBYTES
        assert 0 < known.plan.prediction.written_bytes <= 4 * NBYTES
        assert math.isfinite(known.plan.prediction.step_s)


@pytest.mark.parametrize(
    ("wear", "machine", "is_told"), [(5_000_000, FAST, True), (10**12, FAST, False), (5_000_000, Machine(), False)]
)
def test_a_wear_budget_that_blocks_every_move_is_told_of(wear: int, machine: Machine, is_told: bool) -> None:
    with opened(machine=machine_of(machine), wear_bytes_per_day=wear) as made:
        for _ in range(2):
            run_pass(made, make_trace())
            made.wait()
        report = made.comparison.report(made.num_plans)
        assert report is not None
        assert ("wear_budget allows this process" in report.text()) is is_told
        assert report.allowed_bytes_per_day == wear
        if is_told:
            # Nearly all of twelve storages, in a pass of a second.
            assert 9 * NBYTES * 86_400 <= report.refused_bytes_per_day <= 12 * NBYTES * 86_400


def test_a_pass_without_saved_storages_is_no_trace() -> None:
    with opened() as made:
        run_pass(made, Trace(storages=(), order=(), forward_end_s=0.1, end_s=0.2))
        made.wait()
        assert made.num_plans == 0


def test_room_for_what_is_recomputed_is_not_taken_from_a_pass_that_recomputes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a pass may have begun before blocks were chosen."""
    budgets: list[int | None] = []

    def planned(trace: Trace, machine: Machine, goal: module.Goal) -> Any:
        budgets.append(goal.budget_bytes)
        return make(trace, machine, goal)

    make = module.make_plan
    monkeypatch.setattr(module, "make_plan", planned)
    trace, budget = make_trace(blocks=True), 6 * NBYTES
    with opened(machine=machine_of(SLOW), activation_budget=budget) as made:
        for _ in range(2):  # the second one as if begun earlier
            run_pass(made, trace)
            made.wait()
        guide = made.guide("a", level_bytes=0, available_bytes=None)[0]
    assert guide.limit_bytes == budget
    assert 0 < guide.reserve_bytes < budget
    assert budgets == [budget, budget]
