"""From a trace, the tiers' rates and a goal to a plan: what moves where, what is recomputed, what stays.

The family of candidates is fixed (``candidates.py``). Each is judged by a bound that a faster drive, more host memory
or a larger budget never makes worse (``bound.py``), so that the best bound of the family is never worse either. What
looks best is then played by the simulator, storage by storage, and taken if the simulator agrees; else the next one is.
After that, moves that gain nothing are dropped and the window is made as small as it can be, as far as the simulator
finds neither step nor peak worse. A plan's prediction is always the simulator's, of just this plan.

Two plans whose step times (with a budget) or peaks (without) differ by less than 0.2 % count as equal; the one that
moves less is taken, and then the one that takes less host memory. So far, then, may the judged number of a choice rise
where it should not. The prediction is not monotone to the last bit: a faster drive may have taken away what a slower
one still had to hand over.

Source of the idea: TERAIO (arXiv 2506.06472), whose bandwidth bookings are the channels of bound and simulator;
SSDTrain (arXiv 2408.10013) for the tail that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_ssd.planning.bound import Bound, bound
from lightning_ssd.planning.candidates import Candidate, RecomputeVariant, family, usable, variants, windows
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, Plan, PlanObjective, Prediction
from lightning_ssd.planning.recompute_trace import inner_storages, input_of
from lightning_ssd.planning.simulator import predict
from lightning_ssd.planning.trace import Trace

__all__ = [
    "BudgetTooSmall",
    "ScoredCandidate",
    "judge",
    "make_plan",
    "smallest_budget",
]

TOLERANCE = 1.002
"""Plans closer than this are equal."""
_ROUNDING = 1 + 1e-9
_MAX_PLAYED = 24
_MAX_SMALLEST = 4
_MAX_LIMITS = 4
_MAX_TRIALS = 32
_WORK = 60_000
"""Storages played while moves are dropped: bounds the time for large traces."""


class BudgetTooSmall(ValueError):
    """No plan stays under the budget. The runtime makes a public error of it.

    Attributes:
        smallest_bytes: the least budget for which a plan is known.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(budget_bytes, smallest_bytes)
        self.smallest_bytes = smallest_bytes

    def __str__(self) -> str:
        budget_bytes, smallest_bytes = self.args
        return f"no plan stays under {budget_bytes} bytes of saved activations; the smallest budget is {smallest_bytes}"


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate with one window, and its bound."""

    candidate: Candidate
    window: int
    bound: Bound


@dataclass(frozen=True, slots=True)
class _Choice:
    """A candidate in full detail, played."""

    variant: RecomputeVariant
    placements: tuple[Placement, ...]
    window: int
    limit: int | None
    prediction: Prediction

    @staticmethod
    def of(
        variant: RecomputeVariant, placements: tuple[Placement, ...], machine: Machine, limit: int | None, window: int
    ) -> _Choice:
        prediction = predict(variant.lives, placements, machine, limit_bytes=limit, ahead_bytes=window)
        return _Choice(variant, placements, window, limit, prediction)


def make_plan(trace: Trace, machine: Machine, goal: PlanObjective) -> Plan:
    """Plan a pass.

    Without a budget: the lowest peak at no more than ``max_slowdown`` times the predicted length with everything kept.
    Everything is kept where that would relieve less than ``min_relief`` of the peak. With a budget: the fastest plan
    that stays under it. Blocks that the trace already recomputes stay recomputed, because what they would save
    otherwise is not in it.

    Takes well under 5 s for 4,000 storages; deterministic.

    Args:
        trace: of a pass like those to come.
        machine: the tiers; those with a rate of 0 (unknown) are not used.
        goal: see :class:`~lightning_ssd.planning.plan.PlanObjective`.

    Raises:
        BudgetTooSmall: no plan stays under the budget.
        ValueError: the trace contradicts itself.
    """
    plan = _make(trace, usable(machine), goal)
    if goal.written_bytes is None or plan.prediction.written_bytes:
        return plan
    try:
        free = _make(trace, usable(machine), replace(goal, written_bytes=None))
    except BudgetTooSmall:  # which budget is the smallest is searched among a few: more choice may hide the best one
        return plan
    return replace(plan, refused_bytes=free.prediction.written_bytes)


def _make(trace: Trace, machine: Machine, goal: PlanObjective) -> Plan:
    budget = goal.budget_bytes
    all_kept = RecomputeVariant(trace, frozenset())
    keep = _Choice.of(all_kept, (Placement.KEEP,) * len(trace.storages), machine, None, 0)
    if budget is not None and keep.prediction.peak_bytes <= budget:
        return _plan(trace, goal, keep, keep.prediction.step_s)
    candidates = [c for v in variants(trace, goal) for c in family(v, machine, goal)]
    if budget is None:
        choice = _lowest(candidates, machine, goal, keep)
        max_peak = choice.prediction.peak_bytes
    else:
        choice, max_peak = _fastest(candidates, machine, goal, budget), budget
    choice = _without_idle_moves(choice, machine, max_peak)
    max_step_s = goal.max_slowdown * keep.prediction.step_s * _ROUNDING if budget is None else math.inf
    return _plan(trace, goal, _with_small_window(choice, machine, max_peak, max_step_s), keep.prediction.step_s)


def smallest_budget(trace: Trace, machine: Machine, goal: PlanObjective) -> int:
    """The least ``budget_bytes`` for which :func:`make_plan` finds a plan (bytes); the goal's own budget is ignored."""
    machine = usable(machine)
    candidates = [c for v in variants(trace, goal) for c in family(v, machine, goal)]
    return _smallest(candidates, machine)[0]


