"""Own the offloader of a strategy while it trains, and make equal plans in all processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import BudgetError, ConfigError
from lightning_ssd.offloader import Offloader
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.strategies._lightning_compat import as_out_of_memory, is_named, is_trying_a_size

__all__ = [
    "FitSession",
    "OffloadSession",
    "check_options",
    "offloaded",
    "offloaded_optimizers_hidden",
    "refuse_master_weights",
    "refuse_weights",
]


def check_options(
    policy: OffloadPolicy | None, hardware: HardwareProfile | None
) -> tuple[OffloadPolicy, HardwareProfile]:
    """Check the user's policy and hardware, and return them with defaults for missing ones. Opens nothing."""
    checked = Offloader(policy=policy, hardware=hardware)
    return checked.policy, checked.hardware


def refuse_weights(owner: str, policy: OffloadPolicy) -> None:
    """Refuse a policy that offloads weights or gradients, for an owner that does not build the model."""
    for name in ("parameters", "gradients"):
        if (value := getattr(policy, name)) != "keep":
            raise ConfigError(
                f"{owner} got OffloadPolicy.{name}={value!r}, and only a strategy that builds the model can offload "
                f"these. Write {name}='keep', or train with Trainer(strategy=SSDOffloadStrategy(policy=...)), or "
                "SSDOffloadFSDPStrategy for shards"
            )


def refuse_master_weights(owner: str, policy: OffloadPolicy) -> None:
    """Refuse float32 copies of weights for a sharded model, which has float32 shards already."""
    if policy.master_weights:
        raise ConfigError(
            f"{owner} got OffloadPolicy.master_weights=True for a sharded model. Write master_weights=False and keep "
            "float32 parameters, with fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)): "
            "FSDP2 casts them for each use"
        )


@contextmanager
def offloaded_optimizers_hidden(strategy: Any) -> Iterator[None]:
    """Return a context for the ``teardown`` of a strategy of Lightning, which moves optimizer states to the CPU.

    States on SSD need no move, or are lost after a failed step.
    """
    optimizers = strategy.optimizers
    strategy.optimizers = [one for one in optimizers if not isinstance(one, OffloadedOptimizer)]
    try:
        yield
    finally:
        strategy.optimizers = optimizers


def offloaded(optimizer: Any, offloader: Offloader) -> Any:
    """Return an optimizer with its states on SSD.

    A module may return a wrapper of Lightning, of either package. It is kept, because its ``step`` calls the strategy.
    """
    inner = optimizer.optimizer if is_named(optimizer, "LightningOptimizer") else optimizer
    found = offloader.offload_optimizer(inner)
    return optimizer if found is inner else found


class OffloadSession:
    """Owns a strategy's offloader, not yet open, whose plans equal those of the other processes.

    Args:
        owner: the strategy; its policy, hardware, device, ranks and processes are read now, and it is not kept.
        default_directory: used when neither ``hardware.paths`` nor ``$LIGHTNING_SSD_PATHS`` names a directory.
        meets_others: returns whether all processes call the offloader alike now; else each process plans by itself.
    """

    def __init__(
        self, owner: Any, *, default_directory: str | os.PathLike[str] | None, meets_others: Callable[[], bool]
    ) -> None:
        self._device = owner.root_device
        # Not kept for one process: it refers to the strategy, which would then die only by the garbage collector.
        self._meets_others = meets_others if owner.is_distributed else None
        self.offloader = Offloader(
            policy=owner.policy,
            hardware=owner.hardware,
            device=self._device,
            default_directory=default_directory,
            agree=self._smallest if owner.is_distributed else None,
            is_sharded=owner.is_sharded,
            num_local_processes=owner.num_processes or None,
            local_rank=owner.local_rank,
        )
        self.offloader.expect_no_optimizer()  # strategies offload all optimizers

    def close_with_process(self) -> None:
        """Close at the end of processes that multiprocessing started ("fork", "spawn"), which run no atexit."""
        Finalize(None, _end_of_process, (weakref.ref(self.offloader),), exitpriority=0)

    @property
    def meets_others(self) -> bool:
        """Whether there are other processes, and all come by alike just now."""
        return self._meets_others is not None and self._meets_others()

    def _smallest(self, values: Sequence[float]) -> list[float]:
        """Return the smallest of each number over all processes, so that they make equal plans."""
        if not self.meets_others or not torch.distributed.is_initialized():
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return tensor.tolist()


class FitSession(OffloadSession):
    """The session of a Trainer's strategy, from one ``setup`` for ``fit`` to the next.

    Args:
        owner: the strategy; it is read now, and not kept.
        trainer: the Trainer before ``fit``.
        meets_others: as in :class:`OffloadSession`, once :attr:`is_set_up`. Before, all processes act alike.
    """

    def __init__(self, owner: Any, trainer: pl.Trainer, *, meets_others: Callable[[], bool]) -> None:
        directory = trainer.default_root_dir
        super().__init__(owner, default_directory=None if "://" in directory else directory, meets_others=meets_others)
        self.is_set_up = False
        """Whether it is between the end of ``setup`` and ``teardown``."""
        self.num_borders = 0
        self._trainer = trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._size_finders = [callback for callback in callbacks if isinstance(callback, BatchSizeFinder)]

    @property
    def meets_others(self) -> bool:
        """Whether there are other processes, and all come by alike just now."""
        return self._meets_others is not None and (not self.is_set_up or self._meets_others())

    @property
    def _is_trying_a_size(self) -> bool:
        return is_trying_a_size(self._trainer, self._size_finders)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Return a context that translates a :class:`~lightning_ssd.errors.BudgetError` for the batch-size finder."""
        try:
            yield
        except BudgetError as error:
            if not self._is_trying_a_size:
                raise
            raise as_out_of_memory(error) from error

    def end_backward(self) -> None:
        with self.translated():
            self.offloader.end_backward()
            if self._is_trying_a_size:
                self.offloader.wait_for_plan()  # so that the trial ends with a verdict
        self.num_borders += 1


def _end_of_process(reference: weakref.ref[Offloader]) -> None:
    offloader = reference()
    if offloader is not None:
        offloader.abort()
        offloader.close()
