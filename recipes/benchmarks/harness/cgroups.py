"""Control groups, versions 1 and 2: a group of our own under that of this process, with limits, gone at the end.

A group limits what the processes in it may use: memory, or the rate of a drive. Making one needs root, or a subtree
that was delegated. Nothing is left behind: processes go back to the group they came from, the group is removed, and a
hierarchy that was mounted here is unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Group", "GroupUnavailableError", "Hierarchy", "control_group", "locate", "open_hierarchy"]

_REMOVED_WITHIN_S = 10.0
_PREFIX = "lightning_ssd-"


class GroupUnavailableError(Exception):
    """This machine, or this user, cannot have the control group that was asked for; the text says why."""


@dataclass(frozen=True)
class Hierarchy:
    """Where groups of one controller live."""

    version: int
    mount: Path
    own: Path
    """The group of this process."""


class Group:
    """A group of ours.

    Args:
        directory: that of the group.
        home: the group that its processes came from.
    """

    def __init__(self, directory: Path, home: Path) -> None:
        self.directory = directory
        self._home = home

    @property
    def procs(self) -> Path:
        """The file that moves a process here when its number is written to it."""
        return self.directory / "cgroup.procs"

    def remove(self) -> None:
        """Send its processes home and remove it. The kernel may need a moment to let go."""
        deadline_s = time.monotonic() + _REMOVED_WITHIN_S
        while True:
            for pid in self.procs.read_text().split():
                _move(int(pid), self._home / "cgroup.procs")
            try:
                self.directory.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                    raise
            time.sleep(0.02)


def _move(pid: int, procs: Path) -> None:
    # A process that has ended meanwhile needs no moving.
    with contextlib.suppress(ProcessLookupError):
        procs.write_text(f"{pid}\n")


def locate(controller: str, *, mountinfo: str, cgroup: str) -> Hierarchy | None:
    """Find the mounted hierarchy of a controller and the group of the process that the two texts are about.

    Args:
        controller: its name, such as "memory".
        mountinfo: as in ``/proc/self/mountinfo``.
        cgroup: as in ``/proc/self/cgroup``.

    Returns:
        Version 1 where the controller is mounted, else version 2 where that is mounted, else ``None``.
    """
    paths = {names: path for _, names, path in (line.split(":", 2) for line in cgroup.splitlines())}
    found: dict[int, Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        path = next((path for names, path in paths.items() if is_v1 and controller in names.split(",")), "/")
        path = path if is_v1 else paths.get("", "/")
        # In a container the mount may show a subtree only, or a namespace may hide where we are.
        relative = os.path.relpath(path, root)
        own = Path(mount) if relative.startswith("..") else Path(mount) / relative
        found.setdefault(1 if is_v1 else 2, Hierarchy(1 if is_v1 else 2, Path(mount), own))
    return found.get(1) or found.get(2)


@contextmanager
def open_hierarchy(controller: str) -> Iterator[Hierarchy]:
    """The hierarchy of a controller, mounted for as long as this is open where nobody has mounted it.

    Raises:
        GroupUnavailableError: no root, no such controller, or the system refuses.
    """
    if os.geteuid() != 0:
        raise GroupUnavailableError("control groups need root here")
    found = _mounted(controller)
    if found is not None and (found.version == 1 or _has_v2(found, controller)):
        yield found
        return
    with _mount_v1(controller) as mounted:
        yield mounted


def _mounted(controller: str) -> Hierarchy | None:
    try:
        texts = [Path(f"/proc/self/{name}").read_text() for name in ("mountinfo", "cgroup")]
    except OSError as error:
        raise GroupUnavailableError(f"this system has no control groups ({error})") from error
    return locate(controller, mountinfo=texts[0], cgroup=texts[1])


def _has_v2(found: Hierarchy, controller: str) -> bool:
    return controller in (found.mount / "cgroup.controllers").read_text().split()


@contextmanager
def _mount_v1(controller: str) -> Iterator[Hierarchy]:
    with tempfile.TemporaryDirectory(prefix="cgroup-") as directory:
        mounted = subprocess.run(
            ["mount", "-t", "cgroup", "-o", controller, "none", directory], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            raise GroupUnavailableError(f"no {controller} controller: {mounted.stderr.strip()}")
        try:
            found = _mounted(controller)
            if found is None:
                raise GroupUnavailableError(f"the {controller} controller was mounted and cannot be found")
            yield found
        finally:
            subprocess.run(["umount", directory], check=True)


@contextmanager
def control_group(controller: str, *, v1: Mapping[str, str], v2: Mapping[str, str]) -> Iterator[Group]:
    """A group with limits; no process is in it yet.

    Args:
        controller: such as "memory".
        v1: file name -> what is written to it, for version 1.
        v2: the same for version 2.

    Raises:
        GroupUnavailableError: as :func:`open_hierarchy`; or the limit itself is refused.
    """
    with open_hierarchy(controller) as hierarchy, _parent(hierarchy, controller) as parent:
        _sweep(parent)
        directory = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir()
        except OSError as error:
            raise GroupUnavailableError(f"no group can be made in {controller}: {error.strerror}") from error
        group = Group(directory, hierarchy.own)
        try:
            for name, text in (v1 if hierarchy.version == 1 else v2).items():
                _write_limit(directory / name, text)
            yield group
        finally:
            group.remove()


def _sweep(parent: Path) -> None:
    """Remove the groups of runs that were killed. The kernel itself refuses to remove one with processes in it."""
    for directory in parent.glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                directory.rmdir()


def _write_limit(file: Path, text: str) -> None:
    try:
        # Not to be created: a kernel without the limit must not get a plain file.
        with file.open("r+") as stream:
            stream.write(text)
    except OSError as error:
        raise GroupUnavailableError(f"{file.name} does not take {text!r}: {error.strerror}") from error


@contextmanager
def _parent(hierarchy: Hierarchy, controller: str) -> Iterator[Path]:
    """Where the new group goes: under our own, so that its limits still hold.

    Version 2 allows no groups with controllers under one that has processes, so there the next ancestor serves that
    hands the controller down; if none does, the root is told to, until the end.
    """
    if hierarchy.version == 1:
        yield hierarchy.own
        return
    for level in (*hierarchy.own.parents, hierarchy.mount):
        if not level.is_relative_to(hierarchy.mount):
            break
        if controller in (level / "cgroup.subtree_control").read_text().split():
            yield level
            return
    switch = hierarchy.mount / "cgroup.subtree_control"
    _write_limit(switch, f"+{controller}")
    try:
        yield hierarchy.mount
    finally:
        switch.write_text(f"-{controller}")
