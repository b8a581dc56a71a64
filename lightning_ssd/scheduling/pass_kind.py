"""The knowledge of all passes of one signature, and where they stand on the way to a plan.

A pass is traced, a plan is made from the trace, and the next passes follow it. The first pass of a process does much
for the first time, so that the next one is traced and planned for as well.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from lightning_ssd.common.task import Task
from lightning_ssd.planning.plan import Machine, Plan, PlanObjective
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.scheduling.drift import DriftDetector
from lightning_ssd.scheduling.memory_limits import NonActivationMemory
from lightning_ssd.scheduling.overhead import Overhead, OverheadModel
from lightning_ssd.scheduling.plan_cursor import PlanCursor, StoredPlan
from lightning_ssd.scheduling.recorder import Recorder
from lightning_ssd.scheduling.stalls import stall_seconds

__all__ = ["FinishedPass", "PassKind", "PlanInProgress", "TracedPass"]

_MAX_PLANS = 8
_MAX_PASSED_OVER = 8
_NUM_FIRST_TRACES = 2
_MAX_UNPLANNED = 8
_FIRST_REST, _MAX_REST = 64, 1024
"""Passes of the first and of the longest rest, in which nothing moves."""

Sizes = tuple[int, ...]
"""Bytes of the storages that a pass saves, in pack order."""


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A pass to plan for."""

    sizes: Sizes
    trace: Trace
    peak_bytes: int
    """Resident saved activations at the worst moment, as measured."""
    written_bytes: int
    """By it, to drives."""

    @staticmethod
    def behind(known: StoredPlan) -> TracedPass:
        """Return the pass that a plan was made from, as if it had followed this plan."""
        prediction = known.plan.prediction
        return TracedPass(known.sizes, known.trace, prediction.peak_bytes, prediction.written_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPass:
    """A pass whose backward is over."""

    signature: Hashable
    sizes: tuple[int, ...]
    cursor: PlanCursor
    recorder: Recorder | None
    refused: frozenset[str] = frozenset()
    """Names of blocks that cannot be recomputed exactly."""
    clock: Clock
    begin: Stamp
    end: Stamp
    level_bytes: int
    """All memory in use when it began, but saved tensors."""
    stalls: tuple[tuple[Stamp, Stamp], ...]
    """Begin and end of each wait for a transfer."""
    hook_s: float = 0.0
    """Time of the training thread inside the hooks, without these waits; with what recording took."""
    cpu_s: float = 0.0
    """That workers and page faults took from the computation meanwhile."""
    peak_bytes: int
    """Resident saved activations at the worst moment."""
    written_bytes: int
    read_bytes: int
    moved_bytes: int = 0
    """That went to a drive or to host memory."""
    highest_bytes: int = 0
    """All memory in use at the worst moment; 0 where no limit asks for it, or an earlier pass had as much."""

    def overhead(self) -> Overhead:
        """Return what moving took from the pass, by cause. What recording it took is none of it."""
        stall_s = sum(stall_seconds(self.clock, begin, end) for begin, end in self.stalls)
        hook_s = self.hook_s if self.recorder is None else self.recorder.hook_s(self.end)
        return Overhead(stall_s=stall_s, hook_s=hook_s, cpu_s=self.cpu_s)


@dataclass(frozen=True, slots=True)
class PlanInProgress:
    """A plan that is made in the background, and what it was asked for."""

    task: Task[Plan]
    traced: TracedPass
    goal: PlanObjective
    machine: Machine


@dataclass(slots=True)
class PassKind:
    """Passes of one signature save alike as a rule; where they do not, each sequence of sizes has its plan.

    The thread that learns changes it. Threads that begin passes read it meanwhile: they go through copies.
    """

    others: NonActivationMemory = field(default_factory=NonActivationMemory)
    plans: OrderedDict[Sizes, StoredPlan] = field(default_factory=OrderedDict)
    recompute: frozenset[int] = frozenset()
    inner_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes inside each recomputed block: what a checkpoint computes again goes past the hooks."""
    watch: DriftDetector = field(default_factory=DriftDetector)
    model: OverheadModel = field(default_factory=OverheadModel)
    followed: dict[Sizes, StoredPlan] = field(default_factory=dict)
    """The plan of the last pass of these sizes that had one."""
    wants_trace: bool = True
    """Whether the next pass is to be traced."""
    planning: PlanInProgress | None = None
    """One at a time."""
    unplanned: deque[Sizes] = field(default_factory=lambda: deque(maxlen=_MAX_PLANS))
    """Sizes of passes that stay under the budget although no plan is known to."""
    num_unplanned: int = 0
    """Passes in a row for which there was no plan."""
    _num_rested: int = 0
    _num_to_rest: int = _FIRST_REST
    _num_to_pass_over: int = 0
    """So many traced passes at most are passed over, while one that has no plan is waited for."""

    def ask_for_trace(self, *, of_unplanned: bool = False) -> None:
        """Have one of the next passes traced.

        Args:
            of_unplanned: passes that have a plan are passed over for a while.
        """
        self.wants_trace = True
        if of_unplanned:
            self._num_to_pass_over = _MAX_PASSED_OVER

    def is_planned(self, sizes: Sizes, limit_bytes: int | None) -> bool:
        """Return whether passes of these sizes have a plan, will have one, or cannot have any, within this limit."""
        known = self.plans.get(sizes)
        is_coming = self.planning is not None and self.planning.traced.sizes == sizes
        fits = known is not None and (limit_bytes is None or known.plan.prediction.peak_bytes <= limit_bytes)
        return is_coming or fits or sizes in self.unplanned

    def passes_over(self) -> bool:
        """Whether the trace of a pass that has a plan is not taken, because another pass is waited for."""
        if not self._num_to_pass_over:
            return False
        self._num_to_pass_over -= 1
        self.wants_trace = self._num_to_pass_over > 0
        return True

    def traced(self) -> None:
        """Take note that a trace has been taken."""
        self.wants_trace = False
        self._num_to_pass_over = 0

    @property
    def varies(self) -> bool:
        """Whether nearly every pass saves other sizes, so that what it moves without a plan is no exception."""
        return self.num_unplanned >= _MAX_UNPLANNED

    @property
    def rests(self) -> bool:
        """Whether all its plans move nothing."""
        return bool(self.plans) and not any(known.moves for known in list(self.plans.values()))

    def ends_rest(self) -> bool:
        """Count a pass that begins where nothing moves. Return whether to plan again.

        The next rest is twice as long.
        """
        self._num_rested += 1
        if self._num_rested < self._num_to_rest:
            return False
        self._num_rested, self._num_to_rest = 0, min(2 * self._num_to_rest, _MAX_REST)
        return True

    @property
    def is_new(self) -> bool:
        """Whether only the first pass has been traced."""
        return self.others.num_traces < _NUM_FIRST_TRACES

    def begin_to_recompute(self, blocks: frozenset[int], inner_bytes: dict[int, int]) -> None:
        """Recompute these blocks from now on: another pass altogether, to be traced as it really is."""
        self.recompute, self.inner_bytes = blocks, inner_bytes
        self.ask_for_trace()
        self.plans.clear()

    def put_in_force(self, plan: StoredPlan) -> None:
        """Have passes of its sizes follow a plan."""
        self.plans[plan.sizes] = plan
        self.plans.move_to_end(plan.sizes)
        while len(self.plans) > _MAX_PLANS:
            sizes, _ = self.plans.popitem(last=False)
            self.followed.pop(sizes, None)
