"""Replace one method of one module by an object of this package, without replacing it in copies of the module."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

__all__ = ["MethodPatch"]


class MethodPatch:
    """Replaces a method of a module until it is removed. Subclasses define what a call does.

    Hooks of the module would not do: they do not run after a ``KeyboardInterrupt``, and copies of a module keep its
    hooks. Copies of the patched module (``copy.copy``, ``copy.deepcopy``, ``pickle``, ``torch.save``) are unpatched:
    they have the attribute that was there before, or the method of their class. A class whose own ``__deepcopy__`` or
    ``__reduce__`` copies the ``__dict__`` is an exception. Its copies get a bound method of theirs, which is a cycle.

    The patch holds the module weakly, because only the garbage collector would free a module in a cycle.

    Args:
        module: the module, or another object with attributes of its own.
        name: name of the method.
        label: name of the module in errors.
    """

    # No ``__dict__``: ``functools.update_wrapper`` would copy its entries into the ``__dict__`` of a wrapper.
    __slots__ = ("__weakref__", "_earlier", "_is_removed", "_label", "_module", "_name")

    def __init__(self, module: Any, name: str = "forward", *, label: str = "the module") -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._label = label
        self._earlier: Callable[..., Any] | None = module.__dict__.get(name)
        self._is_removed = False
        module.__dict__[name] = self  # past setters that a module may have of its own
        if not isinstance(module.__dict__.get("__getstate__"), _StateWithoutUs):
            _StateWithoutUs(module, "__getstate__", label=label)

    @property
    def module(self) -> Any | None:
        """The patched module; ``None``: it is gone."""
        return self._module()

    def remove(self) -> None:
        """Give the module its method back. Idempotent. A method that the program has set since stays."""
        self._is_removed = True
        module = self._module()
        if module is None:
            return
        if module.__dict__.get(self._name) is self:
            earlier = self._earlier
            while isinstance(earlier, MethodPatch) and earlier._is_removed:
                earlier = earlier._earlier  # removed before this one, which had replaced it
            _put(module.__dict__, self._name, earlier)
        _StateWithoutUs.remove_last(module)

    # -- a callable that looks like the replaced method ----------------------------------------------------------

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced method. ``inspect`` finds the signature by this name."""
        if self._earlier is not None:
            return self._earlier
        module = self._module()
        if module is None:
            raise ReferenceError(f"{self._label} is gone; keep the module as long as its {self._name} is called")
        # Looked up each time: FSDP gives modules another class after they are built.
        return types.MethodType(getattr(type(module), self._name), module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the replaced method, so that the copy needs neither this class nor the original's weights."""
        if self._earlier is not None:
            return operator.getitem, ((self._earlier,), 0)
        return getattr, (self._module(), self._name)


class _StateWithoutUs(MethodPatch):
    """Replaces the ``__getstate__`` of a module, so that the state for copies has no patches in it.

    A patched module has one of these. Only the state can leave an entry out of the copy's ``__dict__``: a copied patch
    would have to hold the copied module.
    """

    __slots__ = ()

    def __call__(self) -> Any:
        state = self.__wrapped__()
        if not isinstance(state, dict):
            return state
        state = copy(state)  # it may be the module's own
        for name, value in list(state.items()):
            while isinstance(value, MethodPatch):
                # Under another name or in another module, the program keeps it to call it.
                is_at_its_place = value._name == name and value._module() is self._module()
                value = value._earlier if is_at_its_place else value.__wrapped__
                _put(state, name, value)
        return state

    @staticmethod
    def remove_last(module: Any) -> None:
        """Remove the module's ``__getstate__`` patch if no other patch is left there."""
        # By type: an attribute may be a weak proxy of a dead object, on which isinstance() would raise.
        ours = [v for v in module.__dict__.values() if issubclass(type(v), MethodPatch) and not v._is_removed]
        if len(ours) == 1 and isinstance(ours[0], _StateWithoutUs):
            ours[0].remove()


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; ``None``: delete it."""
    if value is None:
        del attributes[name]
    else:
        attributes[name] = value
