"""Values that a planner is given and that it returns. Plain numbers; see ``planner.py`` for the decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ssd.planning.placement import Placement

__all__ = ["Machine", "Plan", "PlanObjective", "Prediction", "TierRates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierRates:
    """How fast one tier is, and how much of it there is."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    capacity_bytes: int | None = None
    """``None``: more than a pass can use."""
    unusable: str | None = field(default=None, compare=False)
    """Where the rates are 0 because the tier failed: how, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The tiers below device memory; ``None``: there is no such tier."""

    ssd: TierRates | None = None
    host: TierRates | None = None
    cost_s_per_byte: float = 0.0
    """Time that each moved byte takes from the training thread besides stalls: memory that is mapped anew, cores that
    workers take, Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanObjective:
    """Goals and limits of a plan."""

    max_slowdown: float = 1.05
    """Without a budget: the lowest peak of resident saved activations at no more than this, relative to keeping all."""
    min_relief: float = 0.0
    """Without a budget: share of the peak that moving must take away; for less, everything is kept."""
    budget_bytes: int | None = None
    """Resident saved activations never exceed this; the plan is the fastest that manages."""
    written_bytes: int | None = None
    """Bytes that one pass may write to the SSD tier (from the wear budget)."""
    recompute: bool = False
    """Whether blocks may be recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The simulator's answer for one pass."""

    step_s: float
    """Forward and backward of one pass, stalls and what moving costs besides included."""
    stall_s: float
    peak_bytes: int
    """Resident saved activations at the worst moment."""
    written_bytes: int
    read_bytes: int
    host_bytes: int = 0
    """Bytes that went to host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each storage of a pass goes, in pack order, and how far ahead reads may run."""

    placements: tuple[Placement, ...]
    """One for each storage of the trace that the plan was made from; those of recomputed blocks are RECOMPUTE."""
    recompute: frozenset[int] = frozenset()
    """Blocks to recompute."""
    limit_bytes: int
    """Resident saved activations to stay under. Hard where the goal has a budget: pack waits. Else a target."""
    ahead_bytes: int
    """Bytes that may be brought up before they are asked for."""
    prediction: Prediction
    keep_step_s: float
    """Length of this pass with everything kept."""
    refused_bytes: int = 0
    """Where the goal's ``written_bytes`` leave nothing that may be written: what one pass would write without them.
    0: they are not in the way."""
    inputs: tuple[tuple[int, Placement], ...] = ()
    """(block, where its input goes) for blocks to recompute that the trace did not recompute yet: their inputs are not
    among its storages."""

    @property
    def moves(self) -> bool:
        """Whether it keeps less than everything."""
        return bool(self.recompute) or any(placement is not Placement.KEEP for placement in self.placements)
