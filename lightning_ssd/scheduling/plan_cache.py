"""What searches have learnt, kept in a small file from one run to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.common.uninterrupted import undisturbed
from lightning_ssd.memory.malloc import malloc_name
from lightning_ssd.scheduling.move_search import Learnt

try:
    import fcntl
except ImportError:  # not on this system: two runs that end at once may lose one's entry
    fcntl = None  # type: ignore[assignment]

__all__ = ["PlanCache", "machine_of"]

_log = logging.getLogger(__name__)

_FORM = 1
_MAX_MACHINES, _MAX_KINDS = 16, 64


def machine_of(device: torch.device, paths: Sequence[Path], **settings: object) -> dict[str, str]:
    """What a cost of moving depends on: processor, device, malloc, PyTorch, drives, and these settings."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processor": _processor(),
        "malloc": malloc_name(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "drives": " ".join(str(_drive_of(path)) for path in paths),
        **{name: str(value) for name, value in settings.items()},
    }


def _drive_of(path: Path) -> int:
    """Number of the file system: each run may have a directory of its own there."""
    return next(one.stat().st_dev for one in (path, *path.parents) if one.exists())


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


class PlanCache:
    """One file for all machines and models that are given it. What is not of this machine is left as it is.

    A file that is broken is told of and begun anew; one that cannot be read or written, or is of another version, is
    left as it is. None ends a training.

    Args:
        path: of the file; need not be there.
        machine: what was learnt elsewhere says nothing here.
    """

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        self._path = Path(os.path.realpath(path))
        self._machine = machine
        self._own: dict[str, dict[str, float] | None] = {}
        """Learnt in this run; ``None``: what was known before is wrong."""
        self._is_told = False
        self._is_ours = True
        self._known = self._of_machine(self._read())

    def get(self, sizes: Sequence[int]) -> Learnt | None:
        """What is known of passes that save storages of these sizes, in bytes."""
        try:
            return _checked(self._known[_digest(list(sizes))])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, sizes: Sequence[int], learnt: Learnt) -> None:
        """Keep it, for :meth:`save`."""
        self._note(_digest(list(sizes)), asdict(learnt))

    def drop(self, sizes: Sequence[int]) -> None:
        """What was known does not hold any more."""
        key = _digest(list(sizes))
        if key in self._known or key in self._own:
            self._note(key, None)
            self.save()

    def _note(self, key: str, learnt: dict[str, float] | None) -> None:
        self._own.pop(key, None)  # the latest come last
        self._own[key] = learnt
        self._own = _latest(self._own, _MAX_KINDS)

    def save(self) -> None:
        """Write what was put, beside what others have written meanwhile. Whole or not at all."""
        if self._own and self._is_ours:
            undisturbed(self._save, "lightning_ssd-plan-cache")

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path.parent):
                machines = self._read()
                if self._is_ours:
                    self._write(machines)
        except OSError as error:
            self._tell(f"could not be written ({error.strerror}); the next run begins to search anew")

    def _write(self, machines: dict[str, Any]) -> None:
        kinds = {key: kind for key, kind in self._of_machine(machines).items() if key not in self._own}
        kinds |= {key: kind for key, kind in self._own.items() if kind is not None}
        machines.pop(_digest(self._machine), None)
        machines[_digest(self._machine)] = {"machine": self._machine, "kinds": _latest(kinds, _MAX_KINDS)}
        text = json.dumps({"form": _FORM, "machines": _latest(machines, _MAX_MACHINES)}, indent=1)
        mode = self._path.stat().st_mode & 0o777 if self._path.exists() else 0o644
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text + "\n")
            os.chmod(name, mode)
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
            if content["form"] != _FORM:
                self._is_ours = False
                _log.info("%s is of another version of this package, and left as it is", self._path)
                return {}
            return dict(content["machines"])
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._is_ours = False
            self._tell(f"could not be read ({error.strerror}); the search begins anew")
        except (ValueError, KeyError, TypeError, RecursionError):
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


def _checked(entry: dict[str, Any]) -> Learnt:
    """As it was written.

    Raises:
        ValueError: it was not, or by somebody else.
        TypeError: the same.
        KeyError: the same.
    """
    cost, nbytes, slowdown = (entry[name] for name in ("cost_s_per_byte", "good_bytes", "slowdown"))
    if not (math.isfinite(cost) and cost >= 0 and isinstance(nbytes, int) and nbytes >= 0):
        raise ValueError(entry)
    if not (math.isfinite(slowdown) and slowdown > 0):
        raise ValueError(entry)
    return Learnt(float(cost), nbytes, float(slowdown))


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One run at a time, where the file system knows locks."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _latest(entries: dict[str, Any], number: int) -> dict[str, Any]:
    return dict(list(entries.items())[-number:])
