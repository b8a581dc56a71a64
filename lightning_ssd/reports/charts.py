"""Content of each picture, as plain numbers; ``drawing`` draws them for the page, files and loggers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.telemetry.step_record import Life, StepRecord

__all__ = [
    "Bar",
    "Chart",
    "Series",
    "lifetimes",
    "memory_over_step",
    "over_run",
    "step_charts",
    "trade_off",
    "transfers",
]

Role = Literal[
    "weights", "gradients", "states", "activations", "other", "keep", "write", "read", "wait", "away", "measure"
]
"""Kind of series; a renderer gives each its colour."""

_MAX_POINTS = 1200
_MAX_BARS = 1500
_GIB = 1 << 30
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Numbers over the horizontal axis."""

    name: str
    role: Role
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["area", "line", "dashed", "points"] = "line"
    """Areas are stacked, in the order of the chart."""
    labels: tuple[str, ...] = ()
    """Names of the points, where they have some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """An interval in a lane."""

    lane: str
    role: Role
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture."""

    key: str
    """Name of its file, and under ``offload/`` in a logger."""
    title: str
    x_title: str
    y_title: str = ""
    series: tuple[Series, ...] = ()
    bars: tuple[Bar, ...] = ()
    lanes: tuple[str, ...] = ()
    """From the top down."""
    bands: tuple[tuple[str, float, float], ...] = ()
    """Phases: name, begin, end."""


def step_charts(record: StepRecord) -> list[Chart]:
    """All that one step shows; a picture without content is left out."""
    charts = [memory_over_step(record), transfers(record), lifetimes(record)]
    return [chart for chart in charts if chart.series or chart.bars]


def memory_over_step(record: StepRecord) -> Chart:
    """All memory over one step, stacked by what it is, under the line of what keeping would have held.

    What is neither weights, gradients, states nor saved activations is told together, and gradients with it where
    they cannot be read in backward. What the process holds at all times besides is left out, and told in the
    title.
    """
    times = _moments(record)
    if not record.levels or not times:
        return Chart(key="memory_over_step", title=_MEMORY, x_title=_SECONDS)
    at = [point.at_s for point in record.activations]
    level_at = [level.at_s for level in record.levels]
    grown_at = [point.at_s for point in record.gradients]
    fixed = record.weight_bytes + record.state_bytes
    resident, missing, total, grown = [], [], [], []
    for time_s in times:
        now = record.activations[max(bisect_right(at, time_s) - 1, 0)]
        resident.append(now.resident_bytes)
        missing.append(now.saved_bytes - now.resident_bytes)
        total.append(record.levels[max(bisect_right(level_at, time_s) - 1, 0)].nbytes)
        grown.append(record.gradients[max(bisect_right(grown_at, time_s) - 1, 0)].nbytes if record.gradients else 0)
    known = [held + gradients for held, gradients in zip(resident, grown, strict=True)]
    base = max(min(level - held for level, held in zip(total, known, strict=True)) - fixed, 0)
    other = [max(level - held - fixed - base, 0) for level, held in zip(total, known, strict=True)]
    stack = [fixed + held + rest for held, rest in zip(known, other, strict=True)]
    keeping = [level + more for level, more in zip(stack, missing, strict=True)]
    size, unit = _unit(max(keeping))

    def layer(name: str, role: Role, values: Sequence[int], kind: Literal["area", "dashed"] = "area") -> Series:
        return Series(name=name, role=role, x=tuple(times), y=tuple(value / size for value in values), kind=kind)

    layers = [
        layer("weights", "weights", [record.weight_bytes] * len(times)),
        layer("optimizer states", "states", [record.state_bytes] * len(times)),
        *([layer("gradients", "gradients", grown)] if record.gradients else []),
        layer("saved activations", "activations", resident),
        layer("temporaries, free heap" if record.gradients else "gradients, temporaries, free heap", "other", other),
    ]
    return Chart(
        key="memory_over_step",
        title=f"{_MEMORY}, above {format_sizes(base)[0]} that the process holds anyway" if base else _MEMORY,
        x_title=_SECONDS,
        y_title=unit,
        series=(
            *(one for one in layers if any(one.y)),
            layer("with all activations kept", "keep", keeping, "dashed"),
        ),
        bands=_bands(record),
    )


