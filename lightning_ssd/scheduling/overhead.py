"""The cost of moving to a pass, accounted where it arises, and the running means that plans are made with.

No pass is compared with one that keeps everything: whole steps scatter by 10 to 40 per cent, and a kept pass makes the
peak that of plain training. Three causes are counted in every pass that moves:

* Stalls: the training thread, or the device, waited for a transfer.
* Hooks: the training thread was inside pack or unpack. On a device, pack counts only where queued kernels did not hide
  it.
* CPU: on a CPU, workers and the page faults of memory that moved take cores from the computation.

Contention for memory bandwidth between workers and computation is not in the account.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import torch

from lightning_ssd.planning.simulator import LEAST_SHARE

__all__ = ["CpuCosts", "Overhead", "OverheadModel", "page_faults"]

_MIN_WEIGHT = 1 / 8
"""Least weight of the latest pass in a running mean."""
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
        mapping_s_per_byte: of fresh memory, calibrated once.
        page_bytes: that a fault maps.
        num_threads: of the computation, among which the time is divided.
        has_spare_cores: more cores than threads, so that workers take nothing from the computation.
    """

    mapping_s_per_byte: float
    page_bytes: int
    num_threads: int
    has_spare_cores: bool

    @staticmethod
    def here(mapping_s_per_byte: float, page_bytes: int) -> CpuCosts:
        """Return the costs on this machine.

        Args:
            mapping_s_per_byte: of fresh memory.
            page_bytes: of the pages in which tensors lie.
        """
        num_threads = torch.get_num_threads()
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return CpuCosts(mapping_s_per_byte, page_bytes, num_threads, num_cores > num_threads)

    def seconds(self, *, worker_s: float, num_faults: int, moved_bytes: int) -> float:
        """Return what one pass lost.

        Args:
            worker_s: CPU time of the workers.
            num_faults: of the process. More than one per page that has left are not ours. Those of pages that come
                back are in the time of the workers.
            moved_bytes: that left.
        """
        mapped_bytes = min(num_faults * self.page_bytes, moved_bytes)
        workers_s = 0.0 if self.has_spare_cores else worker_s
        return (workers_s + mapped_bytes * self.mapping_s_per_byte) / self.num_threads

    @property
    def mapping_s_per_moved_byte(self) -> float:
        """A first guess of what a byte that moves costs, before workers have shown their part."""
        return self.mapping_s_per_byte / self.num_threads


def page_faults() -> int:
    """Return how many page faults this process has had that read no file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class OverheadModel:
    """Running means over passes of one kind.

    Attributes:
        hook_s_per_byte: of moved bytes.
        cpu_s_per_byte: likewise; ``None``: no pass has followed a plan yet. Before that, memory is touched for the
            first time, whatever moves.
        excess: measured overhead over predicted overhead, as a part of the pass; never negative. Plans promise less by
            so much, because something that the prediction does not know (a drive that is busy) goes on.
    """

    def __init__(self) -> None:
        self.hook_s_per_byte = 0.0
        self.cpu_s_per_byte: float | None = None
        self.excess = 0.0
        self._num_hooked = self._num_followed = 0

    def cost_s_per_byte(self, guess: float) -> float:
        """Return what a moved byte costs besides transfers.

        Args:
            guess: of the CPU's part, until it has been measured.
        """
        return self.hook_s_per_byte + (guess if self.cpu_s_per_byte is None else self.cpu_s_per_byte)

    def forget(self) -> None:
        """Trust less what was learnt, because the machine may have been busy."""
        self.hook_s_per_byte /= 4
        self.cpu_s_per_byte, self.excess = None, 0.0
        self._num_hooked = self._num_followed = 0

    def moved(self, overhead: Overhead, moved_bytes: int) -> None:
        """Learn from any pass that moved something."""
        if moved_bytes:
            self._num_hooked += 1
            self.hook_s_per_byte = _mean(self.hook_s_per_byte, overhead.hook_s / moved_bytes, self._num_hooked)

    def followed(self, overhead: Overhead, *, step_s: float, moved_bytes: int, predicted: float) -> None:
        """Learn from a pass that followed a plan.

        Args:
            overhead: as measured.
            step_s: of the pass.
            moved_bytes: by it.
            predicted: overhead relative to the pass without it.
        """
        if not moved_bytes:
            return
        self._num_followed += 1
        before, cost = self.cpu_s_per_byte or 0.0, overhead.cpu_s / moved_bytes
        self.cpu_s_per_byte = _mean(before, cost, self._num_followed)
        excess = overhead.ratio(step_s) - predicted
        self.excess = max(self.excess + (_RISE if excess > self.excess else _FALL) * (excess - self.excess), 0.0)


def _mean(before: float, latest: float, number: int) -> float:
    return before + max(1 / number, _MIN_WEIGHT) * (latest - before)
