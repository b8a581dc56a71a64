"""Offloaders for a device whose copies end late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.late import late_copies


@contextmanager
def late_offloaders(directory: Path, policy: Callable[..., OffloadPolicy]) -> Iterator[Callable[..., Offloader]]:
    """Makes open ones, with ``host_memory`` 0 unless it is told; they are closed at the end."""
    made = []
    with late_copies(max_delay_s=0.001) as copies:

        def make(**options: Any) -> Offloader:
            hardware = HardwareProfile(paths=[directory], host_memory=options.pop("host_memory", 0))
            named = {name: options.pop(name) for name in ("_wrap_backend",) if name in options}
            made.append(Offloader(policy=policy(**options), hardware=hardware, _copies=copies, **named))
            return made[-1].open()

        yield make
        for offloader in made:
            offloader.close()
