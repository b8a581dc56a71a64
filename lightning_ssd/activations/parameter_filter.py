"""Which storages are parameters or buffers, and so never move, whatever view of them autograd saves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from lightning_ssd.common.dtensor import ShardedParameter, local_of, sharded_of
from lightning_ssd.common.tensors import PLAIN_TYPES, StorageKey, storage_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.parameters.guard.guard import is_guarded

__all__ = ["ParameterStorages", "device_of"]

_NUM_FRESH = 64
"""Passes between two walks through all modules. Leaves are recognised as they come; a buffer that has been replaced
meanwhile counts as an activation until the next walk."""


def device_of(modules: Iterable[torch.nn.Module]) -> torch.device:
    """Where their first parameter is; the CPU without one.

    Raises:
        ConfigError: one is no module. Users come here first, some with ``model.parameters()``.
    """
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"a {type(module).__name__} is no module; give a torch.nn.Module, for example the model")
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")


class ParameterStorages:
    """Known by storage, not by type: ``nn.Linear`` saves ``weight.t()``, which is a plain tensor.

    :attr:`keys` is read on the hot path without a lock; single operations on a ``dict`` are atomic.
    """

    def __init__(self) -> None:
        self.keys: dict[int, StorageKey] = {}
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.ungathered: list[weakref.ref[Any]] = []
        """FSDP2's objects for parameters that it has not gathered yet."""
        self._num_to_walk = 0
        self._recognised: list[int] = []
        """Storages that have come by :meth:`recognise` since the last walk: inputs that want gradients come and go."""

    def register_module(self, module: torch.nn.Module) -> None:
        """Take this module's parameters and buffers in. The module is held weakly."""
        self._modules[id(module)] = weakref.ref(module)
        self._take(module)
        self._num_to_walk = 0

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Registered modules that are alive."""
        return [module for reference in list(self._modules.values()) if (module := reference()) is not None]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, each storage once."""
        held = [key.resolve() for key in list(self.keys.values())]
        return sum(storage.nbytes() for storage in held if storage is not None)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that there are now. Only where no backward runs: it is autograd that sets them."""
        parameters = {id(parameter): parameter for module in self.modules for parameter in module.parameters()}
        return self._bytes_of([p.grad for p in parameters.values() if p.grad is not None])

    def gradient_bytes_on(self, device: torch.device) -> int:
        """Bytes of gradients of one device's parameters: in backward, for the thread that computes their gradients."""
        parameters = {id(p): p for module in self.modules for p in module.parameters() if p.device == device}
        return self._bytes_of([p.grad for p in parameters.values() if p.grad is not None])

    @staticmethod
    def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
        gradients = [local_of(tensor) for tensor in tensors]
        parts = [(g._indices(), g._values()) if g.layout is torch.sparse_coo else (g,) for g in gradients]
        return sum(part.numel() * part.element_size() for tensors in parts for part in tensors)

    def refresh(self, *, now: bool = False) -> None:
        """Ask the modules again now and then, since they change, and forget storages that are gone.

        A pass begins. Modules with parameters that FSDP2 gathers are asked each time. A walk takes milliseconds where
        there are many.

        Args:
            now: in any case, because passes without hooks have gone by, or the memory of weights may have been
                exchanged.
        """
        if self._num_to_walk and not now:
            self._num_to_walk -= 1
            self._recognised = self._forget_dead(self._recognised)
            return
        self._recognised = []
        self._forget_dead(list(self.keys))  # a copy: other threads may be packing
        gathered: list[ShardedParameter] = []
        for number, reference in list(self._modules.items()):
            module = reference()
            if module is None:
                self._modules.pop(number, None)
                continue
            self._take(module)
            gathered += sharded_of(module)
        self._num_to_walk = 0 if gathered else _NUM_FRESH - 1
        self._take_gathered(gathered)

    def _forget_dead(self, storages: list[int]) -> list[int]:
        """Forget those of these storages that are gone; return the others."""
        alive = []
        for cdata in storages:
            key = self.keys.get(cdata)
            if key is not None and key.alive():
                alive.append(cdata)
            else:
                self.keys.pop(cdata, None)
        return alive

    def recognise(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether ``tensor`` is a parameter that was not registered, or a view of one; then it is known from now on.

        Leaves that want gradients count: they stay alive anyway. So does what FSDP2 has gathered for the first time
        since the last :meth:`refresh`.
        """
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
            self._add(storage)
            self._recognised.append(storage._cdata)
            return True
        if self.ungathered:
            known = [one for reference in self.ungathered if (one := reference()) is not None]
            self._take_gathered([ShardedParameter(one) for one in known])
            return storage._cdata in self.keys
        return False

    def _take(self, module: torch.nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            part = local_of(tensor)
            if (type(part) in PLAIN_TYPES or is_guarded(part)) and part.layout is torch.strided:
                self._add(storage_of(part))

    def _take_gathered(self, parameters: list[ShardedParameter]) -> None:
        """Their storages last from the first all-gather on; whatever has had none is asked again."""
        ungathered = []
        for parameter in parameters:
            tensors = parameter.gathered()
            for tensor in tensors:
                self._add(tensor.untyped_storage())
            if not tensors:
                ungathered.append(weakref.ref(parameter.fsdp_param))
        self.ungathered = ungathered

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.keys:
            # The weak reference keeps the address from naming another storage later.
            self.keys[storage._cdata] = StorageKey(storage)
