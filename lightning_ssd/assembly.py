"""What an offloader is made of, for one policy on one machine."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch

from lightning_ssd.allocation import Allocation
from lightning_ssd.config import HardwareProfile, OffloadPolicy, refuse_misread
from lightning_ssd.errors import ConfigError
from lightning_ssd.events import EventLog
from lightning_ssd.malloc import foreign_malloc
from lightning_ssd.memory import host_available_bytes
from lightning_ssd.planning.limits import Wishes
from lightning_ssd.scheduler import Agree, Scheduler
from lightning_ssd.slots import SlotMover
from lightning_ssd.state_files import StateFiles
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend, open_backend
from lightning_ssd.storage.encryption import EncryptedBackend
from lightning_ssd.storage.held_directory import HeldDirectory
from lightning_ssd.storage.host_tier import HostTier
from lightning_ssd.storage.integrity import Sampler
from lightning_ssd.storage.movers import DeviceMover, Edges, HostMover, Mover, StagedMover
from lightning_ssd.storage.named_directories import made, tell_of_shared_drives
from lightning_ssd.storage.probe import Rates, measure_rates
from lightning_ssd.storage.purse import Purse
from lightning_ssd.storage.staging import ReloadPool, StagingPool
from lightning_ssd.storage.streams import Copies, Mark
from lightning_ssd.storage.tiers import SsdTier
from lightning_ssd.storage.turns import open_in_turns
from lightning_ssd.tensor_cache import Tiers
from lightning_ssd.tier_meter import TierMeter, measure_copies
from lightning_ssd.wear_meter import WearMeter
from lightning_ssd.wording import printable

__all__ = ["NOTHING", "PATHS_VARIABLE", "HostMemory", "Parts", "assemble", "open_state_files", "open_wear_meter"]


PATHS_VARIABLE = "LIGHTNING_SSD_PATHS"
_STAGING_BYTES = 2 * 2 * DEFAULT_WORKERS * DEFAULT_CHUNK_BYTES  # per worker one chunk in use, one more on its way
_SPARE_BYTES = 256 << 20
_PROBE_BYTES = 16 << 20
_MIN_RELIEF_IF_MAPPED = 0.05
"""A pass that moves anything on a CPU maps its freed memory anew, all of it: that is not worth a few per cent."""
_HOST_SHARE = 4
"""One part in so many of the host's available memory is for the host tier of a CUDA device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is there; ``None`` where the policy needs none."""

    description: str
    """One line: how bytes reach the drive, and where."""
    tiers: Tiers = field(default_factory=Tiers)
    reload: ReloadPool | None = None
    wear: WearMeter | None = None
    scheduler: Scheduler | None = None
    allocation: Allocation = field(default_factory=Allocation)


NOTHING = Parts(description="closed")


class HostMemory:
    """What an offloader's activations and optimizers take of the host's memory, together.

    Args:
        hardware: says how much.
        num_processes: of this run on this machine.
    """

    def __init__(self, hardware: HardwareProfile, num_processes: int) -> None:
        self._hardware = hardware
        self._num_processes = num_processes
        self._purse = Purse(0)

    def purse(self, device: torch.device) -> Purse:
        """The one for all, measured for the first device that makes it more than nothing: "auto" is that for a CPU."""
        if not self._purse.total_bytes:
            nbytes = self._hardware.host_memory_nbytes
            if nbytes is None:
                available = host_available_bytes() or 0 if _has_own_memory(device) else 0
                nbytes = available // (_HOST_SHARE * self._num_processes)
            self._purse = Purse(nbytes)
        return self._purse


