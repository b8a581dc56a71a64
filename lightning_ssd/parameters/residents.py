"""Which weights stay in memory, where only as much of a model waits on a drive as memory lacks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.formatting import as_setting, format_sizes, pluralize
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.errors import BudgetError
from lightning_ssd.memory.gauge import Gauge
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.parameters.pager import Place
from lightning_ssd.parameters.units import SharedWeights, is_plain
from lightning_ssd.planning.residency import MemoryOutlook, ResidencyUnit, choose_residents, window_bytes
from lightning_ssd.planning.update_memory import update_bytes

__all__ = ["MovableWeights", "Needs", "Residents"]

_STATES_PER_WEIGHT = 2
"""AdamW's, in the precision of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The memory that a policy lets a process take, and that training needs besides weights."""

    memory_budget: int | None = None
    activation_budget: int | None = None
    gradients: Literal["keep", "offload", "auto"] = "keep"
    num_gradients: int = 1
    """Copies of each gradient that stays: ``DistributedDataParallel`` has another one in its buckets."""
    keeps_states: bool = True
    state_bytes: int = 0
    """Bytes of optimizer states that wait which stay in memory from one step to the next."""
    num_directories: int = 1
    """That states wait in."""

    def coming_bytes(self, trained_bytes: int, waiting_bytes: int, here_bytes: int) -> int:
        """Gradients and states to come.

        Args:
            trained_bytes: of all weights that are trained.
            waiting_bytes: of those whose gradients are counted with them.
            here_bytes: gradients that there are already.
        """
        states = _STATES_PER_WEIGHT * trained_bytes
        if trained_bytes and not self.keeps_states:
            states = update_bytes(states, self.num_directories) + self.state_bytes
        return self.gradient_bytes(trained_bytes, waiting_bytes, here_bytes) + states

    def gradient_bytes(self, trained_bytes: int, waiting_bytes: int, here_bytes: int) -> int:
        """Gradients to come that stay wherever weights wait; see :meth:`coming_bytes`."""
        staying = {"keep": trained_bytes, "auto": trained_bytes - waiting_bytes, "offload": 0}[self.gradients]
        return max(self.num_gradients * staying - here_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MovableWeights:
    """Weights in one storage that could wait. Holds none of their memory."""

    name: str
    place: Place
    """The unit that they are brought in with."""
    is_frozen: bool
    trained_bytes: int
    nbytes: int
    """Bytes of the storage, also while its memory is away."""
    waits: bool
    is_held: bool
    """Whether a :class:`~lightning_ssd.memory.gauge.Gauge` counts them as held."""
    comes_ahead: bool
    """Whether they come to memory before their use begins, rather than when it does."""
    shown_bytes: int = 0
    """Bytes of pages of a file that are in memory, and leave when the weights wait."""

    @classmethod
    def of(cls, weights: SharedWeights, place: Place, **facts: Any) -> MovableWeights:
        """Describe weights by these facts, and those that :class:`SharedWeights` has."""
        facts |= {"is_frozen": weights.is_frozen, "trained_bytes": weights.trained_bytes}
        return cls(name=weights.names[0], place=place, **facts)


class Residents:
    """Decides, for each module that is registered, which of the weights that could wait stay in memory.

    Gradients and optimizer states are counted before there are any, as AdamW would have them.

    Args:
        needs: of training.
        gauge: reads the memory that they stay in.
    """

    def __init__(self, needs: Needs, gauge: Gauge) -> None:
        self._needs = needs
        self.gauge = gauge
        self.decisions: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        """The bytes of each module's weights that could wait and stay."""
        self.text = ""
        """The last decision, for the log."""

    @property
    def kept_bytes(self) -> int:
        return sum(kept for reference, kept in self.decisions.values() if reference() is not None)

    @property
    def modules(self) -> list[nn.Module]:
        held = [reference() for reference, _ in self.decisions.values()]
        return [module for module in held if module is not None]

    def is_short(self) -> bool:
        """Whether weights that are made now should leave, before it is known what else will need memory."""
        return self._outlook().is_short

    def choose(
        self, module: nn.Module, movable: Sequence[MovableWeights], *, as_before: bool = False
    ) -> frozenset[str]:
        """Decide on one module, and return the names of the weights that stay.

        Args:
            module: whose weights they are.
            movable: those that could wait.
            as_before: weights that have stayed must not leave.

        Raises:
            BudgetError: the budget has no room for what cannot wait.
        """
        # What is frozen in a unit waits before what is trained in it; the members of each part wait or stay together.
        parts: dict[tuple[str, object | None, bool], list[MovableWeights]] = {}
        sizes: dict[Place, tuple[int, bool]] = {}
        for weights in movable:
            parts.setdefault((*weights.place, not weights.is_frozen), []).append(weights)
            nbytes, comes_ahead = sizes.get(weights.place, (0, False))
            sizes[weights.place] = nbytes + weights.nbytes, comes_ahead or weights.comes_ahead
        members = list(parts.values())
        units = [
            ResidencyUnit(
                weight_bytes=sum(weights.nbytes for weights in held),
                gradient_bytes=sum(w.trained_bytes for w in held) if self._needs.gradients == "auto" else 0,
                is_trained=not held[0].is_frozen,
            )
            for held in members
        ]
        room_bytes = None
        if as_before:
            stays = tuple(not all(weights.waits for weights in held) for held in members)
        else:
            room_bytes = self._room_bytes(module, movable, window_bytes(sizes.values()))
            # Two units are in flight: what is frozen takes room in the page cache before its use, too.
            in_flight_bytes = sum(nbytes for nbytes, _ in sorted(sizes.values())[-2:])
            stays = choose_residents(units, room_bytes=room_bytes, in_flight_bytes=in_flight_bytes)
        kept = sum(unit.weight_bytes for unit, stay in zip(units, stays, strict=True) if stay)
        every = sum(unit.weight_bytes for unit in units)
        self.decisions[id(module)] = weakref.ref(module), kept
        waiting, total, room = format_sizes(every - kept, every, room_bytes or 0)
        if as_before:
            self.text = f"as before, {waiting} of weights wait on drives"
        elif room_bytes is None:
            self.text = f"nothing tells how much memory there is: all {total} of weights may wait"
        elif all(stays):
            self.text = f"no weights wait on drives: memory has room for {room}, and {total} could wait"
        else:
            counted = f"{stays.count(False)} of {pluralize(len(units), 'unit', 'units')}"
            self.text = f"{counted} ({waiting} of {total}) wait on drives: memory has room for {room}"
        return frozenset(w.name for held, stay in zip(members, stays, strict=True) if stay for w in held)

    def _room_bytes(self, module: nn.Module, movable: Sequence[MovableWeights], used_bytes: int) -> int | None:
        """For these weights, and what stays with them."""
        self.decisions.pop(id(module), None)
        modules = [module, *self.modules]  # others that wait for their gradients and states
        kind = self.gauge.device_type
        parameters = {id(p): p for one in modules for p in one.parameters() if is_plain(local_of(p), kind)}
        gradients = [local_of(p.grad) for p in parameters.values() if p.grad is not None]
        storages = {storage_of(g)._cdata: storage_of(g) for g in gradients if is_plain(g, kind) and not is_guarded(g)}
        trained = (
            sum(local_of(p).nbytes for p in parameters.values() if p.requires_grad),
            sum(weights.trained_bytes for weights in movable),
            sum(storage.nbytes() for storage in storages.values() if not is_mapped(storage)),  # others wait
        )
        self.gauge.settle()  # what is kept of the model's building would count as needed
        here = sum(weights.nbytes for weights in movable if weights.is_held)
        shown = sum(weights.shown_bytes for weights in movable)
        others = max(self.gauge.held_bytes() + self.gauge.fixed_bytes(shown) - here, 0)
        self._check_budget(
            others, self._needs.gradient_bytes(*trained), used_bytes, staying_bytes=trained[0] - trained[1]
        )
        outlook = self._outlook(
            shown,
            waiting_bytes=sum(weights.nbytes for weights in movable) - here,
            weight_bytes=here,
            coming_bytes=self._needs.coming_bytes(*trained),
        )
        return outlook.room_bytes

    def _check_budget(self, others_bytes: int, gradient_bytes: int, used_bytes: int, *, staying_bytes: int) -> None:
        """Whether the budget has room for what is in memory where all weights wait that can.

        Optimizer states are not counted: the optimizer is not known yet.

        Args:
            others_bytes: what the process holds besides these weights.
            gradient_bytes: to come, that stay.
            used_bytes: of weights that wait, what is in memory at a time.
            staying_bytes: of weights that are trained and cannot wait.
        """
        budget, least = self._needs.memory_budget, others_bytes + gradient_bytes + used_bytes
        if budget is None or least <= budget:
            return
        ways = ["raise the budget", "lower min_tensor_bytes so that smaller weights leave"]
        if self._needs.keeps_states and staying_bytes:
            ways.append('set optimizer_states="offload", with which trained weights leave')
        others, gradients, used = format_sizes(others_bytes, gradient_bytes, used_bytes)
        raise BudgetError(
            f"OffloadPolicy.memory_budget={as_setting(budget)} is too small, even if all weights leave that can: this "
            f"model needs more than {as_setting(least)} ({others} that the process holds besides these weights, "
            f"{gradients} of gradients that stay, and {used} of weights in use), and saved activations on top. "
            f"{', or '.join(ways).capitalize()}"
        )

    def _outlook(
        self,
        shown_bytes: int = 0,
        *,
        waiting_bytes: int = 0,
        weight_bytes: int = 0,
        coming_bytes: int = 0,
    ) -> MemoryOutlook:
        """Read the gauge, and return what it says with these facts of :class:`MemoryOutlook`.

        Args:
            shown_bytes: of weights in memory that shows a file, and leaves when they wait.
            waiting_bytes: of weights that show a file: what of them is in the page cache only fills free memory.
            weight_bytes: see :class:`MemoryOutlook`.
            coming_bytes: see there.
        """
        budget = self._needs.memory_budget
        return MemoryOutlook(
            held_bytes=self.gauge.held_bytes(),
            available_bytes=self.gauge.available_bytes(waiting_bytes),
            # The budget is one of all that is resident, code that shows a file included.
            budget_bytes=None if budget is None else max(budget - self.gauge.fixed_bytes(shown_bytes), 0),
            weight_bytes=weight_bytes,
            coming_bytes=coming_bytes,
            activation_bytes=self._needs.activation_budget,
        )
