"""Plays a pass against the tiers: when each transfer runs, who waits for it, what is in memory.

The compute runs on the trace's stall-free clock; the time of the pass is that clock plus all stalls so far. This is
the pass as the tensor cache runs it, event by event:

* **Pack.** Before a storage is taken in, it must fit under the limit; else the training thread waits while there are
  writes left that will make room. If none are left it is taken in all the same. Then, if it is to move, its write is
  queued: each tier has one write channel, first in, first out. The memory goes when the write has ended and the last
  use outside of autograd is over.
* **Unpack.** What is still in memory is handed over, and its write cancelled unless it has begun (*forwarding*). What
  is gone is read at once, and the training thread waits for it. What was brought up before is waited for.
* **Look ahead**, after each unpack: walk the order of unpacks and bring up what comes next, while it fits into the
  window (one that is larger than the whole window goes alone) and under the limit. A read holds its memory from its
  issue on. What has not left yet is held back instead; it counts as brought up.
* **Free.** The memory goes back; a queued write is cancelled.

Source of the idea: TERAIO's simulator (arXiv 2506.06472, section on the performance roofline).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_ssd.planning.lifetimes import PACK, RELEASE, UNPACK, Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, Prediction, TierRates

__all__ = ["LEAST_SHARE", "Replay", "moving_cost_s", "predict"]

LEAST_SHARE = 0.1
"""Share of a traced pass' length: below this no cost of moving, learnt from times that scatter, makes a pass."""


def predict(
    lives: Lifetimes,
    placements: Sequence[Placement],
    machine: Machine,
    *,
    limit_bytes: int | None,
    ahead_bytes: int,
) -> Prediction:
    """Play a pass.

    Args:
        lives: of the pass.
        placements: one per storage: KEEP, HOST or SSD. (``recompute_trace.py`` makes the trace of recomputed blocks.)
        machine: the tiers.
        limit_bytes: of resident saved activations; ``None``: none.
        ahead_bytes: how much may be brought up before it is asked for.

    Raises:
        ValueError: the placements do not fit the trace, or name a tier that is not there or whose rates are unknown.
    """
    return Replay(lives, placements, machine, limit_bytes, ahead_bytes).play()


# Where the bytes of one storage are. Plain integers, because they are compared a million times.
_ABSENT = 0  # not packed yet
_READY = 1  # in memory, and stays there; the following lead from top to bottom
_LEAVING = 2  # in memory; its write is queued or under way
_WRITTEN = 3  # in memory because its last use is not over; its write has ended
_OUT = 4  # in the tier alone
_AHEAD = 5  # brought up, or held back, before it was asked for
_FREED = 6


class _Lane:
    """Both channels of one tier."""

    __slots__ = (
        "begun",
        "free_s",
        "placement",
        "queue",
        "read_bytes",
        "read_free_s",
        "read_rate",
        "write_bytes",
        "write_rate",
    )

    def __init__(self, placement: Placement, rates: TierRates) -> None:
        self.placement = placement
        self.write_rate, self.read_rate = rates.write_bytes_per_s, rates.read_bytes_per_s
        self.queue: deque[tuple[int, float]] = deque()  # storage, and when it was queued
        self.begun = False  # the write at the head
        self.free_s = self.read_free_s = float("-inf")
        self.write_bytes = self.read_bytes = 0


