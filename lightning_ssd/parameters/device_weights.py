"""Weights of a device that wait in host memory and on drives between their uses.

What moves where: the bytes of a weight go to the host tier as long as that has room, then to the SSD tier, once; each
use brings them back into the weight's own storage (see ``device_memory.py``). They are written again when a program has
changed them: those that are trained, after each update.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.tensors import TensorSpec
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.parameters.device_pager import DevicePager
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.parameters.guard.guard_patches import guard_patches
from lightning_ssd.parameters.paged_weights import Choose, PagedWeights
from lightning_ssd.parameters.pager import Place, Weight
from lightning_ssd.parameters.residents import MovableWeights
from lightning_ssd.parameters.units import SharedWeights, shared_weights, why_it_stays
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["DeviceWeights", "WeightTiers"]


class WeightTiers(NamedTuple):
    """Where weights of a device wait."""

    device: torch.device
    ssd: SsdTier
    host: HostTier | None
    copies: CopyEngine

    def options(self, pager: DevicePager) -> dict[str, Any]:
        """Return what the memory of a weight or gradient gets besides that."""
        tiers = [tier for tier in (self.host, self.ssd) if tier is not None]
        return {"tiers": tiers, "copies": self.copies, "lock": pager.lock, "door": pager}


class DeviceWeights(PagedWeights[DeviceMemory]):
    """On a device."""

    pager: DevicePager
    _watches_compiled = True

    def __init__(self, tiers: WeightTiers, *, trained: bool = False, **options: Any) -> None:
        super().__init__(DevicePager(takes_trained=trained), trained=trained, device=tiers.device.type, **options)
        self._tiers = tiers
        self._accelerator = accelerator_of(tiers.device)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        guard_patches.add_user(self.pager)

    def _why_it_stays(self, weights: SharedWeights, place: Place) -> str | None:
        if place[1] is None and not self._builders:
            return "its forward is compiled as a whole; compile each block instead (block.compile())"
        if weights.shows_file:
            return "its memory shows a file, and cannot be given back and taken again in place"
        return _why_it_cannot_wait(weights)

    def _must_return(self, place: Place) -> bool:
        return place[1] is None

    def will_be_updated(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self._know_optimizers()

    def register_module(self, module: nn.Module) -> None:
        residents = self.residents
        if residents is None or module not in residents.modules or self._may_leave():
            super().register_module(module)
        else:  # again, where no more may leave than have left already
            self._register(module, partial(residents.choose, as_before=True))

    def _register(self, module: nn.Module, choose: Choose | None) -> None:
        super()._register(module, choose)
        self._know_optimizers()  # of those that are new among the weights

    def _know_optimizers(self) -> None:
        alive = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        for optimizer in alive:
            for group in optimizer.param_groups:
                self.pager.will_be_updated(group["params"])

    def host_copies(self) -> AbstractContextManager[None]:
        return self.pager.host_copies()

    def move_in(self, module: nn.Module) -> None:
        """Move weights that may wait from the host to the device one by one, and each of them out again; with
        residents, only while memory is short. So a model that is larger than the device's memory gets there.
        """
        found = shared_weights(module, self._min_nbytes)
        # A gradient has to be on the device of its weight: moving the module moves both.
        moving = [w for w in found if self._may_wait(w) and all(tensor.grad is None for tensor in w.tensors)]
        del found
        while moving:
            weights = moving.pop(0)
            if _why_it_cannot_wait(weights) is not None:
                continue
            here = torch.empty(weights.storage.nbytes(), dtype=torch.uint8, device=self._tiers.device)
            here.copy_(torch.empty(0, dtype=torch.uint8).set_(weights.storage))
            moved = replace(weights, storage=here.untyped_storage())
            for tensor in weights.tensors:
                tensor.data = TensorSpec.of(tensor).view(moved.storage)
            del weights, here
            one = [moved]
            del moved
            if self._leaves_at_once:
                self._take_over(one, [("", None)], [])

    def _check_room(self, new: Sequence[SharedWeights]) -> None:
        ssd = self._tiers.ssd
        ssd.reserve(ssd.used_bytes + sum(weights.storage.nbytes() for weights in new), "weights")

    def _take_over(self, new: list[SharedWeights], places: Sequence[Place], trained: list[SharedWeights]) -> None:
        nbytes = sum(weights.storage.nbytes() for weights in new)
        with StatusLine(f"Writing {format_sizes(nbytes)[0]} of weights" if nbytes else None) as line:
            for place in places:
                weights = new.pop(0)
                options = self._tiers.options(self.pager)
                label = f"weight {weights.names[0]}"
                memory = DeviceMemory(weights.storage, weights.tensors, label=label, **options)
                weight = Weight(weights.names, memory)
                del weights, memory  # or they would count as held
                # While the model is built it is unknown what is used together: each comes by itself.
                own = (f"{place[0]} {weight.memory.key.cdata}", None)
                self.pager.add(own if place[1] is None else place, weight)
                if self._accelerator is not None:
                    self._accelerator.synchronize()  # unknown streams may have used it before its door was shut
                self.pager.put_away(weight)
                line.update()
        while trained:
            weights = trained.pop(0)
            found = self.pager.find(weights.storage)
            del weights
            if found is not None:
                self.pager.release(self.pager.by_storage[found.memory.key.cdata], found)

    def _put_away(self, weight: Weight[DeviceMemory]) -> None:
        if weight.memory.is_here:  # else it may be on its way
            self.pager.put_away(weight)

    def _movable(self, weights: SharedWeights, place: Place) -> MovableWeights:
        weight = self.pager.find(weights.storage)
        return MovableWeights.of(
            weights,
            place,
            nbytes=weights.storage.nbytes() if weight is None else weight.memory.nbytes,
            waits=weight is not None,
            is_held=weight is None,
            comes_ahead=True,
        )

    def _may_leave(self) -> bool:
        """Return whether weights that have stayed may begin to wait.

        A graph that was captured while they stayed reads them at their addresses, without a sign.
        """
        device = self._accelerator
        return device is None or not (device.is_capturing() or device.may_have_graphs())

    @property
    def _on_drives(self) -> tuple[int, int]:
        return self._tiers.ssd.progress().written_bytes, self._tiers.ssd.disk_bytes

    def close(self) -> None:
        """Bring all weights back, and ask no door any more. Idempotent.

        What does not fit on the device is given to the host's memory, with a warning.

        Raises:
            StorageError: a drive refuses. Who uses such a weight gets an error then.
        """
        if self.pager.is_closed:
            return
        with ExitStack() as closing:  # each of these, whatever another one raises; the last one first
            closing.callback(guard_patches.remove_user, self.pager)
            closing.callback(self.pager.close)
            closing.callback(self.pager.bring_back_all)
            closing.callback(self._remove_windows)


def _why_it_cannot_wait(weights: SharedWeights) -> str | None:
    """Wherever in a model it is; ``None``: it can."""
    if any(map(is_guarded, weights.tensors)):
        return "it waits for another offloader"
    if any(type(tensor) is not nn.Parameter for tensor in weights.tensors):
        return "it is no plain torch.nn.Parameter"
    if any(tensor.is_inference() for tensor in weights.tensors):
        return "it was made in inference mode, where edits are not counted"
    return why_it_stays(weights)
