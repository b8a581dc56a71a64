"""Builds and owns everything that moves tensors in one process; the API for plain PyTorch."""

from __future__ import annotations

import atexit
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch

from lightning_ssd import metrics
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError, OffloaderClosedError
from lightning_ssd.events import EventLog
from lightning_ssd.memory import MallocThreshold, read_memory, trim
from lightning_ssd.stats import OffloadStats
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend, open_backend
from lightning_ssd.storage.integrity import Sampler
from lightning_ssd.storage.movers import DeviceMover, HostMover, Mover, StagedMover
from lightning_ssd.storage.staging import ReloadPool, StagingPool
from lightning_ssd.storage.streams import Copies, CudaCopies
from lightning_ssd.storage.tiers import SsdTier
from lightning_ssd.tensor_cache import TensorCache

__all__ = ["Offloader"]

_T = TypeVar("_T")
PATHS_VARIABLE = "LIGHTNING_SSD_PATHS"
_STAGING_BYTES = 2 * 2 * DEFAULT_WORKERS * DEFAULT_CHUNK_BYTES  # per worker one chunk in use, one more on its way
_SPARE_BYTES = 256 << 20


class Offloader:
    """Moves the saved activations of one process and one device to SSD and back.

    Nothing is opened before :meth:`open` (or ``with``), so that an offloader may be built before processes are
    spawned or forked. Forward runs inside :meth:`saved_tensors`; after each backward :meth:`end_backward` marks the
    border of a step. Memory returns while forward still runs, and comes back just before backward needs it.

    Example::

        with lightning_ssd.Offloader() as offloader:
            offloader.register_module(model)
            for batch in data:
                with offloader.saved_tensors():
                    loss = model(batch)
                loss.backward()
                offloader.end_backward()
                optimizer.step()
                optimizer.zero_grad()
                print(offloader.drain_metrics())

    Args:
        policy: what is moved.
        hardware: where to, with what.
        device: whose tensors; default: that of the registered module's parameters, else the CPU.
        default_directory: used when neither ``hardware.paths`` nor ``$LIGHTNING_SSD_PATHS`` names a directory.
        subdirectory: appended to each directory, so that processes do not meet.
    """

    def __init__(
        self,
        *,
        policy: OffloadPolicy | None = None,
        hardware: HardwareProfile | None = None,
        device: torch.device | str | None = None,
        default_directory: str | os.PathLike[str] | None = None,
        subdirectory: str = "",
        _wrap_backend: Callable[[Backend], Backend] | None = None,
        _copies: Copies | None = None,
    ) -> None:
        self.policy = _typed("policy", policy, OffloadPolicy, 'OffloadPolicy(activations="offload")')
        self.hardware = _typed("hardware", hardware, HardwareProfile, 'HardwareProfile(paths=["/my/ssd"])')
        self._device = None if device is None else torch.device(device)
        self._default_directory = default_directory
        self._subdirectory = subdirectory
        self._wrap_backend = _wrap_backend
        self._copies = _copies
        self._events = EventLog()
        self._resources: ExitStack | None = None
        self._cache: TensorCache | None = None
        self._tier: SsdTier | None = None
        self._reload: ReloadPool | None = None
        self._last_stats = self._sampled = OffloadStats()
        self.description = "closed"

    # -- opening and closing -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Between :meth:`open` and :meth:`close`."""
        return self._resources is not None

    def open(self, *modules: torch.nn.Module) -> Offloader:
        """Open files and threads, and register modules. Again while open: registers the modules, opens nothing.

        Raises:
            StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
            BackendUnavailableError: ``hardware.backend`` names one that does not work here.
        """
        if not self.is_open:
            with ExitStack() as stack:
                self._open(stack, self._device or _device_of(modules))
                self._resources = stack.pop_all()
                self._finalizer = weakref.finalize(self, _close_elsewhere, self._resources, os.getpid())
                self._finalizer.atexit = False  # no thread can be started then; see _close_all
                _open_offloaders.add(self)
        for module in modules:
            self.register_module(module)
        return self

    def _open(self, stack: ExitStack, device: torch.device) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        copies = self._copies or (CudaCopies(device) if device.type == "cuda" else None)
        self._tier = self._reload = None
        if self.policy.activations == "keep":
            self.description = "everything is kept in memory and counted"
        else:
            self._tier = self._open_tier(stack, device, copies)
        self._cache = TensorCache(
            self._tier,
            device=device,
            min_tensor_nbytes=self.policy.min_tensor_nbytes,
            events=self._events,
            copies=copies,
        )
        stack.callback(self._cache.close)
        self._last_stats = self._sampled = OffloadStats()

    def _open_tier(self, stack: ExitStack, device: torch.device, copies: Copies | None) -> SsdTier:
        directories = [path / self._subdirectory for path in self._directories()]
        if self._subdirectory:
            stack.callback(_remove_empty, directories)
        backend, why = open_backend(
            self.hardware.backend,
            directories=directories,
            device_type=device.type,
            allow_unsuitable_paths=self.hardware.allow_unsuitable_paths,
        )
        stack.callback(backend.close)
        if self._wrap_backend is not None:
            backend = self._wrap_backend(backend)
        self.description = f"{why}; in {', '.join(map(str, directories))}"
        tier = SsdTier(
            backend,
            self._mover(stack, backend, copies),
            directories,
            events=self._events,
            sampler=Sampler(self.policy.verify),
        )
        stack.callback(tier.close)
        if device.type == "cpu" and copies is None:
            # Without this, freed activations stay in glibc's heap and the process does not get smaller.
            threshold = MallocThreshold()
            threshold.fix()
            stack.callback(trim)
            stack.callback(threshold.restore)
        return tier

    def _mover(self, stack: ExitStack, backend: Backend, copies: Copies | None) -> Mover:
        host = self.hardware.host_memory_nbytes
        if copies is None:
            self._reload = ReloadPool(_SPARE_BYTES if host is None else host)
            stack.callback(self._reload.close)
            return HostMover(backend, self._reload)
        if backend.moves_device_memory and self.policy.verify == "off":
            return DeviceMover(backend, copies)
        staging = StagingPool(host or _STAGING_BYTES, pin=torch.cuda.is_available())
        stack.callback(staging.close)
        return StagedMover(backend, staging, copies)

    def _directories(self) -> list[Path]:
        named = [path for path in os.environ.get(PATHS_VARIABLE, "").split(os.pathsep) if path]
        fallback = self._default_directory or tempfile.gettempdir()
        paths = tuple(cast(Sequence[str], self.hardware.paths)) or tuple(named) or (fallback,)
        return [Path(path).expanduser().absolute() for path in paths]

    def close(self) -> None:
        """Join the threads, close the files, restore malloc. Idempotent.

        Raises:
            StorageError: a read had failed for good; the thread that waited for it has seen the same error.
        """
        resources, cache = self._resources, self._cache
        if resources is None or cache is None:
            return
        if cache.is_foreign:  # a fork: files and threads are the parent's
            self._resources = self._cache = self._tier = self._reload = None
            self._finalizer.detach()
            resources.pop_all()
            return
        try:
            failure = cache.close()
        finally:
            self._last_stats = self._snapshot()
            self._resources = self._cache = None
            self._finalizer.detach()
            resources.close()
            self.description = "closed"
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """A step has failed: drop queued work. :meth:`close` will not raise over the error that is under way."""
        if self._cache is not None:
            self._cache.abort()

    def __enter__(self) -> Offloader:
        return self.open()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.abort()
        self.close()

    # -- in the training loop ------------------------------------------------------------------------------------

    def register_module(self, module: torch.nn.Module) -> None:
        """Parameters and buffers of ``module`` are never moved, whatever view of them autograd saves."""
        self._opened().parameters.register_module(module)

    def saved_tensors(self) -> AbstractContextManager[None]:
        """Around a forward: what autograd saves in it goes through us. Costs nothing under ``no_grad``."""
        current = self._opened().new_pass()
        current.keeps_alive = self  # so that nobody closes us meanwhile
        return current

    def end_backward(self) -> None:
        """After a backward: order and times are learnt, budgets adapt, spare reload memory goes back."""
        self._opened().end_backward()
        if self._reload is not None:
            self._reload.release()

    def flush(self) -> None:
        """Wait until everything queued is on the drive. Training never needs it; tests and measurements do."""
        if self._tier is not None and self.is_open:
            self._tier.flush()

    def _opened(self) -> TensorCache:
        if self._cache is None:
            raise OffloaderClosedError("this Offloader is not open; use it in a with block, or call open() first")
        return self._cache

    # -- numbers -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OffloadStats:
        """Counters since :meth:`open`; after :meth:`close` those of the end."""
        return self._snapshot() if self.is_open else self._last_stats

    def _snapshot(self) -> OffloadStats:
        if self._cache is None:
            return self._last_stats
        disk_bytes, busy_s, retries = 0, (0.0, 0.0), 0
        if self._tier is not None:
            disk_bytes, busy_s, retries = self._tier.disk_bytes, self._tier.busy_s, self._tier.num_retries
        return self._cache.snapshot(disk_bytes=disk_bytes, busy_s=busy_s, num_retries=retries)

    def reset_peaks(self) -> None:
        """Start the peaks anew at what is in memory now."""
        self._opened().reset_peaks()

    def drain_metrics(self) -> dict[str, float]:
        """What happened since the last call, under the keys of :data:`lightning_ssd.metrics.METRICS`."""
        before, self._sampled = self._sampled, self.stats
        readings = read_memory(self._device)
        return metrics.compute(self._events.drain(), stats_before=before, stats_now=self._sampled, readings=readings)


def _typed(name: str, value: _T | None, cls: type[_T], example: str) -> _T:
    if value is None:
        return cls()
    if not isinstance(value, cls):
        got = f"{name}={value!r} is a {type(value).__name__}"
        raise ConfigError(f"{got}; allowed: {cls.__name__}, for example {example}")
    return value


_open_offloaders: weakref.WeakSet[Offloader] = weakref.WeakSet()


def _close_elsewhere(resources: ExitStack, pid: int) -> None:
    """For an offloader that was dropped without being closed.

    This runs wherever the garbage collector does: perhaps under a lock that a worker waits for, perhaps in a worker. So
    nothing is joined here.
    """
    if os.getpid() == pid:
        threading.Thread(target=resources.close, name="lightning_ssd-close").start()


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes, so that no daemon thread touches a dying torch."""
    for offloader in list(_open_offloaders):
        offloader.abort()
        offloader.close()


def _remove_empty(directories: Sequence[Path]) -> None:
    """Leave no directory of ours behind; one that somebody else uses stays."""
    for directory in directories:
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOTDIR):
                raise


def _device_of(modules: tuple[torch.nn.Module, ...]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")
