"""Thousands of steps of random small models, policies, budgets and faults beside a plain twin, with a fixed seed.

    python -m tests.faults.soak --dir DIR                     # 2,000 steps
    python -m tests.faults.soak --steps 60 --seed 7

An episode is one model under one policy on one more or less faulty drive, for some twenty steps. Every loss, gradient
and weight is compared bit for bit with those of plain PyTorch. After an error that is documented for its fault the step
is made anew. A step that takes longer than ``--watchdog`` ends the soak with the stacks of all threads. After each
episode the directory must be empty and no thread of ours left; at the end, memory and open files must be what they were
after the first quarter.

Exit codes: 0: nothing wrong; 1: a wrong value, something left, or growth; else: a hang.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import faulthandler
import gc
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BudgetError, OutOfSpaceError, ShortTransferError, StorageError
from lightning_ssd.memory.malloc import trim
from lightning_ssd.storage.backend import Backend, WrappedBackend
from lightning_ssd.storage.spill_file import Arena
from tests.faults.models import KINDS, Twins, WrongBitsError, many_subgroups, random_task

__all__ = ["Drive", "Soak", "main"]

_EPISODE_STEPS = (12, 28)
_MAY_GROW_BYTES = 64 << 20
_GONE_WITHIN_S = 10.0
_BUDGETS = ("64KiB", "256KiB", "1MiB", "8MiB")
_ACTIVATIONS = ("auto",) * 3 + ("offload",) * 3 + ("recompute_offload", "recompute", "keep")
_MIB = 1 << 20


class Drive(WrappedBackend):
    """A drive of one temper: healthy, slow, full, failing at random, or lying now and then.

    Args:
        inner: a real one.
        temper: one of :data:`TEMPERS`.
        seed: of its moods.
    """

    TEMPERS = ("healthy", "healthy", "slow", "full", "failing writes", "failing reads", "failing", "lying", "short")

    def __init__(self, inner: Backend, temper: str, seed: int) -> None:
        super().__init__(inner)
        self.temper = temper
        self.faults = 0
        self._dice = random.Random(seed)
        # Guards the dice and the count, which all workers share; nothing else is locked under it.
        self._lock = threading.Lock()

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._dawdle()
        if self.temper in ("failing writes", "failing") and self._strikes(0.1):
            raise StorageError(errno.EIO, "injected: the drive failed")
        if self.temper == "full" and self._strikes(0.6):
            raise OutOfSpaceError(errno.ENOSPC, "injected: the file system is full")
        if self.temper == "short" and self._strikes(0.1):
            raise ShortTransferError(errno.EIO, "injected: fewer bytes moved")
        self.inner.write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self._dawdle()
        if self.temper in ("failing reads", "failing", "short") and self._strikes(0.15):
            raise StorageError(errno.EIO, "injected: the drive failed")
        self.inner.read(arena, region, offset)
        if self.temper == "lying" and region.nbytes and self._strikes(0.15):
            ctypes.c_ubyte.from_address(region.address + region.nbytes // 2).value ^= 0x10

    def _dawdle(self) -> None:
        if self.temper == "slow":
            with self._lock:
                pause_s = self._dice.random() * 0.004
            time.sleep(pause_s)

    def _strikes(self, share: float) -> bool:
        with self._lock:
            strikes = self._dice.random() < share
            self.faults += strikes
        return strikes


@dataclass
class Soak:
    """A soak under way.

    Args:
        directory: empty.
        seed: of everything.
        watchdog_s: longest step.
    """

    directory: Path
    seed: int
    watchdog_s: float = 60.0
    steps: int = 0
    episodes: int = 0
    faults: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    levels: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of memory and open files after each episode."""

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, steps: int) -> None:
        """Episodes until so many steps have been made."""
        while self.steps < steps:
            with many_subgroups():
                self._episode(min(self._dice.randint(*_EPISODE_STEPS), steps - self.steps))
            self.episodes += 1
            self._settle()

    def _policy(self, temper: str) -> OffloadPolicy:
        dice = self._dice
        activations = dice.choice(_ACTIVATIONS)
        chosen: dict[str, Any] = {
            "activations": activations,
            "optimizer_states": dice.choice(("keep", "offload")),
            "min_tensor_bytes": dice.choice((0, 0, 1000, 20_000)),
            # Who lies is only found by who checks everything.
            "verify": "full" if temper == "lying" else dice.choice(("off", "sampled", "full")),
        }
        if activations == "auto":
            chosen |= {"max_slowdown": dice.choice((1.1, 50.0))}
            if dice.random() < 0.5:
                chosen |= {"activation_budget": dice.choice(_BUDGETS), "recompute_modules": "blocks"}
        return OffloadPolicy(**chosen)

    def _episode(self, steps: int) -> None:
        dice = self._dice
        temper = dice.choice(Drive.TEMPERS)
        policy = self._policy(temper)
        recomputes = policy.activations in ("recompute", "recompute_offload")
        task = random_task(dice, kinds=("attention",) if recomputes else KINDS)
        drives: list[Drive] = []
        seed = dice.randrange(1 << 30)

        def wrap(inner: Backend) -> Backend:
            drives.append(Drive(inner, temper, seed))
            return drives[-1]

        is_drained = dice.random() < 0.5
        hardware = HardwareProfile(paths=[self.directory], allow_unsuitable_paths=True)
        try:
            with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap) as offloader:
                twins = Twins(task, offloader, is_drained=is_drained)
                for _ in range(steps):
                    self._step(twins, offloader, drives)
                self.moved_bytes += offloader.stats.bytes_read + offloader.stats.bytes_forwarded
        except (StorageError, BudgetError) as error:
            self.repeated[f"episode ended: {type(error).__name__}"] += 1
        except WrongBitsError as error:
            self.wrong.append(f"{error}: {task}, {policy}, {temper} drive, episode {self.episodes}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.faults += sum(drive.faults for drive in drives)

    def _step(self, twins: Twins, offloader: Offloader, drives: list[Drive]) -> None:
        """Once, or anew after an error of the drive; the fourth time the drive is well."""
        faulthandler.dump_traceback_later(self.watchdog_s, exit=True)
        tempers = [drive.temper for drive in drives]
        for number in range(4):
            try:
                twins.step()
                break
            except StorageError as error:
                self.repeated[type(error).__name__] += 1
                if number == 3:
                    raise
            offloader.abort()
            for drive in drives:
                drive.temper = "healthy" if number == 2 else drive.temper
            if twins.is_torn:
                twins.resume()
        for drive, temper in zip(drives, tempers, strict=True):
            drive.temper = temper
        self.steps += 1

    def _settle(self) -> None:
        """What an episode has left behind, and how much memory there is without it."""
        # Autograd's queue holds the nodes of a backward that has failed until the next one.
        torch.autograd.backward(torch.zeros(1, requires_grad=True).sum())
        end_s = time.monotonic() + _GONE_WITHIN_S
        while (left := self._left()) and time.monotonic() < end_s:
            gc.collect()
            time.sleep(0.01)
        self.left += left
        gc.collect()
        trim()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.levels.append((pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))

    def _left(self) -> list[str]:
        files = [f"{path.name} after episode {self.episodes}" for path in self.directory.iterdir()]
        return files + [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")]

    @property
    def growth(self) -> tuple[int, int]:
        """Memory in bytes and open files: the most of the last quarter above the most of the first one."""
        quarter = max(len(self.levels) // 4, 1)
        first, last = self.levels[:quarter], self.levels[-quarter:]
        return max(m for m, _ in last) - max(m for m, _ in first), max(f for _, f in last) - max(f for _, f in first)

    @property
    def faultless(self) -> bool:
        """Nothing that must not happen has happened."""
        memory, files = self.growth
        return not self.wrong and not self.left and memory <= _MAY_GROW_BYTES and files <= 0

    def text(self) -> str:
        """All numbers in one paragraph."""
        memory, files = self.growth
        kinds = ", ".join(f"{name} ({count})" for name, count in self.repeated.most_common()) or "none"
        return (
            f"{self.steps:,} steps in {self.episodes} episodes, seed {self.seed}: {len(self.wrong)} wrong values, "
            f"0 hangs, {len(self.left)} leftovers; {self.faults:,} faults injected, errors raised: {kinds}; "
            f"{self.moved_bytes / _MIB:,.0f} MiB came back from the drive, or before they got there; memory "
            f"{memory / _MIB:+,.0f} MiB, open files {files:+d} from the first quarter to the last."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--watchdog", type=float, default=120.0, help="longest step in seconds")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.watchdog <= 0:
        parser.error("--steps and --watchdog must be above 0")
    torch.set_num_threads(1)
    logging.getLogger("lightning_ssd").setLevel(logging.ERROR)  # each second try is told of, and there are many
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="soak-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that writes fail is the purpose
        soak = Soak(Path(directory), args.seed, args.watchdog)
        soak.run(args.steps)
    print("\n".join([*soak.wrong, *soak.left, soak.text()]))
    return 0 if soak.faultless else 1


if __name__ == "__main__":
    sys.exit(main())
