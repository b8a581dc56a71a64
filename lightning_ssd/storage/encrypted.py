"""Encryption of what goes to a file, with a key that only this process' memory knows.

AES-256 in counter mode (NIST SP 800-38A): a file's bytes are those of memory, XORed with a stream that key and *write
number* choose.

Note [no number twice]: two writes with one key and one stream would give away the XOR of what they wrote. So each
write has a number of its own, which starts the counter: its upper 64 bits are the number, its lower 64 bits count the
16-byte blocks within the write. The key is drawn when the backend is opened and never leaves it, so that numbers need
not outlive it. Which number a range of the file was written with is kept in memory (``_WriteNumbers``). The same bytes,
written to the same place again, are other bytes in the file; with a mode that takes its stream from the place alone
(XTS) they would be the same.

Counter mode hides, it does not authenticate: flipped bits in the file are flipped bits in memory. ``verify`` finds
those that a drive makes; see SECURITY.md.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, ConfigError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend, WrappedBackend
from lightning_ssd.storage.spill_file import Arena

__all__ = ["EncryptedBackend"]

_KEY_BYTES = 32
_AES_BLOCK_BYTES = 16


class EncryptedBackend(WrappedBackend):
    """Encrypts on the way to the file and decrypts on the way back. Costs one pass over the bytes in either direction.

    Any address will do without a further copy, because what is written has to be laid down elsewhere anyway. Nobody
    else can make sense of the files: they are never mapped.

    Args:
        inner: moves the encrypted bytes; must not move device memory, which no library encrypts in place.
        staging_bytes: bound of the buffers for encrypted bytes on their way out.

    Raises:
        ConfigError: ``inner`` moves device memory.
        BackendUnavailableError: the library ``cryptography`` is missing or does not load.
    """

    def __init__(self, inner: Backend, *, staging_bytes: int = 2 * DEFAULT_WORKERS * DEFAULT_CHUNK_BYTES) -> None:
        super().__init__(inner)
        if inner.moves_device_memory:
            raise ConfigError(
                f"{inner.name} moves device memory past the host, where it cannot be encrypted; allowed with "
                'encrypt=True: HardwareProfile(backend="posix")'
            )
        self._ciphers = _import_ciphers()
        self._key = os.urandom(_KEY_BYTES)
        # next() on it is atomic: workers ask without a lock.
        self._count = itertools.count()
        self._staging = StagingPool(staging_bytes)
        # Guards the write numbers of all arenas. A leaf lock: no bytes move and nobody is called under it.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"{self.inner.name}, encrypted"

    @property
    def memory_alignment(self) -> int:
        return 1

    def open_arena(self, directory: Path) -> Arena:
        arena = self.inner.open_arena(directory)
        arena.write_numbers = _WriteNumbers()
        return arena

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        step = DEFAULT_CHUNK_BYTES
        for done in range(0, region.nbytes, step):
            part = Region(region.address + done, min(step, region.nbytes - done))
            with self._staging.lease(part.nbytes) as buffer:
                number = next(self._count)
                self._apply(number, 0, part, buffer)
                with self._lock:
                    self._numbers_of(arena).record(offset + done, part.nbytes, number)
                self.inner.write(arena, buffer, offset + done)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self.inner.read(arena, region, offset)
        if region.nbytes == 0:
            return
        with self._lock:
            covered = list(self._numbers_of(arena).covering(offset, region.nbytes))
        for start, nbytes, number, within in covered:
            part = Region(region.address + start - offset, nbytes)
            self._apply(number, within, part, part)

    def close(self) -> None:
        self._staging.close()
        super().close()

    def _numbers_of(self, arena: Arena) -> _WriteNumbers:
        numbers = arena.write_numbers
        if not isinstance(numbers, _WriteNumbers):
            raise StorageError(f"{arena.path} was opened by another backend; open arenas with the one that uses them")
        return numbers

    def map_or_read(self, arena: Arena, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Read, through a buffer of whole blocks, piece by piece: any offset and length will do."""
        block, end = self.block_bytes, offset + nbytes
        for begin in range(offset - offset % block, end, DEFAULT_CHUNK_BYTES):
            stop = min(begin + DEFAULT_CHUNK_BYTES, end + -end % block)
            first, last = max(begin, offset), min(stop, end)
            with self._staging.lease(stop - begin) as buffer:
                self.read(arena, buffer, begin)
                target = Region(view.address + start + first - offset, last - first)
                target.view()[:] = buffer.view()[first - begin : last - begin]

    def _apply(self, number: int, within: int, source: Region, target: Region) -> None:
        """XOR with the stream of a write, from ``within`` bytes of it on; may be done in place. Outside of the GIL."""
        counter = (number << 64) + within // _AES_BLOCK_BYTES
        mode = self._ciphers.modes.CTR(counter.to_bytes(_AES_BLOCK_BYTES, "big"))
        cipher = self._ciphers.Cipher(self._ciphers.algorithms.AES(self._key), mode)
        cipher.encryptor().update_into(source.view(), target.view())


class _WriteNumbers:
    """Which write each range of one file was last written by; later writes cut earlier ones. Not thread-safe.

    As many entries as pieces that were written and not overwritten: at 1 MiB a piece some 100 bytes per MiB.
    """

    def __init__(self) -> None:
        # Side by side and ascending: begin and end of a range in the file, its write, and where that write began.
        self._begins: list[int] = []
        self._rest: list[tuple[int, int, int]] = []

    def record(self, offset: int, nbytes: int, number: int) -> None:
        end = offset + nbytes
        first, last = self._touched(offset, end)
        begins, rest = [offset], [(end, number, offset)]
        if first < last:
            begin, (stop, other, origin) = self._begins[first], self._rest[first]
            if begin < offset:
                begins.insert(0, begin)
                rest.insert(0, (offset, other, origin))
            stop, other, origin = self._rest[last - 1]
            if stop > end:
                begins.append(end)
                rest.append((stop, other, origin))
        self._begins[first:last] = begins
        self._rest[first:last] = rest

    def covering(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Start in the file, length, number, and bytes of that write before the start. What was never written lacks."""
        end = offset + nbytes
        for index in range(*self._touched(offset, end)):
            stop, number, origin = self._rest[index]
            start = max(self._begins[index], offset)
            yield start, min(stop, end) - start, number, start - origin

    def _touched(self, offset: int, end: int) -> tuple[int, int]:
        """Indices of the ranges that share a byte with this one."""
        first = bisect.bisect_right(self._begins, offset)
        if first and self._rest[first - 1][0] > offset:
            first -= 1
        return first, bisect.bisect_left(self._begins, end, lo=first)


def _import_ciphers() -> Any:
    try:
        from cryptography.hazmat.primitives import ciphers
        from cryptography.hazmat.primitives.ciphers import algorithms, modes  # noqa: F401 (loads what is used above)
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"HardwareProfile(encrypt=True) needs the library cryptography, which does not load ({error}); install it "
            "with `pip install '.[encrypt]'` in the checkout of lightning_ssd"
        ) from error
    return ciphers
