"""The table of metric keys, and the arithmetic from events and counters to numbers. Pure: no clock, no Trainer.

:data:`METRICS` is the only place where a key is written down. :func:`compute` makes one sample of it, for one step or
since the last sample; :class:`MetricWindow` merges samples of several steps, and :func:`merge_ranks` rows of
several processes, by the rules that the table gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal, NamedTuple

from lightning_ssd.memory.readings import MemoryReadings
from lightning_ssd.telemetry.events import Event, StallEvent, TransferEvent
from lightning_ssd.telemetry.stats import OffloadStats, SavedBytes

__all__ = [
    "METRICS",
    "NUM_DRIVES",
    "Metric",
    "MetricWindow",
    "compute",
    "intersection",
    "merge_ranks",
    "overlap_ratio",
    "union_s",
]

GIB = 1 << 30
TB = 10**12

Merge = Literal["mean", "max", "last", "bytes_weighted", "rate"]
Ranks = Literal["max", "min", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    key: str
    """``group/name_unit``."""
    meaning: str
    divisor: float
    """Raw bytes or seconds (or a ratio) divided by this give the number."""
    merge: Merge
    """How several steps become one number: the mean per step, the largest, the last, the mean weighted with the bytes
    moved, or all bytes over all busy time."""
    ranks: Ranks = "max"
    """How several processes become one number: the worst one, their mean, or all together."""


NUM_DRIVES = 8
"""So many drives have keys of their own: as many as the largest machines in ``conf/hardware`` have."""


def _drive_metrics() -> Iterator[Metric]:
    for n in range(NUM_DRIVES):
        for direction, verb in (("write", "written to"), ("read", "read from")):
            key = f"io/drive{n}_{direction}_gib"
            about = f"bytes {verb} directory {n} of `hardware.paths`"
            yield Metric(key, f"{about}; absent with one directory", GIB, "mean", "sum")
            busy = f"{about} / time with a {direction} in flight there; absent without"
            yield Metric(f"{key}_per_s", busy, GIB, "rate", "sum")
        about = f"`wear/drive_life_days` of directory {n} of `hardware.paths`; absent with one directory"
        yield Metric(f"wear/drive{n}_life_days", about, 1, "last", "min")


_EACH: tuple[Merge, Ranks] = ("mean", "mean")
"""Parts of a whole, which still add up when they are merged."""

METRICS: tuple[Metric, ...] = (
    Metric("time/step_s", "one training step, without data loading; absent in loops of your own", 1, "mean"),
    Metric("memory/device_peak_gib", "peak of PyTorch's CUDA allocator on our device; absent on CPU", GIB, "max"),
    Metric("memory/host_peak_gib", "peak resident set of this process; absent without /proc", GIB, "max"),
    Metric("memory/activations_resident_peak_gib", "saved activations in memory at the worst moment", GIB, "max"),
    Metric("memory/activations_saved_peak_gib", "what keeping all of them would have held at its worst", GIB, "max"),
    Metric("memory/activations_kept_at_peak_gib", "in memory when most is saved; absent if none was", GIB, *_EACH),
    Metric("memory/activations_host_at_peak_gib", "in host memory in place of drives at that moment", GIB, *_EACH),
    Metric("memory/activations_ssd_at_peak_gib", "on drives at that moment", GIB, *_EACH),
    Metric("memory/activations_recomputed_at_peak_gib", "not saved, since blocks compute it again", GIB, *_EACH),
    Metric("memory/worst_rank", "the process whose peak this is; absent with one process", 1, "last"),
    Metric("memory/states_resident_gib", "states of offloaded optimizers in memory; absent without one", GIB, "last"),
    Metric("memory/host_tier_gib", "host memory taken for activations in place of drives; absent without", GIB, "last"),
    Metric("memory/weights_offloaded_gib", "weights that wait on drives; absent without", GIB, "last", "sum"),
    Metric("memory/weights_resident_peak_gib", "of these, brought in at the worst moment", GIB, "max"),
    Metric("io/write_gib", "bytes that reached a drive", GIB, "mean", "sum"),
    Metric("io/read_gib", "bytes that came back from a drive", GIB, "mean", "sum"),
    Metric("io/host_gib", "bytes that went to host memory instead of a drive", GIB, "mean", "sum"),
    Metric(
        "io/forwarded_gib",
        "bytes taken back without a read: before or during their write, or still in memory after it",
        GIB,
        "mean",
        "sum",
    ),
    Metric(
        "io/held_elsewhere_gib",
        "of these, written for nothing: the program holds them until backward",
        GIB,
        "mean",
        "sum",
    ),
    Metric("io/stall_s", "time that training threads waited for transfers", 1, "mean"),
    Metric("io/stall_ratio", "the same, as a share of time/step_s", 1, "mean"),
    Metric("io/hook_s", "time of training threads inside the hooks, without stalls", 1, "mean"),
    Metric("io/cpu_s", "on a CPU: what workers and page faults took from the computation, estimated", 1, "mean"),
    Metric("io/stall_forward_s", "of io/stall_s, in forward", 1, "mean"),
    Metric("io/stall_backward_s", "the same in backward", 1, "mean"),
    Metric("io/stall_update_s", "the same in the optimizer's step", 1, "mean"),
    Metric(
        "io/overlap_ratio",
        "1 - time with a stall / time with a transfer in flight, clipped to [0, 1]; absent when nothing moved",
        1,
        "bytes_weighted",
        "mean",
    ),
    Metric(
        "io/write_gib_per_s",
        "bytes written to drives / time with a write in flight; absent without",
        GIB,
        "rate",
        "sum",
    ),
    Metric(
        "io/read_gib_per_s", "bytes read from drives / time with a read in flight; absent without", GIB, "rate", "sum"
    ),
    Metric(
        "io/busiest_drive_ratio",
        "share of the drive that moved most in all that drives moved; absent with one directory, or when nothing moved",
        1,
        "bytes_weighted",
    ),
    Metric("wear/written_tb", "bytes written to drives since the start, in units of 10**12", TB, "last", "sum"),
    Metric(
        "wear/drive_life_days",
        "days of continuous use until a drive has been written its `drive_endurance`; absent without one or a write",
        1,
        "last",
        "min",
    ),
    Metric("plan/predicted_step_s", "forward and backward, as the plan says; absent without a plan", 1, "mean"),
    Metric("plan/measured_step_s", "the same, as the clock says", 1, "mean"),
    Metric("plan/predicted_peak_gib", "saved activations in memory at the worst moment, as the plan says", GIB, "max"),
    Metric("plan/measured_peak_gib", "the same, as counted", GIB, "max"),
    Metric("plan/predicted_stall_s", "time that training threads wait, as the plan says", 1, "mean"),
    Metric("plan/num_plans", "plans put in force since the start", 1, "last"),
    Metric("plan/predicted_overhead_ratio", "stalls, hooks and CPU / pass without them, as the plan says", 1, "mean"),
    Metric("plan/overhead_ratio", "the same, measured where it arises", 1, "mean"),
    Metric(
        "plan/recomputed_gib",
        "activations that a pass computes again in backward, as profiled before it did; absent without a plan",
        GIB,
        "last",
        "sum",
    ),
    *_drive_metrics(),
)
"""Peaks hold since the start or the last reset, ``io/`` numbers since the last sample. No key is called ``step`` or
lies under ``system/``: Lightning and W&B take those for themselves."""

_RATES = {metric.key: metric.key.removesuffix("_per_s") for metric in METRICS if metric.merge == "rate"}


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``(start, end)`` intervals; those with ``end <= start`` count nothing."""
    return math.fsum([end - start for start, end in _union(intervals)])