def judge(
    candidates: Iterable[Candidate], machine: Machine, goal: PlanObjective, *, max_step_s: float
) -> Iterator[ScoredCandidate]:
    """Yield those candidates that reach the goal by their bounds, each with its best window.

    With a budget that is the widest one (least stall) whose floor is under the budget; without, the narrowest one
    (lowest peak) that is not too slow and holds two storages. Both are found by bisection: the bound is monotone.
    """
    best_s = math.inf
    for candidate in candidates:
        if candidate.variant.trace.end_s > best_s * TOLERANCE:
            continue  # its recomputation alone takes longer than another plan
        if goal.budget_bytes is not None:
            found = _widest(candidate, machine, goal.budget_bytes)
            best_s = min(best_s, math.inf if found is None else found.bound.step_s)
        else:
            found = _narrowest(candidate, machine, max_step_s)
        if found is not None:
            yield found


def _widest(candidate: Candidate, machine: Machine, budget: int) -> ScoredCandidate | None:
    low, high, found = 0, len(candidate.windows), None
    probe = 0  # the narrowest first: most that fail, fail here
    while low < high:
        judged = _judged(candidate, machine, budget, candidate.windows[probe])
        if judged.bound.min_peak_bytes <= budget:
            low, found = probe + 1, judged
        else:
            high = probe
        probe = (low + high) // 2
    return found


def _narrowest(candidate: Candidate, machine: Machine, max_step_s: float) -> ScoredCandidate | None:
    low, high, found = 1, len(candidate.windows), None
    probe = high - 1  # the widest first: most that fail, fail here
    while low < high:
        judged = _judged(candidate, machine, None, candidate.windows[probe])
        if judged.bound.step_s <= max_step_s:
            high, found = probe, judged
        else:
            low = probe + 1
        probe = (low + high) // 2
    return found


def _judged(candidate: Candidate, machine: Machine, limit: int | None, window: int) -> ScoredCandidate:
    lives = candidate.variant.unit_lives
    return ScoredCandidate(
        candidate, window, bound(lives, candidate.placements, machine, limit_bytes=limit, ahead_bytes=window)
    )


