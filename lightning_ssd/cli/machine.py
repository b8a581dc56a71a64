"""Facts about this machine: versions, accelerator, memory. Looking starts no device and writes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.memory.malloc import malloc_name
from lightning_ssd.memory.readings import cgroup_available_bytes, cgroup_limit_bytes, host_available_bytes

__all__ = ["accelerator", "memory", "versions"]

_PACKAGES = (
    *("lightning_ssd", "torch", "lightning", "hydra-core", "wandb"),
    *("cuda-bindings", "kvikio-cu12", "kvikio-cu13"),
)
_NVIDIA_DRIVER = Path("/sys/module/nvidia/version")


def versions() -> dict[str, str | None]:
    """Return versions of Python, this package and the libraries below it; ``None``: not installed as a package."""
    return {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}}


def accelerator() -> dict[str, Any]:
    """Return the accelerator of this PyTorch; its ``type`` is ``None`` where there is only the CPU."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return {"type": None, "driver": _read(_NVIDIA_DRIVER), "built_for_cuda": torch.version.cuda}
    found: dict[str, Any] = {"type": kind.type, "count": torch.accelerator.device_count()}
    if kind.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_bytes": properties.total_memory}
    return found | {"driver": _read(_NVIDIA_DRIVER), "built_for_cuda": torch.version.cuda}


def memory() -> dict[str, Any]:
    """Return the host's memory and the limits of this process; ``None``: no limit, or unknown."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "host_available_bytes": host_available_bytes(),
        "cgroup_limit_bytes": cgroup_limit_bytes(),
        "cgroup_available_bytes": cgroup_available_bytes(),
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "malloc": malloc_name(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
