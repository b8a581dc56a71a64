"""The cuFile backend: GPUDirect Storage by NVIDIA's own library. The only file that imports ``cuda.bindings``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, StorageError
from lightning_ssd.memory.mmap import on_device
from lightning_ssd.storage.backend import Verb
from lightning_ssd.storage.library import OR_POSIX, LibraryBackend

__all__ = ["CufileBackend"]


class CufileBackend(LibraryBackend):
    """Moves registered device memory to the drive and back, past host memory and outside of all streams.

    The driver belongs to the process: it is opened once and stays open. In cuFile's compatibility mode bytes would go
    through host memory. It is switched off, so that what has no GPUDirect Storage is refused.

    Args:
        device: whose memory moves.

    Raises:
        BackendUnavailableError: ``cuda.bindings``, libcufile or its driver does not load, or other code of this process
            has opened the driver in compatibility mode.
    """

    opens_direct = True
    name = "cuFile GDS"
    why = "every directory takes it with cuFile's compatibility mode off"

    def __init__(self, device: torch.device) -> None:
        self._cufile = _open_driver()
        self._device = device
        self.register = self._register

    def open_file(self, fd: int) -> int:
        described = self._cufile.Descr()
        described.type, described.handle.fd = self._cufile.FileHandleType.OPAQUE_FD, fd
        return self._ask(self._cufile.handle_register, described.ptr)

    def close_file(self, file: int) -> None:
        self._cufile.handle_deregister(file)

    def _register(self, region: Region) -> Callable[[], object]:
        self._pin("register", region, self._cufile.buf_register, region.nbytes, 0)
        return partial(self._pin, "deregister", region, self._cufile.buf_deregister)

    def _pin(self, verb: str, region: Region, call: Any, *args: int) -> None:
        try:
            self._ask(call, region.address, *args)
        except OSError as error:
            what = f"cuFile cannot {verb} {region.nbytes:,} bytes of device memory ({error.strerror})"
            raise StorageError(error.errno, f"{what}; free memory there, {OR_POSIX}") from error

    def _call(self, verb: Verb, file: int, region: Region, offset: int) -> int:
        move = self._cufile.write if verb == "write" else self._cufile.read
        return self._ask(move, file, region.address, region.nbytes, offset, 0)

    def _ask(self, call: Any, *args: int) -> int:
        """Call cuFile in the device's context (a worker's own device is 0); turn its errors into an OSError."""
        try:
            with on_device(self._device):
                answer: int = call(*args) or 0
            if answer < 0:
                raise self._cufile.cuFileError(-answer)
        except self._cufile.cuFileError as error:
            raise OSError(errno.EIO, str(error)) from error
        except ValueError as error:
            # An error of the system: cuda.bindings takes its number for one of cuFile's, and says that it is none.
            number = str(error).partition(" ")[0]
            code = int(number) if number.isdecimal() else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        return answer


def _open_driver() -> Any:
    """Open cuFile's driver for the process, without compatibility mode; return ``cuda.bindings.cufile``."""
    try:
        from cuda.bindings import cufile
    except ImportError as error:
        raise BackendUnavailableError(
            f"cuFile does not load ({error}); install cuda-bindings with `pip install '.[gds]'` in the checkout of "
            f"lightning_ssd, {OR_POSIX}"
        ) from error
    try:
        cufile.get_version()  # loads libcufile
    except (cufile.cuFileError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"cuFile does not load ({str(error).strip()}); install libcufile, a part of CUDA, {OR_POSIX}"
        ) from error
    modes = (cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE, cufile.BoolConfigParameter.FORCE_COMPAT_MODE)
    try:
        try:
            for mode in modes:
                cufile.set_parameter_bool(mode, False)  # of use only before the driver is opened
            cufile.driver_open()
        except cufile.cuFileError as error:
            if error.status != cufile.OpError.DRIVER_ALREADY_OPEN:
                raise
        is_compat = any(map(cufile.get_parameter_bool, modes))
    except (cufile.cuFileError, RuntimeError) as error:  # the latter: of a libcufile that lacks a function
        raise BackendUnavailableError(
            f"cuFile does not start ({error}); load the nvidia-fs kernel driver (GPUDirect Storage), {OR_POSIX}"
        ) from error
    if is_compat:
        raise BackendUnavailableError(
            "cuFile is in its compatibility mode, which is not GPUDirect Storage; write "
            '"allow_compat_mode": false and "force_compat_mode": false in cufile.json (CUFILE_ENV_PATH_JSON names it), '
            f"{OR_POSIX}"
        )
    return cufile
