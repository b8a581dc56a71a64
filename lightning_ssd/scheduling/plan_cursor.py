"""What one pass follows, storage by storage: a plan that was made for a pass like it, or a rule while there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Plan, PlanObjective, TierRates
from lightning_ssd.planning.trace import Trace

__all__ = ["PlanCursor", "StoredPlan"]

_FULL = 1.25
"""Where the room was too small, so many times the room may be resident: the rest is on its way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """A plan with what it was made from."""

    sizes: tuple[int, ...]
    """Bytes of the storages in pack order: by these a pass is recognised."""
    trace: Trace
    goal: PlanObjective
    rates: TierRates
    """Of the SSD tier."""
    plan: Plan

    @property
    def moved_bytes(self) -> int:
        """What a pass that follows it moves."""
        return self.plan.moved_bytes(self.sizes)


class PlanCursor:
    """Walks along the known plans of one kind of pass while they fit.

    Args:
        plans: of passes of the same signature, the latest first.
        recompute: blocks that this pass recomputes.
        room_bytes: how much may be kept without a plan; what exceeds it is moved. From then on a little more may be
            resident, and no more, so that the drive is waited for. 0 moves everything.
        limit_bytes: hard limit of resident saved activations; ``None``: there is none.
        reserve_bytes: of these, what looking ahead leaves for a block that is recomputed.
        limits_total_memory: the limit is one of all memory: freed memory has to return even where nothing moves.
        returns_memory: and at once.
        is_resting: moving was given up for many passes, of which this is one.
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
        is_resting: bool = False,
    ) -> None:
        self.recompute = recompute
        self.is_resting = is_resting
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self.keeps_all = limit_bytes is None and not recompute and (bool(plans) or room_bytes > 0)
        """Whether nothing has moved so far, and there was no limit: what such a pass takes is what keeping takes."""
        self.ran_out = False
        """Whether something was moved for lack of room, without a plan."""
        self._candidates = list(plans)
        self.returns_memory = returns_memory
        self.limits_total_memory = limits_total_memory
        self._room_bytes = room_bytes
        self._full_bytes = int(_FULL * room_bytes) or None
        self._num_placed = 0

    def place(self, nbytes: int) -> Placement:
        """Where the next storage goes."""
        index = self._num_placed
        self._num_placed += 1
        if self._candidates:
            self._candidates = [
                known for known in self._candidates if index < len(known.sizes) and known.sizes[index] == nbytes
            ]
            if self._candidates:
                placement = self._candidates[0].plan.placements[index]
                self.keeps_all = self.keeps_all and placement is Placement.KEEP
                return placement
        if nbytes <= self._room_bytes:
            self._room_bytes -= nbytes
            return Placement.KEEP
        self.keeps_all, self.ran_out = False, True
        if self.limit_bytes is None:
            self.limit_bytes = self._full_bytes
        return Placement.SSD

    @property
    def may_move(self) -> bool:
        """Whether memory is to return while the pass runs; known before its first storage."""
        if self._candidates and not self.limits_total_memory:
            return any(known.plan.moves for known in self._candidates)
        return self._room_bytes == 0 or self.limit_bytes is not None

    @property
    def target_bytes(self) -> int:
        """Resident saved activations at the worst moment, as far as anybody knows; 0: nobody does."""
        known = self.followed
        if known is None:
            return self.limit_bytes or 0
        return known.plan.limit_bytes if self.limit_bytes is None else known.plan.prediction.peak_bytes

    def keeps(self, nbytes: int) -> bool:
        """Whether a pass that is said to save so many bytes will keep all of them. It may save twice as much."""
        is_planned = bool(self._candidates)
        stays = not any(known.plan.moves for known in self._candidates) if is_planned else self.keeps_all
        return stays and not self.recompute and self.limit_bytes is None and 2 * nbytes <= self._room_bytes

    def block(self, index: int) -> bool:
        """Whether the block call with this number is recomputed."""
        return index in self.recompute

    @property
    def followed(self) -> StoredPlan | None:
        """The plan that fits all storages so far."""
        return self._candidates[0] if self._candidates else None

    def completed(self) -> StoredPlan | None:
        """The plan that fits the whole pass.

        Where another one begins like it, the first placements may have been of that one.
        """
        return next((known for known in self._candidates if len(known.sizes) == self._num_placed), None)