def transfers(record: StepRecord) -> Chart:
    """Draw what moved when, a lane for each drive and direction, under what the training thread did and waited for."""
    lanes = sorted(
        {(move.lane, move.direction) for move in record.moves}, key=lambda lane: (lane[0], lane[1] == "read")
    )
    bars: list[Bar] = [
        Bar(lane=_WAITS, role="wait", begin=begin, end=end)
        for begin, end in _merged(((wait.start_s, wait.end_s) for wait in record.waits), record.length_s)
    ]
    for lane, direction in lanes:
        moves = (
            (move.start_s, move.end_s) for move in record.moves if (move.lane, move.direction) == (lane, direction)
        )
        bars += [
            Bar(lane=f"{lane} {direction}", role=direction, begin=begin, end=end)
            for begin, end in _merged(moves, record.length_s)
        ]
    return Chart(
        key="transfers",
        title="What the drives do while the model computes",
        x_title=_SECONDS,
        bars=tuple(bars),
        lanes=(_WAITS, *(f"{lane} {direction}" for lane, direction in lanes)),
        bands=_bands(record),
    )


def lifetimes(record: StepRecord) -> Chart:
    """The largest saved tensors: when each was in memory, and when it was away."""
    bars: list[Bar] = []
    lanes = []
    for number, life in enumerate(record.lives):
        lane = f"{number}: {', '.join(filter(None, (life.module, *format_sizes(life.nbytes))))}"
        lanes.append(lane)
        bars += _life(lane, life)
    return Chart(
        key="lifetimes",
        title="The largest saved tensors, from the top in the order of forward",
        x_title=_SECONDS,
        bars=tuple(bars),
        lanes=tuple(lanes),
        bands=_bands(record),
    )


def over_run(rows: Sequence[Mapping[str, float]]) -> Chart:
    """Draw peaks over the steps of a run.

    Args:
        rows: with ``step`` and keys of the metrics' table.
    """
    keys: tuple[tuple[str, str, Role], ...] = (
        ("memory/activations_resident_peak_gib", "saved activations in memory", "activations"),
        ("memory/activations_saved_peak_gib", "with all of them kept", "keep"),
        ("memory/device_peak_gib", "device", "measure"),
    )
    size, unit = _unit(_GIB * max((row[key] for row in rows for key, _, _ in keys if key in row), default=0))
    series = [
        Series(name=name, role=role, x=tuple(x for x, _ in known), y=tuple(_GIB * y / size for _, y in known))
        for key, name, role in keys
        if (known := [(row["step"], row[key]) for row in rows if key in row])
    ]
    title, x_title = "Peaks over the run", "optimizer step"
    return Chart(key="over_run", title=title, x_title=x_title, y_title=unit, series=tuple(series))


def trade_off(points: Iterable[tuple[str, str, float, float]]) -> Chart:
    """Draw time over peak, a point for each run of a sweep. Lower and further left is better.

    Args:
        points: model, mode, peak above rest (GiB), seconds per step.
    """
    models: dict[str, list[tuple[float, float, str]]] = {}
    for model, mode, peak, time in points:
        models.setdefault(model, []).append((peak, time, mode))
    series = []
    for model, runs in models.items():
        x, y, modes = zip(*sorted(runs), strict=True)
        series.append(Series(name=model, role="measure", x=x, y=y, kind="points", labels=modes))
    title = "Seconds per step over peak memory above rest: lower left is better"
    x_title, y_title = "peak above rest, GiB", "seconds per step"
    return Chart(key="trade_off", title=title, x_title=x_title, y_title=y_title, series=tuple(series))


_MEMORY = "Memory over one step"
_SECONDS = "seconds since the step began"
_WAITS = "training waits"


def _life(lane: str, life: Life) -> list[Bar]:
    bars, begin = [], life.saved_s
    for left, back in life.away:
        bars.append(Bar(lane=lane, role="activations", begin=begin, end=left))
        bars.append(Bar(lane=lane, role="away", begin=left, end=back))
        begin = back
    bars.append(Bar(lane=lane, role="activations", begin=begin, end=life.freed_s))
    return [bar for bar in bars if bar.end > bar.begin]


def _moments(record: StepRecord) -> list[float]:
    """When to look: at each change, or where there are too many at the largest one of each stretch."""
    times = sorted({point.at_s for point in record.activations} | {level.at_s for level in record.levels})
    width = -(-len(times) // _MAX_POINTS) or 1
    if width == 1:
        return times
    peaks = {point.at_s: point.resident_bytes for point in record.activations}
    return [max(times[i : i + width], key=lambda time_s: peaks.get(time_s, 0)) for i in range(0, len(times), width)]


def _merged(moves: Iterable[tuple[float, float]], length_s: float) -> list[tuple[float, float]]:
    """Unions of intervals; those closer than a line is thick are one."""
    gap = length_s / _MAX_BARS
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(moves):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _bands(record: StepRecord) -> tuple[tuple[str, float, float], ...]:
    return tuple((phase.name, phase.start_s, phase.end_s) for phase in record.phases)


def _unit(nbytes: float) -> tuple[int, str]:
    return next((size, name) for size, name in _UNITS if nbytes >= size or size == 1)
