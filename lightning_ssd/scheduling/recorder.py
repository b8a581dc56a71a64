"""Watches one pass and sums it up as a :class:`~lightning_ssd.planning.trace.Trace`.

It is told of every pack, unpack and death of a storage, of stalls, and of the blocks that forward goes through. The
accounting lock guards it.

Note: Few stamps, and a clock that stands still
    A stamp takes an event and calls of the device. Three for each storage took as long as the pass itself. So each
    moment is one of the host's clock, and hooks of one storage in 16, and of one in each block, are stamped. Between
    two stamps the device is taken to be as far as the host is.

    How late the device is then tells what it loses by hooks: they and the host's time between them, less its work. Of
    what is launched between two hooks, half is taken to be done before the second. The clock stands still for as much
    of the recorder's own time as is lost, as during stalls. A stamp after the hook shows the device at its least late,
    from which lateness is counted: the two have no clock in common. No card has shown yet how well this fits.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

from lightning_ssd.common.tensors import StorageKey, is_released
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage
from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.telemetry.metrics import intersection

__all__ = ["Recorder"]

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_NUM_WATCHED = 4
"""Storages that the program still holds, to be looked at with each pack."""
_NUM_LOOKED_AT = 64
"""Number of these when a block ends."""
_NUM_PER_STAMP = 16
"""Storages, of which one is stamped though no block has begun or ended."""
_SAMPLE_S = 0.001
_SAMPLE_SHARE = 0.01
"""Share of the pass for asking what else is in memory: on a device it takes longer than all the rest."""


@dataclass(slots=True)
class _Seen:
    """One storage. Times are of the host's clock."""

    nbytes: int
    block: int
    packed_s: float
    key: StorageKey
    released_s: float | None = None
    wanted_s: float | None = None
    freed_s: float | None = None


@dataclass(slots=True)
class _Call:
    """One call of a block."""

    name: str
    began_s: float
    ended_s: float | None = None
    input_nbytes: int = 0
    is_recomputed: bool = False


