"""One move in flight, and the worker threads that carry moves out.

A :class:`Transfer` is cut into chunks, so that several workers share a large one and an urgent one overtakes at
chunk borders. The queue knows nothing of tensors or files; ``tiers/jobs.py`` says what a chunk does.

A lane is one drive, with workers of its own. A chunk that may use any drive is taken by the first worker that is free,
so that each drive gets as much as it can move, whatever its speed. A chunk that needs one drive waits for its workers.

Note [a slow drive leaves the rest]: the last chunks decide when a move ends. A drive that is much slower than another
one takes none of them that the others would have done sooner. The fastest one takes whatever there is. Which one that
is may change when a chunk ends: then all look again. What a drive has taken for a chunk is forgotten little by little
while it leaves chunks to others: it may have been a large chunk, or one hiccup, and only a chunk shows that it is over.
One at a time: of two that a drive took at once, which was as slow as before, the others waited for the second one.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from lightning_ssd.common.profiling import span, spanned
from lightning_ssd.common.waiting import Changes, Latch
from lightning_ssd.errors import OffloaderClosedError, StorageError, copy_of, forget_frames
from lightning_ssd.telemetry.events import Direction, EventLog, TransferEvent
from lightning_ssd.tiers.read_priority import UrgentGate, patience_s

__all__ = ["Chunk", "Settle", "Transfer", "TransferQueue"]

_log = logging.getLogger(__name__)

Settle = Callable[[], BaseException | None]
"""Waits for what still goes on in the device, and returns what went wrong there. Must not raise."""
Chunk = Callable[[], Settle | None]
"""Part of a move. What it returns, if anything, the same worker calls when the part counts as done (and the move, if it
was the last part)."""
_T = TypeVar("_T")
_PATIENCE_S = 60.0
_SLOW = 2.0
"""A drive is much slower than another one if a chunk takes so many times as long."""
_FORGETS = 1 / 32
"""Part of what a drive is slower than the fastest one that is forgotten with each chunk that it has left to others."""


class Transfer(ABC):
    """One move: what it is, whether it has ended, and how.

    A subclass says what happens. Its methods run in a worker, never in the thread that submitted.
    """

    lanes: Sequence[int] | None = None
    """The lane of each chunk, known when :meth:`begin` has returned; ``None``: any worker may run any of them."""
    failed_nbytes = 0
    """Bytes of parts that have failed, of which their owners know."""
    label = ""
    """The name of what moves, for messages."""
    outlasts = False
    """Whether the move's event goes on, as its busy time does, until the device is done with the last chunk."""

    def __init__(self, direction: Direction, nbytes: int, *, urgent: bool = False) -> None:
        self.direction: Direction = direction
        self.nbytes = nbytes
        self.urgent = urgent
        self.start_s = 0.0
        self.error: BaseException | None = None
        self._fault: BaseException | None = None
        self._ended = Latch()
        self._queue: TransferQueue | None = None
        self._has_waited = False
        # The queue's lock guards these three.
        self._chunks: dict[int | None, list[Chunk]] | None = None  # by lane, the first one last
        self._num_unfinished = 0
        self._seq = 0

    @abstractmethod
    def begin(self) -> Sequence[Chunk]:
        """Return the chunks to run. May raise: the move failed."""

    @abstractmethod
    def finish(self, error: BaseException | None) -> None:
        """Called once, after the last chunk or the first failure, or when the queue closes before the move began.

        Must not raise: what it raises becomes the move's error, and is raised where the queue is flushed or closed.
        """

    def shares(self) -> Sequence[tuple[int | None, int]]:
        """Return the drives that have moved it, each with its bytes; asked at the end."""
        return [(None, self.nbytes)]

    @contextmanager
    def not_busy(self, *, has_begun: bool = False) -> Iterator[None]:
        """Around a worker's wait for something other than the move itself (the producer, say).

        It is no busy time; nor, the first time and unless bytes have moved (``has_begun``), part of the move's event.
        """
        queue = self._queue
        if queue is None:
            raise RuntimeError("not_busy() is for methods that a worker calls; submit the transfer first")
        with queue._lock:
            queue._count_busy(-1)
        try:
            yield
        finally:
            with queue._lock:
                queue._count_busy(1)
            if not self._has_waited and not has_begun:
                self._has_waited = True
                self.start_s = time.perf_counter()

    @property
    def is_queued(self) -> bool:
        """Whether a queue may have it."""
        return self._queue is not None

    @property
    def ended(self) -> bool:
        """Whether :meth:`finish` has run."""
        return self._ended.is_open

    @spanned("lightning_ssd::stall")
    def wait(self) -> None:
        """Block until the move has ended. The caller looks at ``error`` itself.

        Raises:
            BaseException: what :meth:`finish` has raised, so that its owner may not know of the end.
        """
        self._ended.wait()
        if self._fault is not None:
            raise copy_of(self._fault)


