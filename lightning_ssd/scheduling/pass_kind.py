"""What is known of all passes of one signature, and where they stand on the way to a plan.

Three things change by themselves, each with states of its own: which pass is traced next (``tracing.py``), whether a
plan is in the making (``PlanInProgress``, from a trace), and for each sequence of sizes what its search for the cost of
moving is doing (``move_search.py``). A plan that has been made is in force at once; the next passes follow it unless
their search keeps everything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_ssd.common.uninterrupted import Task
from lightning_ssd.planning.plan import Machine, Plan, PlanObjective
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.budget_search import BudgetSearch
from lightning_ssd.scheduling.drift import DriftDetector
from lightning_ssd.scheduling.memory_limits import NonActivationMemory
from lightning_ssd.scheduling.move_search import MoveSearch
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.search_phase import State
from lightning_ssd.scheduling.step_model import StepModel
from lightning_ssd.scheduling.tracing import TRANSITIONS, Tracing, TracingEvent

__all__ = ["PassKind", "PlanChoice", "PlanInProgress", "TracedPass"]

_MAX_PLANS = 8
_MAX_PASSED_OVER = 8
_RECENT = 16
"""Sizes that have not come for so many passes are not waited for."""

Sizes = tuple[int, ...]
"""Bytes of the storages that a pass saves, in pack order."""

_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A pass to plan for."""

    sizes: Sizes
    trace: Trace
    peak_bytes: int
    """Resident saved activations at the worst moment, as measured."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The planner's choice, and others within the same budget that may turn out faster."""

    plan: Plan
    others: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanInProgress:
    """A plan that a thread of its own makes, and what it was asked for."""

    task: Task[PlanChoice]
    traced: TracedPass
    goal: PlanObjective
    machine: Machine


