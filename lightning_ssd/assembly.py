"""What an offloader is made of, for one policy on one machine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.accelerators import accelerator_of, device_types, what_is_missing
from lightning_ssd.allocation import Allocation
from lightning_ssd.config import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.malloc import foreign_malloc, reuses_holes
from lightning_ssd.plan_cache import PlanCache, machine_of
from lightning_ssd.planning.limits import Wishes
from lightning_ssd.scheduler import Scheduler
from lightning_ssd.site import Site
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
from lightning_ssd.storage.staging import ReloadPool, StagingPool
from lightning_ssd.storage.streams import Mark
from lightning_ssd.storage.tiers import SsdTier
from lightning_ssd.storage.turns import open_in_turns
from lightning_ssd.tensor_cache import Tiers
from lightning_ssd.tier_meter import TierMeter, measure_copies, measure_mapping
from lightning_ssd.wear_meter import WearMeter
from lightning_ssd.wording import printable

__all__ = ["NOTHING", "Parts", "assemble", "open_state_files", "open_wear_meter"]


_STAGING_BYTES = 2 * 2 * DEFAULT_WORKERS * DEFAULT_CHUNK_BYTES  # per worker one chunk in use, one more on its way
_SPARE_BYTES = 256 << 20
_log = logging.getLogger(__name__)

_PROBE_BYTES = 16 << 20
_MIN_RELIEF_IF_MAPPED = 0.05
"""A pass that moves anything on a CPU maps its freed memory anew, all of it: that is not worth a few per cent."""
_TIMES_MAPPED, _TIMES_MAPPED_WITH_REUSE = 2.0, 0.5
"""A byte that moves there is mapped anew about so often, where malloc does not reuse the holes of tensors and where it
does. Measured at blocks of GPT-2 small: 3.5 with glibc 2.36, 0.35 with 2.41, 0 with tcmalloc."""


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


def assemble(stack: ExitStack, policy: OffloadPolicy, site: Site) -> Parts:
    """Open what the policy needs; ``stack`` closes it.

    Raises:
        ConfigError: nothing can be moved from the device.
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    if policy.activations == "keep":
        return Parts(description="everything is kept in memory and counted")
    _refuse_other_devices(site.device)
    is_mapped = site.device.type == "cpu" and site.copies is None
    allocation = Allocation(is_ours=is_mapped)
    stack.callback(allocation.close)
    if is_mapped and policy.memory_budget is not None:
        _tell_of_foreign_malloc(policy.memory_budget)
    if is_mapped and not reuses_holes():
        _log.info(
            "this glibc (before 2.38) seldom reuses the memory that a tensor has left, so that moving costs page "
            "faults; with tcmalloc preloaded it costs less"
        )
    if policy.activations == "recompute":
        description = "blocks are recomputed, all else is kept in memory and counted"
        return Parts(description=description, allocation=allocation)
    backend, directories, why = _open_directories(stack, site)
    mover, reload = _open_mover(stack, policy, backend, site)
    sampler = Sampler(policy.verify)
    ssd = SsdTier(backend, mover, directories, events=site.events, sampler=sampler, first=site.local_rank)
    stack.callback(ssd.close)
    host = _open_host(stack, policy, site)
    wear = open_wear_meter(site)
    scheduler = None
    if policy.activations == "auto":
        probe, probe_host = partial(_measure_one, backend, directories), partial(measure_copies, site.device)
        meter = TierMeter(
            ssd,
            probe,
            host=host,
            probe_host=probe_host,
            place=_place(site.paths),
            probe_cost=_mapping_cost if is_mapped else None,
        )
        wishes = _wishes(policy, wear.capacity_bytes, site.num_local_processes, is_mapped=is_mapped)
        num_sharing = 1 if site.has_own_memory else site.num_local_processes
        cache = _open_plan_cache(policy, site)
        scheduler = Scheduler(wishes, meter.machine, agree=site.agree, num_sharing=num_sharing, cache=cache)
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


