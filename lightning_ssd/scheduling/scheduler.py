"""Turns finished passes into plans, in the background, and says what the next pass follows.

A *kind* is all passes of one signature. Its first pass moves whatever is large enough, waits for nothing, and is
traced. The plan is made in the background and put in force at the end of a later backward. From then on the overhead
of each pass is accounted by cause (``overhead.py``) and held against what was promised; a kind whose promise breaks is
traced and planned again with lower quartiles of what was measured. One thread at a time learns and puts plans in
force; others may begin passes meanwhile, and read what stands.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import replace

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.planner import BudgetTooSmall, smallest_budget
from lightning_ssd.planning.recompute_trace import inner_bytes, with_inner
from lightning_ssd.planning.simulator import predict
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.agreement import agreed
from lightning_ssd.scheduling.drift import Measured, is_worth_switching
from lightning_ssd.scheduling.memory_limits import MIN_RELIEF, Limits, MemoryConstraints
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.pass_kind import FinishedPass, PassKind, TracedPass
from lightning_ssd.scheduling.plan_cursor import PlanCursor, StoredPlan
from lightning_ssd.scheduling.plan_maker import PlanMaker
from lightning_ssd.scheduling.plan_report import DAY_S, Comparison, PlanReport
from lightning_ssd.scheduling.recorder import Recorder

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)

_MAX_KINDS = 64
_NOTHING = TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0)


class Scheduler:
    """One per offloader with ``activations="auto"``.

    Args:
        constraints: of the policy.
        machine: the tiers' rates, measured until now.
        agree: makes processes that train together plan with the same numbers; ``None``: there is one process.
        num_sharing: processes of this run that share the device's memory.
    """

    def __init__(
        self,
        constraints: MemoryConstraints,
        machine: Callable[[], Machine],
        *,
        agree: AllReduceMin | None = None,
        num_sharing: int = 1,
    ) -> None:
        self.trace: Trace | None = None
        self.num_plans = 0
        self.other_writes: Callable[[], float] = lambda: 0.0
        """Returns the bytes per day of ``wear_budget`` that others write, such as optimizer states."""
        self.unusable: str | None = None  # why the latest plan writes nothing to the drives
        self.comparison = Comparison()
        self._constraints = constraints
        self._measure = machine
        self._agree = agree
        self._agreed: Machine | None = None  # rates that were agreed on last
        self._num_borders = 0
        self._limits = Limits(constraints, num_sharing=num_sharing)
        self._kinds: OrderedDict[Hashable, PassKind] = OrderedDict()
        self._unread: deque[FinishedPass] = deque()
        self._traced: list[tuple[PassKind, TracedPass]] = []
        self._peak_bytes = 0  # of the pass that was traced last
        self._is_following = False
        self._kind = PassKind()  # that was traced last
        self._maker = PlanMaker(max_tasks=_MAX_KINDS)
        self._planned: list[PassKind] = []  # whose plans are in the making
        self._rested: list[PassKind] = []  # that have moved nothing for long
        self._untold: deque[str] = deque()  # a pass that begins holds the accounting lock, and handlers run any code
        # Held by the thread that learns, or puts plans in force: knowledge has one writer at a time. Other processes
        # and the maker's thread are waited for under it, so a pass that begins (under the accounting lock) never waits.
        # One that knows its owner: a signal handler may wait for plans in the midst of it.
        self._learning = threading.RLock()
        self._is_learning = False

    # -- before a pass -------------------------------------------------------------------------------------------

    def cursor(
        self, signature: Hashable, *, level_bytes: int, available_bytes: int | None, resident_bytes: int = 0
    ) -> tuple[PlanCursor, bool]:
        """Return what the next pass follows, and whether it is to be traced.

        Args:
            signature: its kind.
            level_bytes: memory in use now, but saved tensors.
            available_bytes: memory that could still be had; ``None``: unknown, then nothing is kept without a plan.
            resident_bytes: saved tensors in memory now, of passes that are still alive.

        Raises:
            BudgetError: the budget cannot be kept by any plan.
        """
        self._poll_if_free()
        self._is_following = False  # a pass without hooks is never read
        kind = self._kinds.setdefault(signature, PassKind())
        self._kinds.move_to_end(signature)
        while len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        kind.others.level_bytes = level_bytes
        room = self._limits.look(level_bytes + resident_bytes, available_bytes)
        limit = self._limits.of(kind.others)
        if self._limits.has_moved(kind.others):
            kind.ask_for_trace()
        if limit is None:
            self._count_rest(kind)
        most = room if limit is None else limit  # memory may have become less since a plan was made
        plans = [
            known
            for known in reversed(list(kind.plans.values()))  # another thread may be learning
            if available_bytes is None or known.plan.prediction.peak_bytes <= most
        ]
        cursor = PlanCursor(
            plans,
            recompute=kind.recompute,
            room_bytes=room,
            limit_bytes=limit,
            reserve_bytes=max(kind.inner_bytes.values(), default=0),
            limits_total_memory=self._limits.limits_total_memory,
            returns_memory=self.returns_memory(signature),
            keeps_unplanned=self._constraints.wear_bytes_per_day is not None or kind.varies,
        )
        return cursor, kind.wants_trace

    def returns_memory(self, signature: Hashable) -> bool:
        """Whether memory that the next pass frees has to return to the system at once.

        A budget of the user's holds for free memory, too. Where memory is scarce, what malloc holds back is available
        to tensors; only a trace must not take it for memory that something else needs.
        """
        kind = self._kinds.get(signature)
        return self._constraints.memory_budget is not None or (
            self._limits.limits_total_memory and (kind is None or kind.wants_trace)
        )

    @property
    def limits_memory(self) -> bool:
        """Whether passes are held to a limit of all memory, so that what is in use counts at each of them."""
        return self._limits.limits_total_memory

    def _count_rest(self, kind: PassKind) -> None:
        if kind.rests and kind.ends_rest():
            self._rested.append(kind)

    # -- after a pass --------------------------------------------------------------------------------------------

    def learn(self, finished: deque[FinishedPass]) -> None:
        """A backward is over: observe the passes that have finished until now, oldest first, and plan.

        Raises:
            BudgetError: the budget cannot be kept by any plan.
        """
        with self._learning:
            self._is_learning = True
            try:
                while finished:
                    self.observe(finished.popleft())
                self.border()
            finally:
                self._is_learning = False

    def observe(self, done: FinishedPass) -> None:
        """Learn from a pass. One thread at a time."""
        # The device may still be busy with this pass; with the one before it is done for sure.
        self._unread.append(done)
        while len(self._unread) > done.clock.lag:
            oldest = self._unread.popleft()
            kind = self._kinds.get(oldest.signature)
            if kind is not None:
                self._read(kind, oldest)

    def border(self) -> None:
        """A backward is over, and its passes have been observed: agree, put plans in force, begin new ones.

        One thread at a time.

        Raises:
            BudgetError: the budget cannot be kept by any plan.
        """
        self._num_borders += 1
        # With the 1st, 2nd, 4th ... Every process counts them alike, so that all meet here.
        if self._agree is not None and self._num_borders & (self._num_borders - 1) == 0:
            self._agree_with_others(self._agree)
        self._poll()
        self._tell()
        while self._rested:  # the machine may have been busy when moving was given up
            kind = self._rested.pop()
            kind.model.forget()
            kind.ask_for_trace()
        while self._traced:
            kind, traced = self._traced.pop()
            if kind.planning is None:
                self._submit(kind, traced)
            else:
                kind.ask_for_trace()  # two passes of one kind in one backward: one plan at a time

    def _read(self, kind: PassKind, done: FinishedPass) -> None:
        if done.cursor.ran_out and self._limits.ran_out(sum(done.sizes)):
            _log.info(
                "a pass has saved more than there is room for: memory is planned from now on as if it were a budget"
            )
            kind.ask_for_trace()  # of a pass under that limit, in which memory returns
            return
        overhead = done.overhead()
        kind.model.moved(overhead, done.moved_bytes, is_recorded=done.recorder is not None)
        known = done.cursor.completed()
        self._is_following = known is not None and done.cursor.recompute == kind.recompute
        kind.num_unplanned = 0 if known is not None else kind.num_unplanned + 1
        if known is not None and self._is_following:
            self._compare(kind, known, done, overhead)
        elif not kind.is_planned(done.sizes, done.cursor.limit_bytes):
            kind.ask_for_trace(of_unplanned=True)
        is_wanted = done.recorder is not None and kind.wants_trace and kind.planning is None
        if done.recorder is not None and is_wanted and not (known is not None and kind.passes_over()):
            self._keep_trace(kind, done, done.recorder)

    def _keep_trace(self, kind: PassKind, done: FinishedPass, recorder: Recorder) -> None:
        kind.traced()
        self.trace = trace = replace(recorder.trace(done.end, done.refused), moved_bytes=done.moved_bytes)
        self._kind = kind
        kind.others.traced(trace.other_peak_bytes, done.level_bytes)
        if trace.storages:
            self._peak_bytes = done.peak_bytes
            self._traced.append((kind, TracedPass(done.sizes, trace, done.peak_bytes, done.written_bytes)))

    def _compare(self, kind: PassKind, known: StoredPlan, done: FinishedPass, overhead: Overhead) -> None:
        """Hold the overhead that was measured against the one that was promised."""
        measured = Measured(
            step_s=done.clock.seconds(done.begin, done.end),
            overhead=overhead,
            peak_bytes=done.peak_bytes,
            written_bytes=done.written_bytes,
            read_bytes=done.read_bytes,
            host_bytes=done.moved_bytes - done.written_bytes,
            limit_bytes=done.cursor.limit_bytes,
            may_write_bytes=self._may_write(known.trace.end_s),
        )
        self.comparison.add(known, measured)
        if known.goal.budget_bytes is not None:
            self._hold_to_memory_budget(kind, known, done)
        # The first pass under a plan finds memory as another one left it, and recording disturbs what it measures.
        is_typical = kind.followed.get(known.sizes) is known and done.recorder is None
        kind.followed[known.sizes] = known
        if not is_typical:
            return
        prediction = known.plan.prediction
        kind.model.followed(
            overhead,
            step_s=measured.step_s,
            moved_bytes=done.moved_bytes,
            predicted_stall=prediction.stall_s / max(known.plan.keep_step_s, 1e-9),
        )
        machine = self.machine
        reason = kind.watch.passed(known, measured, machine.ssd or _NOTHING, host_bytes=_host_bytes(machine))
        if reason is not None:
            _log.info("planning again: %s", reason)
            kind.ask_for_trace()

    def _hold_to_memory_budget(self, kind: PassKind, known: StoredPlan, done: FinishedPass) -> None:
        """Plan with less where all memory in use was more than its budget, at a moment that no trace has shown."""
        has_exceeded = self._limits.exceeded(
            kind.others,
            highest_bytes=done.highest_bytes,
            peak_bytes=done.peak_bytes,
            largest_bytes=max(known.sizes, default=0),
        )
        if not has_exceeded:
            return
        _log.info("planning again: %d bytes of memory were in use, more than memory_budget", done.highest_bytes)
        if kind.planning is None and not kind.recompute:
            self._traced.append((kind, TracedPass.behind(known)))
        else:
            kind.ask_for_trace()

    def _submit(self, kind: PassKind, traced: TracedPass) -> None:
        goal, machine = self._goal(traced.trace, kind), self._agreed or self._own_machine(kind)
        self.unusable = (machine.ssd or _NOTHING).unusable or self.unusable
        traced = replace(traced, trace=with_inner(traced.trace, kind.inner_bytes))
        self._planned.append(kind)
        kind.planning = self._maker.begin(traced, goal, machine)

    def _goal(self, trace: Trace, kind: PassKind) -> PlanObjective:
        limit, wear = self._limits.of(kind.others), self._may_write(trace.end_s)
        may_recompute = self._constraints.recompute and (limit is not None or wear is not None)
        return PlanObjective(
            max_slowdown=max(self._constraints.max_slowdown - kind.model.excess, 1.0),
            min_relief=MIN_RELIEF,
            budget_bytes=limit,
            written_bytes=wear,
            # A trace with recomputed blocks cannot tell what their storages would do: placements only, then.
            recompute=may_recompute and bool(trace.blocks) and not trace.recomputed,
        )

    def _may_write(self, seconds: float) -> int | None:
        """Return what ``wear_budget`` leaves for the activations of a pass that takes so long; ``None``: no limit."""
        wear = self._constraints.wear_bytes_per_day
        return None if wear is None else int(max(wear - self.other_writes(), 0.0) * seconds / DAY_S)

    @property
    def machine(self) -> Machine:
        """The rates to plan with: those that the processes have agreed on, else our own."""
        return self._agreed or self._own_machine(self._kind)

    def _own_machine(self, kind: PassKind) -> Machine:
        """Return the rates as they are known here, with what moving costs passes of this kind."""
        machine = self._measure()
        return replace(machine, cost_s_per_byte=kind.model.cost_s_per_byte(machine.cost_s_per_byte))

    def _agree_with_others(self, agree: AllReduceMin) -> None:
        machine, limit = self._own_machine(self._kind), self._limits.own(self._kind.others)
        floor = 0
        is_asked = self._constraints.has_budget and limit is not None and self._peak_bytes > limit
        if is_asked and self.trace is not None and self.trace.storages:
            floor = smallest_budget(self.trace, machine, self._goal(self.trace, self._kind))
        self._agreed, self._limits.agreed, largest = agreed(agree, machine, limit_bytes=limit, floor_bytes=floor)
        if largest > self._limits.agreed:
            unusable = (self.machine.ssd or _NOTHING).unusable
            raise self._limits.impossible(largest, self._kind.others, unusable=unusable)

    # -- plans ---------------------------------------------------------------------------------------------------

    def _poll_if_free(self) -> None:
        """Put in force what has been made, unless a thread learns: that one does so.

        Also a signal handler may have come in the midst of that, and begins a pass.
        """
        if self._is_learning or not self._planned:
            return
        with deferring_interrupts():  # else one could leave the lock taken
            if self._learning.acquire(blocking=False):
                try:
                    self._poll()
                finally:
                    self._learning.release()

    def _poll(self) -> None:
        for kind in self._in_the_making():
            if kind.planning is not None and kind.planning.task.is_done:
                self._install(kind)

    def _in_the_making(self) -> list[PassKind]:
        """Not looked for among all kinds: signatures may be compared by code in Python, so that another thread may
        begin a pass of a new kind meanwhile.
        """
        self._planned = [kind for kind in self._planned if kind.planning is not None]
        return self._planned

    def wait(self) -> None:
        """Block until the plans under way have been made, and put them in force.

        Raises:
            BudgetError: the budget cannot be kept by any plan.
        """
        with self._learning:
            self._is_learning = True
            try:
                for kind in self._in_the_making():
                    if kind.planning is not None:
                        kind.planning.task.wait("Planning what is moved")  # what it raises, _install raises
                        self._install(kind)
            finally:
                self._is_learning = False
        self._tell()

    def _tell(self) -> None:
        while self._untold:
            _log.info("%s", self._untold.popleft())

    def _install(self, kind: PassKind) -> None:
        made, kind.planning = kind.planning, None
        if made is None:
            return
        traced, goal, machine = made.traced, made.goal, made.machine
        sizes, trace = traced.sizes, traced.trace
        try:
            plan = made.task.result()
        except BudgetTooSmall as error:
            if self._limits.relent(kind.others, error.smallest_bytes):
                self._traced.append((kind, traced))
                return
            may_move = goal.written_bytes is None or traced.written_bytes <= goal.written_bytes
            is_kept = goal.budget_bytes is not None and traced.peak_bytes <= goal.budget_bytes and may_move
            if is_kept or not self._constraints.has_budget:
                # The user has not asked for the limit of scarce memory; nor does the planner know every way to make
                # room (copies that a retained graph drops, say). This pass was possible: go on like it.
                self._untold.append(f"no plan is known for a pass that was possible: {error}")
                kind.unplanned.append(sizes)
                return
            if self._limits.has_moved(kind.others):
                kind.ask_for_trace()  # what has come since may be counted twice: the next trace knows
                return
            unusable = (machine.ssd or _NOTHING).unusable
            # What the planner was asked is not what the user wrote: it would say "under 0 bytes" of a memory_budget.
            raise self._limits.impossible(error.smallest_bytes, kind.others, unusable=unusable) from None
        if plan.recompute != trace.recomputed:
            # Another pass altogether: it is traced and planned again as it really is.
            kind.begin_to_recompute(plan.recompute, inner_bytes(trace, plan.recompute))
            self.num_plans += 1
            return
        rates, host_bytes = machine.ssd or _NOTHING, _host_bytes(machine)
        new = StoredPlan(sizes=sizes, trace=trace, goal=goal, rates=rates, plan=plan, host_bytes=host_bytes)
        old = kind.plans.get(sizes)
        chosen = new if old is None else self._better(old, new, machine)
        kind.put_in_force(chosen)
        self.unusable = (machine.ssd or _NOTHING).unusable or self._refusal(chosen)
        self.num_plans += chosen is new
        if kind.is_new and chosen.plan.moves:
            kind.ask_for_trace()

    def _refusal(self, known: StoredPlan) -> str | None:
        """Return why the wear budget lets not even one storage per pass be written; ``None``: it does."""
        if not known.plan.refused_bytes:
            return None
        # Each in a unit of its own: they may be far apart, and the smaller one is the setting.
        (allowed,) = format_sizes(self._constraints.wear_bytes_per_day or 0, decimal=True)
        (needed,) = format_sizes(known.plan.refused_bytes * DAY_S / max(known.trace.end_s, 1e-9), decimal=True)
        return f"wear_budget allows this process {allowed} per day and the plan needs {needed} per day"

    @staticmethod
    def _better(old: StoredPlan, new: StoredPlan, machine: Machine) -> StoredPlan:
        """Return the new plan, or the old one with its prediction brought up to date."""
        limit = new.goal.budget_bytes
        prediction = predict(
            Lifetimes(new.trace), old.plan.placements, machine, limit_bytes=limit, ahead_bytes=old.plan.ahead_bytes
        )
        max_step_s = None if limit is not None else new.goal.max_slowdown * new.plan.keep_step_s
        if is_worth_switching(prediction, new.plan.prediction, limit_bytes=limit, max_step_s=max_step_s):
            return new
        return replace(new, plan=replace(old.plan, prediction=prediction, keep_step_s=new.plan.keep_step_s))

    def report(self) -> PlanReport | None:
        """Return predicted against measured; ``None`` before the first pass that followed a plan."""
        return self.comparison.report(self.num_plans)

    def readings(self) -> dict[str, float] | None:
        """Return bytes and seconds of the last pass, by key of the metric; ``None`` if it followed no plan."""
        if self.comparison.latest is None or not self._is_following:
            return None
        known, measured = self.comparison.latest
        return {
            "plan/predicted_step_s": known.plan.prediction.step_s,
            "plan/measured_step_s": measured.step_s,
            "plan/predicted_peak_gib": known.plan.prediction.peak_bytes,
            "plan/measured_peak_gib": measured.peak_bytes,
            "plan/predicted_stall_s": known.plan.prediction.stall_s,
            "plan/num_plans": self.num_plans,
            "plan/predicted_overhead_ratio": known.predicted_overhead,
            "plan/overhead_ratio": measured.overhead_ratio,
            # What no hook sees of recomputed blocks is at the end of the trace, see `with_inner`.
            "plan/recomputed_gib": sum(storage.nbytes for storage in known.trace.storages[len(known.sizes) :]),
        }

    def close(self) -> None:
        """End the threads; plans under way are dropped."""
        self._maker.close()


def _host_bytes(machine: Machine) -> int:
    """Return how much host memory there is to plan with."""
    return 0 if machine.host is None else machine.host.capacity_bytes or 0