class TransferQueue:
    """Workers of one direction. Urgent moves first, else in the order of submission.

    Args:
        direction: what the workers do, for thread names and events.
        num_workers: moves (or chunks of one) under way at once, in each lane.
        events: receives one ``TransferEvent`` per finished move.
        tier: the tier's name, for events and thread names.
        announces: told of urgent moves.
        yields_to: before each chunk, wait a while for the urgent moves announced there.
        num_lanes: drives.
    """

    def __init__(
        self,
        direction: Direction,
        num_workers: int,
        events: EventLog,
        *,
        tier: str = "ssd",
        num_lanes: int = 1,
        announces: UrgentGate | None = None,
        yields_to: UrgentGate | None = None,
    ) -> None:
        self._events = events
        self._direction = direction
        self._tier = tier
        self._announces = announces
        self._yields_to = yields_to
        # Guards the heaps and each transfer's chunk list. Held only for bookkeeping, never during I/O nor while
        # calling into a transfer, so that it can be taken under any lock of the layers above (never the reverse).
        self._lock = threading.Lock()
        self._idle = Changes(self._lock)
        # Wakes workers of a lane: one token, or more, for each thing to do. Put there before it, or an interrupt in
        # between would leave a chunk that no worker takes.
        self._tokens: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(num_lanes)]
        # What each lane alone may do; under None what all may.
        self._heaps: dict[int | None, list[tuple[int, int, Transfer]]] = {
            lane: [] for lane in (None, *range(num_lanes))
        }
        self._lane = threading.local()
        self._chunk_s = [0.0] * num_lanes  # that a lane takes for one of the chunks that it moves at a time; 0: unknown
        self._num_moving = [0] * num_lanes
        self._is_forgotten = [False] * num_lanes  # whether some of that has been forgotten since the last chunk
        self._num_left = [0] * num_lanes  # tokens that a lane has taken, and has left the chunk
        self._seq = itertools.count(1)
        self._num_active = 0  # workers that have claimed something; of these, those that wait are not busy
        self._num_done = 0  # chunks
        self._busy = 0, 0.0, 0.0  # workers now, since when any, seconds before; in one piece: progress() takes no lock
        self._cpu_s = 0.0
        self._moved_bytes = 0
        self._closed = False
        self._fault: BaseException | None = None
        self._is_fault_told = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(i % num_lanes,), name=f"lightning_ssd-{tier}-{direction}-{i}", daemon=True
            )
            for i in range(num_workers * num_lanes)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # there can be no more threads, or the user has pressed Ctrl-C while one started
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def submit(self, transfer: Transfer) -> None:
        """Queue a move. Raises OffloaderClosedError after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise OffloaderClosedError("a transfer was submitted after the offloader was closed; open it again")
            transfer._queue = self
            transfer._seq = next(self._seq)
            self._wake(None)
            self._push(transfer, None)
            if transfer.urgent:
                self._announce(transfer)

    def promote(self, transfer: Transfer) -> None:
        """Make a queued move urgent: the training thread waits for it."""
        with self._lock:
            if not transfer.urgent and not transfer.ended:
                # Second entries with a better rank; the first ones are skipped when they surface.
                transfer.urgent = True
                for lane in (None,) if transfer._chunks is None else transfer._chunks:
                    self._wake(lane)
                    self._push(transfer, lane)
                self._announce(transfer)

    def progress(self) -> tuple[int, float]:
        """Return the bytes moved so far, and the seconds in which at least one worker was busy. Takes no lock."""
        now_s = time.perf_counter()  # first: else it may be later than what ends the busy time, and the sum would fall
        num_busy, since_s, busy_s = self._busy
        return self._moved_bytes, busy_s + (max(now_s - since_s, 0.0) if num_busy else 0.0)

    @property
    def cpu_s(self) -> float:
        """CPU time of the workers in what they have done."""
        return self._cpu_s

    def wait_idle(self) -> None:
        """Block until every submitted move has ended.

        Raises:
            BaseException: what a move has raised where it must not: its owner may not know of its end.
        """
        self._idle.until(lambda: True if not self._num_active and not self._has_any_work() else None)
        fault = self._fault
        self._is_fault_told = fault is not None
        if fault is not None:
            raise copy_of(fault)

    def close(self) -> None:
        """Finish what is under way, discard what has not begun, join the workers. Idempotent.

        Raises:
            BaseException: as :meth:`wait_idle`, once everything is done, unless that has told it; or what failed on the
                device after it had been handed over.
            StorageError: a drive has not answered for a minute. Its thread is left to itself.
        """
        with self._lock:
            self._closed = True
            # A transfer that has begun still needs its remaining chunks: workers drain those before they leave.
            heap = self._heaps[None]
            unbegun = {id(t): t for _, _, t in heap if t._chunks is None and not t.ended}
            heap = self._heaps[None] = [entry for entry in heap if id(entry[2]) not in unbegun]
            heapq.heapify(heap)
            self._wake(None)
            self._idle.tell()
        for transfer in unbegun.values():
            closed = OffloaderClosedError(f"the offloader was closed before this {self._direction} began")
            self._finish(transfer, closed)
        self._join()
        with self._lock:
            fault = None if self._is_fault_told else self._fault
            self._is_fault_told = True
        if fault is not None:
            raise copy_of(fault)

    def _join(self) -> None:
        done = self._num_done
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            while thread.is_alive():
                if self._num_done == done:
                    raise StorageError(
                        f"closing has waited {_PATIENCE_S:.0f} s for {thread.name}, which moves no byte "
                        f"({self._num_active} moves are under way); it ends when the drive answers. See dmesg"
                    )
                done = self._num_done
                thread.join(_PATIENCE_S)

    def _announce(self, transfer: Transfer) -> None:
        if self._announces is not None:
            self._announces.enter(transfer)

    def _finish(self, transfer: Transfer, error: BaseException | None) -> None:
        """The move has ended, however: wake who waits. Together with the gate, or a promotion could come between."""
        _, fault = _attempt(partial(transfer.finish, error))
        if fault is not None:
            self._keep_fault(transfer, fault)
        with self._lock:
            transfer._ended.open()
            if transfer.urgent and self._announces is not None:
                self._announces.leave(transfer)

    # -- everything below runs in the workers ------------------------------------------------------------------

    @property
    def lane(self) -> int:
        """The lane of the worker that asks."""
        lane: int = self._lane.number
        return lane

    def _push(self, transfer: Transfer, lane: int | None) -> None:
        heapq.heappush(self._heaps[lane], (0 if transfer.urgent else 1, transfer._seq, transfer))

    def _wake(self, lane: int | None) -> None:
        """Tell a worker of a lane, or one of each lane where any may do it."""
        for tokens in self._tokens if lane is None else (self._tokens[lane],):
            tokens.put(None)

    def _best(self, lane: int | None) -> tuple[int, int, Transfer] | None:
        """Drop entries that have nothing left to start; return the best one that remains."""
        heap = self._heaps[lane]
        while heap:
            transfer = heap[0][2]
            exhausted = transfer._chunks is not None and not transfer._chunks.get(lane)
            if not exhausted and not transfer.ended:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _has_any_work(self) -> bool:
        return any(self._best(lane) is not None for lane in self._heaps)

    def _next(self, lane: int, chunk_s: float) -> tuple[Transfer, Chunk | None] | None:
        """Claim a chunk of the best transfer, or the right to begin it; ``None`` when the queue has closed."""
        gate, yielded, tokens = self._yields_to, False, self._tokens[lane]
        while True:
            tokens.get()
            with self._lock:
                keys = (lane,) if self._leaves_the_rest(lane) else (lane, None)
                found = [(best[:2], key) for key in keys if (best := self._best(key)) is not None]
                if not found:
                    if self._closed and not self._num_active:  # else a move that begins may bring chunks for this lane
                        tokens.put(None)  # for the next one
                        return None
                    yielded = False  # what came meanwhile gives way anew
                    self._num_left[lane] += len(keys) == 1
                    continue
                if gate is None or gate.num_urgent == 0 or yielded or self._closed:
                    return self._claim(min(found, key=lambda one: one[0])[1])
            # Before anything is claimed, so that waiting is not counted as busy, and what is cancelled meanwhile ends.
            best = None  # another worker may take it and all else, while this one waits for a token
            tokens.put(None)
            gate.wait(patience_s(chunk_s))
            yielded = True

    def _leaves_the_rest(self, lane: int) -> bool:
        """Whether the others would have done all before this lane were done with one. With the lock held."""
        mine, fastest = self._chunk_s[lane], min(self._chunk_s)
        is_slow = 0 < _SLOW * fastest <= mine
        if not is_slow or self._direction == "read" or self._closed:  # what is read lies where it lies
            return False
        if self._is_forgotten[lane] and self._num_moving[lane]:  # one chunk shows whether it still is
            return True
        left = [transfer._chunks for _, _, transfer in self._heaps[None] if not transfer.ended]
        num_left = sum(1 if chunks is None else len(chunks.get(None, ())) for chunks in left)
        others_per_s = sum(1 / chunk_s for chunk_s in self._chunk_s) - 1 / mine
        return num_left < (self._num_moving[lane] + 1) * mine * others_per_s

    def _look_again(self) -> None:
        """Wake the lanes that have left chunks, and leave them no more. With the lock held; a chunk has ended."""
        fastest = min(self._chunk_s)
        for lane, num in enumerate(self._num_left):
            if num and not self._num_moving[lane]:  # else a chunk is to show it
                self._chunk_s[lane] -= _FORGETS * (self._chunk_s[lane] - fastest)
                self._is_forgotten[lane] = True
            if num and not self._leaves_the_rest(lane):
                self._num_left[lane] = 0
                for _ in range(num):
                    self._wake(lane)

    def _claim(self, lane: int | None) -> tuple[Transfer, Chunk | None]:
        """With the lock held, and work there."""
        transfer = self._heaps[lane][0][2]
        self._num_active += 1
        self._count_busy(1)
        if transfer._chunks is None:
            heapq.heappop(self._heaps[lane])
            transfer._chunks = {}  # claimed: a second heap entry of a promoted transfer is skipped
            return transfer, None
        self._num_moving[self.lane] += 1
        return transfer, transfer._chunks[lane].pop()

    def _work(self, lane: int) -> None:
        chunk_s, self._lane.number = 0.0, lane
        while (claim := self._next(lane, chunk_s)) is not None:
            transfer, work = claim[0], [chunk for chunk in claim[1:] if chunk is not None]
            del claim
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                if work:
                    self._run(transfer, work)
                else:
                    self._begin(transfer)
            except BaseException as error:  # the thread goes on: without it, moves would wait for ever
                self._keep_fault(transfer, error)
            finally:
                # No reference may outlive the work: an idle worker must not keep a tensor alive.
                del transfer, work
                self._rest(time.thread_time() - cpu_s)
            chunk_s = time.perf_counter() - start_s

    def _keep_fault(self, transfer: Transfer, error: BaseException) -> None:
        """Keep an error for the thread that waits for the move, flushes or closes."""
        forget_frames(error)
        with self._lock:
            transfer.error = transfer.error or error
            transfer._fault = transfer._fault or error
            self._fault = self._fault or error

    def _rest(self, cpu_s: float) -> None:
        with self._lock:
            self._cpu_s += cpu_s
            self._num_done += 1
            self._num_active -= 1
            self._count_busy(-1)
            if self._closed:
                self._wake(None)
            if self._num_active == 0 and not self._has_any_work():
                self._idle.tell()

    def _count_busy(self, change: int) -> None:
        """With the lock held: one worker more or less is busy."""
        now_s = time.perf_counter()
        num_busy, since_s, busy_s = self._busy
        if num_busy == 0:
            since_s = now_s
        elif num_busy + change == 0:
            busy_s += now_s - since_s
        self._busy = num_busy + change, since_s, busy_s

    def _begin(self, transfer: Transfer) -> None:
        transfer.start_s = time.perf_counter()
        with span("lightning_ssd::begin"):
            chunks, error = _attempt(transfer.begin)
        if chunks is None:
            self._end(transfer, error)
            return
        with self._lock:
            transfer._num_unfinished = num_chunks = len(chunks)
            by_lane = transfer._chunks = self._by_lane(transfer, chunks)
            mine = by_lane.get(None) or by_lane.get(self.lane)
            work = [mine.pop()] if mine else []  # what this worker may run
            self._num_moving[self.lane] += len(work)
            for lane, left in by_lane.items():
                for _ in left:
                    self._wake(lane)
                if left:
                    self._push(transfer, lane)
            del chunks
        if work:
            self._run(transfer, work)
        elif not num_chunks:
            self._end(transfer, None)

    @staticmethod
    def _by_lane(transfer: Transfer, chunks: Sequence[Chunk]) -> dict[int | None, list[Chunk]]:
        lanes: Sequence[int | None] = [None] * len(chunks) if transfer.lanes is None else transfer.lanes
        by_lane: dict[int | None, list[Chunk]] = {}
        for lane, chunk in zip(reversed(lanes), reversed(chunks), strict=True):
            by_lane.setdefault(lane, []).append(chunk)
        return by_lane

    def _run(self, transfer: Transfer, work: list[Chunk]) -> None:
        """Run the one chunk in ``work``, and take it out: it holds the memory that moves, which may go with the end."""
        lane, begin_s = self.lane, time.perf_counter()
        settle, error = (None, None) if transfer.error is not None else _attempt(work.pop())
        work.clear()
        with self._lock:
            chunk_s = (time.perf_counter() - begin_s) / self._num_moving[lane]
            self._chunk_s[lane] = (self._chunk_s[lane] + chunk_s) / 2 if self._chunk_s[lane] else chunk_s
            self._num_moving[lane] -= 1
            self._is_forgotten[lane] = False
            self._look_again()
            transfer.error = transfer.error or error
            transfer._num_unfinished -= 1
            last = transfer._num_unfinished == 0
        if last:
            self._end(transfer, transfer.error, settle)
        elif settle is not None:
            self._settle(transfer, settle)

    def _end(self, transfer: Transfer, error: BaseException | None, settle: Settle | None = None) -> None:
        transfer.error = error
        if error is None:
            with self._lock:
                self._moved_bytes += transfer.nbytes
        outlasts = transfer.outlasts and settle is not None
        if not outlasts:
            self._record(transfer, error)
        self._finish(transfer, error)
        late_error = None if settle is None else self._settle(transfer, settle)
        if outlasts:
            self._record(transfer, error or late_error)

    def _settle(self, transfer: Transfer, settle: Settle) -> BaseException | None:
        """Wait for the device; return what failed there. It fails the move, or, where that has ended, is kept."""
        error = settle()
        if error is None:
            return None
        with self._lock:
            has_ended = not transfer._num_unfinished
            if has_ended:
                self._fault = self._fault or error
            else:
                transfer.error = transfer.error or error
        if has_ended:
            _log.error(
                "copying %s from the %s tier failed after it was handed over: %s", transfer.label, self._tier, error
            )
        return error

    def _record(self, transfer: Transfer, error: BaseException | None) -> None:
        moved = [(drive, nbytes, error is not None) for drive, nbytes in transfer.shares()]
        if transfer.failed_nbytes:
            moved.append((None, transfer.failed_nbytes, True))
        for drive, nbytes, has_failed in moved:
            self._events.append(
                TransferEvent(
                    direction=transfer.direction,
                    nbytes=nbytes,
                    start_s=transfer.start_s,
                    end_s=time.perf_counter(),
                    tier=self._tier,
                    failed=has_failed,
                    drive=drive,
                )
            )


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    """Return what ``work`` gives, and what it raises: handed to the waiting thread, nothing is swallowed.

    The error outlives the transfer, and takes none of the memory along that was moved.
    """
    try:
        return work(), None
    except BaseException as error:
        forget_frames(error)
        return None, error
