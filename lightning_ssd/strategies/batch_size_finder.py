"""Lightning's batch-size finder at work: to it, a batch for which no plan keeps the budget is one that is too large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_ssd.errors import BudgetError

__all__ = ["BatchSizeFinderAdapter"]

# The finder knows memory that has run out by PyTorch's words in a RuntimeError with one argument, and by nothing else.
_WORDS = "DefaultCPUAllocator: can't allocate memory"


class _TooLargeError(BudgetError, RuntimeError):
    """A :class:`BudgetError` that the finder understands."""


class BatchSizeFinderAdapter:
    """Tells whether the finder is trying a size, and translates for it.

    Args:
        trainer: about to fit, with the callbacks that the user gave it.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._finders = [callback for callback in self._callbacks if isinstance(callback, BatchSizeFinder)]

    @property
    def _callbacks(self) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def is_on(self) -> bool:
        """While it tries a size, the finder takes all callbacks out of the Trainer, itself too."""
        return any(finder not in self._callbacks for finder in self._finders)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Around what may raise :class:`BudgetError`."""
        try:
            yield
        except BudgetError as error:
            if not self.is_on:
                raise
            raise _TooLargeError(f"{error} (to the batch-size finder: {_WORDS})") from error