# -- the choice --------------------------------------------------------------------------------------------------------


def _lowest(candidates: Sequence[Candidate], machine: Machine, goal: PlanObjective, keep: _Choice) -> _Choice:
    """The lowest peak that is not too slow."""
    max_step_s = goal.max_slowdown * keep.prediction.step_s * _ROUNDING
    found = judge(candidates, machine, goal, max_step_s=max_step_s)
    judged = sorted(found, key=lambda j: (j.bound.peak_bytes, j.bound.step_s))
    best_bytes = judged[0].bound.peak_bytes if judged else 0
    equal = [j for j in judged if j.bound.peak_bytes <= best_bytes * TOLERANCE]
    equal.sort(key=lambda j: (j.candidate.moved_bytes, j.candidate.host_bytes, j.bound.peak_bytes))
    for candidate in (equal + judged[len(equal) :])[:_MAX_PLAYED]:
        choice = _played(candidate, machine, None)
        if choice.prediction.step_s <= max_step_s:
            pays = choice.prediction.peak_bytes <= (1 - goal.min_relief) * keep.prediction.peak_bytes
            return choice if pays else keep
    return keep


def _fastest(candidates: Sequence[Candidate], machine: Machine, goal: PlanObjective, budget: int) -> _Choice:
    """The fastest plan under the budget."""
    smallest, last_resort = _smallest(candidates, machine)
    if budget < smallest:
        raise BudgetTooSmall(budget, smallest)
    judged = sorted(
        judge(candidates, machine, goal, max_step_s=math.inf), key=lambda j: (j.bound.step_s, j.candidate.moved_bytes)
    )
    best_s = judged[0].bound.step_s if judged else 0.0
    equal = [j for j in judged if j.bound.step_s <= best_s * TOLERANCE]
    equal.sort(key=lambda j: (j.candidate.moved_bytes, j.candidate.host_bytes, j.bound.step_s))
    wide = _Choice.of(last_resort.variant, last_resort.placements, machine, budget, last_resort.window)
    best = wide if wide.prediction.peak_bytes <= budget else last_resort
    for candidate in (equal + judged[len(equal) :])[:_MAX_PLAYED]:
        choice = _played(candidate, machine, budget)
        if choice.prediction.peak_bytes <= budget:
            if choice.prediction.step_s <= candidate.bound.step_s * TOLERANCE:
                return choice
            best = min(best, choice, key=lambda c: c.prediction.step_s)
    return best


def _smallest(candidates: Sequence[Candidate], machine: Machine) -> tuple[int, _Choice]:
    """The least limit that some candidate is known to keep, and that candidate."""
    # The floor does not depend on the tier: one of the candidates that move the same storages speaks for all.
    first: dict[tuple[RecomputeVariant, tuple[bool, ...]], Candidate] = {}
    for candidate in candidates:
        first.setdefault((candidate.variant, tuple(p is Placement.KEEP for p in candidate.placements)), candidate)
    floors = sorted(
        (_judged(c, machine, 0, c.windows[0]) for c in first.values()),  # limit 0: nothing is brought up ahead
        key=lambda j: (j.bound.min_peak_bytes, j.bound.step_s),
    )
    found = [_under_least_limit(judged, machine) for judged in floors[:_MAX_SMALLEST]]
    choice = min(found, key=lambda c: (c.limit or 0, c.prediction.step_s))
    return choice.limit or 0, choice


def _under_least_limit(judged: ScoredCandidate, machine: Machine) -> _Choice:
    """Raise the limit until the simulator keeps it: what has not ended its write yet may be in the way of a read."""
    variant, placements = judged.candidate.variant, judged.candidate.variant.expand(judged.candidate.placements)
    window = windows(_moved_sizes(variant, placements))[1 if variant.lives.is_simple else 0]
    limit = bound(variant.lives, placements, machine, limit_bytes=0, ahead_bytes=window).min_peak_bytes
    for _ in range(_MAX_LIMITS):
        choice = _Choice.of(variant, placements, machine, limit, window)
        if choice.prediction.peak_bytes <= limit:
            return choice
        limit = choice.prediction.peak_bytes
    # What no limit delays is there without one: its peak is a limit that changes nothing.
    free = _Choice.of(variant, placements, machine, None, window)
    return _Choice.of(variant, placements, machine, free.prediction.peak_bytes, window)


