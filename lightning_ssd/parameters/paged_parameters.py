"""All of a model's parameters and gradients that wait on drives, as the offloader sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_ssd.common.tensors import Piece
from lightning_ssd.memory.freed_memory import FreedMemory
from lightning_ssd.parameters.device_gradients import DeviceGradients
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.paged_gradients import PagedGradients
from lightning_ssd.parameters.paged_weights import PagedWeights
from lightning_ssd.parameters.pager import Pager
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["PagedParameters"]


@dataclass(frozen=True, slots=True)
class PagedParameters:
    """Weights and gradients, as far as the policy lets them wait. What is ``None`` stays in memory."""

    weights: PagedWeights[Any] | None = None
    gradients: PagedGradients | DeviceGradients | None = None
    files: WeightFiles | None = None
    """Files of both, on a CPU."""
    pages: UpdatePages | None = None
    """Pages of both, around an update on a CPU."""
    freed: FreedMemory | None = None
    """Where gradients wait in files."""

    @property
    def pager(self) -> Pager[Any] | None:
        """Told when backward asks for a weight; ``None``: none waits."""
        return None if self.weights is None else self.weights.pager

    def streamed_init(self) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else self.weights.streamed_init()

    def move_in(self, module: nn.Module) -> None:
        if self.weights is not None:
            self.weights.move_in(module)

    def host_copies(self) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else self.weights.host_copies()

    def register_module(self, module: nn.Module) -> None:
        """Take over what is to wait."""
        if self.weights is not None:
            self.weights.register_module(module)
        if self.gradients is not None:
            self.gradients.register_module(module)

    def tell(self) -> None:
        """Log what waits of the module that was registered last, and warn of what the user may not expect."""
        if self.weights is not None:
            self.weights.tell()

    def will_be_updated(self, optimizer: Optimizer) -> None:
        if self.weights is not None:
            self.weights.will_be_updated(optimizer)

    @contextmanager
    def updating(self, now: Sequence[Piece], following: Sequence[Piece]) -> Iterator[None]:
        """While an optimizer updates these pieces of parameters, and then those that follow."""
        parameters, next_ones = [piece.tensor for piece in now], [piece.tensor for piece in following]
        on_device = self.gradients if isinstance(self.gradients, DeviceGradients) else None
        with (
            nullcontext() if on_device is None else on_device.updating(parameters, next_ones),
            nullcontext() if self.weights is None else self.weights.pager.updating(parameters, next_ones),
            # Leaves first: in the end the weights' pager asks for those of the next forward, which stay.
            nullcontext() if self.pages is None else self.pages.updating(now, following),
        ):
            yield

    def send_out(self) -> None:
        """Take out of memory what something has touched outside of the model's forward and backward."""
        if self.weights is not None:
            self.weights.pager.border()
        if self.gradients is not None:
            self.gradients.send_out()

    def begin_pass(self) -> None:
        """A forward begins: what ``zero_grad(set_to_none=False)`` has touched leaves."""
        if self.gradients is not None:
            self.gradients.send_out()

    def border(self) -> None:
        """A backward is over.

        Raises:
            StorageError: a drive has refused changed weights or gradients, which may be lost.
        """
        self.send_out()
        if self.freed is not None:
            self.freed.look()
        if self.files is not None and self.files.used_bytes:
            self.files.look_for_losses()

    def added_to(self, stats: OffloadStats) -> OffloadStats:
        """Return the counters, with those of the weights."""
        if self.weights is not None:
            return stats + self.weights.stats
        return stats + self.gradients.stats if isinstance(self.gradients, DeviceGradients) else stats

    def reset_peak(self) -> None:
        if self.weights is not None:
            self.weights.reset_peak()
