"""How much may be resident: what the user allows, what there is, and what needs memory besides saved activations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_ssd.common.formatting import as_setting, format_sizes
from lightning_ssd.errors import BudgetError

__all__ = ["MIN_RELIEF", "Limits", "MemoryConstraints", "NonActivationMemory"]

MIN_RELIEF = 0.1
"""Share of the peak: nothing is moved for less, so that passes run without hooks."""
_KEEP_SHARE = 0.4
"""Share of the available memory that a pass without a plan may take: gradients and states are still to come."""
_USABLE_SHARE = 0.9
"""Share of all memory that plans may count on: allocators waste some, and other processes grow."""
_BAND = (0.95, 1.25)
"""Usable memory counts as the same as before while it stays between these multiples: plans outlive small changes."""
_MARGIN = 0.02
_MIN_MARGIN_BYTES = 16 << 20
"""Added to the smallest memory budget that is named: the larger of the two."""
_SPARE = 0.01
"""Share of a memory budget that was exceeded, left free besides: what else is in memory varies."""
_MOST_UNSEEN = 3
"""Times the largest saved storage: between two looks of a trace lie a few temporaries, such as gradients, that are as
large. More was something else, such as a compiler, and need not come again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConstraints:
    """Limits that the policy asks for, in bytes."""

    max_slowdown: float
    activation_budget: int | None = None
    memory_budget: int | None = None
    wear_bytes_per_day: int | None = None
    recompute: bool = False
    """Whether blocks may be recomputed."""
    have_states_stay: bool = False
    """Whether optimizer states are in memory, too."""
    weights_may_leave: bool = False
    """Whether weights leave for an ``activation_budget`` when the model is registered."""

    @property
    def has_budget(self) -> bool:
        """Whether there is a hard limit."""
        return self.activation_budget is not None or self.memory_budget is not None


@dataclass(slots=True)
class NonActivationMemory:
    """Memory that passes of one kind need besides saved activations, in bytes."""

    peak_bytes: int | None = None
    """At its worst moment, as traced; ``None``: not traced yet."""
    level_bytes: int = 0
    """In use when the latest pass began."""
    traced_level_bytes: int = 0
    """That level when the traced pass began."""
    num_traces: int = 0
    unseen_bytes: int = 0
    """Beyond that peak, by which passes have exceeded the budget of all memory: a trace looks only now and then."""
    most_unseen_bytes: float = math.inf
    """More than this no plan can leave free, as far as is known since the latest trace."""

    def traced(self, peak_bytes: int, level_bytes: int) -> None:
        """A pass that began at this level has been traced."""
        if self.peak_bytes is not None:  # what this trace has seen of it is in its peak
            rise = peak_bytes - level_bytes - (self.peak_bytes - self.traced_level_bytes)
            self.unseen_bytes = max(self.unseen_bytes - max(rise, 0), 0)
        self.peak_bytes, self.traced_level_bytes = peak_bytes, level_bytes
        self.most_unseen_bytes = math.inf
        self.num_traces += 1

    @property
    def seen_bytes(self) -> int | None:
        """At the worst moment, as the trace and what has come since show; ``None``: not traced yet.

        What has come since may be part of the peak already, as gradients are: too strict until the next trace.
        """
        return None if self.peak_bytes is None else self.peak_bytes + self.grown_bytes

    @property
    def grown_bytes(self) -> int:
        """Bytes added since the traced pass: optimizer states come with the first step, after the first pass.

        0 if it is little.
        """
        grown = self.level_bytes - self.traced_level_bytes
        return grown if grown > max(_MIN_MARGIN_BYTES, _MARGIN * self.traced_level_bytes) else 0


