"""The cost of moving to a pass, accounted where it arises, and what plans are made with.

No pass is compared with one that keeps everything: whole steps scatter by 10 to 40 per cent, and a kept pass makes the
peak that of plain training. Three causes are counted in every pass that moves:

* Stalls: the training thread, or the device, waited for a transfer.
* Hooks: the training thread was inside pack or unpack. On a device, pack counts only where queued kernels did not hide
  it.
* CPU: on a CPU, workers take cores from the computation, and so do the page faults of memory that moved. Where
  tensors have whole pages, plain training has as many of these, so that they are not charged.

Contention for memory bandwidth between workers and computation is not in the account.
"""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from mmap import PAGESIZE

import torch

from lightning_ssd.planning.simulator import LEAST_SHARE

__all__ = ["CpuCosts", "Overhead", "OverheadModel", "page_faults"]

_WINDOW = 9
"""Passes whose costs are remembered."""
_MAPPED_PER_MOVED = 3
"""Bytes that are mapped anew for one that moves: 2.7 and 3.7 at half of GPT-2 small's size, where everything moves."""
_RISE, _FALL = 1 / 2, 1 / 8
"""Weights of an excess that has grown, and of one that has become less: promises come first."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that moving took from one pass, by cause."""

    stall_s: float = 0.0
    hook_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.stall_s + self.hook_s + self.cpu_s

    def ratio(self, step_s: float) -> float:
        """Return the overhead relative to the pass without it.

        Args:
            step_s: what the pass took, overhead included.
        """
        return self.total_s / max(step_s - self.total_s, LEAST_SHARE * step_s, 1e-9)


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """The time that workers and page faults take from a computation on the same cores.

    Attributes:
        mapping_s_per_byte: of fresh memory, calibrated once; 0: plain training maps as much.
        num_threads: of the computation, among which the time is divided.
        has_spare_cores: more cores than threads, so that workers take nothing from the computation.
    """

    mapping_s_per_byte: float
    num_threads: int
    has_spare_cores: bool

    @staticmethod
    def here(mapping_s_per_byte: float) -> CpuCosts:
        """Return the costs on this machine.

        Args:
            mapping_s_per_byte: of fresh memory.
        """
        num_threads = torch.get_num_threads()
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return CpuCosts(mapping_s_per_byte, num_threads, num_cores > num_threads)

    def seconds(self, *, worker_s: float, num_faults: int) -> float:
        """Return what one pass lost.

        Args:
            worker_s: CPU time of the workers.
            num_faults: of the process. All are charged: plain training has few, and what moves leaves holes that glibc
                does not use again, so that tensors which stay are mapped anew as well.
        """
        workers_s = 0.0 if self.has_spare_cores else worker_s
        # Two errors that nearly cancel out: a parallel region waits for its slowest thread, so that what a worker takes
        # from one core all lose; and moving saves plain training's page faults, which no pass of ours can count.
        return (workers_s + num_faults * PAGESIZE * self.mapping_s_per_byte) / self.num_threads

    @property
    def mapping_s_per_moved_byte(self) -> float:
        """A first guess of what a byte that moves costs, before workers have shown their part."""
        return _MAPPED_PER_MOVED * self.mapping_s_per_byte / self.num_threads


def page_faults() -> int:
    """Return how many page faults this process has had that read no file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class OverheadModel:
    """Costs of passes of one kind: lower quartiles of the latest ones.

    What disturbs a machine makes costs larger, never smaller, and much of it does not grow with what moves. Medians
    make a smaller plan look dearer per byte, which asks for a still smaller one, until nothing moves.

    Attributes:
        excess: stalls beyond those predicted, as a part of the pass; never negative. Plans promise less by so much,
            because what causes them (a drive that is busy) goes on. Hooks and CPU are in the costs already.
    """

    def __init__(self) -> None:
        self.excess = 0.0
        self._hook_guess = 0.0
        self._hooks: deque[float] = deque(maxlen=_WINDOW)
        # Only of passes that followed a plan: before that, memory is touched for the first time, whatever moves.
        self._cpu: deque[float] = deque(maxlen=_WINDOW)

    def cost_s_per_byte(self, guess: float) -> float:
        """Return what a moved byte costs besides transfers.

        Args:
            guess: of the CPU's part, until it has been measured.
        """
        return _undisturbed(self._hooks, self._hook_guess) + _undisturbed(self._cpu, guess)

    def forget(self) -> None:
        """Trust less what was learnt, because the machine may have been busy."""
        self._hook_guess, self.excess = _undisturbed(self._hooks, self._hook_guess) / 4, 0.0
        self._hooks.clear()
        self._cpu.clear()

    def moved(self, overhead: Overhead, moved_bytes: int, *, is_recorded: bool) -> None:
        """Learn from any pass that moved something.

        Args:
            overhead: as measured.
            moved_bytes: by it.
            is_recorded: recording disturbs what it measures, so that such a pass gives a first guess only.
        """
        if moved_bytes and is_recorded:
            self._hook_guess = overhead.hook_s / moved_bytes
        elif moved_bytes:
            self._hooks.append(overhead.hook_s / moved_bytes)

    def followed(self, overhead: Overhead, *, step_s: float, moved_bytes: int, predicted_stall: float) -> None:
        """Learn from a pass that followed a plan as others did before it.

        Args:
            overhead: as measured.
            step_s: of the pass.
            moved_bytes: by it.
            predicted_stall: stalls relative to the pass without them.
        """
        if not moved_bytes:
            return
        self._cpu.append(overhead.cpu_s / moved_bytes)
        excess = Overhead(stall_s=overhead.stall_s).ratio(step_s) - predicted_stall
        self.excess = max(self.excess + (_RISE if excess > self.excess else _FALL) * (excess - self.excess), 0.0)


def _undisturbed(costs: Collection[float], guess: float) -> float:
    return sorted(costs)[len(costs) // 4] if costs else guess
