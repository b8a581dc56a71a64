"""Settings, machine and versions of a run as plain values, for W&B and reports."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_ssd.memory.malloc import malloc_name
from lightning_ssd.memory.readings import capacity_bytes
from lightning_ssd.offloader import Offloader

__all__ = ["machine_of", "settings_of", "versions"]

_LIBRARIES = ("lightning_ssd", "torch", "lightning")


def settings_of(offloader: Offloader | None) -> dict[str, Any]:
    """``policy`` and ``hardware`` as the user has set them; empty where nothing offloads."""
    if offloader is None:
        return {}
    hardware = asdict(offloader.hardware)
    return {"policy": asdict(offloader.policy), "hardware": {**hardware, "paths": [str(p) for p in hardware["paths"]]}}


def machine_of(offloader: Offloader | None, device: torch.device) -> dict[str, Any]:
    """Return the facts about the machine that the run knows. Nothing is measured, and unknown facts are absent: drive
    rates are those of the probe, where there was one, and of the run so far.
    """
    rates = None if offloader is None else offloader.drive_rates
    found = {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "num_cpus": os.cpu_count(),
        "malloc": malloc_name(),
        "memory_bytes": capacity_bytes(device),
        "backend": None if offloader is None else offloader.description,
        "write_bytes_per_s": None if rates is None else rates.write_bytes_per_s or None,
        "read_bytes_per_s": None if rates is None else rates.read_bytes_per_s or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries below it that are installed."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # run from a checkout that was never installed
            continue
    return found
