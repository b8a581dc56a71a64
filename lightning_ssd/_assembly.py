"""Assemble the parts of an offloader, for one policy on one machine."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

from lightning_ssd._environment import Environment
from lightning_ssd.activations.hooks import Tiers
from lightning_ssd.common.accelerators import device_types, locks_host_memory
from lightning_ssd.common.formatting import escape_control
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.config import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory.freed_memory import FreedMemory
from lightning_ssd.memory.gauge import DeviceGauge, Gauge
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.memory.malloc import PAGES_VARIABLE, foreign_malloc, has_whole_pages, is_glibc
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.optimizer.store.files import StateFiles
from lightning_ssd.parameters.device_gradients import DeviceGradients
from lightning_ssd.parameters.device_weights import DeviceWeights, WeightTiers
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.mapped_weights import MappedWeights
from lightning_ssd.parameters.paged_gradients import PagedGradients
from lightning_ssd.parameters.paged_parameters import PagedParameters
from lightning_ssd.parameters.residents import Needs, Residents
from lightning_ssd.scheduling.memory_limits import MemoryConstraints
from lightning_ssd.scheduling.overhead import CpuCosts
from lightning_ssd.scheduling.scheduler import Scheduler
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend, open_staging
from lightning_ssd.storage.directories import created_directories, warn_shared_filesystem
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.numa import directory_order
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter, measure_copies, measure_mapping, measure_rates
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover, Mover, StagedMover
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.wear.meter import ACTIVATIONS, WearMeter, Written

__all__ = ["NOTHING", "Components", "assemble", "open_state_files", "open_wear_meter"]


_SPARE_BYTES = 256 << 20
_FIRST_LOCKED_BYTES = 256 << 20
"""Host memory for activations that is locked before a pass has shown how much it saves."""
_SHARED_CHUNK_BYTES = 2 << 20
"""Largest request for optimizer states on several drives. Each gets a part of each subgroup, which may be as small as
4 MiB, because subgroups are waited for in order."""
_DEFAULT_SLOWDOWN = OffloadPolicy().max_slowdown
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The parts of an offloader; ``None`` if the policy needs no such part."""

    description: str
    """One line that says how bytes reach the drive, and where."""
    tiers: Tiers = field(default_factory=Tiers)
    reload: ReloadPool | None = None
    wear: WearMeter | None = None
    scheduler: Scheduler | None = None
    heap_policy: HeapPolicy = field(default_factory=HeapPolicy)
    parameters: PagedParameters = field(default_factory=PagedParameters)
    cpu: CpuCosts | None = None


NOTHING = Components(description="closed")


