"""Enter a context around each ``forward`` of one module that the user's code calls."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lightning_ssd.common.method_patch import MethodPatch

__all__ = ["Around", "ForwardContextPatch"]

Around = Callable[[nn.Module, Any], AbstractContextManager[None] | None]
"""Returns the context for a call, given the module and the arguments; ``None``: no context."""
_F = TypeVar("_F", bound=Callable[..., Any])


def _uncompiled(function: _F) -> _F:
    """Keep the compiler out of a function and of all that it calls."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _stepped_over(function: _F) -> _F:
    """Keep the compiler out of a function, but not out of the functions that it calls."""
    return cast(_F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


class ForwardContextPatch(MethodPatch):
    """Enters a context around each call of a module's ``forward``, until it is removed or its owner is dropped.

    The context is outside of compiled code: of a module that was compiled in place (``module.compile()``), which has
    another entry, and of one whose ``forward`` is compiled (``torch.compile(module)``).

    Args:
        module: the module, held weakly, because it holds this object.
        around: a bound method. Its object is held weakly; when it is dropped, the module gets its own forward back.
    """

    __slots__ = ("_function", "_owner")

    def __init__(self, module: nn.Module, around: Around) -> None:
        # Not a WeakMethod, which runs Python code when the object dies: a KeyboardInterrupt in it would be lost.
        method = cast(types.MethodType, around)
        self._owner, self._function = weakref.ref(method.__self__), method.__func__
        super().__init__(module, "forward" if module._compiled_call_impl is None else "_compiled_call_impl")

    @_stepped_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, context = self._look(args, kwargs)
        if context is None:
            return forward(*args, **kwargs)
        with context:
            return forward(*args, **kwargs)

    @_uncompiled
    def _look(self, args: Any, kwargs: Any) -> tuple[Callable[..., Any], _Uncompiled | None]:
        owner, module = None if self._is_removed else self._owner(), self._module()
        if owner is None:
            self.remove()
        context = None if owner is None or module is None else self._function(owner, module, (args, kwargs))
        return self.__wrapped__, None if context is None else _Uncompiled(context)


class _Uncompiled:
    """A context that keeps the compiler out of its own code, but not out of the code that runs inside."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context

    @_uncompiled
    def __enter__(self) -> None:
        self._context.__enter__()

    @_uncompiled
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(exc_type, exc, traceback)
