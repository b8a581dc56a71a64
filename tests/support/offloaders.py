"""Offloaders for models on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy


@contextmanager
def offloaders(directory: Path, policy: Callable[..., OffloadPolicy]) -> Iterator[Callable[..., Offloader]]:
    """Makes open ones with these modules and options of the policy; they are closed at the end."""
    made = []

    def make(*modules: nn.Module, **options: Any) -> Offloader:
        named = {name: options.pop(name) for name in ("_wrap_backend",) if name in options}
        made.append(Offloader(policy=policy(**options), hardware=HardwareProfile(paths=[directory]), **named))
        return made[-1].open(*modules)

    yield make
    for offloader in made:
        offloader.close()
