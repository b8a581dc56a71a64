"""Watches one pass and sums it up as a :class:`~lightning_ssd.planning.trace.Trace`.

It is told of every pack, unpack and death of a storage, of stalls, and of the blocks that forward goes through. Its
times are those of a clock that stands still during stalls. The accounting lock guards it.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lightning_ssd.common.tensors import StorageKey, can_count_holders, is_released
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage
from lightning_ssd.scheduling.clock import Clock, Stamp

__all__ = ["Recorder"]

# How many storages that somebody besides autograd still holds are looked at with each pack.
_NUM_WATCHED = 16
_SAMPLE_S = 0.001


@dataclass(slots=True)
class _Seen:
    """One storage."""

    nbytes: int
    block: int
    packed: Stamp
    key: StorageKey
    released: Stamp | None = None
    wanted: Stamp | None = None
    freed: Stamp | None = None


@dataclass(slots=True)
class _Call:
    """One call of a block."""

    name: str
    began: Stamp
    ended: Stamp | None = None
    input_nbytes: int = 0
    is_recomputed: bool = False


class Recorder:
    """One pass.

    Args:
        clock: of the device.
        level: bytes of device memory in use (on CPU: of the process), asked for now and then.
        released: whether nobody but the pass holds a storage.
    """

    def __init__(
        self, clock: Clock, level: Callable[[], int], *, released: Callable[[StorageKey], bool] = is_released
    ) -> None:
        self._is_released = released
        self._clock = clock
        self._level = level
        self._seen: list[_Seen] = []
        self._order: list[int] = []
        self._calls: list[_Call] = []
        self._block = -1
        self._stalls: list[tuple[Stamp, Stamp]] = []
        self._watched: deque[_Seen] = deque()
        self._other_peak_bytes = 0
        self._next_sample_s = 0.0
        self._begin: Stamp = clock.stamp()
        self._turn: Stamp | None = None

    # -- told by the pass ----------------------------------------------------------------------------------------

    def packed(self, nbytes: int, key: StorageKey) -> None:
        """A storage was saved."""
        moment = self._clock.stamp()
        self._look(moment, _NUM_WATCHED)
        seen = _Seen(nbytes, self._block, moment, key)
        self._seen.append(seen)
        self._watched.append(seen)

    def wanted(self, index: int) -> None:
        """Backward asks for the storage for the first time."""
        seen = self._seen[index]
        if seen.wanted is None:
            seen.wanted = self._clock.stamp()
            if seen.released is None and self._is_released(seen.key):
                seen.released = seen.wanted
            self._order.append(index)

    def freed(self, index: int) -> None:
        """The graph has let go of the storage."""
        seen = self._seen[index]
        if seen.freed is None:
            seen.freed = self._clock.stamp()

    def stalled(self, begin: Stamp, end: Stamp) -> None:
        """The training thread has waited."""
        self._stalls.append((begin, end))

    def forward_ended(self) -> None:
        """The hooks are off."""
        self._turn = self._clock.stamp()
        self._look(self._turn, len(self._watched))

    def sample(self, resident_bytes: int) -> None:
        """Look at what else is in memory, unless somebody has just looked: asking takes longer than all the rest."""
        now_s = time.perf_counter()
        if now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + _SAMPLE_S
        self._other_peak_bytes = max(self._other_peak_bytes, self._level() - resident_bytes)

    def block_enters(self, name: str, *, recompute: bool) -> None:
        """Forward enters a block."""
        self._block = len(self._calls)
        self._calls.append(_Call(name, self._clock.stamp(), is_recomputed=recompute))

    def block_inputs(self, nbytes: int) -> None:
        """The entered block was given tensors of so many bytes."""
        self._calls[-1].input_nbytes = nbytes

    def block_is_kept(self) -> None:
        """The entered block was to be recomputed, and is not."""
        self._calls[-1].is_recomputed = False

    def block_leaves(self) -> None:
        """Forward leaves the block."""
        self._calls[-1].ended = self._clock.stamp()
        self._block = -1

    # -- the sum -------------------------------------------------------------------------------------------------

    def trace(self, end: Stamp, refused: Collection[str] = ()) -> Trace:
        """The pass, which was over at ``end``. On CUDA this waits for the device.

        Args:
            end: when backward had ended.
            refused: names of blocks that cannot be recomputed exactly.
        """
        waited = self._waited()
        begins_s = [begin_s for begin_s, _, _ in waited]

        def at(stamp: Stamp | None, otherwise: float) -> float:
            if stamp is None:
                return otherwise
            passed_s = max(self._clock.seconds(self._begin, stamp), 0.0)
            num_begun = bisect(begins_s, passed_s)
            if not num_begun:
                return passed_s
            begin_s, stop_s, before_s = waited[num_begun - 1]
            return passed_s - before_s - (min(passed_s, stop_s) - begin_s)

        end_s = at(end, 0.0)
        storages = tuple(self._storage(seen, at, end_s) for seen in self._seen)
        return Trace(
            storages=storages,
            order=tuple(self._order),
            blocks=self._blocks(storages, at, end_s, refused),
            forward_end_s=at(self._turn, end_s),
            end_s=end_s,
            other_peak_bytes=self._other_peak_bytes,
            recomputed=frozenset(i for i, call in enumerate(self._calls) if call.is_recomputed),
        )

    def _waited(self) -> list[tuple[float, float, float]]:
        """Stalls since the pass began, in order, merged: begin, end, and how long all those before it lasted.

        Graphs die while others wait, and two threads may wait at once: what a stall takes off a moment depends on when
        that moment was.
        """
        since = [[self._clock.seconds(self._begin, stamp) for stamp in stall] for stall in self._stalls]
        merged: list[tuple[float, float, float]] = []
        for begin_s, stop_s in sorted((max(begin_s, 0.0), stop_s) for begin_s, stop_s in since):
            last_begin_s, last_stop_s, before_s = merged[-1] if merged else (0.0, 0.0, 0.0)
            if begin_s > last_stop_s or not merged:
                merged.append((begin_s, max(begin_s, stop_s), before_s + last_stop_s - last_begin_s))
            else:
                merged[-1] = last_begin_s, max(last_stop_s, stop_s), before_s
        return merged

    @staticmethod
    def _storage(seen: _Seen, at: Callable[[Stamp | None, float], float], end_s: float) -> TracedStorage:
        packed_s = at(seen.packed, 0.0)
        # On CUDA the sum is made when the next pass is under way: what lives longer than its pass may be gone by then.
        freed_s = max(min(at(seen.freed, end_s), end_s), packed_s)
        wanted_s = None if seen.wanted is None else max(at(seen.wanted, end_s), packed_s)
        # Not seen to be released before it was wanted: somebody held it all along (or nobody could look).
        movable = seen.released is not None or not can_count_holders()
        return TracedStorage(
            nbytes=seen.nbytes,
            packed_s=packed_s,
            last_used_s=min(max(at(seen.released, packed_s), packed_s), freed_s),
            wanted_s=None if wanted_s is None else min(wanted_s, freed_s),
            freed_s=freed_s,
            block=seen.block,
            movable=movable,
        )

    def _blocks(
        self,
        storages: tuple[TracedStorage, ...],
        at: Callable[[Stamp | None, float], float],
        end_s: float,
        refused: Collection[str],
    ) -> tuple[TracedBlock, ...]:
        """Backward of a block begins when the first of its storages is wanted, and ends where the next one begins."""
        starts = [end_s] * len(self._calls)
        for storage in storages:
            if storage.block >= 0 and storage.wanted_s is not None:
                starts[storage.block] = min(starts[storage.block], storage.wanted_s)
        ordered = sorted({*starts, end_s})
        following = dict(zip(ordered, [*ordered[1:], end_s], strict=True))
        return tuple(
            TracedBlock(
                name=call.name,
                forward_start_s=at(call.began, 0.0),
                forward_end_s=at(call.ended, 0.0),
                backward_start_s=start,
                backward_end_s=following[start],
                input_nbytes=call.input_nbytes,
                recomputable=call.name not in refused,
            )
            for call, start in zip(self._calls, starts, strict=True)
        )

    # -- helpers -------------------------------------------------------------------------------------------------

    def _look(self, moment: Stamp, num_watched: int) -> None:
        """Whose memory would have gone by now, if we did not hold it?"""
        for _ in range(min(num_watched, len(self._watched))):
            seen = self._watched.popleft()
            if self._is_released(seen.key):
                seen.released = moment
            elif seen.wanted is None:
                self._watched.append(seen)
