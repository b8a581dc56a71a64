"""The kvikio backend: GPUDirect Storage where the machine has it. The only file that imports kvikio."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Verb
from lightning_ssd.storage.library import OR_POSIX, LibraryBackend

__all__ = ["KvikioBackend"]


class KvikioBackend(LibraryBackend):
    """Moves device memory straight to the drive (GDS) or through kvikio's own bounce buffer (POSIX); host memory too.

    Each call waits for the device's default stream, and kvikio's Python interface cannot switch that off
    (``sync_default_stream`` in C++). So a move waits for the model, and ``backend="auto"`` takes none of them.
    Its settings are global to the process: they are set here, once, and put back by :meth:`close`.

    Args:
        device_type: with "cuda" it takes addresses of device memory.

    Raises:
        BackendUnavailableError: if kvikio or the CUDA driver is missing or does not load.
    """

    errors = (RuntimeError, OSError, ValueError, IndexError)  # of C++, by their types there

    def __init__(self, *, device_type: str = "cuda") -> None:
        self._kvikio = _import_kvikio()
        if device_type == "cuda":
            self.register = _register_nothing
        driver = self._kvikio.cufile_driver
        try:
            gds = driver.get("is_gds_available") and not driver.get("allow_compat_mode")
            self.why = f"cuFile has {'' if gds else 'no '}GPUDirect Storage with its own compatibility mode off"
            if not gds:
                self.why += '; write "allow_compat_mode": false in cufile.json'
        except self.errors as error:
            gds, self.why = False, f"cuFile did not say whether it has GPUDirect Storage: {error}"
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

    def open_file(self, fd: int) -> Any:
        return self._kvikio.CuFile(f"/proc/{os.getpid()}/fd/{fd}", "r+")

    def close_file(self, file: Any) -> None:
        file.close()

    def close(self) -> None:
        settings, self._settings = self._settings, None
        if settings is not None:
            settings.__exit__(None, None, None)

    def _call(self, verb: Verb, file: Any, region: Region, offset: int) -> int:
        # As an array of a device kvikio takes host memory too: it asks the driver what the address is.
        array = {"shape": (region.nbytes,), "typestr": "|u1", "data": (region.address, False), "version": 3}
        memory: Any = SimpleNamespace(__cuda_array_interface__=array) if self.register else region.view()
        moved: int = (file.pwrite if verb == "write" else file.pread)(memory, region.nbytes, offset).get()
        return moved


def _register_nothing(region: Region) -> Callable[[], object]:
    """Leave memory as it is: kvikio would register the segment of PyTorch's allocator that a slab is in."""
    return lambda: None


def _import_kvikio() -> Any:
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"kvikio does not load ({str(error).strip()}); install it with `pip install '.[cu13]'` (or '.[cu12]') in "
            f"the checkout of lightning_ssd, {OR_POSIX}"
        ) from error
    try:
        # Even for host memory kvikio asks the CUDA driver what an address is.
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailableError(
            f'kvikio needs the CUDA driver ({error}); use HardwareProfile(backend="posix") on machines without a GPU'
        ) from error
    return kvikio
