"""A bound on step time and peak that no faster drive and no larger budget makes worse.

The runtime hands over what has not left memory yet. That is good for a pass, and bad for a comparison of plans: with a
faster drive a storage may just have left when it is wanted, so that the same plan stalls where it did not before. The
bound plays the pass without that luck. Every write runs to its end, every moved storage is read again, after its write
and after the reads before it, and is asked for at the unpack at which window and limit first let it in, as if writes
took no time. All times are then sums and maxima of transfer times (a max-plus system), and hence:

* ``step_s`` never grows with a rate, with the limit, or with the window;
* ``min_peak_bytes``, the peak if writes took no time, does not depend on rates. A limit can be kept if it is not above
  it. Then the same holds for every larger limit and every smaller window;
* ``peak_bytes`` without a limit counts what is still being written as if no stall gave it time to end, and so never
  grows with a rate.

Without a limit both are upper bounds of what the simulator finds for the same plan.

That a larger limit is never worse needs one exception: where storages are still saved after backward has begun (blocks
are recomputed), what a larger limit let in ahead could be in their way. There the limit does not bound the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ssd.planning.lifetimes import PACK, RELEASE, UNPACK, Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.simulator import moving_cost_s

__all__ = ["Bound", "bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """See the module."""

    step_s: float
    peak_bytes: int
    min_peak_bytes: int


def bound(
    lives: Lifetimes,
    placements: Sequence[Placement],
    machine: Machine,
    *,
    limit_bytes: int | None,
    ahead_bytes: int,
) -> Bound:
    """Bound one plan.

    Args:
        lives: of the pass.
        placements: one per storage, KEEP or a tier of the machine.
        machine: the tiers.
        limit_bytes: packs wait for memory below this; ``None``: they never wait.
        ahead_bytes: the window.
    """
    return _Bounder(lives, placements, machine, limit_bytes, ahead_bytes).play()


# Where a moved storage is. A kept one is counted when it comes and when it goes.
_ABSENT, _HELD, _HELD_WRITTEN, _LEAVING, _OUT, _AHEAD, _BACK = range(7)


class _Lane:
    """Both channels of one tier."""

    __slots__ = ("clock_free_s", "queue", "read_free_s", "read_rate", "write_free_s", "write_rate")

    def __init__(self, rates: TierRates) -> None:
        self.write_rate, self.read_rate = rates.write_bytes_per_s, rates.read_bytes_per_s
        self.write_free_s = self.read_free_s = self.clock_free_s = float("-inf")
        self.queue: deque[tuple[float, int]] = deque()  # ends of writes


class _Bounder:
    def __init__(
        self, lives: Lifetimes, placements: Sequence[Placement], machine: Machine, limit: int | None, window: int
    ) -> None:
        self.lives, self.limit, self.window = lives, limit, window
        self.cost_s = moving_cost_s(lives, placements, machine)
        self.ahead_limit = limit if lives.is_simple else None
        ssd = None if machine.ssd is None else _Lane(machine.ssd)
        host = None if machine.host is None else _Lane(machine.host)
        by_placement = {Placement.KEEP: None, Placement.SSD: ssd, Placement.HOST: host}
        self.lane_of = [by_placement[p] for p in placements]
        self.lanes = [lane for lane in (ssd, host) if lane is not None]
        self.state = [_ABSENT] * len(placements)
        self.write_end = [0.0] * len(placements)
        self.read_end = [0.0] * len(placements)
        # Bytes in memory: those that would be there with infinitely fast writes, and those still being written.
        self.held = self.leaving = 0
        self.peak = self.floor = self.ahead = self.next_ahead = 0
        self.stall = 0.0

    def play(self) -> Bound:
        sizes, lane_of, limit = self.lives.sizes, self.lane_of, self.limit
        for clock, kind, index in self.lives.events:
            lane = lane_of[index]
            if kind == PACK:
                if limit is not None and self.held + self.leaving + sizes[index] > limit:
                    self._wait_for_room(sizes[index], clock)
                if lane is None:
                    self.held += sizes[index]
                else:
                    self._write(lane, index, clock)
                if self.held + self.leaving > self.peak or self.held > self.floor:
                    self._see_peak(clock)
            elif kind == UNPACK:
                if lane is not None:
                    self._fetch(lane, index, clock)
                self.next_ahead = max(self.next_ahead, self.lives.position[index] + 1)
                self._look_ahead(clock)
            elif lane is None:
                if kind != RELEASE:
                    self.held -= sizes[index]
            elif kind == RELEASE:
                self._release(index, clock)
            else:
                self._free(index)
        return Bound(self.lives.end_s + self.cost_s + self.stall, self.peak, self.floor)

    # -- writes --------------------------------------------------------------------------------------------------

    def _settle(self, clock: float) -> None:
        """Let go of what has been written by now. Without a limit, "now" leaves stalls out: see the module."""
        now = clock if self.limit is None else clock + self.stall
        for lane in self.lanes:
            while lane.queue and lane.queue[0][0] <= now:
                self._written(lane.queue.popleft()[1])

    def _written(self, index: int) -> None:
        if self.state[index] == _LEAVING:
            self.state[index] = _OUT
            self.leaving -= self.lives.sizes[index]
        elif self.state[index] == _HELD:
            self.state[index] = _HELD_WRITTEN

    def _wait_for_room(self, nbytes: int, clock: float) -> None:
        self._settle(clock)
        limit = self.limit or 0
        while self.held + self.leaving + nbytes > limit and self.leaving:
            lane = min((lane for lane in self.lanes if lane.queue), key=lambda lane: lane.queue[0][0])
            end, index = lane.queue.popleft()
            self.stall = max(self.stall, end - clock)
            self._written(index)

    def _write(self, lane: _Lane, index: int, clock: float) -> None:
        nbytes, now = self.lives.sizes[index], clock + self.stall
        seconds = nbytes / lane.write_rate
        lane.write_free_s = self.write_end[index] = max(lane.write_free_s, now) + seconds
        lane.clock_free_s = max(lane.clock_free_s, clock) + seconds
        lane.queue.append((lane.clock_free_s if self.limit is None else lane.write_free_s, index))
        if self.lives.is_released[index]:
            self.state[index] = _LEAVING
            self.leaving += nbytes
        else:
            self.state[index] = _HELD
            self.held += nbytes

    def _release(self, index: int, clock: float) -> None:
        self._settle(clock)
        if self.state[index] == _HELD:
            self.state[index] = _LEAVING
            self.held -= self.lives.sizes[index]
            self.leaving += self.lives.sizes[index]
        elif self.state[index] == _HELD_WRITTEN:
            self.state[index] = _OUT
            self.held -= self.lives.sizes[index]

    # -- reads ---------------------------------------------------------------------------------------------------

    def _fetch(self, lane: _Lane, index: int, clock: float) -> None:
        """The storage is wanted: wait for it."""
        if self.state[index] == _AHEAD:
            self.ahead -= self.lives.sizes[index]
        else:
            self._read(lane, index, clock)
        self.state[index] = _BACK
        self._see_peak(clock)
        self.stall = max(self.stall, self.read_end[index] - clock)

    def _read(self, lane: _Lane, index: int, clock: float) -> None:
        nbytes = self.lives.sizes[index]
        start = max(clock + self.stall, self.write_end[index], lane.read_free_s)
        lane.read_free_s = self.read_end[index] = start + nbytes / lane.read_rate
        if self.state[index] == _LEAVING:
            self.leaving -= nbytes
        self.held += self._growth(index)

    def _growth(self, index: int) -> int:
        """Return what bringing the storage up adds to what is held."""
        return 0 if self.state[index] in (_HELD, _HELD_WRITTEN) else self.lives.sizes[index]

    def _look_ahead(self, clock: float) -> None:
        order, sizes = self.lives.order, self.lives.sizes
        while self.next_ahead < len(order):
            index = order[self.next_ahead]
            lane = self.lane_of[index]
            if lane is not None and self.state[index] != _BACK:
                if self.state[index] == _ABSENT or (self.ahead and self.ahead + sizes[index] > self.window):
                    return
                if self.ahead_limit is not None and self._growth(index) + self.held > self.ahead_limit:
                    return
                self._read(lane, index, clock)
                self.ahead += sizes[index]
                self.state[index] = _AHEAD
                if self.held + self.leaving > self.peak or self.held > self.floor:
                    self._see_peak(clock)
            self.next_ahead += 1

    # -- memory --------------------------------------------------------------------------------------------------

    def _see_peak(self, clock: float) -> None:
        self._settle(clock)
        self.peak = max(self.peak, self.held + self.leaving)
        self.floor = max(self.floor, self.held)

    def _free(self, index: int) -> None:
        if self.state[index] == _LEAVING:
            self.leaving -= self.lives.sizes[index]
        elif self.state[index] == _AHEAD:
            self.ahead -= self.lives.sizes[index]
            self.held -= self.lives.sizes[index]
        elif self.state[index] != _OUT:
            self.held -= self.lives.sizes[index]
        self.state[index] = _BACK
