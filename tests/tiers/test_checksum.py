import subprocess
import sys

import xxhash

from lightning_ssd.tiers.checksum import Sampler, checksum
from tests.support.processes import BARE_PACKAGE
from tests.support.suite import Memory
from tests.support.threads import at_once


def test_checksum_is_xxh3_of_the_bytes():
    for nbytes in (0, 1, 4096, 100_003):
        memory = Memory.random(nbytes, 13)
        assert checksum(memory.region) == xxhash.xxh3_64_intdigest(memory.content)


def test_xxhash_is_imported_only_when_needed():
    """As the package does not import it, either, see test_imports."""
    code = f"{BARE_PACKAGE}import lightning_ssd.tiers.checksum; sys.exit('xxhash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestSampler:
    def test_off_and_full(self):
        off, full = Sampler("off"), Sampler("full")
        assert not any(off.wants() for _ in range(1000))
        assert all(full.wants() for _ in range(1000))

    def test_one_in_sixteen_and_the_same_ones_each_time(self):
        first, second = Sampler("sampled"), Sampler("sampled")
        chosen = [first.wants() for _ in range(16_000)]
        assert chosen == [second.wants() for _ in range(16_000)]
        assert all(sum(chosen[start : start + 16]) == 1 for start in range(0, 16_000, 16))

    def test_every_storage_of_a_step_is_checked_some_day(self):
        for num_per_step in (1, 8, 16, 32, 48, 100, 144, 336):
            sampler = Sampler("sampled")
            checked = set()
            for _ in range(200):
                checked |= {index for index in range(num_per_step) if sampler.wants()}
            assert checked == set(range(num_per_step))

    def test_from_many_threads(self):
        sampler, counts = Sampler("sampled"), []

        def work():
            counts.append(sum(sampler.wants() for _ in range(4000)))

        at_once(*[work] * 4)
        assert sum(counts) == 1000