def assemble(stack: ExitStack, policy: OffloadPolicy, environment: Environment) -> Components:
    """Open the parts that the policy needs; ``stack`` closes them.

    Raises:
        ConfigError: tensors of the device cannot be moved.
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    _tell_of_slowdown(policy)
    parts = _assemble_activations(stack, policy, environment)
    return _with_parameters(parts, stack, policy, environment)


def _assemble_activations(stack: ExitStack, policy: OffloadPolicy, environment: Environment) -> Components:
    if policy.activations == "keep":
        return Components(description="everything is kept in memory and counted")
    _refuse_other_devices(environment.device)
    is_mapped = environment.device.type == "cpu" and not environment.copies.is_asynchronous
    heap_policy = HeapPolicy(is_ours=is_mapped)
    stack.callback(heap_policy.close)
    if is_mapped and policy.memory_budget is not None:
        _tell_of_foreign_malloc(policy.memory_budget)
    if policy.activations == "recompute":
        description = "blocks are recomputed, all else is kept in memory and counted"
        return Components(description=description, heap_policy=heap_policy)
    backend, directories, why = _open_directories(stack, policy, environment)
    lacks_whole_pages = is_mapped and is_glibc() and not has_whole_pages()
    if lacks_whole_pages and environment.local_rank == 0:
        _warn_of_page_faults()
    cpu = CpuCosts.here(0.0 if has_whole_pages() else measure_mapping()) if is_mapped else None
    reload = None
    if not environment.copies.is_asynchronous:
        reload = ReloadPool(_SPARE_BYTES)
        stack.callback(reload.close)
    ssd = _open_ssd(stack, policy, environment, backend, directories, reload)
    host = _open_host(stack, environment, ahead=True)
    if host is not None:
        host.lock_ahead(_FIRST_LOCKED_BYTES)
    wear = open_wear_meter(policy, environment)
    wear.watch(ACTIVATIONS, ssd.written_bytes)
    scheduler = None
    if policy.activations == "auto":
        kind, names = "directory" if len(directories) == 1 else "directories", map(escape_control, environment.paths)
        meter = BandwidthMeter(
            ssd,
            partial(measure_rates, backend, directories, ssd.mover, device=environment.device),
            host=host,
            probe_host=partial(measure_copies, environment.device),
            place=f"the {kind} {', '.join(names)}",
            expected=environment.expected_rates,
            cost_s_per_byte=0.0 if cpu is None else cpu.mapping_s_per_moved_byte,
        )
        constraints = _constraints(policy, wear.bytes_per_day)
        if lacks_whole_pages and policy.max_slowdown == _DEFAULT_SLOWDOWN:
            # glibc does not use again what a part of the tensors leaves in its heap: memory does not fall, and page
            # faults take a tenth of the step. Plans keep everything, then, unless memory is limited.
            constraints = replace(constraints, max_slowdown=1.0)
        num_sharing = 1 if environment.is_discrete else environment.num_local_processes
        scheduler = Scheduler(constraints, meter.machine, agree=environment.agree, num_sharing=num_sharing)
        scheduler.other_writes = wear.other_bytes_per_day
        stack.callback(scheduler.close)
    description = f"{why}; in {', '.join(map(escape_control, directories))}"
    return Components(
        description=description,
        tiers=Tiers(ssd, host),
        reload=reload,
        wear=wear,
        scheduler=scheduler,
        heap_policy=heap_policy,
        cpu=cpu,
    )


def open_state_files(policy: OffloadPolicy, environment: Environment) -> StateFiles:
    """Open files for the states of one optimizer.

    Raises:
        StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
        BackendUnavailableError: ``hardware.backend`` names one that does not work here.
    """
    _refuse_other_devices(environment.device)
    with ExitStack() as stack:
        backend, directories, _ = _open_directories(stack, policy, environment)
        chunk_bytes = DEFAULT_CHUNK_BYTES if len(directories) == 1 else _SHARED_CHUNK_BYTES
        tier = _open_ssd(stack, policy, environment, backend, directories, reload=None, chunk_bytes=chunk_bytes)
        host = share = None
        if environment.is_discrete:
            host = _open_host(stack, environment)
        else:
            share = environment.host_budget.share()
            stack.callback(share.close)
        return StateFiles(
            tier=tier,
            device=environment.device,
            copies=environment.copies,
            block_bytes=backend.block_bytes,
            host=host,
            share=share,
            first=environment.local_rank,
            resources=stack.pop_all(),
        )


def _with_parameters(
    parts: Components, stack: ExitStack, policy: OffloadPolicy, environment: Environment
) -> Components:
    """Add the parts for weights and gradients if the policy offloads them; ``stack`` closes them."""
    if policy.parameters == policy.gradients == "keep":
        return parts
    _refuse_parameters(policy, environment)
    residents = None
    if policy.parameters == "auto":
        residents = Residents(_needs(policy, environment), _gauge(environment))
    open_them = _open_on_device if _is_device(environment) else _open_in_files
    parameters, written = open_them(stack, policy, environment, residents)
    wear = parts.wear or open_wear_meter(policy, environment)
    wear.watch("weights and gradients", written)
    return replace(parts, parameters=parameters, wear=wear)


def _is_device(environment: Environment) -> bool:
    return environment.device.type != "cpu" or environment.copies.is_asynchronous


def _gauge(environment: Environment) -> Gauge:
    return DeviceGauge(environment.device) if _is_device(environment) else Gauge(environment.num_local_processes)


def _open_in_files(
    stack: ExitStack, policy: OffloadPolicy, environment: Environment, residents: Residents | None
) -> tuple[PagedParameters, Written]:
    """Open files for weights and gradients of a CPU; also return what counts the bytes that are written there."""
    backend, directories, _ = _open_directories(stack, policy, environment)
    rates = _probed_shares(backend, environment)
    order = directory_order(directories, environment.device, environment.local_rank)
    files = WeightFiles(backend, directories, order=order, rates=rates)
    stack.callback(files.close)
    pages = UpdatePages(files, HostRoom(environment.num_local_processes, times=1))
    stack.callback(pages.close)
    weights = gradients = freed = None
    if policy.parameters != "keep":
        weights = MappedWeights(
            files,
            min_nbytes=policy.min_tensor_nbytes,
            trained=policy.optimizer_states == "offload",
            is_replicated=environment.is_replicated,
            residents=residents,
        )
        stack.callback(weights.close)
    if policy.gradients != "keep":
        freed = FreedMemory(is_limited=policy.memory_budget is not None, num_processes=environment.num_local_processes)
        stack.callback(freed.close)
        gradients = PagedGradients(
            files,
            min_nbytes=policy.min_tensor_nbytes,
            waits=weights.pager.waits if weights is not None and policy.gradients == "auto" else None,
            freed=freed,
        )
        stack.callback(gradients.close)
    return PagedParameters(weights, gradients, files, pages, freed), files.written_bytes


def _probed_shares(backend: Backend, environment: Environment) -> Sequence[float]:
    """Return what each of several directories takes; empty, or all 0: they count as alike.

    Processes probe at the same time, so that each finds its part, and share out by the smallest rates of all.
    """
    num, agree, rates = len(environment.paths), environment.agree or list, list[float]()
    # They wait for each other here, also those with one directory. Do all have as many?
    least, negative_most = agree([num, -num])
    place = f"the directories {', '.join(map(escape_control, environment.paths))}"
    try:
        if num > 1:
            with StatusLine(f"Probing {place}", delay_s=0), deferring_interrupts():
                rates += measure_rates(backend, environment.paths).by_directory
    except (OSError, RuntimeError, MemoryError) as error:
        _log.info("%s could not be measured (%s), and get equal parts of weights and gradients", place, error)
    finally:
        if least == -negative_most > 1:  # whatever was raised here, or the others would wait for ever
            rates = agree(rates or [0.0] * num)
    return rates


def _open_on_device(
    stack: ExitStack, policy: OffloadPolicy, environment: Environment, residents: Residents | None
) -> tuple[PagedParameters, Written]:
    """Open tiers for weights and gradients of a device; also return what counts the bytes that are written there."""
    backend, directories, _ = _open_directories(stack, policy, environment)
    ssd = _open_ssd(stack, policy, environment, backend, directories, reload=None)
    tiers = WeightTiers(environment.device, ssd, _open_host(stack, environment), environment.copies)
    weights = gradients = None
    if policy.gradients != "keep":  # closed last: the device's memory is for weights first
        gradients = DeviceGradients(tiers, min_nbytes=policy.min_tensor_nbytes)
        stack.callback(gradients.close)
    if policy.parameters != "keep":
        trained = policy.optimizer_states == "offload"
        weights = DeviceWeights(tiers, min_nbytes=policy.min_tensor_nbytes, trained=trained, residents=residents)
        stack.callback(weights.close)
        if gradients is not None and policy.gradients == "auto":
            gradients.waits = weights.pager.waits
    return PagedParameters(weights, gradients), ssd.written_bytes


def _needs(policy: OffloadPolicy, environment: Environment) -> Needs:
    memory, activations = policy.budget_nbytes
    return Needs(
        memory_budget=memory,
        activation_budget=activations,
        gradients=policy.gradients,
        num_gradients=2 if environment.is_replicated else 1,
        keeps_states=policy.optimizer_states == "keep",
        # A device's offloaded states are in host memory, which is not the memory that is short.
        state_bytes=0 if _is_device(environment) else environment.host_budget.total_bytes,
        num_directories=len(environment.paths),
    )


def _refuse_parameters(policy: OffloadPolicy, environment: Environment) -> None:
    if _is_device(environment):
        if environment.agree is not None:
            name = "parameters" if policy.parameters != "keep" else "gradients"
            raise ConfigError(
                f"OffloadPolicy.{name}={getattr(policy, name)!r} got several processes on {str(environment.device)!r}, "
                "and only one process can offload weights and gradients of a device so far. Train with one device, or "
                f"write {name}='keep'"
            )
        _refuse_other_devices(environment.device)
    elif policy.gradients != "keep" and environment.is_replicated:
        raise ConfigError(
            f"OffloadPolicy.gradients={policy.gradients!r} got several processes, which keep all gradients in the "
            "buckets of DistributedDataParallel. Train shards with SSDOffloadFSDPStrategy(policy=...) or "
            "Offloader(is_sharded=True), train with one process, or write gradients='keep'"
        )


def _refuse_other_devices(device: torch.device) -> None:
    if device.type not in device_types():
        raise ConfigError(
            f"device={str(device)!r}: nothing would be moved from there. Use another device "
            f"({', '.join(map(repr, device_types()))}), or write activations='keep' and optimizer_states='keep', which "
            "only count"
        )


@cache  # once in a process
def _warn_of_page_faults() -> None:
    """Name the switch that makes moving cheap on a CPU, unless the user has set it either way."""
    if PAGES_VARIABLE not in os.environ:
        _log.warning(
            "on this CPU run, start Python with %s=1 in the environment: moving tensors is cheaper then (fewer page "
            "faults). Without it activations='auto' moves them under a budget, where memory is short, or with a "
            "max_slowdown of your own; 0 keeps it off without this message",
            PAGES_VARIABLE,
        )


def _tell_of_foreign_malloc(memory_budget: int | str) -> None:
    if (library := foreign_malloc()) is not None:
        warnings.warn(
            f"OffloadPolicy.memory_budget={memory_budget!r} goes by what this process holds, and {library}, which it "
            "has its malloc from, keeps what is freed: what would fit may be refused. Use glibc's malloc (unset "
            "LD_PRELOAD), or activation_budget in its place",
            stacklevel=2,
        )


def open_wear_meter(policy: OffloadPolicy, environment: Environment) -> WearMeter:
    """Return a wear meter for the directories, which :func:`assemble` or :func:`open_state_files` has made.

    In the first process of a machine, warn if several directories are on one drive.
    """
    hardware = environment.hardware
    if not hardware.allow_unsuitable_paths and environment.local_rank == 0:
        warn_shared_filesystem(environment.paths)
    return WearMeter(
        environment.paths,
        hardware.drive_endurance_nbytes,
        num_processes=environment.num_local_processes,
        wear_budget=policy.wear_bytes_per_day,
        agree=environment.agree,
    )


def _open_directories(
    stack: ExitStack, policy: OffloadPolicy, environment: Environment
) -> tuple[Backend, list[Path], str]:
    """Return the backend for the user's directories, these directories, and the reason for the backend."""
    hardware, directories = environment.hardware, environment.paths
    with created_directories(directories):
        backend, why = open_backend(
            hardware.backend,
            directories=directories,
            device=environment.device if policy.verify == "off" else torch.device("cpu"),  # where checksums are made
            allow_unsuitable_paths=hardware.allow_unsuitable_paths,
        )
        stack.callback(backend.close)
    return (backend if environment.wrap_backend is None else environment.wrap_backend(backend)), directories, why


