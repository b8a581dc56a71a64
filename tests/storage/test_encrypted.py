"""Encrypted spill files: no plaintext in the file, no stream twice, and the very bits back."""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, ConfigError, CorruptionError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.planning import update_memory
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend
from lightning_ssd.storage.encrypted import EncryptedBackend, _WriteNumbers
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from tests.support.helpers import raw_bytes
from tests.support.suite import BackendSuite, Memory

pytest.importorskip("cryptography", reason="needs the extra `encrypt` (the library cryptography)")

PATTERN = b"the loss of the third epoch, and whose data it was trained on..."


def bytes_in_file(arena: Arena) -> bytes:
    """What anybody who gets hold of the drive sees: the file past our code, through an opening of its own."""
    return Path(f"/proc/self/fd/{arena.fd}").read_bytes()


class TestEncrypted(BackendSuite):
    def make_backend(self, directory: Path) -> Backend:
        return EncryptedBackend(PosixBackend([directory]))

    def test_describes_itself(self, backend: Backend) -> None:
        assert backend.name in {"posix O_DIRECT, encrypted", "posix page cache, encrypted"}
        assert backend.memory_alignment == 1
        assert not backend.moves_device_memory


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[EncryptedBackend]:
    backend = EncryptedBackend(PosixBackend([tmp_path]))
    yield backend
    backend.close()


@pytest.fixture
def arena(backend: EncryptedBackend, tmp_path: Path) -> Iterator[Arena]:
    arena = backend.open_arena(tmp_path)
    yield arena
    arena.close()


