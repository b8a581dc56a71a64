"""The profiled step: what one pass saved, for how long, and how long its blocks took.

A *pass* is one entry into ``saved_tensors()`` with the backward that follows. All times are seconds since the pass
began on a clock that stands still while the training thread waits for transfers, so that a pass that was slowed down
by a drive still tells how long its own work takes. Bytes are those of whole storages.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Trace", "TracedBlock", "TracedStorage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStorage:
    """One saved storage: created by forward, wanted back by backward, let go by the graph."""

    nbytes: int
    packed_s: float
    """When autograd saved it."""
    last_used_s: float
    """The moment from which autograd alone holds it; from here on moving it frees memory. At least ``packed_s``."""
    wanted_s: float | None
    """When backward first asked for it; ``None``: never."""
    freed_s: float
    """When the graph had let go of it."""
    block: int = -1
    """Index into :attr:`Trace.blocks`; -1: saved outside of every block."""
    movable: bool = True
    """False: its memory was held by others all along, so that moving it frees nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBlock:
    """One call of a repeated block."""

    name: str
    forward_start_s: float
    forward_end_s: float
    backward_start_s: float
    backward_end_s: float
    input_nbytes: int
    """Bytes of its tensor inputs: what recomputing it has to hold until backward."""
    recomputable: bool = True
    """Whether it can be recomputed exactly, as far as this pass has shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One finished pass, in the order in which storages were packed and blocks were called."""

    storages: tuple[TracedStorage, ...]
    order: tuple[int, ...]
    """Indices of storages in the order of first unpack. It is not the exact reverse of the pack order."""
    blocks: tuple[TracedBlock, ...] = ()
    forward_end_s: float
    end_s: float
    """Length of the pass."""
    other_peak_bytes: int = 0
    """Memory that was not saved activations, at its worst moment (weights, gradients, states, temporaries)."""
    recomputed: frozenset[int] = frozenset()
    """Blocks that this very pass recomputed: their inner storages are not in it, their inputs are."""

    moved_bytes: int = 0
    """Bytes that this very pass moved: its length has the cost of it."""

    @property
    def saved_peak_bytes(self) -> int:
        """Bytes that keeping every storage holds at its worst moment."""
        changes = [(s.packed_s, s.nbytes) for s in self.storages] + [(s.freed_s, -s.nbytes) for s in self.storages]
        held = peak = 0
        for _, change in sorted(changes):
            held += change
            peak = max(peak, held)
        return peak