def assemble(
    stack: ExitStack,
    policy: OffloadPolicy,
    hardware: HardwareProfile,
    *,
    device: torch.device,
    copies: Copies | None,
    events: EventLog,
    default_directory: str | os.PathLike[str] | None,
    subdirectory: str,
    agree: Agree | None,
    num_local_processes: int,
    host_memory: HostMemory,
    wrap_backend: Callable[[Backend], Backend] | None,
) -> Parts:
    """Open what the policy needs; ``stack`` closes it. The arguments are those of :class:`Offloader`.

    Raises:
        ConfigError: the device is neither a CPU nor CUDA's.
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(device)!r}: nothing would be moved from there; allowed: 'cpu', 'cuda'")
    if policy.activations == "keep":
        return Parts(description="everything is kept in memory and counted")
    is_mapped = device.type == "cpu" and copies is None
    allocation = Allocation(is_ours=is_mapped)
    stack.callback(allocation.close)
    if is_mapped and policy.memory_budget is not None:
        _tell_of_foreign_malloc(policy.memory_budget)
    if policy.activations == "recompute":
        description = "blocks are recomputed, all else is kept in memory and counted"
        return Parts(description=description, allocation=allocation)
    backend, directories, why = _open_directories(
        stack, hardware, device, default_directory, subdirectory, wrap_backend
    )
    mover, reload = _open_mover(stack, policy, backend, copies, device)
    ssd = SsdTier(backend, mover, directories, events=events, sampler=Sampler(policy.verify))
    stack.callback(ssd.close)
    host = _open_host(stack, policy, host_memory, device, copies, events)
    wear = open_wear_meter(hardware, default_directory, subdirectory, num_local_processes)
    scheduler = None
    if policy.activations == "auto":
        place = _place(_directories(hardware, default_directory))
        probe = partial(_measure_one, backend, directories)
        meter = TierMeter(ssd, probe, host=host, probe_host=partial(measure_copies, device), place=place)
        wishes = _wishes(policy, wear.capacity_bytes, num_local_processes, is_mapped=is_mapped)
        num_sharing = 1 if _has_own_memory(device) else num_local_processes
        scheduler = Scheduler(wishes, meter.machine, agree=agree, num_sharing=num_sharing)
        stack.callback(scheduler.close)
    description = f"{why}; in {', '.join(map(printable, directories))}"
    return Parts(
        description=description,
        tiers=Tiers(ssd, host),
        reload=reload,
        wear=wear,
        scheduler=scheduler,
        allocation=allocation,
    )


def open_state_files(
    policy: OffloadPolicy,
    hardware: HardwareProfile,
    *,
    device: torch.device,
    copies: Copies | None,
    events: EventLog,
    default_directory: str | os.PathLike[str] | None,
    subdirectory: str,
    agree: Agree | None,
    num_local_processes: int,
    host_memory: HostMemory,
    wrap_backend: Callable[[Backend], Backend] | None,
) -> StateFiles:
    """Files of their own for the states of one optimizer. The arguments are those of :class:`Offloader`.

    Where several processes of a run share the machine, they find out together whether to take turns on its drives.

    Raises:
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    with ExitStack() as stack:
        backend, directories = _open_directories(
            stack, hardware, device, default_directory, subdirectory, wrap_backend
        )[:2]
        # Asked of all, since all have to take part in the trial: nodes may have different numbers of processes.
        if agree is not None and min(agree([num_local_processes])) > 1:
            backend = open_in_turns(stack, backend, directories, agree)
        mover = SlotMover(_open_mover(stack, policy, backend, copies, device)[0])
        tiers, sampler = [], Sampler(policy.verify)
        for directory in directories:
            tiers.append(SsdTier(backend, mover, [directory], events=events, sampler=sampler))
            stack.callback(tiers[-1].close)
        host = share = None
        if _has_own_memory(device):
            host = _open_cache(stack, host_memory.purse(device), device, copies, events, mover)
        else:
            share = host_memory.purse(device).share()
            stack.callback(share.close)
        return StateFiles(
            tiers,
            mover,
            [partial(measure_rates, backend, directory, nbytes=_PROBE_BYTES) for directory in directories],
            device=device,
            mark=copies.mark if copies is not None else lambda: None,
            block_bytes=backend.block_bytes,
            host=host,
            share=share,
            wait=(lambda mark: mark.synchronize()) if copies is None else copies.wait_on_current_stream,
            first=int(os.environ.get("LOCAL_RANK", "0")),
            resources=stack.pop_all(),
        )


def _tell_of_foreign_malloc(memory_budget: int | str) -> None:
    if (library := foreign_malloc()) is not None:
        warnings.warn(
            f"OffloadPolicy.memory_budget={memory_budget!r} goes by what this process holds, and {library}, which it "
            "has its malloc from, keeps what is freed: what would fit may be refused. Use glibc's malloc (unset "
            "LD_PRELOAD), or activation_budget in its place",
            stacklevel=2,
        )


def open_wear_meter(
    hardware: HardwareProfile,
    default_directory: str | os.PathLike[str] | None,
    subdirectory: str,
    num_local_processes: int,
) -> WearMeter:
    """For the directories, which are there: :func:`assemble` or :func:`open_state_files` has made them.

    Tells, in the first process of a machine, where drives are counted that are not there.
    """
    paths = _directories(hardware, default_directory)
    if not hardware.allow_unsuitable_paths and os.environ.get("LOCAL_RANK", "0") == "0":
        tell_of_shared_drives(paths)
    directories = [path / subdirectory for path in paths]
    return WearMeter(directories, hardware.drive_endurance_nbytes, num_processes=num_local_processes)


