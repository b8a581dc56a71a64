"""What a strategy has while it trains: an offloader, and what processes tell each other about it."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from typing import Protocol

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ssd._environment import rank_directory
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies.batch_size_finder import BatchSizeFinderAdapter
from lightning_ssd.strategies.stragglers import StragglerMonitor

__all__ = ["FitSession", "OffloadSession", "Owner", "check_options"]


def check_options(
    policy: OffloadPolicy | None, hardware: HardwareProfile | None
) -> tuple[OffloadPolicy, HardwareProfile]:
    """Check what the user wants, with the defaults for what he does not say. Opens nothing."""
    checked = Offloader(policy=policy, hardware=hardware)
    return checked.policy, checked.hardware


class Owner(Protocol):
    """What a session asks of its strategy."""

    policy: OffloadPolicy
    hardware: HardwareProfile

    @property
    def root_device(self) -> torch.device: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def is_distributed(self) -> bool: ...
    @property
    def is_sharded(self) -> bool: ...


class OffloadSession:
    """One strategy's offloader, not yet open, in agreement with those of the other processes.

    Args:
        owner: looked at now, and not kept.
        default_directory: used when neither ``hardware.paths`` nor ``$LIGHTNING_SSD_PATHS`` names a directory.
        meets_others: whether all processes come by alike just now; else each plans by itself.
    """

    def __init__(
        self, owner: Owner, *, default_directory: str | os.PathLike[str] | None, meets_others: Callable[[], bool]
    ) -> None:
        self._device = owner.root_device
        # Not kept for one process: it leads back to the strategy, which is to die as soon as it is let go.
        self._meets_others = meets_others if owner.is_distributed else None
        self.offloader = Offloader(
            policy=owner.policy,
            hardware=owner.hardware,
            device=self._device,
            default_directory=default_directory,
            subdirectory=rank_directory(owner.global_rank),
            agree=self._smallest if owner.is_distributed else None,
            is_sharded=owner.is_sharded,
            num_local_processes=owner.num_processes or None,
            local_rank=owner.local_rank,
        )
        self.offloader.expect_no_optimizer()  # strategies give all that there are

    def close_with_process(self) -> None:
        """Close at the end of processes that multiprocessing started ("fork", "spawn"): they end without atexit."""
        Finalize(None, _end_of_process, (weakref.ref(self.offloader),), exitpriority=0)

    @property
    def meets_others(self) -> bool:
        """Whether there are other processes, and all come by alike just now."""
        return self._meets_others is not None and self._meets_others()

    def _smallest(self, values: Sequence[float]) -> list[float]:
        """Of each number the smallest that any process has, so that all plan alike."""
        if not self.meets_others or not torch.distributed.is_initialized():
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return tensor.tolist()


class FitSession(OffloadSession):
    """From ``setup`` for ``fit`` to the next one: what a Trainer's strategy knows besides.

    Args:
        owner: looked at now, and not kept.
        trainer: about to fit.
        meets_others: once :attr:`is_set_up`; before, all processes come by alike.
        compares_stalls: processes tell each other how long they waited.
    """

    def __init__(
        self, owner: Owner, trainer: pl.Trainer, *, meets_others: Callable[[], bool], compares_stalls: bool
    ) -> None:
        directory = trainer.default_root_dir
        super().__init__(owner, default_directory=None if "://" in directory else directory, meets_others=meets_others)
        self.is_set_up = False
        """From the end of ``setup`` to ``teardown``."""
        self.num_borders = 0
        """Backwards that have ended."""
        self._size_trial = BatchSizeFinderAdapter(trainer)
        self._stall_watch = StragglerMonitor(self._from_all) if owner.is_distributed and compares_stalls else None

    @property
    def meets_others(self) -> bool:
        """Whether there are other processes, and all come by alike just now."""
        return self._meets_others is not None and (not self.is_set_up or self._meets_others())

    @property
    def rank_stalls_s(self) -> tuple[float, ...]:
        """Of each process: seconds that it waited for its drives between the last two comparisons."""
        return () if self._stall_watch is None else self._stall_watch.stalls_s

    def translated(self) -> AbstractContextManager[None]:
        """For the batch-size finder, around what may raise :class:`~lightning_ssd.errors.BudgetError`."""
        return self._size_trial.translated()

    def end_backward(self) -> None:
        """Mark the border of a step."""
        with self.translated():
            self.offloader.end_backward()
            if self._size_trial.is_on:
                self.offloader.wait_for_plan()  # a trial is to end with a verdict, not before it
        self.num_borders += 1
        if self._stall_watch is not None and self.meets_others and self._stall_watch.is_due():
            states = self.offloader.optimizer_stats
            stall_s = self.offloader.stats.stall_s + sum(optimizer.stall_s for optimizer in states)
            warning = self._stall_watch.compare(stall_s, time.perf_counter())
            if warning is not None:
                rank_zero_warn(warning, category=UserWarning)

    def _from_all(self, values: Sequence[float]) -> list[list[float]]:
        """Every process' numbers, in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        if not torch.distributed.is_initialized():
            return [mine.tolist()]
        gathered = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, mine)
        return [numbers.tolist() for numbers in gathered]


def _end_of_process(reference: weakref.ref[Offloader]) -> None:
    offloader = reference()
    if offloader is not None:
        offloader.abort()
        offloader.close()
