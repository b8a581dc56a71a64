"""Storages that go to the host tier and come back."""

import time

import torch

from tests.support.late import HeldCopies
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")


def stored(tier, nbytes, seed=0):
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


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)
