"""What a machine has, for ``recipes.gpu``: versions, driver, topology, memory, and the rates of a drive.

    python -m recipes.gpu.facts --dir DIR --json FILE

What cannot be had is told in its place.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["inspect_machine", "main"]

PACKAGES = (
    *("torch", "triton", "lightning", "pytorch-lightning", "xxhash", "numpy", "pytest", "pytest-timeout"),
    *("transformers", "cuda-bindings", "kvikio-cu12", "kvikio-cu13", "hydra-core", "wandb"),
)
PROGRAMS = ("nvidia-smi", "findmnt", "git", "fio", "gcc", "nsys")
_DRIVER = "name,driver_version,memory.total,pcie.link.gen.max"
_PROGRAM_WITHIN_S = 10.0
_METERED_BYTES = 256 << 20


def inspect_machine(directory: Path, *, metered_bytes: int = _METERED_BYTES) -> dict[str, Any]:
    """Everything that can be had; what cannot says why. No host name, no paths."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "programs": {name: shutil.which(name) is not None for name in PROGRAMS},
        "topology": _output("nvidia-smi", "topo", "-m"),
        "driver": _output("nvidia-smi", f"--query-gpu={_DRIVER}", "--format=csv"),
        "mount": _output("findmnt", "-n", "-o", "FSTYPE,SIZE,AVAIL,OPTIONS", "-T", str(directory)),
        "disk_free_bytes": shutil.disk_usage(directory).free,
    }
    try:
        return facts | _of_torch() | _of_package(directory, metered_bytes)
    except ImportError as error:
        return facts | {"missing": f"{type(error).__name__}: {error}"}


def _of_torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "has_cuda": False}
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "has_cuda": True,
            "num_devices": torch.cuda.device_count(),
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "device_free_bytes": free,
            "device_bytes": total,
        }
    return found


def _of_package(directory: Path, metered_bytes: int) -> dict[str, Any]:
    from lightning_ssd.memory.readings import host_available_bytes
    from recipes.benchmarks.harness.drive import DriveMeter
    from recipes.benchmarks.step import commit

    meter = DriveMeter(directory, metered_bytes)
    try:
        rates = meter.measure()
    finally:
        meter.close()
    return {
        "commit": commit(),
        "host_available_bytes": host_available_bytes(),
        "drive": meter.name,
        "write_per_s": rates.write_alone_per_s,
        "read_per_s": rates.read_alone_per_s,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """Of a program that is there or not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROGRAM_WITHIN_S)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not answered within {_PROGRAM_WITHIN_S:.0f} s"
    return done.stdout.strip() or done.stderr.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the facts; 1 where the package cannot be imported."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu.facts", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="on the drive")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--metered-bytes", type=int, default=_METERED_BYTES, help="of the files that measure the drive")
    args = parser.parse_args(arguments)
    facts = inspect_machine(args.dir, metered_bytes=args.metered_bytes)
    args.json.write_text(json.dumps(facts, indent=1))
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n")
    if "missing" in facts:
        print(f"the package cannot be imported: {facts['missing']}", file=sys.stderr)
    return 1 if "missing" in facts else 0


if __name__ == "__main__":
    sys.exit(main())
