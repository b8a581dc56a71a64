"""How the rates of several drives add up, equal and unequal ones, on loop devices that the kernel throttles.

    python -m recipes.benchmarks.drives --dir DIR [--rate 100] [--rounds 3] [--json FILE]

Needs root on Linux. Each drive is a file with a file system of its own, read and written past the page cache
(``losetup --direct-io=on``), and limited by a control group (``blkio``): a third of the rate for the last one. The
rate of each set of drives is compared with that of one:

* storages: all that a set is given is written, then read back last things first, as a backward pass does, 256 MiB
  ahead. What comes back is compared with what was written.
* states: steps of SGD with momentum, in one thread, which read all and write all at once.
* weights: passes over frozen weights of a CPU, which the page cache has not, in one thread.
* phases: activations and states on one drive, and how much of each moves while a step computes, and while it updates.
* changes: of two drives one gets a tenth of the rate between two passes over the storages, and is then taken away (its
  file system is shut down). The time of a pass is compared with what the rates that are left allow.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.storage.factory import open_backend
from recipes.benchmarks.harness.cgroups import GroupUnavailableError, control_group
from recipes.benchmarks.io import GIB, TierContender
from recipes.benchmarks.step import environment

NUM_DRIVES = 4
SLOW_PART = 3
"""The last drive has the rate of the others divided by this."""
MIB = 1 << 20
SETS = {"1": (0,), "2": (0, 1), "4": (0, 1, 2, 3), "fast + slow": (0, 4)}
"""Numbers of the drives in each set."""
_SHUTDOWN, _AT_ONCE = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN and EXT4_GOING_FLAGS_NOLOGFLUSH


@contextmanager
def loop_drives(directory: Path, number: int, nbytes: int) -> Iterator[list[tuple[Path, str]]]:
    """Make file systems on loop devices.

    Args:
        directory: where their files lie.
        number: of drives.
        nbytes: of each.

    Yields:
        Where each is mounted, and the numbers of its device ("7:0").
    """
    with ExitStack() as stack:
        drives = []
        for index in range(number):
            image, mount = directory / f"drive{index}.img", directory / f"drive{index}"
            mount.mkdir()
            with image.open("wb") as file:
                file.truncate(nbytes)
            _run("mkfs.ext4", "-q", "-F", str(image))
            device = _run("losetup", "--direct-io=on", "--show", "--find", str(image))
            stack.callback(_run, "losetup", "--detach", device)
            _run("mount", device, str(mount))
            stack.callback(_run, "umount", str(mount))
            drives.append((mount, Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()))
        yield drives


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def take_away(directory: Path) -> None:
    """Shut down the ext4 that is mounted there: every move fails from then on, as of a drive that has gone."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _AT_ONCE))
    finally:
        os.close(folder)


@contextmanager
def opened_tier(directories: Sequence[Path], tensors: Sequence[torch.Tensor]) -> Iterator[TierContender]:
    """A tier as a training on a CPU uses it, for these tensors."""
    backend, _ = open_backend("posix", directories=directories, device=torch.device("cpu"), allow_unsuitable_paths=True)
    with closing(backend), closing(TierContender(backend, directories, tensors)) as tier:
        yield tier


def rates_of(tier: TierContender) -> tuple[float, float]:
    """Return MB/s of writing the tensors, and of reading them back. What comes back is compared besides."""
    write, read = (tier.run(direction).gib_per_s * GIB / 1e6 for direction in ("write", "read"))
    tier.check()
    return write, read


