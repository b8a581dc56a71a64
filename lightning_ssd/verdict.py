"""One honest paragraph on a run. Pure: numbers in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ssd.config import OffloadPolicy
from lightning_ssd.stats import OffloadStats

__all__ = ["Run", "verdict"]

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What there is to judge."""

    stats: OffloadStats | None
    """Counters at the end; ``None``: nothing that offloads took part."""
    policy: OffloadPolicy | None
    backend: str
    """One line: how bytes reached the drive, and where."""
    metrics: Mapping[str, float]
    """All steps merged into one row."""
    step_s: float
    """Time in training steps, without data loading and validation."""
    num_processes: int = 1
    plan: str | None = None
    """Predicted against measured; ``None``: no step has followed a plan."""
    drive_life_days: float | None = None
    """At the vendor's rating and this run's rate of writing, day and night."""


def verdict(run: Run) -> str:
    """What was held, moved and waited for; plain words where nothing was offloaded at all."""
    sentences = [*_activations(run), *_peaks(run.metrics)]
    if run.num_processes > 1:
        sentences.append(f"Numbers of the first of {run.num_processes} processes.")
    return " ".join(sentences)


def _activations(run: Run) -> list[str]:
    stats, policy = run.stats, run.policy
    if stats is None or policy is None:
        return ["Nothing was offloaded: the Trainer's strategy does not."]
    saved_peak = max(stats.saved_peak_bytes, _bytes(run.metrics, "memory/activations_saved_peak_gib"))
    resident_peak = max(stats.resident_peak_bytes, _bytes(run.metrics, "memory/activations_resident_peak_gib"))
    if stats.bytes_saved == 0:
        moves = policy.activations not in ("keep", "recompute")
        advice = " Lower min_tensor_bytes to move those too." if moves and stats.num_kept_small else ""
        return [
            f"Nothing was offloaded: no saved activation had min_tensor_bytes={policy.min_tensor_bytes!r} or more; "
            f"{stats.num_kept_small} smaller ones were kept.{advice}"
        ]
    if policy.activations == "recompute":
        return [f"Blocks were recomputed, as asked; what they leave was kept: at most {_size(saved_peak)} at a time."]
    if policy.activations == "keep":
        return [f"Saved activations: all kept in memory, as asked; at most {_size(saved_peak)} at a time."]
    share = 100 * resident_peak / saved_peak if saved_peak else 100.0
    sentences = [
        f"Saved activations: at most {_size(resident_peak)} resident of {_size(saved_peak)} that keeping would have "
        f"held ({share:.0f} %).",
        f"{_size(stats.bytes_written)} written{_to_host(stats)}, {_size(stats.bytes_read)} read, "
        f"{_size(stats.bytes_forwarded)} taken back without a read; {_stalls(stats.stall_s, run)}.",
    ]
    if stats.failures:
        sentences.append(
            f"{stats.failures} transfers failed; {stats.fallbacks} times training went on with the tensor in memory "
            "or a second try."
        )
    if run.plan is not None:
        sentences.append(run.plan)
    if run.drive_life_days is not None:
        life = run.drive_life_days
        days = f"{life:,.0f} days" if life >= 10 else f"{life:.1f} days"
        sentences.append(f"Written to like this day and night, a drive reaches its vendor's rating in {days}.")
    return [*sentences, f"Backend: {run.backend}."]


def _to_host(stats: OffloadStats) -> str:
    return f" and {_size(stats.bytes_host)} put into host memory" if stats.bytes_host else ""


def _stalls(stall_s: float, run: Run) -> str:
    share = f" ({100 * stall_s / run.step_s:.1f} %)" if run.step_s > 0 else ""
    text = f"stalled {stall_s:.1f} s of {run.step_s:.1f} s in training steps{share}"
    overlap = run.metrics.get("io/overlap_ratio")
    return text if overlap is None else f"{text}, overlap {100 * overlap:.0f} %"


def _peaks(metrics: Mapping[str, float]) -> list[str]:
    names = {"memory/device_peak_gib": "device", "memory/host_peak_gib": "host"}
    known = [f"{name} {_size(_bytes(metrics, key))}" for key, name in names.items() if key in metrics]
    return [f"Peak memory: {', '.join(known)}."] if known else []


def _bytes(metrics: Mapping[str, float], key: str) -> int:
    return round(metrics.get(key, 0.0) * _GIB)


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB // 10 else f"{nbytes / _MIB:.1f} MiB"
