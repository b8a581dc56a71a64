"""A real backend that fails on purpose. Any test that needs a failing drive puts one around its backend."""

import ctypes
import errno
import threading
import time

from lightning_ssd.errors import OutOfSpaceError, ShortTransferError, StorageError
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend


class FaultyBackend(WrappedBackend):
    """Passes everything on to ``inner``, but for the calls that ``fail_*`` and ``corrupt_read`` pick.

    Each gets the number of the call (from 0, per direction); ``fail_*`` returns what to raise instead of moving.
    """

    def __init__(self, inner, *, fail_write=None, fail_read=None, corrupt_read=None, delay_s=0.0):
        super().__init__(inner)
        self.fail_write = fail_write
        self.fail_read = fail_read
        self.corrupt_read = corrupt_read
        self.delay_s = delay_s
        self._lock = threading.Lock()
        self.num_writes = self.num_reads = 0

    def write(self, arena, region, offset):
        with self._lock:
            index, self.num_writes = self.num_writes, self.num_writes + 1
        self._stumble(self.fail_write, index)
        self.inner.write(arena, region, offset)

    def read(self, arena, region, offset):
        with self._lock:
            index, self.num_reads = self.num_reads, self.num_reads + 1
        self._stumble(self.fail_read, index)
        self.inner.read(arena, region, offset)
        if self.corrupt_read is not None and self.corrupt_read(index) and region.nbytes:
            ctypes.c_ubyte.from_address(region.address + region.nbytes // 2).value ^= 0x10

    def _stumble(self, fail, index):
        time.sleep(self.delay_s)
        error = fail(index) if fail is not None else None
        if error is not None:
            raise error


def on_calls(calls, error):
    """Fail exactly on these calls; ``range(n, 10**9)`` means from the nth on."""
    return lambda index: error() if index in calls else None


def always(error):
    """Fail on every call."""
    return lambda index: error()


def eio():
    """What a failing drive gives."""
    return StorageError(errno.EIO, "injected: the drive failed")


def enospc():
    """What a full file system gives."""
    return OutOfSpaceError(errno.ENOSPC, "injected: the file system is full")


def short():
    """What a transfer that ends early gives."""
    return ShortTransferError(errno.EIO, "injected: fewer bytes moved")