def _played(judged: ScoredCandidate, machine: Machine, limit: int | None) -> _Choice:
    variant = judged.candidate.variant
    placements = variant.expand(judged.candidate.placements)
    return _Choice.of(variant, placements, machine, limit, judged.window)


def _moved_sizes(variant: RecomputeVariant, placements: Sequence[Placement]) -> list[int]:
    sizes = variant.lives.sizes
    return [sizes[i] for i, placement in enumerate(placements) if placement is not Placement.KEEP]


# -- the details -------------------------------------------------------------------------------------------------------


def _without_idle_moves(choice: _Choice, machine: Machine, max_peak: int) -> _Choice:
    """Keep what can be kept at no loss: whole runs of the pack order first, then halves of those that had to move."""
    moved = [i for i, p in enumerate(choice.placements) if p is not Placement.KEEP]
    runs = [moved[i : i + max(len(moved) // 8, 1)] for i in range(0, len(moved), max(len(moved) // 8, 1))]
    for _ in range(min(_MAX_TRIALS, _WORK // max(len(choice.placements), 1))):
        if not runs:
            break
        run = runs.pop()
        placements = list(choice.placements)
        for index in run:
            placements[index] = Placement.KEEP
        trial = _Choice.of(choice.variant, tuple(placements), machine, choice.limit, choice.window)
        if trial.prediction.peak_bytes <= max_peak and trial.prediction.step_s <= choice.prediction.step_s:
            choice = trial
        elif len(run) > 1:
            runs[:0] = [run[: len(run) // 2], run[len(run) // 2 :]]
    return choice


def _with_small_window(choice: _Choice, machine: Machine, max_peak: int, max_step_s: float) -> _Choice:
    """The smallest window that costs no more than 0.2 % of the step time that the best one reaches under this peak.

    It holds two of the largest storages that move, unless there is no room for them under a budget.
    """
    steps = windows(_moved_sizes(choice.variant, choice.placements))
    trials = [
        _Choice.of(choice.variant, choice.placements, machine, choice.limit, window)
        for window in sorted({*steps[1:], *((3 * w) // 2 for w in steps[1:-1]), choice.window})
    ]
    fitting = [t for t in trials if t.prediction.peak_bytes <= max_peak]
    best_s = min(t.prediction.step_s for t in fitting)
    fast = [t for t in fitting if t.prediction.step_s <= max(min(best_s * TOLERANCE, max_step_s), best_s)]
    return min(fast, key=lambda t: (t.window < steps[1], t.window))


def _plan(trace: Trace, goal: PlanObjective, choice: _Choice, keep_step_s: float) -> Plan:
    placements = [Placement.RECOMPUTE] * len(trace.storages)
    inner = inner_storages(trace, choice.variant.blocks)
    inputs = []
    for index, placement in zip(choice.variant.old, choice.placements, strict=True):
        if index < 0:
            inputs.append((input_of(index), placement))
        elif index not in inner:
            placements[index] = placement
    limit = choice.limit
    if limit is None and goal.budget_bytes is not None:
        limit = goal.budget_bytes
    if limit is None:
        limit = choice.prediction.peak_bytes + max(choice.variant.lives.sizes, default=0)
    return Plan(
        placements=tuple(placements),
        recompute=trace.recomputed | choice.variant.blocks,
        limit_bytes=limit,
        ahead_bytes=choice.window,
        prediction=choice.prediction,
        keep_step_s=keep_step_s,
        inputs=tuple(sorted(inputs)),
    )
