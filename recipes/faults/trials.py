"""Faults of drives and limits, each as a function that runs in a forked child of ``recipes/faults/server.py``.

Each trains a small random model beside its plain twin while something is made to fail, and says what came of it. An
error of a kind that is not documented for its fault is not caught: the child ends by it, and the trial is "broken".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import StorageError
from lightning_ssd.storage import filesystem
from recipes.faults.endings import ENDINGS
from recipes.faults.shim import ALLOCATE, READ, WRITE, armed
from recipes.faults.world import Report, World, places, state_places

__all__ = ["TRIALS"]

_MIB = 1 << 20


# -- the drive -------------------------------------------------------------------------------------------------------


def _below(kind: Any, **settings: Any) -> Callable[[World], Report]:
    """Faults that the library below us injects while training."""

    def trial(world: World) -> Report:
        def work() -> int:
            with world.offloader() as offloader:
                twins = world.twins(offloader)
                one_in = world.dice.choice(settings.get("one_in", (2, 5, 20)))
                fixed = {name: value for name, value in settings.items() if name != "one_in"}
                with armed(kind, seed=world.dice.randrange(1 << 30), one_in=one_in, **fixed) as shim:
                    world.train(twins, 5, mend=shim.disarm)
                    return shim.injected

        return world.report(work)

    return trial


def _full_disk(world: World) -> Report:
    """Somebody else fills the file system, and later removes some of it."""
    hog = world.directory / "hog"

    def fill(leave: int) -> None:
        space = os.statvfs(world.directory)
        with hog.open("ab") as file:
            size = file.tell()
            os.ftruncate(file.fileno(), max(0, size - leave))
            grow = space.f_bavail * space.f_frsize - leave
            with contextlib.suppress(OSError):  # what is free is not always to be had for a file
                os.posix_fallocate(file.fileno(), size, max(grow, 1))

    def work() -> int:
        try:
            world.spill.mkdir()
            late = world.dice.random() < 0.5
            if not late:
                fill(world.dice.choice((0, 1 << 16, 1 << 20, 2 << 20)))
            with world.offloader() as offloader:
                twins = world.twins(offloader)
                if late:
                    fill(world.dice.choice((0, 1 << 16, 1 << 20)))
                world.train(twins, 4, mend=lambda: hog.unlink(missing_ok=True))
                return offloader.stats.failures
        finally:
            hog.unlink(missing_ok=True)

    return world.report(work)


def _flip(verify: str) -> Callable[[World], Report]:
    """A bit of a saved activation flips on the drive, between forward and backward of one step."""

    def trial(world: World) -> Report:
        def work() -> int:
            policy = world.policy(activations="offload", min_tensor_bytes=0, verify=verify, optimizer_states="keep")
            with world.offloader(policy) as offloader:
                twins = world.twins(offloader)
                world.train(twins, 1)
                flips = iter([True])
                twins.ours.before_backward = lambda: world.flip(places(offloader)) if next(flips, False) else None
                world.train(twins, 2)
                return 1

        return world.report(work)

    return trial


def _flip_state(world: World) -> Report:
    """A bit of an optimizer state flips on the drive, between two steps."""

    def work() -> int:
        policy = world.policy(verify="full", optimizer_states="offload")
        with world.offloader(policy) as offloader:
            twins = world.twins(offloader)
            world.train(twins, 2)
            twins.ours.optimizer.flush()  # type: ignore[attr-defined]
            if where := state_places(offloader):
                world.flip(where)
            world.train(twins, 2)
            return len(where) and 1

    return world.report(work)


def _directory_goes(world: World) -> Report:
    """The directory is removed, renamed or replaced while spill files in it are open."""
    elsewhere = world.directory / "elsewhere"

    def work() -> int:
        how = world.dice.choice(("remove ours", "remove all", "rename", "replace"))
        with world.offloader(world.policy(optimizer_states="keep")) as offloader:
            twins = world.twins(offloader)
            world.train(twins, 1)
            if how == "remove ours":
                for private in world.spill.iterdir():  # a probe of the drive may have taken it away already
                    shutil.rmtree(private)
            elif how == "rename":
                world.spill.rename(elsewhere)
            else:
                shutil.rmtree(world.spill)
                if how == "replace":
                    world.spill.write_text("a file\n")
            world.train(twins, 3)
            if how == "replace":
                world.spill.unlink()
        return 1

    try:
        return world.report(work)
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)
        shutil.rmtree(world.spill, ignore_errors=True)


_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # of linux/fs.h


def _make_read_only(directory: Path, *, on: bool) -> None:
    """Mode bits do not stop root; the file system's own flag does, where there is one."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        buffer = bytearray(8)
        try:
            fcntl.ioctl(fd, _GET_FLAGS, buffer)
            (flags,) = struct.unpack("=I", buffer[:4])
            flags = flags | _IMMUTABLE if on else flags & ~_IMMUTABLE
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("=Q", flags))
        except OSError:
            os.fchmod(fd, 0o500 if on else 0o700)
    finally:
        os.close(fd)


def _read_only(world: World) -> Report:
    """Before opening, or after it; then optimizer states, where they are offloaded, want another file."""
    late = world.dice.random() < 0.7

    def work() -> int:
        world.spill.mkdir(exist_ok=True)
        try:
            if not late:
                _make_read_only(world.spill, on=True)
            with world.offloader() as offloader:
                if late:
                    private = list(world.spill.iterdir())
                    for path in (*private, world.spill):
                        _make_read_only(path, on=True)
                try:
                    world.train(world.twins(offloader), 2)
                finally:
                    if late:
                        for path in (*private, world.spill):
                            _make_read_only(path, on=False)
        finally:
            if not late:
                _make_read_only(world.spill, on=False)
                world.spill.rmdir()
        return 1

    return world.report(work)


