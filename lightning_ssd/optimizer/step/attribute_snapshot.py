"""An optimizer's own attributes at one moment: told apart from later ones, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import address_of
from lightning_ssd.common.tensors import PLAIN_TYPES
from lightning_ssd.optimizer.step.types import CoupledError

__all__ = ["AttributeSnapshot", "same"]


_NOT_ITS_OWN = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "step",  # schedulers put a counting function there
        "grad_scale",
        "found_inf",
        "_opt_called",
        "_step_count",
        "_need_device_dtype_check_for_fused",
        "_warned_capturable_if_run_uncaptured",
        "_step_supports_amp_scaling",
        "_zero_grad_profile_name",
    }
)
"""Attributes that PyTorch or we change."""
_HOOKS = "_optimizer_"
_MAX_NUMEL = 4_096
"""Larger tensors are not copied: an edit is seen by their version, and cannot be taken back."""
_MAX_ITEMS = 4_096
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONSTANT = (type, FunctionType, BuiltinFunctionType, Enum)


class AttributeSnapshot:
    """The values of an optimizer's own attributes at one moment.

    Numbers, strings, tensors, containers of these, and an object of numbers. What cannot be compared is left alone,
    and so is what the optimizer remembers by parameter in a dictionary: that is a state like others.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        mine = {name: value for name, value in vars(optimizer).items() if _is_own(name)}
        # Where parameters are. An attribute may be a view of all of them.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._addresses = set(map(address_of, parameters if any(map(_may_have_tensors, mine.values())) else ())) - {0}
        self._values = {name: self._kept(value, 0) for name, value in mine.items()}

    def changed(self, later: AttributeSnapshot) -> list[str]:
        """The names of those that are no longer what they were."""
        names = self._values.keys() | later._values.keys()
        return sorted(name for name in names if not _alike(self._values.get(name), later._values.get(name)))

    def restore(self) -> None:
        """Put the values back, into the same objects.

        Raises:
            ConfigError: a large tensor was edited.
        """
        mine = vars(self._optimizer)
        for name in self.changed(AttributeSnapshot(self._optimizer)):
            kept = self._values.get(name)
            if kept is None:
                del mine[name]
            else:
                mine[name] = kept.put_back()

    def _kept(self, value: Any, depth: int) -> _Kept:
        if isinstance(value, _PLAIN):
            return _Kept(value)
        if isinstance(value, torch.Tensor):
            return self._kept_tensor(value)
        if not isinstance(value, list | tuple | deque | set | dict):
            return _KeptObject(value) if _is_counter(value) else _Opaque(value)
        if depth > 8 or len(value) > _MAX_ITEMS:
            return _Opaque(value)
        if isinstance(value, dict):
            if any(isinstance(key, torch.Tensor) for key in value):
                return _Opaque(value)
            return _KeptDict(value, {key: self._kept(item, depth + 1) for key, item in value.items()})
        if isinstance(value, set):
            return _KeptSet(value)
        return _KeptItems(value, [self._kept(item, depth + 1) for item in value])

    def _kept_tensor(self, value: torch.Tensor) -> _Kept:
        if value.requires_grad or value.layout != torch.strided:
            return _Opaque(value)  # a parameter: it is to change
        if type(value) not in PLAIN_TYPES:
            return _LargeTensor(value)
        if address_of(value) in self._addresses:
            return _Opaque(value)
        return _LargeTensor(value) if value.numel() > _MAX_NUMEL else _SmallTensor(value)


class _Kept:
    """A value that does not change itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def put_back(self) -> Any:
        """The very object, with what it held."""
        return self.value

    def is_like(self, other: Any) -> bool:
        """Whether the other one, of the same class, held the same."""
        return type(self.value) is type(other.value) and same(self.value, other.value)


class _Opaque(_Kept):
    """What cannot be compared."""


class _SmallTensor(_Kept):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value)
        self.content = value.detach().clone()

    def put_back(self) -> Any:
        if not same(self.value.detach(), self.content):
            with torch.no_grad():
                self.value.copy_(self.content)
        return self.value

    def is_like(self, other: Any) -> bool:
        return same(self.content, other.content)


class _LargeTensor(_Kept):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value)
        self.version = None if value.is_inference() else value._version

    def put_back(self) -> Any:
        if not self.is_like(_LargeTensor(self.value)):
            raise CoupledError(
                f"this optimizer edits a tensor of shape {tuple(self.value.shape)} in an attribute of its own: it may "
                "couple its parameters"
            )
        return self.value

    def is_like(self, other: Any) -> bool:
        return self.value is other.value and self.version == other.version


class _KeptItems(_Kept):
    """A list, a deque, or a tuple."""

    def __init__(self, value: Any, items: Sequence[_Kept]) -> None:
        super().__init__(value)
        self.items = items

    def put_back(self) -> Any:
        items = [item.put_back() for item in self.items]
        if isinstance(self.value, list):
            self.value[:] = items
        elif isinstance(self.value, deque):
            self.value.clear()
            self.value.extend(items)
        return self.value

    def is_like(self, other: Any) -> bool:
        return len(self.items) == len(other.items) and all(map(_alike, self.items, other.items))


class _KeptDict(_Kept):
    def __init__(self, value: dict[Any, Any], items: dict[Any, _Kept]) -> None:
        super().__init__(value)
        self.items = items

    def put_back(self) -> Any:
        items = {key: item.put_back() for key, item in self.items.items()}
        self.value.clear()
        self.value.update(items)
        return self.value

    def is_like(self, other: Any) -> bool:
        return self.items.keys() == other.items.keys() and all(
            _alike(item, other.items[key]) for key, item in self.items.items()
        )


class _KeptSet(_Kept):
    def __init__(self, value: set[Any]) -> None:
        super().__init__(value)
        self.content = set(value)

    def put_back(self) -> Any:
        self.value.clear()
        self.value.update(self.content)
        return self.value

    def is_like(self, other: Any) -> bool:
        return bool(self.content == other.content)


class _KeptObject(_Kept):
    """An object of numbers and strings, as a counter is one."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.items = dict(vars(value))

    def put_back(self) -> Any:
        own = vars(self.value)
        for name in own.keys() - self.items.keys():
            del own[name]
        own.update(self.items)
        return self.value

    def is_like(self, other: Any) -> bool:
        return self.items.keys() == other.items.keys() and all(
            same(item, other.items[name]) for name, item in self.items.items()
        )


def _is_counter(value: Any) -> bool:
    """Whether an object has nothing but what cannot change itself.

    Of one with a list, a lock or a dictionary by parameter (a queue, a meter, an event that a thread waits for) the
    numbers alone must not be put back, and what it keeps must not be lost with it.
    """
    if isinstance(value, (*_CONSTANT, ModuleType, nn.Module)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return all(map(_is_constant, vars(value).values()))


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else isinstance(value, (*_PLAIN, *_CONSTANT))


def _alike(one: _Kept | None, other: _Kept | None) -> bool:
    if isinstance(one, _Opaque) or isinstance(other, _Opaque):
        return True
    return type(one) is type(other) and (one is None or one.is_like(other))


def same(one: Any, other: Any) -> bool:
    """Whether two options or attributes are the same value; not a number is as good as itself."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, float) and isinstance(other, float) and one != one and other != other:
        return True
    return bool(one == other)


def _is_own(name: str) -> bool:
    return name not in _NOT_ITS_OWN and not name.startswith(_HOOKS)


def _may_have_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple | deque | dict)
