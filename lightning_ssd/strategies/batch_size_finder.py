"""Tell Lightning's batch-size finder that a batch is too large if no plan can keep the budget for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_ssd.errors import BudgetError
from lightning_ssd.strategies._lightning_compat import as_out_of_memory, is_trying_a_size

__all__ = ["BatchSizeFinderAdapter"]


class BatchSizeFinderAdapter:
    """Tells whether the finder is trying a size, and translates errors for it.

    Args:
        trainer: the Trainer before ``fit``, with the user's callbacks.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._finders = [callback for callback in callbacks if isinstance(callback, BatchSizeFinder)]

    @property
    def is_on(self) -> bool:
        """Whether the finder is trying a size."""
        return is_trying_a_size(self._trainer, self._finders)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Return a context that translates a :class:`BudgetError` for the finder."""
        try:
            yield
        except BudgetError as error:
            if not self.is_on:
                raise
            raise as_out_of_memory(error) from error
