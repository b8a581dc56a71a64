"""Something of ours around the ``forward`` of one module, for those who do not call it themselves."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import nn

__all__ = ["Around", "StandIn"]

Around = Callable[[nn.Module, Any], AbstractContextManager[None] | None]
"""Given a module and the arguments of a call: what to enter around it; ``None``: the call is left alone."""
_F = TypeVar("_F", bound=Callable[..., Any])


def _uncompiled(function: _F) -> _F:
    """The compiler does not look at the function, nor at what it calls."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _stepped_over(function: _F) -> _F:
    """The compiler does not look at the function, but at what it calls."""
    return cast(_F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


class StandIn:
    """Stands in for the ``forward`` of a module until it is removed, or until nobody wants it any more.

    Not hooks of the module: they are not told of a ``KeyboardInterrupt``, after which saved-tensor hooks would stay
    installed, and copies of a module take its hooks with them. Copies of this module (``copy.deepcopy``, ``pickle``,
    ``torch.save``) are copies without us.

    Stays outside of compiled code: of a module that was compiled in place (``module.compile()``), which is called in
    another way, and of one whose ``forward`` is compiled below us (``torch.compile(module)``).

    Args:
        module: held weakly, since it holds us.
        around: a bound method. Its object is held weakly; when it is gone, the module has its own forward again.
    """

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._around: Callable[[], Around | None] = weakref.WeakMethod(around)
        self._module = weakref.ref(module)
        self._name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self._earlier: Callable[..., Any] | None = module.__dict__.get(self._name)
        module.__dict__[self._name] = self  # past setters that a module may have of its own

    @_stepped_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, context = self._look(args, kwargs)
        if context is None:
            return forward(*args, **kwargs)
        with context:
            return forward(*args, **kwargs)

    @_uncompiled
    def _look(self, args: Any, kwargs: Any) -> tuple[Callable[..., Any], _Uncompiled | None]:
        around, module = self._around(), self._module()
        if around is None:
            self.remove()
        context = None if around is None or module is None else around(module, (args, kwargs))
        return self.__wrapped__, None if context is None else _Uncompiled(context)

    def remove(self) -> None:
        """Give the module its forward back. Idempotent. Where somebody has replaced it since, theirs stays."""
        self._around = _nobody
        module = self._module()
        if module is None or module.__dict__.get(self._name) is not self:
            return
        earlier = self._earlier
        while isinstance(earlier, StandIn) and earlier._around is _nobody:
            earlier = earlier._earlier  # removed before us, while we stood in front of it
        if earlier is None:
            del module.__dict__[self._name]
        else:
            module.__dict__[self._name] = earlier

    # -- a callable that looks like what it stands for -----------------------------------------------------------

    @property
    def module(self) -> nn.Module | None:
        """Whose forward it is; ``None``: the module is gone."""
        return self._module()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What we stand for; this is how ``inspect`` finds the signature."""
        if self._earlier is not None:
            return self._earlier
        module = self._module()
        if module is None:
            raise ReferenceError("the module is gone; keep it as long as its forward is called")
        return types.MethodType(type(module).forward, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what we stand for, so that the copy needs neither us nor the original's weights."""
        if self._earlier is not None:
            return operator.getitem, ((self._earlier,), 0)
        return getattr, (self._module(), "forward")


def _nobody() -> None:
    """Who wants something of a stand-in that is removed."""


class _Uncompiled:
    """A context whose own code is not looked at by the compiler, whatever it does with what runs inside."""

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