class Replay:
    """One pass being played. Times are those of the pass, stalls included, unless called ``clock``.

    Tests watch it by overriding ``_note``, ``_occupy`` and ``_leave``.
    """

    def __init__(
        self, lives: Lifetimes, placements: Sequence[Placement], machine: Machine, limit: int | None, ahead: int
    ) -> None:
        self.lives, self.limit, self.window = lives, limit, ahead
        self.lanes, self.lane_of = _lanes(placements, machine, len(lives.sizes))
        self.cost_s = moving_cost_s(lives, placements, machine)
        self.state = [_ABSENT] * len(lives.sizes)
        self.released = list(lives.is_released)
        self.read_end = [0.0] * len(lives.sizes)
        self.resident = self.peak = self.ahead = self.next_ahead = 0
        self.stall = 0.0

    def play(self) -> Prediction:
        """From the first event to the last."""
        state, lane_of, sizes = self.state, self.lane_of, self.lives.sizes
        lanes, limit = self.lanes, self.limit
        for clock, kind, index in self.lives.events:
            now = clock + self.stall
            for lane in lanes:
                if lane.queue:
                    self._settle(lane, now)
            if kind == PACK:
                if limit is not None and self.resident + sizes[index] > limit:
                    now = self._wait_for_room(index, now)
                self._occupy(index, now)
                state[index] = _READY
                if lane_of[index] is not None:
                    state[index] = _LEAVING
                    lane_of[index].queue.append((index, now))  # type: ignore[union-attr]
            elif kind == UNPACK:
                self._unpack(index, now)
            elif kind == RELEASE:
                self.released[index] = True
                if state[index] == _WRITTEN:
                    self._leave(index, now, _OUT)
            else:
                self._free(index, now)
        by_placement = {lane.placement: lane for lane in self.lanes}
        ssd, host = by_placement.get(Placement.SSD), by_placement.get(Placement.HOST)
        return Prediction(
            step_s=self.lives.end_s + self.cost_s + self.stall,
            stall_s=self.stall,
            peak_bytes=self.peak,
            written_bytes=0 if ssd is None else ssd.write_bytes,
            read_bytes=0 if ssd is None else ssd.read_bytes,
            host_bytes=0 if host is None else host.write_bytes,
        )

    # -- writes --------------------------------------------------------------------------------------------------

    def _settle(self, lane: _Lane, now: float) -> None:
        """Let the writes run until ``now``."""
        queue, state = lane.queue, self.state
        while queue:
            index, queued = queue[0]
            if not lane.begun and state[index] != _LEAVING:  # cancelled: takes no time of the channel
                queue.popleft()
                continue
            start = max(lane.free_s, queued)
            if start > now:
                return
            end = start + self.lives.sizes[index] / lane.write_rate
            if not lane.begun:
                lane.begun = True
                lane.write_bytes += self.lives.sizes[index]
                self._note("write", start, end, index)
            if end > now:
                return
            queue.popleft()
            lane.begun, lane.free_s = False, end
            if state[index] == _LEAVING:
                if self.released[index]:
                    self._leave(index, end, _OUT)
                else:
                    state[index] = _WRITTEN

    def _next_end(self, lane: _Lane) -> float | None:
        """When the next write ends that will make room; ``None``: there is none."""
        if not any(self.state[index] == _LEAVING for index, _ in lane.queue):
            return None
        index, queued = next(q for q in lane.queue if lane.begun or self.state[q[0]] == _LEAVING)
        return max(lane.free_s, queued) + self.lives.sizes[index] / lane.write_rate

    def _wait_for_room(self, index: int, now: float) -> float:
        """Until the storage fits, or no write is left. Returns the time then."""
        begin, limit = now, self.limit
        while limit is not None and self.resident + self.lives.sizes[index] > limit:
            ends = [end for end in map(self._next_end, self.lanes) if end is not None]
            if not ends:
                break
            now = max(now, min(ends))
            for lane in self.lanes:
                self._settle(lane, now)
        self._stalled(begin, now, index, "room")
        return now

    # -- reads ---------------------------------------------------------------------------------------------------

    def _unpack(self, index: int, now: float) -> None:
        """Hand the storage over, then look ahead."""
        state, begin = self.state, now
        if state[index] == _OUT:
            now = self._read(index, now)
        elif state[index] == _AHEAD:
            self.ahead -= self.lives.sizes[index]
            now = max(now, self.read_end[index])
        state[index] = _READY
        if now > begin:
            self._stalled(begin, now, index, "late")
            for lane in self.lanes:
                self._settle(lane, now)
        self.next_ahead = max(self.next_ahead, self.lives.position[index] + 1)
        if self.lanes:
            self._look_ahead(now)

    def _read(self, index: int, now: float) -> float:
        """Issue a read. Returns its end."""
        lane = self.lane_of[index]
        if lane is None:
            raise RuntimeError(f"storage {index} is kept, yet it has left memory; report it")
        self._occupy(index, now)
        start = max(now, lane.read_free_s)
        lane.read_free_s = end = start + self.lives.sizes[index] / lane.read_rate
        lane.read_bytes += self.lives.sizes[index]
        self._note("read", start, end, index)
        return end

    def _look_ahead(self, now: float) -> None:
        order, state, sizes = self.lives.order, self.state, self.lives.sizes
        while self.next_ahead < len(order):
            index = order[self.next_ahead]
            where = state[index]
            if where in (_OUT, _LEAVING, _WRITTEN):
                if self.ahead and self.ahead + sizes[index] > self.window:
                    return
                if where == _OUT:
                    if self.limit is not None and self.resident + sizes[index] > self.limit:
                        return
                    self.read_end[index] = self._read(index, now)
                self.ahead += sizes[index]
                state[index] = _AHEAD
            elif where == _ABSENT and self.lane_of[index] is not None:
                return
            self.next_ahead += 1

    # -- memory --------------------------------------------------------------------------------------------------

    def _occupy(self, index: int, now: float) -> None:
        self.resident += self.lives.sizes[index]
        if self.resident > self.peak:
            self.peak = self.resident

    def _leave(self, index: int, now: float, state: int) -> None:
        self.state[index] = state
        self.resident -= self.lives.sizes[index]

    def _free(self, index: int, now: float) -> None:
        if self.state[index] == _AHEAD:
            self.ahead -= self.lives.sizes[index]
        if self.state[index] == _OUT:
            self.state[index] = _FREED
        else:
            self._leave(index, now, _FREED)

    def _stalled(self, begin: float, end: float, index: int, reason: str) -> None:
        self.stall += end - begin
        if end > begin:
            self._note(reason, begin, end, index)

    def _note(self, what: str, start: float, end: float, index: int) -> None:
        """Override to see moves ("write", "read") as they are issued, and stalls ("room", "late")."""