class Recorder:
    """One pass.

    Args:
        clock: of the device.
        level: bytes of device memory in use (on CPU: of the process), asked for now and then.
        released: whether the pass alone holds a storage.
        now: seconds of the host's clock.
    """

    def __init__(
        self,
        clock: Clock,
        level: Callable[[], int],
        *,
        released: Callable[[StorageKey], bool] = is_released,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_released = released
        self._clock = clock
        self._level = level
        self._now = now
        self._seen: list[_Seen] = []
        self._order: list[int] = []
        self._calls: list[_Call] = []
        self._block = -1
        self._wanted_block = -1
        self.stalls: Sequence[tuple[Stamp, Stamp]] = ()
        """Begin and end of each wait for a transfer."""
        self._watched: deque[_Seen] = deque()
        self._own: list[tuple[float, float]] = []  # when we were at work
        self._hooks: list[tuple[float, float]] = []  # when hooks were, we among them
        self._sampled: list[tuple[float, Stamp]] = []  # before hooks
        self._num_told = 0
        self._other_peak_bytes = 0
        self._next_sample_s = 0.0
        self._num_since = _NUM_PER_STAMP  # storages, since the last one that was stamped
        self._turn_s: float | None = None
        self._end_s: float | None = None
        self._stamps: list[tuple[float, Stamp]] = []
        self._begin = self._stamp(now())

    # -- told by the pass ----------------------------------------------------------------------------------------

    def packed(self, nbytes: int, key: StorageKey, resident_bytes: int = 0) -> None:
        """Note that a storage was saved.

        Args:
            nbytes: of it.
            key: who it is.
            resident_bytes: of all saved storages, with this one.
        """
        begin_s = self._now()
        self._num_since += 1
        self._num_told += 1
        self._look(begin_s, _NUM_WATCHED)
        seen = _Seen(nbytes, self._block, begin_s, key)
        self._seen.append(seen)
        self._watched.append(seen)
        if begin_s >= self._next_sample_s:
            self._sample(begin_s, resident_bytes)
        self._own.append((begin_s, self._now()))

    def wanted(self, index: int, resident_bytes: int = 0) -> None:
        """Note that backward asks for a storage; the first time counts.

        Args:
            index: of the storage.
            resident_bytes: of all saved storages.
        """
        seen = self._seen[index]
        if seen.wanted_s is not None:
            return
        begin_s = seen.wanted_s = self._now()
        self._num_told += 1
        self._num_since = self._num_since + 1 if seen.block == self._wanted_block else _NUM_PER_STAMP
        self._wanted_block = seen.block
        if seen.released_s is None and self._is_released(seen.key):
            seen.released_s = begin_s
        self._order.append(index)
        if begin_s >= self._next_sample_s:
            self._sample(begin_s, resident_bytes)
        self._own.append((begin_s, self._now()))

    def freed(self, index: int) -> None:
        """The graph has let go of the storage."""
        seen = self._seen[index]
        if seen.freed_s is None:
            seen.freed_s = self._now()

    def forward_ended(self) -> None:
        """The hooks are off."""
        begin_s = self._turn_s = self._now()
        self._stamp(begin_s)
        self._num_since = _NUM_PER_STAMP
        self._look(begin_s, len(self._watched))
        self._own.append((begin_s, self._now()))

    def backward_ended(self) -> None:
        """Note that the stamp for :meth:`trace` was taken just now. From now on nothing is told."""
        self._end_s = self._now()

    def block_enters(self, name: str, *, recompute: bool) -> None:
        """Forward enters a block."""
        self._block = len(self._calls)
        self._num_since = _NUM_PER_STAMP
        self._calls.append(_Call(name, self._now(), is_recomputed=recompute))

    def block_inputs(self, nbytes: int) -> None:
        """The entered block was given tensors of so many bytes."""
        self._calls[-1].input_nbytes = nbytes

    def block_is_kept(self) -> None:
        """The entered block was to be recomputed, and is not."""
        self._calls[-1].is_recomputed = False

    def block_leaves(self) -> None:
        """Forward leaves the block."""
        begin_s = self._calls[-1].ended_s = self._now()
        self._block = -1
        self._num_since = _NUM_PER_STAMP
        self._look(begin_s, _NUM_LOOKED_AT)
        self._own.append((begin_s, self._now()))

    def set_aside(self, begin_s: float, end_s: float) -> None:
        """Leave a span of the host's clock out, in which something ran that other passes do not run."""
        self._own.append((begin_s, end_s))
        self._hooks.append((begin_s, end_s))

    def timed(self, hook: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result]:
        """Return a hook that does the same and tells us how long it took.

        Not under the lock: a hook takes it. Where two threads have hooks at once, two may be sampled, or none.
        """
        now, hooks = self._now, self._hooks

        def run(argument: _Argument) -> _Result:
            begin_s, num_told = now(), self._num_told
            is_sampled = self._num_since >= _NUM_PER_STAMP and self._end_s is None
            stamp = self._stamp(begin_s) if is_sampled else None
            result = hook(argument)
            if is_sampled and self._num_told > num_told:  # else it was of a small tensor: the next one is sampled
                self._num_since = 0
                self._sampled.append((begin_s, stamp))
                self._stamp(now())
            if self._end_s is None:
                hooks.append((begin_s, now()))
            return result

        return run

    # -- helpers -------------------------------------------------------------------------------------------------

    def _stamp(self, now_s: float) -> Stamp:
        stamp = self._clock.stamp()
        self._stamps.append((now_s, stamp))
        self._own.append((now_s, self._now()))
        return stamp

    def _look(self, now_s: float, num_watched: int) -> None:
        """Note whose memory would have gone by now, if we did not hold it."""
        for _ in range(min(num_watched, len(self._watched))):
            seen = self._watched.popleft()
            if self._is_released(seen.key):
                seen.released_s = now_s
            elif seen.wanted_s is None:
                self._watched.append(seen)

    def _sample(self, now_s: float, resident_bytes: int) -> None:
        """Look at what else is in memory, and not again for a hundred times as long as asking took."""
        self._other_peak_bytes = max(self._other_peak_bytes, self._level() - resident_bytes)
        end_s = self._now()
        self._next_sample_s = end_s + max(_SAMPLE_S, (end_s - now_s) / _SAMPLE_SHARE)

    # -- the sum -------------------------------------------------------------------------------------------------

    def hook_s(self, end: Stamp) -> float:
        """Return what hooks took from the pass that was over at ``end``, without our own part and stalls, in seconds.

        On a CPU stalls are in hooks, and they are accounted by themselves. On a device the stream waits, as a rule.
        """
        device = self._device(end)
        spent_s, own_s = (sum(map(device.lost_s, spans)) for spans in (self._hooks, self._own))
        stalls = [] if self._clock.lag else self._since_begin(self.stalls)
        hooks = [(device.at(begin_s), device.at(stop_s)) for begin_s, stop_s in self._hooks]
        return max(spent_s - own_s - sum(stop_s - begin_s for begin_s, stop_s in intersection(stalls, hooks)), 0.0)

    def trace(self, end: Stamp, refused: Collection[str] = ()) -> Trace:
        """Sum up the pass, which was over at ``end``. On CUDA this waits for the device.

        Args:
            end: when backward had ended.
            refused: names of blocks that cannot be recomputed exactly.
        """
        device = self._device(end)
        own = [(device.at(span[0]), device.at(span[0]) + device.lost_s(span)) for span in self._own]
        waited = _merged([*self._since_begin(self.stalls), *own])
        begins_s = [begin_s for begin_s, _, _ in waited]

        def without_waits(passed_s: float) -> float:
            num_begun = bisect(begins_s, passed_s)
            if not num_begun:
                return max(passed_s, 0.0)
            begin_s, stop_s, before_s = waited[num_begun - 1]
            return passed_s - before_s - (min(passed_s, stop_s) - begin_s)

        def at(now_s: float | None, otherwise: float) -> float:
            return otherwise if now_s is None else without_waits(device.at(now_s))

        end_s = without_waits(device.end_s)
        storages = tuple(self._storage(seen, at, end_s) for seen in self._seen)
        return Trace(
            storages=storages,
            order=tuple(self._order),
            blocks=self._blocks(storages, at, end_s, refused),
            forward_end_s=at(self._turn_s, end_s),
            end_s=end_s,
            other_peak_bytes=self._other_peak_bytes,
            recomputed=frozenset(i for i, call in enumerate(self._calls) if call.is_recomputed),
        )

    def _since_begin(self, spans: Sequence[tuple[Stamp, Stamp]]) -> list[tuple[float, float]]:
        """Return spans between stamps, in seconds since the pass began."""
        since = partial(self._clock.seconds, self._begin)
        return [(since(start), since(stop)) for start, stop in spans]

    def _device(self, end: Stamp) -> _DeviceTimes:
        since = partial(self._clock.seconds, self._begin)
        points = sorted((now_s, since(stamp)) for now_s, stamp in self._stamps)
        end_s = since(end)
        if self._end_s is not None:
            points.append((self._end_s, end_s))
        sampled = sorted((now_s, since(stamp)) for now_s, stamp in self._sampled)
        return _DeviceTimes(points, sampled, self._hooks, end_s=end_s)

    @staticmethod
    def _storage(seen: _Seen, at: Callable[[float | None, float], float], end_s: float) -> TracedStorage:
        packed_s = at(seen.packed_s, 0.0)
        # On CUDA the sum is made when the next pass is under way: what lives longer than its pass may be gone by then.
        freed_s = max(min(at(seen.freed_s, end_s), end_s), packed_s)
        wanted_s = None if seen.wanted_s is None else max(at(seen.wanted_s, end_s), packed_s)
        # Not seen to be released before it was wanted: the program held it all along.
        movable = seen.released_s is not None
        return TracedStorage(
            nbytes=seen.nbytes,
            packed_s=packed_s,
            last_used_s=min(max(at(seen.released_s, packed_s), packed_s), freed_s),
            wanted_s=None if wanted_s is None else min(wanted_s, freed_s),
            freed_s=freed_s,
            block=seen.block,
            movable=movable,
        )

    def _blocks(
        self,
        storages: tuple[TracedStorage, ...],
        at: Callable[[float | None, float], float],
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
                forward_start_s=at(call.began_s, 0.0),
                forward_end_s=at(call.ended_s, 0.0),
                backward_start_s=start,
                backward_end_s=following[start],
                input_nbytes=call.input_nbytes,
                recomputable=call.name not in refused,
            )
            for call, start in zip(self._calls, starts, strict=True)
        )


