"""One training with its weights, gradients and optimizer states in files, and without: what both have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.support.helpers import Batch
from tests.support.late import late_copies

EVERYTHING: dict[str, Any] = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}
MIN_TENSOR_BYTES = 4096
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@contextmanager
def all_away(directory: Path, **policy: Any) -> Iterator[Offloader]:
    """An open offloader with everything in files."""
    chosen = EVERYTHING | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR_BYTES} | policy
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    with Offloader(policy=OffloadPolicy(**chosen), hardware=hardware) as offloader:
        yield offloader


@contextmanager
def away_from_device(directory: Path, **policy: Any) -> Iterator[Offloader]:
    """An open offloader for a device whose copies end late, with weights and states away from it."""
    chosen = {"parameters": "offload", "optimizer_states": "offload", "min_tensor_bytes": MIN_TENSOR_BYTES} | policy
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory="256KiB")
    with (
        late_copies(max_delay_s=0.0005) as copies,
        Offloader(policy=OffloadPolicy(**chosen), hardware=hardware, _copies=copies) as offloader,
    ):
        yield offloader


@dataclass
class Trained:
    """A model after some steps, and what was seen of them.

    Args:
        model: it.
        optimizer: as it is after the last step.
    """

    model: nn.Module
    optimizer: Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    num_mapped: int = 0
    """Gradients that were found in files."""

    def result(self) -> dict[str, Any]:
        """All bits that two equal trainings have in common."""
        return {
            "losses": self.losses,
            "gradients": self.gradients,
            "norms": self.norms,
            "weights": {name: value.detach().clone() for name, value in self.model.state_dict().items()},
            "states": dict(sorted(self.optimizer.state_dict()["state"].items())),
        }


def train(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
    offloader: Offloader | None = None,
    *,
    optimizer: str = "adamw",
    steps: int = 3,
    max_norm: float = 0.1,
    after_step: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> Trained:
    """Train from a fixed seed, with gradients clipped by their norm."""
    torch.manual_seed(3)
    model = make_model()
    model.train()
    if offloader is not None:
        offloader.register_module(model)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = OPTIMIZERS[optimizer](weights)
    if offloader is not None:
        update = offloader.offload_optimizer(update)
    trained = Trained(model, update)
    for step in range(steps):
        with nullcontext() if offloader is None else offloader.saved_tensors():
            loss = loss_of(model, make_batch(step))
        if offloader is not None:
            offloader.flush()  # so that it is the drive that gives activations back
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        trained.losses.append(loss.detach().clone())
        del loss
        trained.gradients.append([None if p.grad is None else p.grad.clone() for p in weights])
        trained.num_mapped += sum(p.grad is not None and is_mapped(p.grad.untyped_storage()) for p in weights)
        trained.norms.append(nn.utils.clip_grad_norm_(weights, max_norm).detach().clone())
        update.step()
        update.zero_grad()
        after_step(model, step)
    return trained


def large(model: nn.Module, *, trained: bool | None = None) -> list[nn.Parameter]:
    """The parameters that may wait; only those that are trained, or are not, if asked."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.nbytes >= MIN_TENSOR_BYTES and trained in (None, parameter.requires_grad)
    ]


def storage_bytes(parameters: list[nn.Parameter]) -> int:
    """Tied ones count once."""
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())
