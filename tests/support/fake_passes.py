"""Passes that never ran: traces, clocks and machines for the scheduler."""

from contextlib import contextmanager

import pytest

from lightning_ssd.errors import BudgetError
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.memory_limits import MemoryConstraints
from lightning_ssd.scheduling.pass_kind import FinishedPass
from lightning_ssd.scheduling.scheduler import Scheduler

NBYTES = 1 << 20
COUNT = 12
FAST = Machine(ssd=TierRates(write_bytes_per_s=1e9, read_bytes_per_s=1e9))
SLOW = Machine(ssd=TierRates(write_bytes_per_s=1e6, read_bytes_per_s=1e6))


def make_trace(count=COUNT, *, step_s=1.0, other=0, blocks=False):
    """Storages packed one after the other, wanted back in reverse."""
    unit = step_s / (2 * count)
    storages = tuple(
        TracedStorage(
            nbytes=NBYTES,
            packed_s=i * unit,
            last_used_s=(i + 0.5) * unit,
            wanted_s=(2 * count - 1 - i) * unit,
            freed_s=(2 * count - 1 - i + 0.9) * unit,
            block=i // 3 if blocks else -1,
        )
        for i in range(count)
    )
    calls = tuple(
        TracedBlock(
            name=f"block {b}",
            forward_start_s=3 * b * unit,
            forward_end_s=(3 * b + 3) * unit,
            backward_start_s=(2 * count - 3 * b - 3) * unit,
            backward_end_s=(2 * count - 3 * b) * unit,
            input_nbytes=NBYTES // 8,
        )
        for b in range(count // 3 if blocks else 0)
    )
    return Trace(
        storages=storages,
        order=tuple(reversed(range(count))),
        blocks=calls,
        forward_end_s=step_s / 2,
        end_s=step_s,
        other_peak_bytes=other,
    )


class FakeRecorder:
    """Gives a trace that the test made."""

    def __init__(self, trace, hook_s=0.0):
        self._trace = trace
        self._hook_s = hook_s

    def trace(self, end, refused=frozenset()):
        return self._trace

    def hook_s(self, end):
        return self._hook_s


class LateClock(HostClock):
    """As on CUDA: a pass can only be read when the next one has been run."""

    lag = 1


def run_pass(
    made,
    trace,
    *,
    signature="a",
    step_s=None,
    clock=HostClock,
    stall_s=None,
    available_bytes=None,
    level_bytes=0,
    peak_bytes=None,
    written_bytes=None,
    highest_bytes=0,
):
    """Run one pass that saves what the trace says, and moves, takes and stalls as it follows.

    Args:
        step_s: stalls included; ``None``: as predicted.
        stall_s: ``None``: as predicted.
        written_bytes: of what moves; ``None``: all of it.
    """
    cursor, wants_trace = made.cursor(signature, level_bytes=level_bytes, available_bytes=available_bytes)
    sizes = tuple(storage.nbytes for storage in trace.storages)
    moved_bytes = sum(nbytes for nbytes in sizes if cursor.place(nbytes) is not Placement.KEEP)
    followed = cursor.followed
    predicted_s, predicted_stall_s = trace.end_s, 0.0
    if followed is not None:
        predicted_s, predicted_stall_s = followed.plan.prediction.step_s, followed.plan.prediction.stall_s
    made.observe(
        FinishedPass(
            signature=signature,
            sizes=sizes,
            cursor=cursor,
            recorder=FakeRecorder(trace) if wants_trace else None,
            clock=clock(),
            begin=0.0,
            end=predicted_s if step_s is None else step_s,
            level_bytes=level_bytes,
            stalls=((0.0, predicted_stall_s if stall_s is None else stall_s),),
            peak_bytes=max(sizes, default=0) if peak_bytes is None else peak_bytes,
            written_bytes=moved_bytes if written_bytes is None else written_bytes,
            read_bytes=moved_bytes if written_bytes is None else written_bytes,
            moved_bytes=moved_bytes,
            highest_bytes=highest_bytes,
        )
    )
    made.border()
    return cursor, wants_trace


def planned(made, trace, **options):
    """Run one pass, and wait for the plan that is made of it."""
    found = run_pass(made, trace, **options)
    made.wait()
    return found


def refusal(trace, *, match=None, options=None, **settings):
    """The error in which a budget is refused after a first pass with these options."""
    with opened(**settings) as made:
        run_pass(made, trace, **(options or {}))
        with pytest.raises(BudgetError, match=match) as raised:
            made.wait()
    return raised.value


def machine_of(machine):
    return lambda: machine


@contextmanager
def opened(*, machine=lambda: FAST, agree=None, max_slowdown=1.02, **constraints):
    made = Scheduler(MemoryConstraints(max_slowdown=max_slowdown, **constraints), machine, agree=agree)
    try:
        yield made
    finally:
        made.close()
