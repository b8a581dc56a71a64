"""One honest paragraph on a run. Pure: numbers in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ssd.common.formatting import format_sizes, pluralize
from lightning_ssd.config import OffloadPolicy
from lightning_ssd.telemetry.stats import OffloadStats, OptimizerStats

__all__ = ["RunFacts", "headline", "is_much_held_elsewhere", "summarize_run"]

_GIB = 1 << 30
_MUCH = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
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
    unusable: str | None = None
    """Why nothing could be moved to a drive; ``None``: it could."""
    plan: str | None = None
    """Predicted against measured; ``None``: no step has followed a plan."""
    overhead: tuple[float, str] | None = None
    """What moving took, relative to a pass without it, and this by cause; ``None``: not measured."""
    drive_life_days: float | None = None
    """At the vendor's rating and this run's rate of writing, day and night."""
    optimizers: Sequence[OptimizerStats] = ()
    """Counters of each optimizer whose states were offloaded."""


def summarize_run(run: RunFacts) -> str:
    """What was held, moved and waited for; plain words where nothing was offloaded at all."""
    parts = _activations(run), _weights(run), _optimizers(run.optimizers), _life(run.drive_life_days)
    sentences = [sentence for part in (*parts, _peaks(run.metrics)) for sentence in part]
    if run.num_processes > 1:
        sentences.append(f"Numbers of the first of {run.num_processes} processes.")
    return " ".join(sentences)


def is_much_held_elsewhere(held_bytes: float, saved_bytes: float, kept_bytes: float) -> bool:
    """Return whether so much of what was sent away never left memory that the user should know.

    A little is held in any training: what a loop's variables show when backward begins.
    """
    return held_bytes > _MUCH * (saved_bytes - kept_bytes)


def headline(run: RunFacts) -> str:
    """Return a line to compare runs by. What is not known is left out; empty where nothing offloads.

    For example ``activations 2.4 -> 0.5 GiB, cost 2.3 % (stalls 0.4, hooks 1.5, CPU 0.4), 18 GiB/h written, drive life
    4.1 years``.
    """
    if run.stats is None:
        return ""
    saved = max(run.stats.saved_peak_bytes, _bytes(run.metrics, "memory/activations_saved_peak_gib"))
    resident = max(run.stats.resident_peak_bytes, _bytes(run.metrics, "memory/activations_resident_peak_gib"))
    before, after = format_sizes(saved, resident)
    parts = [f"activations {before.partition(' ')[0]} -> {after}"]
    if run.overhead is not None:
        ratio, causes = run.overhead
        parts.append(f"cost {100 * ratio:.1f} % ({causes})")
    written = run.stats.with_optimizers(run.optimizers).bytes_written
    if written and run.step_s > 0:
        parts.append(f"{format_sizes(written * 3600 / run.step_s)[0]}/h written")
    if run.drive_life_days is not None:
        parts.append(f"drive life {run.drive_life_days / 365.25:,.1f} years")
    return ", ".join(parts)


def _activations(run: RunFacts) -> list[str]:
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
            f"{pluralize(stats.num_kept_small, 'smaller one was', 'smaller ones were')} kept.{advice}"
        ]
    resident, saved = format_sizes(resident_peak, saved_peak)
    if policy.activations == "recompute":
        return [f"Blocks were recomputed, as asked; what they leave was kept: at most {saved} at a time."]
    if policy.activations == "keep":
        return [f"Saved activations: all kept in memory, as asked; at most {saved} at a time."]
    share = 100 * resident_peak / saved_peak if saved_peak else 100.0
    sentences = [
        f"Saved activations: at most {resident} resident of {saved} that keeping would have held ({share:.0f} %).",
        f"{_moved(stats)}; {_stalls(stats.stall_s, run)}.",
    ]
    if stats.failures:
        sentences.append(
            f"{pluralize(stats.failures, 'transfer', 'transfers')} failed; "
            f"{pluralize(stats.fallbacks, 'time', 'times')} training went on with the tensor in memory or a second try."
        )
    if run.unusable is not None and not stats.bytes_written:
        sentences.append(f"Nothing was moved to a drive, because {run.unusable}.")
    if run.plan is not None:
        sentences.append(run.plan)
    return [*sentences, f"Backend: {run.backend}."]


def _weights(run: RunFacts) -> list[str]:
    if run.stats is None or not (run.stats.weights_bytes or run.stats.weights_kept_bytes):
        return []
    peak = max(run.stats.weights_resident_peak_bytes, _bytes(run.metrics, "memory/weights_resident_peak_gib"))
    resident, waiting, kept = format_sizes(peak, run.stats.weights_bytes, run.stats.weights_kept_bytes)
    if not run.stats.weights_bytes:
        return [f"Weights: none wait on SSD, since memory has room for all {kept} that could."]
    stay = f"; memory has room for {kept} more, which stay" if run.stats.weights_kept_bytes else ""
    return [f"Weights: {waiting} wait on SSD, at most {resident} of them brought in at a time{stay}."]


def _optimizers(optimizers: Sequence[OptimizerStats]) -> list[str]:
    if not optimizers:
        return []
    resident, states = format_sizes(
        sum(o.resident_peak_bytes for o in optimizers), sum(o.state_bytes for o in optimizers)
    )
    written, read = format_sizes(sum(o.written_bytes for o in optimizers), sum(o.read_bytes for o in optimizers))
    return [
        f"Optimizer states: at most {resident} of {states} in memory; {written} written, {read} read; "
        f"steps waited {sum(o.stall_s for o in optimizers):.1f} s for them."
    ]


def _life(life: float | None) -> list[str]:
    if life is None:
        return []
    days = f"{life:,.0f} days" if life >= 10 else f"{life:.1f} days"
    return [f"Written to like this day and night, a drive reaches its vendor's rating in {days}."]


def _moved(stats: OffloadStats) -> str:
    written, on_host, read, forwarded = format_sizes(
        stats.bytes_written, stats.bytes_host, stats.bytes_read, stats.bytes_forwarded
    )
    to_host = f" and {on_host} put into host memory" if stats.bytes_host else ""
    moved = f"{written} written{to_host}, {read} read, {forwarded} taken back without a read"
    if not is_much_held_elsewhere(stats.bytes_held_elsewhere, stats.bytes_saved, stats.bytes_kept):
        return moved
    held = format_sizes(stats.bytes_held_elsewhere)[0]
    return f"{moved} (held elsewhere: {held}, whose writes freed nothing, because the program holds those tensors)"


def _stalls(stall_s: float, run: RunFacts) -> str:
    share = f" ({100 * stall_s / run.step_s:.1f} %)" if run.step_s > 0 else ""
    text = f"stalled {stall_s:.1f} s of {run.step_s:.1f} s in training steps{share}"
    overlap = run.metrics.get("io/overlap_ratio")
    return text if overlap is None else f"{text}, overlap {100 * overlap:.0f} %"


def _peaks(metrics: Mapping[str, float]) -> list[str]:
    names = {"memory/device_peak_gib": "device", "memory/host_peak_gib": "host"}
    known = {name: _bytes(metrics, key) for key, name in names.items() if key in metrics}
    if not known:
        return []
    return [f"Peak memory: {', '.join(map(' '.join, zip(known, format_sizes(*known.values()), strict=True)))}."]


def _bytes(metrics: Mapping[str, float], key: str) -> int:
    return round(metrics.get(key, 0.0) * _GIB)
