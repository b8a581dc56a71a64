"""A machine as its data sheets, or a measurement, describe it: what planning for a machine that is not here needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.plan import Machine, TierRates

__all__ = ["MachineProfile"]

_GB = 1e9
_NAMES = ("accelerator", "precision")
_COUNTS = ("num_devices", "num_drives")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """Facts of one machine, in the units of data sheets (GB and TB are powers of 1,000).

    Training never reads them: it measures. ``None``: unknown, so that what needs it cannot be predicted.
    """

    accelerator: str = "auto"
    """Lightning's name of what trains, such as "cuda"."""
    precision: str = "32-true"
    """Lightning's name of the precision that ``device_peak_tflops`` is of."""
    num_devices: int = 1
    """Accelerators, each with a process of its own; 1 for a CPU."""
    device_memory_gb: float | None = None
    """Memory of each device; on a CPU the host's."""
    device_peak_tflops: float | None = None
    """Rate of matrix products on each device in ``precision``, dense, as printed."""
    compute_efficiency: float = 0.4
    """Part of it that training reaches: 0.38 to 0.43 in bfloat16 on H100 (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    link_gb_per_s: float | None = None
    """Between each device and the host, per direction; ``None`` on a CPU, where there is none."""
    host_memory_gb: float | None = None
    num_drives: int = 1
    drive_write_gb_per_s: float | None = None
    """Rate of each drive, for long sequential writes."""
    drive_read_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            name = f"{type(self).__name__}.{field.name}={value!r}"
            if field.name in _NAMES:
                if not (isinstance(value, str) and value):
                    raise ConfigError(f"{name} is no name; write Lightning's, such as {field.default}")
            elif field.name in _COUNTS:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{name}; write an integer of at least 1")
            elif value is None and field.default is None:
                continue
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name}; write a number above 0, or None (null in YAML) if unknown")
        if self.compute_efficiency > 1:
            raise ConfigError(f"{type(self).__name__}.compute_efficiency={self.compute_efficiency!r}; write at most 1")

    @property
    def is_accelerator(self) -> bool:
        """Whether what trains has memory of its own."""
        return self.accelerator not in ("cpu", "auto") or self.link_gb_per_s is not None

    @property
    def flops_per_s(self) -> float | None:
        """Operations per second that training reaches on one device; ``None``: unknown."""
        peak = self.device_peak_tflops
        return None if peak is None else peak * 1e12 * self.compute_efficiency

    def tiers(self, num_processes: int) -> Machine | None:
        """Return an equal part of all drives, for one of so many processes. ``None``: the rates are unknown."""
        if self.drive_write_gb_per_s is None or self.drive_read_gb_per_s is None:
            return None
        share = self.num_drives / num_processes
        link = math.inf if self.link_gb_per_s is None else self.link_gb_per_s
        return Machine(
            ssd=TierRates(
                write_bytes_per_s=min(share * self.drive_write_gb_per_s, link) * _GB,
                read_bytes_per_s=min(share * self.drive_read_gb_per_s, link) * _GB,
            )
        )
