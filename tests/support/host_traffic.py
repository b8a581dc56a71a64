"""Storages that go to the host tier and come back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_ssd.tiers.host import HostTier
from tests.support.late import HeldCopies
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
MakeTier = Callable[..., HostTier]


def stored(tier: HostTier, nbytes: int, seed: int = 0) -> Owner:
    """One storage that is down already."""
    owner = Owner(random_storage(nbytes, seed))
    copies = tier.copies
    if isinstance(copies, HeldCopies):
        copies.free_run()
    assert tier.write(owner, nbytes, None, label=f"storage {seed}")
    owner.wait()
    if isinstance(copies, HeldCopies):
        copies.held = True
    assert owner.place.body_nbytes == nbytes
    owner.storage = None
    return owner


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)