def intersection(
    first: Iterable[tuple[float, float]], second: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return when both unions of ``(start, end)`` intervals cover, in order."""
    one, other = _union(first), _union(second)
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            found.append((start, end))
        i, j = (i + 1, j) if one[i][1] < other[j][1] else (i, j + 1)
    return found


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    begin = reach = -math.inf
    for start, end in sorted(intervals):
        if start > reach:
            if reach > begin:
                merged.append((begin, reach))
            begin, reach = start, end
        elif end > reach:
            reach = end
    return [*merged, (begin, reach)] if reach > begin else merged


def overlap_ratio(stalls: Iterable[tuple[float, float]], transfers: Iterable[tuple[float, float]]) -> float | None:
    """``1 - union(stalls) / union(transfers)``, clipped to [0, 1]: 1 means that no transfer was waited for.

    ``None`` when no transfer took any time: neither 0 nor 1 would be true.
    """
    busy_s = union_s(transfers)
    if busy_s <= 0:
        return None
    return min(1.0, max(0.0, 1 - union_s(stalls) / busy_s))


def compute(
    events: Iterable[Event],
    *,
    stats_before: OffloadStats,
    stats_now: OffloadStats,
    readings: MemoryReadings,
    plan: Mapping[str, float] | None = None,
    drive_life_days: Mapping[int, float] | None = None,
    step_s: float | None = None,
    states_bytes: int | None = None,
    host_tier_bytes: int | None = None,
    num_drives: int = 1,
    worst: SavedBytes | None = None,
) -> dict[str, float]:
    """One sample: what happened between two snapshots.

    Args:
        events: what the log held since the last sample.
        stats_before: counters at the last sample.
        stats_now: counters now.
        readings: memory now.
        plan: what was predicted and measured, in bytes and seconds, by key; ``None``: there is no plan.
        drive_life_days: days of continuous use until a drive has been written its ``drive_endurance``, by number of
            the directory; absent without one or a write.
        step_s: how long the step took; ``None``: it was not measured.
        states_bytes: of optimizer states in memory now; ``None``: no optimizer is offloaded.
        host_tier_bytes: memory that the tier of that name has taken; ``None``: there is none.
        num_drives: directories that there are.
        worst: where saved activations were when most were saved; ``None``: none was, or none was counted.

    Returns:
        Keys of :data:`METRICS`. A key is absent where there is no number: no CUDA, nothing moved, no plan.
    """
    stall_s = stats_now.stall_s - stats_before.stall_s
    backward_s = stats_now.stall_backward_s - stats_before.stall_backward_s
    update_s = stats_now.stall_update_s - stats_before.stall_update_s
    raw: dict[str, float | None] = {
        "time/step_s": step_s,
        "memory/worst_rank": None,  # of several processes, which one alone does not know
        "memory/states_resident_gib": states_bytes,
        "memory/host_tier_gib": host_tier_bytes,
        "memory/weights_offloaded_gib": stats_now.weights_bytes or None,
        "memory/weights_resident_peak_gib": stats_now.weights_resident_peak_bytes if stats_now.weights_bytes else None,
        "memory/device_peak_gib": readings.device_peak_bytes,
        "memory/host_peak_gib": readings.host_peak_bytes,
        "memory/activations_resident_peak_gib": stats_now.resident_peak_bytes,
        "memory/activations_saved_peak_gib": stats_now.saved_peak_bytes,
        "io/write_gib": stats_now.bytes_written - stats_before.bytes_written,
        "io/read_gib": stats_now.bytes_read - stats_before.bytes_read,
        "io/host_gib": stats_now.bytes_host - stats_before.bytes_host,
        "io/forwarded_gib": stats_now.bytes_forwarded - stats_before.bytes_forwarded,
        "io/held_elsewhere_gib": stats_now.bytes_held_elsewhere - stats_before.bytes_held_elsewhere,
        "io/stall_s": stall_s,
        "io/hook_s": stats_now.hook_s - stats_before.hook_s,
        "io/cpu_s": stats_now.cpu_s - stats_before.cpu_s,
        "io/stall_ratio": stall_s / step_s if step_s else None,
        "io/stall_forward_s": max(stall_s - backward_s - update_s, 0.0),
        "io/stall_backward_s": backward_s,
        "io/stall_update_s": update_s,
        "wear/written_tb": stats_now.bytes_written,
        "wear/drive_life_days": min((drive_life_days or {}).values(), default=None),
    }
    if worst is not None:
        raw |= {
            "memory/activations_kept_at_peak_gib": worst.resident_bytes,
            "memory/activations_host_at_peak_gib": worst.host_bytes,
            "memory/activations_ssd_at_peak_gib": worst.drive_bytes,
            "memory/activations_recomputed_at_peak_gib": worst.recomputed_bytes,
        }
    if num_drives > 1:
        raw |= {f"wear/drive{number}_life_days": days for number, days in (drive_life_days or {}).items()}
    raw |= _from_events(events, num_drives) | dict(plan or {})
    return {metric.key: value / metric.divisor for metric in METRICS if (value := raw.get(metric.key)) is not None}


def _from_events(events: Iterable[Event], num_drives: int) -> dict[str, float | None]:
    stalls: list[tuple[float, float]] = []
    moved: list[TransferEvent] = []
    for event in events:
        if isinstance(event, StallEvent):
            stalls.append((event.start_s, event.end_s))
        elif not event.failed:
            moved.append(event)
    to_drives = [event for event in moved if event.tier != "host"]  # the host tier's copies would only flatter rates
    written = _Busy.of([event for event in to_drives if event.direction == "write"])
    read = _Busy.of([event for event in to_drives if event.direction == "read"])
    on_host = _Busy.of([event for event in moved if event.tier == "host"])
    return {
        "io/overlap_ratio": overlap_ratio(stalls, [*written.union, *read.union, *on_host.union]),
        "io/write_gib_per_s": written.bytes_per_s,
        "io/read_gib_per_s": read.bytes_per_s,
        **(_of_drives(to_drives, num_drives) if num_drives > 1 else {}),
    }


class _Busy(NamedTuple):
    """When transfers were under way, and what they moved."""

    union: list[tuple[float, float]]
    nbytes: int

    @classmethod
    def of(cls, moved: Sequence[TransferEvent]) -> _Busy:
        return cls(_union([(event.start_s, event.end_s) for event in moved]), sum([event.nbytes for event in moved]))

    @property
    def bytes_per_s(self) -> float | None:
        busy_s = math.fsum([end - start for start, end in self.union])
        return self.nbytes / busy_s if busy_s > 0 else None


def _of_drives(moved: Sequence[TransferEvent], num_drives: int) -> dict[str, float | None]:
    """Return the numbers of each drive by itself. The host tier's moves have none."""
    raw: dict[str, float | None] = {}
    by_drive: list[int] = []
    for n in range(num_drives):
        mine = [event for event in moved if event.drive == n]
        by_drive.append(sum(event.nbytes for event in mine))
        for direction in ("write", "read"):
            events = [event for event in mine if event.direction == direction]
            busy = _Busy.of(events)
            raw[f"io/drive{n}_{direction}_gib"] = busy.nbytes
            raw[f"io/drive{n}_{direction}_gib_per_s"] = busy.bytes_per_s
    return {**raw, "io/busiest_drive_ratio": max(by_drive) / sum(by_drive) if any(by_drive) else None}


class MetricWindow:
    """Samples of several steps, merged into one row by :attr:`Metric.merge`. Holds a few numbers, not the samples."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, sample: Mapping[str, float]) -> None:
        """Add what :func:`compute` returned for one step."""
        self.num_steps += 1
        # What goes to host memory comes back from there, and its copies are among the transfers that overlap.
        moved = sum(sample.get(key, 0.0) for key in ("io/write_gib", "io/read_gib"))
        moved += 2 * sample.get("io/host_gib", 0.0)
        for metric in METRICS:
            value = sample.get(metric.key)
            if value is None:
                continue
            before = self._values.get(metric.key)
            if metric.merge == "max":
                self._values[metric.key] = value if before is None else max(before, value)
            elif metric.merge == "last":
                self._values[metric.key] = value
            else:
                weight = moved if metric.merge == "bytes_weighted" else 1.0
                if metric.merge == "rate":  # weighs as long as it lasted, so that all bytes go over all busy time
                    weight = sample.get(_RATES[metric.key], 0.0) / value if value > 0 else 0.0
                self._values[metric.key] = (before or 0.0) + value * weight
                self._weights[metric.key] = self._weights.get(metric.key, 0.0) + weight

    def result(self) -> dict[str, float]:
        """The merged row; empty without a sample. A key that no step had is absent."""
        row: dict[str, float] = {}
        for metric in METRICS:
            if metric.key not in self._values:
                continue
            weight = self._weights.get(metric.key, 1.0)
            if weight > 0:
                row[metric.key] = self._values[metric.key] / weight
        return row


def merge_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the rows of several processes into one, by :attr:`Metric.ranks`. A key that no process has is absent."""
    # The process that takes most memory: of its device, else of the host.
    keys = ("memory/device_peak_gib", "memory/host_peak_gib")
    peaks = next(([row.get(key, -1.0) for row in rows] for key in keys if any(key in row for row in rows)), [0.0])
    merged = {"memory/worst_rank": float(peaks.index(max(peaks)))}
    for metric in METRICS:
        values = [row[metric.key] for row in rows if metric.key in row]
        if values:
            merged[metric.key] = _OVER_RANKS[metric.ranks](values)
    return merged


_OVER_RANKS: dict[Ranks, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "mean": mean, "sum": math.fsum}