class _DeviceTimes:
    """Tell where the device was when the host was somewhere, in seconds since the pass began.

    Args:
        points: of each stamp: when the host took it, and when the device passed it; in the order of the host.
        sampled: those of them before which a hook began.
        hooks: when hooks were at work, by the host's clock.
        end_s: of the pass, on the device.
    """

    def __init__(
        self,
        points: Sequence[tuple[float, float]],
        sampled: Sequence[tuple[float, float]],
        hooks: Sequence[tuple[float, float]],
        *,
        end_s: float,
    ) -> None:
        self.end_s = end_s
        self._host_s = [host_s for host_s, _ in points]
        # A stamp of another stream may have been passed earlier than the one before it.
        self._device_s = list(accumulate((device_s for _, device_s in points), max))
        self._sampled_s = [host_s for host_s, _ in sampled]
        least_s = min(device_s - host_s for host_s, device_s in points)
        self._shares = self._lost_shares([device_s - host_s - least_s for host_s, device_s in sampled], hooks)

    def _lost_shares(self, late_s: Sequence[float], hooks: Sequence[tuple[float, float]]) -> list[float]:
        """Return, between each two samples, the share of the hooks' time that the device has lost by them.

        Args:
            late_s: how long the device had to work yet when the sampled hooks began.
            hooks: when they were at work.
        """
        if not late_s:
            return []
        of_sample: list[list[float]] = [[] for _ in late_s]
        for begin_s, stop_s in hooks:
            of_sample[self._sample(begin_s)].append(stop_s - begin_s)
        shares = []
        ends_s = [*self._sampled_s[1:], self._host_s[-1]]
        for late, begin_s, stop_s, spent_s in zip(late_s, self._sampled_s, ends_s, of_sample, strict=True):
            hooked_s = sum(spent_s)
            between_s = max(stop_s - begin_s - hooked_s, 0.0) / max(len(spent_s), 1)  # of the host, besides hooks
            # From one hook to the next: what was left at its begin, and what was launched since and done at once.
            work_s = late + between_s / 2
            lost_s = sum(max(work_s, spent + between_s) - max(work_s, between_s) for spent in spent_s)
            shares.append(lost_s / hooked_s if hooked_s else 1.0)
        return shares

    def _sample(self, host_s: float) -> int:
        return max(bisect(self._sampled_s, host_s) - 1, 0)

    def at(self, host_s: float) -> float:
        """Return where the device was, or is taken to have been."""
        index = bisect(self._host_s, host_s) - 1
        if index < 0:
            return self._device_s[0]
        since_s = host_s - self._host_s[index]
        if index + 1 == len(self._host_s):
            return self._device_s[index] + since_s
        device_s = self._device_s[index + 1] - self._device_s[index]
        return self._device_s[index] + since_s * (device_s / (self._host_s[index + 1] - self._host_s[index]))

    def lost_s(self, span: tuple[float, float]) -> float:
        """Return what the device lost while the host was in hooks; all of it where none was sampled."""
        return (span[1] - span[0]) * (self._shares[self._sample(span[0])] if self._shares else 1.0)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Merge spans that overlap: begin, end, and how long all those before it lasted.

    Graphs die while others wait, and two threads may wait at once: what a stall takes off a moment depends on when
    that moment was.
    """
    merged: list[tuple[float, float, float]] = []
    for begin_s, stop_s in sorted((max(begin_s, 0.0), stop_s) for begin_s, stop_s in spans):
        last_begin_s, last_stop_s, before_s = merged[-1] if merged else (0.0, 0.0, 0.0)
        if begin_s > last_stop_s or not merged:
            merged.append((begin_s, max(begin_s, stop_s), before_s + last_stop_s - last_begin_s))
        else:
            merged[-1] = last_begin_s, max(last_stop_s, stop_s), before_s
    return merged
