"""One training run in numbers, for people and for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Whoever only reads a summary need not wait seconds for torch and Lightning.
    from lightning_ssd import OffloadStats
    from recipes.meter import StepMeter

__all__ = ["RunSummary"]

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One training run in numbers; bytes and seconds, per step where the name says so."""

    model: str
    offload: str
    losses: Sequence[float]
    """One per step."""
    step_s: float
    """Median of the steps after the warm-up."""
    peak_above_rest_bytes: int
    """Of the device; on a CPU of the process; since the warm-up."""
    typical_peak_above_rest_bytes: int = 0
    """The same in the median step."""
    weights_digest: str
    """Hash of all weights at the end."""
    counted: bool = False
    """Whether saved activations went through us; if not, what follows is unknown. All since the warm-up."""
    settled_peak_bytes: int = 0
    """Saved activations in memory at the worst moment of the second half of the passes, as in the monitor's verdict."""
    saved_peak_bytes: int = 0
    written_bytes_per_step: int = 0
    read_bytes_per_step: int = 0
    stall_s_per_step: float = 0.0
    weights_bytes: int = 0
    """Weights that wait on drives between their uses."""
    backend: str = ""

    @classmethod
    def of(
        cls,
        meter: StepMeter,
        *,
        model: str,
        offload: str,
        losses: Sequence[float],
        weights_digest: str,
        stats: OffloadStats | None = None,
        stats_before: OffloadStats | None = None,
        backend: str = "",
    ) -> RunSummary:
        """Read the meter and the counters, these from ``stats_before`` on; ``stats=None``: nothing was counted."""
        counted: dict[str, Any] = {}
        if stats is not None:
            before = stats_before or type(stats)()
            num_steps = max(1, len(losses) - meter.num_warmup)
            counted = {
                "counted": True,
                "settled_peak_bytes": stats.settled_peak_bytes or stats.resident_peak_bytes,
                "saved_peak_bytes": stats.saved_peak_bytes,
                "written_bytes_per_step": (stats.bytes_written - before.bytes_written) // num_steps,
                "read_bytes_per_step": (stats.bytes_read - before.bytes_read) // num_steps,
                "stall_s_per_step": (stats.stall_s - before.stall_s) / num_steps,
                "weights_bytes": stats.weights_bytes,
                "backend": backend,
            }
        return cls(
            model=model,
            offload=offload,
            losses=list(losses),
            step_s=meter.median_step_s,
            peak_above_rest_bytes=meter.peak_above_rest_bytes,
            typical_peak_above_rest_bytes=meter.typical_peak_above_rest_bytes,
            weights_digest=weights_digest,
            **counted,
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunSummary:
        """What :meth:`write` wrote."""
        return cls(**json.loads(path.read_text()))

    def line(self) -> str:
        """Return it for people: one line."""
        from lightning_ssd.telemetry.stats import describe_held  # takes seconds, see above

        parts = [
            f"model={self.model} offload={self.offload}",
            f"loss {self.losses[-1]:.6f} after {len(self.losses)} steps" if self.losses else "no steps",
            f"{self.step_s:.2f} s per step",
            f"peak {self.peak_above_rest_bytes / _MIB:,.0f} MiB above rest",
        ]
        if self.counted:
            parts += [
                f"saved activations {describe_held(self.settled_peak_bytes, self.saved_peak_bytes)}",
                f"per step {self.written_bytes_per_step / _MIB:,.0f} MiB written, "
                f"{self.read_bytes_per_step / _MIB:,.0f} MiB read, {self.stall_s_per_step:.3f} s stalled",
            ]
        if self.weights_bytes:
            parts.append(f"{self.weights_bytes / _MIB:,.0f} MiB of weights offloaded")
        return " | ".join([*parts, f"weights {self.weights_digest[:12]}"])
