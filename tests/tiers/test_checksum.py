from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import xxhash

from lightning_ssd.common.tensors import Region
from lightning_ssd.tiers.checksum import Sampler, checksum
from tests.support.processes import BARE_PACKAGE
from tests.support.suite import Memory
from tests.support.threads import at_once


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_003])
def test_checksum_is_xxh3_of_the_bytes(nbytes: int) -> None:
    memory = Memory.random(nbytes, 13)
    assert checksum(memory.region) == xxhash.xxh3_64_intdigest(memory.content)


def test_every_bit_counts() -> None:
    memory = Memory.random(4096)
    before = checksum(memory.region)
    for at in (0, 2000, 4095):
        byte = ctypes.c_ubyte.from_address(memory.region.address + at)
        byte.value ^= 1
        assert checksum(memory.region) != before
        byte.value ^= 1
    assert checksum(memory.region) == before


def test_only_the_region_counts() -> None:
    memory = Memory.random(8192)
    part = Region(memory.region.address + 100, 1000)
    before = checksum(part)
    ctypes.memset(memory.region.address + 1100, 0, 7000)
    assert checksum(part) == before


def test_xxhash_is_imported_only_when_needed() -> None:
    """As the package does not import it, either, see test_imports."""
    code = f"{BARE_PACKAGE}import lightning_ssd.tiers.checksum; sys.exit('xxhash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestSampler:
    def test_off_and_full(self) -> None:
        off, full = Sampler("off"), Sampler("full")
        assert not any(off.wants() for _ in range(1000))
        assert all(full.wants() for _ in range(1000))

    def test_one_in_sixteen_and_the_same_ones_each_time(self) -> None:
        first, second = Sampler("sampled"), Sampler("sampled")
        chosen = [first.wants() for _ in range(16_000)]
        assert chosen == [second.wants() for _ in range(16_000)]
        assert all(sum(chosen[start : start + 16]) == 1 for start in range(0, 16_000, 16))

    @pytest.mark.parametrize("num_per_step", [1, 8, 16, 32, 48, 100, 144, 336, 2304])
    def test_every_storage_of_a_step_is_checked_some_day(self, num_per_step: int) -> None:
        sampler = Sampler("sampled")
        checked: set[int] = set()
        for _ in range(200):
            checked |= {index for index in range(num_per_step) if sampler.wants()}
        assert checked == set(range(num_per_step))

    def test_from_many_threads(self) -> None:
        sampler, counts = Sampler("sampled"), []

        def work() -> None:
            counts.append(sum(sampler.wants() for _ in range(4000)))

        at_once(*[work] * 4)
        assert sum(counts) == 1000