def _open_directories(
    stack: ExitStack,
    hardware: HardwareProfile,
    device: torch.device,
    default_directory: str | os.PathLike[str] | None,
    subdirectory: str,
    wrap_backend: Callable[[Backend], Backend] | None,
) -> tuple[Backend, list[Path], str]:
    """How bytes get to the user's directories, these, and why in this way."""
    paths = _directories(hardware, default_directory)
    directories = [path / subdirectory for path in paths]
    with made(paths, allow_unsuitable=hardware.allow_unsuitable_paths), ExitStack() as opened:
        for directory in directories if subdirectory else ():
            opened.callback(HeldDirectory(directory).close)
        backend, why = open_backend(
            "posix" if hardware.encrypt else hardware.backend,
            directories=directories,
            device_type=device.type,
            allow_unsuitable_paths=hardware.allow_unsuitable_paths,
        )
        opened.callback(backend.close)
        if hardware.encrypt:
            backend = EncryptedBackend(backend)
            opened.callback(backend.close)
            why = f"{why} (encrypt=True takes no other), with AES-256"
        stack.callback(opened.pop_all().close)
    return (backend if wrap_backend is None else wrap_backend(backend)), directories, why


def _measure_one(backend: Backend, directories: Sequence[Path]) -> Rates:
    """Of the first drive that can be measured: a full one is passed over when bytes are written, too.

    Raises:
        OSError: none can.
    """
    for directory in directories[:-1]:
        with suppress(OSError):
            return measure_rates(backend, directory, nbytes=_PROBE_BYTES)
    return measure_rates(backend, directories[-1], nbytes=_PROBE_BYTES)


def _place(paths: Sequence[Path]) -> str:
    return f"{'the directory' if len(paths) == 1 else 'the directories'} {', '.join(map(printable, paths))}"


def _wishes(policy: OffloadPolicy, capacity_bytes: int, num_processes: int, *, is_mapped: bool) -> Wishes:
    memory, activations = policy.budget_nbytes
    wear = policy.wear_bytes_per_day(capacity_bytes)
    return Wishes(
        max_slowdown=policy.max_slowdown,
        min_relief=_MIN_RELIEF_IF_MAPPED if is_mapped else 0.0,
        activation_budget=activations,
        memory_budget=memory,
        wear_bytes_per_day=None if wear is None else wear // num_processes,
    )


def _open_mover(
    stack: ExitStack, policy: OffloadPolicy, backend: Backend, copies: Copies | None, device: torch.device
) -> tuple[Mover, ReloadPool | None]:
    if copies is None:
        reload = ReloadPool(_SPARE_BYTES)
        stack.callback(reload.close)
        return HostMover(backend, reload), reload
    if backend.moves_device_memory and policy.verify == "off":
        return DeviceMover(backend, copies), None
    staging = StagingPool(_STAGING_BYTES, pin=torch.cuda.is_available(), device=device)
    stack.callback(staging.close)
    return StagedMover(backend, staging, copies), None


def _open_host(
    stack: ExitStack,
    policy: OffloadPolicy,
    host_memory: HostMemory,
    device: torch.device,
    copies: Copies | None,
    events: EventLog,
) -> HostTier | None:
    purse = host_memory.purse(device) if policy.activations == "auto" else None
    if purse is None or not purse.total_bytes:
        return None
    host = HostTier(purse, copies, pin=device.type == "cuda", events=events)
    stack.callback(host.close)
    return host


def _has_own_memory(device: torch.device) -> bool:
    """Whether what waits in the host's memory has left the device's."""
    return device.type != "cpu"


def _open_cache(
    stack: ExitStack,
    purse: Purse,
    device: torch.device,
    copies: Copies | None,
    events: EventLog,
    mover: SlotMover,
) -> HostTier | None:
    """Host memory for optimizer states."""
    if not purse.total_bytes:
        return None

    def allocate(nbytes: int, device: torch.device) -> tuple[torch.UntypedStorage, Mark | None]:
        return mover.allocate(nbytes, Edges(b"", b""), device)

    host = HostTier(purse, copies, pin=device.type == "cuda", events=events, allocate=allocate)
    stack.callback(host.close)
    return host


def _directories(hardware: HardwareProfile, default_directory: str | os.PathLike[str] | None) -> list[Path]:
    named = [path for path in os.environ.get(PATHS_VARIABLE, "").split(os.pathsep) if path]
    refuse_misread(f"${PATHS_VARIABLE}", named, "directories separated by ':'")
    fallback = default_directory or tempfile.gettempdir()
    paths = tuple(cast(Sequence[str], hardware.paths)) or tuple(named) or (fallback,)
    return [Path(path).expanduser().absolute() for path in paths]
