"""Something of ours in the place of one method of one module, which copies of the module do not take along."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

__all__ = ["MethodPatch"]


class MethodPatch:
    """Stands in for a method of a module until it is removed. Who derives from it says what a call does.

    Not hooks of the module: they are not told of a ``KeyboardInterrupt``, and copies of a module take its hooks with
    them. Copies of this module (``copy.copy``, ``copy.deepcopy``, ``pickle``, ``torch.save``) are copies without us:
    they have what stood there before, or the method of their class. Where a class copies the ``__dict__`` by a
    ``__deepcopy__`` or ``__reduce__`` of its own, its copies get a bound method of theirs, which is a cycle.

    The module is held weakly: a module that holds itself is only freed by the garbage collector, with all its memory.

    Args:
        module: the module, or another object with attributes of its own.
        name: of the method.
        label: what to call the module in an error.
    """

    # No ``__dict__``: ``functools.update_wrapper`` would put what is in it into that of what wraps us.
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
        """Whose method it is; ``None``: the module is gone."""
        return self._module()

    def remove(self) -> None:
        """Give the module its method back. Idempotent. Where somebody has replaced it since, theirs stays."""
        self._is_removed = True
        module = self._module()
        if module is None:
            return
        if module.__dict__.get(self._name) is self:
            earlier = self._earlier
            while isinstance(earlier, MethodPatch) and earlier._is_removed:
                earlier = earlier._earlier  # removed before us, while we stood in front of it
            _put(module.__dict__, self._name, earlier)
        _StateWithoutUs.remove_last(module)

    # -- a callable that looks like what it stands for -----------------------------------------------------------

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What we stand for; this is how ``inspect`` finds the signature."""
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
        """Pickled as what we stand for, so that the copy needs neither us nor the original's weights."""
        if self._earlier is not None:
            return operator.getitem, ((self._earlier,), 0)
        return getattr, (self._module(), self._name)


class _StateWithoutUs(MethodPatch):
    """What copies of a module are made of, as its class gives it, without stand-ins.

    One per module, as long as it has others. Only here can an entry be left out of the copy's ``__dict__``: whatever
    the copy of a stand-in itself were, it would have to hold the copy of the module.
    """

    __slots__ = ()

    def __call__(self) -> Any:
        state = self.__wrapped__()
        if not isinstance(state, dict):
            return state
        state = copy(state)  # it may be the module's own
        for name, value in list(state.items()):
            while isinstance(value, MethodPatch):
                # Elsewhere, somebody keeps it to call it.
                is_at_its_place = value._name == name and value._module() is self._module()
                value = value._earlier if is_at_its_place else value.__wrapped__
                _put(state, name, value)
        return state

    @staticmethod
    def remove_last(module: Any) -> None:
        """Remove the module's one if nothing of ours stands in there any more."""
        # By type: an attribute may be the proxy of something dead, which answers no question.
        ours = [v for v in module.__dict__.values() if issubclass(type(v), MethodPatch) and not v._is_removed]
        if len(ours) == 1 and isinstance(ours[0], _StateWithoutUs):
            ours[0].remove()


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; ``None``: there shall be none of this name."""
    if value is None:
        del attributes[name]
    else:
        attributes[name] = value