@dataclass(slots=True)
class PassKind:
    """Passes of one signature save alike as a rule; where they do not, each sequence of sizes has its plan.

    Whoever learns changes it. Threads that begin passes read it meanwhile: they go through copies.
    """

    others: NonActivationMemory = field(default_factory=NonActivationMemory)
    plans: OrderedDict[Sizes, StoredPlan] = field(default_factory=OrderedDict)
    recompute: frozenset[int] = frozenset()
    inner_bytes: dict[int, int] = field(default_factory=dict)
    """Of recomputed blocks: what a checkpoint computes again goes past us."""
    watch: DriftDetector = field(default_factory=DriftDetector)
    tracing: Tracing = Tracing.NEXT
    planning: PlanInProgress | None = None
    """One at a time."""
    unplanned: deque[Sizes] = field(default_factory=lambda: deque(maxlen=_MAX_PLANS))
    """Sizes of passes that stay under the budget although no plan is known to."""
    models: OrderedDict[Sizes, StepModel] = field(default_factory=OrderedDict)
    """What passes take and hold, by what they move."""
    budget_searches: OrderedDict[Sizes, BudgetSearch] = field(default_factory=OrderedDict)
    _searches: OrderedDict[Sizes, MoveSearch] = field(default_factory=OrderedDict)
    _last_pass: dict[Sizes, int] = field(default_factory=dict)
    """When a search was last asked for, in passes of this kind."""
    _num_passes: int = 0
    _num_to_pass_over: int = 0
    """So many traced passes at most are passed over, while others are waited for."""

    # -- searches ------------------------------------------------------------------------------------------------

    def search(self, sizes: Sizes, begin: Callable[[], MoveSearch]) -> MoveSearch:
        """How much passes of these sizes may move; ``begin`` makes the search where there is none yet."""
        key = () if self.recompute else sizes  # with blocks recomputed, and without, one pass has different sizes
        if key not in self._searches:
            self._searches[key] = begin()
            while len(self._searches) > _MAX_PLANS:
                del self._last_pass[self._searches.popitem(last=False)[0]]
        self._searches.move_to_end(key)
        self._num_passes += 1
        self._last_pass[key] = self._num_passes
        return self._searches[key]

    def keeps(self, sizes: Sizes) -> bool:
        """Whether passes of these sizes keep everything for now, although there is a plan.

        So they do for others that begin alike: until they part, nobody knows which one it is.
        """
        searches = self._searches.copy()
        if self.recompute:
            return () not in searches or searches[()].keeps
        since = self._num_passes - _RECENT
        alike = [
            key for key in searches if key == sizes or (self._last_pass.get(key, 0) > since and key[:1] == sizes[:1])
        ]
        return sizes not in alike or any(searches[key].keeps for key in alike)

    @property
    def is_resting(self) -> bool:
        """Whether the next pass is none that others are compared with, whatever its sizes."""
        searches = list(self._searches.values())
        return bool(searches) and all(one.is_at_rest for one in searches)

    @property
    def ends_rest(self) -> bool:
        """Whether the next pass belongs to such a rest no more, and the next plan is compared with it."""
        return any(one.state is State.RESTING and not one.is_at_rest for one in list(self._searches.values()))

    def model(self, sizes: Sizes) -> StepModel:
        """Of passes of these sizes."""
        return _latest_of(self.models, sizes, StepModel)

    @property
    def only_model(self) -> StepModel | None:
        """The model of all passes, if there is but one."""
        return next(iter(self.models.values())) if len(self.models) == 1 else None

    def budget_search(self, sizes: Sizes) -> BudgetSearch:
        """Which plan within the budget is the fastest for passes of these sizes."""
        return _latest_of(self.budget_searches, sizes, lambda: BudgetSearch(self.model(sizes)))

    @property
    def only_search(self) -> MoveSearch | None:
        """The search for all passes, if there is but one."""
        searches = list(self._searches.values())
        return searches[0] if len(searches) == 1 else None

    @property
    def is_of_many(self) -> bool:
        """Whether several sequences of sizes are searched for: without hooks nobody knows which one a pass is of."""
        return len(self._searches) > 1

    def begin_to_recompute(self, blocks: frozenset[int], inner_bytes: dict[int, int], sizes: Sizes) -> None:
        """These blocks are recomputed from now on: another pass altogether, to be traced as it really is."""
        if not self.recompute and sizes in self._searches:
            self._searches, self._last_pass = OrderedDict({(): self._searches[sizes]}), {(): self._num_passes}
        self.recompute, self.inner_bytes = blocks, inner_bytes
        self.ask_for_trace()
        self.plans.clear()
        self.models.clear()
        self.budget_searches.clear()

    # -- traces and plans ----------------------------------------------------------------------------------------

    @property
    def has_trace(self) -> bool:
        """Whether a plan can be made from the trace of another one now. What is recomputed is traced anew."""
        return self.planning is None and not self.recompute

    @property
    def wants_trace(self) -> bool:
        """Whether the next pass is to be traced."""
        if self.tracing is Tracing.SEARCHED:
            return self._is_searched_for
        return self.tracing is not Tracing.NONE

    @property
    def _is_searched_for(self) -> bool:
        return any(search.wants_trace for search in list(self._searches.values()))

    def ask_for_trace(self) -> None:
        """Have one of the next passes traced: any will do."""
        self._happened(TracingEvent.ASKED)

    def wait_for_trace(self) -> None:
        """Pass over some passes that have a plan: one that lacks one, or whose search wants another, is waited for."""
        self._num_to_pass_over = _MAX_PASSED_OVER
        self._happened(TracingEvent.WANTED)

    def passes_over(self) -> bool:
        """Whether this trace, which nobody has asked for, is not taken, because others are waited for."""
        if not self._num_to_pass_over:
            return False
        self._num_to_pass_over -= 1
        if not self._num_to_pass_over:
            self._happened(TracingEvent.GIVEN_UP)
        return True

    def traced(self) -> None:
        """A trace has been taken."""
        self._num_to_pass_over = 0
        self._happened(TracingEvent.TRACED)
        if self._is_searched_for:
            self.wait_for_trace()

    def _happened(self, event: TracingEvent) -> None:
        self.tracing = TRANSITIONS[self.tracing, event]

    def put_in_force(self, plan: StoredPlan) -> None:
        """The latest plan of its sizes."""
        self.plans[plan.sizes] = plan
        self.plans.move_to_end(plan.sizes)
        while len(self.plans) > _MAX_PLANS:
            self.plans.popitem(last=False)

    def exchange(self, plan: StoredPlan) -> None:
        """Follow another plan of the same sizes. Passes of other sizes that begin alike notice nothing."""
        if plan.sizes in self.plans:
            self.plans[plan.sizes] = plan


def _latest_of(known: OrderedDict[Sizes, _Known], sizes: Sizes, make: Callable[[], _Known]) -> _Known:
    """What is known of these sizes; the least recently asked for goes."""
    if sizes not in known:
        known[sizes] = make()
    known.move_to_end(sizes)
    while len(known) > _MAX_PLANS:
        known.popitem(last=False)
    return known[sizes]
