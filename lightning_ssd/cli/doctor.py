"""``lightning-ssd doctor``: what this machine has, what training would use of it, and what stands in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lightning_ssd._environment import chosen_paths
from lightning_ssd.cli import machine
from lightning_ssd.cli.output import FAILED, console, facts_table, reported_errors, show_error
from lightning_ssd.common.formatting import escape_control, format_sizes
from lightning_ssd.config import HardwareProfile
from lightning_ssd.errors import OffloadError
from lightning_ssd.memory.malloc import PAGES_VARIABLE
from lightning_ssd.storage.directories import missing_parts
from lightning_ssd.storage.factory import BackendChoice, open_backend
from lightning_ssd.storage.filesystem import check_directory, inspect_directory

__all__ = ["diagnose", "doctor"]


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
    try them is at most 128 MiB in each, in files without names.
    """
    with reported_errors():
        diagnosis = diagnose(directories or (), backend)
    if as_json:
        typer.echo(json.dumps(diagnosis, indent=2))
    else:
        _show(diagnosis)
    if diagnosis["problems"]:
        raise typer.Exit(FAILED)


def diagnose(directories: Sequence[Path], backend: BackendChoice) -> dict[str, Any]:
    """Look at everything."""
    problems: list[str] = []
    paths = chosen_paths(HardwareProfile(paths=directories), Path.cwd())
    reports = [report for path in paths if (report := _report_on(path, problems)) is not None]
    chosen, memory = _choose_backend(backend, reports, problems), machine.memory()
    return {
        "versions": machine.versions(),
        "accelerator": machine.accelerator(),
        "memory": memory,
        "directories": reports,
        "backend": chosen,
        "notes": _notes(reports, memory),
        "problems": problems,
    }


def _report_on(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return facts about a directory as a tier, ``None`` if it is none; add to ``problems``."""
    looked_at = next(part for part in (path, *path.parents) if os.path.lexists(part))
    try:
        missing_parts(path)
        check_directory(looked_at)
    except OffloadError as error:
        problems.append(str(error))
        if not looked_at.is_dir():
            return None
    facts = inspect_directory(looked_at)
    kinds = {facts.is_memory: "memory", facts.is_network: "network", facts.file_system == "overlay": "overlay"}
    return {
        "path": os.fspath(path),
        "looked_at": os.fspath(looked_at),  # the nearest one that exists; training makes what is missing below it
        "file_system": facts.file_system,
        "device": facts.device,
        "kind": kinds.get(True, "local"),
        "is_rotational": facts.is_rotational,
        "free_bytes": facts.free_bytes,
        "total_bytes": facts.total_bytes,
    }


def _choose_backend(choice: BackendChoice, reports: Sequence[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Choose as training does, with the same trials; nothing where a directory cannot serve."""
    chosen: dict[str, Any] = {"asked": choice, "chosen": None, "is_gds_active": False}
    chosen["reason"] = "not tried, because a directory cannot be used"
    if problems:
        return chosen
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backend, reason = open_backend(choice, directories=[Path(one["looked_at"]) for one in reports], device=device)
    except OffloadError as error:
        problems.append(str(error))
        return chosen | {"reason": str(error)}
    backend.close()
    is_gds_active = backend.register is not None and backend.name.endswith(" GDS")  # else host memory moves
    return chosen | {"chosen": backend.name, "reason": reason, "is_gds_active": is_gds_active}


def _notes(reports: Sequence[dict[str, Any]], memory: dict[str, Any]) -> list[str]:
    """Return notes on what works and might work better."""
    notes: list[str] = []
    places: dict[int, list[str]] = {}
    for report in reports:
        places.setdefault(os.stat(report["looked_at"]).st_dev, []).append(escape_control(report["path"]))
        name, place, device = (escape_control(report[key]) for key in ("path", "looked_at", "device"))
        if place != name:
            where = f"the file system of {place} ({device})"
            notes.append(f"{name} does not exist: is the drive mounted? Training would write to {where}")
        if report["kind"] == "overlay":
            notes.append(f"{name} lies on a container's overlay: mount a drive there if you can")
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


def _show(diagnosis: dict[str, Any]) -> None:
    out = console()
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in diagnosis["versions"].items())
    rows = [
        ("Versions", [versions]),
        ("Accelerator", [_accelerator_text(diagnosis["accelerator"])]),
        ("Memory", _memory_lines(diagnosis["memory"])),
        *(("Directory", _directory_lines(report)) for report in diagnosis["directories"]),
        ("Backend", [diagnosis["backend"]["reason"]]),
    ]
    rows += [("Notes", [note]) for note in diagnosis["notes"]]
    out.print(facts_table(rows))
    for problem in diagnosis["problems"]:
        show_error(problem)
    if not diagnosis["problems"]:
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


def _directory_lines(report: dict[str, Any]) -> list[str]:
    lines = [escape_control(report["path"])]
    if report["looked_at"] != report["path"]:
        lines.append(f"is missing; training would make it in {escape_control(report['looked_at'])}")
    free, total = format_sizes(report["free_bytes"], report["total_bytes"])
    disk = " (a rotating disk, says the kernel)" if report["is_rotational"] else ""
    lines.append(f"{report['file_system']} on {escape_control(report['device'])}{disk}, {free} of {total} free")
    return lines
