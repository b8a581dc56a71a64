"""Faults below Python: a library in front of the C library's reads and writes, built here from ``shim.c``.

    library = build(directory)                          # with cc
    subprocess.run(..., env=os.environ | {"LD_PRELOAD": str(library)})
    # and in that process:
    with armed("short", seed=3, one_in=4) as shim: ...

Only what goes to files opened with ``O_DIRECT`` is touched, which in such a process are the spill files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

__all__ = ["Shim", "ShimUnavailableError", "armed", "build"]

Kind = Literal["fail", "short", "interrupt", "slow"]
_KINDS: dict[str, int] = {"fail": 1, "short": 2, "interrupt": 3, "slow": 4}
READ, WRITE, ALLOCATE = 1, 2, 4
_SOURCE = Path(__file__).with_suffix(".c")
_BUILT_WITHIN_S = 60


class ShimUnavailableError(Exception):
    """The library cannot be built or is not loaded; the text says why."""


def build(directory: Path) -> Path:
    """Compile the library into ``directory``; returns its path.

    Raises:
        ShimUnavailableError: no C compiler, or it fails.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise ShimUnavailableError("no C compiler is found (cc, gcc or clang)")
    library = directory / "fault_shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILT_WITHIN_S)
    if done.returncode:
        raise ShimUnavailableError(f"{compiler} cannot build {_SOURCE.name}: {done.stderr.strip()[:300]}")
    return library


def _library() -> Any:
    library = ctypes.CDLL(None)
    try:
        library.fault_count.restype = ctypes.c_uint64
        library.fault_arm.restype = None
        library.fault_arm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint, ctypes.c_int, ctypes.c_uint]
        library.fault_arm.argtypes += [ctypes.c_uint64]
    except AttributeError:
        return None
    return library


class Shim:
    """The library in this process."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @property
    def injected(self) -> int:
        """Faults since it was armed."""
        return int(self._library.fault_count())

    def disarm(self) -> None:
        """No more faults; the count stays."""
        self._library.fault_disarm()


@contextmanager
def armed(
    kind: Kind,
    *,
    seed: int,
    one_in: int = 1,
    directions: int = READ | WRITE,
    code: int = errno.EIO,
    delay_us: int = 2000,
) -> Iterator[Shim]:
    """Inject faults until the end of the block.

    Args:
        kind: "fail" (with ``code``), "short", "interrupt" (EINTR) or "slow".
        seed: which calls are struck.
        one_in: one call in so many, on the average.
        directions: a sum of ``READ``, ``WRITE`` and ``ALLOCATE``.
        code: errno of "fail".
        delay_us: microseconds that "slow" takes at most.

    Raises:
        ShimUnavailableError: the process was not started with the library.
    """
    library = _library()
    if library is None:
        raise ShimUnavailableError(f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r} does not name the built library")
    library.fault_arm(_KINDS[kind], directions, one_in, code, delay_us, seed)
    shim = Shim(library)
    try:
        yield shim
    finally:
        shim.disarm()
