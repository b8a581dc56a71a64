"""The kvikio backend: GPUDirect Storage where the machine has it. The only file that imports kvikio."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

from lightning_ssd.common.profiling import spanned
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, ShortTransferError, StorageError
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS
from lightning_ssd.storage.spill_file import Arena

__all__ = ["KvikioBackend", "gds_status"]

# What kvikio raises: its C++ errors arrive as one of these, by their C++ type.
_KVIKIO_ERRORS = (RuntimeError, OSError, ValueError, IndexError)


class KvikioBackend:
    """Moves device memory straight to the drive (GDS) or through kvikio's own bounce buffer (POSIX); host memory too.

    kvikio waits for the null stream in the calling thread, so call it from workers, never from the training thread.
    Its settings are global to the process: they are set here, once, and put back by :meth:`close`.

    Args:
        device_type: "cuda" makes :attr:`moves_device_memory` true.
        gds: ``False`` takes kvikio's POSIX path although the machine has GDS.

    Raises:
        BackendUnavailableError: if kvikio or the CUDA driver is missing or does not load.
    """

    memory_alignment = 1
    block_bytes = PAGE_BYTES

    def __init__(self, *, device_type: str = "cuda", gds: bool = True) -> None:
        self._kvikio = _import_kvikio()
        self.moves_device_memory = device_type == "cuda"
        available, self.why = gds_status()
        gds = gds and available
        self.name = "kvikio GDS" if gds else "kvikio POSIX"
        # Under OFF a file that cannot use GDS is refused; AUTO, the default, would fall back in silence.
        mode = self._kvikio.CompatMode.OFF if gds else self._kvikio.CompatMode.ON
        self._settings: Any = self._kvikio.defaults.set(
            {
                "compat_mode": mode,
                "num_threads": 2 * DEFAULT_WORKERS,
                "task_size": DEFAULT_CHUNK_BYTES // 2,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )

    def open_arena(self, directory: Path) -> Arena:
        return _KvikioArena(directory, self._kvikio)

    @spanned("lightning_ssd::write")
    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("write", arena, region, offset)

    @spanned("lightning_ssd::read")
    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("read", arena, region, offset)

    def close(self) -> None:
        settings, self._settings = self._settings, None
        if settings is not None:
            settings.__exit__(None, None, None)

    def _move(self, verb: str, arena: Arena, region: Region, offset: int) -> None:
        if region.nbytes == 0:
            return
        if not isinstance(arena, _KvikioArena):
            raise StorageError(
                f"{arena.directory} was opened by another backend; open arenas with the one that uses them"
            )
        what = f"cannot {verb} {region.nbytes:,} bytes at offset {offset:,} of the spill file in {arena.directory}"
        host_bytes = ctypes.c_ubyte * region.nbytes
        memory: Any = _DeviceBytes(region) if self.moves_device_memory else host_bytes.from_address(region.address)
        if offset + region.nbytes > arena.size_bytes:
            raise ShortTransferError(errno.EIO, f"{what}: the file has {arena.size_bytes:,} bytes")
        with arena.use(writes=region.nbytes if verb == "write" else 0):
            move = arena.file.pwrite if verb == "write" else arena.file.pread
            try:
                moved = move(memory, region.nbytes, offset).get()
            except _KVIKIO_ERRORS as error:
                raise StorageError(
                    getattr(error, "errno", None) or errno.EIO, f"{what} ({self.name}): {error}"
                ) from error
        if moved != region.nbytes:
            raise ShortTransferError(errno.EIO, f"{what} ({self.name}): {moved:,} bytes moved")


def gds_status() -> tuple[bool, str]:
    """Whether GDS is used on this machine, and why (not), in kvikio's and cuFile's own words. Changes nothing.

    Raises:
        BackendUnavailableError: if kvikio or the CUDA driver is missing or does not load.
    """
    kvikio = _import_kvikio()
    if kvikio.defaults.is_compat_mode_preferred():
        return False, "kvikio prefers compatibility mode: no libcufile, WSL, or /run/udev is not readable (containers)"
    try:
        driver = kvikio.cufile_driver
        if not driver.get("is_gds_available"):
            return False, "the nvidia-fs kernel driver is not loaded"
        if driver.get("allow_compat_mode"):
            return True, "GDS is available; cuFile's own compatibility mode is allowed and may be taken for some files"
    except _KVIKIO_ERRORS as error:
        return False, f"cuFile did not say whether GDS is available: {error}"
    return True, "GDS is available and cuFile's own compatibility mode is off"


class _KvikioArena(Arena):
    """An arena whose file kvikio has opened too: by descriptor, since it has no name."""

    def __init__(self, directory: Path, kvikio: Any) -> None:
        super().__init__(directory, block_bytes=PAGE_BYTES, direct=False)
        try:
            self.file = kvikio.CuFile(f"/proc/{os.getpid()}/fd/{self.fd}", "r+")
        except _KVIKIO_ERRORS as error:
            self.close()
            raise BackendUnavailableError(f"kvikio cannot open a file in {self.directory}: {error}") from error

    def _release(self) -> None:
        file = getattr(self, "file", None)
        if file is not None:
            file.close()
        super()._release()


class _DeviceBytes:
    """Bytes at an address, in the form in which kvikio takes device memory.

    kvikio asks the driver what the address is, so that host staging buffers pass as well.
    """

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "strides": None,
            "version": 3,
        }


def _import_kvikio() -> Any:
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"kvikio does not load ({error}); install it with `pip install '.[cu13]'` (or '.[cu12]') in the checkout "
            'of lightning_ssd, or use HardwareProfile(backend="posix")'
        ) from error
    try:
        # Even for host memory kvikio asks the CUDA driver what an address is.
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailableError(
            f'kvikio needs the CUDA driver ({error}); use HardwareProfile(backend="posix") on machines without a GPU'
        ) from error
    return kvikio