def open_state_files(policy: OffloadPolicy, site: Site) -> StateFiles:
    """Files of their own for the states of one optimizer.

    Where several processes of a run share the machine, they find out together whether to take turns on its drives.

    Raises:
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    _refuse_other_devices(site.device)
    with ExitStack() as stack:
        backend, directories, _ = _open_directories(stack, site)
        # Asked of all, since all have to take part in the trial: nodes may have different numbers of processes.
        if site.agree is not None and min(site.agree([site.num_local_processes])) > 1:
            backend = open_in_turns(stack, backend, directories, site.agree)
        mover = SlotMover(_open_mover(stack, policy, backend, site)[0])
        tiers, sampler = [], Sampler(policy.verify)
        for directory in directories:
            tiers.append(SsdTier(backend, mover, [directory], events=site.events, sampler=sampler))
            stack.callback(tiers[-1].close)
        host = share = None
        if site.has_own_memory:
            host = _open_cache(stack, site, mover)
        else:
            share = site.purse.share()
            stack.callback(share.close)
        copies = site.copies
        return StateFiles(
            tiers,
            mover,
            [partial(measure_rates, backend, directory, nbytes=_PROBE_BYTES) for directory in directories],
            device=site.device,
            mark=copies.mark if copies is not None else lambda: None,
            block_bytes=backend.block_bytes,
            host=host,
            share=share,
            wait=(lambda mark: mark.synchronize()) if copies is None else copies.wait_on_current_stream,
            first=site.local_rank,
            resources=stack.pop_all(),
        )


def _refuse_other_devices(device: torch.device) -> None:
    if (missing := what_is_missing(device)) is not None:
        allowed = ", ".join(repr(kind) for kind in device_types() if kind != device.type)
        raise ConfigError(
            f"device={str(device)!r}: nothing would be moved from there, because {missing}; allowed: {allowed}, or "
            "optimizer_states='keep' with activations='keep', which counts"
        )


def _locks_host_memory(device: torch.device) -> bool:
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.locks_host_memory


def _tell_of_foreign_malloc(memory_budget: int | str) -> None:
    if (library := foreign_malloc()) is not None:
        warnings.warn(
            f"OffloadPolicy.memory_budget={memory_budget!r} goes by what this process holds, and {library}, which it "
            "has its malloc from, keeps what is freed: what would fit may be refused. Use glibc's malloc (unset "
            "LD_PRELOAD), or activation_budget in its place",
            stacklevel=2,
        )


def open_wear_meter(site: Site) -> WearMeter:
    """For the directories, which are there: :func:`assemble` or :func:`open_state_files` has made them.

    Tells, in the first process of a machine, where drives are counted that are not there.
    """
    hardware = site.hardware
    if not hardware.allow_unsuitable_paths and site.local_rank == 0:
        tell_of_shared_drives(site.paths)
    return WearMeter(site.directories, hardware.drive_endurance_nbytes, num_processes=site.num_local_processes)


def _open_directories(stack: ExitStack, site: Site) -> tuple[Backend, list[Path], str]:
    """How bytes get to the user's directories, these, and why in this way."""
    hardware, directories = site.hardware, site.directories
    with made(site.paths, allow_unsuitable=hardware.allow_unsuitable_paths), ExitStack() as opened:
        for directory in directories if site.subdirectory else ():
            opened.callback(HeldDirectory(directory).close)
        backend, why = open_backend(
            "posix" if hardware.encrypt else hardware.backend,
            directories=directories,
            device=site.device,
            allow_unsuitable_paths=hardware.allow_unsuitable_paths,
        )
        opened.callback(backend.close)
        if hardware.encrypt:
            backend = EncryptedBackend(backend)
            opened.callback(backend.close)
            why = f"{why} (encrypt=True takes no other), with AES-256"
        stack.callback(opened.pop_all().close)
    return (backend if site.wrap_backend is None else site.wrap_backend(backend)), directories, why


def _measure_one(backend: Backend, directories: Sequence[Path]) -> Rates:
    """Of the first drive that can be measured: a full one is passed over when bytes are written, too.

    Raises:
        OSError: none can.
    """
    for directory in directories[:-1]:
        with suppress(OSError):
            return measure_rates(backend, directory, nbytes=_PROBE_BYTES)
    return measure_rates(backend, directories[-1], nbytes=_PROBE_BYTES)


def _mapping_cost() -> float:
    """A first guess, in seconds per moved byte."""
    return (_TIMES_MAPPED_WITH_REUSE if reuses_holes() else _TIMES_MAPPED) * measure_mapping()


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
        recompute=policy.recomputable_classes is not None,
    )


def _open_plan_cache(policy: OffloadPolicy, site: Site) -> PlanCache | None:
    if policy.plan_cache is None:
        return None
    machine = machine_of(
        site.device,
        site.paths,
        max_slowdown=policy.max_slowdown,
        verify=policy.verify,
        encrypt=site.hardware.encrypt,
        backend=site.hardware.backend,
    )
    return PlanCache(Path(policy.plan_cache).expanduser().absolute(), machine)


def _open_mover(
    stack: ExitStack, policy: OffloadPolicy, backend: Backend, site: Site
) -> tuple[Mover, ReloadPool | None]:
    copies = site.copies
    if copies is None:
        reload = ReloadPool(_SPARE_BYTES)
        stack.callback(reload.close)
        return HostMover(backend, reload), reload
    if backend.moves_device_memory and policy.verify == "off":
        return DeviceMover(backend, copies), None
    staging = StagingPool(_STAGING_BYTES, pin=_locks_host_memory(site.device), device=site.device)
    stack.callback(staging.close)
    return StagedMover(backend, staging, copies), None


def _open_host(stack: ExitStack, policy: OffloadPolicy, site: Site) -> HostTier | None:
    purse = site.purse if policy.activations == "auto" else None
    if purse is None or not purse.total_bytes:
        return None
    host = HostTier(purse, site.copies, pin=_locks_host_memory(site.device), events=site.events)
    stack.callback(host.close)
    return host


def _open_cache(stack: ExitStack, site: Site, mover: SlotMover) -> HostTier | None:
    """Host memory for optimizer states."""
    if not site.purse.total_bytes:
        return None

    def allocate(nbytes: int, device: torch.device) -> tuple[torch.UntypedStorage, Mark | None]:
        return mover.allocate(nbytes, Edges(b"", b""), device)

    pin = _locks_host_memory(site.device)
    host = HostTier(site.purse, site.copies, pin=pin, events=site.events, allocate=allocate)
    stack.callback(host.close)
    return host
