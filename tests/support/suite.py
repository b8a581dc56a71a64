"""What every backend must do. A backend joins by subclassing :class:`BackendSuite` and opening itself."""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import dataclass
from functools import partial

import pytest

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OffloaderClosedError, ShortTransferError
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from tests.support.threads import at_once

GUARD = 64


@dataclass
class Memory:
    """Host memory at ``phase`` bytes behind a page boundary, with guard bytes on both sides."""

    owner: bytearray
    start: int
    nbytes: int

    @classmethod
    def make(cls, nbytes, phase=0):
        owner = bytearray(b"\xa5" * (nbytes + 2 * 4096 + 2 * GUARD))
        address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
        return cls(owner, GUARD + (phase - address - GUARD) % 4096, nbytes)

    @classmethod
    def random(cls, nbytes, phase=0):
        memory = cls.make(nbytes, phase)
        memory.owner[memory.start : memory.start + nbytes] = os.urandom(nbytes)
        return memory

    @property
    def region(self):
        return Region(ctypes.addressof(ctypes.c_char.from_buffer(self.owner)) + self.start, self.nbytes)

    @property
    def content(self):
        return bytes(self.owner[self.start : self.start + self.nbytes])

    def guards_intact(self):
        before = self.owner[self.start - GUARD : self.start]
        after = self.owner[self.start + self.nbytes : self.start + self.nbytes + GUARD]
        return before == after == b"\xa5" * GUARD


class BackendSuite:
    """Subclass, override :meth:`make_backend`, and call the subclass ``Test...``."""

    def make_backend(self, directory):
        raise NotImplementedError

    @pytest.fixture
    def backend(self, tmp_path):
        backend = self.make_backend(tmp_path)
        yield backend
        backend.close()
        backend.close()

    @pytest.fixture
    def arena(self, backend, tmp_path):
        arena = backend.open_arena(tmp_path)
        yield arena
        arena.close()

    def test_describes_itself(self, backend):
        assert backend.name in {"posix O_DIRECT", "posix page cache", "cuFile GDS", "kvikio GDS", "kvikio POSIX"}
        assert backend.block_bytes >= 4096
        assert backend.memory_alignment >= 1
        assert backend.block_bytes & (backend.block_bytes - 1) == 0

    def test_sizes_and_odd_addresses(self, backend, arena):
        block = backend.block_bytes
        sizes = [(num_blocks * block, 0) for num_blocks in (1, 2, 3, 5, 255, 256, 257, 4097)]
        odd = [(33 * block, phase) for phase in (1, 7, 63, 64, 448, 511, 512, 513, 4032, 4095)]
        for nbytes, phase in (*sizes, *odd, (DEFAULT_CHUNK_BYTES + 3 * block, 100)):
            arena.allocate(3 * block)
            extent = arena.allocate(nbytes)
            written, read = Memory.random(nbytes, phase), Memory.make(nbytes, (3 * phase) % 4096)
            backend.write(arena, written.region, extent.offset)
            backend.read(arena, read.region, extent.offset)
            assert read.content == written.content, (nbytes, phase)
            assert read.guards_intact(), (nbytes, phase)

    def test_neighbours_stay_as_they_are(self, backend, arena):
        block = backend.block_bytes
        extent = arena.allocate(5 * block)
        whole, middle, read = Memory.random(5 * block), Memory.random(block, 9), Memory.make(5 * block)
        backend.write(arena, whole.region, extent.offset)
        backend.write(arena, middle.region, extent.offset + 2 * block)
        backend.read(arena, read.region, extent.offset)
        assert read.content == whole.content[: 2 * block] + middle.content + whole.content[3 * block :]

    def test_zero_bytes(self, backend, arena):
        backend.write(arena, Region(0, 0), 0)
        backend.read(arena, Region(0, 0), 0)

    def test_reading_past_the_end_raises(self, backend, arena):
        arena.allocate(backend.block_bytes)
        memory = Memory.make(2 * backend.block_bytes)
        with pytest.raises(ShortTransferError, match="read") as caught:
            backend.read(arena, memory.region, arena.size_bytes - backend.block_bytes)
        assert str(arena.directory) in str(caught.value)
        with pytest.raises(ShortTransferError):
            backend.read(arena, memory.region, arena.size_bytes + 4 * backend.block_bytes)

    def test_after_growth(self, backend, arena):
        nbytes = 4 * backend.block_bytes
        first, written = arena.allocate(nbytes), [Memory.random(nbytes), Memory.random(nbytes)]
        backend.write(arena, written[0].region, first.offset)
        size = arena.size_bytes
        arena.allocate(size)
        second = arena.allocate(nbytes)
        backend.write(arena, written[1].region, second.offset)
        assert arena.size_bytes > size
        for extent, memory in zip((first, second), written, strict=True):
            read = Memory.make(nbytes)
            backend.read(arena, read.region, extent.offset)
            assert read.content == memory.content

    def test_many_threads(self, backend, arena):
        def work(seed):
            choose = random.Random(seed)
            for _ in range(12):
                nbytes = choose.randrange(1, 120) * backend.block_bytes
                written, read = Memory.random(nbytes, choose.randrange(4096)), Memory.make(nbytes, 64)
                extent = arena.allocate(nbytes)
                backend.write(arena, written.region, extent.offset)
                backend.read(arena, read.region, extent.offset)
                if read.content != written.content:
                    pytest.fail(f"thread {seed} read other bytes")
                arena.free(extent)

        at_once(*(partial(work, seed) for seed in range(8)))

    def test_two_arenas(self, backend, arena, tmp_path):
        nbytes = 3 * backend.block_bytes
        other = backend.open_arena(tmp_path)
        memories = [Memory.random(nbytes), Memory.random(nbytes)]
        for each, memory in zip((arena, other), memories, strict=True):
            backend.write(each, memory.region, each.allocate(nbytes).offset)
        for each, memory in zip((arena, other), memories, strict=True):
            read = Memory.make(nbytes)
            backend.read(each, read.region, 0)
            assert read.content == memory.content
        other.close()

    def test_closed_arena(self, backend, arena):
        arena.allocate(backend.block_bytes)
        arena.close()
        memory = Memory.make(backend.block_bytes)
        with pytest.raises(OffloaderClosedError, match="is closed"):
            backend.write(arena, memory.region, 0)

    def test_probes(self, backend, tmp_path):
        assert read_back_s(backend, tmp_path, nbytes=1 << 20)
        rates = measure_rates(backend, [tmp_path], nbytes=4 << 20)
        assert rates.write_per_s > 0
        assert rates.read_per_s > 0
