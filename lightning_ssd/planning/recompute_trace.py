"""The trace that a pass would have had, had some of its blocks been recomputed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage

_SAME_S = 1e-6
"""Moments closer than this are one: no clock tells them apart, and neither does rounding."""

__all__ = ["inner_bytes", "inner_storages", "input_of", "recomputable", "recomputed", "with_inner"]


def input_of(index: int) -> int:
    """The block whose input ``-1 - block`` stands for in the second result of :func:`recomputed`."""
    return -1 - index


@dataclass(frozen=True, slots=True)
class _Window:
    """When a block is recomputed, on the clock of the old trace."""

    start_s: float
    seconds: float
    backward_end_s: float


def recomputable(trace: Trace) -> tuple[int, ...]:
    """The blocks of which something that backward wants back was saved, in the order in which forward called them.

    Not those which cannot be recomputed exactly.
    """
    return tuple(sorted(_windows(trace, [i for i, block in enumerate(trace.blocks) if block.recomputable])))


def inner_storages(trace: Trace, blocks: frozenset[int]) -> frozenset[int]:
    """The storages that the forward of these blocks saved: those that recomputing them packs later."""
    windows = _windows(trace, sorted(blocks))
    return frozenset(
        i for i, s in enumerate(trace.storages) if s.block in windows and _is_inner(s, trace.blocks[s.block])
    )


def inner_bytes(trace: Trace, blocks: frozenset[int]) -> dict[int, int]:
    """Block -> bytes that its forward saves, and that recomputing it holds again while its backward runs."""
    held: dict[int, int] = {}
    for index in inner_storages(trace, blocks):
        storage = trace.storages[index]
        held[storage.block] = held.get(storage.block, 0) + storage.nbytes
    return held


def with_inner(trace: Trace, held: Mapping[int, int]) -> Trace:
    """A pass that was traced with blocks recomputed, completed by what no hook sees of them.

    Args:
        trace: as it was recorded: of recomputed blocks only the inputs are in it.
        held: block -> bytes, from a trace of the same kind of pass in which they were not recomputed.

    Returns:
        The trace with one more storage, at the end, for each of its recomputed blocks: there while the block's backward
        runs, never moved, never asked for.
    """
    hidden = tuple(
        TracedStorage(
            nbytes=held[index],
            packed_s=block.backward_start_s,
            last_used_s=block.backward_end_s,
            wanted_s=None,
            freed_s=block.backward_end_s,
            movable=False,
        )
        for index, block in enumerate(trace.blocks)
        if index in trace.recomputed and held.get(index, 0) > 0
    )
    return replace(trace, storages=trace.storages + hidden) if hidden else trace


def recomputed(trace: Trace, blocks: frozenset[int]) -> tuple[Trace, tuple[int, ...]]:
    """Recompute these blocks.

    What such a block saved in forward is saved while backward runs its forward again instead, at the pace of forward,
    as soon as backward wants the first of it; all that comes after is later by the time of the block's forward. It is
    never moved: autograd wants it at once. The block's input is held from its forward until its backward is over. If
    the block saved its own input, that is counted twice while it is recomputed: the trace cannot tell.

    Blocks that the trace already recomputed, and those of which backward wants nothing, stay as they are.

    Returns:
        The other trace, and for each of its storages the index in the old one, or ``-1 - block`` for the input of a
        recomputed block (see :func:`input_of`).
    """
    windows = _windows(trace, sorted(blocks))
    if not windows:
        return trace, tuple(range(len(trace.storages)))
    delays = _Delays(list(windows.values()))
    inner = inner_storages(trace, blocks)
    entries: list[tuple[TracedStorage, int]] = []
    for block, window in windows.items():
        call = trace.blocks[block]
        if call.input_nbytes:
            entries.append((_input(call, block, window, delays), -1 - block))
    for index, storage in enumerate(trace.storages):
        if index in inner:
            entries.append((_repacked(storage, trace.blocks[storage.block], windows[storage.block], delays), index))
        else:
            entries.append((_delayed(storage, delays), index))
    entries.sort(key=lambda entry: entry[0].packed_s)
    old = tuple(index for _, index in entries)
    position = {index: p for p, index in enumerate(trace.order)}
    wants = [(s.wanted_s, position.get(i, -1), new) for new, (s, i) in enumerate(entries) if s.wanted_s is not None]
    return (
        replace(
            trace,
            storages=tuple(storage for storage, _ in entries),
            order=tuple(new for _, _, new in sorted(wants)),
            blocks=tuple(_delayed_block(b, delays) for b in trace.blocks),
            forward_end_s=delays.before(trace.forward_end_s),
            end_s=trace.end_s + sum(w.seconds for w in windows.values()),
            recomputed=trace.recomputed | frozenset(windows),
        ),
        old,
    )


def _is_inner(storage: TracedStorage, block: TracedBlock) -> bool:
    """Whether the block's forward saved it (backward may save more, for a second derivative)."""
    return storage.packed_s <= block.forward_end_s


