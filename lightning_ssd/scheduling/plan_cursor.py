"""Guidance for one pass, storage by storage: a plan that was made for a pass like it, or a rule while there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Plan, PlanObjective, TierRates
from lightning_ssd.planning.trace import Trace

__all__ = ["KEEPS_ALL", "NOTHING_KNOWN", "PassProgram", "PlanCursor", "StoredPlan"]

_FULL = 1.25
"""Where the room was too small, so many times the room may be resident, because the rest is on its way out."""


class PassProgram(NamedTuple):
    """The expected course of a pass."""

    sizes: tuple[int, ...]
    """Bytes of its storages, in pack order."""
    stays: bytes
    """For each of them 1 if it stays, else 0."""
    drives: bytes = b""
    """For each of them 1 if it goes to a drive, else 0: to the first tier that has room. Empty: none does."""
    keeps_all: bool = False
    """Nothing can move, so that sizes need not be known."""


NOTHING_KNOWN = PassProgram((), b"")
KEEPS_ALL = PassProgram((), b"", keeps_all=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """A plan with what it was made from."""

    sizes: tuple[int, ...]
    """Bytes of the storages in pack order: by these a pass is recognised."""
    trace: Trace
    goal: PlanObjective
    rates: TierRates
    """Rates of the SSD tier."""
    plan: Plan
    host_bytes: int = 0
    """Host memory that it was made for."""
    program: PassProgram = field(init=False, repr=False, compare=False)
    """Course of a pass that follows it. Worked out once, as the next: every pass asks."""
    moves: bool = field(init=False, repr=False, compare=False)
    """Whether it keeps less than everything."""

    def __post_init__(self) -> None:
        places = self.plan.placements
        program = PassProgram(
            self.sizes,
            stays=bytes([place is Placement.KEEP for place in places]),
            drives=bytes([place is Placement.SSD for place in places]),
        )
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "moves", self.plan.moves)

    @property
    def predicted_overhead(self) -> float:
        """Stalls, hooks and CPU, relative to the same pass with everything kept."""
        return max(self.plan.prediction.step_s / max(self.plan.keep_step_s, 1e-9) - 1, 0.0)


class PlanCursor:
    """Walks along the known plans of one kind of pass while they fit. What fits no plan moves.

    Args:
        plans: of passes of the same signature, the latest first.
        recompute: blocks that this pass recomputes.
        room_bytes: memory that saved activations may take without a plan; 0: unknown, or there is a limit. A pass that
            saves more waits for the tiers from then on, so that little more than this is resident.
        limit_bytes: hard limit of resident saved activations; ``None``: there is none.
        reserve_bytes: of these, what looking ahead leaves for a block that is recomputed.
        limits_total_memory: the limit is one of all memory: freed memory has to return even where nothing moves.
        returns_memory: and at once.
        keeps_unplanned: a pass without a plan keeps what there is room for, because writes are rationed, or because no
            plan comes for such passes.
    """

    def __init__(
        self,
        plans: Sequence[StoredPlan] = (),
        *,
        recompute: frozenset[int] = frozenset(),
        room_bytes: int = 0,
        limit_bytes: int | None = None,
        reserve_bytes: int = 0,
        limits_total_memory: bool = False,
        returns_memory: bool = False,
        keeps_unplanned: bool = False,
    ) -> None:
        self.recompute = recompute
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self.ran_out = False
        """Whether a pass without a plan has saved more than there is room for."""
        self._candidates = list(plans)
        self.returns_memory = returns_memory
        self.limits_total_memory = limits_total_memory
        self._room_bytes = room_bytes
        self._unplanned_bytes = 0
        self._keeps_unplanned = keeps_unplanned
        self._num_placed = 0

    def place(self, nbytes: int) -> Placement:
        """Return where the next storage goes. Host memory stands for the first tier that has room."""
        index = self._num_placed
        self._num_placed += 1
        if self._candidates:
            self._candidates = [
                known for known in self._candidates if index < len(known.sizes) and known.sizes[index] == nbytes
            ]
            if self._candidates:
                return self._candidates[0].plan.placements[index]
        self._unplanned_bytes += nbytes
        if self._keeps_unplanned and self._unplanned_bytes <= self._room_bytes:
            return Placement.KEEP
        if self.limit_bytes is None and self._room_bytes and self._unplanned_bytes > self._room_bytes:
            self.ran_out = True
            self.limit_bytes = int(_FULL * self._room_bytes)
        return Placement.HOST

    def skip(self, sizes: Sequence[int]) -> None:
        """Go on behind these storages: those that were not placed yet stay, as in :attr:`program`."""
        begin, self._num_placed = self._num_placed, len(sizes)
        if begin == len(sizes):
            return
        new = tuple(sizes[begin:])
        self._candidates = [known for known in self._candidates if known.sizes[begin : len(sizes)] == new]

    @property
    def program(self) -> PassProgram:
        """The expected course of a pass that follows the latest plan from its first storage on."""
        return self._candidates[0].program if self._candidates else NOTHING_KNOWN

    @property
    def may_move(self) -> bool:
        """Whether memory is to return while the pass runs; known before its first storage."""
        if self._candidates and not self.limits_total_memory:
            return any(known.moves for known in self._candidates)
        return True

    @property
    def target_bytes(self) -> int:
        """Resident saved activations that the plan reaches at the worst moment; 0: unknown."""
        known = self.followed
        if known is None:
            return self.limit_bytes or 0
        return known.plan.limit_bytes if self.limit_bytes is None else known.plan.prediction.peak_bytes

    def keeps(self, nbytes: int) -> bool:
        """Return whether a pass that is known to save so many bytes keeps all of them. It may save twice as much."""
        is_planned = bool(self._candidates) and not any(known.moves for known in self._candidates)
        return (
            (is_planned or nbytes == 0)
            and not self.recompute
            and self.limit_bytes is None
            and 2 * nbytes <= self._room_bytes
        )

    @property
    def followed(self) -> StoredPlan | None:
        """The plan that fits all storages so far."""
        return self._candidates[0] if self._candidates else None

    def completed(self) -> StoredPlan | None:
        """Return the plan that fits the whole pass.

        Where another one begins like it, the first placements may have been of that one.
        """
        return next((known for known in self._candidates if len(known.sizes) == self._num_placed), None)
