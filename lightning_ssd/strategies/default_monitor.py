"""Log the metrics of offloading when the Trainer has a logger but no ``OffloadMonitor``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_ssd.monitor import OffloadMonitor
from lightning_ssd.strategies._lightning_compat import is_named

__all__ = ["DefaultMonitor"]


class DefaultMonitor(OffloadMonitor):
    """Gives numbers to the Trainer's loggers and prints the verdict, with no other visible effect.

    It shows nothing on the progress bar, because values there become callback metrics. It records no steps, because a
    record costs time. It has no state in checkpoints, because a load would then require this callback.
    """

    def __init__(self) -> None:
        super().__init__(prog_bar=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def records_steps(self, trainer: pl.Trainer) -> bool:
        return False

    def attach(self, trainer: pl.Trainer, *, after: pl.Callback | None = None) -> None:
        """Add this to the Trainer's callbacks if there is a logger, and no other monitor.

        Args:
            trainer: gets this.
            after: the callback whose turn it is. Lightning would call it again if this came before it.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        is_read = any(not is_named(logger, "DummyLogger") for logger in trainer.loggers)
        if not is_read or trainer.barebones or any(isinstance(one, OffloadMonitor) for one in callbacks):
            return
        # Lightning keeps checkpoints last, so that they see the effects of other callbacks.
        begin = 0 if after is None else callbacks.index(after) + 1
        last = (i for i, one in enumerate(callbacks) if i >= begin and is_named(one, "Checkpoint"))
        index = next(last, len(callbacks))
        callbacks.insert(index, self)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._detach(trainer)

    def _detach(self, trainer: pl.Trainer) -> None:
        # A new list, because Lightning is iterating over the other one.
        trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