class Limits:
    """The limit of resident saved activations, for one process.

    A budget of the policy is one. Where there is none, memory itself becomes one as soon as a pass has found no room
    for all that it saved (it is *scarce* then, until there is): what is there, less what everything else needs.

    Args:
        constraints: of the policy.
        num_sharing: processes of this run that share the device's memory (on a CPU, all of the machine).
    """

    def __init__(self, constraints: MemoryConstraints, *, num_sharing: int = 1) -> None:
        self.agreed = math.inf
        """The smallest limit of all processes that train together."""
        self._constraints = constraints
        self._num_sharing = num_sharing
        self._is_scarce = False
        self._wanted_bytes = 0  # saved by the largest pass that has found no room
        self._usable_bytes = 0

    def look(self, level_bytes: int, available_bytes: int | None) -> int:
        """A pass begins. Returns how much it may take without a plan; 0: as much as the limit allows.

        Args:
            level_bytes: memory in use now.
            available_bytes: memory that could still be had; ``None``: unknown, then nothing is kept without a plan.
        """
        if self._constraints.has_budget or available_bytes is None:
            return 0
        available = available_bytes // self._num_sharing
        usable = int(_USABLE_SHARE * (level_bytes + available))
        if not self._is_scarce or not _BAND[0] <= usable / max(self._usable_bytes, 1) <= _BAND[1]:
            self._usable_bytes = usable
        room = int(_KEEP_SHARE * available)
        if self._is_scarce and room >= _BAND[1] * self._wanted_bytes:
            self._is_scarce = False  # the other user of it has gone
        return room

    def ran_out(self, saved_bytes: int) -> bool:
        """A pass without a plan, which saved so much, has found no room for all of it.

        Returns:
            Whether this makes memory scarce anew. It is until there is clearly room for such a pass again.
        """
        if self._constraints.has_budget or not self._usable_bytes:
            return False
        self._wanted_bytes = max(self._wanted_bytes, saved_bytes)
        if self._is_scarce:
            return False
        self._is_scarce = True
        return True

    def of(self, others: NonActivationMemory) -> int | None:
        """Resident saved activations that passes with such needs may reach; ``None``: there is no limit."""
        return _least(self.agreed, self._constraints.activation_budget, self._memory_limit(others))

    def own(self, others: NonActivationMemory) -> int | None:
        """Return the limit as far as it will last, to agree on with others.

        Without what is a guess until the next trace, and without what nothing is refused for.
        """
        if others.peak_bytes is None or self.has_moved(others):
            return self._constraints.activation_budget
        return _least(self._constraints.activation_budget, self._memory_limit(replace(others, unseen_bytes=0)))

    def _memory_limit(self, others: NonActivationMemory) -> int | None:
        total = self._constraints.memory_budget
        if total is None and self._is_scarce:
            total = self._usable_bytes
        return None if total is None else max(total - self._needed(others, total), 0)

    @staticmethod
    def _needed(others: NonActivationMemory, total: int) -> int:
        if others.seen_bytes is not None:
            return others.seen_bytes + others.unseen_bytes
        # Half of what is left is for gradients, temporaries and what we do not know.
        return (total + others.level_bytes) // 2

    def exceeded(self, others: NonActivationMemory, *, highest_bytes: int, peak_bytes: int, largest_bytes: int) -> bool:
        """A pass that followed a plan is over. Where it exceeded the budget of all memory, others get less from now on.

        Args:
            others: what such passes need besides saved activations.
            highest_bytes: all memory in use at its worst moment.
            peak_bytes: of these, saved activations at most.
            largest_bytes: of these, the largest one.

        Returns:
            Whether it has, so that another plan is wanted.
        """
        total, seen_bytes = self._constraints.memory_budget, others.seen_bytes
        if total is None or seen_bytes is None or highest_bytes <= total:
            return False
        unseen_bytes = highest_bytes + int(_SPARE * total) - peak_bytes - seen_bytes
        unseen_bytes = int(min(unseen_bytes, _MOST_UNSEEN * largest_bytes, others.most_unseen_bytes))
        if unseen_bytes <= others.unseen_bytes:
            return False
        others.unseen_bytes = unseen_bytes
        return True

    def relent(self, others: NonActivationMemory, smallest_bytes: int) -> bool:
        """No plan can do with what is left for saved activations; leave as much as one needs, also when passes go on to
        exceed the budget. They have gone on although they did, and nothing is refused for that.

        Args:
            others: what such passes need besides saved activations.
            smallest_bytes: of saved activations, for which a plan is known.

        Returns:
            Whether more is left now.
        """
        total, seen_bytes = self._constraints.memory_budget, others.seen_bytes
        if total is None or seen_bytes is None:
            return False
        most_bytes = max(total - seen_bytes - smallest_bytes, 0)
        others.most_unseen_bytes = most_bytes
        has_more = most_bytes < others.unseen_bytes
        others.unseen_bytes = min(others.unseen_bytes, most_bytes)
        return has_more

    @property
    def limits_total_memory(self) -> bool:
        """Whether the limit is one of all memory."""
        return self._constraints.memory_budget is not None or self._is_scarce

    def has_moved(self, others: NonActivationMemory) -> bool:
        """Whether the limit is no longer the one that the traced pass was planned for."""
        return self.limits_total_memory and others.peak_bytes is not None and others.grown_bytes > 0

    def impossible(
        self, smallest_bytes: int, others: NonActivationMemory, *, unusable: str | None = None
    ) -> BudgetError:
        """The error for a budget that no plan keeps.

        Args:
            smallest_bytes: of saved activations, for which a plan is known.
            others: what else is in memory.
            unusable: why nothing can be moved to a drive, so that a larger budget is only the second best advice.
        """
        got, smallest = self._got_and_smallest(smallest_bytes, others)
        advice = ""
        if not self._constraints.recompute:
            advice = 'let repeated blocks, if there are any, run again in backward (recompute_modules="blocks"), '
        is_worn = self._constraints.wear_bytes_per_day is not None
        wear = "raise wear_budget (it limits what may be moved), " if is_worn else ""
        fact = f"OffloadPolicy.{got} is too small for this model and batch"
        if unusable is not None:
            return BudgetError(
                f"{fact}, because no drive can be used: {unusable}. Without one the smallest that works is "
                f"{smallest}. Free space there, or name other directories in HardwareProfile(paths=...); or "
                f"raise the budget, {advice}or make the batch smaller"
            )
        others_leave = ""
        if self._is_memory_in_the_way(others):
            if self._constraints.have_states_stay:
                others_leave = ', or set optimizer_states="offload"'
            if self._constraints.weights_may_leave:
                room = as_setting(smallest_bytes)
                others_leave += f", or set activation_budget={room}, for which weights leave when a model is registered"
        return BudgetError(
            f"{fact}: the smallest that works is {smallest}. "
            f"Raise the budget, {wear}{advice}make the batch smaller, or lower min_tensor_bytes{others_leave}"
        )

    def _is_memory_in_the_way(self, others: NonActivationMemory) -> bool:
        """Whether the budget of all memory, not that of saved activations, leaves less room for these."""
        memory, activations = self._constraints.memory_budget, self._constraints.activation_budget
        return memory is not None and (activations is None or memory - (others.peak_bytes or 0) < activations)

    def _got_and_smallest(self, smallest_bytes: int, others: NonActivationMemory) -> tuple[str, str]:
        """The budget that is in the way, and the one in its place for which a plan is known."""
        other = others.peak_bytes or 0
        memory, activations = self._constraints.memory_budget, self._constraints.activation_budget
        if memory is None or not self._is_memory_in_the_way(others):
            # One that another process has agreed on has no number here.
            asked = None if activations is None else as_setting(activations)
            return f"activation_budget={asked}", as_setting(smallest_bytes)
        # What else is in memory differs from run to run by a few MiB: named to the byte, it could fail again.
        least = smallest_bytes + other
        least += max(int(_MARGIN * least), _MIN_MARGIN_BYTES)
        smallest, states = as_setting(math.ceil(least / 2**20) << 20), ""
        if others.num_traces < 2 and self._constraints.have_states_stay:
            smallest += " and the optimizer's states"
            states = "; the states come with the first step, and AdamW's are twice the trained weights"
        return (
            f"memory_budget={as_setting(memory)}",
            f"{smallest} ({format_sizes(other)[0]} of it are not activations{states})",
        )


def _least(*limits: float | None) -> int | None:
    least = min((limit for limit in limits if limit is not None), default=math.inf)
    return None if math.isinf(least) else int(least)
