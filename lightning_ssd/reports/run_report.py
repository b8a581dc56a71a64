"""Everything reported about one run, in one object that is written as JSON and read by every renderer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_ssd.errors import ConfigError
from lightning_ssd.telemetry.stats import saved_pct
from lightning_ssd.telemetry.step_record import StepRecord

__all__ = ["JSON_NAME", "RunReport", "load_report"]

JSON_NAME = "report.json"
_FORMAT = 2
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run, or what there is of it so far. Names and units of nested numbers are those of the classes named."""

    title: str
    created: str
    """When, for people."""
    num_steps: int
    """Optimizer steps that were measured."""
    step_s: float
    """Time of one of them, on average, without data loading and validation."""
    summary: str = ""
    """The verdict of ``OffloadMonitor``, or how the run ended."""
    num_processes: int = 1
    backend: str = ""
    unusable: str | None = None
    policy: Mapping[str, Any] | None = None
    """Fields of ``OffloadPolicy``; ``None``: the strategy does not offload."""
    hardware: Mapping[str, Any] | None = None
    """Fields of ``HardwareProfile``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OffloadStats``."""
    optimizers: Sequence[Mapping[str, Any]] = ()
    """Fields of ``OptimizerStats``, one mapping each."""
    plan: Mapping[str, Any] | None = None
    """Fields of ``PlanReport``."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Where it ran, such as ``device`` and ``memory_bytes``. ``write_bytes_per_s`` and ``read_bytes_per_s`` are of all
    drives together, as planned with or as seen."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All steps merged into one row of the metrics' table."""
    rows: Sequence[Mapping[str, float]] = ()
    """Rows that were logged, with ``step``."""
    record: StepRecord | None = None
    """The last step that was recorded."""

    def to_json(self) -> str:
        """The file's text."""
        content = asdict(self)
        content["record"] = None if self.record is None else self.record.to_json()
        return json.dumps(_finite({"format": _FORMAT, **content}), default=os.fspath, allow_nan=False)

    @property
    def peak_bytes(self) -> float | None:
        """Peak of all memory: of the device, else of the process; ``None``: unknown."""
        peak = self.metrics.get("memory/device_peak_gib", self.metrics.get("memory/host_peak_gib"))
        return None if peak is None else peak * _GIB

    def held(self, name: str) -> float:
        """Peak bytes of saved activations, ``resident`` or ``saved``: a reset by the loop does not make it less."""
        return max(self.stat(f"{name}_peak_bytes"), _GIB * self.metrics.get(f"memory/activations_{name}_peak_gib", 0.0))

    @property
    def settled_bytes(self) -> float:
        """Peak bytes of saved activations in memory, of the second half of the passes."""
        return self.stat("settled_peak_bytes") or self.held("resident")

    @property
    def saved_pct(self) -> int | None:
        """Per cent by which :attr:`settled_bytes` are less than keeping all; ``None``: there were none."""
        return saved_pct(self.settled_bytes, self.held("saved"))

    @property
    def lacks_whole_pages(self) -> bool:
        """Whether tensors were on a CPU, in glibc's memory, without the switch that makes moving them cheap."""
        malloc = str(self.machine.get("malloc", ""))
        return self.machine.get("device") == "cpu" and malloc.startswith("glibc") and "whole pages" not in malloc

    def stat(self, name: str) -> float:
        """A counter; 0 where nothing offloads."""
        return float(self.stats.get(name, 0))


def _finite(value: Any) -> Any:
    """Return the value without entries whose numbers JSON does not have."""
    if isinstance(value, Mapping):
        known = ((key, part) for key, part in value.items() if not isinstance(part, float) or math.isfinite(part))
        return {key: _finite(part) for key, part in known}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def load_report(run: str | os.PathLike[str]) -> RunReport:
    """Read the report of a run.

    Args:
        run: the file, or a directory that has it.

    Raises:
        ConfigError: there is none, or it is no such file.
    """
    path = Path(run)
    file = path / JSON_NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("it is of another version")
        content["record"] = None if content["record"] is None else StepRecord.from_json(content["record"])
        unknown = set(content) - {one.name for one in fields(RunReport)}
        if unknown:
            raise ValueError(f"it has {', '.join(sorted(unknown))}")
        return RunReport(**content)
    except FileNotFoundError:
        raise ConfigError(
            f"expected {JSON_NAME} in {path}, and found none; a run writes it where "
            'OffloadMonitor(report_dir="...") names a directory'
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"expected a report of lightning_ssd in {file}, and cannot read it ({error!r}); write it anew with a run "
            'that has OffloadMonitor(report_dir="...")'
        ) from None