def test_the_file_has_none_of_the_bytes(backend: EncryptedBackend, arena: Arena) -> None:
    memory = Memory.make(64 * 4096, 17)
    memory.owner[memory.start : memory.start + memory.nbytes] = PATTERN * (memory.nbytes // len(PATTERN))
    extent = arena.allocate(memory.nbytes)
    backend.inner.write(arena, memory.region, extent.offset)
    assert PATTERN in bytes_in_file(arena), "the test looks into another file"
    backend.write(arena, memory.region, extent.offset)
    found = bytes_in_file(arena)[extent.offset :][: memory.nbytes]
    assert PATTERN[:8] not in found
    assert len({found[i : i + 16] for i in range(0, len(found), 16)}) == len(found) // 16, "a stream has a period"


def test_the_same_bytes_again_are_others_in_the_file(backend: EncryptedBackend, arena: Arena, tmp_path: Path) -> None:
    memory = Memory.random(4096)
    extent = arena.allocate(4096)
    seen = set()
    for _ in range(3):
        backend.write(arena, memory.region, extent.offset)
        seen.add(bytes_in_file(arena)[extent.offset :][:4096])
    other = EncryptedBackend(PosixBackend([tmp_path]))
    other_arena = other.open_arena(tmp_path)
    other_extent = other_arena.allocate(4096)
    other.write(other_arena, memory.region, other_extent.offset)
    seen.add(bytes_in_file(other_arena)[other_extent.offset :][:4096])
    other_arena.close()
    other.close()
    assert len(seen) == 4
    assert memory.content not in seen


def test_no_two_writes_share_a_part_of_the_stream(
    backend: EncryptedBackend, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads at once, one write longer than a chunk, all to the same places."""
    used: list[tuple[int, int]] = []
    apply = backend._apply

    def recording(number: int, within: int, source: Region, target: Region) -> None:
        first = (number << 64) + within // 16
        used.append((first, first + -(-source.nbytes // 16)))
        apply(number, within, source, target)

    monkeypatch.setattr(backend, "_apply", recording)
    extent = arena.allocate(DEFAULT_CHUNK_BYTES + 8192)
    long = Memory.make(DEFAULT_CHUNK_BYTES + 8192)

    def work() -> None:
        memory = Memory.random(8192)
        for _ in range(30):
            backend.write(arena, memory.region, extent.offset)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    backend.write(arena, long.region, extent.offset)
    for thread in threads:
        thread.join()
    used.sort()
    assert len(used) == 122
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(used))


def test_any_part_can_be_read(backend: EncryptedBackend, arena: Arena) -> None:
    """As snapshots of optimizer states do: not where writes began, not as long, across several of them."""
    nbytes = DEFAULT_CHUNK_BYTES + 24 * 4096
    extent = arena.allocate(nbytes)
    whole, middle = Memory.random(nbytes), Memory.random(4096)
    backend.write(arena, whole.region, extent.offset)
    backend.write(arena, middle.region, extent.offset + 5 * 4096)
    expected = whole.content[: 5 * 4096] + middle.content + whole.content[6 * 4096 :]
    for start, length in ((0, 4096), (4096, 5), (3 * 4096 + 7, 4 * 4096), (5 * 4096 + 100, 1), (12, nbytes - 50)):
        view = FileView(length + 2 * 11)
        backend.map_or_read(arena, view, 11, extent.offset + start, length)
        read = bytes(Region(view.address, length + 2 * 11).view())
        assert read[11:-11] == expected[start : start + length]
        assert not any(read[:11] + read[-11:])


@pytest.mark.parametrize("seed", range(5))
def test_write_numbers_against_a_plain_table(seed: int) -> None:
    chance, numbers = random.Random(seed), _WriteNumbers()
    table: list[tuple[int, int] | None] = [None] * 64
    for number in range(300):
        start = chance.randrange(64)
        stop = min(start + chance.choice((1, 1, 2, 3, 8, 40)), 64)
        numbers.record(start * 16, (stop - start) * 16, number)
        table[start:stop] = [(number, (at - start) * 16) for at in range(start, stop)]
        begin, end = sorted((chance.randrange(65), chance.randrange(65)))
        found: list[tuple[int, int] | None] = [None] * (end - begin)
        for at, nbytes, write, within in numbers.covering(begin * 16, (end - begin) * 16):
            for i in range(nbytes // 16):
                assert found[at // 16 - begin + i] is None, "told twice"
                found[at // 16 - begin + i] = (write, within + i * 16)
        assert found == table[begin:end]
    assert len(numbers._begins) <= 64


def test_foreign_arenas_are_refused(backend: EncryptedBackend, tmp_path: Path) -> None:
    arena = backend.inner.open_arena(tmp_path)
    memory = Memory.make(4096)
    offset = arena.allocate(4096).offset
    with pytest.raises(StorageError, match="opened by another backend"):
        backend.write(arena, memory.region, offset)
    arena.close()


# -- the setting ---------------------------------------------------------------------------------------------------


def test_what_cannot_encrypt_is_refused(backend: EncryptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"HardwareProfile\.encrypt=True with backend='kvikio'.*allowed: .*'auto'"):
        HardwareProfile(encrypt=True, backend="kvikio")
    with pytest.raises(ConfigError, match=r"HardwareProfile\.encrypt='yes'; allowed: True, False"):
        HardwareProfile(encrypt="yes")  # type: ignore[arg-type]
    monkeypatch.setattr(PosixBackend, "moves_device_memory", True)
    with pytest.raises(ConfigError, match=r"moves device memory .*; allowed .*backend=.posix"):
        EncryptedBackend(backend.inner)


def test_without_the_library_it_says_what_to_install(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    offloader = Offloader(
        policy=OffloadPolicy(activations="offload"), hardware=HardwareProfile(paths=spill_dir, encrypt=True)
    )
    with pytest.raises(BackendUnavailableError, match=r"pip install '\.\[encrypt\]'.* in the checkout"):
        offloader.open()
    assert not offloader.is_open


# -- a whole step --------------------------------------------------------------------------------------------------


def open_offloader(directory: Path, *, encrypt: bool = True, **policy: Any) -> Offloader:
    chosen = OffloadPolicy(**{"activations": "offload", "min_tensor_bytes": 0, "verify": "full"} | policy)
    return Offloader(policy=chosen, hardware=HardwareProfile(paths=directory, encrypt=encrypt)).open()


def arenas(offloader: Offloader) -> list[Arena]:
    tier = offloader._parts.tiers.ssd
    assert tier is not None
    return tier._arenas


def tensors() -> list[torch.Tensor]:
    """Sizes and addresses that are no multiples of anything, each with the pattern in it."""
    made = []
    for nbytes, phase in ((200_000, 0), (12_345 * 4, 4), (4096 * 9, 64), (70_000, 12), (1_000_004, 4)):
        base = torch.frombuffer(bytearray(PATTERN * (nbytes // 64 + 4)), dtype=torch.uint8)
        made.append(base[phase : phase + nbytes].clone().view(torch.float32).requires_grad_())
    return made


def gradients(offloader: Offloader | None, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    if offloader is None:
        total = torch.stack([(copy * 1.0).square().sum() for copy in copies]).sum()
    else:
        with offloader.saved_tensors():
            total = torch.stack([(copy * 1.0).square().sum() for copy in copies]).sum()
        offloader.flush()
    total.backward()
    if offloader is not None:
        offloader.end_backward()
    return [raw_bytes(copy.grad) for copy in copies if copy.grad is not None]


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_step_gives_the_same_bits_and_leaves_no_plaintext(encrypt: bool, spill_dir: Path) -> None:
    leaves = tensors()
    expected = gradients(None, leaves)
    offloader = open_offloader(spill_dir, encrypt=encrypt)
    try:
        for _ in range(3):
            got = gradients(offloader, leaves)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert offloader.stats.bytes_read > 3_000_000
        assert offloader.stats.failures == 0
        in_file = any(PATTERN in bytes_in_file(arena) for arena in arenas(offloader))
        assert in_file is not encrypt
        assert ("with AES-256" in offloader.description) is encrypt
    finally:
        offloader.close()


def test_a_flipped_bit_is_found(spill_dir: Path) -> None:
    offloader = open_offloader(spill_dir)
    leaf = torch.rand(500_000, requires_grad=True)
    with offloader.saved_tensors():
        loss = (leaf * 1.0).square().sum()
    offloader.flush()
    (arena,) = arenas(offloader)
    descriptor = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    byte = os.pread(descriptor, 1, 100_000)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), 100_000)
    os.close(descriptor)
    with pytest.raises(CorruptionError):
        loss.backward()
    del loss
    with pytest.raises(CorruptionError):
        offloader.close()


def test_plans_know_the_price_and_give_the_same_bits(spill_dir: Path) -> None:
    """With "auto" the probe measures through the cipher."""
    leaves = tensors()
    expected = gradients(None, leaves)
    offloader = open_offloader(spill_dir, activations="auto", max_slowdown=9.0)
    try:
        for _ in range(3):
            got = gradients(offloader, leaves)
            offloader.wait_for_plan()
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    finally:
        offloader.close()


def test_optimizer_states_and_their_snapshots(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is encrypted cannot be mapped: a state_dict reads it, also where a parameter lies in slices."""
    monkeypatch.setattr(update_memory, "_MIN_SUBGROUP_BYTES", 64 << 10)
    monkeypatch.setattr("lightning_ssd.optimizer.step.subgroups.GRANULE", 1024)

    def make() -> list[nn.Parameter]:
        torch.manual_seed(5)
        return [nn.Parameter(torch.randn(shape)) for shape in ((300, 40), (2000, 100), (7,), *[(128, 150)] * 6)]

    mine, plain = make(), make()
    reference = torch.optim.AdamW(plain)
    offloader = open_offloader(spill_dir, activations="keep", optimizer_states="offload")
    optimizer = offloader.offload_optimizer(torch.optim.AdamW(mine))
    for step in range(4):
        torch.manual_seed(100 + step)
        for one, other in zip(mine, plain, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
        if step == 2:
            held, then = optimizer.state_dict(), copy.deepcopy(reference.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
    assert isinstance(optimizer, OffloadedOptimizer)
    assert optimizer.stats.written_bytes > 0, "no state was moved"
    for found, expected in ((held, then), (optimizer.state_dict(), reference.state_dict())):
        assert found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for key, value in state.items():
                assert torch.equal(found["state"][number][key], value), (number, key)
    offloader.close()