def _windows(trace: Trace, blocks: Sequence[int]) -> dict[int, _Window]:
    wants: dict[int, float] = {}
    frees: dict[int, float] = {}
    for s in trace.storages:
        if 0 <= s.block < len(trace.blocks) and s.wanted_s is not None and _is_inner(s, trace.blocks[s.block]):
            wants[s.block] = min(wants.get(s.block, s.wanted_s), s.wanted_s)
            frees[s.block] = max(frees.get(s.block, s.freed_s), s.freed_s)
    windows = {}
    for index in blocks:
        if index in wants and index not in trace.recomputed:
            call = trace.blocks[index]
            # The first unpack begins the recomputation. A block's own times may be missing; what it saved has some.
            known = max(call.forward_start_s, call.forward_end_s) <= call.backward_start_s <= wants[index]
            start = call.backward_start_s if known else wants[index]
            end = call.backward_end_s if known and call.backward_end_s >= start else frees[index]
            windows[index] = _Window(start, max(call.forward_end_s - call.forward_start_s, 0.0), max(end, start))
    return windows


class _Delays:
    """How much later each moment of the old clock is on the new one."""

    def __init__(self, windows: Sequence[_Window]) -> None:
        ordered = sorted(windows, key=lambda w: w.start_s)
        self._starts = [w.start_s for w in ordered]
        self._sums = [0.0, *accumulate(w.seconds for w in ordered)]

    def before(self, time_s: float) -> float:
        """Place the end of a transfer at this moment before a recomputation that begins at it."""
        return time_s + self._sums[bisect_left(self._starts, time_s - _SAME_S)]

    def after(self, time_s: float) -> float:
        """Place the begin of a transfer at this moment after such a recomputation."""
        return time_s + self._sums[bisect_right(self._starts, time_s + _SAME_S)]


def _delayed(s: TracedStorage, delays: _Delays) -> TracedStorage:
    packed_s = delays.after(s.packed_s)
    wanted_s = None if s.wanted_s is None else delays.after(s.wanted_s)
    last_used_s = max(delays.before(s.last_used_s), packed_s)
    return replace(
        s,
        packed_s=packed_s,
        last_used_s=last_used_s,
        wanted_s=wanted_s,
        freed_s=max(delays.before(s.freed_s), last_used_s, packed_s if wanted_s is None else wanted_s),
    )


def _repacked(s: TracedStorage, block: TracedBlock, window: _Window, delays: _Delays) -> TracedStorage:
    """Saved by the recomputation instead."""
    offset = min(max(s.packed_s - block.forward_start_s, 0.0), window.seconds)
    packed_s = delays.before(window.start_s) + offset
    wanted_s = None if s.wanted_s is None else max(delays.after(s.wanted_s), packed_s)
    freed_s = max(delays.before(s.freed_s), packed_s if wanted_s is None else wanted_s)
    return replace(s, packed_s=packed_s, last_used_s=packed_s, wanted_s=wanted_s, freed_s=freed_s, movable=False)


def _input(block: TracedBlock, index: int, window: _Window, delays: _Delays) -> TracedStorage:
    packed_s = delays.after(block.forward_start_s)
    wanted_s = max(delays.before(window.start_s), packed_s)
    return TracedStorage(
        nbytes=block.input_nbytes,
        packed_s=packed_s,
        last_used_s=min(max(delays.before(block.forward_end_s), packed_s), wanted_s),
        wanted_s=wanted_s,
        freed_s=max(delays.before(window.backward_end_s), delays.after(window.start_s), wanted_s),
        block=index,
    )


def _delayed_block(block: TracedBlock, delays: _Delays) -> TracedBlock:
    return replace(
        block,
        forward_start_s=delays.after(block.forward_start_s),
        forward_end_s=delays.before(block.forward_end_s),
        backward_start_s=delays.before(block.backward_start_s),
        backward_end_s=delays.before(block.backward_end_s),
    )
