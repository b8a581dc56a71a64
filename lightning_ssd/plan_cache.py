"""What searches have learnt, kept in a small file from one run to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.malloc import malloc_name
from lightning_ssd.planning.move_search import Learnt
from lightning_ssd.undisturbed import undisturbed

__all__ = ["PlanCache", "machine_of"]

_log = logging.getLogger(__name__)

_FORM = 1
_MAX_MACHINES, _MAX_KINDS = 16, 64


def machine_of(device: torch.device, paths: Sequence[Path], **settings: object) -> dict[str, str]:
    """What a cost of moving depends on: processor, device, malloc, PyTorch, directories, and these settings."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processor": _processor(),
        "malloc": malloc_name(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "paths": os.pathsep.join(map(str, paths)),
        **{name: str(value) for name, value in settings.items()},
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


class PlanCache:
    """One file for all machines and models that are given it. What is not of this machine is left as it is.

    A file that cannot be read is told of and begun anew; one that cannot be written is told of once. Neither ends a
    training.

    Args:
        path: of the file; need not be there.
        machine: what was learnt elsewhere says nothing here.
    """

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        self._path = path
        self._machine = machine
        self._own: dict[str, dict[str, float]] = {}
        """Learnt in this run."""
        self._is_told = False
        self._known = self._of_machine(self._read())

    def get(self, sizes: Sequence[int]) -> Learnt | None:
        """What is known of passes that save storages of these sizes, in bytes."""
        try:
            return Learnt(**self._known[_digest(list(sizes))])
        except (KeyError, TypeError):
            return None

    def put(self, sizes: Sequence[int], learnt: Learnt) -> None:
        """Keep it, for :meth:`save`."""
        self._own[_digest(list(sizes))] = asdict(learnt)

    def save(self) -> None:
        """Write what was put, beside what others have written meanwhile. Whole or not at all."""
        if self._own:
            undisturbed(self._save, "lightning_ssd-plan-cache")

    def _save(self) -> None:
        machines = self._read()
        kinds = {**self._of_machine(machines), **self._own}
        machines.pop(_digest(self._machine), None)
        machines[_digest(self._machine)] = {"machine": self._machine, "kinds": _latest(kinds, _MAX_KINDS)}
        text = json.dumps({"form": _FORM, "machines": _latest(machines, _MAX_MACHINES)}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text + "\n")
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self._tell(f"could not be written ({error.strerror}); the next run begins to search anew")

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
            if content["form"] != _FORM:
                _log.info("%s is of another version of this package, and not read", self._path)
                return {}
            return dict(content["machines"])
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._tell(f"could not be read ({error.strerror}); the search begins anew")
        except (ValueError, KeyError, TypeError):
            self._tell("is no plan cache, or a broken one; the search begins anew, and it will be overwritten")
        return {}

    def _of_machine(self, machines: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(machines[_digest(self._machine)]["kinds"])
        except (KeyError, TypeError, ValueError):
            return {}

    def _tell(self, what: str) -> None:
        if not self._is_told:
            self._is_told = True
            warnings.warn(f"OffloadPolicy.plan_cache: {self._path} {what}", stacklevel=2)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _latest(entries: dict[str, Any], number: int) -> dict[str, Any]:
    return dict(list(entries.items())[-number:])