def _constraints(policy: OffloadPolicy, wear_bytes_per_day: int | None) -> MemoryConstraints:
    memory, activations = policy.budget_nbytes
    return MemoryConstraints(
        max_slowdown=policy.max_slowdown,
        activation_budget=activations,
        memory_budget=memory,
        wear_bytes_per_day=wear_bytes_per_day,
        recompute=policy.recomputable_classes is not None,
        have_states_stay=policy.optimizer_states == "keep",
        weights_may_leave=policy.parameters == "auto",
    )


def _tell_of_slowdown(policy: OffloadPolicy) -> None:
    """Warn of a ``max_slowdown`` without effect. It is no error, because sweeps set it for all jobs."""
    reason = ""
    if policy.activations != "auto":
        reason = f"with activations={policy.activations!r}, which plans nothing"
    elif policy.budget_nbytes != (None, None):
        reason = "beside a budget, under which the fastest plan is chosen"
    if reason and policy.max_slowdown != _DEFAULT_SLOWDOWN:
        _log.warning("max_slowdown=%s has no effect %s; leave one out", policy.max_slowdown, reason)


def _open_ssd(
    stack: ExitStack,
    policy: OffloadPolicy,
    environment: Environment,
    backend: Backend,
    directories: Sequence[Path],
    reload: ReloadPool | None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> SsdTier:
    """Open one tier over all directories."""
    if environment.copies.is_asynchronous:
        count = 2 * DEFAULT_WORKERS * len(directories)
        staging = open_staging(backend, environment.device, nbytes=chunk_bytes, count=count)
        stack.callback(staging.close)
        mover: Mover = StagedMover(backend, staging, environment.copies)
    else:
        mover = HostMover(backend, reload)
    sampler = Sampler(policy.verify)
    ssd = SsdTier(
        backend,
        mover,
        directories,
        events=environment.events,
        sampler=sampler,
        chunk_bytes=chunk_bytes,
        order=directory_order(directories, environment.device, environment.local_rank),
    )
    stack.callback(ssd.close)
    return ssd


def _open_host(stack: ExitStack, environment: Environment, *, ahead: bool = False) -> HostTier | None:
    if not environment.host_budget.total_bytes:
        return None
    pin = locks_host_memory(environment.device)
    locked_for = environment.device if ahead and pin else None
    host = HostTier(environment.host_budget, environment.copies, pin=pin, ahead=locked_for, events=environment.events)
    stack.callback(host.close)
    return host
