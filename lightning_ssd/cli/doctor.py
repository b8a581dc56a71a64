"""``lightning-ssd doctor``: what this machine has, what training would use of it, and what stands in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from lightning_ssd._environment import chosen_paths
from lightning_ssd.cli import machine
from lightning_ssd.cli.output import FAILED, Problem, console, facts_table, reported_errors, show_problems
from lightning_ssd.common.formatting import escape_control, format_sizes
from lightning_ssd.config import HardwareProfile
from lightning_ssd.errors import BackendUnavailableError, StorageError, UnsuitablePathError
from lightning_ssd.memory.malloc import PAGES_VARIABLE
from lightning_ssd.storage.directories import missing_parts
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.filesystem import inspect_directory
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.wear.smart import read_health

__all__ = ["Diagnosis", "DirectoryReport", "diagnose", "doctor"]

BackendChoice = Literal["auto", "kvikio", "posix"]
_LOCAL_SSD = "a directory on a local SSD that this user may write to"


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryReport:
    """Facts about a directory as a tier."""

    path: str
    looked_at: str
    """The nearest one that exists; training makes what is missing below it."""
    file_system: str
    device: str
    kind: Literal["local", "overlay", "memory", "network"]
    is_rotational: bool | None
    """As the kernel believes; virtual disks often say so wrongly."""
    free_bytes: int
    total_bytes: int
    is_writable: bool
    direct_io: bool | None
    """``None``: not tried, because nothing can be written there."""
    direct_io_detail: str
    drives: list[dict[str, Any]]
    """Health of each drive, as it reports it."""
    endurance_unknown: str | None
    """Why a drive does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All that ``doctor`` found out."""

    versions: dict[str, str | None]
    accelerator: dict[str, Any]
    kvikio: dict[str, Any]
    memory: dict[str, Any]
    directories: list[DirectoryReport]
    backend: dict[str, Any]
    notes: list[str]
    problems: list[Problem]


def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            help="One directory per drive. None: $LIGHTNING_SSD_PATHS, else the current directory, as in training.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[BackendChoice, typer.Option(help="The backend that training would ask for.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for programs.")] = False,
) -> None:
    """Show what this machine has, what training would use of it, and why.

    Ends with exit code 1 if something that is asked for is impossible. Leaves nothing on the drives: what it writes to
    try them is at most a few MiB in files without names.
    """
    with reported_errors():
        diagnosis = diagnose(directories or (), backend)
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        _show(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(FAILED)


def diagnose(directories: Sequence[Path], backend: BackendChoice) -> Diagnosis:
    """Look at everything.

    Args:
        directories: one per drive; none: those that training would take from the current directory.
        backend: that training would ask for.
    """
    paths = chosen_paths(HardwareProfile(paths=directories), Path.cwd())
    problems: list[Problem] = []
    reports = [report for path in paths if (report := _report_on(path, problems)) is not None]
    chosen = _choose_backend(backend, reports, problems, is_complete=len(reports) == len(paths))
    memory = machine.memory()
    return Diagnosis(
        versions=machine.versions(),
        accelerator=machine.accelerator(),
        kvikio=machine.kvikio(),
        memory=memory,
        directories=reports,
        backend=chosen,
        notes=_notes(reports, memory),
        problems=problems,
    )


# -- directories -------------------------------------------------------------------------------------------------------


def _report_on(path: Path, problems: list[Problem]) -> DirectoryReport | None:
    """Adds to ``problems``; ``None``: there is nothing to look at."""
    looked_at = next(part for part in (path, *path.parents) if os.path.lexists(part))
    if not looked_at.is_dir():
        got = f"{escape_control(looked_at)} exists and is no directory"
        problems.append(Problem(_LOCAL_SSD, got, "name another directory, or remove what is there"))
        return None
    facts = inspect_directory(looked_at)
    is_writable = os.access(looked_at, os.W_OK | os.X_OK)
    direct_io, detail = _try_direct(looked_at, problems) if is_writable else (None, "not tried: not writable")
    health = read_health(looked_at)
    kinds = {facts.is_memory: "memory", facts.is_network: "network", facts.file_system == "overlay": "overlay"}
    kind: Any = kinds.get(True, "local")
    problem = _unsuitable(path, looked_at, facts.file_system, kind, is_writable=is_writable)
    problems += [problem] if problem else []
    return DirectoryReport(
        path=os.fspath(path),
        looked_at=os.fspath(looked_at),
        file_system=facts.file_system,
        device=facts.device,
        kind=kind,
        is_rotational=facts.is_rotational,
        free_bytes=facts.free_bytes,
        total_bytes=facts.total_bytes,
        is_writable=is_writable,
        direct_io=direct_io,
        direct_io_detail=detail,
        drives=[asdict(drive) for drive in health.drives],
        endurance_unknown=health.reason,
    )


def _unsuitable(path: Path, looked_at: Path, file_system: str, kind: str, *, is_writable: bool) -> Problem | None:
    """Why training would refuse the directory."""
    try:
        missing_parts(path)
    except UnsuitablePathError as error:
        return Problem(_LOCAL_SSD, str(error), "mount the drive, or name another directory")
    if os.statvfs(looked_at).f_flag & os.ST_RDONLY:
        got = f"{escape_control(looked_at)} is on a file system that is mounted read-only"
        return Problem(_LOCAL_SSD, got, "mount it writable, or name another directory")
    if not is_writable:
        got = f"{escape_control(looked_at)} is not writable for user {os.geteuid()}"
        if looked_at != path:
            got += f", so that {escape_control(path)} cannot be made there"
        return Problem(_LOCAL_SSD, got, "change its owner or mode, or name another directory")
    if kind == "memory":
        got = f"{escape_control(path)} lies on {file_system}, which is memory: nothing would be saved"
        return Problem(_LOCAL_SSD, got, "name a directory on a drive")
    if kind == "network":
        got = f"{escape_control(path)} lies on {file_system}, a network file system: slow, and shared with others"
        advice = "name a directory on a local drive, or set HardwareProfile(allow_unsuitable_paths=True)"
        return Problem(_LOCAL_SSD, got, advice)
    return None


def _try_direct(directory: Path, problems: list[Problem]) -> tuple[bool | None, str]:
    """Whether bytes get past the page cache there, tried with a file without a name."""
    try:
        backend = PosixBackend([directory])
    except StorageError as error:
        problems.append(Problem("a spill file that can be made and written", str(error), "name another directory"))
        return None, str(error)
    try:
        return backend.name == "posix O_DIRECT", backend.why
    finally:
        backend.close()


# -- the choice --------------------------------------------------------------------------------------------------------


def _choose_backend(
    choice: BackendChoice, reports: Sequence[DirectoryReport], problems: list[Problem], *, is_complete: bool
) -> dict[str, Any]:
    """As training chooses, with the same trials; nothing where a directory cannot serve."""
    chosen: dict[str, Any] = {"asked": choice, "chosen": None, "reason": "no directory can be used"}
    if not is_complete or not all(report.is_writable and report.direct_io is not None for report in reports):
        return chosen | {"reason": "not tried, because a directory cannot be used"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = [Path(report.looked_at) for report in reports]
    try:
        backend, reason = open_backend(choice, directories=places, device=device, allow_unsuitable_paths=True)
    except (BackendUnavailableError, StorageError) as error:
        advice = 'take HardwareProfile(backend="auto"), or install what is missing'
        problems.append(Problem(f"the backend {choice}", str(error), advice))
        return chosen | {"reason": str(error)}
    backend.close()
    return chosen | {"chosen": backend.name, "reason": reason, "is_gds_active": backend.name == "kvikio GDS"}


def _notes(reports: Sequence[DirectoryReport], memory: dict[str, Any]) -> list[str]:
    """Return notes on what works and might work better."""
    notes: list[str] = []
    places: dict[int, list[str]] = {}
    for report in reports:
        places.setdefault(os.stat(report.looked_at).st_dev, []).append(escape_control(report.path))
        if report.looked_at != report.path:
            where = f"the file system of {escape_control(report.looked_at)} ({escape_control(report.device)})"
            notes.append(
                f"{escape_control(report.path)} does not exist: is the drive mounted? Training would write to {where}"
            )
        if report.kind == "overlay":
            notes.append(f"{escape_control(report.path)} lies on a container's overlay: mount a drive there if you can")
        if report.direct_io is False:
            notes.append(f"{escape_control(report.path)} takes no direct I/O: bytes go through the page cache")
    notes += [
        f"{' and '.join(names)} lie on one file system: together no faster than one of them"
        for names in places.values()
        if len(names) > 1
    ]
    if memory["malloc"].startswith("glibc") and "whole pages" not in memory["malloc"]:
        notes.append(
            f"this malloc seldom reuses the memory of freed tensors: on a CPU set {PAGES_VARIABLE}=1 (PyTorch's own "
            "switch), or preload tcmalloc"
        )
    return notes


# -- what is shown -----------------------------------------------------------------------------------------------------


def _show(diagnosis: Diagnosis) -> None:
    out = console()
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in diagnosis.versions.items())
    rows = [
        ("Versions", [versions]),
        ("Accelerator", [_accelerator_text(diagnosis.accelerator)]),
        ("kvikio", _kvikio_lines(diagnosis)),
        ("Memory", _memory_lines(diagnosis.memory)),
        *(("Directory", _directory_lines(report)) for report in diagnosis.directories),
        ("Backend", [diagnosis.backend["reason"]]),
    ]
    rows += [("Notes", [note]) for note in diagnosis.notes]
    out.print(facts_table(rows))
    if diagnosis.problems:
        show_problems(diagnosis.problems)
    else:
        out.print("\nReady: nothing stands in the way of training here.", style="green")


def _accelerator_text(found: dict[str, Any]) -> str:
    if found["type"] is None:
        built = f"; this PyTorch was built for CUDA {found['built_for_cuda']}" if found["built_for_cuda"] else ""
        driver = f"; NVIDIA driver {found['driver']}" if found["driver"] else ""
        return f"none, the CPU computes{built}{driver}"
    name = found.get("name", found["type"])
    memory = f", {format_sizes(found['memory_bytes'])[0]} each" if "memory_bytes" in found else ""
    driver = f", driver {found['driver']}" if found["driver"] else ""
    return f"{found['count']} x {name}{memory}{driver}, CUDA {found['built_for_cuda']}"


def _kvikio_lines(diagnosis: Diagnosis) -> list[str]:
    found = diagnosis.kvikio
    lines = [f"{found['version'] or 'not installed'}; GPUDirect Storage: {'yes' if found['has_gds'] else 'no'}"]
    if diagnosis.backend.get("is_gds_active"):
        lines[0] += ", and proved by a read of what was written"
    return [*lines, found["reason"]]


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    def size(key: str, unknown: str) -> str:
        return unknown if memory[key] is None else format_sizes(memory[key])[0]

    limit = size("cgroup_limit_bytes", "none")
    if memory["cgroup_limit_bytes"] is not None:
        limit += f" ({size('cgroup_available_bytes', 'unknown')} left)"
    return [
        f"{size('host_bytes', 'unknown')}, {size('host_available_bytes', 'unknown')} available; cgroup limit: {limit}",
        f"memlock limit: {size('memlock_bytes', 'none')}; malloc: {memory['malloc']}",
    ]


def _directory_lines(report: DirectoryReport) -> list[str]:
    lines = [escape_control(report.path)]
    if report.looked_at != report.path:
        lines.append(f"is missing; training would make it in {escape_control(report.looked_at)}")
    free, total = format_sizes(report.free_bytes, report.total_bytes)
    lines.append(f"{report.file_system} on {escape_control(report.device)}, {free} of {total} free")
    direct = {True: "yes", False: "no", None: "unknown"}[report.direct_io]
    lines.append(f"direct I/O: {direct}, {report.direct_io_detail}")
    for drive in report.drives:
        written = drive["written_bytes"]
        text = "" if written is None else f"{format_sizes(written, decimal=True)[0]} written so far, "
        lines.append(f"drive {drive['name']}: {text}{drive['percentage_used']} % of its life used")
    if report.endurance_unknown and not report.drives:
        kind = "the kernel calls it a rotating disk" if report.is_rotational else "virtual, or no NVMe drive"
        lines.append(f"kind of drive and its used life unknown ({kind}; {report.endurance_unknown})")
    elif report.endurance_unknown:
        lines.append(f"used life unknown: {report.endurance_unknown}")
    return lines