def states_rate(directories: Sequence[Path], nbytes: int, *, steps: int = 2) -> float:
    """Return MB/s at which steps of SGD read, update and write states of so many bytes."""
    parameters = [nn.Parameter(torch.zeros(2 * MIB)) for _ in range(nbytes // (8 * MIB))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    policy = OffloadPolicy(activations="keep", optimizer_states="offload")
    hardware = HardwareProfile(paths=list(directories), allow_unsuitable_paths=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on busy cores would be what is measured
    try:
        with Offloader(policy=policy, hardware=hardware) as offloader:
            optimizer = offloader.offload_optimizer(torch.optim.SGD(parameters, momentum=0.9))
            for _ in range(2):
                optimizer.step()
            offloader.flush()
            begin, before = time.perf_counter(), offloader.optimizer_stats[0]
            for _ in range(steps):
                optimizer.step()
            offloader.flush()
            seconds, after = time.perf_counter() - begin, offloader.optimizer_stats[0]
            return (after.read_bytes - before.read_bytes) / seconds / 1e6
    finally:
        torch.set_num_threads(num_threads)


class _Frozen(nn.Module):
    """Uses 16 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * MIB), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def weights_rate(directories: Sequence[Path], nbytes: int, *, passes: int = 2) -> float:
    """Return MB/s at which passes read weights of so many bytes, in the order that they have learnt."""
    model = nn.Sequential(*(_Frozen() for _ in range(nbytes // (16 * MIB))))
    policy = OffloadPolicy(activations="keep", parameters="offload")
    hardware = HardwareProfile(paths=list(directories), allow_unsuitable_paths=True)
    num_threads, seconds = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    try:
        with Offloader(policy=policy, hardware=hardware) as offloader, torch.no_grad():
            offloader.register_module(model)
            for _ in range(passes + 1):
                for link in Path("/proc/self/fd").iterdir():
                    if any(str(link.resolve()).startswith(f"{directory}/") for directory in directories):
                        os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                if model(torch.zeros(1)).item() != 4 * MIB * len(model):
                    raise RuntimeError("a weight came back with other bytes; report this")
                seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(num_threads)
    return nbytes / statistics.mean(seconds[1:]) / 1e6


class _Scaled(nn.Module):
    """Saves 16 MiB, and has states of 16 MiB with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * MIB))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * self.weight


def phases(directory: Path, nbytes: int, *, steps: int = 3) -> dict[str, dict[str, float]]:
    """Return the MB per step that activations and states move in each phase, so many bytes of each, and the stalls."""
    model = nn.Sequential(*(_Scaled() for _ in range(nbytes // (16 * MIB))))
    policy = OffloadPolicy(activations="offload", optimizer_states="offload")
    hardware = HardwareProfile(paths=directory, allow_unsuitable_paths=True)
    totals = {name: [0.0, 0.0, 0.0] for name in ("forward and backward", "update")}
    with Offloader(policy=policy, hardware=hardware) as offloader:
        offloader.register_module(model)
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters()))

        def counters() -> list[float]:
            ours, states = offloader.stats, offloader.optimizer_stats[0]
            moved = [ours.bytes_written + ours.bytes_read, states.written_bytes + states.read_bytes]
            return [moved[0] / 1e6, moved[1] / 1e6, ours.stall_s + states.stall_s]

        for step in range(steps + 1):
            before = counters()
            with offloader.saved_tensors():
                loss = model(torch.ones(2 * MIB)).sum()
            loss.backward()
            between = counters()
            optimizer.step()
            optimizer.zero_grad()
            for row, begin, end in zip(totals.values(), (before, between), (between, counters()), strict=True):
                if step:  # the first one lays the states out
                    row[:] = [total + (b - a) / steps for total, a, b in zip(row, begin, end, strict=True)]
    return {
        name: dict(zip(("activations_mb", "states_mb", "stall_s"), row, strict=True)) for name, row in totals.items()
    }


def changes(
    drives: Sequence[tuple[Path, str]], limit: Callable[[str, float], None], *, rate: float, total: int
) -> dict[str, dict[str, float]]:
    """Return the times of passes over what the rates allow, once a drive has become slow, and once it has gone."""
    found = {}
    with opened_tier([directory for directory, _ in drives], _tensors(2 * total, 16 * MIB)) as tier:
        for name in ("two drives", "one at a tenth", "one taken away"):
            left = {"two drives": 2.0, "one at a tenth": 1.1, "one taken away": 1.0}[name] * rate
            if name == "one at a tenth":
                limit(drives[1][1], rate / 10)
            if name == "one taken away":
                take_away(drives[1][0])
            first, second = (rates_of(tier) for _ in range(2))
            write, read = zip(first, second, strict=True)
            found[name] = {
                "first_write_over_left": left / write[0],
                "first_read_over_left": left / read[0],
                "write_over_left": left / write[1],
                "read_over_left": left / read[1],
            }
            print(name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
        limit(drives[1][1], rate)
    return found


def bench(directory: Path, *, rate: float, rounds: int, total: int) -> dict[str, Any]:
    """Measure all sets, in turns, and return medians.

    Args:
        directory: on a disk that is faster than all drives together.
        rate: of a fast drive, MB/s.
        rounds: of all sets.
        total: bytes per drive that are written in each.
    """
    kinds = {"16 MiB": 16 * MIB, "256 MiB": 256 * MIB}
    controller = "blkio" if Path("/sys/fs/cgroup/blkio").exists() else "io"  # of version 1, of version 2
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with (
        loop_drives(directory, NUM_DRIVES + 1, 4 * total + (1 << 30)) as drives,
        control_group(controller, v1={}, v2={}) as group,
    ):
        for index, (_, device) in enumerate(drives):
            _limit(group.directory, device, int(rate * 1e6 / (SLOW_PART if index == NUM_DRIVES else 1)))
        group.procs.write_text(f"{os.getpid()}\n")
        for _ in range(rounds):
            for kind, nbytes in kinds.items():
                for name, chosen in SETS.items():
                    tensors = _tensors(total * len(chosen), nbytes)
                    with opened_tier([drives[i][0] for i in chosen], tensors) as tier:
                        found = rates_of(tier)
                    samples.setdefault((kind, name), []).append(found)
                    print(f"{kind:8s} {name:12s} write {found[0]:6.0f} MB/s, read {found[1]:6.0f} MB/s", flush=True)
            for name, chosen in SETS.items():
                for kind, rate_of in (("states", states_rate), ("weights", weights_rate)):
                    both = rate_of([drives[i][0] for i in chosen], total * len(chosen))
                    gc.collect()  # what the optimizer was given back, and weights, are mapped from the drives
                    samples.setdefault((kind, name), []).append((both, both))
                    print(f"{kind:8s} {name:12s} {both:6.0f} MB/s", flush=True)
        phased = phases(drives[0][0], total)
        gc.collect()
        changed = changes(
            drives[:2],
            lambda device, mb_per_s: _limit(group.directory, device, int(mb_per_s * 1e6)),
            rate=rate,
            total=total,
        )
    table: dict[str, Any] = {}
    for (kind, name), found in samples.items():
        alone = samples[kind, "1"]
        ratios = [[ours[way] / one[way] for ours, one in zip(found, alone, strict=True)] for way in (0, 1)]
        table.setdefault(kind, {})[name] = {
            "write_mb_per_s": statistics.median(one[0] for one in found),
            "read_mb_per_s": statistics.median(one[1] for one in found),
            "write_over_one": statistics.median(ratios[0]),
            "read_over_one": statistics.median(ratios[1]),
        }
    return table | {"phases": phased, "changes": changed}


def _limit(group: Path, device: str, bytes_per_s: int) -> None:
    """Limit both directions of a device, in a group of either version. The kernel takes one device at a time."""
    if (group / "io.max").exists():
        (group / "io.max").write_text(f"{device} rbps={bytes_per_s} wbps={bytes_per_s}")
        return
    for way in ("read", "write"):
        (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {bytes_per_s}")


def _tensors(total: int, nbytes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    one = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return [one.roll(17 * i) for i in range(max(total // nbytes, 1))]


def show(table: dict[str, Any]) -> None:
    """Print a table in Markdown."""
    print("\n| storages | drives | write MB/s | / one | read MB/s | / one |\n|---|---|---|---|---|---|")
    for kind in ("16 MiB", "256 MiB", "states", "weights"):
        for name, row in table[kind].items():
            print(
                f"| {kind} | {name} | {row['write_mb_per_s']:.0f} | {row['write_over_one']:.2f} "
                f"| {row['read_mb_per_s']:.0f} | {row['read_over_one']:.2f} |"
            )
    print("\n| one drive, in | activations MB | states MB | stalls s |\n|---|---|---|---|")
    for name, row in table["phases"].items():
        print(f"| {name} | {row['activations_mb']:.0f} | {row['states_mb']:.0f} | {row['stall_s']:.2f} |")
    print("\n| of two drives | first write | first read | later writes | later reads |\n|---|---|---|---|---|")
    for name, row in table["changes"].items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in row.values())} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.drives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, required=True, help="on a disk faster than all drives together")
    parser.add_argument("--rate", type=float, default=100.0, help="of a fast drive, MB/s (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--mib", type=int, default=256, help="written per drive and set (default 256)")
    parser.add_argument("--json", type=Path, help="where the medians go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="drives-") as directory:
        try:
            table = bench(Path(directory), rate=options.rate, rounds=options.rounds, total=options.mib * MIB)
        except (GroupUnavailableError, subprocess.CalledProcessError, PermissionError) as error:
            sys.exit(f"this machine cannot throttle loop devices: {error}; run as root on Linux with losetup")
    show(table)
    if options.json is not None:
        sizes = {"rate_mb_per_s": options.rate, "rounds": options.rounds, "mib_per_drive": options.mib}
        run = environment("drives", torch.get_num_threads()) | sizes
        options.json.write_text(json.dumps({"run": run, "median": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
