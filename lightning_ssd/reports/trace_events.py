"""A step as a trace that https://ui.perfetto.dev and chrome://tracing open.

Source: Trace Event Format (Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
complete events (``X``), counters (``C``) and names of threads (``M``); times in microseconds.
"""

from __future__ import annotations

from typing import Any

from lightning_ssd.telemetry.step_record import StepRecord

__all__ = ["trace_events"]

_PROCESS = 1
_US = 1e6


def trace_events(record: StepRecord) -> dict[str, Any]:
    """Return the JSON object of a trace: phases, waits, and a row for each lane of transfers; memory as counters."""
    rows = ["training", "waits", *sorted({f"{move.lane} {move.direction}" for move in record.moves})]
    number = {name: index for index, name in enumerate(rows)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": f"step {record.step}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": index, "args": {"name": name}}
            for name, index in number.items()
        ),
        *(_complete(phase.name, "phase", number["training"], phase.start_s, phase.end_s) for phase in record.phases),
        *(_complete("wait", "wait", number["waits"], wait.start_s, wait.end_s) for wait in record.waits),
    ]
    for move in record.moves:
        lane = number[f"{move.lane} {move.direction}"]
        events.append(_complete(move.direction, "transfer", lane, move.start_s, move.end_s, nbytes=move.nbytes))
    for point in record.activations:
        held = {"resident": point.resident_bytes, "elsewhere": point.saved_bytes - point.resident_bytes}
        events.append(_counter("saved activations, bytes", point.at_s, held))
    events += [_counter("memory in use, bytes", level.at_s, {"bytes": level.nbytes}) for level in record.levels]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(name: str, category: str, lane: int, begin_s: float, end_s: float, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": lane,
        "ts": begin_s * _US,
        "dur": max(end_s - begin_s, 0.0) * _US,
        "args": args,
    }


def _counter(name: str, at_s: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": at_s * _US, "args": values}
