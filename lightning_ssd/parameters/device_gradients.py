"""Gradients of a device that wait in host memory and on drives, from their accumulation to the update.

A gradient moves as a weight of a device does (``device_memory.py``): the tensor, its storage and its version stay, and
its memory is given back. It comes back before autograd adds to it (a hook of its parameter, since autograd asks no
class), before an offloaded optimizer uses it, and before any other use, which its class tells of (``guard.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.sent_storages import is_in_other_processes
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.parameters.device_pager import DevicePager, is_in_backward
from lightning_ssd.parameters.device_weights import WeightTiers
from lightning_ssd.parameters.guard.guard_patches import guard_patches
from lightning_ssd.parameters.pager import Place, Unit, Weight
from lightning_ssd.parameters.parameter_hooks import ParameterHooks
from lightning_ssd.parameters.units import is_plain
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["DeviceGradients"]

_log = logging.getLogger(__name__)


class DeviceGradients:
    """The gradients of one process that wait away from its device.

    Note [whose gradient]: its parameter alone may have the tensor, where no class is asked: no graph, no other
    parameter. Else it stays. Objects of Python may have it, since its class tells of each use.

    Args:
        tiers: where they wait.
        min_nbytes: smaller ones stay.
    """

    def __init__(self, tiers: WeightTiers, *, min_nbytes: int) -> None:
        self.pager = GradientPager()
        self.waits: Callable[[torch.Tensor], bool] = lambda parameter: True
        """Whether that of a parameter may wait, asked when its module is registered."""
        self._tiers = tiers
        self._min_nbytes = max(min_nbytes, 1)
        self._process = OwnProcess()
        guard_patches.add_user(self.pager)

    def register_module(self, module: nn.Module) -> None:
        """From now on gradients of the parameters that are trained wait, as far as they may, and no others."""
        self.pager.border()
        found = {id(p): (name, p) for name, p in module.named_parameters() if self._takes(p) and p.requires_grad}
        found = {key: one for key, one in found.items() if self.waits(one[1])}
        for parameter in module.parameters():
            if id(parameter) not in found and self.pager.knows(parameter):
                self.pager.let_stay(parameter)
        new = {key: one for key, one in found.items() if not self.pager.knows(one[1])}
        nbytes, new_nbytes = (sum(p.nbytes for _, p in one.values()) for one in (found, new))
        _, ssd, host, _ = self._tiers
        room = 0 if host is None else max(host.capacity_bytes - host.used_bytes, 0)
        to_drives = max(nbytes - room, 0)
        if to_drives and new_nbytes:
            ssd.reserve(ssd.disk_bytes + min(to_drives, new_nbytes), "gradients")
        if nbytes:
            _log.info(
                "%s of gradients wait between backward and update, in host memory as long as that has room (%s now); "
                "each backward writes %s of them to drives",
                *format_sizes(nbytes, room, to_drives),
            )
        for key, (name, parameter) in new.items():
            registers: list[tuple[Callable[..., RemovableHandle], Callable[..., None]]] = [
                (parameter.register_hook, partial(self.pager.is_coming, key)),
                (parameter.register_post_accumulate_grad_hook, partial(self.accumulated, name)),
            ]
            self.pager.hooks[key] = ParameterHooks(parameter, [register(hook) for register, hook in registers])

    def _takes(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor, self._tiers.device.type) and tensor.nbytes >= self._min_nbytes

    def accumulated(self, name: str, parameter: torch.Tensor) -> None:
        """Autograd has made or changed a gradient."""
        if not self._process.is_here or self.pager.is_closed or self.pager.parameter(id(parameter)) is not parameter:
            return
        gradient = parameter.grad
        if gradient is not None and not self.pager.waits(gradient) and self._may_wait(gradient):
            options = self._tiers.options(self.pager)
            memory = _GradientMemory(id(parameter), gradient, label=f"gradient of {name}", **options)
            self.pager.add(_place_of(id(parameter)), Weight([f"{name}.grad"], memory))
        del gradient
        self.pager.is_accumulated(parameter)

    def _may_wait(self, gradient: torch.Tensor) -> bool:
        if gradient.requires_grad or gradient.is_inference() or not self._takes(gradient):
            return False
        storage = storage_of(gradient)
        return (
            type(gradient) is torch.Tensor
            and storage.nbytes() == gradient.nbytes
            and storage.resizable()
            and not is_in_other_processes(storage)
        )

    def updating(
        self, parameters: Sequence[torch.Tensor], following: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """While an optimizer uses the gradients of these parameters, and then of those that follow."""
        now, later = ([p.grad for p in one if p.grad is not None] for one in (parameters, following))
        return self.pager.updating(now, later)

    def send_out(self) -> None:
        """All leave memory that something has touched, such as clipping; what is gone is forgotten."""
        self.pager.border()

    @property
    def stats(self) -> OffloadStats:
        """Counters of what has moved, where no weights wait."""
        ssd = self._tiers.ssd
        return OffloadStats(
            bytes_written=ssd.progress().written_bytes,
            disk_bytes=ssd.disk_bytes,
            stall_s=self.pager.stall_s,
            stall_backward_s=self.pager.stall_backward_s,
        )

    def close(self) -> None:
        """Later gradients stay on the device, and those that there are come back. Idempotent.

        For which the device has no memory, those are lost, with a warning: who uses one gets an error, and
        ``zero_grad`` forgets them.

        Raises:
            StorageError: a drive refuses. Who uses such a gradient gets an error then.
        """
        if self.pager.is_closed:
            return
        try:
            self.pager.bring_back_all()
        finally:
            self.pager.close()
            guard_patches.remove_user(self.pager)


class _GradientMemory(DeviceMemory):
    """The memory of one gradient.

    Args:
        number: of the parameter whose gradient it is.
        gradient: what autograd has made.
        door: see :class:`DeviceMemory`.
    """

    def __init__(self, number: int, gradient: torch.Tensor, *, door: GradientPager, **options: Any) -> None:
        super().__init__(storage_of(gradient), [gradient], door=door, **options)
        self._number, self._pager = number, door

    @property
    def may_change_unseen(self) -> bool:
        return False  # an update that might is told by updating()

    def _is_held_by_owners_alone(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            parameter = self._pager.parameter(self._number)
            is_its = parameter is not None and parameter.grad is tensor
            return tensor._use_count() == 1 + is_its  # type: ignore[attr-defined,no-any-return]  # in no stub


class GradientPager(DevicePager):
    """Brings gradients of a device back before any code gets to them. Each is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: dict[int, list[Unit[DeviceMemory]]] = {}
        """Units of gradients to which autograd is about to add, by the numbers of their parameters."""
        self.hooks: dict[int, ParameterHooks] = {}
        """All that refers to the parameters whose gradients wait, by their numbers."""

    def knows(self, parameter: torch.Tensor) -> bool:
        return self.parameter(id(parameter)) is parameter

    def parameter(self, number: int) -> torch.Tensor | None:
        """That of a number (``id``) whose gradients wait; ``None``: they do not, or it is gone."""
        hooks = self.hooks.get(number)
        return None if hooks is None else hooks.parameter

    def let_stay(self, parameter: torch.Tensor) -> None:
        """Its gradients wait no more, and the one that there is comes back."""
        unit = self.find_unit(_place_of(id(parameter)))
        if unit is not None:  # all that it has had: Module.to() takes the gradient away meanwhile
            for weight in [weight for weight in unit.weights if weight.memory.key.alive()]:
                self.release(unit, weight)
        self.hooks.pop(id(parameter)).remove()

    def close(self) -> None:
        super().close()
        if not self.by_storage:  # else autograd must not add to what is lost
            for hooks in self.hooks.values():
                hooks.remove()
            self.hooks.clear()

    def is_coming(self, number: int, added: torch.Tensor) -> None:
        """Autograd is about to add to the gradient of a parameter, if there is one: bring it in."""
        parameter = self.parameter(number)
        gradient = None if parameter is None else parameter.grad
        found = None if gradient is None else self._weight_of(gradient)
        if found is None:
            return
        unit, weight = found
        if self.is_closed:
            self._hold(unit, weight)
            return
        self._coming.setdefault(number, []).append(unit)
        self.enter(unit)

    def is_accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has added to it: it leaves."""
        units = self._coming.pop(id(parameter), [])
        for unit in units:
            self.leave(unit)
        gradient = parameter.grad
        found = None if gradient is None else self._weight_of(gradient)
        if found is not None:
            units.append(found[0])
        del gradient  # else it would count
        if units:
            self._in_backward = None
            self._let_go(list(dict.fromkeys(units)), except_for=[] if self._ahead is None else [self._ahead])

    def _hold(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        """Autograd, and most others, write to it: not while a copy reads what is to be written to a tier."""
        if (ended := weight.memory.writing) is not None:
            ended.wait()
        super()._hold(unit, weight)

    def border(self) -> None:
        if is_in_backward():
            return
        for number in [number for number, hooks in self.hooks.items() if hooks.parameter is None]:
            del self.hooks[number]
        self._coming.clear()
        super().border()

    def _will_be_used_in_update(self, weight: Weight[DeviceMemory]) -> None:
        """Few optimizers write to gradients: they are compared, so that the others cost no write."""
        weight.memory.expose()

    def _move_to_host(self, unit: Unit[DeviceMemory], weight: Weight[DeviceMemory]) -> None:
        """A gradient has to be where its parameter is: it stays away."""

    def _too_many(self, num: int) -> str:
        return (
            f"{num} gradients do not fit on the device together with what is there, and are lost: who uses one gets an "
            "error, and zero_grad() forgets them"
        )


def _place_of(number: int) -> Place:
    """The unit of the gradients of one parameter."""
    return f"gradient of parameter {number}", None