def _unsuitable(world: World) -> Report:
    """Memory, a network file system, a file, a place that cannot be made: each is refused before anything is opened."""
    file = world.directory / "file"
    file.write_text("no directory\n")
    choices: list[tuple[Path, Any]] = [(file, None), (file / "below", None), (Path("/proc/nothing"), None)]
    if Path("/dev/shm").is_dir():
        choices.append((Path("/dev/shm"), None))
    choices += [(world.directory, kind) for kind in ("nfs4", "cifs", "fuse.sshfs")]
    path, kind = world.dice.choice(choices)

    def work() -> None:
        with mock.patch.object(
            filesystem, "_mount_of", (lambda _: (kind, "server:/")) if kind else filesystem._mount_of
        ):
            offloader = Offloader(policy=world.policy(), hardware=HardwareProfile(paths=[path]))
            with offloader:
                world.train(world.twins(offloader), 1)

    try:
        return world.report(work)
    finally:
        file.unlink()


# -- limits of the process -------------------------------------------------------------------------------------------


def _limited(limit: int, draw: Callable[[World], int]) -> Callable[[World], Report]:
    """Under a resource limit from before the opening."""

    def trial(world: World) -> Report:
        hard = resource.getrlimit(limit)[1]

        def work() -> int:
            resource.setrlimit(limit, (draw(world), hard))
            with world.offloader() as offloader:
                world.train(world.twins(offloader), 3, mend=lambda: resource.setrlimit(limit, (hard, hard)))
                return offloader.stats.failures

        report = world.report(work)
        resource.setrlimit(limit, (hard, hard))
        return report

    return trial


def _address_space(world: World) -> Report:
    """No more memory in one backward, for us and for PyTorch."""

    def work() -> int:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]

        def tighten() -> None:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + world.dice.choice((0, 1 << 16, 1 << 20)), hard))

        def lift() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

        with world.offloader(world.policy(activations="offload")) as offloader:
            twins = world.twins(offloader)
            world.train(twins, 1)
            harms = iter(range(world.dice.randint(1, 3)))

            def tighten_now_and_then() -> None:
                if next(harms, None) is not None:
                    tighten()

            twins.ours.before_backward, twins.ours.after_backward = tighten_now_and_then, lift
            world.train(twins, 3, tolerated=(StorageError, MemoryError, RuntimeError))
        return 1

    return world.report(work)


def _no_memory_in_unpack(world: World) -> Report:
    """The allocator fails where a read wants its memory, sometimes or always for a while."""

    def work() -> int:
        with world.offloader(world.policy(activations="offload", min_tensor_bytes=0)) as offloader:
            twins = world.twins(offloader)
            tier = offloader._parts.tiers.ssd
            allocate, share, injected = tier.mover.allocate, world.dice.choice((0.1, 0.5, 1.0)), []  # type: ignore[union-attr]
            errors = (MemoryError(), torch.OutOfMemoryError("injected"), OSError(errno.ENOMEM, "injected"))

            def fail(*args: Any) -> Any:
                if world.dice.random() < share:
                    injected.append(1)
                    raise world.dice.choice(errors)
                return allocate(*args)

            with mock.patch.object(tier.mover, "allocate", fail):  # type: ignore[union-attr]
                tolerated = (StorageError, MemoryError, torch.OutOfMemoryError, OSError)

                def mend() -> None:
                    nonlocal share
                    share = 0.0

                world.train(twins, 3, tolerated=tolerated, mend=mend)
            return len(injected)

    return world.report(work)


def _hungry(world: World) -> Report:
    """Forty mebibytes of activations; for control groups that give less."""

    def work() -> int:
        policy = OffloadPolicy(activations="auto", activation_budget="8MiB", min_tensor_bytes=0)
        with world.offloader(policy) as offloader:
            world.begin()
            for _ in range(3):
                x = torch.ones(512, 1024, requires_grad=True)
                with offloader.saved_tensors():
                    y = x * 1
                    for _ in range(20):
                        y = y.sin()
                    loss = y.sum()
                del y
                torch.autograd.backward(loss)
                offloader.end_backward()
                del loss
                world.steps += 1
        return 0

    return world.report(work)


TRIALS: dict[str, Callable[[World], Report | None]] = {
    "EIO on writes": _below("fail", directions=WRITE),
    "EIO on reads": _below("fail", directions=READ),
    "EIO on growing": _below("fail", directions=ALLOCATE, one_in=(1, 2)),
    "ENOSPC on writes": _below("fail", directions=WRITE, code=errno.ENOSPC),
    "short writes and reads": _below("short", one_in=(1, 2, 5)),
    "EINTR storm": _below("interrupt", directions=READ | WRITE | ALLOCATE, one_in=(2, 3)),
    "slow drive": _below("slow", one_in=(1, 2)),
    "full disk": _full_disk,
    "bit flip, verify=full": _flip("full"),
    "bit flip, verify=sampled": _flip("sampled"),
    "bit flip, verify=off": _flip("off"),
    "bit flip in a state, verify=full": _flip_state,
    "directory goes": _directory_goes,
    "directory read-only": _read_only,
    "unsuitable path": _unsuitable,
    "descriptors": _limited(resource.RLIMIT_NOFILE, lambda world: len(os.listdir("/proc/self/fd")) + world.draw(12)),
    "memlock": _limited(resource.RLIMIT_MEMLOCK, lambda world: 0),
    "file size": _limited(resource.RLIMIT_FSIZE, lambda world: world.draw(8) * _MIB),
    "address space": _address_space,
    "no memory in unpack": _no_memory_in_unpack,
    "memory group": _hungry,
    **ENDINGS,
}