def moving_cost_s(lives: Lifetimes, placements: Sequence[Placement], machine: Machine) -> float:
    """Return what moving takes besides transfers (seconds), more or less than in the pass that was traced.

    However wrong the cost may be, a tenth of the traced pass remains.
    """
    moved = sum(n for n, placement in zip(lives.sizes, placements, strict=True) if placement is not Placement.KEEP)
    return max(machine.cost_s_per_byte * (moved - lives.moved_bytes), (LEAST_SHARE - 1) * lives.end_s)


def _lanes(placements: Sequence[Placement], machine: Machine, count: int) -> tuple[list[_Lane], list[_Lane | None]]:
    """The tiers in use, and the tier of each storage."""
    if len(placements) != count:
        raise ValueError(f"{len(placements)} placements for {count} storages; give one for each")
    lanes: dict[Placement, _Lane | None] = {Placement.KEEP: None}
    # In a fixed order: a set of strings has another one in each process.
    for placement in [p for p in Placement if p in set(placements) and p is not Placement.KEEP]:
        rates = {Placement.SSD: machine.ssd, Placement.HOST: machine.host}.get(placement)
        if rates is None:
            raise ValueError(f"placement {placement!r}; allowed here: KEEP and the tiers of {machine!r}")
        if rates.write_bytes_per_s <= 0 or rates.read_bytes_per_s <= 0:
            raise ValueError(f"placement {placement!r}, whose rates are {rates!r}; give rates above 0")
        lanes[placement] = _Lane(placement, rates)
    return [lane for lane in lanes.values() if lane is not None], [lanes[p] for p in placements]
