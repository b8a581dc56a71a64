"""The passes whose graphs may still be alive, and what they teach the next ones when their backward is over."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.saved_pass import PassBegin, SavedPass
from lightning_ssd.memory.heap_policy import HeapMode, HeapPolicy
from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.scheduling.overhead import CpuCosts, page_faults
from lightning_ssd.scheduling.pass_kind import FinishedPass
from lightning_ssd.scheduling.pass_profile import PassProfile, ProfileBook
from lightning_ssd.scheduling.plan_cursor import PlanCursor
from lightning_ssd.scheduling.recorder import Recorder
from lightning_ssd.scheduling.scheduler import Scheduler

__all__ = ["LivePasses"]

_MAX_PASSES = 256
_SAVED_SHARE = 0.5
"""Share of the available memory that saved tensors may take while nothing is planned: gradients are to come."""
_AMPLE = 3
"""Available memory is enough for certain where it is so many times what was saved at the worst moment."""
_MAX_PLAIN = 63
"""Passes without hooks between two with them: what they save may have changed."""
_FRESH_S = 0.25
_MAX_UNENDED = 8
"""Passes, until it is said that their ends are not told. Some accumulate gradients, and tell late."""


@dataclass(slots=True)
class _Seen:
    """Facts of the passes of one signature."""

    nbytes: int
    """Saved by the largest one."""
    has_kept: bool = False
    """One that has kept all of it was counted, so that peaks have what it holds."""
    num_plain: int = 0
    """Without hooks, since the last one with them."""


class LivePasses:
    """The accounting lock is held by every caller, except of :meth:`learn`.

    Args:
        accounting: of the saved storages.
        clock: of the device.
        level: bytes of device memory in use.
        highest: the most that was in use since the process began, or since its peak began anew.
        available: bytes that could still be had; ``None``: unknown.
        scheduler: plans; ``None``: nothing is planned.
        runs_late: Python runs ahead of the device, so that what moves can pile up before any of it has gone.
        heap_policy: told before each pass whether memory is to return while it runs.
        keeps_all: no pass ever moves or recomputes anything.
        wants_hooks: whether weights go by what backward asks for, whatever is moved.
        cpu: what workers and page faults take from the computation; ``None``: nothing, because it runs on a device.
        worker_s: CPU time of the tiers' workers until now.
    """

    def __init__(
        self,
        accounting: MemoryAccounting,
        clock: Clock,
        *,
        level: Callable[[], int],
        highest: Callable[[], int],
        available: Callable[[], int | None],
        scheduler: Scheduler | None = None,
        runs_late: bool = False,
        heap_policy: HeapPolicy,
        keeps_all: bool = False,
        wants_hooks: Callable[[], bool] = lambda: False,
        cpu: CpuCosts | None = None,
        worker_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.book = ProfileBook()
        self._accounting = accounting
        self._clock = clock
        self._level = level
        self._highest = highest
        self.available = available
        self._scheduler = scheduler
        self._runs_late = runs_late
        self._heap_policy = heap_policy
        self._passes: deque[SavedPass] = deque(maxlen=_MAX_PASSES)
        # The oldest go, where the program never calls end_backward().
        self._finished: deque[FinishedPass] = deque(maxlen=_MAX_PASSES)
        self._may_be_forgotten = scheduler is not None
        self._kept_anyway = keeps_all
        self._wants_hooks = wants_hooks
        self._cpu = cpu
        self._worker_s = worker_s
        self._seen: dict[Hashable, _Seen] = {}
        self._looked_s = 0.0
        self._last_available: int | None = None
        self._last_level = 0

    def __iter__(self) -> Iterator[SavedPass]:
        return iter(self._passes)

    def __reversed__(self) -> Iterator[SavedPass]:
        return reversed(self._passes)

    def enter_plain(self, current: SavedPass) -> None:
        """A forward begins that may have no hooks, whatever is planned. Nothing is learnt from it."""
        self.finish(all_freed=True)
        self.prune()
        current.is_plain = True
        self._accounting.counters.num_plain_passes += 1
        if current not in self._passes:
            self._passes.append(current)

    def enter(self, current: SavedPass) -> None:
        """A forward begins.

        Raises:
            RuntimeError: it was a pass already, whose backward is over.
        """
        self.finish(all_freed=True)
        self.prune()
        if current.is_finished:
            raise RuntimeError(
                "this saved_tensors() context was entered before, and the backward of that pass is over; "
                "call offloader.saved_tensors() anew for each forward"
            )
        if current.begin is not None:  # another forward of the same pass goes on like the one before
            if not current.is_plain:
                self._set_heap_mode(current.cursor, self._memory_of(current.signature))
            if current not in self._passes:
                self._passes.append(current)
            return
        counters, level_bytes = self._accounting.counters, 0
        if self._scheduler is not None and self._scheduler.returns_memory(current.signature):
            self._heap_policy.enter(HeapMode.MAP_EACH)  # what is free in the heap is not needed
        available_bytes = self._memory_of(current.signature)
        if self._scheduler is not None:
            level_bytes = self._last_level - counters.resident_bytes
            current.cursor, wants_trace = self._scheduler.cursor(
                current.signature,
                level_bytes=level_bytes,
                resident_bytes=counters.resident_bytes,
                available_bytes=available_bytes,
            )
            if wants_trace and not self._saves_nothing(current.signature):
                current.recorder = Recorder(self._clock, self._level)
        elif self._runs_late and not self._kept_anyway and available_bytes is not None:
            current.limit_bytes = counters.resident_bytes + int(_SAVED_SHARE * available_bytes)
        may_keep_all = self._kept_anyway if current.cursor is None else current.recorder is None
        if may_keep_all and self._needs_no_hooks(current.signature, current.cursor):
            current.is_plain = True
            counters.num_plain_passes += 1
        self._set_heap_mode(current.cursor, available_bytes)
        current.begin = self._begin_of(current, level_bytes)
        if not current.is_plain:
            self._accounting.window_peak_bytes = counters.resident_bytes
        if current not in self._passes:
            self._passes.append(current)

    def _begin_of(self, current: SavedPass, level_bytes: int) -> PassBegin:
        counters = self._accounting.counters
        is_limited = current.cursor is not None and current.cursor.limits_total_memory
        return PassBegin(
            stamp=self._clock.stamp(),
            level_bytes=level_bytes,
            written_bytes=counters.bytes_written,
            read_bytes=counters.bytes_read,
            host_bytes=counters.bytes_host,
            num_packed=counters.num_packed,
            hook_s=counters.hook_s,
            worker_s=0.0 if self._cpu is None else self._worker_s(),
            num_faults=0 if self._cpu is None else page_faults(),
            highest_bytes=self._highest() if is_limited else 0,
        )

    def _memory_of(self, signature: Hashable) -> int | None:
        """Return what is available now, or was a moment ago: asking takes as long as all else that a pass costs once.

        Always now before a new kind of pass; under a limit; and where a pass is alive: what those without hooks have
        saved since is counted nowhere else.

        ``_last_level`` is of the same moment.
        """
        now_s = time.perf_counter()
        is_new = signature not in self._seen or self._passes or now_s - self._looked_s > _FRESH_S
        if is_new or self._runs_late or (self._scheduler is not None and self._scheduler.limits_memory):
            self._looked_s = now_s
            if self._scheduler is not None or self._heap_policy.is_ours or self._runs_late:
                self._last_available = self.available()
            if self._scheduler is not None:
                self._last_level = self._level()
            self._count_free_heap()
        return self._last_available

    def _count_free_heap(self) -> None:
        """Add what malloc holds back: it is available to this process. Asked for where the rest may not be enough."""
        saved_bytes = self._accounting.most_saved_bytes
        if self._last_available is not None and self._last_available < _AMPLE * saved_bytes:
            free_bytes = self._heap_policy.free_bytes()
            self._last_available += free_bytes
            self._last_level = max(self._last_level - free_bytes, 0)

    def _needs_no_hooks(self, signature: Hashable, cursor: PlanCursor | None = None) -> bool:
        """Whether nothing could be learnt or moved: passes like it have been counted, and all that they saved stays.

        Only by signature are passes known to be alike. Now and then one is looked at again.
        """
        seen = None if signature is None else self._seen.get(signature)
        is_looked_at = self._wants_hooks() or self._accounting.recorder is not None
        if seen is None or is_looked_at or seen.num_plain >= _MAX_PLAIN:
            return False
        if (seen.nbytes and not seen.has_kept) or not (cursor is None or cursor.keeps(seen.nbytes)):
            return False
        seen.num_plain += 1
        return True

    def _has_saved(self, current: SavedPass) -> bool:
        """Whether it has saved tensors, if only small ones: without gradients none is, and nothing can be learnt."""
        return current.begin is not None and self._accounting.counters.num_packed > current.begin.num_packed

    def _saves_nothing(self, signature: Hashable) -> bool:
        """Whether passes like it have nothing that could move."""
        seen = None if signature is None else self._seen.get(signature)
        return seen is not None and seen.nbytes == 0 and seen.num_plain < _MAX_PLAIN

    def count_again(self) -> None:
        """Peaks begin anew: the next pass of each kind is counted, so that they have what it saves."""
        self._seen.clear()

    def _see(self, current: SavedPass) -> None:
        """A pass with hooks has told what its kind saves."""
        if current.signature is not None and not current.has_failed:
            if len(self._seen) >= _MAX_PASSES:
                self._seen.clear()
            known = self._seen.get(current.signature) or _Seen(0)
            nbytes = sum(current.sizes)
            has_kept = self._kept_anyway if current.cursor is None else current.cursor.keeps(nbytes)
            self._seen[current.signature] = _Seen(max(nbytes, known.nbytes), has_kept or known.has_kept)

    def _set_heap_mode(self, cursor: PlanCursor | None, available_bytes: int | None) -> None:
        if (mode := _heap_mode(cursor)) in (HeapMode.TRIM, HeapMode.MAP_EACH):
            self._expect_moving(cursor, available_bytes)
        self._heap_policy.enter(mode)

    def _expect_moving(self, cursor: PlanCursor | None, available_bytes: int | None) -> None:
        # Without a plan, what the last pass took: none that is like it is the worse for it.
        peak_bytes = (0 if cursor is None else cursor.target_bytes) or self._accounting.window_peak_bytes
        room_bytes = None if available_bytes is None else int(_SAVED_SHARE * available_bytes)
        limit_bytes = None if cursor is None else cursor.limit_bytes
        if (
            limit_bytes is not None
            and cursor is not None
            and cursor.followed is not None
            and cursor.limits_total_memory
        ):
            room_bytes = limit_bytes  # what else needs memory is known
        self._heap_policy.expect(peak_bytes, room_bytes)

    def stalled(self, begin: Stamp, end: Stamp) -> None:
        """Note a wait for a transfer: every pass that is under way has waited."""
        if self._scheduler is None:
            return  # no plan wants it
        for current in self._passes:
            if not current.is_finished:
                current.stalls.append((begin, end))

    @property
    def num_open(self) -> int:
        """How many are under way."""
        return sum(not current.is_finished for current in self._passes)

    @property
    def are_plain(self) -> bool:
        """Whether all of them run without hooks."""
        return all(current.is_plain for current in self._passes)

    def end_backward(self, write_rate: float, read_rate: float) -> list[PassProfile]:
        """A backward is over; return what its passes teach."""
        teaching = [p for p in self._passes if p.order and not p.is_spoilt]
        found = [p.profile(write_rate=write_rate, read_rate=read_rate) for p in teaching]
        profiles = [profile for profile in found if profile is not None]
        for profile in profiles:
            self.book.add(profile)
        self.finish(all_freed=False)
        return profiles

    def finish(self, *, all_freed: bool) -> None:
        """Sum up passes that are over.

        Args:
            all_freed: only those whose graphs are gone; else a backward has just ended, and those that were in it are.
        """
        for current in [] if all_freed else self._passes:
            if current.is_plain and current.is_over and not current.is_finished:
                current.is_finished = True
                seen = self._seen.get(current.signature)  # it keeps all that passes like it have saved
                self._accounting.pass_ended(self._accounting.counters.saved_peak_bytes if seen is None else seen.nbytes)
        for current in self._passes:
            if not (all_freed or current.records or current.is_plain) and current.is_over and self._has_saved(current):
                self._see(current)
            if current.is_finished or not current.is_complete:
                continue
            if all_freed and not current.is_freed:
                continue
            current.is_finished = True
            self._see(current)
            self._accounting.pass_ended(self._accounting.window_peak_bytes if current.sizes else 0)
            if current.begin is None:
                continue
            cpu_s = self._cpu_s(current.begin)
            self._accounting.counters.cpu_s += cpu_s
            if current.cursor is not None and self._scheduler is not None:
                self._finished.append(self._sum_up(current, current.cursor, current.begin, cpu_s))

    def _moved_bytes(self, begin: PassBegin) -> int:
        counters = self._accounting.counters
        return counters.bytes_written - begin.written_bytes + counters.bytes_host - begin.host_bytes

    def _cpu_s(self, begin: PassBegin) -> float:
        if self._cpu is None or not self._moved_bytes(begin):
            return 0.0
        return self._cpu.seconds(
            worker_s=self._worker_s() - begin.worker_s, num_faults=page_faults() - begin.num_faults
        )

    def _sum_up(self, current: SavedPass, cursor: PlanCursor, begin: PassBegin, cpu_s: float) -> FinishedPass:
        counters = self._accounting.counters
        # From now on it is read outside of the lock: a graph that goes on elsewhere tells it nothing more.
        recorder, current.recorder = current.recorder, None
        end = self._clock.stamp()
        if recorder is not None:
            recorder.backward_ended()
            recorder.stalls = tuple(current.stalls)
        highest_bytes = self._highest() if begin.highest_bytes else 0
        return FinishedPass(
            signature=current.signature,
            sizes=tuple(current.sizes),
            cursor=cursor,
            recorder=recorder,
            refused=frozenset() if recorder is None else current.refused_blocks,
            clock=self._clock,
            begin=begin.stamp,
            end=end,
            level_bytes=begin.level_bytes,
            stalls=tuple(current.stalls),
            peak_bytes=self._accounting.window_peak_bytes,
            written_bytes=counters.bytes_written - begin.written_bytes,
            read_bytes=counters.bytes_read - begin.read_bytes,
            moved_bytes=self._moved_bytes(begin),
            hook_s=counters.hook_s - begin.hook_s,
            cpu_s=cpu_s,
            highest_bytes=highest_bytes if highest_bytes > begin.highest_bytes else 0,
        )

    def learn(self) -> None:
        """Hand finished passes to the scheduler, one thread at a time.

        Not under the accounting lock: other processes may have to be waited for.

        Raises:
            BudgetError: the budget cannot be kept by any plan.
        """
        self._may_be_forgotten = False
        if self._scheduler is not None:
            self._scheduler.learn(self._finished)

    def warn_of_forgotten_ends(self) -> None:
        """Once, where backwards have run and none was ever ended. Not under the lock: a warning may run any code."""
        if self._may_be_forgotten and len(self._finished) >= _MAX_UNENDED:
            self._may_be_forgotten = False
            warnings.warn(
                f"{len(self._finished)} passes have run, and end_backward() was never called, so that no plan can be "
                "made, and whatever is large enough moves. Call offloader.end_backward() after each loss.backward()",
                stacklevel=4,
            )

    def prune(self) -> None:
        """Forget passes whose graphs are gone; of those without hooks, that is unknown before a backward has ended."""
        live = [p for p in self._passes if (p.is_plain and not p.is_finished) or not p.is_freed]
        self._passes.clear()
        self._passes.extend(live)


def _heap_mode(cursor: PlanCursor | None) -> HeapMode:
    """Return what becomes of memory that a pass frees; without a cursor it moves what is large enough."""
    if cursor is None:
        return HeapMode.TRIM
    if not cursor.may_move:
        return HeapMode.RELAXED
    return HeapMode.MAP_EACH if cursor.returns_memory else HeapMode.TRIM
