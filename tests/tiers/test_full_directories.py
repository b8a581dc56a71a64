"""Full directories: their errors hold frames, and these hold what was to be written, which has to go all the same."""

import gc
from contextlib import contextmanager

import pytest

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import reserve_together
from tests.support.owners import Owner, random_storage
from tests.support.ssd_tiers import ssd_tier

NBYTES = 1 << 20


@contextmanager
def nothing_collects_garbage():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def tier(tmp_path, monkeypatch):
    """Of two directories, the first of which is full."""
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    with ssd_tier(PosixBackend(directories, direct=False), *directories) as opened:

        def refuse(nbytes, *more):
            raise OutOfSpaceError(28, f"no {nbytes} bytes")

        for name in ("allocate", "allocate_all", "reserve"):
            monkeypatch.setattr(opened._arenas[0], name, refuse)
        yield opened


@pytest.mark.parametrize("number", [1, 4])
def test_what_was_written_elsewhere_goes(number, tier):
    with nothing_collects_garbage():
        owners = [Owner(random_storage(NBYTES, seed)) for seed in range(number)]
        keys = [StorageKey(owner.storage) for owner in owners]
        for owner in owners:
            owner.content = None
            assert tier.write(owner, NBYTES, None, label="")
        for owner in owners:
            owner.wait()
            assert owner.place.parts
            owner.storage = None
        tier.flush()
        assert not any(key.alive() for key in keys)


def test_what_room_is_reserved_for_goes(tier):
    def reserve(storage):
        reserve_together(tier._arenas, storage.nbytes(), "storages")

    with nothing_collects_garbage():
        storage = random_storage(NBYTES)
        key = StorageKey(storage)
        reserve(storage)
        del storage
        assert not key.alive()
